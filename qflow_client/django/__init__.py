"""The outbox in a Django application's own database: messages of committed transactions are published (E14).

Messages of other transactions are never published.

With ``"qflow_client.django"`` in ``INSTALLED_APPS``, ``manage.py migrate`` creates the tables, and `add` writes a
message in the current transaction. A relay of `qflow_client.sqlalchemy`, or ``qflow relay``, publishes it. A consumer
uses `first_time` to remember handled messages. This needs the extra ``django``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db import connections, transaction

from qflow_client.message import Message
from qflow_client.sqlalchemy import Inbox, Outbox

__all__ = ["add", "add_many", "first_time", "forget", "inbox", "outbox"]

#: The outbox whose tables the migration creates; for `OutboxRelay(…, outbox=outbox)` and ``outbox.status``.
outbox = Outbox()
#: The inbox whose table the migration creates.
inbox = Inbox()

_COLUMNS = ("partition", "ordering_key", "exchange", "routing_key", "properties", "body")
# The most rows of one statement: SQLite accepts 32,766 values, and before 3.32 only 999.
_ROWS = 100


def add(
    message: bytes | str | Message,
    *,
    exchange: str | None = None,
    routing_key: str | None = None,
    ordering_key: str | None = None,
    using: str = "default",
) -> str:
    """Add a message in the current transaction. It is published if and only if the transaction commits.

    Args:
        message: the body, or a `Message` with properties.
        exchange: the exchange; by default that of a `RoutedMessage`, for other messages ``""``.
        routing_key: the routing key; the same default.
        ordering_key: messages with the same key are published in the order in which they were added, by transactions
            that wait for each other. ``None`` for a message without an order.
        using: the alias of the database.

    Returns:
        The message id: the message's own, or a new one.

    Raises:
        TypeError: the message is of another type.
        ValueError: AMQP cannot represent it.
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
    """Add every message, in order, with few statements: all of them or none.

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


def first_time(message_id: str, *, consumer: str = "", using: str = "default") -> bool:
    """Remember a message in the current transaction. Return True if it was not handled before.

    If another transaction is handling a copy, this waits for its end. Call it in the transaction that handles the
    message. Acknowledge the message after the commit, whatever the result is.

    Args:
        message_id: of the message.
        consumer: name of the consumer, if several in one database handle the same messages.
        using: the alias of the database.

    Raises:
        ValueError: the message has no id.
        django.db.transaction.TransactionManagementError: there is no transaction, so handling and remembering the
            message would not be atomic.
    """
    if not message_id:
        raise ValueError(
            "the message has no message id, so a second copy cannot be recognized; publish with message ids"
        )
    connection = connections[using]
    connection.validate_no_broken_transaction()
    if not connection.in_atomic_block:
        raise transaction.TransactionManagementError("first_time needs a transaction: use transaction.atomic()")
    table = connection.ops.quote_name(inbox.table.name)
    statement = f"INSERT INTO {table} (consumer, message_id) VALUES (%s, %s) ON CONFLICT DO NOTHING"
    with connection.cursor() as cursor:
        cursor.execute(statement, [consumer, message_id])
        return bool(cursor.rowcount == 1)


def forget(older_than: float, *, using: str = "default") -> int:
    """Forget messages that were handled.

    Args:
        older_than: seconds; more than the delay of any second copy.
        using: the alias of the database.

    Returns:
        How many were forgotten.
    """
    connection = connections[using]
    # The times were written by the clock of the database.
    before = (
        "datetime('now', %s || ' seconds')" if connection.vendor == "sqlite" else "now() + make_interval(secs => %s)"
    )
    table = connection.ops.quote_name(inbox.table.name)
    with connection.cursor() as cursor:
        cursor.execute(f"DELETE FROM {table} WHERE handled_at < {before}", [-older_than])
        return int(cursor.rowcount)
