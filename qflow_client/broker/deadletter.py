"""Dead-lettering as RabbitMQ does it: what a message's headers tell of its deaths, and where it may not go again."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from qflow_client.broker.entries import DropReason
from qflow_client.broker.message import StoredMessage, Target
from qflow_client.broker.wire import decode_headers, expiration_of, with_headers
from qflow_client.fields import encode_table

__all__ = ["deaths_of", "is_cycle", "mourn"]

_DEATHS = "x-death"


def deaths_of(message: StoredMessage) -> list[dict[str, Any]]:
    """Where and why a message died before, the last first."""
    deaths = decode_headers(message.header).get(_DEATHS)
    return [death for death in deaths if isinstance(death, dict)] if isinstance(deaths, list) else []


def is_cycle(queue: str, reason: DropReason, deaths: Sequence[dict[str, Any]]) -> bool:
    """Whether a message that died may not go to a queue: it died there before, and no consumer has rejected it since.

    Args:
        queue: where it would go.
        reason: of its death now.
        deaths: all of them, this one included.
    """
    if reason is DropReason.REJECTED:
        return False
    for death in deaths:
        if death.get("reason") == DropReason.REJECTED:
            return False
        if death.get("queue") == queue:
            return True
    return False


def mourn(message: StoredMessage, queue: str, reason: DropReason, target: Target, time: float) -> StoredMessage:
    """The message that goes to a dead-letter exchange.

    Args:
        message: which died.
        queue: where.
        reason: why.
        target: where it goes.
        time: seconds since 1970.
    """
    try:
        headers = _headers(message, deaths_of(message), queue, reason, time)
    except (TypeError, ValueError):
        # What a client wrote there cannot be written again.
        headers = _headers(message, [], queue, reason, time)
    assert message.body is not None
    return StoredMessage(target, with_headers(message.header, headers), message.body)


def _headers(
    message: StoredMessage, deaths: list[dict[str, Any]], queue: str, reason: DropReason, time: float
) -> dict[bytes, bytes]:
    """The headers that tell of a message's deaths, each with its type, by name."""
    same = [death for death in deaths if (death.get("queue"), death.get("reason")) == (queue, reason)]
    others = [death for death in deaths if death not in same]
    death: dict[str, Any]
    if same:
        count = same[0].get("count")
        death = same[0] | {"count": count + 1 if isinstance(count, int) else 1}
    else:
        death = {
            "count": 1,
            "reason": reason.value,
            "queue": queue,
            "time": datetime.fromtimestamp(int(time), UTC),
            "exchange": message.target.exchange,
            "routing-keys": [message.target.routing_key],
        }
        if message.ttl is not None:
            death["original-expiration"] = expiration_of(message.header)
    headers: dict[str, Any] = {_DEATHS: [death, *others]}
    if not deaths:
        headers |= {
            "x-first-death-reason": reason.value,
            "x-first-death-queue": queue,
            "x-first-death-exchange": message.target.exchange,
        }
    # A table of one field is its size, the size of its name, its name and what is wanted.
    return {name.encode(): encode_table({name: value}, name)[5 + len(name) :] for name, value in headers.items()}
