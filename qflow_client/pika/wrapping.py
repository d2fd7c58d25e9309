"""Adds flow control to a channel that was not made by `qflow_client.pika`."""

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
    """Add flow control to a channel of pika, in place, for all code that uses the channel.

    From now on the channel answers ``Channel.Flow``, and `basic_publish` waits (`BlockingChannel`) or raises
    (`Channel`) as on a connection of `qflow_client.pika`. The following is not possible on a connection that was not
    made by `qflow_client.pika`:

    - Earlier events: if the broker has already stopped the channel, or already blocks the connection, this is unknown
      until its next frame about it. So wrap the channel as soon as it is open.
    - A guarantee that no byte of a message is written: the state of the socket is only known after a write. If the
      socket accepts no bytes, `basic_publish` raises `ConfirmTimeout`, not `FlowControlTimeout`, and the message may be
      sent later.
    - A time limit for `BlockingConnection.close` while the broker blocks the connection (the channel's own `close` has
      one). pika's ``blocked_connection_timeout`` is such a limit.
    - Settings from the connection's parameters, unless those are of `qflow_client.pika`. Settings of the environment
      are used.
    - Flow control for other channels of the connection: wrap each of them.

    Args:
        channel: a `BlockingChannel`, or a `Channel` of an asynchronous adapter, that is open and not in confirm mode.

    Returns:
        The same object. Its class is now `qflow_client.pika.BlockingChannel` or `qflow_client.pika.Channel`.

    Raises:
        TypeError: it is neither of them, but of another class, for example the channel of pika's thread-safe
            `Connection`.
        ValueError: it is not open, or it is in confirm mode, so that its unconfirmed delivery tags are unknown.
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
