"""Connections that do not heed ``Channel.Flow``, sans-I/O: their backlog, and what is done about them (D7 D8).

The backlog of a connection is the messages that wait for room, whose confirms are held, or that came on a flowed
channel. A backlog beyond its limit flows all channels of the connection. A message that comes on a flowed channel after
the time of grace counts against its channel and connection, which are tarpitted and closed at limits of their own.
"""

from __future__ import annotations

from qflow_client.broker.core.channelflow import ChannelFlow
from qflow_client.broker.core.errors import ChannelException, ConnectionException, ReplyCode
from qflow_client.broker.core.logs import get_logger
from qflow_client.broker.core.session import Session
from qflow_client.flow import FlowController, StopResume, ThresholdLimiter

__all__ = ["BACKLOG", "Discipline"]

_log = get_logger(__name__)

#: What flows the channels of a connection in the name of its backlog, as queues do in theirs.
BACKLOG = "backlog"


class Discipline:
    """What is kept of one connection.

    Its backlog is the messages that it published and that wait for room, whose confirms are held, or that came on a
    channel that was flowed.

    Args:
        session: the connection's.
    """

    __slots__ = ("_session", "backlog", "channels_closed", "depth", "past_flow", "tarpits")

    def __init__(self, session: Session) -> None:
        self._session = session
        settings = session.settings
        self.depth = ThresholdLimiter(StopResume(settings.backlog_count, None, settings.backlog_size, None))
        self.backlog = FlowController(self.depth, name=BACKLOG)
        # So far: messages that came on flowed channels after the time of grace, and what was done about them.
        self.past_flow = 0
        self.tarpits = 0
        self.channels_closed = 0

    def owe(self, size: int, now: float) -> None:
        """A message is in the backlog, which may flow all channels (D7).

        Args:
            size: its body bytes.
            now: seconds of the clock.
        """
        self.depth.add(size, now)
        if self.depth.on:
            for channel in self._session.channels.values():
                self.look_at(channel.flow)

    def look_at(self, source: ChannelFlow) -> None:
        """Flow a channel if it publishes and the backlog is too large."""
        if self.depth.on and source.is_producer and not source.is_over:
            self.backlog.block(source)

    def repay(self, size: int, count: int = 1) -> None:
        """Messages are in the backlog no more.

        Args:
            size: body bytes of all of them.
            count: how many they are.
        """
        self.backlog.release(size, count)

    def check(self, source: ChannelFlow, now: float) -> None:
        """A publish came on a channel that is flowed.

        Args:
            source: the channel.
            now: seconds of the clock.

        Raises:
            ChannelException: 311; it has published too much since it was flowed.
            ConnectionException: 506; the connection has.
        """
        settings = self._session.settings
        if source.since is None or now - source.since < settings.flow_grace:
            return
        sanctions = self._session.controls.sanctions
        source.past_flow += 1
        self.past_flow += 1
        if 0 < settings.close_connection_after < self.past_flow:
            sanctions["connections_closed"] += 1
            raise ConnectionException(
                ReplyCode.RESOURCE_ERROR,
                f"{self.past_flow} messages were published on channels after Channel.Flow(active=False); heed it",
            )
        if 0 < settings.close_channel_after < source.past_flow:
            self.channels_closed += 1
            sanctions["channels_closed"] += 1
            raise ChannelException(
                ReplyCode.CONTENT_TOO_LARGE,
                f"{source.past_flow} messages were published after Channel.Flow(active=False), by "
                f"{', '.join(dict.fromkeys(each.name for each in source.blocked_by))}; heed it",
            )
        if settings.tarpit_after and not source.past_flow % settings.tarpit_after:
            self.tarpits += 1
            sanctions["tarpits"] += 1
            self._session.tarpit(now)
            _log.info(
                "%s: not read for %s s: it publishes on flowed channels", self._session.name, settings.tarpit_time
            )
