"""The rows that `Outbox.add` writes, on SQLite in memory."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, MetaData, create_engine, delete, event, insert, literal, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from qflow_client import Message, RoutedMessage
from qflow_client.message import decode_message
from qflow_client.sqlalchemy import Inbox, Outbox, RelayError
from qflow_client.sqlalchemy.sqlite import SqliteSession
from qflow_client.sqlalchemy.tables import PARTITIONS


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = create_engine("sqlite://")
    yield engine
    engine.dispose()


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    outbox = Outbox()
    outbox.metadata.create_all(engine)
    return outbox


def rows(engine: Engine, outbox: Outbox) -> list[Any]:
    with engine.begin() as connection:
        return list(connection.execute(select(outbox.tables.rows).order_by(outbox.tables.rows.c.id)))


def test_E14_a_message_is_stored_in_the_database_outbox_if_the_transaction_commits(
    engine: Engine, outbox: Outbox
) -> None:
    with Session(engine) as session:
        outbox.add(session, "an order", exchange="x", routing_key="orders", ordering_key="7")
        session.commit()
    with engine.begin() as connection:
        outbox.add(connection, b"another", routing_key="orders")
    first, second = rows(engine, outbox)
    assert (first.exchange, first.routing_key, first.ordering_key, first.body) == ("x", "orders", "7", b"an order")
    assert (second.exchange, second.routing_key, second.ordering_key, second.body) == ("", "orders", None, b"another")


def test_E14_a_message_added_in_a_transaction_or_savepoint_is_rolled_back_with_it(
    engine: Engine, outbox: Outbox
) -> None:
    with Session(engine) as session:
        outbox.add(session, b"rolled back", routing_key="q")
        session.rollback()
        outbox.add(session, b"kept", routing_key="q")
        with session.begin_nested() as savepoint:
            outbox.add(session, b"rolled back as well", routing_key="q")
            savepoint.rollback()
        session.commit()
    assert [row.body for row in rows(engine, outbox)] == [b"kept"]


def test_E3_a_message_is_encoded_when_it_is_added_so_that_later_changes_have_no_effect(
    engine: Engine, outbox: Outbox
) -> None:
    headers = {"k": ["v"]}
    message = Message(b"m", headers=headers, content_type="text/plain", priority=3)
    with engine.begin() as connection:
        message_id = outbox.add(connection, message, routing_key="q")
        headers["k"].append("changed")
    (row,) = rows(engine, outbox)
    expected = Message(b"m", headers={"k": ["v"]}, content_type="text/plain", priority=3, message_id=message_id)
    assert decode_message(row.properties, row.body) == expected


def test_E14_a_message_id_is_assigned_once_and_never_changes(engine: Engine, outbox: Outbox) -> None:
    with engine.begin() as connection:
        given = outbox.add(connection, b"", routing_key="q")
        own = outbox.add(connection, Message(b"", message_id="mine"), routing_key="q")
    assert own == "mine"
    assert len(given) == 32
    assert [decode_message(row.properties, row.body).message_id for row in rows(engine, outbox)] == [given, "mine"]


def test_E14_a_routed_message_goes_to_its_exchange_and_routing_key_unless_arguments_override_them(
    engine: Engine, outbox: Outbox
) -> None:
    message = RoutedMessage(b"", exchange="x", routing_key="k")
    with engine.begin() as connection:
        outbox.add(connection, message)
        outbox.add(connection, message, exchange="", routing_key="q")
    assert [(row.exchange, row.routing_key) for row in rows(engine, outbox)] == [("x", "k"), ("", "q")]


def test_E14_add_many_keeps_the_order_of_its_messages(engine: Engine, outbox: Outbox) -> None:
    bodies = [b"%d" % number for number in range(2500)]
    with engine.begin() as connection:
        ids = outbox.add_many(connection, bodies, routing_key="q", ordering_key="k")
        assert outbox.add_many(connection, [], routing_key="q") == []
    found = rows(engine, outbox)
    assert [row.body for row in found] == bodies
    assert [decode_message(row.properties, row.body).message_id for row in found] == ids
    assert len({row.partition for row in found}) == 1


def test_E14_messages_without_a_key_are_distributed_over_all_partitions(engine: Engine, outbox: Outbox) -> None:
    with engine.begin() as connection:
        outbox.add_many(connection, [b""] * 1000, routing_key="q")
    assert {row.partition for row in rows(engine, outbox)} == set(range(PARTITIONS))


@pytest.mark.parametrize(
    ("message", "given", "error"),
    [
        (7, {}, TypeError),
        (b"", {"routing_key": "k" * 256}, ValueError),
        (b"", {"exchange": "x" * 256}, ValueError),
        (b"", {"ordering_key": 5}, TypeError),
        (Message(b"", headers={"k": object()}), {}, TypeError),
    ],
    ids=["no message", "routing key", "exchange", "ordering key", "headers"],
)
def test_E14_adding_a_message_that_cannot_be_sent_raises_an_error(
    engine: Engine, outbox: Outbox, message: Any, given: dict[str, Any], error: type[Exception]
) -> None:
    with engine.begin() as connection:
        with pytest.raises(error):
            outbox.add(connection, message, **given)
        with pytest.raises(error):
            outbox.add_many(connection, [b"good", message], **given)
    assert rows(engine, outbox) == []


def test_E14_the_error_about_a_session_of_another_type_says_what_to_do(engine: Engine, outbox: Outbox) -> None:
    for other in (scoped_session(sessionmaker(engine)), sessionmaker(engine)):
        with pytest.raises(TypeError, match=f"not {type(other).__name__}; call it, to get its session"):
            outbox.add(other, b"1", routing_key="q")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"a session or connection of SQLAlchemy, not Engine$"):
        outbox.add_many(engine, [b"1"], routing_key="q")  # type: ignore[call-overload]
    session: Any = AsyncSession()
    for method in (outbox.status, outbox.failed, outbox.retry):
        with pytest.raises(TypeError, match=rf"await session\.run_sync\(outbox\.{method.__name__}, …\)"):
            method(session)
    with pytest.raises(TypeError, match="run_sync"):
        outbox.forget(session, [1])
    with pytest.raises(TypeError, match="run_sync"):
        Inbox().forget(session, 1.0)


def test_E14_one_application_can_have_several_database_outboxes(engine: Engine) -> None:
    metadata = MetaData()
    first, second = Outbox(metadata, name="first"), Outbox(metadata, name="second")
    metadata.create_all(engine)
    with engine.begin() as connection:
        first.add(connection, b"1", routing_key="q")
    assert len(rows(engine, first)) == 1
    assert rows(engine, second) == []
    assert first.tables.channel != second.tables.channel


def test_E14_the_status_of_a_database_outbox_counts_waiting_messages(engine: Engine, outbox: Outbox) -> None:
    with engine.begin() as connection:
        assert outbox.status(connection).depth == 0
        outbox.add_many(connection, [b""] * 3, routing_key="q")
        status = outbox.status(connection)
    assert (status.depth, status.failed, status.relayed, status.relays) == (3, 0, 0, None)
    assert 0 <= status.oldest_age < 60


def test_E14_any_number_of_failed_messages_can_be_retried_or_forgotten(engine: Engine, outbox: Outbox) -> None:
    table, failed = outbox.tables.rows, outbox.tables.failed
    names = [column.name for column in failed.c if column.name in table.c]
    with engine.begin() as connection:
        driver: Any = connection.connection.driver_connection
        driver.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 999)
        outbox.add_many(connection, [b"%04d" % number for number in range(2500)], routing_key="q", ordering_key="k")
        values = select(*(table.c[name] for name in names), literal("no queue"))
        connection.execute(insert(failed).from_select([*names, "reply"], values))
        connection.execute(delete(table))
        assert outbox.forget(connection, range(1, 1101)) == 1100
        assert outbox.retry(connection, range(2500, 1200, -1)) == 1300
        assert outbox.retry(connection) == 100
        assert outbox.retry(connection) == outbox.retry(connection, []) == 0
        assert outbox.retry(connection, {1, 2}) == outbox.forget(connection, {1, 2}) == 0
    bodies = [int(row.body) for row in rows(engine, outbox)]
    assert bodies == [*range(1200, 2500), *range(1100, 1200)]


def test_E14_a_failed_message_that_is_retried_twice_at_the_same_time_is_moved_once(tmp_path: Path) -> None:
    engine, other_engine = (create_engine(f"sqlite:///{tmp_path}/application.db") for _ in range(2))
    outbox = Outbox()
    outbox.metadata.create_all(engine)
    row = {**outbox.encode(b"1", None, "q", None)[0], "id": 1, "reply": "no queue", "created_at": datetime.now(UTC)}
    with engine.begin() as connection:
        connection.execute(insert(outbox.tables.failed), row)
    counts = []

    def retry_first(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("DELETE"):
            with other_engine.begin() as connection:
                counts.append(outbox.retry(connection))

    event.listen(engine, "before_cursor_execute", retry_first)
    with engine.begin() as connection:
        counts.append(outbox.retry(connection))
    assert counts == [1, 0]
    assert [row.body for row in rows(engine, outbox)] == [b"1"]
    engine.dispose()
    other_engine.dispose()


def test_a_file_named_relay_in_the_current_folder_says_nothing_about_a_database_in_memory(
    engine: Engine, outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".relay").touch()
    monkeypatch.chdir(tmp_path)
    with engine.begin() as connection:
        assert outbox.status(connection).relays is None


def test_a_shared_database_in_memory_is_not_taken_for_a_file(outbox: Outbox) -> None:
    engine = create_engine("sqlite:///file:/shared?vfs=memdb&uri=true")
    outbox.metadata.create_all(engine)
    with engine.begin() as connection:
        assert outbox.status(connection).relays is None
    with pytest.raises(RelayError, match="needs a database in a file"):
        SqliteSession(engine, outbox.tables, 30.0)
    engine.dispose()
