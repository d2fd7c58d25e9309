"""The three tables of an outbox, and what their columns mean.

``<name>``: one row for each message that waits. A row is never changed: it is inserted by the application and deleted
by the relay, so no index has an entry that moves, and no row has a state. That it is there is its state.

``<name>_failed``: messages that the broker will not take, with its reply. People look at them, and send them back.

``<name>_relay``: one row for each partition: up to which row its messages may have been sent.
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

#: Into how many parts the ordering keys are divided. Applications of any release write it, so it never changes. It is
#: also the most relays that can share the work.
PARTITIONS = 16


def partition_of(ordering_key: str) -> int:
    """Return the partition of an ordering key."""
    return crc32(ordering_key.encode()) % PARTITIONS


def dialect_of(session: Any, table: Table) -> str:
    """Return the name of the database in which a session or connection has a table.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(session, AsyncSession):
        session = session.sync_session
    if isinstance(session, Session):
        return str(session.get_bind(clause=table).dialect.name)
    if isinstance(session, (Connection, AsyncConnection)):
        return str(session.dialect.name)
    raise TypeError(f"a session or connection of SQLAlchemy is needed, not {type(session).__name__}")


class _TransactionId(ColumnElement[int]):
    """The number of the transaction that inserts; 0 in databases whose writers take turns."""

    inherit_cache = True
    type = BigInteger()


@compiles(_TransactionId)
def _compile_default(_element: _TransactionId, _compiler: Any, **_: Any) -> str:
    return "0"


@compiles(_TransactionId, "postgresql")
def _compile_postgresql(_element: _TransactionId, _compiler: Any, **_: Any) -> str:
    # As a bigint: it has an operator class, compares with what snapshots say, and every driver can read it.
    return "(pg_current_xact_id()::text::bigint)"


class Tables:
    """The tables of one outbox.

    Args:
        metadata: where they are defined.
        name: of the first; the others' names begin with it.
        schema: that they are in.
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
            # An id must not be given twice: what may have been sent is known by it.
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
            # No row with a larger id has been given to the broker by a relay that has not said so here before.
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
        """The first number of the advisory locks, of 32 bits with a sign."""
        number = crc32(f"qflow {self.full_name}".encode())
        return number - (1 << 32) if number >= 1 << 31 else number

    @property
    def session_name(self) -> str:
        """How the sessions of its relays are called in the database; what holds a relay follows."""
        return f"qflow relay {crc32(self.full_name.encode()):08x}: "

    @property
    def channel(self) -> str:
        """The channel of ``LISTEN`` and ``NOTIFY``."""
        return f"qflow_{crc32(self.full_name.encode()):08x}"
