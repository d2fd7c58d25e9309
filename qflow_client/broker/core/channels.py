"""The channels of one connection with their totals, and the alarms that block the client, sans-I/O."""

from __future__ import annotations

from pamqp import commands

from qflow_client.broker.core import wire
from qflow_client.broker.core.channel import Channel
from qflow_client.broker.core.handshake import Handshake
from qflow_client.broker.core.output import Output
from qflow_client.broker.core.profiles import Dialect, OnAlarm
from qflow_client.flow import FlowController

__all__ = ["Blocks", "Channels"]


class Channels(dict[int, Channel]):
    """The channels of one connection, by number. The totals also count the closed channels."""

    __slots__ = ("_delivered_before", "_published_before", "_times_flowed_before")

    def __init__(self) -> None:
        super().__init__()
        self._published_before = 0
        self._delivered_before = 0
        self._times_flowed_before = 0

    def forget(self, channel: Channel) -> None:
        """Remove a channel that has finished closing. Its counts stay in the totals."""
        del self[channel.number]
        self._published_before += channel.flow.published
        self._delivered_before += channel.consuming.delivered
        self._times_flowed_before += channel.flow.times_flowed

    def end(self) -> None:
        for channel in tuple(self.values()):
            channel.end()

    @property
    def published(self) -> int:
        return self._published_before + sum(channel.flow.published for channel in self.values())

    @property
    def delivered(self) -> int:
        return self._delivered_before + sum(channel.consuming.delivered for channel in self.values())

    @property
    def times_flowed(self) -> int:
        """How often the channels were blocked (flowed) so far."""
        return self._times_flowed_before + sum(channel.flow.times_flowed for channel in self.values())


class Blocks(dict[str, str]):
    """The alarms that block a client: the name and the reason of each.

    The client is informed of the first alarm and of the end of the last alarm, unless the dialect closes channels.

    Args:
        alarm: controller that blocks the channels if the dialect has `OnAlarm.CHANNEL_FLOW`.
    """

    __slots__ = ("_alarm", "_channels", "_dialect", "_handshake", "_output")

    def __init__(
        self, channels: Channels, output: Output, handshake: Handshake, dialect: Dialect, alarm: FlowController
    ) -> None:
        super().__init__()
        self._channels = channels
        self._output = output
        self._handshake = handshake
        self._dialect = dialect
        self._alarm = alarm

    def change(self, source: str, reason: str | None) -> None:
        """Add the alarm `source` if the client can be informed of it. If the reason is ``None``, remove the alarm."""
        way = self._dialect.on_alarm
        was_blocked = bool(self)
        if reason is None:
            self.pop(source, None)
        elif way is not OnAlarm.BLOCKED or self._handshake.understands("connection.blocked"):
            self[source] = reason
        if bool(self) is was_blocked:
            return
        if way is OnAlarm.BLOCKED and reason is not None:
            self._output.write(wire.method(0, commands.Connection.Blocked(wire.shortened(reason))))
        elif way is OnAlarm.BLOCKED:
            self._output.write(wire.method(0, commands.Connection.Unblocked()))
        elif way is OnAlarm.CHANNEL_FLOW:
            for channel in self._channels.values():
                if reason is None:
                    channel.flow.unblock(self._alarm)
                elif channel.flow.is_producer and not channel.is_closing:
                    channel.flow.block(self._alarm)
