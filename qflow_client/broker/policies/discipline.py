"""Limits the backlog of connections, and acts against clients that ignore ``Channel.Flow`` (D7 D8).

The backlog of a connection has the messages that wait for room in a queue, and those whose confirms are held (delayed).
While a channel is blocked (flowed) for a reason other than the backlog, such as a full queue, the backlog has its new
messages too. If the backlog exceeds its limit, all publishing channels of the connection are blocked. A message is late
if it comes at least `flow_grace` seconds after its channel was blocked. After configured numbers of late messages, the
broker stops reading from the connection for a while (tarpit), or closes the channel or the connection.
"""

from __future__ import annotations

from qflow_client.broker.core.channelflow import ChannelFlow
from qflow_client.broker.core.errors import ChannelException, ConnectionException, ReplyCode
from qflow_client.broker.core.logs import get_logger
from qflow_client.broker.core.session import Session
from qflow_client.flow import FlowController, StopResume, ThresholdLimiter

__all__ = ["BACKLOG", "Discipline"]

_log = get_logger(__name__)

#: Name of the `FlowController` that blocks the channels of a connection whose backlog is too large.
BACKLOG = "backlog"


class Discipline:
    """The backlog and the sanctions of one connection."""

    __slots__ = ("_session", "backlog", "channels_closed", "limiter", "past_flow", "tarpits")

    def __init__(self, session: Session) -> None:
        self._session = session
        settings = session.settings
        self.limiter = ThresholdLimiter(StopResume(settings.backlog_count, None, settings.backlog_size, None))
        self.backlog = FlowController(self.limiter, name=BACKLOG)
        # Number of late messages on all channels of the connection.
        self.past_flow = 0
        self.tarpits = 0
        # Number of channels that were closed because of late messages.
        self.channels_closed = 0

    def owe(self, size: int, now: float) -> None:
        """Add a message to the backlog. If the backlog is now too large, block (flow) all publishing channels (D7)."""
        self.limiter.add(size, now)
        if self.limiter.on:
            for channel in self._session.channels.values():
                self.look_at(channel.flow)

    def look_at(self, source: ChannelFlow) -> None:
        if self.limiter.on and source.is_producer and not source.is_over:
            self.backlog.block(source)

    def repay(self, size: int, count: int = 1) -> None:
        self.backlog.release(size, count)

    def check(self, source: ChannelFlow, now: float) -> None:
        """Count a message on a blocked (flowed) channel if it is late. If too many are late, use a sanction.

        Raises:
            ChannelException: 311 after more than `close_channel_after` late messages since the channel was blocked.
            ConnectionException: 506 if the connection has sent more than `close_connection_after` late messages.
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
                f"{self.past_flow} messages were published on channels after Channel.Flow(active=False); a "
                "client must stop when it arrives",
            )
        if 0 < settings.close_channel_after < source.past_flow:
            self.channels_closed += 1
            sanctions["channels_closed"] += 1
            raise ChannelException(
                ReplyCode.CONTENT_TOO_LARGE,
                f"{source.past_flow} messages were published after Channel.Flow(active=False), by "
                f"{', '.join(dict.fromkeys(each.name for each in source.blocked_by))}; a client must stop when it "
                "arrives",
            )
        if settings.tarpit_after and not source.past_flow % settings.tarpit_after:
            self.tarpits += 1
            sanctions["tarpits"] += 1
            self._session.tarpit(now)
            _log.info(
                "%s: the broker does not read it for %s s, because it publishes on blocked (flowed) channels",
                self._session.name,
                settings.tarpit_time,
            )
