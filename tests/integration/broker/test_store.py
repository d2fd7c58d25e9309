"""A broker that keeps what is durable in a file."""

from __future__ import annotations

import asyncio
import errno
import shutil
import sqlite3
import threading

import pika
import pytest
from pamqp import commands

from qflow_client import Producer
from qflow_client.broker import Broker, StoreError, keeper
from qflow_client.broker.keeper import Keeper
from qflow_client.broker.store import BodyReader, Store

PERSISTENT = pika.BasicProperties(delivery_mode=2)


def test_durable_queues_exchanges_bindings_and_persistent_messages_survive_a_restart(tmp_path):
    path = tmp_path / "store"
    with Broker(store=path) as broker:
        broker.declare_queue("orders", durable=True, arguments={"qpid.flow_stop_count": 100})
        broker.declare_queue("gone")
        broker.declare_exchange("shop", "topic", durable=True)
        broker.bind("shop", "orders", "orders.#")
        with Producer(broker.url, exchange="shop", routing_key="orders.new") as producer:
            for number in range(50):
                producer.send(b"%d" % number)
        with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
            channel = connection.channel()
            for _ in range(3):
                channel.basic_get("orders")
            channel.basic_ack(3, multiple=True)
            channel.basic_publish("", "orders", b"not to be kept", pika.BasicProperties(delivery_mode=1))
    with Broker(store=path) as broker:
        (queue,) = broker.queues()
        assert (queue.name, queue.durable, queue.depth) == ("orders", True, 47)
        assert queue.arguments == {"qpid.flow_stop_count": 100}
        messages = broker.messages("orders")
        assert [message.body for message in messages] == [b"%d" % number for number in range(3, 50)]
        assert {message.exchange for message in messages} == {"shop"}
        assert messages[0].properties.message_id
        assert all(message.redelivered for message in messages), "nobody knows whether they were"
        assert [(each.source, each.destination, each.routing_key) for each in broker.bindings()] == [
            ("shop", "orders", "orders.#")
        ]
        broker.declare_queue("orders", durable=True, arguments={"qpid.flow_stop_count": 100})
        broker.publish(b"one more", "orders.x", exchange="shop", properties=commands.Basic.Properties(delivery_mode=2))
        for _ in range(47):
            broker.get("orders")
    with Broker(store=path) as broker:
        assert [message.body for message in broker.messages("orders")] == [b"one more"]


def test_it_keeps_its_store_on_the_loop_that_it_is_given(tmp_path):
    async def once(count):
        async with Broker(store=tmp_path / "store") as broker:
            broker.declare_queue("q", durable=True)
            broker.publish(b"x", "q", properties=commands.Basic.Properties(delivery_mode=2))
            return broker.queue("q").depth

    assert [asyncio.run(once(count)) for count in (1, 2, 3)] == [1, 2, 3]


def test_a_queue_with_marks_comes_back_ON(tmp_path):
    arguments = {"qpid.flow_stop_count": 3, "qpid.flow_resume_count": 1}
    with Broker(store=tmp_path / "store") as broker:
        broker.declare_queue("q", durable=True, arguments=arguments)
        for _ in range(5):
            broker.publish(b"x", "q", properties=commands.Basic.Properties(delivery_mode=2))
    with Broker(store=tmp_path / "store") as broker:
        assert broker.queue("q").flow_stopped
        broker.purge("q")
        assert not broker.queue("q").flow_stopped


def test_one_store_is_for_one_broker(tmp_path):
    path = tmp_path / "store"
    words = "used by another broker in this process; give each broker a store of its own"
    with Broker(store=path), pytest.raises(StoreError, match=words):
        Broker(store=path).__enter__()
    with Broker(store=path):
        pass


def test_another_file_is_no_store(tmp_path):
    path = tmp_path / "other"
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE t (x)")
    file.close()
    for _ in range(2):
        with pytest.raises(StoreError, match="is a database of something else"):
            Broker(store=path).__enter__()
    with pytest.raises(StoreError, match="No such file"):
        Broker(store=tmp_path / "nowhere" / "store").__enter__()


def test_what_a_setting_refuses_now_is_told_with_the_name_of_the_store(tmp_path):
    path = tmp_path / "store"
    with Broker(store=path, capacity=1000) as broker:
        broker.declare_queue("q", durable=True, arguments={"x-qpid-flow-resume-capacity": 500})
    with pytest.raises(StoreError, match=r"store: what is declared there is refused now: .*x-qpid-capacity"):
        Broker(store=path, capacity=100).__enter__()
    with Broker(store=path, capacity=1000) as broker:
        assert broker.queue("q").thresholds.flow_resume_capacity == 500


def test_a_broker_with_a_store_is_changed_only_while_it_runs(tmp_path):
    broker = Broker(store=tmp_path / "store")
    with pytest.raises(RuntimeError, match="only while it runs"):
        broker.declare_queue("q", durable=True)
    with broker:
        broker.declare_queue("q", durable=True)
    assert broker.queue("q").depth == 0
    with pytest.raises(RuntimeError, match="only while it runs"):
        broker.purge("q")


@pytest.mark.parametrize("error", [StoreError, MemoryError, RuntimeError])
def test_while_nothing_can_be_written_clients_are_blocked_and_nothing_is_confirmed(
    tmp_path, monkeypatch, caplog, error
):
    is_full = threading.Event()
    write = Store.write

    def fail(self, batch):
        if is_full.is_set():
            raise error(f"{self.path}: database or disk is full")
        write(self, batch)

    monkeypatch.setattr(Store, "write", fail)
    monkeypatch.setattr(Keeper, "RETRY", 0.02)
    with Broker(store=tmp_path / "store") as broker:
        broker.declare_queue("q", durable=True)
        with Producer(broker.url, routing_key="q") as producer:
            producer.send(b"before").result(10)
            is_full.set()
            receipt = producer.send(b"while")
            broker.wait_until(lambda broker: "disk" in broker.alarms)
            assert "database or disk is full" in broker.alarms["disk"]
            assert broker.connections()[0].blocked
            assert not receipt.done
            is_full.clear()
            receipt.result(10)
        broker.wait_until(lambda broker: not broker.alarms)
        assert broker.queue("q").depth == 2
    assert "no confirm is given until it can be written" in caplog.text
    with Broker(store=tmp_path / "store") as broker:
        assert broker.queue("q").depth == 2


def test_D8_while_too_little_of_the_disk_is_free_clients_are_blocked(tmp_path, monkeypatch, caplog):
    free: list[int | OSError] = [999]
    folders = set()
    looks = threading.Semaphore(0)

    def look(folder):
        folders.add(folder)
        looks.release()
        if isinstance(free[0], OSError):
            raise free[0]
        return free[0]

    monkeypatch.setattr(keeper, "free_space", look)
    monkeypatch.setattr(Keeper, "LOOK", 0.01)

    def has_looked():
        """What was set before has been looked at by the second look, and told of by the third."""
        while looks.acquire(blocking=False):
            pass
        for _ in range(3):
            assert looks.acquire(timeout=30)

    with Broker(store=tmp_path / "store", disk_free_limit=1000) as broker:
        words = f"999 bytes are free in {tmp_path}, of at least 1000"
        assert broker.alarms == {"disk_space": words}, "already when it starts"
        with Producer(broker.url, routing_key="q") as producer:
            broker.wait_until(lambda broker: any(each.blocked for each in broker.connections()), timeout=30)
            # Not enough to say that it is over.
            free[0] = 1124
            has_looked()
            assert broker.alarms == {"disk_space": words}
            free[0] = 1125
            broker.wait_until(lambda broker: not broker.alarms, timeout=30)
            broker.declare_queue("q", durable=True)
            producer.send(b"x").result(30)
            free[0] = 1000
            has_looked()
            assert broker.alarms == {}
            free[0] = OSError(errno.EIO, "Input/output error")
            broker.wait_until(lambda broker: broker.alarms, timeout=30)
            assert "nobody knows how much is free: [Errno 5] Input/output error" in broker.alarms["disk_space"]
            free[0] = 2000
            broker.wait_until(lambda broker: not broker.alarms, timeout=30)
    assert folders == {tmp_path}
    assert "blocked for that no more" in caplog.text


def test_the_free_space_is_that_of_the_folder_of_the_store(tmp_path):
    assert 0 < keeper.free_space(tmp_path) <= shutil.disk_usage(tmp_path).total
    with Broker(store=tmp_path / "store", disk_free_limit=1) as broker:
        assert broker.alarms == {}
    with pytest.raises(ValueError, match="disk_free_limit=1 is about the folder of the store: set a store too"):
        Broker(disk_free_limit=1)


def test_what_cannot_be_read_for_whatever_reason_is_read_later(tmp_path, monkeypatch, caplog):
    failures = [StoreError("not now"), MemoryError("no room")]
    read = BodyReader.read

    def fail(self, numbers):
        if failures:
            raise failures.pop()
        return read(self, numbers)

    monkeypatch.setattr(BodyReader, "read", fail)
    monkeypatch.setattr(Keeper, "RETRY", 0.02)
    with Broker(store=tmp_path / "store", memory_limit=1 << 20) as broker:
        broker.declare_queue("q", arguments={"x-qflow-policy": "flow_to_disk", "qpid.max_size": 1})
        broker.publish(b"x" * 100, "q")
        broker.wait_until(lambda broker: broker.memory.evicted, timeout=30)
        with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
            assert connection.channel().basic_get("q")[2] == b"x" * 100
    assert "MemoryError('no room'); messages wait until it can be read" in caplog.text
    assert "not now; messages wait until it can be read" in caplog.text


def test_a_broker_that_cannot_write_ends_all_the_same(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Keeper, "STOP_GRACE", 0.1)
    with Broker(store=tmp_path / "store") as broker:
        broker.declare_queue("q", durable=True)

    def fail(self, batch):
        raise StoreError("full")

    with Broker(store=tmp_path / "store") as broker:
        monkeypatch.setattr(Store, "write", fail)
        broker.publish(b"x", "q", properties=commands.Basic.Properties(delivery_mode=2))
        broker.wait_until(lambda broker: broker.alarms)
    assert "what was not confirmed is lost" in caplog.text


def test_a_broker_ends_also_if_a_write_fails_only_after_it_has_begun_to(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Keeper, "STOP_GRACE", 0.1)
    may_fail = threading.Event()
    stop = Keeper.stop

    def fail(self, batch):
        may_fail.wait(30)
        raise StoreError("full")

    async def fail_then(self):
        # Called as soon as it waits for what is being written.
        asyncio.get_running_loop().call_soon(may_fail.set)
        await asyncio.wait_for(stop(self), 20)

    monkeypatch.setattr(Keeper, "stop", fail_then)
    with Broker(store=tmp_path / "store") as broker:
        broker.declare_queue("q", durable=True)
        monkeypatch.setattr(Store, "write", fail)
        broker.publish(b"x", "q", properties=commands.Basic.Properties(delivery_mode=2))
        assert not broker.alarms
    assert "what was not confirmed is lost" in caplog.text


def test_nothing_of_a_store_is_there_without_one(broker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    broker.declare_queue("q", durable=True)
    broker.publish(b"x", "q", properties=commands.Basic.Properties(delivery_mode=2))
    assert list(tmp_path.iterdir()) == []
    assert not any(thread.name.startswith("qflow-store") for thread in threading.enumerate())
