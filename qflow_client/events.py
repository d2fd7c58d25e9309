"""The flow events and flow states of producers.

All times, including those of the holds, are seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from qflow_client.flow import Hold

__all__ = ["FlowEvent", "FlowEventKind", "FlowState", "HoldKind"]


class HoldKind(StrEnum):
    """The reason why a producer is blocked (flowed)."""

    #: The broker has sent ``Channel.Flow(active=False)``.
    CHANNEL_FLOW = "channel_flow"
    #: The broker has sent ``Connection.Blocked``.
    CONNECTION_BLOCKED = "connection_blocked"
    #: The window is full, because confirms are late or withheld; or too many receipts wait for a slow `on_delivery`.
    CAPACITY = "capacity"
    #: More than `max_unwritten_bytes` bytes wait for the socket.
    TRANSPORT = "transport"
    #: The broker has refused messages because it has no room.
    REFUSED = "refused"
    #: There is no connection, the producer could not reconnect, or messages of an earlier connection are sent first.
    DISCONNECTED = "disconnected"
    #: The producer has sent as many messages as the setting `rate` allows now.
    RATE = "rate"
    #: `pause` of the producer or `stop_all` of its manager was called.
    PAUSED = "paused"
    #: Messages that wait in the outbox must be sent first, or the outbox is full.
    OUTBOX = "outbox"


class FlowEventKind(StrEnum):
    """The kind of a flow event."""

    #: The first hold was raised, so the producer is flowed.
    FLOWED = "flowed"
    #: A further hold was raised.
    HOLD_RAISED = "hold_raised"
    #: A hold was lifted, but there are other holds.
    HOLD_LIFTED = "hold_lifted"
    #: The last hold was lifted, so the producer is unflowed.
    UNFLOWED = "unflowed"
    #: The hold has ended because the producer was closed, even if the broker still blocks the connection.
    CLOSED = "closed"
    #: Calls of `send` still wait. Every `flow_control_wait_notify_period` seconds, all waiting calls share one notice.
    WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class FlowEvent:
    """One change of a producer's flow, or a notice that calls of `send` still wait.

    Attributes:
        kind: kind of the event.
        producer: name of the producer.
        hold: the hold that was raised or lifted. For a notice (``waiting``), the oldest hold, or ``None``.
        holds: the present holds on the producer, oldest first, with times in seconds since 1970.
        at: time of the event in seconds since 1970.
        since: time in seconds since 1970 when the hold was raised. For a notice, the start of the longest wait.
        seconds: seconds from `since` to `at`.
        waiting: for a notice, the number of waiting calls of `send`. Otherwise 0.
        admitted: number of messages that have entered the window so far. Messages that wait on disk do not count.
        unsettled: number of messages in the window.
        capacity: maximum number of messages in the window.
    """

    kind: FlowEventKind
    producer: str
    hold: Hold | None
    holds: tuple[Hold, ...]
    at: float
    since: float
    seconds: float
    waiting: int = 0
    admitted: int = 0
    unsettled: int = 0
    capacity: int = 0

    @property
    def flowed(self) -> bool:
        """Whether the producer is flowed after this event."""
        return bool(self.holds)

    def __str__(self) -> str:
        why = f": {self.hold}" if self.hold is not None else ""
        lasted = f" after {self.seconds:.3g} s" if self.seconds else ""
        return f"{self.producer}: {self.kind}{why}{lasted}"


@dataclass(frozen=True, slots=True)
class FlowState:
    """A producer's flow at one moment.

    Attributes:
        holds: the holds on the producer, oldest first, with times in seconds since 1970.
        since: time in seconds since 1970 when the producer became blocked (flowed); ``None`` if it is not blocked.
        times_flowed: how often the producer was blocked (flowed) so far.
        seconds_flowed: seconds of holds so far, including the present holds, for each hold kind.
        closed: reason why the producer accepts no more messages; ``None`` if it is not closed. If the producer closed
            because it could not reconnect, it stays flowed (hold kind ``disconnected``).
    """

    holds: tuple[Hold, ...]
    since: float | None
    times_flowed: int
    seconds_flowed: Mapping[str, float]
    closed: str | None = None

    @property
    def flowed(self) -> bool:
        """Whether the producer is blocked (flowed), so that it must not publish now."""
        return bool(self.holds)
