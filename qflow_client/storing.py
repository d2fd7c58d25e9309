"""`send_many` of a producer with an outbox. The producer waits for the disk once for many messages.

`store_many` is a generator, so that the same code serves threads and asyncio. The producer passes a function `run`. For
each call that may wait, `run` returns an iterator. For a `Producer`, the iterator blocks the thread and yields nothing.
For an `AsyncProducer`, the iterator yields everything that the call's coroutine yields.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from typing import Any

from qflow_client.message import Message, give_back, with_position
from qflow_client.outbox.errors import NotDurable
from qflow_client.position import Position
from qflow_client.producer import resolve, split
from qflow_client.skin import deadline_of, keep_admitted

__all__ = ["store_many"]


def store_many(
    producer: Any,
    messages: Iterable[bytes | str | Message | tuple[bytes | str | Message, Position]],
    receipts: list[Any],
    timeout: float | None,
    options: dict[str, Any],
    *,
    at_once: int,
    wait_durable: Callable[[Any, float], Any],
    run: Callable[..., Generator[Any, Any, Any]],
) -> Generator[Any, Any, None]:
    """Send messages, and wait until they are on disk.

    Args:
        messages: as for `send_many`.
        receipts: the receipts are appended to this list.
        timeout: seconds that each message may wait while the producer is blocked (flowed); ``None`` for no limit.
        options: the arguments of `send` except the message, its position and the timeout.
        at_once: number of messages that are put into the outbox between two waits for the disk.
        wait_durable: waits until the message of a receipt is on disk, or raises `NotDurable` soon after a deadline.
        run: returns an iterator that calls the given function with the given arguments; see the module.
    """
    try:
        for each in messages:
            message, position = split(each)
            payload, to, key = resolve(message, options["exchange"], options["routing_key"])
            if position is not None:
                producer._check_position(position)
                payload = with_position(payload, position)
            to = producer.settings.exchange if to is None else to
            key = producer.settings.routing_key if key is None else key
            receipt: Any = producer._engine.admit(payload, to, key, deadline_of(timeout))
            if receipt is None:
                sent_to = options | {"exchange": to, "routing_key": key, "timeout": timeout}
                try:
                    receipt = yield from run(producer.send, payload, **sent_to)
                except Exception as error:
                    keep_admitted(error, receipts)
                    raise
            receipts.append(receipt)
            if len(receipts) % at_once == 0:
                yield from run(wait_durable, receipts[-1], deadline_of(timeout))
    except Exception as error:
        give_back(error)
        # The messages before the error are admitted, so wait briefly until they are on disk, but not again after a
        # `NotDurable`. If this wait raises a `NotDurable`, suppress it, because the caller needs the first error.
        if receipts and not isinstance(error, NotDurable):
            with suppress(NotDurable):
                yield from run(wait_durable, receipts[-1], time.monotonic())
        raise
    if receipts:
        yield from run(wait_durable, receipts[-1], deadline_of(timeout))
