"""How one channel is flowed (blocked), sans-I/O, and what it owes to the backlog of its connection.

A `ChannelFlow` is a `FlowSource`: queues, rates, an operator and the discipline block and unblock it. The client gets
one ``Channel.Flow`` for the first of these holds and one when the last is gone (J3 J4).

What a channel has published and the broker still holds is owed (D7): what waits, is not confirmed, or came while the
channel was flowed. The discipline counts that for the whole connection.
"""

from __future__ import annotations

from typing import Protocol

from pamqp import commands

from qflow_client.broker.core import wire
from qflow_client.broker.core.handshake import Handshake
from qflow_client.broker.core.output import Output
from qflow_client.broker.core.queueflow import CountedSource, QueueFlow
from qflow_client.broker.core.virtualhost import VirtualHost
from qflow_client.flow import FlowController, ThresholdLimiter

__all__ = ["ChannelFlow", "Discipline", "FlowingSession"]


class Discipline(Protocol):
    """Decides what is done about a connection that does not heed ``Channel.Flow`` (D7 D8)."""

    #: The messages of its backlog, and what flows channels because of it.
    depth: ThresholdLimiter
    backlog: FlowController
    #: So far: messages that came on flowed channels after the time of grace, and what was done about them.
    past_flow: int
    tarpits: int
    channels_closed: int

    def owe(self, size: int, now: float) -> None:
        """A message of so many body bytes is in the backlog."""

    def repay(self, size: int, count: int = 1) -> None:
        """Messages of together so many body bytes are in the backlog no more."""

    def look_at(self, source: ChannelFlow) -> None:
        """Flow a channel if it publishes and the backlog is too large."""

    def check(self, source: ChannelFlow, now: float) -> None:
        """A publish came on a channel that is flowed.

        Raises:
            ChannelException: the channel has published too much since.
            ConnectionException: the connection has.
        """


class FlowingSession(Protocol):
    """The connection, as far as it is needed to flow a channel."""

    name: str
    host: VirtualHost
    output: Output
    handshake: Handshake
    #: Counts what is owed; ``None`` if nothing does.
    discipline: Discipline | None


class ChannelFlow(CountedSource):
    """One channel as a source of messages.

    Args:
        session: the connection's.
        number: of the channel.
    """

    __slots__ = (
        "_discipline",
        "_host",
        "_number",
        "_owed",
        "_owed_past_flow",
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
        # Whether the channel has published, or said that it will; and whether it has ended.
        self.is_producer = False
        self.is_over = False
        # Since when it is flowed, how often it was, seconds that are over.
        self.since: float | None = None
        self.times_flowed = 0
        self._seconds = 0.0
        # How many Channel.Flow the client has not answered.
        self.oks_due = 0
        # Messages that came since it was flowed and the time of grace was over (D8).
        self.past_flow = 0
        # What is owed (D7), in messages and body bytes; and of that, what came while it was flowed and nothing else
        # holds.
        self._owed = [0, 0]
        self._owed_past_flow = [0, 0]

    # Being flowed (J3 J4).

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
            count, size = self._owed_past_flow
            self._owed_past_flow = [0, 0]
            if count:
                self.repay(size, count)

    def on_blocked(self) -> None:
        """The first hold: one Channel.Flow."""
        if not self.is_over:
            self.times_flowed += 1
            self.since = self._host.clock()
            self._send(active=False)

    def on_unblocked(self) -> None:
        """The last hold is gone: one Channel.Flow."""
        if not self.is_over:
            self._seconds = self.seconds
            self.since = None
            self.past_flow = 0
            self._send(active=True)

    def _send(self, *, active: bool) -> None:
        self.oks_due += 1
        self.session.output.write_in_turn(wire.method(self._number, commands.Channel.Flow(active=active)))

    @property
    def seconds(self) -> float:
        """Seconds for which it was flowed so far, the present time included."""
        return self._seconds if self.since is None else self._seconds + self._host.clock() - self.since

    @property
    def is_flowed_by_others(self) -> bool:
        """Whether more than the backlog flows it: what only that flows must not keep it up."""
        discipline = self._discipline
        return any(discipline is None or each is not discipline.backlog for each in self.blocked_by)

    # What is owed (D7).

    def check(self) -> None:
        """A publish came, which a flowed channel may not send for long.

        Raises:
            ChannelException: the channel has published too much since.
            ConnectionException: the connection has.
        """
        if self._discipline is not None and self.blocked_by:
            self._discipline.check(self, self._host.clock())

    def look_at_backlog(self) -> None:
        """The channel has become a producer: it is flowed if the backlog is too large."""
        if self._discipline is not None:
            self._discipline.look_at(self)

    def owe(self, size: int, *, is_past_flow: bool = False) -> bool:
        """A message is owed.

        Args:
            size: its body bytes.
            is_past_flow: whether nothing else holds it, so that it is owed while the channel is flowed.

        Returns:
            Whether it is counted.
        """
        if self._discipline is None or self.is_over:
            return False
        if is_past_flow:
            self._owed_past_flow[0] += 1
            self._owed_past_flow[1] += size
        self._owed[0] += 1
        self._owed[1] += size
        self._discipline.owe(size, self._host.clock())
        return True

    def repay(self, size: int, count: int = 1) -> None:
        """Messages of together so many body bytes are owed no more."""
        if self._discipline is not None and not self.is_over:
            self._owed[0] -= count
            self._owed[1] -= size
            self._discipline.repay(size, count)

    def end(self) -> None:
        """The channel has ended: nothing is owed, and nothing flows it any more."""
        self._seconds = self.seconds
        self.since = None
        count, size = self._owed
        self._owed_past_flow = [0, 0]
        if count:
            self.repay(size, count)
        self.is_over = True
        for controller in tuple(self.blocked_by):
            controller.forget(self)
            self.unblock(controller)
        self._host.source_gone(self)


def _queue_and_reason(controller: FlowController) -> tuple[str, str]:
    """For the flow log."""
    return (controller.name, "channel_flow") if isinstance(controller, QueueFlow) else ("", controller.name)
