"""`ChannelFlow` has the flow state of one channel, and the channel's part of the connection's backlog, sans-I/O.

A `ChannelFlow` is a `FlowSource`: the flow controllers of queues, rate limits, the operator, alarms and the backlog
block and unblock it. When the first of them blocks the channel, the client gets ``Channel.Flow(active=false)``. When
none of them blocks it any more, the client gets ``active=true`` (J3 J4). A blocked channel is also called flowed.

A message is owed (D7) if it waits for room, if its confirm is held, or if `is_flowed_by_others` was true when it came.
The owed messages of all channels are the backlog of the connection. The `Discipline` limits the backlog.
"""

from __future__ import annotations

from typing import Protocol

from qflow_client.amqp.frames import METHOD_FRAME, frame
from qflow_client.broker.core.handshake import Handshake
from qflow_client.broker.core.output import Output
from qflow_client.broker.core.queueflow import CountedSource, QueueFlow
from qflow_client.broker.core.virtualhost import VirtualHost
from qflow_client.flow import FlowController, ThresholdLimiter

__all__ = ["ChannelFlow", "Discipline", "FlowingSession"]


class Discipline(Protocol):
    """Limits the backlog of one connection (D7), and acts against a client that ignores ``Channel.Flow`` (D8)."""

    #: Counts the messages and body bytes in the backlog.
    limiter: ThresholdLimiter
    #: Blocks the publishing channels of the connection while the backlog is too large.
    backlog: FlowController
    #: Number of messages that came on blocked (flowed) channels after the grace time (setting `flow_grace`).
    past_flow: int
    #: Number of tarpits so far: periods in which the broker does not read from the connection (D8).
    tarpits: int
    #: Number of channels that were closed because their clients ignored ``Channel.Flow``.
    channels_closed: int

    def owe(self, size: int, now: float) -> None:
        """Add a message with this body size in bytes to the backlog."""

    def repay(self, size: int, count: int = 1) -> None:
        """Remove `count` messages from the backlog. `size` is the total of their body bytes."""

    def look_at(self, source: ChannelFlow) -> None:
        """Block a channel if it is a producer and the backlog is too large."""

    def check(self, source: ChannelFlow, now: float) -> None:
        """Handle a message that was published on a blocked (flowed) channel.

        Raises:
            ChannelException: the channel has published too many messages after the grace time.
            ConnectionException: the channels of the connection have together published too many of these messages.
        """


class FlowingSession(Protocol):
    """The part of the session that a `ChannelFlow` uses."""

    name: str
    host: VirtualHost
    output: Output
    handshake: Handshake
    #: Limits the backlog, and acts against the client; ``None`` if there is no limit and no sanction.
    discipline: Discipline | None


class ChannelFlow(CountedSource):
    """One channel, as a source that flow controllers can block."""

    __slots__ = (
        "_discipline",
        "_host",
        "_number",
        "_owed",
        "_owed_until_unblocked",
        "_seconds",
        "is_over",
        "is_producer",
        "oks_due",
        "past_flow",
        "session",
        "since",
        "times_flowed",
    )

    def __init__(self, session: FlowingSession, number: int) -> None:
        super().__init__(f"{session.name} ({number})")
        self.session = session
        self._number = number
        self._host = session.host
        self._discipline = session.discipline
        # Whether the channel has published, or has selected confirm or transaction mode.
        self.is_producer = False
        self.is_over = False
        # When the current block began (None if there is none), the number of blocks, and the seconds of earlier blocks.
        self.since: float | None = None
        self.times_flowed = 0
        self._seconds = 0.0
        # Number of Channel.Flow methods that the client has not answered.
        self.oks_due = 0
        # During the current block, the number of messages that came after the grace time (D8).
        self.past_flow = 0
        # Number and body bytes of the owed messages (D7), and of those owed until `is_flowed_by_others` is false.
        self._owed = [0, 0]
        self._owed_until_unblocked = [0, 0]

    # Blocking (J3 J4).

    def block(self, controller: FlowController) -> None:
        observer = self._host.observer
        if observer is not None and controller not in self.blocked_by:
            observer.blocked(self, *_queue_and_reason(controller))
        super().block(controller)

    def unblock(self, controller: FlowController) -> None:
        observer = self._host.observer
        if observer is not None and controller in self.blocked_by:
            observer.unblocked(self, *_queue_and_reason(controller))
        super().unblock(controller)
        if self._discipline is not None and not self.is_flowed_by_others:
            count, size = self._owed_until_unblocked
            self._owed_until_unblocked = [0, 0]
            if count:
                self.repay(size, count)

    def on_blocked(self) -> None:
        if not self.is_over:
            self.times_flowed += 1
            self.since = self._host.clock()
            self._send(active=False)

    def on_unblocked(self) -> None:
        if not self.is_over:
            self._seconds = self.seconds
            self.since = None
            self.past_flow = 0
            self._send(active=True)

    def _send(self, *, active: bool) -> None:
        self.oks_due += 1
        # Built without pamqp, which is slower: a queue can unblock thousands of channels together.
        flow = frame(METHOD_FRAME, self._number, b"\0\x14\0\x14" + bytes((active,)))
        self.session.output.write_past_promises(flow)

    @property
    def seconds(self) -> float:
        """Seconds for which the channel was blocked (flowed) so far, including the current block."""
        return self._seconds if self.since is None else self._seconds + self._host.clock() - self.since

    @property
    def is_flowed_by_others(self) -> bool:
        """Whether any controller except that of the backlog blocks the channel.

        If only the backlog blocks the channel, new messages are not owed. Otherwise the block could never end.
        """
        discipline = self._discipline
        return any(discipline is None or each is not discipline.backlog for each in self.blocked_by)

    # Owed messages (D7).

    def check(self) -> None:
        """If the channel is blocked (flowed), check a published message, see `Discipline.check`."""
        if self._discipline is not None and self.blocked_by:
            self._discipline.check(self, self._host.clock())

    def look_at_backlog(self) -> None:
        """Block the channel if it is a producer and the backlog is too large."""
        if self._discipline is not None:
            self._discipline.look_at(self)

    def owe(self, size: int, *, until_unblocked: bool = False) -> bool:
        """Count a message as owed. Return False if there is no `Discipline`, or if the channel has ended.

        With `until_unblocked` the message is owed until `is_flowed_by_others` is false.
        """
        if self._discipline is None or self.is_over:
            return False
        if until_unblocked:
            self._owed_until_unblocked[0] += 1
            self._owed_until_unblocked[1] += size
        self._owed[0] += 1
        self._owed[1] += size
        self._discipline.owe(size, self._host.clock())
        return True

    def repay(self, size: int, count: int = 1) -> None:
        """Remove `count` messages from the owed messages. `size` is the total of their body bytes."""
        if self._discipline is not None and not self.is_over:
            self._owed[0] -= count
            self._owed[1] -= size
            self._discipline.repay(size, count)

    def end(self) -> None:
        """End the channel. The channel then owes nothing, and no controller blocks it."""
        self._seconds = self.seconds
        self.since = None
        count, size = self._owed
        self._owed_until_unblocked = [0, 0]
        if count:
            self.repay(size, count)
        self.is_over = True
        for controller in tuple(self.blocked_by):
            # The controllers of the operator and of alarms do not have the channel in `FlowController.blocked`, so
            # their `forget` does nothing. For these controllers, `unblock` is necessary.
            controller.forget(self)
            self.unblock(controller)
        self._host.source_gone(self)


def _queue_and_reason(controller: FlowController) -> tuple[str, str]:
    return (controller.name, "channel_flow") if isinstance(controller, QueueFlow) else ("", controller.name)
