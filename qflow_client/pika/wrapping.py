"""Adds flow control to a channel of pika."""

from __future__ import annotations

from typing import Any, overload

import pika.adapters.blocking_connection as blocking
import pika.channel
from pika import spec

from qflow_client.pika.adapters.blocking_connection import BlockingChannel, adopt
from qflow_client.pika.channel import Channel

__all__ = ["wrap"]


@overload
def wrap(channel: blocking.BlockingChannel) -> BlockingChannel: ...
@overload
def wrap(channel: pika.channel.Channel) -> Channel: ...
def wrap(channel: Any) -> Any:
    """Add flow control to a channel of pika, for all code that uses the channel.

    From now on the channel answers ``Channel.Flow``. `basic_publish` of a `BlockingChannel` waits, and that of a
    `Channel` raises an error, as on a connection of `qflow_client.pika`. The following features need a connection of
    `qflow_client.pika`:

    - Earlier events. A wrapped channel does not know whether the broker has already stopped it or already blocks the
      connection. So wrap the channel as soon as it is open.
    - A guarantee that no byte of a message is written after an error. A wrapped channel knows the state of the socket
      only after a write. If the socket accepts no bytes, `basic_publish` raises `ConfirmTimeout`, not
      `FlowControlTimeout`, and the message may be sent later.
    - A time limit for `BlockingConnection.close` while the broker blocks the connection. The `close` of the channel has
      a limit. pika's ``blocked_connection_timeout`` is a limit for the connection.
    - Settings from pika's connection parameters. A wrapped channel uses the settings of the environment, unless the
      parameters are those of `qflow_client.pika`.
    - Flow control for all channels of the connection. Otherwise wrap each channel.

    Args:
        channel: a `BlockingChannel`, or a `Channel` of an asynchronous adapter, that is open and not in confirm mode.

    Returns:
        The same object. Its class is now `qflow_client.pika.BlockingChannel` or `qflow_client.pika.Channel`.

    Raises:
        TypeError: the channel has another class, for example that of pika's thread-safe `Connection`.
        ValueError: the channel is not open, or is in confirm mode, so that its unconfirmed delivery tags are unknown.
    """
    if isinstance(channel, (BlockingChannel, Channel)):
        return channel
    if type(channel) not in (blocking.BlockingChannel, pika.channel.Channel):
        kind = type(channel)
        raise TypeError(
            "wrap() takes pika.adapters.blocking_connection.BlockingChannel or pika.channel.Channel, not "
            f"{kind.__module__}.{kind.__qualname__}; to publish on such a channel, connect with qflow_client.pika"
        )
    waits = type(channel) is blocking.BlockingChannel
    impl: Any = channel._impl if waits else channel
    if not impl.is_open:
        raise ValueError(f"{channel!r} is not open; wrap a channel that is")
    if impl.callbacks.pending(impl.channel_number, spec.Basic.Ack):
        raise ValueError(f"{channel!r} is in confirm mode already; wrap it before confirm_delivery()")
    if waits:
        return adopt(channel)
    impl.__class__ = Channel
    impl.adopt()
    return channel
