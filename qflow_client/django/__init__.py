"""An outbox in a Django application's database (E14). A message is published if and only if its transaction commits.

Add ``"qflow_client.django"`` to ``INSTALLED_APPS``. ``manage.py migrate`` then creates the tables. `add` writes a
message in the current transaction. A relay of `qflow_client.sqlalchemy`, or ``qflow relay``, publishes the message. A
consumer uses `first_time` to remember handled messages. The package needs the extra ``django``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db import connections, transaction

from qflow_client.message import Message
from qflow_client.sqlalchemy import Inbox, Outbox

__all__ = ["add", "add_many", "first_time", "forget", "inbox", "outbox"]

#: The outbox, whose tables a migration creates. Use it for `OutboxRelay(…, outbox=outbox)` and ``outbox.status``.
outbox = Outbox()
#: The inbox, whose table a migration creates.
inbox = Inbox()

# Maximum number of rows in one statement. SQLite accepts 32,766 values; versions before 3.32 accept only 999.
_ROWS = 100


def add(
    message: bytes | str | Message,
    *,
    exchange: str | None = None,
    routing_key: str | None = None,
    ordering_key: str | None = None,
    using: str = "default",
) -> str:
    """Add a message in the current transaction. The message is published if and only if the transaction commits.

    Args:
        message: the body, or a `Message` with properties.
        exchange: exchange of the message. The default is the exchange of a `RoutedMessage`, or else ``""``.
        routing_key: routing key of the message. The default is the routing key of a `RoutedMessage`, or else ``""``.
        ordering_key: messages with the same key are published in the order in which they were added. The messages of
            transactions that run at the same time have no order. ``None`` for a message without an order.
        using: alias of the database.

    Returns:
        The message id of the message, or a new message id if the message has none.

    Raises:
        TypeError: the message has a type that is not allowed.
        ValueError: AMQP cannot represent the message.
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
    """Add messages in order, with few statements. If one message is invalid, no message is added.

    The arguments and errors are as for `add`. The result has the message ids in the order of the messages.
    """
    made = [outbox.encode(message, exchange, routing_key, ordering_key) for message in messages]
    connection = connections[using]
    table = connection.ops.quote_name(outbox.tables.rows.name)
    columns = outbox.tables.message_columns
    with transaction.atomic(using, savepoint=False), connection.cursor() as cursor:
        for begin in range(0, len(made), _ROWS):
            rows = [values for values, _ in made[begin : begin + _ROWS]]
            places = ", ".join([f"({', '.join(['%s'] * len(columns))})"] * len(rows))
            statement = f"INSERT INTO {table} ({', '.join(columns)}) VALUES {places}"
            given: list[Any] = [values[name] for values in rows for name in columns]
            if connection.vendor == "postgresql":
                # Notify the relays, as `Outbox.add` does.
                statement += " RETURNING pg_notify(%s, '')"
                given.append(outbox.tables.channel)
            cursor.execute(statement, given)
    return [message_id for _, message_id in made]


def first_time(message_id: str, *, consumer: str = "", using: str = "default") -> bool:
    """Record in the current transaction that a message is handled. Return True if the message was not handled before.

    Call this function in the transaction that handles the message. While another transaction handles a copy, the call
    waits (on SQLite, at most the driver's timeout). With either result, acknowledge the message after the commit.

    Args:
        consumer: name of the consumer. Two consumers of the same messages in one database need different names.
        using: alias of the database.

    Raises:
        ValueError: `message_id` is empty.
        django.db.transaction.TransactionManagementError: there is no transaction.
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
    """Delete old records of handled messages, and return their number.

    Args:
        older_than: minimum age in seconds of the deleted records. Later copies of these messages are handled again.
        using: alias of the database.
    """
    connection = connections[using]
    # Use the clock of the database, because the stored times are from this clock.
    before = (
        "datetime('now', %s || ' seconds')" if connection.vendor == "sqlite" else "now() + make_interval(secs => %s)"
    )
    table = connection.ops.quote_name(inbox.table.name)
    with connection.cursor() as cursor:
        cursor.execute(f"DELETE FROM {table} WHERE handled_at < {before}", [-older_than])
        return int(cursor.rowcount)
