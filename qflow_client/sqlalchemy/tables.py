"""The three tables of an outbox, and their columns.

``<name>``: one row for each waiting message. The application inserts a row, and the relay deletes it. Rows are updated
only if they come from a backup of another server, so index entries rarely change.

``<name>_failed``: messages that cannot be delivered, each with the reason. `Outbox.retry` moves these messages back.

``<name>_relay``: for each partition, the id up to which rows may have been sent, and the number of confirmed rows.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    DateTime,
    Dialect,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    text,
)
from sqlalchemy import func as sql
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.expression import ColumnElement

__all__ = ["PARTITIONS", "Tables", "dialect_of", "partition_of", "refuse_async"]

#: The number of partitions of the ordering keys. This number must never change, because applications with an older
#: version of this package may write rows at the same time. On PostgreSQL, at most this number of relays share the work.
PARTITIONS = 16


def partition_of(ordering_key: str) -> int:
    """Return the partition of an ordering key."""
    return crc32(ordering_key.encode()) % PARTITIONS


def dialect_of(session: Any, table: Table) -> str:
    """Return the name of the database system in which a session or connection finds a table."""
    if isinstance(session, AsyncSession):
        session = session.sync_session
    if isinstance(session, Session):
        return str(session.get_bind(clause=table).dialect.name)
    if isinstance(session, (Connection, AsyncConnection)):
        return str(session.dialect.name)
    way_out = "; call it, to get its session" if callable(session) else ""
    raise TypeError(f"give a session or connection of SQLAlchemy, not {type(session).__name__}{way_out}")


def refuse_async(session: Any, method: str) -> None:
    """Raise TypeError for an asynchronous session, because the method is not a coroutine."""
    if isinstance(session, (AsyncSession, AsyncConnection)):
        raise TypeError(f"{method} needs a synchronous session: use await session.run_sync({method}, …)")


class _TransactionId(ColumnElement[int]):
    """The number of the transaction that inserts the row; 0 on SQLite, which allows only one writer at a time."""

    inherit_cache = True
    type = BigInteger()


@compiles(_TransactionId)
def _compile_default(_element: _TransactionId, _compiler: Any, **_: Any) -> str:
    return "0"


@compiles(_TransactionId, "postgresql")
def _compile_postgresql(_element: _TransactionId, _compiler: Any, **_: Any) -> str:
    # Use bigint instead of xid8, because every driver can read and send it, to compare it with a snapshot.
    return "(pg_current_xact_id()::text::bigint)"


class Tables:
    """The tables of one outbox. `name` is the name of the table of waiting messages."""

    def __init__(self, metadata: MetaData, name: str, schema: str | None) -> None:
        number = BigInteger().with_variant(Integer(), "sqlite")
        now = sql.now()

        def message() -> tuple[Column[Any], ...]:
            return (
                Column("partition", SmallInteger, nullable=False),
                Column("ordering_key", Text),
                Column("exchange", Text, nullable=False),
                Column("routing_key", Text, nullable=False),
                # The properties, encoded like the payload of an AMQP content header.
                Column("properties", LargeBinary, nullable=False),
                Column("body", LargeBinary, nullable=False),
            )

        #: The names of the columns that describe a message. The tables of waiting and of failed messages have them.
        self.message_columns = tuple(column.name for column in message())
        self.rows = Table(
            name,
            metadata,
            Column("id", number, primary_key=True, autoincrement=True),
            # With `default`, inserts need no default in the database. A migration made on SQLite has the default 0.
            Column("xid", BigInteger, nullable=False, default=_TransactionId(), server_default=_TransactionId()),
            *message(),
            Column("created_at", DateTime(timezone=True), nullable=False, server_default=now),
            schema=schema,
            # SQLite must not reuse the ids of deleted rows, because the ids show which messages may have been sent.
            sqlite_autoincrement=True,
        )
        Index(f"ix_{name}_xid", self.rows.c.xid)
        self.failed = Table(
            f"{name}_failed",
            metadata,
            Column("id", number, primary_key=True, autoincrement=False),
            *message(),
            Column("created_at", DateTime(timezone=True), nullable=False),
            Column("failed_at", DateTime(timezone=True), nullable=False, server_default=now),
            Column("reply", Text, nullable=False),
            schema=schema,
        )
        self.relay = Table(
            f"{name}_relay",
            metadata,
            Column("partition", SmallInteger, primary_key=True, autoincrement=False),
            # Rows up to this id may have been sent. A relay raises the id before it sends the rows.
            Column("permitted", BigInteger, nullable=False),
            # Number of rows that the broker has confirmed.
            Column("relayed", BigInteger, nullable=False),
            schema=schema,
        )

    @property
    def full_name(self) -> str:
        """The name of the table of waiting messages, with its schema if it has one."""
        return str(self.rows.fullname)

    def relay_keys(self, connection: Connection | Session) -> tuple[int, str]:
        """Return what the relays of this outbox have in common on PostgreSQL, and relays of other outboxes have not.

        The first key of the advisory locks is a signed integer of 32 bits. The first part of the ``application_name``
        of each relay's session is a text. The holds of the relay follow.

        Without a schema, the search path of the session decides which table is used. So ask the server for the schema.
        """
        dialect: Dialect = postgresql.dialect()  # type: ignore[no-untyped-call]  # SQLAlchemy has no types here
        quoted = dialect.identifier_preparer.format_table(self.rows)
        query = "SELECT nspname FROM pg_namespace n JOIN pg_class c ON relnamespace = n.oid AND c.oid = to_regclass(:t)"
        schema = connection.execute(text(query), {"t": quoted}).scalar()
        name = self.rows.name if schema in (None, "public") else f"{schema}.{self.rows.name}"
        number = crc32(f"qflow {name}".encode())
        return number - (1 << 32) if number >= 1 << 31 else number, f"qflow relay {crc32(name.encode()):08x}: "

    @property
    def channel(self) -> str:
        """The name of the channel for ``LISTEN`` and ``NOTIFY``."""
        return f"qflow_{crc32(self.full_name.encode()):08x}"
