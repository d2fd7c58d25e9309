"""What an operator has set for the whole broker at run time: holds and switches that sessions and channels read."""

from __future__ import annotations

from qflow_client.flow import FlowController, StopResume, ThresholdLimiter

__all__ = ["Controls"]


class Controls:
    """Holds and switches that sessions and channels look at.

    Args:
        watches_publishes: whether every publish is to be looked at.
    """

    __slots__ = (
        "_has_rates",
        "_watches_always",
        "alarm",
        "alarms",
        "nack_publishes",
        "operator",
        "producers_stopped",
        "sanctions",
        "watches_publishes",
        "withhold_confirms",
    )

    #: What blocks a channel, or a connection, in the name of the operator, as queues do in theirs.
    OPERATOR = "operator"
    #: The same in the name of an alarm.
    ALARM = "alarm"

    def __init__(self, *, watches_publishes: bool = False) -> None:
        self.operator = FlowController(ThresholdLimiter(StopResume()), name=self.OPERATOR)
        # Whether channels that turn out to be producers are flowed at once (D5).
        self.producers_stopped = False
        # What blocks channels because of an alarm, where that is how clients learn of one.
        self.alarm = FlowController(ThresholdLimiter(StopResume()), name=self.ALARM)
        # Why connections are blocked, by what blocks them.
        self.alarms: dict[str, str] = {}
        # Whether confirms stay with the broker.
        self.withhold_confirms = False
        # Whether every publish is refused.
        self.nack_publishes = False
        # Whether more is to be done about every publish than its queues ask for, and why.
        self.watches_publishes = watches_publishes
        self._watches_always = watches_publishes
        self._has_rates = False
        # What was done about clients that do not listen, and how often (D8).
        self.sanctions = {"tarpits": 0, "channels_closed": 0, "connections_closed": 0}

    def refuse_publishes(self, on: bool) -> None:
        """Refuse every publish, or no longer."""
        self.nack_publishes = on
        self._watch()

    def limit_rates(self, on: bool) -> None:
        """There are rate limits, or no longer."""
        self._has_rates = on
        self._watch()

    def _watch(self) -> None:
        self.watches_publishes = self.nack_publishes or self._has_rates or self._watches_always
