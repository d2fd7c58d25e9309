"""The outbox in a Django application's own database: published if the transaction commits, and only then (E14).

With ``"qflow_client.django"`` in ``INSTALLED_APPS``, ``manage.py migrate`` makes the tables, and `add` writes a message
in the current transaction. A relay of `qflow_client.sqlalchemy`, or ``qflow relay``, publishes it. It needs the extra
``django``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db import connections, transaction

from qflow_client.message import Message
from qflow_client.sqlalchemy import Outbox

__all__ = ["add", "add_many", "outbox"]

#: The outbox whose tables the migration makes; for `OutboxRelay(…, outbox=outbox)` and ``outbox.status``.
outbox = Outbox()

_COLUMNS = ("partition", "ordering_key", "exchange", "routing_key", "properties", "body")
# The most rows of one statement: SQLite takes 32,766 values, and before 3.32 only 999.
_ROWS = 100


def add(
    message: bytes | str | Message,
    *,
    exchange: str | None = None,
    routing_key: str | None = None,
    ordering_key: str | None = None,
    using: str = "default",
) -> str:
    """Add a message in the current transaction: published if that commits, and only then.

    Args:
        message: the body, or a `Message` with properties.
        exchange: where to publish. Unless given, it is that of a `RoutedMessage`, and otherwise ``""``.
        routing_key: with which key; likewise.
        ordering_key: messages with the same key are published in the order in which they were added, by transactions
            that wait for each other. ``None`` for a message that has no place in any order.
        using: the alias of the database.

    Returns:
        The message id: the message's own, or a new one.

    Raises:
        TypeError: the message is of another type.
        ValueError: AMQP cannot carry it.
    """
    (message_id,) = add_many(
        [message], exchange=exchange, routing_key=routing_key, ordering_key=ordering_key, using=using
    )
    return message_id


def add_many(
    messages: Iterable[bytes | str | Message],
    *,
    exchange: str | None = None,
    routing_key: str | None = None,
    ordering_key: str | None = None,
    using: str = "default",
) -> list[str]:
    """`add` every message, in order, with few statements: all of them or none.

    Args:
        messages: as for `add`.
        exchange: as for `add`.
        routing_key: as for `add`.
        ordering_key: as for `add`.
        using: as for `add`.

    Returns:
        The message ids.

    Raises:
        TypeError, ValueError: as `add`; none is added.
    """
    made = [outbox.encode(message, exchange, routing_key, ordering_key) for message in messages]
    connection = connections[using]
    table = connection.ops.quote_name(outbox.tables.rows.name)
    with transaction.atomic(using, savepoint=False), connection.cursor() as cursor:
        for begin in range(0, len(made), _ROWS):
            rows = [values for values, _ in made[begin : begin + _ROWS]]
            places = ", ".join([f"({', '.join(['%s'] * len(_COLUMNS))})"] * len(rows))
            statement = f"INSERT INTO {table} ({', '.join(_COLUMNS)}) VALUES {places}"
            given: list[Any] = [values[name] for values in rows for name in _COLUMNS]
            if connection.vendor == "postgresql":
                # As `Outbox.add` does.
                statement += " RETURNING pg_notify(%s, '')"
                given.append(outbox.tables.channel)
            cursor.execute(statement, given)
    return [message_id for _, message_id in made]
