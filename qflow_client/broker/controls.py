"""What an operator has set for the whole broker at run time."""

from __future__ import annotations

from qflow_client.flow import FlowController, StopResume, ThresholdLimiter

__all__ = ["Controls"]


class Controls:
    """Holds and switches that sessions and channels look at."""

    __slots__ = ("blocked", "nack_publishes", "operator", "producers_stopped", "withhold_confirms")

    #: What blocks a channel in the name of the operator, as queues do in theirs.
    OPERATOR = "operator"

    def __init__(self) -> None:
        self.operator = FlowController(ThresholdLimiter(StopResume()), name=self.OPERATOR)
        # Whether channels that turn out to be producers are flowed at once (D5).
        self.producers_stopped = False
        # Why connections are blocked; None while they are not.
        self.blocked: str | None = None
        # Whether confirms stay with the broker.
        self.withhold_confirms = False
        # Whether every publish is refused.
        self.nack_publishes = False
