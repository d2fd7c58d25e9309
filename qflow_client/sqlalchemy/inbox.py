"""`Inbox` lets a consumer record handled messages in its own database, in the transaction that handles them.

So handling and recording are atomic: a process that dies in between has done neither. With a producer that loses no
message, and that repeats its ids, each message is handled effectively once.
"""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import UTC, datetime, timedelta
from typing import Any, overload

from sqlalchemy import Column, Connection, DateTime, Index, MetaData, Table, Text, delete
from sqlalchemy import func as sql
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from qflow_client.sqlalchemy.tables import dialect_of

__all__ = ["Inbox"]

_INSERTS: dict[str, Any] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}


class Inbox:
    """The ids of messages that a consumer has handled, in a table of the consumer's database (E14).

    Args:
        metadata: the application's, to which the table is added; ``None`` for a separate one.
        name: of the table.
        schema: the schema of the table; ``None`` for the connection's default.
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
        """Remember a message in the caller's transaction. The result is True if it was not handled before.

        If another transaction is handling a copy, this waits for its end. If that transaction is rolled back, the
        message is handled here. Acknowledge the message after the commit, whatever the result is.

        Args:
            session: the caller's; with an asynchronous one, await the result.
            message_id: of the message.
            consumer: name of the consumer, if several in one database handle the same messages.

        Raises:
            ValueError: the message has no id, or the database is not supported.
        """
        if not message_id:
            raise ValueError(
                "the message has no message id, so a second copy cannot be recognized; publish with message ids"
            )
        dialect = dialect_of(session, self.table)
        if dialect not in _INSERTS:
            raise ValueError(f"database {dialect!r}: use PostgreSQL or SQLite")
        # Only an inserted row is returned.
        statement = _INSERTS[dialect](self.table).on_conflict_do_nothing().returning(self.table.c.message_id)
        values = {"consumer": consumer, "message_id": message_id}
        if isinstance(session, (AsyncSession, AsyncConnection)):
            return _is_first(session, statement, values)
        return session.execute(statement, values).first() is not None

    def forget(self, connection: Session | Connection, older_than: float) -> int:
        """Forget messages, in the caller's transaction.

        Args:
            connection: a connection to the database.
            older_than: seconds; more than the delay of any second copy.

        Returns:
            How many were forgotten.
        """
        before = datetime.now(UTC) - timedelta(seconds=older_than)
        gone: Any = connection.execute(delete(self.table).where(self.table.c.handled_at < before))
        return int(gone.rowcount)


async def _is_first(session: AsyncSession | AsyncConnection, statement: Any, values: dict[str, str]) -> bool:
    return (await session.execute(statement, values)).first() is not None
