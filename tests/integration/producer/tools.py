"""Tools that the tests of the threaded producer share."""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pika
import pytest

from qflow_client import FlowControlTimeout, FlowEvent, FlowEventKind, Outbox, OutboxInUse, Producer, QflowError
from qflow_client.broker import Broker
from qflow_client.logs import flush_logs
from qflow_client.testing.node import free_port
from qflow_client.testing.proxy import FaultProxy

# Maximum seconds of any wait. A busy machine needs far less, and a test may take longer.
PATIENCE = 20.0
# Maximum seconds to wait for a job that sends thousands of messages between threads.
PATIENCE_WITH_JOBS = 100.0
# Timeout of calls that must time out, in seconds.
DEADLINE = 0.05


def eventually(condition: Callable[[], object], what: str = "", *, timeout: float = PATIENCE) -> None:
    """Poll until a condition is true. Use this for conditions without an event, such as the waits inside a producer."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not within {timeout} s: {what or condition}"
        time.sleep(0.002)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages that the package has logged."""
    assert flush_logs(PATIENCE)
    return [record.message for record in caplog.records if record.name == "qflow_client"]


_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
# A worker that replaces a crashed worker has a higher number.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
# Ports that this process has used for tests, and the ports for the other workers of pytest-xdist.
_ports = {port for port in range(1 << 16) if port % _WORKERS != _WORKER}


def unused_port() -> int:
    """Return a port for a listener that a test starts later.

    The port is not in the range from which the system chooses ports for other sockets.
    """
    port = free_port(_ports)
    _ports.add(port)
    return port


def wait_for_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sends with a short timeout wait long for the disk."""
    # With 10 s and more (`storage._SHORT`), `Producer.send` commits itself instead of waiting for the writer.
    for name in ("outbox.storage.GRACE", "aio.outbox.GRACE"):
        monkeypatch.setattr(f"qflow_client.{name}", 8.0)


def wait_for_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let producers that cannot be created, or are cancelled, wait long for the end of their threads and outboxes."""
    ends = ("sync.engine.BRIEF", "aio.engine.BRIEF", "aio.engine.DISK_PATIENCE")
    outboxes = ("outbox.storage._INTERRUPTED", "aio.outbox.BRIEF", "aio.outbox.DISK_PATIENCE")
    for name in ends + outboxes:
        monkeypatch.setattr(f"qflow_client.{name}", PATIENCE)


def outbox_is_free(path: Path) -> bool:
    """Return True if another producer can have the outbox."""
    try:
        Outbox(path).close()
    except OutboxInUse:
        return False
    return True


def holds(producer: Producer) -> list[str]:
    """Return the kinds of the current holds of a producer, the oldest first."""
    return [str(hold.kind) for hold in producer.flow_state.holds]


def wait_flow(producer: Producer, condition: Callable[[], object], what: str = "") -> None:
    """Wait until a condition is true. Check it after each flow event of the producer."""
    # Use no lock, because the producer may call the callback while the condition needs the producer's loop or lock.
    changed = threading.Event()
    unsubscribe = producer.on_flow(lambda _event: changed.set())
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE} s: {what or condition}"
        # Use a timeout, because another callback may delay this callback.
        changed.wait(0.05)
        changed.clear()
    unsubscribe()


def wait_held(producer: Producer, *kinds: str) -> None:
    """Wait until a producer has holds of all these kinds. The producer may also have other holds."""
    wait_flow(producer, lambda: set(kinds) <= set(holds(producer)), f"{producer} held by {kinds}")


def wait_closed(producer: Producer) -> None:
    """Wait until a producer has lost its connection."""
    wait_flow(producer, lambda: producer.closed, f"the end of {producer}")


def wait_done(receipts: Iterable[Any]) -> None:
    for receipt in receipts:
        assert receipt.outcome is not None or receipt.wait(PATIENCE), receipt


@contextmanager
def nothing_expires(producer: Producer) -> Iterator[None]:
    """During the block, no message expires, so that a slow machine has time to deliver it."""
    expiry = producer._protocol.parts.expiry
    assert expiry is not None
    before = expiry.timeout
    expiry.timeout = 10 * PATIENCE
    try:
        yield
    finally:
        expiry.timeout = before


def wait_in_line(producer: Producer, count: int) -> None:
    """Wait until exactly `count` sends wait for admission."""
    # This number is not public. Tests need it to send messages in a given order without sleeping.
    eventually(lambda: producer._protocol.controller.waiting == count, f"{count} sends in line")


def send_unconfirmed(producer: Producer, broker: Broker, *messages: bytes) -> list[Any]:
    """Send messages that a broker puts into its queue and does not confirm for now. Return their receipts."""
    depth = broker.queue("q").depth + len(messages)
    broker.withhold_confirms()
    receipts = [producer.send(message) for message in messages]
    broker.wait_until(lambda b: b.queue("q").depth == depth)
    return receipts


def bodies(broker: Broker, queue: str = "q") -> list[bytes]:
    return [message.body for message in broker.messages(queue)]


def message_ids(broker: Broker, queue: str = "q") -> list[str]:
    return [str(message.properties.message_id) for message in broker.messages(queue)]


def stop(broker: Broker, how: str) -> None:
    """Stop all publishers with `Connection.Blocked` (``alarm``) or with `Channel.Flow` (``flow``)."""
    if how == "alarm":
        broker.block("no memory")
    else:
        broker.flow(False)


def hold(broker: Broker, producer: Producer, kind: str = "channel_flow", *, reason: str = "low on memory") -> None:
    """Stop all publishers of a broker, and wait until a producer has the hold of this kind."""
    if kind == "channel_flow":
        broker.flow(False)
    else:
        broker.block(reason)
    wait_held(producer, kind)


def go_on(broker: Broker, how: str) -> None:
    """Let all publishers continue after `stop`."""
    if how == "alarm":
        broker.unblock()
    else:
        broker.flow(True)


def heal(proxy: FaultProxy) -> None:
    """End the faults of a proxy. Cut the current connections, because their lost bytes would only cause timeouts."""
    attempts = [each.number for each in proxy.connections]
    proxy.heal()
    for number in attempts:
        with suppress(LookupError):
            proxy.cut(number)


class Stopwatch:
    """Measures the seconds of a block, to check that a deadline is neither early nor more than a second late.

    A second thread only sleeps during the block. The lateness of this thread is the delay of the machine.
    """

    _TICK = 0.01
    # Usual delay in seconds when several threads run in turn. This delay does not count as lateness.
    _USUAL = 0.02

    def __enter__(self) -> Self:
        self.late = 0.0
        self._over = threading.Event()
        self._sleeper = threading.Thread(target=self._sleep, name="stopwatch", daemon=True)
        self._began = time.monotonic()
        self._sleeper.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.seconds = time.monotonic() - self._began
        self._over.set()
        self._sleeper.join(PATIENCE)

    def _sleep(self) -> None:
        before = self._began
        while not self._over.wait(self._TICK):
            before = self._note(before)
        self._note(before)

    def _note(self, before: float) -> float:
        now = time.monotonic()
        late = now - before - self._TICK
        if late > self._USUAL:
            self.late += late
        return now

    def __repr__(self) -> str:
        return f"<{self.seconds:.3f} s, of which the machine was late by {self.late:.3f} s>"

    def kept(self, deadline: float) -> bool:
        return deadline <= self.seconds and self.within(deadline + 1.0)

    def within(self, limit: float) -> bool:
        """Whether the block took less than `limit` seconds plus the delay of the machine."""
        return self.seconds < limit + self.late


@contextmanager
def takes(seconds: float) -> Iterator[None]:
    """Check that a block takes this time: it ends neither early nor more than a second late."""
    with Stopwatch() as watch:
        yield
    assert watch.kept(seconds), watch


@contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """Check that a block takes less than this time."""
    with Stopwatch() as watch:
        yield
    assert watch.within(seconds), watch


def in_time(call: Callable[[], Any], deadline: float = DEADLINE) -> Any:
    """Check that a call ends in time. Return its result, or the `QflowError` that it has raised."""
    with ends_within(deadline + 1.0):
        try:
            result = call()
        except QflowError as error:
            result = error
    return result


class Job(threading.Thread):
    """A thread with a result."""

    def __init__(self, work: Callable[[], Any], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self.error = error

    def wait(self, timeout: float = PATIENCE_WITH_JOBS) -> BaseException | None:
        """Wait for the end of the thread, and return its exception, or None."""
        self.join(timeout)
        assert not self.is_alive(), f"{self.name} does not end"
        return self.error

    def result(self, timeout: float = PATIENCE_WITH_JOBS) -> Any:
        """Wait for the end of the thread. Return its result, or raise its exception."""
        if self.wait(timeout) is not None:
            assert self.error is not None
            raise self.error
        return self._result


def start(work: Callable[..., Any], *args: Any, **keywords: Any) -> Job:
    """Run a function on a new thread."""
    job = Job(lambda: work(*args, **keywords), name=f"job {getattr(work, '__name__', work)}{args}")
    job.start()
    return job


def start_send(producer: Producer, message: Any = b"", *, timeout: float | None = None, **settings: Any) -> Job:
    """Start a send on a new thread, and wait until it waits in line behind the sends that wait already."""
    before = producer._protocol.controller.waiting
    job = start(producer.send, message, timeout=timeout, **settings)
    wait_in_line(producer, before + 1)
    return job


def finish(jobs: Iterable[Job]) -> list[Any]:
    """Wait for the end of threads. Return their results, or raise the first exception."""
    return [job.result() for job in jobs]


class Growing:
    """A list whose growth a thread can wait for."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._grown = threading.Condition()

    def __iter__(self) -> Iterator[Any]:
        return iter(tuple(self._items))

    def __len__(self) -> int:
        return len(self._items)

    def append(self, item: Any) -> None:
        with self._grown:
            self._items.append(item)
            self._grown.notify_all()

    def wait(self, count: int) -> None:
        self.wait_for(lambda items: len(items) >= count, f"{count} items")

    def wait_for(self, condition: Callable[[list[Any]], object], what: str) -> None:
        with self._grown:
            assert self._grown.wait_for(lambda: condition(self._items), PATIENCE), f"not within {PATIENCE} s: {what}"


class Wire:
    """Frames that a broker has received and sent, in the order of the wire. Give this object to `Broker(trace=…)`."""

    def __init__(self) -> None:
        self._frames = Growing()

    def __call__(self, direction: str, connection: str, channel: int, method: str) -> None:
        self._frames.append((direction, connection, channel, method))

    @property
    def frames(self) -> list[tuple[str, str, int, str]]:
        return list(self._frames)

    def count(self, direction: str, method: str) -> int:
        return sum(1 for way, _, _, name in self._frames if (way, name) == (direction, method))

    def wait_for(self, direction: str, method: str, count: int = 1) -> None:
        self._frames.wait_for(lambda _: self.count(direction, method) >= count, f"{count} {method} {direction}")

    def where(self, direction: str, method: str) -> list[int]:
        """Return the positions of all frames with a method in a direction."""
        return [at for at, (way, _, _, name) in enumerate(self._frames) if (way, name) == (direction, method)]

    def came_between(self, start: int, stop: int | None = None) -> list[str]:
        """Return the names of the publish, header and body frames from producers between two positions."""
        parts = ("Basic.Publish", "ContentHeader", "ContentBody")
        return [name for way, _, _, name in self.frames[start:stop] if way == "in" and name in parts]


class Flows:
    """A callback that records flow events, and the threads that call it.

    Args:
        producer: a producer that calls it from now on.
        settings: arguments of `Producer.on_flow`.
    """

    def __init__(self, producer: Producer | None = None, **settings: Any) -> None:
        self._events = Growing()
        self.threads: set[str] = set()
        if producer is not None:
            producer.on_flow(self, **settings)

    def __call__(self, event: FlowEvent) -> None:
        self.threads.add(threading.current_thread().name)
        self._events.append(event)

    @property
    def events(self) -> list[FlowEvent]:
        return list(self._events)

    @property
    def kinds(self) -> list[FlowEventKind]:
        return [event.kind for event in self._events]

    def wait_for(self, kind: FlowEventKind, count: int = 1) -> None:
        self._events.wait_for(lambda _: self.kinds.count(kind) >= count, f"{count} {kind} among {self.kinds}")


class Consumer:
    """Consumes and acknowledges a queue's messages with pika on a separate thread, until it is stopped."""

    def __init__(
        self, url: str, queue: str, *, prefetch: int = 10, on_body: Callable[[bytes], object] | None = None
    ) -> None:
        self.bodies: list[bytes] = []
        # Called with each body before the message is acknowledged.
        self._on_body = on_body
        self._connection: pika.BlockingConnection = pika.BlockingConnection(pika.URLParameters(url))
        self._channel = self._connection.channel()
        self._channel.basic_qos(prefetch_count=prefetch)
        self._channel.basic_consume(queue, self._consume)
        self._job = start(self._run)

    def _consume(self, channel: Any, method: Any, _properties: Any, body: bytes) -> None:
        self.bodies.append(body)
        if self._on_body is not None:
            self._on_body(body)
        channel.basic_ack(method.delivery_tag)

    def _run(self) -> None:
        self._channel.start_consuming()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._job.is_alive():
            self._connection.add_callback_threadsafe(self._channel.stop_consuming)
        self._job.result()


class SteadyClock:
    """A clock for `broker._server.clock` that counts at most 0.5 s between two calls.

    So a stall of the machine does not count as silence of a client. The clock of an idle broker is slow.
    """

    def __init__(self) -> None:
        self._now = self._last = time.monotonic()

    def __call__(self) -> float:
        last, self._last = self._last, time.monotonic()
        self._now += min(self._last - last, 0.5)
        return self._now


class Proxy:
    """A TCP relay in front of the broker, which can stop reading from clients, and cut their connections.

    The relay always passes on the bytes of the broker, except after `freeze`.
    """

    _CHUNK = 1 << 16

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        #: Bytes that the proxy sends first to every client.
        self.greeting = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        # With a small buffer, a client soon notices that the proxy does not read.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
        self.port = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, "listener")
        self._asks, self._answers = socket.socketpair()
        self._selector.register(self._answers, selectors.EVENT_READ, "asked")
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._calls: list[tuple[Callable[[], None], threading.Event]] = []
        self._reads = True
        self._delay = 0.0
        self._runs = True
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def url(self, broker: Broker) -> str:
        """Return the broker's URL through this proxy."""
        return broker.url.replace(f":{broker.port}/", f":{self.port}/")

    def direct_to(self, port: int) -> None:
        """Connect new clients to another broker."""
        self._target = ("127.0.0.1", port)

    def stop_reading(self) -> None:
        """Stop reading from clients."""
        self._call(lambda: self._set_reads(False))

    def go_on_reading(self) -> None:
        """Continue reading from clients."""
        self._call(lambda: self._set_reads(True))

    def slow_down(self, seconds: float) -> None:
        """Sleep this number of seconds before each read from clients, so that the clients' sockets are always full."""
        self._delay = seconds

    def inject(self, data: bytes) -> None:
        """Send bytes to clients, as if the broker had sent them."""
        self._call(lambda: self._inject(data))

    def freeze(self) -> None:
        """Stop passing on bytes in both directions, and keep all connections open."""
        self._call(self._freeze)

    def cut(self) -> None:
        """Close all connections without an AMQP close."""
        self._call(self._cut)

    def _call(self, function: Callable[[], None]) -> None:
        done = threading.Event()
        self._calls.append((function, done))
        self._asks.send(b"!")
        assert done.wait(PATIENCE)

    def _set_reads(self, reads: bool) -> None:
        self._reads = reads
        for client, _ in self._pairs:
            if reads:
                self._selector.register(client, selectors.EVENT_READ, "client")
            else:
                self._selector.unregister(client)

    def _inject(self, data: bytes) -> None:
        for client, _ in self._pairs:
            client.sendall(data)

    def _freeze(self) -> None:
        for pair in self._pairs:
            for sock in pair:
                self._selector.unregister(sock)

    def _cut(self) -> None:
        for pair in tuple(self._pairs):
            self._end(pair)

    def _end(self, pair: tuple[socket.socket, socket.socket]) -> None:
        self._pairs.remove(pair)
        for sock in pair:
            with suppress(KeyError):
                self._selector.unregister(sock)
            sock.close()

    def _run(self) -> None:
        while self._runs:
            for key, _ in self._selector.select():
                if key.data == "listener":
                    client, _ = self._listener.accept()
                    client.sendall(self.greeting)
                    pair = client, socket.create_connection(self._target)
                    self._pairs.append(pair)
                    if self._reads:
                        self._selector.register(client, selectors.EVENT_READ, "client")
                    self._selector.register(pair[1], selectors.EVENT_READ, "broker")
                elif key.data == "asked":
                    self._answers.recv(1)
                    function, done = self._calls.pop(0)
                    function()
                    done.set()
                    # Other ready sockets may no longer be registered.
                    break
                else:
                    self._relay(key.fileobj)

    def _relay(self, source: Any) -> None:
        for pair in self._pairs:
            if source in pair:
                other = pair[source is pair[0]]
                if source is pair[0]:
                    time.sleep(self._delay)
                try:
                    data = source.recv(self._CHUNK)
                    # This call blocks, but ends soon, because the broker and the client's `Tap` always read.
                    other.sendall(data)
                except OSError:
                    data = b""
                if not data:
                    self._end(pair)
                return

    def close(self) -> None:
        self._call(self._stop)
        self._thread.join(PATIENCE)
        self._selector.close()
        for sock in (self._listener, self._asks, self._answers):
            sock.close()

    def _stop(self) -> None:
        self._cut()
        self._runs = False


def fill_transport(producer: Producer, *, size: int = 1 << 16, timeout: float = 0.1, number: int = 0) -> Iterator[Any]:
    """Send until the producer is held because its socket is full. Yield the receipts of the admitted messages.

    Args:
        producer: the producer.
        size: bytes of each body. A body begins with the number of the message.
        timeout: seconds that a send must be held before the socket counts as full.
        number: number of the first message.
    """
    while True:
        try:
            yield producer.send(b"%08d" % number + bytes(size - 8), timeout=timeout)
        except FlowControlTimeout:
            tapped = producer._services.tapped
            assert tapped is not None
            # On a busy machine, the I/O thread may not have filled the socket or raised the hold yet.
            if tapped.full and "transport" in holds(producer):
                return
            continue
        number += 1


def send_until_heartbeat_with_a_full_socket(
    producer: Producer, broker: Broker, proxy: Proxy, wire: Wire, size: int
) -> None:
    """Fill the socket repeatedly until the broker has received a heartbeat between messages, and then flush."""
    broker._server.clock = SteadyClock()
    sent = 0
    while not wire.count("in", "Heartbeat"):
        proxy.stop_reading()
        for _ in range(5):
            try:
                producer.send(bytes(size), timeout=0.02)
                sent += 1
            except FlowControlTimeout:
                break
        proxy.go_on_reading()
    producer.flush(timeout=20)
    assert broker.queue("q").depth == sent
    assert wire.count("out", "Connection.Close") == 0


def send_until_heartbeat_with_a_slow_peer(
    producer: Producer, broker: Broker, proxy: Proxy, wire: Wire, size: int
) -> None:
    """Send messages to a slowly reading peer until the broker has received a heartbeat, and then flush."""
    broker._server.clock = SteadyClock()
    proxy.slow_down(0.01)
    end = time.monotonic() + PATIENCE
    while not wire.count("in", "Heartbeat"):
        producer.send(bytes(size))
        assert time.monotonic() < end
    proxy.slow_down(0)
    producer.flush(timeout=20)
