"""Known problems of a table that is used as a queue, on PostgreSQL, and several relays at the same time."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text

from qflow_client import SettingsError
from qflow_client.broker import Broker
from qflow_client.sqlalchemy import Outbox, OutboxRelay
from qflow_client.sqlalchemy.postgresql import AHEAD, PostgresqlSession
from qflow_client.sqlalchemy.tables import PARTITIONS
from qflow_client.testing.proxy import FaultProxy

from .support import FAST, PATIENCE, add, bodies, depth, environment, eventually, marks, permit, permitted

# A relay in a process of its own, which may be killed or suspended.
RELAY = """
import sys
from qflow_client.sqlalchemy import OutboxRelay
relay = OutboxRelay(sys.argv[1], sys.argv[2], lease=float(sys.argv[3]), capacity=int(sys.argv[4]))
with relay:
    sys.stdin.read()
"""


@contextmanager
def relay_process(
    engine: Engine, broker: Broker, *, lease: float = 30.0, capacity: int = 1000
) -> Iterator[subprocess.Popen[bytes]]:
    url = engine.url.render_as_string(hide_password=False)
    with subprocess.Popen(
        [sys.executable, "-c", RELAY, url, broker.url, str(lease), str(capacity)],
        stdin=subprocess.PIPE,
        env=environment(),
    ) as process:
        try:
            yield process
        finally:
            process.kill()
            process.send_signal(signal.SIGCONT)
            process.wait(PATIENCE)


def held(engine: Engine, outbox: Outbox) -> int:
    """Return how many partitions have a relay."""
    with engine.begin() as connection:
        found: int = connection.execute(
            text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = :class AND objid < :count"),
            {"class": outbox.tables.relay_keys(connection)[0] % (1 << 32), "count": PARTITIONS},
        ).scalar_one()
    return found


@pytest.fixture
def session(engine: Engine, outbox: Outbox) -> Iterator[PostgresqlSession]:
    """A relay's session, with all partitions."""
    session = PostgresqlSession(engine, outbox.tables, 30.0)
    session.join()
    session.take(range(PARTITIONS))
    yield session
    session.close()


def read(session: PostgresqlSession, limit: int = 100) -> list[bytes]:
    return [row.body for row in session.read(limit)]


def test_E14_a_row_whose_transaction_commits_after_later_rows_is_not_lost(
    engine: Engine, outbox: Outbox, session: PostgresqlSession
) -> None:
    with engine.connect() as slow, slow.begin() as transaction:
        # It has the smaller number, and becomes visible later.
        outbox.add(slow, b"slow", routing_key="q")
        add(engine, outbox, b"fast")
        assert read(session) == [b"fast"]
        assert read(session) == []
        transaction.commit()
    assert read(session) == [b"slow"]
    assert read(session) == []


def test_E14_a_row_added_after_a_slow_commit_is_not_read_before_the_committed_row(
    engine: Engine, outbox: Outbox, session: PostgresqlSession
) -> None:
    with engine.connect() as slow, slow.begin() as transaction:
        outbox.add(slow, b"slow", routing_key="q", ordering_key="k")
        add(engine, outbox, b"1", b"2", b"3")
        # In the middle of a sweep, behind the number of the slow row.
        assert read(session, 2) == [b"1", b"2"]
        transaction.commit()
    add(engine, outbox, b"after", key="k")
    # One that went on to read by numbers would find "after" now, and "slow" later.
    assert read(session, 2) == [b"3"]
    assert read(session) == [b"slow", b"after"]


def test_E14_each_row_is_read_exactly_once_even_if_transactions_commit_out_of_order(
    engine: Engine, outbox: Outbox, session: PostgresqlSession
) -> None:
    with ExitStack() as stack:
        transactions: list[tuple[Connection, Any]] = []
        found: list[bytes] = []
        for number in range(20):
            connection = stack.enter_context(engine.connect())
            transactions.append((connection, connection.begin()))
            outbox.add(connection, b"%d" % number, routing_key="q")
            if number % 3 == 2:
                # The one in the middle of those that are open.
                chosen, transaction = transactions.pop(len(transactions) // 2)
                transaction.commit()
                chosen.close()
            # Small pages end in the middle of sweeps.
            found += read(session, 1 + number % 2)
        while transactions:
            transactions.pop()[1].commit()
            found += read(session, 2)
        for _ in range(20):
            found += read(session, 2)
    assert sorted(found, key=int) == [b"%d" % number for number in range(20)]


def test_E14_a_long_transaction_does_not_delay_rows_of_other_transactions(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    with engine.connect() as long, long.begin() as transaction:
        outbox.add(long, b"long", routing_key="q")
        with OutboxRelay(engine, broker.url, outbox=outbox, **FAST):
            add(engine, outbox, *(b"%d" % number for number in range(3000)), key="k")
            eventually(lambda: len(bodies(broker)) == 3000)
            transaction.commit()
            eventually(lambda: bodies(broker)[-1] == b"long")
    assert len(bodies(broker)) == 3001


def test_E14_rows_of_the_outbox_are_inserted_and_deleted_but_never_updated(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    def counted() -> Any:
        with engine.begin() as connection:
            return connection.execute(
                text("SELECT n_tup_ins, n_tup_upd, n_tup_del FROM pg_stat_user_tables WHERE relid = :name ::regclass"),
                {"name": outbox.tables.full_name},
            ).one()

    with OutboxRelay(engine, broker.url, outbox=outbox, **FAST) as relay:
        add(engine, outbox, *(b"%d" % number for number in range(500)))
        eventually(lambda: relay.counts.confirmed == 500)
    engine.dispose()
    # Each session reports on its own, some time after it has ended.
    eventually(lambda: tuple(counted()) == (500, 0, 500), "the statistics")


def test_E14_at_a_low_rate_a_relay_publishes_rows_without_waiting_for_the_disk(
    engine: Engine, outbox: Outbox, session: PostgresqlSession
) -> None:
    def waited() -> bool:
        session._cursor.scroll(0, mode="absolute")
        return bool(session._cursor.fetchone()[1] == "on")

    add(engine, outbox, b"0")
    assert read(session) == [b"0"]
    assert waited()
    first = permitted(engine, outbox)
    for number in range(1, 20):
        add(engine, outbox, b"%d" % number)
        assert [row.body for row in session.read(100, [number])] == [b"%d" % number]
        assert not waited()
    assert permitted(engine, outbox) == first
    # The numbers run out.
    add(engine, outbox, *(b"x" for _ in range(AHEAD)))
    assert len(session.read(2 * AHEAD)) == AHEAD
    assert waited()
    assert permitted(engine, outbox) == first + 19 + AHEAD


def test_E14_rows_restored_from_another_database_server_are_published(
    engine: Engine, outbox: Outbox, session: PostgresqlSession
) -> None:
    add(engine, outbox, b"restored", key="k")
    with engine.begin() as connection:
        connection.execute(outbox.tables.rows.update().values(xid=1 << 50))
    add(engine, outbox, b"new", key="k")
    assert read(session) == [b"restored", b"new"]


def test_E14_two_relays_share_the_rows_and_keep_the_order_of_messages_with_the_same_key(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    keys = [f"key {number}" for number in range(8)]

    def send(first: int, last: int) -> None:
        for key in keys:
            add(engine, outbox, *(f"{key} {number}" for number in range(first, last)), key=key)

    with OutboxRelay(engine, broker.url, outbox=outbox, capacity=20, **FAST) as first:
        eventually(lambda: len(first.partitions) == PARTITIONS)
        send(0, 100)
        with OutboxRelay(engine, broker.url, outbox=outbox, capacity=20, **FAST) as second:
            eventually(lambda: len(first.partitions) == len(second.partitions) == PARTITIONS // 2)
            assert not first.partitions & second.partitions
            send(100, 150)
            eventually(lambda: depth(engine, outbox) == 0)
        # What a relay leaves in order is another's at its next look.
        send(150, 200)
        eventually(lambda: depth(engine, outbox) == 0)
        eventually(lambda: len(first.partitions) == PARTITIONS)
        assert second.counts.confirmed
    found = bodies(broker)
    assert len(found) == 200 * len(keys)
    for key in keys:
        of_key = [body.decode() for body in found if body.decode().startswith(f"{key} ")]
        assert of_key == [f"{key} {number}" for number in range(200)]
    # Nobody died, so nothing is in doubt.
    assert not any(marks(broker))


def test_E14_rows_of_a_killed_relay_go_to_other_relays_and_possible_second_copies_are_marked(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    with relay_process(engine, broker, capacity=10) as process:
        eventually(lambda: held(engine, outbox) == PARTITIONS)
        # Not one confirm comes back.
        broker.flow(False)
        add(engine, outbox, *(b"%d" % number for number in range(2000)), key="k")
        process.kill()
        eventually(lambda: held(engine, outbox) == 0)
    broker.flow(True)
    with OutboxRelay(engine, broker.url, outbox=outbox, **FAST) as relay:
        eventually(lambda: relay.counts.confirmed == 2000)
    first = dict.fromkeys(bodies(broker))
    assert list(first) == [b"%d" % number for number in range(2000)]
    assert relay.counts.marked <= 10 + AHEAD


def test_E14_a_row_that_may_have_been_sent_stays_marked_when_its_relay_ends_or_is_replaced(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    keys = [f"key {number}" for number in range(40)]
    for key in keys:
        add(engine, outbox, *(f"{key} {number}" for number in range(10)), key=key)
    permit(engine, outbox, 400)
    # So slow that most of the rows are read by none of the first three.
    slow = {**FAST, "capacity": 1, "rate": 20.0}
    with OutboxRelay(engine, broker.url, outbox=outbox, **slow) as first:
        eventually(lambda: first.counts.confirmed)
    with OutboxRelay(engine, broker.url, outbox=outbox, **slow) as first:
        eventually(lambda: len(first.partitions) == PARTITIONS)
        with OutboxRelay(engine, broker.url, outbox=outbox, **slow) as second:
            eventually(lambda: len(first.partitions) == len(second.partitions) == PARTITIONS // 2)
    with OutboxRelay(engine, broker.url, outbox=outbox, **FAST):
        eventually(lambda: depth(engine, outbox) == 0)
    assert len(bodies(broker)) == 400
    assert all(marks(broker))


def test_E14_a_suspended_relay_process_loses_its_rows_to_others_when_its_lease_expires(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    # A lease of one second for the one that is suspended; the server keeps the time.
    with relay_process(engine, broker, lease=1.0) as process:
        eventually(lambda: held(engine, outbox) == PARTITIONS)
        process.send_signal(signal.SIGSTOP)
        add(engine, outbox, b"1", b"2", key="k")
        with OutboxRelay(engine, broker.url, outbox=outbox, **FAST) as relay:
            eventually(lambda: bodies(broker) == [b"1", b"2"])
            process.send_signal(signal.SIGCONT)
            # It is a member again, and has half.
            eventually(lambda: len(relay.partitions) == PARTITIONS // 2)
            add(engine, outbox, *(b"%d" % number for number in range(3, 100)), key="k")
            eventually(lambda: depth(engine, outbox) == 0)
    found = bodies(broker)
    assert found[:2] == [b"1", b"2"]
    # On a slow machine, the lease of a second may expire once more. Then later rows are published twice.
    assert found.count(b"1") == found.count(b"2") == 1
    assert list(dict.fromkeys(found)) == [b"%d" % number for number in range(1, 100)]


def test_E14_a_relay_that_is_suspended_while_it_reads_loses_its_rows_when_its_lease_expires(
    engine: Engine, outbox: Outbox
) -> None:
    session = PostgresqlSession(engine, outbox.tables, 1.0)
    session.join()
    assert len(session.take(range(PARTITIONS))) == PARTITIONS
    # More than is buffered between the two, and no byte of it is read: the server is not idle, but sends.
    driver = session._driver.pgconn
    driver.send_query(b"SELECT repeat('x', 1000000) FROM generate_series(1, 100)")
    driver.flush()
    eventually(lambda: held(engine, outbox) == 0, "the end of the session")
    session.close()


@pytest.mark.parametrize("says_so", [True, False], ids=["reset", "silence"])
def test_E14_a_relay_that_is_cut_off_from_the_broker_leaves_its_rows_to_other_relays(
    engine: Engine, outbox: Outbox, broker: Broker, says_so: bool
) -> None:
    with (
        FaultProxy(broker.url) as proxy,
        OutboxRelay(engine, proxy.url, outbox=outbox, lease=2.0, **FAST) as first,
        OutboxRelay(engine, broker.url, outbox=outbox, **FAST) as second,
    ):
        eventually(lambda: len(first.partitions) == len(second.partitions) == PARTITIONS // 2)
        if says_so:
            proxy.refuse()
            proxy.cut()
        else:
            proxy.black_hole()
        for number in range(20):
            add(engine, outbox, b"%d" % number, key=str(number))
        eventually(lambda: second.counts.confirmed == 20 and len(second.partitions) == PARTITIONS)
        assert not first.is_ready
        proxy.cut()
        proxy.heal()
        eventually(lambda: len(first.partitions) == PARTITIONS // 2)
    assert len(bodies(broker)) == 20


def test_E14_a_relay_that_is_cut_off_from_the_database_loses_its_rows_when_its_lease_expires(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    # It passes any bytes on.
    with FaultProxy(f"amqp://127.0.0.1:{engine.url.port}") as proxy:
        far = engine.url.set(port=proxy.port)
        with (
            OutboxRelay(far, broker.url, outbox=outbox, lease=1.0, **FAST) as first,
            OutboxRelay(engine, broker.url, outbox=outbox, **FAST) as second,
        ):
            eventually(lambda: len(first.partitions) == len(second.partitions) == PARTITIONS // 2)
            # More than one if it has been too slow for its lease before.
            tenures = first.counts.tenures
            proxy.black_hole()
            for number in range(20):
                add(engine, outbox, b"%d" % number, key=str(number))
            eventually(lambda: second.counts.confirmed == 20 and len(second.partitions) == PARTITIONS)
            eventually(lambda: "the database has not answered" in " ".join(first.health().reasons))
            assert not first.is_ready
            proxy.cut()
            proxy.heal()
            eventually(lambda: first.counts.tenures > tenures and len(first.partitions) == PARTITIONS // 2)
    assert len(bodies(broker)) == 20


def test_E14_a_relay_whose_database_session_is_terminated_restarts(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    with OutboxRelay(engine, broker.url, outbox=outbox, **FAST) as relay:
        eventually(lambda: len(relay.partitions) == PARTITIONS)
        with engine.begin() as connection:
            connection.execute(
                text("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objid = :member"),
                {"member": PARTITIONS},
            )
        add(engine, outbox, b"1")
        eventually(lambda: relay.counts.confirmed == 1)
        assert relay.counts.tenures == 2


def test_E14_a_relay_finds_new_rows_even_without_database_notifications(engine: Engine, broker: Broker) -> None:
    outbox = Outbox(name="silent", notify=False)
    outbox.metadata.create_all(engine)
    with OutboxRelay(engine, broker.url, outbox=outbox, poll=0.05, **FAST):
        add(engine, outbox, b"1")
        eventually(lambda: bodies(broker) == [b"1"])
    outbox.metadata.drop_all(engine)


def test_E14_the_outbox_tables_may_be_in_a_database_schema_with_any_name(engine: Engine, broker: Broker) -> None:
    outbox = Outbox(name="Out box", schema="of the application")
    with engine.begin() as connection:
        connection.execute(text('CREATE SCHEMA "of the application"'))
        outbox.metadata.create_all(connection)
    with OutboxRelay(engine, broker.url, outbox=outbox, **FAST) as relay:
        add(engine, outbox, b"1")
        add(engine, outbox, b"2", to="nowhere")
        eventually(lambda: relay.counts.confirmed == relay.counts.set_aside == 1)
    with engine.begin() as connection:
        outbox.metadata.drop_all(connection)
        connection.execute(text('DROP SCHEMA "of the application"'))


def test_E14_a_row_has_its_transaction_number_even_if_a_migration_was_made_for_sqlite(
    engine: Engine, outbox: Outbox, session: PostgresqlSession
) -> None:
    # Alembic writes the default of SQLite into a migration that it generates on SQLite.
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE qflow_outbox ALTER xid SET DEFAULT 0"))
    assert read(session) == []
    add(engine, outbox, b"1")
    add(engine, outbox, *"23")
    assert read(session) == [b"1", b"2", b"3"]


def test_E14_relays_of_equal_tables_in_different_schemas_of_the_search_path_share_no_work(
    engine: Engine, broker: Broker
) -> None:
    outbox = Outbox()
    with ExitStack() as stack:
        engines, relays = [], []
        for schema in ("north", "south"):
            found = create_engine(engine.url, connect_args={"options": f"-c search_path={schema}"})
            stack.callback(found.dispose)
            with found.begin() as connection:
                connection.execute(text(f"CREATE SCHEMA {schema}"))
                outbox.metadata.create_all(connection)
            engines.append(found)
            relays.append(stack.enter_context(OutboxRelay(found, broker.url, outbox=outbox, **FAST)))
        eventually(lambda: all(len(relay.partitions) == PARTITIONS for relay in relays))
        for found in engines:
            add(found, outbox, *"12")
        eventually(lambda: sorted(bodies(broker)) == [b"1", b"1", b"2", b"2"])
        # The same table has the same relays, by whatever name it is found.
        with engines[0].begin() as connection:
            assert outbox.status(connection).relays == Outbox(schema="south").status(connection).relays == 1
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA north, south CASCADE"))


def test_E14_the_error_for_an_unsupported_database_driver_names_the_driver() -> None:
    engine = create_engine("postgresql+asyncpg://app@127.0.0.1/shop")
    with pytest.raises(SettingsError, match="needs the driver psycopg for PostgreSQL, not asyncpg"):
        OutboxRelay(engine)
