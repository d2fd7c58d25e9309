"""Adds flow control to a channel that pika itself has created."""

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

    After this call, the channel answers ``Channel.Flow``. While the channel is blocked (flowed),
    `BlockingChannel.basic_publish` waits, and `Channel.basic_publish` raises an error, as on a connection of
    `qflow_client.pika`. A wrapped channel differs from a channel of `qflow_client.pika`:

    - A wrapped channel does not know whether the broker had stopped the channel or blocked the connection before this
      call. So wrap a channel as soon as it is open.
    - A wrapped channel knows the state of the socket only after a write. So if the socket accepts no bytes,
      `basic_publish` raises `ConfirmTimeout`, not `FlowControlTimeout`, and the message may still be sent later.
    - While the broker blocks the connection, `BlockingConnection.close` has no time limit, unless you set pika's
      ``blocked_connection_timeout``. `close` of the channel has a time limit.
    - The settings come from the environment, unless the connection parameters are those of `qflow_client.pika`.
    - The other channels of the connection have no flow control, unless you wrap each of them.

    Args:
        channel: a `BlockingChannel`, or a `Channel` of an asynchronous adapter, that is open and not in confirm mode.

    Returns:
        The same object, whose class is now `qflow_client.pika.BlockingChannel` or `qflow_client.pika.Channel`.

    Raises:
        TypeError: the channel has another class, for example the channel of pika's thread-safe `Connection`.
        ValueError: the channel is not open, or is already in confirm mode.
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
