"""`Backlog`: how often a database is queried, and how long a reader waits for the result."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine

from qflow_client.sqlalchemy import Outbox, backlog
from qflow_client.sqlalchemy.backlog import Backlog, measure


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path}/application.db")
    yield engine
    engine.dispose()


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    outbox = Outbox()
    outbox.metadata.create_all(engine)
    return outbox


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of `Backlog`. Readers wait long for its queries, because a busy machine may delay their thread."""
    monkeypatch.setattr(backlog, "_PATIENCE", 30.0)
    now = [1000.0]
    monkeypatch.setattr(backlog, "_monotonic", lambda: now[0])
    return now


def add(engine: Engine, outbox: Outbox, *bodies: bytes) -> None:
    with engine.begin() as connection:
        outbox.add_many(connection, bodies, routing_key="q")


def test_E12_the_backlog_of_a_database_outbox_is_its_number_of_rows_and_the_age_of_the_oldest_row(
    engine: Engine, outbox: Outbox
) -> None:
    with engine.begin() as connection:
        assert measure(connection, outbox.tables) == (0, 0.0)
    add(engine, outbox, b"1", b"2")
    with engine.begin() as connection:
        rows = outbox.tables.rows
        connection.execute(rows.update().where(rows.c.id == 1), {"created_at": datetime.now(UTC) - timedelta(hours=1)})
        depth, age = measure(connection, outbox.tables)
        assert depth == 2
        assert 3590 < age < 3700
        # A clock that was set back.
        connection.execute(rows.update().where(rows.c.id == 1), {"created_at": datetime.now(UTC) + timedelta(hours=1)})
        assert measure(connection, outbox.tables) == (2, 0.0)


def test_E12_many_readers_of_the_backlog_cause_only_one_database_query_in_ten_seconds(
    engine: Engine, outbox: Outbox, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def measured(*given: Any) -> Any:
        asked.append(given)
        return measure(*given)

    monkeypatch.setattr(backlog, "measure", measured)
    backlog_of_outbox = Backlog(engine, outbox.tables)
    add(engine, outbox, b"1")
    for _ in range(100):
        found = backlog_of_outbox.read()
        assert found is not None
        assert found[0] == 1
    add(engine, outbox, b"2")
    clock[0] += 9.0
    for _ in range(100):
        found = backlog_of_outbox.read()
        assert found is not None
        assert found[0] == 1
    assert len(asked) == 1
    clock[0] += 1.0
    found = backlog_of_outbox.read()
    assert found is not None
    assert found[0] == 2
    assert len(asked) == 2


def test_E12_backlog_queries_keep_a_slow_database_busy_for_at_most_a_hundredth_of_the_time(
    engine: Engine, outbox: Outbox, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measured(*_: Any) -> tuple[int, float]:
        asked.append(clock[0])
        clock[0] += 2.0
        return 5, 1.0

    monkeypatch.setattr(backlog, "measure", measured)
    backlog_of_outbox = Backlog(engine, outbox.tables)
    for _ in range(500):
        assert backlog_of_outbox.read() == (5, 1.0)
        clock[0] += 1.0
    assert asked == [1000.0, 1202.0, 1404.0]


def test_E12_readers_wait_only_briefly_for_a_database_that_does_not_answer_and_send_no_second_query(
    engine: Engine, outbox: Outbox, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, answers = threading.Event(), threading.Event()
    asked = []

    def measured(*given: Any) -> Any:
        asked.append(given)
        begun.set()
        assert answers.wait(30.0)
        return 7, 1.0

    monkeypatch.setattr(backlog, "measure", measured)
    monkeypatch.setattr(backlog, "_PATIENCE", 0.01)
    backlog_of_outbox = Backlog(engine, outbox.tables)
    for _ in range(3):
        assert backlog_of_outbox.read() is None
        clock[0] += 1000.0
    assert begun.wait(30.0)
    assert len(asked) == 1
    monkeypatch.setattr(backlog, "_PATIENCE", 30.0)
    answers.set()
    assert backlog_of_outbox.read() == (7, 1.0)


def test_E12_a_database_without_the_outbox_tables_has_no_backlog(engine: Engine) -> None:
    assert Backlog(engine, Outbox().tables).read() is None
