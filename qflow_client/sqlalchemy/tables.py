"""The three tables of an outbox, and the meaning of their columns.

``<name>``: one row for each message that waits. The application inserts a row, and the relay deletes it. A row is never
changed, so no index has an entry that moves, and no row has a state column.

``<name>_failed``: messages that the broker will never take, with its reply. Operators look at them, and can send them
back.

``<name>_relay``: one row for each partition, with the row up to which its messages may have been sent.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    DateTime,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
)
from sqlalchemy import func as sql
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.expression import ColumnElement

__all__ = ["PARTITIONS", "Tables", "dialect_of", "partition_of"]

#: The number of partitions of the ordering keys. Applications of any release write it, so it never changes. It is also
#: the most relays that can share the work.
PARTITIONS = 16


def partition_of(ordering_key: str) -> int:
    """Return the partition of an ordering key."""
    return crc32(ordering_key.encode()) % PARTITIONS


def dialect_of(session: Any, table: Table) -> str:
    """Return the name of the database in which a session or connection has a table.

    Raises:
        TypeError: it is neither a session nor a connection.
    """
    if isinstance(session, AsyncSession):
        session = session.sync_session
    if isinstance(session, Session):
        return str(session.get_bind(clause=table).dialect.name)
    if isinstance(session, (Connection, AsyncConnection)):
        return str(session.dialect.name)
    raise TypeError(f"give a session or connection of SQLAlchemy, not {type(session).__name__}")


class _TransactionId(ColumnElement[int]):
    """The number of the transaction that inserts; 0 in databases that allow one writer at a time."""

    inherit_cache = True
    type = BigInteger()


@compiles(_TransactionId)
def _compile_default(_element: _TransactionId, _compiler: Any, **_: Any) -> str:
    return "0"


@compiles(_TransactionId, "postgresql")
def _compile_postgresql(_element: _TransactionId, _compiler: Any, **_: Any) -> str:
    # As a bigint, which has an operator class, can be compared with snapshots, and can be read by every driver.
    return "(pg_current_xact_id()::text::bigint)"


class Tables:
    """The tables of one outbox.

    Args:
        metadata: their metadata.
        name: the name of the first table; the others' names begin with it.
        schema: of the tables.
    """

    def __init__(self, metadata: MetaData, name: str, schema: str | None) -> None:
        number = BigInteger().with_variant(Integer(), "sqlite")
        now = sql.now()

        def message() -> tuple[Column[Any], ...]:
            return (
                Column("partition", SmallInteger, nullable=False),
                Column("ordering_key", Text),
                Column("exchange", Text, nullable=False),
                Column("routing_key", Text, nullable=False),
                # The properties, as the payload of AMQP's content header.
                Column("properties", LargeBinary, nullable=False),
                Column("body", LargeBinary, nullable=False),
            )

        self.rows = Table(
            name,
            metadata,
            Column("id", number, primary_key=True, autoincrement=True),
            Column("xid", BigInteger, nullable=False, server_default=_TransactionId()),
            *message(),
            Column("created_at", DateTime(timezone=True), nullable=False, server_default=now),
            schema=schema,
            # An id must not be assigned twice, because it identifies the messages that may have been sent.
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
            # A relay records a number here before it passes rows up to that number to the broker.
            Column("permitted", BigInteger, nullable=False),
            # Rows that the broker has confirmed.
            Column("relayed", BigInteger, nullable=False),
            schema=schema,
        )

    @property
    def full_name(self) -> str:
        """The name of the first table, with its schema if it has one."""
        return str(self.rows.fullname)

    @property
    def lock_class(self) -> int:
        """The first number of the advisory locks, a signed integer of 32 bits."""
        number = crc32(f"qflow {self.full_name}".encode())
        return number - (1 << 32) if number >= 1 << 31 else number

    @property
    def session_name(self) -> str:
        """The name of its relays' sessions in the database; the holds of a relay follow it."""
        return f"qflow relay {crc32(self.full_name.encode()):08x}: "

    @property
    def channel(self) -> str:
        """The channel of ``LISTEN`` and ``NOTIFY``."""
        return f"qflow_{crc32(self.full_name.encode()):08x}"
