"""Flow control for a channel that was made elsewhere."""

from __future__ import annotations

from typing import Any, overload

import pika.adapters.blocking_connection as blocking
import pika.channel
from pika import spec

from qflow_client.pika.adapters.blocking_connection import BlockingChannel, adopt
from qflow_client.pika.channel import Channel
from qflow_client.redaction import shown

__all__ = ["wrap"]


@overload
def wrap(channel: blocking.BlockingChannel) -> BlockingChannel: ...
@overload
def wrap(channel: pika.channel.Channel) -> Channel: ...
def wrap(channel: Any) -> Any:
    """Put a channel of pika's under flow control, in place: whoever has it publishes under it from now on.

    From now on the channel answers ``Channel.Flow``, and `basic_publish` waits (`BlockingChannel`) or raises
    (`Channel`) as on a connection of `qflow_client.pika`. What cannot be had on a connection that was made elsewhere:

    - What came before: a stop that the broker has sent already, and that it blocks the connection already, are not
      known until it says the next thing. So wrap the channel as soon as it is there.
    - That nothing of a message is written: whether the socket takes bytes is only known afterwards. Where it takes
      none, `basic_publish` raises `ConfirmTimeout`, not `FlowControlTimeout`, and the message may leave later.
    - A bound for `BlockingConnection.close` while the broker blocks the connection (the channel's own has it):
      pika's ``blocked_connection_timeout`` is one.
    - Settings from the connection's parameters, unless those are of `qflow_client.pika`; the environment's are used.
    - Other channels of the connection: each has to be wrapped.

    Args:
        channel: a `BlockingChannel`, or a `Channel` of an asynchronous adapter, that is open and not in confirm mode.

    Returns:
        The same channel, which is a `qflow_client.pika.BlockingChannel` or `qflow_client.pika.Channel` now.

    Raises:
        TypeError: it is neither, but a class of somebody else's.
        ValueError: it is not open, or in confirm mode: which delivery tags are still to be confirmed is not known.
    """
    if isinstance(channel, (BlockingChannel, Channel)):
        return channel
    if type(channel) not in (blocking.BlockingChannel, pika.channel.Channel):
        raise TypeError(f"wrap() takes pika's BlockingChannel or Channel, not {shown(channel)}")
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
