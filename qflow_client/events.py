"""What a producer tells about its flow.

All times, also those of the holds, are seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from qflow_client.flow import Hold

__all__ = ["FlowEvent", "FlowEventKind", "FlowState", "HoldKind"]


class HoldKind(StrEnum):
    """Why a producer is flowed. Each is one dialect in which a broker, or somebody else, can say stop."""

    #: ``Channel.Flow(active=False)``.
    CHANNEL_FLOW = "channel_flow"
    #: ``Connection.Blocked``.
    CONNECTION_BLOCKED = "connection_blocked"
    #: The window is full: the broker's confirms are late, or withheld.
    CAPACITY = "capacity"
    #: The socket takes no more bytes.
    TRANSPORT = "transport"
    #: The broker has refused messages for want of room.
    REFUSED = "refused"
    #: There is no connection, or what an earlier one has left has to leave first; or the producer is closed, which
    #: `FlowState.closed` tells.
    DISCONNECTED = "disconnected"
    #: The producer's own rate limit.
    RATE = "rate"
    #: `pause`, or the manager's `stop_all`.
    PAUSED = "paused"
    #: What waits in the outbox goes first, or it is full.
    OUTBOX = "outbox"


class FlowEventKind(StrEnum):
    """What happened."""

    #: The first hold was raised: the producer is flowed.
    FLOWED = "flowed"
    #: One more hold was raised.
    HOLD_RAISED = "hold_raised"
    #: A hold was lifted, and there are others.
    HOLD_LIFTED = "hold_lifted"
    #: The last hold was lifted: the producer is unflowed.
    UNFLOWED = "unflowed"
    #: The producer was closed under this hold. Nobody lifted it: the broker, say, may still block.
    CLOSED = "closed"
    #: Sends are still waiting; comes once for all of them every `flow_control_wait_notify_period`.
    WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class FlowEvent:
    """One change of a producer's flow, or a notice that it lasts.

    Attributes:
        kind: what happened.
        producer: the producer's name.
        hold: the hold that was raised or lifted; for a notice, the oldest one, if there is any.
        holds: the holds that are on the producer now, the oldest first, each with when it was raised, in seconds since
            1970.
        at: when it happened, in seconds since 1970.
        since: when the hold was raised, or, for a notice, when the send that has waited longest began to; in seconds
            since 1970.
        seconds: how long that has lasted.
        waiting: for a notice, how many sends wait; otherwise 0.
        admitted: how many messages it has admitted so far.
        unsettled: how many of them are unsettled.
        capacity: the most that may be.
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
        holds: the holds that are on it, the oldest first, each with when it was raised, in seconds since 1970.
        since: when it became flowed, in seconds since 1970; ``None`` while it is not.
        times_flowed: how often it became flowed.
        seconds_flowed: seconds held so far, by hold kind, the present holds included.
        closed: why it takes no more messages and never will, be it `close`, which is no flow control, or a lost
            connection, by which it then stays flowed (``disconnected``). ``None`` while it is not closed.
    """

    holds: tuple[Hold, ...]
    since: float | None
    times_flowed: int
    seconds_flowed: Mapping[str, float]
    closed: str | None = None

    @property
    def flowed(self) -> bool:
        """Whether the producer must not publish now."""
        return bool(self.holds)
