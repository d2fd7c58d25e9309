"""Direct reply-to, as RabbitMQ has it: a client receives replies without declaring a queue for them.

A channel consumes ``amq.rabbitmq.reply-to`` without acknowledgements, and then publishes requests whose ``reply_to`` is
that name. The broker replaces it by the name of a queue of this channel, and the responder publishes its reply to that
name through the default exchange. The queue is exclusive and goes with its consumer, so that flow control and the
account of memory see replies like all other messages. No method but `Queue.Declare` reaches it by its name: a responder
declares it to find out whether the requester is still there.
"""

from __future__ import annotations

from collections.abc import Container

from qflow_client.broker.core.errors import ChannelException, ReplyCode
from qflow_client.broker.core.properties import reply_to_of, with_reply_to

__all__ = ["REPLY_PREFIX", "REPLY_TO", "address_reply", "check_reply_consumer", "check_reply_queue", "is_reply_queue"]

#: What clients consume, and the `reply_to` of their requests.
REPLY_TO = "amq.rabbitmq.reply-to"
#: How the names of the queues for replies begin.
REPLY_PREFIX = f"{REPLY_TO}."


def is_reply_queue(name: str) -> bool:
    """Whether a name is the one that clients consume, or that of a queue for replies."""
    return name == REPLY_TO or name.startswith(REPLY_PREFIX)


def check_reply_consumer(*, no_ack: bool, has_one: bool) -> None:
    """Check that a channel may consume replies.

    Args:
        no_ack: whether the consumer sends no acknowledgements.
        has_one: whether the channel has a reply consumer already.

    Raises:
        ChannelException: 406; it may not.
    """
    if has_one:
        raise ChannelException(ReplyCode.PRECONDITION_FAILED, "reply consumer already set on this channel")
    if not no_ack:
        raise ChannelException(
            ReplyCode.PRECONDITION_FAILED, f"reply consumer cannot acknowledge; consume '{REPLY_TO}' with no_ack"
        )


def check_reply_queue(name: str, queues: Container[str]) -> None:
    """Check that replies to a name can be delivered.

    Args:
        name: for which `is_reply_queue` is True.
        queues: the names of all queues.

    Raises:
        ChannelException: 404; its requester is gone.
    """
    if name != REPLY_TO and name not in queues:
        raise ChannelException(ReplyCode.NOT_FOUND, f"no queue '{name}'; the client that waited for replies is gone")


def address_reply(header: bytes, queue: str) -> bytes:
    """The content header of a request with the name of the queue for its replies.

    Args:
        header: the payload of a content header frame that was found well-formed and has the property ``reply_to``.
        queue: the queue for replies of the channel; empty if it has no reply consumer.

    Returns:
        The header as it came, unless it asks for direct replies.

    Raises:
        ChannelException: 406; it asks for direct replies, and the channel does not consume them.
    """
    if reply_to_of(header) != REPLY_TO.encode():
        return header
    if not queue:
        raise ChannelException(
            ReplyCode.PRECONDITION_FAILED, f"fast reply consumer does not exist; consume '{REPLY_TO}' on this channel"
        )
    return with_reply_to(header, queue)
