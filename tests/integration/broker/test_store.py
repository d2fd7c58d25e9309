"""A broker that stores durable objects and persistent messages in a file."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pika
import pytest
from pamqp import commands

from benchmarks.damage import damage
from qflow_client import Producer
from qflow_client.broker import Broker, Policy, PolicyDefinition, QueuePolicy, StoreError
from qflow_client.broker.core.deadletter import DeadLetters
from qflow_client.broker.core.wire import encode_header
from qflow_client.broker.http.server import HttpServer
from qflow_client.broker.store import keeper
from qflow_client.broker.store.journal import Batch, Put
from qflow_client.broker.store.keeper import Keeper
from qflow_client.broker.store.store import BodyReader, Store
from qflow_client.broker.store.topologylog import Change
from tests.effort import rounds
from tests.integration.forked import Forked

PERSISTENT = pika.BasicProperties(delivery_mode=2)


def test_E10_with_a_damaged_store_the_broker_has_correct_message_bodies_or_an_error_says_what_to_do(tmp_path):
    # The nightly test "damage" does the same at 1,100 places.
    verdict = damage(tmp_path, flips=rounds(30), cuts=rounds(5), seed=1)
    assert verdict.failures == []
    assert verdict.whole + verdict.reported + verdict.refused == verdict.places > 0


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
        assert (queue.name, queue.durable, queue.depth, queue.published) == ("orders", True, 47, 0)
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


def test_a_broker_on_the_event_loop_of_the_application_keeps_messages_in_its_store(tmp_path):
    async def once(count):
        async with Broker(store=tmp_path / "store") as broker:
            broker.declare_queue("q", durable=True)
            broker.publish(b"x", "q", properties=commands.Basic.Properties(delivery_mode=2))
            return broker.queue("q").depth

    assert [asyncio.run(once(count)) for count in (1, 2, 3)] == [1, 2, 3]


def test_a_queue_above_its_stop_threshold_is_ON_after_a_restart_of_the_broker(tmp_path):
    arguments = {"qpid.flow_stop_count": 3, "qpid.flow_resume_count": 1}
    with Broker(store=tmp_path / "store") as broker:
        broker.declare_queue("q", durable=True, arguments=arguments)
        for _ in range(5):
            broker.publish(b"x", "q", properties=commands.Basic.Properties(delivery_mode=2))
    with Broker(store=tmp_path / "store") as broker:
        assert broker.queue("q").flow_stopped
        broker.purge("q")
        assert not broker.queue("q").flow_stopped


@pytest.mark.parametrize("policy", [{}, {"x-qflow-policy": "flow_to_disk", "qpid.max_count": 1}], ids=str)
def test_a_broker_that_stops_first_sends_all_dead_letters_even_if_their_queue_is_deleted(tmp_path, monkeypatch, policy):
    monkeypatch.setattr(DeadLetters, "READS", 2)
    # Until the stop, no letter is sent.
    monkeypatch.setattr(DeadLetters, "tick", lambda *_: None)
    letters = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead", "x-message-ttl": 200}
    with Broker(store=tmp_path / "store") as broker:
        broker.declare_queue("dead", durable=True)
        broker.declare_queue("q", durable=True, arguments=letters | policy)
        for _ in range(100):
            broker.publish(b"x", "q", properties=commands.Basic.Properties(delivery_mode=2))
        broker.wait_until(lambda broker: broker.queue("q").depth == 0, timeout=30)
        broker.delete_queue("q")
    with Broker(store=tmp_path / "store") as broker:
        assert broker.queue("dead").depth == 100


def test_a_broker_that_is_killed_while_it_empties_a_deleted_queue_removes_the_other_messages_at_its_start(
    tmp_path, monkeypatch, caplog
):
    with closing(Store(tmp_path / "store")) as store:
        puts = [Put(number, [7], 0.0, b"\0\0", encode_header(0, None), b"") for number in range(1, 2001)]
        store.write(Batch([Change("deleted", (7,))], puts))
    with Broker(store=tmp_path / "store") as broker:
        assert broker.queues() == ()
    assert caplog.text == ""
    with closing(Store(tmp_path / "store")) as store:
        assert list(store.messages()) == []


def test_messages_that_expired_while_the_broker_was_down_are_dead_lettered_although_nobody_connects(tmp_path):
    letters = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead", "x-message-ttl": 200}
    with Broker(store=tmp_path / "store") as broker:
        broker.declare_queue("dead", durable=True)
        broker.declare_queue("q", durable=True, arguments=letters)
        for _ in range(100):
            broker.publish(b"x", "q", properties=commands.Basic.Properties(delivery_mode=2))
    with Broker(store=tmp_path / "store") as broker:
        broker.wait_until(lambda broker: broker.queue("dead").depth == 100, timeout=30)


def test_two_brokers_cannot_share_a_store(tmp_path):
    path = tmp_path / "store"
    words = "used by another broker in this process; give each broker a store of its own"
    with Broker(store=path), pytest.raises(StoreError, match=words):
        Broker(store=path).__enter__()
    with Broker(store=path):
        pass


def test_a_broker_refuses_a_store_file_of_another_application_or_in_a_missing_folder(tmp_path):
    path = tmp_path / "other"
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE t (x)")
    file.close()
    for _ in range(2):
        with pytest.raises(StoreError, match="is a database of another application"):
            Broker(store=path).__enter__()
    with pytest.raises(StoreError, match="No such file"):
        Broker(store=tmp_path / "nowhere" / "store").__enter__()


def test_if_a_setting_conflicts_with_a_stored_queue_the_error_names_the_store(tmp_path):
    path = tmp_path / "store"
    with Broker(store=path, capacity=1000) as broker:
        broker.declare_queue("q", durable=True, arguments={"x-qpid-flow-resume-capacity": 500})
    with pytest.raises(StoreError, match=r"store: the broker refuses a stored declaration: .*x-qpid-capacity"):
        Broker(store=path, capacity=100).__enter__()
    with Broker(store=path, capacity=1000) as broker:
        assert broker.queue("q").thresholds.flow_resume_capacity == 500


def test_a_broker_with_a_store_can_be_changed_only_while_it_runs(tmp_path):
    broker = Broker(store=tmp_path / "store")
    with pytest.raises(RuntimeError, match="only while it runs"):
        broker.declare_queue("q", durable=True)
    with broker:
        broker.declare_queue("q", durable=True)
    assert broker.queue("q").depth == 0
    with pytest.raises(RuntimeError, match="only while it runs"):
        broker.purge("q")


@pytest.mark.parametrize("error", [StoreError, MemoryError, RuntimeError])
def test_while_the_disk_cannot_be_written_connections_are_blocked_and_no_message_is_confirmed(
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
            producer.send(b"before").result(20)
            is_full.set()
            receipt = producer.send(b"while")
            broker.wait_until(lambda broker: "disk" in broker.alarms)
            assert "database or disk is full" in broker.alarms["disk"]
            assert broker.connections()[0].blocked
            assert not receipt.done
            is_full.clear()
            receipt.result(20)
        broker.wait_until(lambda broker: not broker.alarms)
        assert broker.queue("q").depth == 2
    assert "until the store can be written, persistent messages are not confirmed" in caplog.text
    with Broker(store=tmp_path / "store") as broker:
        assert broker.queue("q").depth == 2


def test_D8_while_the_disk_has_too_little_free_space_connections_are_blocked(tmp_path, monkeypatch, caplog):
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
        """Wait until the broker has applied the value. It reads the value in the second check, at the latest."""
        while looks.acquire(blocking=False):
            pass
        for _ in range(3):
            assert looks.acquire(timeout=30)

    with Broker(store=tmp_path / "store", disk_free_limit=1000) as broker:
        words = f"999 bytes are free in {tmp_path}, at least 1000 are needed"
        assert broker.alarms == {"disk_space": words}, "already when it starts"
        with Producer(broker.url, routing_key="q") as producer:
            broker.wait_until(lambda broker: any(each.blocked for each in broker.connections()), timeout=30)
            # This is not enough to clear the alarm.
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
            assert "the free space cannot be read: [Errno 5] Input/output error" in broker.alarms["disk_space"]
            free[0] = 2000
            broker.wait_until(lambda broker: not broker.alarms, timeout=30)
    assert folders == {tmp_path}
    assert "no longer blocked for this reason" in caplog.text


def test_free_space_is_measured_in_the_folder_of_the_store(tmp_path):
    assert 0 < keeper.free_space(tmp_path) <= shutil.disk_usage(tmp_path).total
    with Broker(store=tmp_path / "store", disk_free_limit=1) as broker:
        assert broker.alarms == {}
    with pytest.raises(ValueError, match="disk_free_limit=1 limits the folder of the store: set store too"):
        Broker(disk_free_limit=1)


def test_a_broker_retries_to_read_a_message_body_from_disk_after_every_kind_of_error(tmp_path, monkeypatch, caplog):
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
    assert "MemoryError('no room'); messages on disk wait until the store can be read" in caplog.text
    assert "not now; messages on disk wait until the store can be read" in caplog.text


def test_a_broker_that_stops_reports_that_its_file_was_deleted_even_if_it_had_nothing_to_write(tmp_path, caplog):
    with Broker(store=tmp_path / "store") as broker:
        broker.declare_queue("orders", durable=True)
        (tmp_path / "store").unlink()
    assert f"{tmp_path / 'store'}: the file was deleted, moved or replaced, so the next broker" in caplog.text


def test_a_broker_reads_no_bodies_from_a_file_that_replaced_its_store(tmp_path):
    spool = Policy("spool", PolicyDefinition(policy=QueuePolicy.FLOW_TO_DISK))
    with Broker(store=tmp_path / "store", memory_limit=1 << 20, policies=[spool]) as broker:
        broker.declare_queue("orders", durable=True)
        with Producer(broker.url, routing_key="orders") as producer:
            for _ in range(20):
                producer.send(bytes(100_000))
        shutil.copy(tmp_path / "store", tmp_path / "copy")
        (tmp_path / "copy").replace(tmp_path / "store")
        assert broker.memory.evicted > 0
        with pytest.raises(StoreError, match="store was deleted, moved or replaced while the broker uses it"):
            broker.messages("orders")


@pytest.mark.parametrize("name", ["store-wal", "store-lock"])
def test_a_broker_that_stops_loses_no_messages_if_another_file_of_its_store_was_deleted(tmp_path, caplog, name):
    with Broker(store=tmp_path / "store") as broker:
        broker.declare_queue("orders", durable=True)
        with Producer(broker.url, routing_key="orders") as producer:
            producer.send(b"one").result(20)
        (tmp_path / name).unlink()
    assert caplog.text == ""
    with Broker(store=tmp_path / "store") as broker:
        assert [message.body for message in broker.messages("orders")] == [b"one"]


def test_a_broker_with_a_relative_path_reads_bodies_after_a_change_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spool = Policy("spool", PolicyDefinition(policy=QueuePolicy.FLOW_TO_DISK))
    with Broker(store="store", memory_limit=1 << 20, policies=[spool]) as broker:
        monkeypatch.chdir("/")
        broker.declare_queue("orders", durable=True)
        with Producer(broker.url, routing_key="orders") as producer:
            for _ in range(20):
                producer.send(bytes(100_000))
        assert broker.memory.evicted > 0
        assert [len(message.body) for message in broker.messages("orders")] == 20 * [100_000]


def test_a_broker_stops_even_if_it_cannot_write_to_its_disk(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Keeper, "STOP_GRACE", 0.1)
    with Broker(store=tmp_path / "store") as broker:
        broker.declare_queue("q", durable=True)

    def fail(self, batch):
        raise StoreError("full")

    with Broker(store=tmp_path / "store") as broker:
        monkeypatch.setattr(Store, "write", fail)
        broker.publish(b"x", "q", properties=commands.Basic.Properties(delivery_mode=2))
        broker.wait_until(lambda broker: broker.alarms)
    assert "changes that are not on disk are lost" in caplog.text


def test_a_broker_stops_even_if_a_write_to_its_disk_fails_after_the_stop_has_begun(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Keeper, "STOP_GRACE", 0.1)
    may_fail = threading.Event()
    stop = Keeper.stop

    def fail(self, batch):
        may_fail.wait(30)
        raise StoreError("full")

    async def fail_then(self):
        # The loop calls this as soon as `stop` waits for the current write.
        asyncio.get_running_loop().call_soon(may_fail.set)
        await asyncio.wait_for(stop(self), 20)

    monkeypatch.setattr(Keeper, "stop", fail_then)
    with Broker(store=tmp_path / "store") as broker:
        broker.declare_queue("q", durable=True)
        monkeypatch.setattr(Store, "write", fail)
        broker.publish(b"x", "q", properties=commands.Basic.Properties(delivery_mode=2))
        assert not broker.alarms
    assert "changes that are not on disk are lost" in caplog.text


# If the methods did not wait for the disk, the process would be killed before anything is written.
_SLOWLY = """
import os, signal, time
from qflow_client.broker import Broker
from qflow_client.broker.store.store import Store
write = Store.write
def slowly(self, batch):
    time.sleep(0.1)
    write(self, batch)
Store.write = slowly
with Broker(store="store") as broker:
"""


def killed_after(folder, steps):
    """Run statements with a broker in another process, which is killed as soon as the last statement has returned."""
    program = _SLOWLY + textwrap.indent(textwrap.dedent(steps) + "os.kill(os.getpid(), signal.SIGKILL)\n", "    ")
    with Forked[str]([sys.executable, "-c", program], cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, err


@pytest.mark.parametrize(
    ("name", "values", "there"),
    [
        ("declare_queue", "'more', durable=True", (["orders", "more"], ["shop"], ["new"])),
        ("declare_exchange", "'more', durable=True", (["orders"], ["shop", "more"], ["new"])),
        ("bind", "'shop', 'orders', 'more'", (["orders"], ["shop"], ["new", "more"])),
        (
            "load_definitions",
            "Definitions(queues=(QueueDefinition('more', durable=True),))",
            (["orders", "more"], ["shop"], ["new"]),
        ),
        ("unbind", "'shop', 'orders', 'new'", (["orders"], ["shop"], [])),
        ("delete_queue", "'orders'", ([], ["shop"], [])),
        ("delete_exchange", "'shop'", (["orders"], [], [])),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_a_durable_change_is_on_disk_when_the_method_returns_and_survives_a_kill(tmp_path, name, values, there):
    before = """
        from qflow_client.broker import Definitions, QueueDefinition
        broker.declare_queue("orders", durable=True)
        broker.declare_exchange("shop", durable=True)
        broker.bind("shop", "orders", "new")
    """
    killed_after(tmp_path, textwrap.dedent(before) + f"broker.{name}({values})\n")
    with Broker(store=tmp_path / "store") as broker:
        queues = [queue.name for queue in broker.queues()]
        exchanges = [each.name for each in broker.exchanges() if each.name and not each.name.startswith("amq.")]
        bindings = [each.routing_key for each in broker.bindings()]
    assert (queues, exchanges, bindings) == there


@pytest.fixture
def order(monkeypatch):
    """A list of the written changes, in their order. Tests append their own events to it."""
    seen: list[object] = []
    write = Store.write

    def note(self, batch):
        write(self, batch)
        seen.extend(change.values[1] if change.kind == "queue" else change.kind for change in batch.changes)
        seen.extend("message" for _ in batch.puts)

    monkeypatch.setattr(Store, "write", note)
    return seen


def asked(broker, method, path, body=None):
    """Send an HTTP request, and return the status of the answer."""
    request = urllib.request.Request(
        f"{broker.http_url}/api/{path}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.status


def test_a_durable_change_made_over_http_is_on_disk_when_the_request_is_answered(tmp_path, order):
    with Broker(store=tmp_path / "store", http_port=0) as broker:
        for number in range(5):
            order.append(asked(broker, "PUT", f"queues/{number}", {"durable": True}))
    assert order == [each for number in range(5) for each in (str(number), 201)]


@contextmanager
def full_disk(broker, monkeypatch):
    """Let all writes to the broker's disk fail, and wait until the broker has raised the alarm."""

    def fail(self, batch):
        raise StoreError(f"{self.path}: database or disk is full")

    monkeypatch.setattr(Keeper, "RETRY", 0.02)
    broker.declare_queue("q", durable=True)
    with monkeypatch.context() as patched:
        patched.setattr(Store, "write", fail)
        broker.publish(b"x", "q", properties=commands.Basic.Properties(delivery_mode=2))
        broker.wait_until(lambda broker: "disk" in broker.alarms)
        yield


def test_http_requests_that_write_nothing_to_disk_are_answered_while_the_disk_is_full(tmp_path, monkeypatch):
    with Broker(store=tmp_path / "store", http_port=0) as broker, full_disk(broker, monkeypatch):
        assert asked(broker, "POST", "queues/q/purge") == 200
        assert asked(broker, "PUT", "queues/of%20this%20run", {"durable": False}) == 201
        assert "disk" in broker.alarms


def test_an_http_change_that_cannot_be_written_to_disk_is_answered_with_503_and_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(HttpServer, "DISK_PATIENCE", 0.1)
    with Broker(store=tmp_path / "store", http_port=0) as broker:
        with full_disk(broker, monkeypatch), pytest.raises(urllib.error.HTTPError) as refused:
            asked(broker, "PUT", "queues/lasting", {"durable": True})
        with refused.value as answer:
            told = json.load(answer)
        assert told["status"] == answer.status == 503
        assert "the change applies, but is not on disk after 0.1 s" in told["detail"]
        assert "database or disk is full" in told["detail"]
        # The disk has room again.
        monkeypatch.setattr(HttpServer, "DISK_PATIENCE", 30.0)
        assert asked(broker, "PUT", "queues/lasting", {"durable": True}) == 200


def test_on_the_loop_of_the_broker_only_wait_until_durable_async_waits_for_the_disk(tmp_path, order):
    async def make():
        async with Broker(store=tmp_path / "store") as broker:
            broker.declare_queue("q", durable=True)
            broker.publish(b"x", "q", properties=commands.Basic.Properties(delivery_mode=2))
            order.append("returned")
            await broker.wait_until_durable_async()
            order.append("waited")
            await broker.wait_until_durable_async()
            # The broker can also be awaited on another loop.
            await asyncio.to_thread(asyncio.run, broker.wait_until_durable_async())

    asyncio.run(make())
    assert order == ["returned", "q", "message", "waited"]
    asyncio.run(Broker().wait_until_durable_async())


@contextmanager
def hanging(monkeypatch, kind, name):
    """Let calls of a method hang until the end of the block. Yield an event that is set when a call hangs."""
    hangs, is_over = threading.Event(), threading.Event()
    method = getattr(kind, name)

    def hang(self, *values):
        hangs.set()
        is_over.wait()
        return method(self, *values)

    monkeypatch.setattr(kind, name, hang)
    try:
        yield hangs
    finally:
        is_over.set()


def test_the_broker_stops_even_if_a_write_to_its_disk_never_returns(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Keeper, "STOP_TIMEOUT", 0.1)
    path = tmp_path / "store"
    # The thread of an earlier test may still be ending.
    before = threading.enumerate()
    with hanging(monkeypatch, Store, "write") as hangs, ThreadPoolExecutor(1) as other:
        with Broker(store=path) as broker:
            declared = other.submit(broker.declare_queue, "q", durable=True)
            assert hangs.wait(30)
            (thread,) = [each for each in threading.enumerate() if each.name == "qflow-store" and each not in before]
            assert thread.daemon
            # Methods that need no disk still work.
            broker.flow(active=False)
            assert not declared.done()
        with pytest.raises(StoreError, match="store: the broker ended before the change was on disk"):
            declared.result(30)
        assert f"{path}: changes that are not on disk are lost, such as unconfirmed messages" in caplog.text
        assert "and new declarations: nothing could be written for 0.1 s" in caplog.text
        assert f"{path}: the disk does not answer; the file stays in use until it answers" in caplog.text
        with pytest.raises(StoreError, match="used by another broker in this process"):
            Broker(store=path).__enter__()
    thread.join(30)
    # Now the disk has answered.
    with Broker(store=path):
        pass


def test_the_broker_stops_even_if_a_read_from_its_disk_never_returns(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Keeper, "STOP_TIMEOUT", 0.1)
    path = tmp_path / "store"
    with hanging(monkeypatch, BodyReader, "read") as hangs:
        with Broker(store=path, memory_limit=1 << 20) as broker:
            broker.declare_queue("q", arguments={"x-qflow-policy": "flow_to_disk", "qpid.max_size": 1})
            broker.publish(b"x" * 100, "q")
            broker.wait_until(lambda broker: broker.memory.evicted, timeout=30)
            connection = pika.BlockingConnection(pika.URLParameters(broker.url))
            connection.channel().basic_consume("q", lambda *_: None)
            assert hangs.wait(30)
            threads = [each for each in threading.enumerate() if each.name.startswith("qflow-store")]
        with pytest.raises(pika.exceptions.AMQPConnectionError):
            connection.process_data_events(30)
        assert f"{path}: the disk does not answer" in caplog.text
    for thread in threads:
        thread.join(30)


@pytest.mark.program
def test_the_process_of_a_broker_ends_even_if_a_write_to_its_disk_never_returns(tmp_path):
    program = """
import threading
from qflow_client.broker import Broker, StoreError
from qflow_client.broker.store.keeper import Keeper
from qflow_client.broker.store.store import Store
Keeper.STOP_TIMEOUT = 0.1
begun = threading.Event()
def hang(self, batch):
    begun.set()
    threading.Event().wait()
Store.write = hang
with Broker(store="store") as broker:
    declaring = threading.Thread(target=broker.declare_queue, args=("q",), kwargs={"durable": True})
    threading.excepthook = lambda told: print(told.exc_value)
    declaring.start()
    begun.wait()
declaring.join()
"""
    command = [sys.executable, "-c", program]
    with Forked[str](command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        out, err = process.communicate(timeout=60)
    expected = f"{tmp_path / 'store'}: the broker ended before the change was on disk\n"
    assert (process.returncode, out) == (0, expected), err


def test_a_cancelled_start_closes_the_store_that_it_was_opening(tmp_path, monkeypatch):
    is_open, is_cancelled, is_closed = threading.Event(), threading.Event(), threading.Event()

    class SlowStore(Store):
        def __init__(self, path, *, synchronous):
            super().__init__(path, synchronous=synchronous)
            is_open.set()
            is_cancelled.wait()

        def close(self):
            super().close()
            is_closed.set()

    async def main():
        starting = asyncio.create_task(Broker(store=tmp_path / "store").__aenter__())
        await asyncio.to_thread(is_open.wait)
        starting.cancel()
        asyncio.get_running_loop().call_soon(is_cancelled.set)
        with pytest.raises(asyncio.CancelledError):
            await starting

    monkeypatch.setattr(keeper, "Store", SlowStore)
    asyncio.run(main())
    assert is_closed.is_set()


def test_without_a_store_no_file_is_written_and_no_thread_is_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The thread of an earlier test may still be ending.
    before = threading.enumerate()
    with Broker() as broker:
        broker.declare_queue("q", durable=True)
        broker.publish(b"x", "q", properties=commands.Basic.Properties(delivery_mode=2))
        assert list(tmp_path.iterdir()) == []
        started = [thread for thread in threading.enumerate() if thread not in before]
        assert not any(thread.name.startswith("qflow-store") for thread in started)


def test_E10_a_damaged_row_of_the_store_is_set_aside_and_a_truncated_store_raises_an_error(tmp_path, caplog):
    path = tmp_path / "store"
    with Broker(store=path) as broker:
        broker.declare_queue("q", durable=True)
        for number in range(3):
            broker.publish(b"%d" % number, "q", properties=commands.Basic.Properties(delivery_mode=2))
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE message SET body = CAST('9' AS BLOB) WHERE number = 2")
    for _ in range(2):
        caplog.clear()
        with Broker(store=path) as broker:
            assert [message.body for message in broker.messages("q")] == [b"0", b"2"]
            assert broker.memory.damaged == 1
        (told,) = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
        assert told == f"{path}: 1 rows are damaged and were set aside: message 2: its checksum is wrong"
    path.write_bytes(b"S")
    with pytest.raises(StoreError, match="it is cut off; restore it from a copy"), Broker(store=path):
        pass
