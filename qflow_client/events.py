"""The events and states of a producer's flow.

All times, including those of the holds, are seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from qflow_client.flow import Hold

__all__ = ["FlowEvent", "FlowEventKind", "FlowState", "HoldKind"]


class HoldKind(StrEnum):
    """Why a producer is flowed. Each kind is one way in which a broker, or another party, can stop it."""

    #: ``Channel.Flow(active=False)``.
    CHANNEL_FLOW = "channel_flow"
    #: ``Connection.Blocked``.
    CONNECTION_BLOCKED = "connection_blocked"
    #: The window is full: the broker's confirms are late, or withheld.
    CAPACITY = "capacity"
    #: The socket accepts no more bytes.
    TRANSPORT = "transport"
    #: The broker has refused messages because it has no room.
    REFUSED = "refused"
    #: There is no connection, or messages of an earlier one have to be sent first. Or the producer is closed, which
    #: `FlowState.closed` shows.
    DISCONNECTED = "disconnected"
    #: The producer's own rate limit.
    RATE = "rate"
    #: `pause`, or `stop_all` of the manager.
    PAUSED = "paused"
    #: Messages in the outbox are sent first, or the outbox is full.
    OUTBOX = "outbox"


class FlowEventKind(StrEnum):
    """What happened in a flow event."""

    #: The first hold was raised: the producer is flowed.
    FLOWED = "flowed"
    #: One more hold was raised.
    HOLD_RAISED = "hold_raised"
    #: A hold was lifted, and there are other holds.
    HOLD_LIFTED = "hold_lifted"
    #: The last hold was lifted: the producer is unflowed.
    UNFLOWED = "unflowed"
    #: The producer was closed during this hold. The hold was not lifted: for example, the broker may still block.
    CLOSED = "closed"
    #: Sends are still waiting. There is one such event for all of them every `flow_control_wait_notify_period`.
    WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class FlowEvent:
    """One change of a producer's flow, or a notice that calls of `send` still wait.

    Attributes:
        kind: what happened.
        producer: the producer's name.
        hold: the hold that was raised or lifted; for a notice, the oldest hold, if there is one.
        holds: the present holds on the producer, the oldest first. The times when they were raised are in seconds since
            1970.
        at: when it happened, in seconds since 1970.
        since: when the hold was raised; for a notice, when the longest wait of a send began; in seconds since 1970.
        seconds: how long the hold or the wait has lasted.
        waiting: for a notice, how many calls of `send` wait; otherwise 0.
        admitted: how many messages the producer has admitted so far.
        unsettled: how many admitted messages are unsettled.
        capacity: the limit of unsettled messages.
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
        holds: the holds on the producer, the oldest first. The times when they were raised are in seconds since 1970.
        since: when it was blocked (flowed), in seconds since 1970; ``None`` if it is not blocked.
        times_flowed: how often it was blocked (flowed).
        seconds_flowed: seconds held so far, by hold kind, including the present holds.
        closed: why it takes no more messages and never will; ``None`` while it is not closed. The reason is `close`,
            which is not flow control, or a lost connection, after which it stays flowed (``disconnected``).
    """

    holds: tuple[Hold, ...]
    since: float | None
    times_flowed: int
    seconds_flowed: Mapping[str, float]
    closed: str | None = None

    @property
    def flowed(self) -> bool:
        """Whether the producer is not allowed to publish now."""
        return bool(self.holds)
