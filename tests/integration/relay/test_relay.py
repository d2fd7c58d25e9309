"""`OutboxRelay` on both databases, with the broker in this repository."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from struct import pack
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, insert, make_url, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from benchmarks.postgresql import PostgresqlServer
from qflow_client import Credentials, Message, SettingsError
from qflow_client.amqp.frames import add_header, content_header
from qflow_client.broker import Broker
from qflow_client.message import REPUBLISHED
from qflow_client.sqlalchemy import Outbox, OutboxRelay, RelayError, tenure
from qflow_client.sqlalchemy import postgresql as of_postgresql
from qflow_client.sqlalchemy import sqlite as of_sqlite
from qflow_client.sqlalchemy.sessions import Session
from qflow_client.sqlalchemy.tables import PARTITIONS
from qflow_client.testing.proxy import FaultProxy
from tests.integration.producer.tools import unused_port

from .support import FAST, add, bodies, depth, engine_of_each_database, eventually, marks, permit, permitted

ROOT = Path(__file__).parents[3]

engine = engine_of_each_database


def session_of(engine: Engine, outbox: Outbox) -> Session:
    """Return a relay's session, with all partitions."""
    is_postgresql = engine.dialect.name == "postgresql"
    make: Any = of_postgresql.PostgresqlSession if is_postgresql else of_sqlite.SqliteSession
    session: Session = make(engine, outbox.tables, 30.0)
    session.join()
    session.take(range(PARTITIONS))
    return session


def test_E14_a_relay_publishes_committed_messages_and_no_message_of_a_rolled_back_transaction(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    message = Message(b"1", headers={"k": 1}, content_type="text/plain")
    with OutboxRelay(engine, broker.url, outbox=outbox, **FAST) as relay:
        with engine.connect() as connection:
            with connection.begin() as transaction:
                outbox.add(connection, b"0", routing_key="q")
                transaction.rollback()
            with connection.begin():
                message_id = outbox.add(connection, message, routing_key="q")
        eventually(lambda: relay.counts.confirmed == 1)
        eventually(lambda: depth(engine, outbox) == 0)
    (found,) = broker.messages("q")
    assert (found.body, found.properties.headers, found.properties.content_type) == (b"1", {"k": 1}, "text/plain")
    assert found.properties.message_id == message_id


def test_E8_a_relay_logs_in_with_renewable_credentials(engine: Engine, outbox: Outbox) -> None:
    passwords = iter(["old", "new"])

    def log_in() -> Credentials:
        return Credentials("app", next(passwords))

    def authenticate(_user: str, password: str) -> float:
        return 60.0 if password == "new" else 0.0

    add(engine, outbox, b"1")
    with Broker(authenticate=authenticate) as broker:
        broker.declare_queue("q")
        with OutboxRelay(engine, broker.url, outbox=outbox, credentials=log_in, **FAST) as relay:
            eventually(lambda: relay.counts.confirmed == 1)
        assert bodies(broker) == [b"1"]
    with pytest.raises(TypeError, match="credentials=5: it must be None or callable"):
        OutboxRelay(engine, broker.url, credentials=5)  # type: ignore[arg-type]


def test_E14_a_relay_keeps_the_order_of_messages_with_the_same_key(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    for number in range(4):
        for key in "abc":
            add(engine, outbox, *(f"{key}{50 * number + each:03}" for each in range(50)), key=key)
    with OutboxRelay(engine, broker.url, outbox=outbox, capacity=7, **FAST) as relay:
        eventually(lambda: relay.counts.confirmed == 600)
    found = bodies(broker)
    for name in (b"a", b"b", b"c"):
        assert [body for body in found if body[:1] == name] == [name + b"%03d" % number for number in range(200)]
    assert len(found) == 600
    assert not any(marks(broker))


def test_E14_a_relay_marks_rows_that_may_have_been_sent_before_as_second_copies_and_no_others(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    add(engine, outbox, *"12345", key="k")
    permit(engine, outbox, 3)
    with OutboxRelay(engine, broker.url, outbox=outbox, **FAST) as relay:
        eventually(lambda: relay.counts.confirmed == 5)
        add(engine, outbox, b"6", key="k")
        eventually(lambda: relay.counts.confirmed == 6)
    assert marks(broker) == [True, True, True, False, False, False]
    assert relay.counts.marked == 3
    # Ended in order, it leaves nothing in doubt.
    assert permitted(engine, outbox) == 0


def test_E14_a_relay_moves_an_unroutable_message_aside_with_the_reply_and_it_can_be_retried(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    add(engine, outbox, b"poison", key="k", to="nowhere")
    add(engine, outbox, b"good", key="k")
    with OutboxRelay(engine, broker.url, outbox=outbox, **FAST) as relay:
        eventually(lambda: relay.counts.set_aside == 1 and relay.counts.confirmed == 1)
        with engine.connect() as connection:
            (failed,) = outbox.failed(connection)
        assert failed.message is not None
        assert (failed.message.body, failed.message.routing_key, failed.ordering_key) == (b"poison", "nowhere", "k")
        assert "312" in failed.reply
        assert "NO_ROUTE" in failed.reply
        broker.declare_queue("nowhere")
        with engine.begin() as connection:
            assert outbox.retry(connection, [failed.id + 1]) == 0
            assert outbox.retry(connection) == 1
        eventually(lambda: bodies(broker, "nowhere") == [b"poison"])
    with engine.connect() as connection:
        status = outbox.status(connection)
    assert (status.depth, status.failed, status.relayed) == (0, 0, 2)


def test_E14_a_failed_message_that_an_earlier_relay_may_have_sent_is_retried_as_a_second_copy(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    add(engine, outbox, b"perhaps sent", b"not sent", key="k", to="nowhere")
    permit(engine, outbox, 1)
    with OutboxRelay(engine, broker.url, outbox=outbox, **FAST) as relay:
        eventually(lambda: relay.counts.set_aside == 2)
        broker.declare_queue("nowhere")
        with engine.begin() as connection:
            outbox.retry(connection)
        eventually(lambda: bodies(broker, "nowhere") == [b"perhaps sent", b"not sent"])
    assert marks(broker, "nowhere") == [True, False]


def test_E14_a_row_that_cannot_be_encoded_and_that_an_earlier_relay_may_have_sent_is_set_aside_with_its_bytes(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    # Other software may have written these numbers.
    properties = content_header(Message(b"", headers={"a": 1.5})).replace(pack(">d", 1.5), pack(">d", math.nan))
    with engine.begin() as connection:
        for given in properties, add_header(properties, REPUBLISHED, True):
            row = {"partition": 0, "exchange": "", "routing_key": "q", "properties": given, "body": b""}
            connection.execute(insert(outbox.tables.rows), row)
    permit(engine, outbox, 2)
    with OutboxRelay(engine, broker.url, outbox=outbox, **FAST) as relay:
        eventually(lambda: relay.counts.set_aside == 2)
    with engine.begin() as connection:
        stored = connection.execute(select(outbox.tables.failed.c.properties)).scalars().all()
    assert stored == [add_header(properties, REPUBLISHED, True)] * 2


def test_E10_a_relay_moves_a_damaged_row_aside_and_publishes_all_other_rows(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    damaged = {"partition": 0, "exchange": "", "routing_key": "q", "properties": b"nonsense", "body": b"damaged"}
    header = content_header(Message(b""))
    with engine.begin() as connection:
        connection.execute(insert(outbox.tables.rows), damaged)
        connection.execute(insert(outbox.tables.rows), damaged | {"properties": header, "exchange": "x" * 256})
        outbox.add(connection, b"good", routing_key="q")
    with OutboxRelay(engine, broker.url, outbox=outbox, **FAST) as relay:
        eventually(lambda: relay.counts.set_aside == 2 and relay.counts.confirmed == 1)
    assert bodies(broker) == [b"good"]
    with engine.begin() as connection:
        first, second = outbox.failed(connection)
        assert first.message is None
        assert "damaged" in first.reply
        assert "256" in second.reply
        assert outbox.forget(connection, [first.id, second.id]) == 2
        assert outbox.failed(connection) == []


def test_E14_a_row_can_be_moved_aside_even_if_an_older_row_with_its_number_was_moved_aside(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    # As after TRUNCATE … RESTART IDENTITY.
    old = {"id": 1, "partition": 0, "exchange": "", "routing_key": "q", "properties": b"", "body": b"", "reply": "no"}
    with engine.begin() as connection:
        connection.execute(insert(outbox.tables.failed), old | {"created_at": datetime.now(UTC)})
    add(engine, outbox, b"poison", to="nowhere")
    add(engine, outbox, b"good")
    with OutboxRelay(engine, broker.url, outbox=outbox, **FAST) as relay:
        eventually(lambda: relay.counts.set_aside == 1 and relay.counts.confirmed == 1)
    with engine.begin() as connection:
        assert [row.id for row in outbox.failed(connection)] == [1, 2]


def test_C4_a_relay_reads_rows_in_pages_of_a_maximum_size_in_bytes(
    engine: Engine, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_postgresql, "PAGE_BYTES", 1000)
    monkeypatch.setattr(of_sqlite, "PAGE_BYTES", 1000)
    add(engine, outbox, *(b"%03d" % number + b"x" * 397 for number in range(7)), b"y" * 10_000, b"z", key="k")
    session = session_of(engine, outbox)
    pages = []
    while rows := session.read(100):
        pages.append(([row.body[:3] for row in rows], session.has_more))
    assert pages == [
        ([b"000", b"001", b"002"], True),
        ([b"003", b"004", b"005"], True),
        ([b"006", b"yyy"], True),
        ([b"z"], False),
    ]
    session.close()


def test_E14_each_read_of_a_relay_marks_the_returned_rows_as_possibly_sent_and_deletes_settled_rows(
    engine: Engine, outbox: Outbox
) -> None:
    add(engine, outbox, b"1", b"2", b"3", key="k")
    session = session_of(engine, outbox)

    def stored() -> tuple[int, int, int]:
        with engine.begin() as connection:
            status = outbox.status(connection)
        return permitted(engine, outbox), status.depth, status.relayed

    ahead = of_postgresql.AHEAD if engine.dialect.name == "postgresql" else 0
    assert [row.id for row in session.read(1)] == [1]
    assert stored() == (1 + ahead, 3, 0)
    assert [row.id for row in session.read(1, [1])] == [2]
    # Nothing is permitted anew before it has to be.
    assert stored() == (1 + ahead if ahead else 2, 2, 1)
    assert [row.id for row in session.read(9)] == [3]
    # There is nothing to read, and something to delete.
    assert session.read(9, [2]) == []
    assert stored() == (1 + ahead if ahead else 3, 1, 2)
    session.delete([3])
    assert stored() == (1 + ahead if ahead else 3, 0, 3)
    session.close()


def test_E12_a_relay_reports_whether_it_is_ready_and_why_not(
    engine: Engine, outbox: Outbox, broker: Broker, tmp_path: Path
) -> None:
    relay = OutboxRelay(engine, broker.url, outbox=outbox, **FAST)
    assert (relay.name, relay.health().state) == ("relay", "closed")
    with relay:
        eventually(lambda: relay.health().is_ready)
        broker.flow(False)
        eventually(lambda: relay.health().state == "blocked")
        broker.flow(True)
        eventually(lambda: relay.health().is_ready)
    assert relay.health().state == "closed"
    with OutboxRelay(f"sqlite:///{tmp_path}/without/folder.db", broker.url, **FAST) as relay:
        eventually(lambda: "unable to open" in relay.health().reasons[0])
        assert relay.health().state == "disconnected"


def test_E14_the_status_of_a_database_outbox_shows_the_holds_of_a_relay(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    def now() -> tuple[int | None, tuple[str, ...]]:
        with engine.begin() as connection:
            status = outbox.status(connection)
        return status.relays, status.holds

    assert now() == (0, ())
    with OutboxRelay(engine, broker.url, outbox=outbox, **FAST):
        eventually(lambda: now() == (1, ()))
        broker.flow(False)
        eventually(lambda: now() == (1, ("channel_flow",)))
        broker.flow(True)
        eventually(lambda: now() == (1, ()))
    assert now() == (0, ())


def test_E14_a_relay_whose_producer_is_flowed_reads_at_most_one_window_of_rows(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    with OutboxRelay(engine, broker.url, outbox=outbox, capacity=10, **FAST) as relay:
        add(engine, outbox, b"0", key="k")
        eventually(lambda: relay.counts.confirmed == 1)
        broker.flow(False)
        add(engine, outbox, *(b"%d" % number for number in range(1, 2000)), key="k")
        eventually(lambda: broker.producers_stopped)
        # Everything that is read is permitted first, and there is one row that was confirmed before.
        assert permitted(engine, outbox) <= 11 + of_postgresql.AHEAD
        broker.flow(True)
        eventually(lambda: relay.counts.confirmed == 2000)
    assert bodies(broker) == [b"%d" % number for number in range(2000)]


def test_E14_a_relay_waits_for_its_broker_and_continues_when_the_broker_is_replaced(
    engine: Engine, outbox: Outbox
) -> None:
    port = unused_port()
    url = f"amqp://guest:guest@127.0.0.1:{port}"
    with OutboxRelay(engine, url, outbox=outbox, **FAST, reconnect_timeout=0.1) as relay:
        eventually(lambda: relay.error is not None)
        assert not relay.is_ready
        for number in range(2):
            count = number + 1
            with Broker(port=port) as broker:
                broker.declare_queue("q")
                add(engine, outbox, b"%d" % number, key="k")
                eventually(lambda: relay.counts.confirmed == count)  # noqa: B023  # called at once
                assert relay.is_ready
                assert bodies(broker) == [b"%d" % number]


def test_E14_a_relay_that_cannot_reach_the_database_retries(broker: Broker, tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/later.db")
    outbox = Outbox()
    with OutboxRelay(engine, broker.url, outbox=outbox, **FAST) as relay:
        # There are no tables.
        eventually(lambda: relay.error is not None)
        outbox.metadata.create_all(engine)
        add(engine, outbox, b"1")
        eventually(lambda: bodies(broker) == [b"1"])
    engine.dispose()


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_E14_on_sqlite_only_one_relay_is_active_and_another_takes_over_when_it_ends(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    first = OutboxRelay(engine, broker.url, outbox=outbox, **FAST)
    with OutboxRelay(engine, broker.url, outbox=outbox, **FAST) as second:
        eventually(lambda: len(second.partitions) == 16)
        with first:
            eventually(lambda: first.counts.tenures == 1)
            add(engine, outbox, b"1")
            eventually(lambda: second.counts.confirmed == 1)
            assert not first.partitions
            # One that waits and ends takes nothing back of what another has permitted.
            with OutboxRelay(engine, broker.url, outbox=outbox, **FAST) as third:
                eventually(lambda: third.counts.tenures == 1)
            assert permitted(engine, outbox) == 1
            second.close()
            eventually(lambda: len(first.partitions) == 16)
            add(engine, outbox, b"2")
            eventually(lambda: first.counts.confirmed == 1)


def test_E14_two_outboxes_of_one_database_each_have_a_working_relay(engine: Engine, broker: Broker) -> None:
    first = Outbox(name="first")
    second = Outbox(first.metadata, name="out/box 2")
    first.metadata.create_all(engine)
    for outbox in (first, second):
        add(engine, outbox, outbox.tables.full_name)
    with (
        OutboxRelay(engine, broker.url, outbox=first, **FAST),
        OutboxRelay(engine, broker.url, outbox=second, **FAST),
    ):
        eventually(lambda: sorted(bodies(broker)) == [b"first", b"out/box 2"])
        with engine.begin() as connection:
            assert first.status(connection).relays == second.status(connection).relays == 1
    first.metadata.drop_all(engine)


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_E14_a_row_that_costs_each_connection_does_not_stop_the_other_rows(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    add(engine, outbox, b"1", b"x" * 100_000, b"2", b"3", key="k")
    with FaultProxy(broker.url) as proxy:
        proxy.cut_after(size=50_000, direction="to_broker")
        # The search takes longer than half of the lease.
        with OutboxRelay(engine, proxy.url, outbox=outbox, lease=2.0, reconnect_delay_max=0.3) as relay:
            eventually(lambda: relay.counts.set_aside == 1 and relay.counts.confirmed == 3)
            assert set(bodies(broker)) == {b"1", b"2", b"3"}
            with engine.begin() as connection:
                (failed,) = outbox.failed(connection)
                assert "connections stay open without this message" in failed.reply
                # The broker may have this message, so another copy needs the header.
                assert failed.message is not None
                assert failed.message.headers == {REPUBLISHED: True}


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_E14_on_sqlite_rows_restored_with_old_numbers_are_published(
    engine: Engine, outbox: Outbox, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_sqlite, "FULL_PERIOD", 0.2)
    with OutboxRelay(engine, broker.url, outbox=outbox, **FAST) as relay:
        add(engine, outbox, b"1", b"2")
        eventually(lambda: relay.counts.confirmed == 2)
        with engine.begin() as connection:
            row = {**outbox.encode(b"restored", "", "q", None)[0], "id": 1}
            connection.execute(insert(outbox.tables.rows), row)
        eventually(lambda: relay.counts.confirmed == 3)
    assert bodies(broker) == [b"1", b"2", b"restored"]


def test_E14_a_message_without_a_confirm_does_not_stop_the_other_messages(
    engine: Engine, outbox: Outbox, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (of_sqlite, of_postgresql):
        monkeypatch.setattr(module, "FULL_PERIOD", 0.2)
    monkeypatch.setattr(tenure, "LOOK", 0.1)
    broker.declare_queue("slow")
    broker.withhold_confirms("slow")
    add(engine, outbox, b"first", to="slow")
    with OutboxRelay(engine, broker.url, outbox=outbox, **FAST) as relay:
        eventually(lambda: bodies(broker, "slow") == [b"first"])
        count, until = 0, time.monotonic() + 1.0
        while time.monotonic() < until:
            count += 1
            add(engine, outbox, b"%d" % count)
            eventually(lambda: relay.counts.confirmed == count)  # noqa: B023  # `eventually` calls it at once
        broker.release_confirms("slow")
        eventually(lambda: relay.counts.confirmed == count + 1)


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_E14_on_sqlite_the_case_of_the_name_makes_no_other_outbox(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    with OutboxRelay(engine, broker.url, outbox=outbox, **FAST) as relay:
        eventually(lambda: relay.partitions)
        with OutboxRelay(engine, broker.url, outbox=Outbox(name="QFlow_Outbox"), **FAST) as other:
            eventually(lambda: other.counts.tenures == 1)
            add(engine, outbox, *"12")
            eventually(lambda: relay.counts.confirmed == 2)
            assert not other.partitions
            with engine.begin() as connection:
                assert Outbox(name="QFLOW_OUTBOX").status(connection).relays == 1
    assert bodies(broker) == [b"1", b"2"]


FORKING = """
import os, signal, sys
from qflow_client.sqlalchemy import OutboxRelay
with OutboxRelay(sys.argv[1], sys.argv[2]) as relay:
    while len(relay.partitions) < 16:
        pass
    child = os.fork()
    if not child:
        signal.pause()
    print(child, flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_E14_a_child_process_does_not_keep_the_lock_of_a_killed_relay(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FORKING, str(engine.url), broker.url],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            process.kill()
            with OutboxRelay(engine, broker.url, outbox=outbox, **FAST) as relay:
                eventually(lambda: len(relay.partitions) == 16)
        finally:
            os.kill(child, signal.SIGKILL)


async def add_in_loop(url: str, outbox: Outbox) -> None:
    engine = create_async_engine(url)
    async with AsyncSession(engine) as session:
        await outbox.add(session, b"rolled back", routing_key="q")
        await session.rollback()
        await outbox.add(session, b"1", routing_key="q", ordering_key="k")
        await outbox.add_many(session, [b"2", b"3"], routing_key="q", ordering_key="k")
        await session.commit()
    async with engine.begin() as connection:
        await outbox.add(connection, b"4", routing_key="q", ordering_key="k")
    await engine.dispose()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_E14_messages_can_be_added_in_asynchronous_sessions(
    postgresql: PostgresqlServer, broker: Broker, driver: str
) -> None:
    engine = create_engine(postgresql.url)
    outbox = Outbox(name=f"of_{driver}")
    outbox.metadata.create_all(engine)
    asyncio.run(add_in_loop(postgresql.url.replace("+psycopg", f"+{driver}"), outbox))
    with OutboxRelay(engine, broker.url, outbox=outbox, **FAST):
        eventually(lambda: bodies(broker) == [b"1", b"2", b"3", b"4"])
    engine.dispose()


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"database": "mysql://root@localhost/x"}, "mysql"),
        ({"database": "no url"}, "database"),
        ({"lease": 0}, "lease"),
        ({"poll": -1}, "poll"),
        ({"confirms": False}, "confirms"),
        ({"exchange": "orders"}, "exchange='orders': each message of the outbox has its own"),
        ({"outbox_max_age": -1}, "outbox_max_age"),
    ],
    ids=["mysql", "no url", "lease", "poll", "confirms", "exchange", "setting"],
)
def test_E14_a_relay_with_unsupported_arguments_raises_an_error(values: dict[str, Any], word: str) -> None:
    with pytest.raises(SettingsError, match=word):
        OutboxRelay(**{"database": "sqlite://", **values})
    for name, value in (("lease", "30"), ("poll", None), ("outbox", "orders")):
        with pytest.raises(TypeError, match=f"{name}={value!r}: it must be "):
            OutboxRelay("sqlite://", **{name: value})  # type: ignore[arg-type]


def test_E14_a_relay_for_an_in_memory_database_raises_an_error(broker: Broker) -> None:
    with OutboxRelay("sqlite://", broker.url) as relay:
        eventually(lambda: isinstance(relay.error, RelayError))
    assert "memory" in str(relay.error)


@pytest.mark.parametrize(
    "url",
    [
        "mysql://root:s3cr3t@localhost/x",
        "postgresql://root:s3cr3t@localhost:port/x",
        "postgresql://root@localhost:s3cr3t/x",
        "postgresql://root:half@s3cr3t@localhost/x",
    ],
)
def test_E8_no_error_contains_the_password_of_the_database(url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        OutboxRelay(url)
    assert "s3cr3t" not in str(caught.value)
    assert caught.value.__context__ is None


def test_E8_the_log_of_a_relay_with_a_failing_database_contains_no_password_and_no_message_body(
    broker: Broker, caplog: pytest.LogCaptureFixture, postgresql: PostgresqlServer
) -> None:
    url = make_url(postgresql.url).set(password="s3cr3t")
    with OutboxRelay(url, broker.url, outbox=Outbox(name="there is no such table"), **FAST) as relay:
        eventually(lambda: relay.error is not None)
        assert relay.health().state == "disconnected"
    with OutboxRelay(url.set(database="nothing"), broker.url, **FAST) as relay:
        eventually(lambda: relay.error is not None)
        assert "nothing" in relay.health().reasons[0]
    assert "no such table" in caplog.text
    assert "s3cr3t" not in caplog.text
    assert "[SQL" not in caplog.text
