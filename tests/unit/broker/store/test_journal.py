"""The changes that are written to disk, and the answers that wait for them. There is no real disk."""

from __future__ import annotations

import random
import sqlite3
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pamqp import commands

from qflow_client.broker.core.contents import Contents
from qflow_client.broker.core.entries import DropReason
from qflow_client.broker.core.errors import ChannelException
from qflow_client.broker.core.timers import Timers
from qflow_client.broker.policies.definitions import (
    DefinitionError,
    Definitions,
    ExchangeDefinition,
    Loading,
    QueueDefinition,
)
from qflow_client.broker.settings import BrokerSettings
from qflow_client.broker.store.errors import StoreError
from qflow_client.broker.store.journal import Batch, Journal, Put
from qflow_client.broker.store.recovery import Recovery
from qflow_client.broker.store.store import BodyReader, Store
from qflow_client.database import Database
from tests.effort import rounds

from ..conftest import Disk, World

OPERATIONS = ("declare", *["publish"] * 3, *["get"] * 2, "bind", "unbind", "delete", "exchange", "take")
PERSISTENT = commands.Basic.Properties(delivery_mode=2)


@pytest.fixture(name="world")
def _world():
    return durable_world()


def durable_world(**options):
    world = World(journal=Journal(lambda: world.now), **options)
    return world


def write(world):
    """Report all noted changes as written. Return the batches."""
    journal = world.host.journal
    batches = []
    while journal.is_dirty:
        batches.append(journal.take())
        journal.written_down()
    return batches


def declared(world, *queues, confirms=True, **options):
    client = world.client().channel(confirms=confirms)
    for queue in queues:
        client.send(1, commands.Queue.Declare(queue=queue, durable=True, **options))
    write(world)
    assert client.names() == ["Queue.DeclareOk"] * len(queues)
    return client


def test_a_message_is_confirmed_only_after_it_is_on_disk(world):
    client = declared(world, "q")
    client.publish(properties=PERSISTENT)
    assert client.received() == []
    batch = world.host.journal.take()
    assert [put.queues for put in batch.puts] == [[world.queue().number]]
    client.publish(properties=PERSISTENT)
    assert client.received() == []
    world.host.journal.written_down()
    assert client.only(commands.Basic.Ack).delivery_tag == 1
    assert len(write(world)) == 1
    assert client.only(commands.Basic.Ack).delivery_tag == 2


def test_all_messages_that_arrive_during_a_disk_commit_are_written_by_the_next_commit(world):
    client = declared(world, "q")
    client.publish(properties=PERSISTENT)
    world.host.journal.take()
    client.publish(properties=PERSISTENT, times=50)
    world.host.journal.written_down()
    client.received()
    (batch,) = write(world)
    assert len(batch.puts) == 50
    ack = client.only(commands.Basic.Ack)
    assert (ack.delivery_tag, ack.multiple) == (51, True)


@pytest.mark.parametrize(
    ("properties", "durable"),
    [(None, True), (commands.Basic.Properties(delivery_mode=1), True), (PERSISTENT, False)],
)
def test_transient_messages_do_not_wait_for_the_disk(world, properties, durable):
    client = declared(world, "d")
    if not durable:
        client.declare("q")
    client.publish(routing_key="d" if durable else "q", properties=properties)
    assert client.only(commands.Basic.Ack).delivery_tag == 1
    assert write(world) == []


def test_delivery_mode_2_makes_a_message_persistent_even_if_other_properties_precede_it_on_the_wire(world):
    client = declared(world, "q")
    for properties in (
        commands.Basic.Properties(content_type="text/plain", content_encoding="x", headers={"a": 1}, delivery_mode=2),
        commands.Basic.Properties(headers={"a": 1}, delivery_mode=1, priority=2),
        commands.Basic.Properties(priority=2),
    ):
        client.publish(properties=properties)
    (batch,) = write(world)
    assert len(batch.puts) == 1


def test_a_message_that_is_consumed_before_it_is_written_to_disk_is_confirmed_and_never_written(world):
    client = declared(world, "q")
    client.consume(no_ack=True)
    client.publish(properties=PERSISTENT)
    assert "Basic.Ack" in client.names()
    assert write(world) == []


def test_a_message_in_two_durable_queues_is_written_once_and_removed_when_it_has_left_both_queues(world):
    client = declared(world, "a", "b", "other")
    for queue in ("a", "b"):
        client.send(1, commands.Queue.Bind(queue=queue, exchange="amq.fanout"))
    write(world)
    client.publish(exchange="amq.fanout", properties=PERSISTENT)
    (batch,) = write(world)
    (put,) = batch.puts
    assert put.queues == [world.queue("a").number, world.queue("b").number]
    client.send(1, commands.Basic.Get(queue="a", no_ack=True))
    (batch,) = write(world)
    assert (batch.moves, batch.removals) == ({put.number: [world.queue("b").number]}, [])
    client.send(1, commands.Basic.Get(queue="b", no_ack=True))
    (batch,) = write(world)
    assert (batch.moves, batch.removals) == ({}, [put.number])


@pytest.mark.parametrize("how", ["purge", "delete", "ring", "expire", "reject"])
def test_a_persistent_message_that_leaves_its_queue_in_any_way_is_removed_from_disk(world, how):
    arguments = {"qpid.max_count": 1, "qpid.policy_type": "ring", "x-message-ttl": 1000}
    client = declared(world, "q", arguments=arguments)
    client.publish(properties=PERSISTENT)
    (batch,) = write(world)
    match how:
        case "purge":
            client.send(1, commands.Queue.Purge(queue="q"))
        case "delete":
            client.send(1, commands.Queue.Delete(queue="q"))
        case "ring":
            client.publish(properties=PERSISTENT)
        case "expire":
            world.tick(2.0)
        case "reject":
            client.send(1, commands.Basic.Get(queue="q"), commands.Basic.Reject(1, requeue=False))
    assert write(world)[0].removals == [batch.puts[0].number]


def test_a_dead_letter_is_written_in_the_same_batch_that_removes_the_original(world):
    client = declared(world, "dead")
    arguments: dict[str, Any] = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    client.send(1, commands.Queue.Declare(queue="q", durable=True, arguments=arguments))
    client.publish(properties=PERSISTENT)
    (first,) = write(world)
    client.send(1, commands.Basic.Get(queue="q"), commands.Basic.Reject(1, requeue=False))
    (second,) = write(world)
    assert second.removals == [first.puts[0].number]
    assert [put.queues for put in second.puts] == [[world.queue("dead").number]]


def test_declare_ok_for_a_durable_queue_is_sent_after_the_queue_is_on_disk(world):
    client = world.client().channel()
    client.send(1, commands.Queue.Declare(queue="q", durable=True), commands.Basic.Qos(prefetch_count=1))
    assert client.received() == [], "what comes after it waits, too"
    # A second declare of the queue is also not answered before.
    other = world.client().channel()
    other.send(1, commands.Queue.Declare(queue="q", durable=True))
    assert other.received() == []
    (batch,) = write(world)
    assert [change.kind for change in batch.changes] == ["queue"]
    assert client.names() == ["Queue.DeclareOk", "Basic.QosOk"]
    assert other.names() == ["Queue.DeclareOk"]
    assert client.announced
    client.declare("transient")


def test_heartbeats_do_not_wait_for_the_disk(world):
    client = world.client(heartbeat=10).channel()
    client.send(1, commands.Queue.Declare(queue="q", durable=True))
    client.tick(6.0)
    assert client.names() == ["Heartbeat"]
    write(world)
    assert client.names() == ["Queue.DeclareOk"]


def test_tx_commit_is_answered_when_the_whole_transaction_is_on_disk(world):
    client = declared(world, "q", confirms=False)
    client.call(1, commands.Tx.Select(), commands.Tx.SelectOk)
    client.publish(properties=PERSISTENT, times=3)
    client.send(1, commands.Tx.Commit())
    assert client.received() == []
    (batch,) = write(world)
    assert len(batch.puts) == 3
    client.only(commands.Tx.CommitOk)
    client.send(1, commands.Basic.Get(queue="q"), commands.Basic.Ack(1), commands.Tx.Commit())
    client_names = client.names()
    assert "Tx.CommitOk" not in client_names
    assert len(write(world)[0].removals) == 1
    client.only(commands.Tx.CommitOk)


def test_tx_commit_of_transient_messages_waits_only_for_earlier_changes_to_be_on_disk(world):
    client = world.client().channel().with_queue("q")
    client.call(1, commands.Tx.Select(), commands.Tx.SelectOk)
    client.publish()
    client.call(1, commands.Tx.Commit(), commands.Tx.CommitOk)


def test_exclusive_queues_and_bindings_to_transient_objects_are_not_written(world):
    client = world.client().channel().with_queue("mine", durable=True, exclusive=True)
    client.declare("transient")
    client.call(1, commands.Exchange.Declare(exchange="e"), commands.Exchange.DeclareOk)
    for queue in ("mine", "transient"):
        for exchange in ("e", "amq.direct"):
            client.call(1, commands.Queue.Bind(queue=queue, exchange=exchange), commands.Queue.BindOk)
            client.call(1, commands.Queue.Unbind(queue=queue, exchange=exchange), commands.Queue.UnbindOk)
    client.publish(routing_key="mine", properties=PERSISTENT)
    client.call(1, commands.Queue.Delete(queue="mine"), commands.Queue.DeleteOk)
    client.call(1, commands.Exchange.Delete(exchange="e"), commands.Exchange.DeleteOk)
    assert write(world) == []


def test_a_durable_queue_or_exchange_that_cannot_be_stored_is_refused(world):
    client = world.client().channel()
    arguments: dict[str, Any] = {"strange": float("inf")}
    client.send(1, commands.Queue.Declare(queue="q", durable=True, arguments=arguments))
    client.check_close(commands.Channel.Close, 406, "strange")
    assert world.host.queues == {}
    for declare in (
        lambda: world.host.topology.declare_exchange("e", "direct", durable=True, arguments=arguments),
        lambda: world.host.topology.bind(world.host.declare_queue("d", durable=True), "amq.direct", "", arguments),
    ):
        with pytest.raises(Exception, match="cannot be durable"):
            declare()
    assert "e" not in world.host.topology.exchanges
    assert world.host.topology.exchanges["amq.direct"].bindings == {}


def test_definitions_that_cannot_be_loaded_leave_nothing_on_disk(world):
    wrong = Definitions(
        exchanges=(ExchangeDefinition("e", "direct", durable=True),),
        queues=(QueueDefinition("q", durable=True), QueueDefinition("r", arguments={"qpid.nonsense": 1})),
    )
    with pytest.raises(DefinitionError):
        list(Loading(world.host, world.rules, wrong).steps())
    with Stored(world) as stored:
        assert stored.recovered().host.queues == {}


class Stored:
    """A world whose journal is written to a file, and the state that another broker restores from it."""

    def __init__(self, world):
        self._folder = tempfile.TemporaryDirectory()
        self.world = world
        self.path = f"{self._folder.name}/store"
        self.store = Store(self.path, synchronous="normal")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.store.close()
        self._folder.cleanup()

    def write(self):
        journal = self.world.host.journal
        if journal.is_dirty:
            self.store.write(journal.take())
            journal.written_down()

    def recovered(self, **options):
        self.write()
        self.store.close()
        self.store = Store(self.path, synchronous="normal")
        world = durable_world(**options)
        world.now = self.world.now
        found = self.store.topology()
        world.host.journal.go_on_from(found.last)
        recovery = Recovery(world.host, world.host.journal, world.wall_clock)
        recovery.recover_topology(found)
        recovery.recover_messages(self.store.messages())
        assert recovery.lost == []
        self.store.end_deletions(recovery.leftovers)
        recovery.finish()
        self.world = world
        return world


def test_the_time_to_live_of_a_message_keeps_running_while_the_broker_is_down(world):
    with Stored(world) as stored:
        client = declared(world, "nothing")
        world.host.declare_queue("q", durable=True, arguments={"x-message-ttl": 10_000})
        for at in (0.0, 4.0):
            world.now = at
            client.publish(properties=PERSISTENT)
        # The first batches were only reported as written.
        world.host.delete_queue(world.queue("nothing"))
        stored.write()
        world.now = 11.0
        after = stored.recovered()
        assert after.queue().depth == 1
        assert after.queue().contents.drops == {"expired": 1}
        after.now = 14.5
        after.host.timers.tick(after.now)
        assert after.queue().depth == 0


# Many changes are written in several batches.


def small_batches(size, **options):
    journal = Journal(float, **options)
    journal.OVERHEAD, journal.ENTRY, journal.SMALL_HEADER = 0, 0, 1 << 17
    journal.MAX_BATCH = size
    return World(journal=journal)


def test_many_changes_are_written_in_several_batches_and_each_batch_releases_its_own_confirms():
    world = small_batches(1000)
    journal = world.host.journal
    client = declared(world, "q")
    for size in (400, 400, 400, 5000, 10, 0, 20):
        client.publish(b"x" * size, properties=PERSISTENT)
    found, tags = [], []
    while journal.is_dirty:
        found.append([len(put.body) for put in journal.take().puts])
        assert client.received() == []
        journal.written_down()
        tags.append([(ack.delivery_tag, ack.multiple) for _, ack in client.received()])
    assert found == [[400, 400, 400], [5000], [10, 0, 20]]
    assert tags == [[(3, True)], [(4, False)], [(7, True)]]
    assert journal.is_idle
    assert (journal.backlog, journal.backlog_size, journal.written, journal.batches) == (0, 0, 7, 3 + 1)


def test_many_messages_that_waited_for_room_in_a_queue_are_written_to_disk_in_several_batches():
    world = small_batches(1000)
    client = declared(world, "q", arguments={"x-qflow-policy": "wait", "qpid.max_count": 6})
    client.publish(b"x" * 400, properties=PERSISTENT, times=12)
    assert [len(batch.puts) for batch in write(world)] == [3, 3]
    client.send(1, commands.Queue.Purge(queue="q"))
    world.host.timers.tick(world.now)
    assert [len(batch.puts) for batch in write(world)] == [3, 3]


def test_the_broker_writes_about_16_MiB_to_disk_in_one_batch_by_default():
    world = durable_world()
    world.host.declare_queue("q", durable=True)
    for _ in range(40):
        world.host.publish("", "q", bytes(1 << 20), PERSISTENT)
    batches = write(world)
    assert [len(batch.puts) for batch in batches] == [16, 16, 8]
    assert [len(batch.changes) for batch in batches] == [1, 0, 0]


def test_E9_messages_that_leave_one_of_several_queues_are_written_to_disk_in_batches_of_limited_size(
    world, monkeypatch
):
    monkeypatch.setattr(Journal, "MAX_MOVES", 10)
    client = declared(world, "a", "b")
    for queue in ("a", "b"):
        world.host.topology.bind(world.queue(queue), "amq.fanout", "", {})
    client.publish(exchange="amq.fanout", properties=PERSISTENT, times=25)
    write(world)
    for _ in range(25):
        world.queue("a").take(no_ack=True)
        world.host.journal.divide()
    assert [len(batch.moves) for batch in write(world)] == [10, 10, 5]


def test_a_message_that_leaves_its_queue_while_its_batch_is_written_is_removed_by_a_later_batch():
    world = small_batches(10)
    client = declared(world, "q", "r")
    for queue in ("q", "r"):
        world.host.topology.bind(world.queue(queue), "amq.fanout", "", {})
    write(world)
    client.publish(b"x" * 10, properties=PERSISTENT)
    client.publish(b"y" * 10, exchange="amq.fanout", properties=PERSISTENT)
    client.publish(b"z", properties=PERSISTENT)
    world.queue().purge()
    client.publish(b"last", properties=PERSISTENT)
    first, second, third = write(world)
    (x,), (y,) = first.puts, second.puts
    assert (x.body, y.body, [put.body for put in third.puts]) == (b"x" * 10, b"y" * 10, [b"last"])
    assert (first.removals, second.removals, third.removals) == ([], [], [x.number])
    assert (first.moves, second.moves, third.moves) == ({}, {}, {y.number: [world.queue("r").number]})


def test_an_answer_that_waits_for_the_disk_waits_for_all_earlier_changes():
    world = small_batches(10)
    client = declared(world, "q")
    journal = world.host.journal
    told = []
    for name in "abc":
        world.host.declare_queue(name, durable=True)
        world.host.publish("", "q", b"x" * 10, PERSISTENT)
        journal.when_durable(lambda name=name: told.append(name), topology_only=True)
    assert journal.when_durable(lambda: told.append("all"), topology_only=True)
    assert told == []
    for name in "abc":
        before = told.copy()
        (change,) = journal.take().changes
        assert (change.values[1], told) == (name, before)
        journal.written_down()
        assert told == [*before, name] + ["all"] * (name == "c")
    assert not journal.is_dirty
    assert not journal.when_durable(lambda: told.append("late"), topology_only=True), "there is nothing to wait for"
    assert client.received() == []


def test_a_transaction_is_written_to_disk_in_one_batch_and_the_next_message_in_another():
    world = small_batches(10)
    client = declared(world, "q", confirms=False)
    client.call(1, commands.Tx.Select(), commands.Tx.SelectOk)
    client.publish(b"x" * 10, properties=PERSISTENT, times=5)
    client.send(1, commands.Tx.Commit())
    world.host.publish("", "q", b"then", PERSISTENT)
    assert [len(batch.puts) for batch in write(world)] == [5, 1]
    client.only(commands.Tx.CommitOk)


def test_a_callback_that_raises_after_a_disk_commit_does_not_prevent_the_other_callbacks(world, caplog):
    client = declared(world, "q")
    world.host.declare_queue("other", durable=True)
    told: list[int] = []
    world.host.journal.when_durable(lambda: told.append(1 // 0))
    world.host.journal.when_durable(lambda: told.append(2))
    client.publish(properties=PERSISTENT)
    write(world)
    assert told == [2]
    client.only(commands.Basic.Ack)
    assert "a callback failed after a commit" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_A2_a_callback_that_raises_after_a_read_from_disk_does_not_prevent_the_other_callbacks(world, caplog):
    client = declared(world, "q")
    journal = world.host.journal
    client.publish(b"body", properties=PERSISTENT)
    (entry,) = world.queue().contents.oldest_first()
    journal.evict(entry.message)
    write(world)
    told: list[int] = []

    def patient():
        told.append(2)
        return len(told) == 2

    journal.want([entry.message], lambda: bool(1 // 0))
    journal.want([entry.message], patient)
    (number,) = journal.take_wanted()
    journal.came({number: b"body"})
    assert (entry.message.body, told) == (b"body", [2])
    assert "a callback failed after bodies were read" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    journal.came({})
    journal.came({})
    assert told == [2, 2], "who waits is told again, who could not be told is not, nor who waits no more"


def test_A2_bodies_that_are_evicted_from_memory_are_written_to_disk_in_batches():
    world = small_batches(1000, limit=100)
    world.host.declare_queue("q", arguments={"x-qflow-policy": "flow_to_disk"})
    for _ in range(100):
        world.host.publish("", "q", bytes(100))
    world.host.relieve()
    assert [len(batch.puts) for batch in write(world)] == [10] * 10
    assert world.host.journal.memory == 0


def test_A2_a_message_that_leaves_its_queue_while_its_body_is_read_from_disk_uses_no_memory(world):
    client = declared(world, "q")
    client.publish(b"body", properties=PERSISTENT)
    journal = world.host.journal
    (entry,) = world.queue().contents.oldest_first()
    journal.evict(entry.message)
    write(world)
    assert entry.message.body is None
    journal.want([entry.message], lambda: True)
    (number,) = journal.take_wanted()
    client.send(1, commands.Queue.Purge(queue="q"))
    journal.came({number: b"body"})
    assert (entry.message.body, journal.memory) == (None, 0)


def test_a_transaction_larger_than_the_sqlite_value_limit_is_written_in_smaller_portions(world):
    client = declared(world, confirms=False)
    client.call(1, commands.Tx.Select(), commands.Tx.SelectOk)
    world.host.declare_queue("q", durable=True)
    with Stored(world) as stored:
        # Instead of 10**9.
        stored.store._file._file.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100_000)
        client.publish(bytes(20_000), properties=PERSISTENT, times=20)
        client.publish(bytes(80_000), properties=PERSISTENT)
        client.send(1, commands.Tx.Commit())
        stored.write()
        client.only(commands.Tx.CommitOk)
        assert [len(each.body) for each in stored.store.messages()] == [20_000] * 20 + [80_000]


def puts(numbers, size):
    return [Put(number, [1], 0.0, b"\0\1q", b"header", bytes(size)) for number in numbers]


def test_prepared_statements_of_the_store_hold_few_bytes_of_old_messages(tmp_path, monkeypatch):
    held: dict[str, int] = {}
    execute = Database.execute

    def noting(self, statement, *values):
        # A prepared statement keeps a copy of its values until its next use.
        held[statement] = sum(len(value) for value in values if isinstance(value, bytes))
        return execute(self, statement, *values)

    kept = Store(tmp_path / "store", synchronous="normal")
    monkeypatch.setattr(Database, "execute", noting)
    for count in range(1, 130):
        kept.write(Batch(puts=puts(range(count), 20_000)))
        kept.write(Batch(removals=list(range(count))))
    kept.close()
    assert sum(held.values()) < Journal.MAX_BATCH


def test_a_store_is_refused_with_an_sqlite_that_is_too_old(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 32, 3))
    monkeypatch.setattr(sqlite3, "sqlite_version", "3.32.3")
    with pytest.raises(StoreError, match=r"a store needs SQLite 3.33 or later, and this Python has 3.32.3; use"):
        Store(tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_max_message_size_larger_than_a_row_of_the_store_can_hold_raises_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"max_message_size must be at most 900000000 with a store.*, not 900000001"):
        BrokerSettings(store=tmp_path / "store", max_message_size=900_000_001)
    BrokerSettings(max_message_size=900_000_001)
    host = World(max_message_size=10).host
    with pytest.raises(ChannelException, match="a message of 11 bytes is larger than max_message_size"):
        host.publish("", "q", b"x" * 11)


@pytest.mark.parametrize("seed", range(rounds(25)))
def test_a_crash_between_two_disk_batches_loses_no_confirmed_message_and_duplicates_none(seed):
    chance = random.Random(seed)
    world = small_batches(50)
    confirmed, acked = set[int](), list[int]()
    acked_before: dict[int, int] = {}
    settled_for_sure = 0
    with Stored(world) as stored:
        client = world.client().channel(confirms=True)
        host = world.host
        letters = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
        ring = {"qpid.max_count": 5, "qpid.policy_type": "ring"}
        for queue, arguments in (("q", letters | ring), ("kept", {}), ("dead", {})):
            host.declare_queue(queue, durable=True, arguments=arguments)
        for queue in ("q", "kept"):
            host.topology.bind(host.queues[queue], "amq.fanout", "", {})
        for number in range(1, 200):
            acked_before[number] = len(acked)
            client.publish(b"%d " % number + bytes(chance.choice((0, 10, 70))), exchange="amq.fanout",
                           properties=PERSISTENT)  # fmt: skip
            for queue in ("q", "dead"):
                if chance.random() < 0.2 and (entry := host.queues[queue].take(no_ack=False)) is not None:
                    rejected = chance.random() < 0.5
                    if not rejected or queue == "dead":
                        acked.append(number_of(entry.message.body))
                    host.queues[queue].dispatcher.settle(entry, acked=not rejected)
            while host.journal.is_dirty and chance.random() < 0.3:
                stored.store.write(host.journal.take())
                host.journal.written_down()
                for _, ack in client.received():
                    last = ack.delivery_tag
                    confirmed |= set(range(max(confirmed, default=0) + 1, last + 1)) if ack.multiple else {last}
                    settled_for_sure = max(settled_for_sure, acked_before[last])
        # Changes noted since then are lost.
        stored.world = durable_world()
        after = stored.recovered().host
        # The ring drops messages whose dead letters were not sent before the crash.
        after.timers.tick(0.0)
        kept, q, dead = (
            [number_of(entry.message.body) for entry in after.queues[name].contents.oldest_first()]
            for name in ("kept", "q", "dead")
        )
        assert confirmed
        assert confirmed <= set(kept)
        assert kept == sorted(set(kept))
        assert len(q + dead) == len(set(q + dead)), "a letter and what died are both there"
        assert confirmed - set(acked) <= set(q + dead)
        assert not set(acked[:settled_for_sure]) & set(q + dead), "what was acked before something confirmed is back"


def number_of(content):
    return int(content.split(b" ")[0])


@pytest.mark.parametrize("ticks", range(4))
def test_E9_a_durable_queue_is_emptied_in_slices_and_a_kill_meanwhile_leaves_none_of_its_messages(
    world, monkeypatch, ticks
):
    # Each tick calls one timer.
    monkeypatch.setattr(Timers, "MAX_TICK", 0.0)
    many = 5 * Contents.AT_ONCE // 2
    with Stored(world) as stored:
        client = world.client().channel(confirms=True)
        for name in ("both", "q"):
            world.host.topology.bind(world.host.declare_queue(name, durable=True), "amq.fanout", "", {})
        client.publish(properties=PERSISTENT, times=many)
        client.publish(exchange="amq.fanout", properties=PERSISTENT)
        stored.write()
        client.received()
        queue = world.queue()
        client.send(1, commands.Queue.Delete(queue="q"))
        assert queue.depth == many + 1 - Contents.AT_ONCE
        for _ in range(ticks):
            world.host.timers.tick(world.now)
        stored.write()
        assert client.names() == ["Queue.DeleteOk"]
        assert queue.depth == max(0, many + 1 - (1 + ticks) * Contents.AT_ONCE)
        assert len(list(stored.store.messages())) == max(1, queue.depth)
        after = stored.recovered().host
        # A new queue gets no number that a message still has.
        number = after.declare_queue("new", durable=True).number
        assert all(number not in each.queues for each in stored.store.messages())
        assert depths(stored.world) == {"both": 1, "new": 0}
        assert len(list(stored.store.messages())) == 1


# Messages on disk that are dead-lettered.


def read(stored):
    """Read all requested bodies from the file."""
    reader = BodyReader(Path(stored.path))
    journal = stored.world.host.journal
    while journal.wants:
        journal.came(reader.read(journal.take_wanted()))
    reader.close()
    stored.world.tick(stored.world.now)


def depths(world):
    return {name: queue.depth for name, queue in world.host.queues.items()}


@pytest.mark.parametrize("how", ["reject", "expire", "maxlen"])
@pytest.mark.parametrize("when", ["before its letter is read", "after that", "when its queue is deleted", "with that"])
def test_a_confirmed_message_dead_lettered_from_disk_survives_a_kill_at_any_moment(how, when):
    # Every body is evicted.
    world = World(journal=Journal(lambda: world.now, limit=1))
    with Stored(world) as stored:
        client = world.client().channel(confirms=True)
        world.host.declare_queue("dead", durable=True)
        world.host.declare_queue(
            "q",
            durable=True,
            arguments={
                "x-qflow-policy": "flow_to_disk",
                "x-dead-letter-exchange": "",
                "x-dead-letter-routing-key": "dead",
                "x-message-ttl": 1000,
            },
        )
        client.publish(b"confirmed", properties=PERSISTENT)
        world.host.relieve()
        stored.write()
        client.only(commands.Basic.Ack)
        assert [entry.message.body for entry in world.queue().contents.oldest_first()] == [None]
        match how:
            case "expire":
                world.tick(2.0)
            case "maxlen":
                with world.host.dead_letters:
                    world.queue().dropping.drop(world.queue().contents.first(), DropReason.MAXLEN)
            case "reject":
                client.consume()
                read(stored)
                world.host.relieve()
                client.send(1, commands.Basic.Reject(1, requeue=False))
        if when == "after that":
            read(stored)
        if when.startswith(("when", "with")):
            world.host.delete_queue(world.queue())
        stored.write()
        if when == "when its queue is deleted":
            read(stored)
        after = stored.recovered()
        after.tick(after.now)
        match when:
            case "before its letter is read" if how == "expire":
                # The message was dead-lettered once more, in memory.
                assert depths(after) == {"dead": 1, "q": 0}
            case "before its letter is read":
                assert depths(after) == {"dead": 0, "q": 1}
            case "after that":
                assert depths(after) == {"dead": 1, "q": 0}
            case "when its queue is deleted":
                assert depths(after) == {"dead": 1}
            case _:
                # A deleted queue takes its messages with it.
                assert depths(after) == {"dead": 0}
        stored.write()
        assert len(list(stored.store.messages())) == sum(depths(after).values())


def test_a_dead_letter_that_fills_memory_does_not_evict_the_body_of_the_next_dead_letter():
    world = World(journal=Journal(lambda: world.now))
    client = world.client().channel()
    host, disk = world.host, Disk(world.host.journal)
    letters = {"x-dead-letter-exchange": "amq.direct", "x-message-ttl": 1000}
    q = host.declare_queue("q", durable=True, arguments=letters)
    spool = host.declare_queue("spool", arguments={"x-qflow-policy": "flow_to_disk", "qpid.max_count": 3})
    for queue in (q, spool):
        host.topology.bind(queue, "amq.fanout", "", {})
    host.topology.bind(spool, "amq.direct", "a", {})
    disk.write()
    client.call(1, commands.Basic.Qos(prefetch_count=3), commands.Basic.QosOk)
    client.consume("spool")
    for content in (b"1", b"2", b"3"):
        client.publish(content, "a", exchange="amq.fanout", properties=PERSISTENT)
    disk.write()
    assert [entry.message.body for entry in q.contents.oldest_first()] == [b"1", b"2", b"3"]
    # The first dead letter needs the room of a message behind it.
    world.now = 2.0
    host.timers.tick(world.now)
    assert q.depth == 0
    for _ in range(3):
        disk.write()
        disk.read()
        host.timers.tick(world.now)
    assert spool.depth == 6
    disk.check(host.queues.values())


def survivors(world):
    """Return the state of a world that must survive a restart."""
    host = world.host
    queues = {
        name: (
            queue.arguments,
            queue.auto_delete,
            [
                (entry.message.body, entry.message.header, entry.message.target.names)
                for entry in queue.contents.oldest_first()
                if entry.message.is_persistent
            ],
        )
        for name, queue in host.queues.items()
        if queue.durable
    }
    exchanges = {
        (each.name, each.type, each.auto_delete, each.internal)
        for each in host.topology.exchanges.values()
        if each.durable
    }
    bindings = Counter(
        (source.name, binding.destination.name, binding.routing_key, repr(binding.arguments))
        for source in host.topology.exchanges.values()
        for binding in source.bindings.values()
        if source.durable and getattr(binding.destination, "durable", False)
    )
    return queues, exchanges, bindings


@pytest.mark.parametrize("seed", range(rounds(25)))
def test_after_any_sequence_of_changes_a_restarted_broker_restores_the_state_of_the_last_disk_commit(world, seed):
    """A broker that was killed between two commits restores the state of the last commit."""
    chance = random.Random(seed)
    names, exchanges = "abc", ("e", "amq.direct", "amq.fanout")
    world = durable_world()
    with Stored(world) as stored:
        for _ in range(4):
            client = world.client().channel(confirms=True)
            snapshot = survivors(world)
            for step in range(chance.randrange(80)):
                queue, exchange = chance.choice(names), chance.choice(exchanges)
                host = world.host
                match chance.choice(OPERATIONS):
                    case "declare":
                        arguments = chance.choice(({}, {"x-max-length": 3}, {"x-custom": [1, {"a": b"\xff"}]}))
                        if queue not in host.queues:
                            host.declare_queue(queue, durable=chance.random() < 0.8, arguments=arguments)
                    case "publish":
                        properties = commands.Basic.Properties(delivery_mode=chance.choice((1, 2, 2)))
                        target = chance.choice(("", *(name for name in exchanges if name in host.topology.exchanges)))
                        client.publish(b"%d" % step, queue, exchange=target, properties=properties)
                    case "get" if queue in host.queues:
                        entry = host.queues[queue].take(no_ack=False)
                        if entry is not None and chance.random() < 0.7:
                            host.queues[queue].dispatcher.settle(entry, acked=chance.random() < 0.5)
                        elif entry is not None:
                            host.queues[queue].dispatcher.requeue([entry])
                    case "bind" if queue in host.queues and exchange in host.topology.exchanges:
                        host.topology.bind(host.queues[queue], exchange, queue, chance.choice(({}, {"x": 1})))
                    case "unbind" if queue in host.queues and exchange in host.topology.exchanges:
                        host.topology.unbind(host.queues[queue], exchange, queue, {})
                    case "delete" if queue in host.queues and chance.random() < 0.3:
                        host.delete_queue(host.queues[queue])
                    case "exchange":
                        if "e" not in host.topology.exchanges:
                            host.topology.declare_exchange("e", "fanout", durable=chance.random() < 0.8)
                            host.topology.bind(host.topology.exchanges["e"], "amq.direct", "a", {})
                        elif chance.random() < 0.3:
                            host.topology.delete_exchange("e")
                    case "take":
                        snapshot = survivors(world)
                        stored.write()
            # Changes noted since then are lost.
            journal = world.host.journal
            if journal.is_dirty and chance.random() < 0.5:
                stored.world = durable_world()
            else:
                snapshot = survivors(world)
            world = stored.recovered()
            assert survivors(world) == snapshot
