"""The additional code of a `Producer` with an outbox."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from qflow_client.message import Message, give_back, with_position
from qflow_client.outbox.errors import NotDurable
from qflow_client.outbox.spilled import Spilled
from qflow_client.position import Position
from qflow_client.producer import resolve, split
from qflow_client.skin import deadline_of, keep_admitted
from qflow_client.sync.receipt import SyncReceipt

if TYPE_CHECKING:
    from qflow_client.sync.producer import Producer

__all__ = ["SpilledReceipt", "store_many"]

# How many messages of a `send_many` are put into the outbox before it waits for the disk.
_AT_ONCE = 64


class SpilledReceipt(Spilled, SyncReceipt):
    """The receipt of a message that a `Producer` put into its outbox, to send it later."""

    __slots__ = ("__weakref__", "_id", "_path", "_sequence")


def store_many(
    producer: Producer,
    messages: Sequence[bytes | str | Message | tuple[bytes | str | Message, Position]],
    receipts: list[SyncReceipt],
    timeout: float | None,
    options: dict[str, Any],
) -> list[SyncReceipt]:
    """`send_many` with an outbox. It waits for the disk once for many messages.

    Args:
        producer: sends them.
        messages: as for `send_many`.
        receipts: the receipts are appended to this list, which is returned.
        timeout: seconds that each may stay blocked; ``None`` for no limit.
        options: the other arguments of `send`.
    """
    engine, storage, settings = producer._engine, producer._engine.storage, producer.settings
    assert storage is not None
    durable = 0
    try:
        for each in messages:
            message, position = split(each)
            payload, to, key = resolve(message, options["exchange"], options["routing_key"])
            if position is not None:
                producer._check_position(position)
                payload = with_position(payload, position)
            receipt: Any = engine.admit(
                payload,
                settings.exchange if to is None else to,
                settings.routing_key if key is None else key,
                deadline_of(timeout),
            )
            if receipt is None:
                sent_to = options | {"exchange": to, "routing_key": key}
                try:
                    receipt = producer.send(payload, timeout=timeout, **sent_to)
                except Exception as error:
                    keep_admitted(error, receipts)
                    raise
                durable = len(receipts) + 1
            receipts.append(receipt)
            if len(receipts) >= durable + _AT_ONCE:
                durable = len(receipts)
                storage.wait_durable(receipt, deadline_of(timeout))
    except Exception as error:
        give_back(error)
        # After a `NotDurable` the disk is not tried again. The caller needs any other error, so a second error from the
        # disk must not replace it.
        if not isinstance(error, NotDurable) and len(receipts) > durable:
            with suppress(NotDurable):
                storage.wait_durable(receipts[-1], deadline_of(timeout))
        raise
    if len(receipts) > durable:
        storage.wait_durable(receipts[-1], deadline_of(timeout))
    return receipts
