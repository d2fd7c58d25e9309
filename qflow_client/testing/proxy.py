"""A proxy that stands between clients and any broker, and does to their connections what networks do.

It passes everything on until it is told otherwise: by a method, for one connection or for all and those that come, or
by a schedule. What it draws by lot comes from a seed. Bytes are passed as they are, TLS too; of a connection in TLS it
knows no frames, so there nothing can be injected or counted by frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

import pamqp.base
import pamqp.frame

from qflow_client.testing.node import free_port
from qflow_client.testing.relay import NO_RULES, Direction, ProxiedConnection, Relay, Relays

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Direction", "FaultProxy", "ProxiedConnection", "Schedule"]

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_HOST = "127.0.0.1"
_PORTS = {"amqp": 5672, "amqps": 5671}
# So that a sender soon notices that nobody reads: bytes that the system takes for a socket that is not read.
_RECEIVE_BUFFER = 1 << 18


class Schedule:
    """Steps that a proxy takes by itself; from `FaultProxy.schedule`."""

    def __init__(self, proxy: FaultProxy, steps: Iterable[tuple[float, Callable[[FaultProxy], object]]]) -> None:
        self._proxy = proxy
        self._steps = iter(steps)
        self._began = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._done: Future[None] = Future()

    @property
    def done(self) -> bool:
        """Whether no step is left."""
        return self._done.done()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the last step is taken, or it is cancelled.

        Args:
            timeout: seconds; ``None`` for ever.

        Raises:
            TimeoutError: steps are left.
            Exception: what a step raised; those after it are not taken.
        """
        self._done.result(timeout)

    def cancel(self) -> None:
        """Take no step any more."""
        self._proxy._call(self._stop)

    def _start(self) -> None:
        self._began = self._proxy._running.time()
        self._next()

    def _next(self) -> None:
        try:
            step = next(self._steps, None)
            if step is None:
                self._done.set_result(None)
                return
            at, action = step
            self._timer = self._proxy._running.call_at(self._began + at, self._take, action)
        except Exception as error:
            self._done.set_exception(error)

    def _take(self, action: Callable[[FaultProxy], object]) -> None:
        try:
            action(self._proxy)
        except Exception as error:
            _log.exception("a step of a schedule failed")
            self._done.set_exception(error)
            return
        if not self._done.done():
            self._next()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._done.done():
            self._done.set_result(None)


class FaultProxy:
    """A TCP proxy before a broker that cuts, stalls, slows, chops and lies when it is told to.

    ``with FaultProxy(broker.url) as proxy:`` runs it on a thread and an event loop of its own, on a free port of the
    loopback interface. Its methods may be called from any thread.

    Faults that last (`stall`, `black_hole`, `delay`, `limit`, `split`, `merge`, `cut_after`) hold until `heal`. With
    `connection` they hold for one; without, for all that there are and those that come. `direction` is
    ``"to_broker"``, ``"to_client"``, or ``None`` for both.

    Args:
        broker: its AMQP URL, or ``host:port``.
        port: to listen on; 0 for a free one.
        seed: of all that is drawn by lot. With the same seed, the same connection in the order of their coming is
            split and delayed alike, whatever others do.

    Raises:
        ValueError: the broker's address is none.
    """

    def __init__(self, broker: str, *, port: int = 0, seed: int = 0) -> None:
        parts = urlsplit(broker if "://" in broker else f"//{broker}")
        if not parts.hostname or (not parts.port and parts.scheme not in _PORTS):
            raise ValueError("the broker must be an AMQP URL or host:port")
        #: The broker's host and port.
        self.target = parts.hostname, parts.port or _PORTS[parts.scheme]
        #: What is drawn by lot comes from it.
        self.seed = seed
        self._parts = parts
        self._port = port
        self._relays = Relays(self.target, seed, self._has_changed)
        self._accepted = 0
        # None while connections are refused.
        self._listener: socket.socket | None = None
        self._schedules: list[Schedule] = []
        # Those that were accepted and have no transport yet.
        self._greeting: set[asyncio.Task[None]] = set()
        # Its loop, for what runs on it.
        self._running: asyncio.AbstractEventLoop
        # The same for others; None while it takes no calls. Held: no call comes while it is being taken away.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="qflow-proxy", daemon=True)
        self._started: Future[None] = Future()
        self._stopping: asyncio.Event | None = None
        # Goes up whenever anything has happened, if somebody waits; guarded by the condition.
        self._version = 0
        self._changed = threading.Condition()
        self._waiting = 0

    # Starting and stopping.

    def __enter__(self) -> Self:
        if self._started.done():
            raise RuntimeError("this proxy has run already; make a new FaultProxy")
        self._thread.start()
        try:
            self._started.result()
        except BaseException:
            self._thread.join()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None:
            loop.call_soon_threadsafe(stopping.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = self._running = self._relays.loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        try:
            self._listen()
        except BaseException as error:
            self._loop = None
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        await self._stopping.wait()
        with self._loop_lock:
            self._loop = None
        for schedule in self._schedules:
            schedule._stop()
        self._stop_listening()
        if self._greeting:
            await asyncio.wait(self._greeting)
        while self._relays.connections:
            for connection in tuple(self._relays.connections.values()):
                connection.cut()
            await asyncio.wait([connection.lost for connection in self._relays.connections.values()])

    def _listen(self) -> None:
        listener = socket.socket()
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
            # Not one that the system gives to outgoing connections: while it refuses, a client that connects again and
            # again could be given that port, and so be connected to itself.
            self._port = self._port or free_port(set(), for_proxy=True)
            listener.bind((_HOST, self._port))
            listener.listen(128)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        self._running.add_reader(listener.fileno(), self._accept)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._running.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except OSError:
            # It has gone again.
            return
        self._accepted += 1
        connection = Relay(self._relays, self._accepted)
        task = self._running.create_task(self._greet(connection, client))
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)

    async def _greet(self, connection: Relay, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            await self._running.connect_accepted_socket(lambda: connection.client, client)

    @property
    def port(self) -> int:
        """The port that it listens on.

        Raises:
            RuntimeError: it has not been started.
        """
        if not self._started.done():
            raise RuntimeError("the proxy does not run yet; use it in `with FaultProxy(…) as proxy:`")
        return self._port

    @property
    def url(self) -> str:
        """The broker's URL by way of this proxy."""
        login, at, _ = self._parts.netloc.rpartition("@")
        return self._parts._replace(
            scheme=self._parts.scheme or "amqp", netloc=f"{login}{at}{_HOST}:{self.port}"
        ).geturl()

    # From other threads.

    def _call(self, function: Callable[[], _Result]) -> _Result:
        """Run something on the proxy's loop; here and now if this is it."""
        done: Future[_Result] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        with self._loop_lock:
            if self._loop is None:
                raise RuntimeError("the proxy does not run; use it in `with FaultProxy(…) as proxy:`")
            here = threading.current_thread() is self._thread
            if not here:
                self._loop.call_soon_threadsafe(run)
        if here:
            run()
        return done.result()

    def _has_changed(self) -> None:
        if self._waiting:
            with self._changed:
                self._version += 1
                self._changed.notify_all()

    def _picked(self, number: int | None) -> list[Relay]:
        if number is None:
            return list(self._relays.connections.values())
        if number not in self._relays.connections:
            there = ", ".join(map(str, self._relays.connections)) or "none"
            raise LookupError(f"there is no connection {number}; there are: {there}")
        return [self._relays.connections[number]]

    def _change(self, direction: Direction | str | None, number: int | None, **rules: Any) -> None:
        directions = tuple(Direction) if direction is None else (_direction(direction),)

        def change() -> None:
            for connection in self._picked(number):
                for each in directions:
                    connection.ways[each].set(**rules)
            if number is None:
                for each in directions:
                    self._relays.rules[each] = replace(self._relays.rules[each], **rules)

        self._call(change)

    def _cut(self, number: int | None, *, reset: bool) -> None:
        def cut() -> None:
            for connection in self._picked(number):
                connection.cut(reset=reset)

        self._call(cut)

    # Looking.

    @property
    def connections(self) -> tuple[ProxiedConnection, ...]:
        """The connections at this moment, oldest first."""
        return self._call(lambda: tuple(connection.picture() for connection in self._relays.connections.values()))

    @property
    def accepted(self) -> int:
        """How many connections have come so far."""
        return self._accepted

    def wait_until(self, predicate: Callable[[FaultProxy], object], timeout: float = 30.0) -> None:
        """Wait for something to become true; it is looked at again whenever bytes have passed or connections changed.

        Args:
            predicate: takes the proxy; runs on the calling thread.
            timeout: seconds.

        Raises:
            TimeoutError: it did not become true; the text says what connections there are.
        """
        end = time.monotonic() + timeout
        with self._changed:
            self._waiting += 1
        try:
            while True:
                version = self._version
                if predicate(self):
                    return
                if not self._await_change(version, end):
                    raise TimeoutError(f"not reached within {timeout} s; the proxy has {self.connections}")
        finally:
            with self._changed:
                self._waiting -= 1

    def _await_change(self, version: int, end: float) -> bool:
        with self._changed:
            left = end - time.monotonic()
            return left > 0 and self._changed.wait_for(lambda: self._version != version, left)

    # Faults of a moment.

    def cut(self, connection: int | None = None) -> None:
        """End connections on both sides at once, as when their peer's process ends.

        Args:
            connection: the number of one; ``None`` for all.

        Raises:
            LookupError: there is no such connection.
        """
        self._cut(connection, reset=False)

    def reset(self, connection: int | None = None) -> None:
        """End connections on both sides with a TCP reset, as when their peer's machine has forgotten them.

        Args:
            connection: the number of one; ``None`` for all.

        Raises:
            LookupError: there is no such connection.
        """
        self._cut(connection, reset=True)

    def inject(
        self,
        frame: bytes | pamqp.base.Frame,
        channel: int = 0,
        *,
        direction: Direction | str = Direction.TO_CLIENT,
        connection: int | None = None,
        answer: type[pamqp.base.Frame] | None = None,
    ) -> None:
        """Say something in the broker's or the client's name, at the next border of a frame.

        It overtakes what is stalled or delayed. It may come between the frames of one message: if that is not wanted,
        nothing with a content should be on its way.

        Args:
            frame: a method, such as ``pamqp.commands.Channel.Flow(False)``, or bytes.
            channel: of the method.
            direction: who hears it.
            connection: the number of one; ``None`` for all.
            answer: the method by which it will be answered, such as ``pamqp.commands.Channel.FlowOk``. The next of them
                on that channel is taken out on its way back, because the other side has not asked: RabbitMQ, which
                knows no ``Channel.FlowOk``, closes a connection on which it hears one. ``None`` to let it pass.

        Raises:
            LookupError: there is no such connection.
            ValueError: a connection does not speak AMQP, or in TLS.
        """
        data = frame if isinstance(frame, bytes) else pamqp.frame.marshal(frame, channel)
        towards = _direction(direction)
        back = Direction.TO_BROKER if towards is Direction.TO_CLIENT else Direction.TO_CLIENT

        def inject() -> None:
            picked = self._picked(connection)
            for each in picked:
                if not each.ways[towards].borders.is_amqp:
                    raise ValueError(f"connection {each.number} shows no AMQP frames {towards}; is it in TLS?")
            for each in picked:
                if answer is not None:
                    each.ways[back].take_out(answer, channel)
                each.ways[towards].inject(data)

        self._call(inject)

    # Faults that last.

    def stall(self, direction: Direction | str | None = None, connection: int | None = None) -> None:
        """Read nothing any more: the sender's socket fills. After `heal` it goes on, and nothing is missing.

        Args:
            direction: which way; ``None`` for both.
            connection: the number of one; ``None`` for all, and those that come.

        Raises:
            LookupError: there is no such connection.
        """
        self._change(direction, connection, stalls=True)

    def black_hole(self, direction: Direction | str | None = None, connection: int | None = None) -> None:
        """Take everything and pass nothing on, also not the end: neither side learns what became of the other.

        A direction in which something was swallowed carries nothing any more, also after `heal`. A client that comes
        while both directions are black holes is accepted, and never answered; no broker is needed for that.

        Args:
            direction: which way; ``None`` for both.
            connection: the number of one; ``None`` for all, and those that come.

        Raises:
            LookupError: there is no such connection.
        """
        self._change(direction, connection, swallows=True)

    def delay(
        self,
        seconds: float,
        jitter: float = 0.0,
        *,
        direction: Direction | str | None = None,
        connection: int | None = None,
    ) -> None:
        """Have everything arrive later, in its order.

        Args:
            seconds: that it is on its way.
            jitter: seconds that may be added to it, drawn by lot.
            direction: which way; ``None`` for both, so that a round trip takes twice the time.
            connection: the number of one; ``None`` for all, and those that come.

        Raises:
            LookupError: there is no such connection.
            ValueError: a negative time.
        """
        _at_least(0, seconds=seconds, jitter=jitter)
        self._change(direction, connection, latency=seconds, jitter=jitter)

    def limit(
        self,
        bytes_per_second: float,
        *,
        direction: Direction | str | None = None,
        connection: int | None = None,
    ) -> None:
        """Limit the bandwidth, of each connection and direction by itself.

        Args:
            bytes_per_second: that pass.
            direction: which way; ``None`` for both.
            connection: the number of one; ``None`` for all, and those that come.

        Raises:
            LookupError: there is no such connection.
            ValueError: it is not more than 0.
        """
        if not bytes_per_second > 0:
            raise ValueError(
                f"bytes_per_second must be more than 0, not {bytes_per_second!r}; stall() lets nothing pass"
            )
        self._change(direction, connection, rate=bytes_per_second)

    def split(
        self,
        lowest: int,
        highest: int | None = None,
        *,
        pause: float = 0.0,
        direction: Direction | str | None = None,
        connection: int | None = None,
    ) -> None:
        """Pass everything on in small writes.

        Args:
            lowest: bytes of a write; fewer if there are no more.
            highest: bytes of a write at the most, drawn by lot between the two; ``None`` for `lowest`.
            pause: seconds between two writes.
            direction: which way; ``None`` for both.
            connection: the number of one; ``None`` for all, and those that come.

        Raises:
            LookupError: there is no such connection.
            ValueError: sizes that are none, or a negative time.
        """
        highest = lowest if highest is None else highest
        _at_least(1, lowest=lowest)
        _at_least(lowest, highest=highest)
        _at_least(0, pause=pause)
        self._change(direction, connection, split=(lowest, highest), pause=pause)

    def merge(
        self,
        size: int,
        wait: float = 0.05,
        *,
        direction: Direction | str | None = None,
        connection: int | None = None,
    ) -> None:
        """Gather what comes, and pass it on in writes of one size.

        Args:
            size: bytes of a write.
            wait: seconds after which less is passed on.
            direction: which way; ``None`` for both.
            connection: the number of one; ``None`` for all, and those that come.

        Raises:
            LookupError: there is no such connection.
            ValueError: a size that is none, or a negative time.
        """
        _at_least(1, size=size)
        _at_least(0, wait=wait)
        self._change(direction, connection, merge=size, wait=wait)

    def cut_after(
        self,
        *,
        frames: int = 0,
        size: int = 0,
        direction: Direction | str = Direction.TO_CLIENT,
        connection: int | None = None,
    ) -> None:
        """Close connections when so much has passed from now on, or since they came, in order and to the byte.

        Args:
            frames: whole frames; a protocol header counts as one. 0 for any number.
            size: bytes. 0 for any number.
            direction: which way they are counted.
            connection: the number of one; ``None`` for all, and each of those that come.

        Raises:
            LookupError: there is no such connection.
            ValueError: a negative number.
        """
        _at_least(0, frames=frames, size=size)
        self._change(_direction(direction), connection, last_frame=frames, last_byte=size)

    def refuse(self) -> None:
        """Refuse connections from now on, as if nobody listened. Those that there are stay."""
        self._call(self._stop_listening)

    def heal(self, connection: int | None = None) -> None:
        """End all faults that last. What is stalled or delayed goes on, and connections are accepted.

        Args:
            connection: the number of one; ``None`` for all, and those that come.

        Raises:
            LookupError: there is no such connection.
            OSError: somebody else has taken the port while connections were refused.
        """
        self._change(None, connection, **asdict(NO_RULES))
        if connection is None:
            self._call(lambda: self._listen() if self._listener is None else None)

    def schedule(self, steps: Iterable[tuple[float, Callable[[FaultProxy], object]]]) -> Schedule:
        """Have things done at times, such as ``[(0.5, FaultProxy.cut), (2.0, lambda proxy: proxy.delay(0.1))]``.

        Args:
            steps: seconds from now on, rising, and what is called with the proxy then, on its thread: it must not
                block. Each step is asked for when the one before has been taken, so that they may have no end.

        Returns:
            What can be waited for and cancelled. It ends with the proxy.
        """
        schedule = Schedule(self, steps)

        def start() -> None:
            self._schedules.append(schedule)
            schedule._start()

        self._call(start)
        return schedule


def _direction(direction: Direction | str) -> Direction:
    try:
        return Direction(direction)
    except ValueError:
        allowed = ", ".join(repr(each.value) for each in Direction)
        raise ValueError(f"direction must be one of {allowed}, not {direction!r}") from None


def _at_least(lowest: int, /, **values: float) -> None:
    for name, value in values.items():
        if not value >= lowest:
            raise ValueError(f"{name} must be at least {lowest}, not {value!r}")
