"""An inbox in the consumer's database. It records each message in the transaction that handles the message.

The transaction commits both the record of the message and the application's changes. If the process is killed before
the commit, neither is stored. So the inbox recognizes the second copies that a producer with an outbox may send.
"""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import timedelta
from typing import Any, overload

from sqlalchemy import Column, Connection, DateTime, Index, MetaData, Table, Text, delete, select
from sqlalchemy import func as sql
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from qflow_client.sqlalchemy.tables import dialect_of, refuse_async

__all__ = ["Inbox"]

_INSERTS: dict[str, Any] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}


class Inbox:
    """The ids of messages that a consumer has handled, in a table of the consumer's database (E14).

    Args:
        metadata: SQLAlchemy metadata of the application, to which the table is added; ``None`` for new metadata.
        name: name of the table.
        schema: schema of the table; ``None`` for the default schema of the connection.
    """

    def __init__(
        self, metadata: MetaData | None = None, *, name: str = "qflow_inbox", schema: str | None = None
    ) -> None:
        #: The metadata of the table.
        self.metadata = MetaData() if metadata is None else metadata
        #: The table.
        self.table = Table(
            name,
            self.metadata,
            Column("consumer", Text, primary_key=True),
            Column("message_id", Text, primary_key=True),
            Column("handled_at", DateTime(timezone=True), nullable=False, server_default=sql.now()),
            schema=schema,
        )
        Index(f"ix_{name}_handled_at", self.table.c.handled_at)

    @overload
    def first_time(self, session: Session | Connection, message_id: str, *, consumer: str = "") -> bool: ...

    @overload
    def first_time(
        self, session: AsyncSession | AsyncConnection, message_id: str, *, consumer: str = ""
    ) -> Awaitable[bool]: ...

    def first_time(
        self, session: Session | Connection | AsyncSession | AsyncConnection, message_id: str, *, consumer: str = ""
    ) -> bool | Awaitable[bool]:
        """Record a message in the caller's transaction. Return True if the message was not handled before.

        If another transaction has recorded a copy, the method waits for its end (on SQLite, at most the driver's
        timeout). If it rolls back, the result is True. With either result, the caller commits, then acks the message.

        Args:
            session: session or connection of the caller. If the session is asynchronous, await the result.
            consumer: name of the application that handles the message. If several applications use one table and each
                handles every message, they need different names. All workers of one queue need the same name.

        Raises:
            ValueError: `message_id` is empty, or the database is neither PostgreSQL nor SQLite.
        """
        if not message_id:
            raise ValueError(
                "the message has no message id, so a second copy cannot be recognized; publish with message ids"
            )
        dialect = dialect_of(session, self.table)
        if dialect not in _INSERTS:
            raise ValueError(f"database {dialect!r}: use PostgreSQL or SQLite")
        # If the row already exists, the statement returns no row.
        statement = _INSERTS[dialect](self.table).on_conflict_do_nothing().returning(self.table.c.message_id)
        values = {"consumer": consumer, "message_id": message_id}
        if isinstance(session, (AsyncSession, AsyncConnection)):
            return _is_first(session, statement, values)
        return session.execute(statement, values).first() is not None

    def forget(self, connection: Session | Connection, older_than: float) -> int:
        """Delete old records in the caller's transaction, and return the number of deleted records.

        Args:
            older_than: minimum age in seconds of the deleted records. Later copies of these messages count as new.
        """
        refuse_async(connection, "inbox.forget")
        # Use the clock of the database, because the stored times are from this clock.
        before = connection.execute(select(sql.now())).scalar_one() - timedelta(seconds=older_than)
        gone: Any = connection.execute(delete(self.table).where(self.table.c.handled_at < before))
        return int(gone.rowcount)


async def _is_first(session: AsyncSession | AsyncConnection, statement: Any, values: dict[str, str]) -> bool:
    return (await session.execute(statement, values)).first() is not None
