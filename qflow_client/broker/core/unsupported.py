"""Refuses features of RabbitMQ that this broker does not have: priorities, streams, and the headers ``CC``, ``BCC``.

A request for any of these features closes the channel with 406. `docs/dialects.md` lists the features.
"""

from __future__ import annotations

from collections.abc import Mapping

from qflow_client.broker.core.errors import ChannelException, ReplyCode
from qflow_client.broker.core.properties import decode_headers

__all__ = ["check_consumer_arguments", "check_copies", "check_queue_arguments"]

_COPIES = ("CC", "BCC")


def _refuse(what: str, text: str) -> ChannelException:
    return ChannelException(ReplyCode.PRECONDITION_FAILED, f"{what}: {text}")


def _is_set(arguments: Mapping[str, object], name: str) -> bool:
    """Whether a priority is requested; 0 is the same as no priority."""
    if name not in arguments:
        return False
    value = arguments[name]
    return value != 0 or isinstance(value, bool)


def check_queue_arguments(queue: str, arguments: Mapping[str, object]) -> None:
    """Raise `ChannelException` 406 if a new queue has priorities, or is a stream."""
    if _is_set(arguments, "x-max-priority"):
        raise _refuse(
            f"queue '{queue}'", "x-max-priority: this broker has no priorities; declare a queue for each priority"
        )
    if arguments.get("x-queue-type") == "stream":
        # In any other queue, the messages that one reader acknowledges are lost for the other readers.
        raise _refuse(f"queue '{queue}'", "x-queue-type: this broker has no streams; declare another type of queue")


def check_consumer_arguments(queue: str, arguments: Mapping[str, object]) -> None:
    """Raise `ChannelException` 406 if a new consumer has a priority."""
    if _is_set(arguments, "x-priority"):
        raise _refuse(
            f"consumer of queue '{queue}'",
            "x-priority: this broker has no priorities of consumers; leave the argument out",
        )


def check_copies(header: bytes) -> None:
    """Raise `ChannelException` 406 if a well-formed content header has a header ``CC`` or ``BCC``."""
    # Most messages have neither of these headers, and need not be decoded.
    if b"\x02CC" not in header and b"\x03BCC" not in header:
        return
    headers = decode_headers(header)
    for name in _COPIES:
        if name in headers:
            raise _refuse(
                f"header {name!r}", "this broker does not send copies; bind all queues, or publish to each queue"
            )
