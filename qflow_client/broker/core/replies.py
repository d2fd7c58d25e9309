"""Direct reply-to as in RabbitMQ: a client receives replies without declaring a queue for them.

A channel consumes ``amq.rabbitmq.reply-to`` without acknowledgements. For this consumer the broker creates an exclusive
reply queue, which is deleted with the consumer. In requests with ``amq.rabbitmq.reply-to`` as ``reply_to``, the broker
replaces this name with the name of the reply queue. The responder publishes its reply to the reply queue through the
default exchange. So flow control and the memory limit treat the reply like any other message. Clients can use the name
of a reply queue only as a routing key and in ``Queue.Declare``. The declaration fails if that queue is gone.
"""

from __future__ import annotations

from collections.abc import Container

from qflow_client.broker.core.errors import ChannelException, ReplyCode
from qflow_client.broker.core.properties import with_reply_to
from qflow_client.broker.core.wire import HAS_REPLY_TO, REPLY_TO_FLAG, short_property

__all__ = ["REPLY_PREFIX", "REPLY_TO", "address_reply", "check_reply_consumer", "check_reply_queue", "is_reply_queue"]

#: The queue name that clients consume from, and put into `reply_to` of their requests.
REPLY_TO = "amq.rabbitmq.reply-to"
#: Prefix of the names of reply queues.
REPLY_PREFIX = f"{REPLY_TO}."


def is_reply_queue(name: str) -> bool:
    """Whether a name is ``amq.rabbitmq.reply-to`` or the name of a reply queue."""
    return name == REPLY_TO or name.startswith(REPLY_PREFIX)


def check_reply_consumer(*, no_ack: bool, has_one: bool) -> None:
    """Raise `ChannelException` 406 if a channel has a reply consumer already, or wants acknowledgements of replies."""
    if has_one:
        raise ChannelException(ReplyCode.PRECONDITION_FAILED, "reply consumer already set on this channel")
    if not no_ack:
        raise ChannelException(
            ReplyCode.PRECONDITION_FAILED, f"reply consumer cannot acknowledge; consume '{REPLY_TO}' with no_ack"
        )


def check_reply_queue(name: str, queues: Container[str]) -> None:
    """Raise `ChannelException` 404 if `name` is the name of a reply queue that does not exist any more."""
    if name != REPLY_TO and name not in queues:
        raise ChannelException(ReplyCode.NOT_FOUND, f"no queue '{name}'; the client that waited for replies is gone")


def address_reply(header: bytes, queue: str) -> bytes:
    """Put the name of the reply queue into a content header, if the message asks for direct replies.

    Args:
        header: the payload of a well-formed content header frame.
        queue: name of the channel's reply queue; empty if the channel has no reply consumer.

    Raises:
        ChannelException: 406 if the request asks for direct replies and the channel does not consume them.
    """
    if not header[12] & HAS_REPLY_TO or short_property(header, REPLY_TO_FLAG) != REPLY_TO:
        return header
    if not queue:
        raise ChannelException(
            ReplyCode.PRECONDITION_FAILED, f"fast reply consumer does not exist; consume '{REPLY_TO}' on this channel"
        )
    return with_reply_to(header, queue)
