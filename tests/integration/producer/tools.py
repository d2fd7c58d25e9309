"""What the tests of the threaded producer share."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import pika

from qflow_client import FlowControlTimeout, FlowEvent, FlowEventKind, Producer, QflowError
from qflow_client.broker import Broker
from qflow_client.testing.node import free_port
from qflow_client.testing.proxy import FaultProxy

# Far more than anything takes on a busy machine, and less than a test may take.
PATIENCE = 20.0
# The same for a job that sends thousands of messages, each from one thread to another.
PATIENCE_WITH_JOBS = 100.0
# A deadline of calls, in seconds.
DEADLINE = 0.05


def eventually(condition: Callable[[], object], what: str = "", *, timeout: float = PATIENCE) -> None:
    """Wait until something has become true that nobody tells of, such as who waits inside a producer, by polling."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not within {timeout} s: {what or condition}"
        time.sleep(0.002)


# Ports that tests of this process have got.
_ports: set[int] = set()


def unused_port() -> int:
    """Return a port for a listener that a test starts later.

    The system does not give it to any socket by itself, as it does with the ports of its own range.
    """
    port = free_port(_ports)
    _ports.add(port)
    return port


def holds(producer: Producer) -> list[str]:
    """The kinds of the holds that are on a producer, the oldest first."""
    return [str(hold.kind) for hold in producer.flow_state.holds]


def wait_flow(producer: Producer, condition: Callable[[], object], what: str = "") -> None:
    """Wait until something has become true that comes with a flow event."""
    # No lock: the producer whose loop or lock the condition needs may be telling.
    changed = threading.Event()
    unsubscribe = producer.on_flow(lambda _event: changed.set())
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE} s: {what or condition}"
        # Another callback may keep ours waiting.
        changed.wait(0.05)
        changed.clear()
    unsubscribe()


def wait_held(producer: Producer, *kinds: str) -> None:
    """Wait until a producer is held by these, and maybe others."""
    wait_flow(producer, lambda: set(kinds) <= set(holds(producer)), f"{producer} held by {kinds}")


def wait_closed(producer: Producer) -> None:
    """Wait until a producer has lost its connection."""
    wait_flow(producer, lambda: producer.closed, f"the end of {producer}")


def wait_done(receipts: Iterable[Any]) -> None:
    """Wait until all receipts are settled."""
    for receipt in receipts:
        assert receipt.outcome is not None or receipt.wait(PATIENCE), receipt


def wait_in_line(producer: Producer, count: int) -> None:
    """Wait until exactly so many sends stand in line."""
    # Nobody else needs to know; without it, the order of standing in line could not be arranged without sleeping.
    eventually(lambda: producer._protocol.controller.waiting == count, f"{count} sends in line")


def bodies(broker: Broker, queue: str = "q") -> list[bytes]:
    """The bodies of a queue's messages, in order."""
    return [message.body for message in broker.messages(queue)]


def message_ids(broker: Broker, queue: str = "q") -> list[str]:
    """The message ids of a queue's messages, in order."""
    return [str(message.properties.message_id) for message in broker.messages(queue)]


def stop(broker: Broker, how: str) -> None:
    """Stop all publishers, by an ``alarm`` or by ``flow``."""
    if how == "alarm":
        broker.block("no memory")
    else:
        broker.flow(False)


def go_on(broker: Broker, how: str) -> None:
    """Take `stop` back."""
    if how == "alarm":
        broker.unblock()
    else:
        broker.flow(True)


def heal(proxy: FaultProxy) -> None:
    """End the faults of a proxy, and the attempts to connect whose bytes it has swallowed: they would only time out."""
    attempts = [each.number for each in proxy.connections]
    proxy.heal()
    for number in attempts:
        with suppress(LookupError):
            proxy.cut(number)


class Stopwatch:
    """Seconds that a block takes; judged as a deadline: never early, and less than a second late.

    What a thread that only sleeps meanwhile is late by is the machine's own lateness, and nobody's fault.
    """

    _TICK = 0.01
    # What threads that take their turns make each other wait for anyway.
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
        """Whether it took less than that, but for the machine's lateness."""
        return self.seconds < limit + self.late


def in_time(call: Callable[[], Any], deadline: float = DEADLINE) -> Any:
    """What a call returned or raised, which it did in time, and which is one of our own errors."""
    with Stopwatch() as watch:
        try:
            result = call()
        except QflowError as error:
            result = error
    assert watch.within(deadline + 1.0)
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
        """Wait for its end, and return what it raised."""
        self.join(timeout)
        assert not self.is_alive(), f"{self.name} does not end"
        return self.error

    def result(self, timeout: float = PATIENCE_WITH_JOBS) -> Any:
        """Wait for its end, and return or raise what it did."""
        if self.wait(timeout) is not None:
            assert self.error is not None
            raise self.error
        return self._result


def start(work: Callable[..., Any], *args: Any, **keywords: Any) -> Job:
    """Run something on a thread."""
    job = Job(lambda: work(*args, **keywords), name=f"job {getattr(work, '__name__', work)}{args}")
    job.start()
    return job


class Growing:
    """A list that one can wait for."""

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
    """What the broker saw and said, in the order of the wire; a broker's `trace`."""

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
        """The positions of a method's frames."""
        return [at for at, (way, _, _, name) in enumerate(self._frames) if (way, name) == (direction, method)]

    def came_between(self, start: int, stop: int | None = None) -> list[str]:
        """What producers published, frame by frame, between two positions."""
        parts = ("Basic.Publish", "ContentHeader", "ContentBody")
        return [name for way, _, _, name in self.frames[start:stop] if way == "in" and name in parts]


class Flows:
    """Flow events as they come to a callback, and on which threads."""

    def __init__(self) -> None:
        self._events = Growing()
        self.threads: set[str] = set()

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
    """Consumes and acks a queue with pika on a thread of its own, until it is stopped."""

    def __init__(
        self, url: str, queue: str, *, prefetch: int = 10, on_body: Callable[[bytes], object] | None = None
    ) -> None:
        self.bodies: list[bytes] = []
        # Called before the ack.
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


class Proxy:
    """A TCP relay in front of the broker that can stop reading what clients send, and cut their connections.

    What the broker sends always passes.
    """

    _CHUNK = 1 << 16

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        #: What every client is sent first.
        self.greeting = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        # So that a client soon notices that nobody reads.
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
        """The broker's URL by way of this proxy."""
        return broker.url.replace(f":{broker.port}/", f":{self.port}/")

    def direct_to(self, port: int) -> None:
        """Pass the connections that come from now on to another broker."""
        self._target = ("127.0.0.1", port)

    def stop_reading(self) -> None:
        """Take nothing from clients from now on."""
        self._call(lambda: self._set_reads(False))

    def go_on_reading(self) -> None:
        """Take what clients send again."""
        self._call(lambda: self._set_reads(True))

    def slow_down(self, seconds: float) -> None:
        """Sleep that long before every chunk that clients send, so that their sockets are always full."""
        self._delay = seconds

    def inject(self, data: bytes) -> None:
        """Say something to clients in the broker's name."""
        self._call(lambda: self._inject(data))

    def freeze(self) -> None:
        """Pass nothing on any more, in either direction, and close nothing."""
        self._call(self._freeze)

    def cut(self) -> None:
        """End all connections without a word."""
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
                    # What else was ready may no longer be registered.
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
                    # Blocks; the broker and the client's tap both read whatever happens.
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
    """Send until the producer is held because its socket takes no more; the receipts of what was admitted.

    Args:
        producer: the producer.
        size: bytes of a body, which begins with its number.
        timeout: seconds for which one send is held before the socket counts as full.
        number: of the first message.
    """
    while True:
        try:
            yield producer.send(b"%08d" % number + bytes(size - 8), timeout=timeout)
        except FlowControlTimeout:
            tapped = producer._services.tapped
            assert tapped is not None
            # On a busy machine the I/O thread may not have come round to either yet.
            if tapped.full and "transport" in holds(producer):
                return
            continue
        number += 1


def send_until_heartbeat_with_a_full_socket(
    producer: Producer, broker: Broker, proxy: Proxy, wire: Wire, size: int
) -> None:
    """Fill the socket again and again until the broker has got a heartbeat between the messages, and then flush."""
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


def send_until_heartbeat_with_a_slow_peer(producer: Producer, proxy: Proxy, wire: Wire, size: int) -> None:
    """Send to a peer that reads slowly until the broker has got a heartbeat, and then flush."""
    proxy.slow_down(0.01)
    end = time.monotonic() + PATIENCE
    while not wire.count("in", "Heartbeat"):
        producer.send(bytes(size))
        assert time.monotonic() < end
    proxy.slow_down(0)
    producer.flush(timeout=20)
