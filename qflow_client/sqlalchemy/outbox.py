"""The application's interface to an outbox in its own database.

`Outbox.add` encodes a message, and gives it a message id if it has none. So the application cannot change the message
after `add` (E3), and all copies of a message have the same id.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Awaitable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, overload

from sqlalchemy import Connection, Insert, MetaData, delete, func, insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from qflow_client.amqp.fields import encode_short_string
from qflow_client.amqp.frames import FrameError, content_header
from qflow_client.message import Message, RoutedMessage, decode_message
from qflow_client.producer import resolve
from qflow_client.sqlalchemy.backlog import measure
from qflow_client.sqlalchemy.sqlite import relay_of
from qflow_client.sqlalchemy.tables import PARTITIONS, Tables, dialect_of, partition_of, refuse_async

__all__ = ["FailedRow", "Outbox", "OutboxStatus"]


@dataclass(frozen=True, slots=True)
class OutboxStatus:
    """The content of an outbox at one moment.

    Attributes:
        depth: number of waiting rows.
        oldest_age: age of the oldest waiting row in seconds, by the database's clock; 0 if no row waits.
        failed: number of rows in the table of failed rows.
        relayed: number of rows that the broker has confirmed so far.
        relays: number of working relays; ``None`` if the number is unknown.
        holds: for each relay whose producer has holds, the first two of these holds, such as ``"channel_flow, rate"``.
    """

    depth: int
    oldest_age: float
    failed: int
    relayed: int
    relays: int | None
    holds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A message in the table of failed rows. The broker has returned or rejected this message, or no relay can send it.

    Attributes:
        id: id of the row in the table of failed rows.
        message: the message with its exchange and routing key; ``None`` if the row is damaged.
        ordering_key: ordering key with which the message was added, or ``None``.
        reply: reply text of the broker, or the error of a relay that could not send the message.
        failed_at: time at which a relay moved the message to the table of failed rows.
    """

    id: int
    message: RoutedMessage | None
    ordering_key: str | None
    reply: str
    failed_at: datetime


class Outbox:
    """The tables of an outbox in the application's database, and methods to add messages to it.

    Create the tables with ``metadata.create_all(engine)``, or with a migration that Alembic generates
    (``--autogenerate``). The outbox needs no triggers and no functions in the database.

    Args:
        metadata: SQLAlchemy metadata of the application, to which the tables are added; ``None`` for new metadata.
        name: name of the main table. The names of the other tables are ``<name>_failed`` and ``<name>_relay``.
        schema: schema of the tables; ``None`` for the default schema of the connection.
        notify: whether to wake the relays with ``NOTIFY`` on PostgreSQL. PostgreSQL commits transactions with
            ``NOTIFY`` one by one. Without ``NOTIFY``, relays find new rows at their next poll.
    """

    def __init__(
        self,
        metadata: MetaData | None = None,
        *,
        name: str = "qflow_outbox",
        schema: str | None = None,
        notify: bool = True,
    ) -> None:
        #: The metadata of the tables.
        self.metadata = MetaData() if metadata is None else metadata
        #: The three tables.
        self.tables = Tables(self.metadata, name, schema)
        self._notify = notify

    @overload
    def add(
        self,
        session: Session | Connection,
        message: bytes | str | Message,
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        ordering_key: str | None = None,
    ) -> str: ...

    @overload
    def add(
        self,
        session: AsyncSession | AsyncConnection,
        message: bytes | str | Message,
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        ordering_key: str | None = None,
    ) -> Awaitable[str]: ...

    def add(
        self,
        session: Session | Connection | AsyncSession | AsyncConnection,
        message: bytes | str | Message,
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        ordering_key: str | None = None,
    ) -> str | Awaitable[str]:
        """Add a message in the caller's transaction. A relay publishes the message after the transaction has committed.

        Args:
            session: session or connection of the caller. If the session is asynchronous, await the result.
            message: the body, or a `Message` with properties.
            exchange: exchange of the message. The default is the exchange of a `RoutedMessage`, or else ``""``.
            routing_key: routing key of the message. The default is the routing key of a `RoutedMessage`, or else
                ``""``.
            ordering_key: messages with the same key are published in the order in which they were added. Messages of
                transactions that run at the same time can come in any order. ``None`` for a message without an order.

        Returns:
            The message id of the message. If the message has no id, a new id is assigned.

        Raises:
            TypeError: the message or the session has a type that is not allowed.
            ValueError: AMQP cannot represent the message.
        """
        values, message_id = self.encode(message, exchange, routing_key, ordering_key)
        if isinstance(session, (AsyncSession, AsyncConnection)):
            return self._execute(session, values, message_id)
        statement = self._insert(dialect_of(session, self.tables.rows))
        session.execute(statement, values)
        return message_id

    @overload
    def add_many(
        self,
        session: Session | Connection,
        messages: Iterable[bytes | str | Message],
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        ordering_key: str | None = None,
    ) -> list[str]: ...

    @overload
    def add_many(
        self,
        session: AsyncSession | AsyncConnection,
        messages: Iterable[bytes | str | Message],
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        ordering_key: str | None = None,
    ) -> Awaitable[list[str]]: ...

    def add_many(
        self,
        session: Session | Connection | AsyncSession | AsyncConnection,
        messages: Iterable[bytes | str | Message],
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        ordering_key: str | None = None,
    ) -> list[str] | Awaitable[list[str]]:
        """Add messages in order, with few SQL statements. If one of the messages is invalid, no message is added.

        The arguments and errors are as for `add`. The result has the message ids in the order of the messages.
        """
        made = [self.encode(message, exchange, routing_key, ordering_key) for message in messages]
        rows, ids = [values for values, _ in made], [message_id for _, message_id in made]
        if isinstance(session, (AsyncSession, AsyncConnection)):
            return self._execute(session, rows, ids)
        if rows:
            statement = self._insert(dialect_of(session, self.tables.rows))
            session.execute(statement, rows)
        return ids

    async def _execute(self, session: AsyncSession | AsyncConnection, values: Any, result: Any) -> Any:
        if values:
            await session.execute(self._insert(dialect_of(session, self.tables.rows)), values)
        return result

    def _insert(self, dialect: str) -> Insert:
        statement = insert(self.tables.rows)
        if dialect == "postgresql" and self._notify:
            # The statement also notifies the relays, so no second round trip and no trigger is needed. PostgreSQL sends
            # one notification at the commit. `sort_by_parameter_order` gives the rows ids in the order of the messages.
            woken = func.pg_notify(self.tables.channel, "")
            return statement.returning(woken, sort_by_parameter_order=True)
        return statement

    def encode(
        self, given: bytes | str | Message, exchange: str | None, routing_key: str | None, ordering_key: str | None
    ) -> tuple[dict[str, Any], str]:
        """Return the values of the row for a message, and the message id, for programs that insert the row themselves.

        The arguments and errors are as for `add`.
        """
        payload, exchange, routing_key = resolve(given, exchange, routing_key)
        message = payload if isinstance(payload, Message) else Message(payload)
        if not isinstance(ordering_key, str | None):
            raise TypeError(f"ordering_key must be a str, not {type(ordering_key).__name__}: {ordering_key!r:.60}")
        exchange, routing_key = exchange or "", routing_key or ""
        encode_short_string(exchange, "exchange")
        encode_short_string(routing_key, "routing_key")
        message_id = message.message_id or uuid.uuid4().hex
        header = content_header(message, encode_short_string(message_id, "message_id"))
        values = {
            "partition": random.randrange(PARTITIONS) if ordering_key is None else partition_of(ordering_key),
            "ordering_key": ordering_key,
            "exchange": exchange,
            "routing_key": routing_key,
            "properties": header,
            "body": message.body,
        }
        return values, message_id

    def status(self, connection: Connection | Session) -> OutboxStatus:
        """Return the numbers of rows and relays, and the holds of the relays."""
        refuse_async(connection, "outbox.status")
        failed, relay = self.tables.failed, self.tables.relay
        depth, oldest_age = measure(connection, self.tables)
        is_postgresql = dialect_of(connection, self.tables.rows) == "postgresql"
        relays, holds = self._relays(connection) if is_postgresql else relay_of(connection, self.tables)
        return OutboxStatus(
            depth=depth,
            oldest_age=oldest_age,
            failed=connection.execute(select(func.count()).select_from(failed)).scalar_one(),
            relayed=int(connection.execute(select(func.coalesce(func.sum(relay.c.relayed), 0))).scalar_one()),
            relays=relays,
            holds=holds,
        )

    def _relays(self, connection: Connection | Session) -> tuple[int, tuple[str, ...]]:
        locks = (
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND granted"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            " AND classid = :class AND objid = :member"
        )
        lock_class, prefix = self.tables.relay_keys(connection)
        given = {"class": lock_class % (1 << 32), "member": PARTITIONS}
        names = (
            "SELECT application_name FROM pg_stat_activity"
            " WHERE datname = current_database() AND starts_with(application_name, :name) ORDER BY pid"
        )
        found = connection.execute(text(names), {"name": prefix}).scalars()
        holds = tuple(name.removeprefix(prefix) for name in found if name != prefix)
        return connection.execute(text(locks), given).scalar_one(), holds

    def failed(self, connection: Connection | Session, *, after: int = 0, limit: int = 100) -> list[FailedRow]:
        """Return messages from the table of failed rows, in the order of `FailedRow.id`.

        Args:
            after: return only messages with a `FailedRow.id` above this number.
            limit: maximum number of messages to return.
        """
        refuse_async(connection, "outbox.failed")
        table = self.tables.failed
        found = connection.execute(select(table).where(table.c.id > after).order_by(table.c.id).limit(limit))
        return [
            FailedRow(
                id=row.id,
                message=_message_of(row),
                ordering_key=row.ordering_key,
                reply=row.reply,
                failed_at=_aware(row.failed_at),
            )
            for row in found
        ]

    def retry(self, connection: Connection | Session, ids: Iterable[int] | None = None) -> int:
        """Move failed messages to the end of the outbox, in the caller's transaction. Return the number of messages.

        Args:
            ids: the `FailedRow.id` of each message to move; ``None`` for all messages.
        """
        refuse_async(connection, "outbox.retry")
        failed = self.tables.failed
        if ids is None:
            ids = connection.execute(select(failed.c.id)).scalars().all()
        names = self.tables.message_columns
        query = select(*(failed.c[name] for name in (*names, "id"))).order_by(failed.c.id).with_for_update()
        statement = self._insert(dialect_of(connection, self.tables.rows))
        count = 0
        for batch in _batches(ids):
            found = connection.execute(query.where(failed.c.id.in_(batch))).all()
            gone = delete(failed).where(failed.c.id.in_([row.id for row in found])).returning(failed.c.id)
            # On SQLite, another transaction may have moved rows since the query.
            mine = set(connection.execute(gone).scalars())
            if rows := [{name: getattr(row, name) for name in names} for row in found if row.id in mine]:
                connection.execute(statement, rows)
                count += len(rows)
        return count

    def forget(self, connection: Connection | Session, ids: Iterable[int]) -> int:
        """Delete failed messages, in the caller's transaction. Return the number of deleted messages.

        Args:
            ids: the `FailedRow.id` of each message to delete.
        """
        refuse_async(connection, "outbox.forget")
        failed = self.tables.failed
        count = 0
        for batch in _batches(ids):
            gone: Any = connection.execute(delete(failed).where(failed.c.id.in_(batch)))
            count += gone.rowcount
        return count


def _batches(ids: Iterable[int]) -> Iterator[list[int]]:
    # Every usual build of SQLite and PostgreSQL accepts this number of values in one statement.
    ordered = sorted(ids)
    return (ordered[begin : begin + 500] for begin in range(0, len(ordered), 500))


def _message_of(row: Any) -> RoutedMessage | None:
    try:
        return RoutedMessage.copy_of(decode_message(row.properties, row.body), row.exchange, row.routing_key)
    except FrameError:
        return None


def _aware(at: datetime) -> datetime:
    # Times of SQLite are in UTC and have no time zone.
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
