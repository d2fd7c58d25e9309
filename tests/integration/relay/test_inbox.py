"""`Inbox`: a message is handled once, in the transaction of the consumer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from benchmarks.postgresql import PostgresqlServer
from qflow_client.sqlalchemy import Inbox

from .support import PATIENCE, engine_of_each_database

engine = engine_of_each_database


@pytest.fixture
def inbox(engine: Engine) -> Iterator[Inbox]:
    inbox = Inbox()
    inbox.metadata.create_all(engine)
    yield inbox
    inbox.metadata.drop_all(engine)


def test_E14_the_inbox_reports_a_message_as_new_only_once_unless_the_transaction_is_rolled_back(
    engine: Engine, inbox: Inbox
) -> None:
    with Session(engine) as session:
        assert inbox.first_time(session, "1")
        session.rollback()
        assert inbox.first_time(session, "1")
        session.commit()
        assert not inbox.first_time(session, "1")
        assert inbox.first_time(session, "1", consumer="another")
        with pytest.raises(ValueError, match="message id"):
            inbox.first_time(session, "")


def test_E14_the_inbox_forgets_old_message_ids(engine: Engine, inbox: Inbox) -> None:
    with engine.begin() as connection:
        assert inbox.first_time(connection, "1")
        assert inbox.forget(connection, older_than=3600) == 0
        assert inbox.forget(connection, older_than=-3600) == 1
        assert inbox.first_time(connection, "1")


@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
def test_E14_the_inbox_lets_a_second_copy_wait_while_the_first_copy_is_being_handled(
    postgresql: PostgresqlServer, commits: bool
) -> None:
    engine = create_engine(postgresql.url)
    inbox = Inbox(name="waiting")
    inbox.metadata.create_all(engine)
    answers: list[bool] = []

    def handle_copy() -> None:
        with engine.begin() as connection:
            answers.append(inbox.first_time(connection, "1"))

    copy = threading.Thread(target=handle_copy)
    with engine.connect() as connection:
        transaction = connection.begin()
        assert inbox.first_time(connection, "1")
        copy.start()
        assert answers == []
        if commits:
            transaction.commit()
        else:
            transaction.rollback()
    copy.join(PATIENCE)
    assert answers == [not commits]
    inbox.metadata.drop_all(engine)
    engine.dispose()


def test_E14_the_inbox_recognises_second_copies_in_asynchronous_sessions(postgresql: PostgresqlServer) -> None:
    async def main() -> list[bool]:
        engine = create_async_engine(postgresql.url.replace("+psycopg", "+asyncpg"))
        inbox = Inbox(name="of_coroutines")
        async with engine.begin() as connection:
            await connection.run_sync(inbox.metadata.create_all)
            answers = [await inbox.first_time(connection, "1")]
        async with AsyncSession(engine) as session:
            answers.append(await inbox.first_time(session, "1"))
            await session.commit()
        async with engine.begin() as connection:
            await connection.run_sync(inbox.metadata.drop_all)
        await engine.dispose()
        return answers

    assert asyncio.run(main()) == [True, False]
