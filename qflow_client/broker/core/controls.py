"""The state of the whole broker that an operator or an alarm changes at run time. Sessions and channels read it."""

from __future__ import annotations

from qflow_client.flow import FlowController, StopResume, ThresholdLimiter

__all__ = ["Controls"]


class Controls:
    """The controllers and switches of the operator, the alarms, and the counts of sanctions."""

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

    #: Name of the controller that blocks channels for the operator, and of the alarm that `Broker.block` raises.
    OPERATOR = "operator"
    ALARM = "alarm"

    def __init__(self, *, watches_publishes: bool = False) -> None:
        self.operator = FlowController(ThresholdLimiter(StopResume()), name=self.OPERATOR)
        # Whether the operator has stopped all producers. A channel that becomes a producer is then blocked (D5).
        self.producers_stopped = False
        # Blocks channels during an alarm, if the dialect informs clients of alarms by Channel.Flow.
        self.alarm = FlowController(ThresholdLimiter(StopResume()), name=self.ALARM)
        # The alarms that block all connections: the name and the reason of each.
        self.alarms: dict[str, str] = {}
        self.withhold_confirms = False
        self.nack_publishes = False
        # Whether channels check every published message, even if its queues need no check.
        self.watches_publishes = watches_publishes
        # Whether the settings require a check of every message, and whether rate limits require one.
        self._watches_always = watches_publishes
        self._has_rates = False
        # For each kind of sanction, how often it was used against clients that ignore Channel.Flow (D8).
        self.sanctions = {"tarpits": 0, "channels_closed": 0, "connections_closed": 0}

    def refuse_publishes(self, on: bool) -> None:
        self.nack_publishes = on
        self._watch()

    def limit_rates(self, on: bool) -> None:
        """Record whether there are rate limits."""
        self._has_rates = on
        self._watch()

    def _watch(self) -> None:
        self.watches_publishes = self.nack_publishes or self._has_rates or self._watches_always
