"""A proxy that simulates network faults between clients and any broker.

The proxy passes all bytes on unchanged until a method or a schedule causes a fault. All random values come from one
seed, so a test can repeat them. Connections can use TLS, but then the proxy can neither inject nor count frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import pamqp.base
import pamqp.frame

from qflow_client.forks import close_in_children
from qflow_client.testing.node import HOST, free_port
from qflow_client.testing.relay import NO_RULES, Direction, ProxiedConnection, Relay, Relays

__all__ = ["Direction", "FaultProxy", "ProxiedConnection", "Schedule"]

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_PORTS = {"amqp": 5672, "amqps": 5671}
# Receive buffer in bytes of the proxy's socket to each client. It is small, so that `stall` soon blocks the client.
_RECEIVE_BUFFER = 1 << 18
# Seconds without accepting if the system has no free file descriptor.
_PAUSE = 1.0


class Schedule:
    """Functions (steps) that a proxy calls at given times. `FaultProxy.schedule` creates a schedule."""

    def __init__(self, proxy: FaultProxy, steps: Iterable[tuple[float, Callable[[FaultProxy], object]]]) -> None:
        self._proxy = proxy
        self._steps = iter(steps)
        self._began = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._done: Future[None] = Future()

    @property
    def done(self) -> bool:
        """Whether the schedule has ended: all steps are done, a step has failed, or the schedule was cancelled."""
        return self._done.done()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the schedule has ended, for at most `timeout` seconds; ``None`` for no limit.

        Raises:
            TimeoutError: the schedule has not ended after `timeout` seconds.
            Exception: the error that a step has raised. Later steps are not executed.
        """
        self._done.result(timeout)

    def cancel(self) -> None:
        """Cancel the schedule: the proxy executes no more of its steps."""
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
            _log.exception("a step of a schedule failed, so the schedule ends")
            if not self._done.done():
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
    """A TCP proxy in front of a broker. The proxy can cut, stall, delay and split connections, and inject frames.

    ``with FaultProxy(broker.url) as proxy:`` runs the proxy on a separate thread. The proxy listens on a port of the
    loopback interface. Any thread may call the methods of the proxy.

    Lasting faults (`stall`, `black_hole`, `delay`, `limit`, `split`, `merge`, `cut_after`) stay until `heal`. The
    argument `connection` is the number of the affected connection, or ``None`` for all current connections. With
    ``None`` a lasting fault also affects future connections. Methods raise ``LookupError`` if no connection has the
    number. The argument `direction` is ``"to_broker"``, ``"to_client"``, or ``None`` for both directions.

    Args:
        broker: AMQP URL of the broker, or ``host:port``.
        port: port to listen on; 0 for a free port.
        seed: seed of all random values. With the same seed, the n-th connection gets the same values in each run.

    Raises:
        ValueError: `broker` is neither an AMQP URL nor ``host:port``.
    """

    def __init__(self, broker: str, *, port: int = 0, seed: int = 0) -> None:
        parts = urlsplit(broker if "://" in broker else f"//{broker}")
        if not parts.hostname or (not parts.port and parts.scheme not in _PORTS):
            raise ValueError("the broker must be an AMQP URL or host:port")
        #: Host and port of the broker.
        self.target = parts.hostname, parts.port or _PORTS[parts.scheme]
        self.seed = seed
        self._parts = parts
        self._port = port
        self._relays = Relays(self.target, seed, self._has_changed)
        self._accepted = 0
        # The listening socket; None while the proxy refuses connections.
        self._listener: socket.socket | None = None
        self._schedules: list[Schedule] = []
        # Tasks that create the transports of accepted connections.
        self._greeting: set[asyncio.Task[None]] = set()
        # The proxy's event loop. Only code that runs on this loop uses this attribute.
        self._running: asyncio.AbstractEventLoop
        # The loop for calls from other threads; None while the loop accepts no calls. `_loop_lock` protects the value.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_lock = threading.RLock()
        # The process with the loop. A forked child has a copy of this object, but no thread that runs the loop.
        self._pid = 0
        self._thread = threading.Thread(target=self._run, name="qflow-proxy", daemon=True)
        self._started: Future[None] = Future()
        self._stopping: asyncio.Event | None = None
        # Number of changes of connections, counted only while threads wait for changes (`_waiting` is above 0).
        self._version = 0
        self._changed = threading.Condition()
        self._waiting = 0

    def __enter__(self) -> Self:
        if self._started.done():
            raise RuntimeError("this proxy has run already; make a new FaultProxy")
        try:
            self._thread.start()
            self._started.result()
        except BaseException:
            # If the start has failed, or has not finished yet, `_main` ends the thread. Otherwise end the thread here.
            if not self._started.cancel() and self._started.exception() is None:
                self.__exit__()
            if self._thread.ident is not None:
                self._thread.join()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None:
            loop.call_soon_threadsafe(stopping.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = self._running = self._relays.loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._pid = os.getpid()
        try:
            self._listen()
        except BaseException as error:
            self._loop = None
            if self._started.set_running_or_notify_cancel():
                self._started.set_exception(error)
            return
        # The future is cancelled if Ctrl-C has interrupted `__enter__`.
        if self._started.set_running_or_notify_cancel():
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
            # `free_port` returns no port that the system uses for outgoing connections. If a client got the proxy's
            # port as its own port while the proxy refuses connections, the client would connect to itself.
            self._port = self._port or free_port(set(), for_proxy=True)
            listener.bind((HOST, self._port))
            listener.listen(128)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        close_in_children(listener)
        self._accept_on(listener)

    def _accept_on(self, listener: socket.socket) -> None:
        if listener is self._listener:
            self._running.add_reader(listener, self._accept, listener)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._running.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            # The client has already disconnected.
            return
        except OSError as error:
            _log.warning("no connection can be accepted: %s; the next try is in %g s", error.strerror, _PAUSE)
            self._running.remove_reader(listener)
            self._running.call_later(_PAUSE, self._accept_on, listener)
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
        """The port on which the proxy listens. Before the proxy starts, this property raises `RuntimeError`."""
        if not self._started.done():
            raise RuntimeError("the proxy is not running; use it in `with FaultProxy(…) as proxy:`")
        return self._port

    @property
    def url(self) -> str:
        """The URL of the broker with the address of this proxy."""
        login, at, _ = self._parts.netloc.rpartition("@")
        return self._parts._replace(
            scheme=self._parts.scheme or "amqp", netloc=f"{login}{at}{HOST}:{self.port}"
        ).geturl()

    def _call(self, function: Callable[[], _Result]) -> _Result:
        """Run a function on the proxy's loop, and return its result. On the loop's own thread, run it directly."""
        self._check_process()
        done: Future[_Result] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        with self._loop_lock:
            if self._loop is None:
                raise RuntimeError("the proxy is not running; use it in `with FaultProxy(…) as proxy:`")
            here = threading.current_thread() is self._thread
            if not here:
                self._loop.call_soon_threadsafe(run)
        if here:
            run()
        return done.result()

    def _check_process(self) -> None:
        # Check this before any lock, because another thread may have held the lock during the fork.
        if self._loop is not None and self._pid != os.getpid():
            raise RuntimeError(f"the proxy runs in process {self._pid}, and this is process {os.getpid()}")

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
            raise LookupError(f"there is no connection {number}; the proxy has: {there}")
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

    @property
    def connections(self) -> tuple[ProxiedConnection, ...]:
        """The current connections, oldest first."""
        return self._call(lambda: tuple(connection.picture() for connection in self._relays.connections.values()))

    @property
    def accepted(self) -> int:
        """The number of connections accepted so far."""
        return self._accepted

    def wait_until(self, predicate: Callable[[FaultProxy], object], timeout: float = 30.0) -> None:
        """Wait until `predicate`, called with the proxy, returns true.

        The calling thread calls `predicate` again when the proxy has passed bytes on, or a connection has changed.

        Raises:
            TimeoutError: the result was not true within `timeout` seconds. The error text lists the connections.
            TypeError: `predicate` returned a coroutine.
        """
        self._check_process()
        end = time.monotonic() + timeout
        with self._changed:
            self._waiting += 1
        try:
            while True:
                version = self._version
                result = predicate(self)
                if inspect.iscoroutine(result):
                    result.close()
                    raise TypeError("the predicate is a coroutine function, which is not awaited; use a plain function")
                if result:
                    return
                if not self._await_change(version, end):
                    raise TimeoutError(
                        f"the condition was not true within {timeout} s; the proxy has {self.connections}"
                    )
        finally:
            with self._changed:
                self._waiting -= 1

    def _await_change(self, version: int, end: float) -> bool:
        with self._changed:
            left = end - time.monotonic()
            return left > 0 and self._changed.wait_for(lambda: self._version != version, left)

    # Momentary faults.

    def cut(self, connection: int | None = None) -> None:
        """Close connections on both sides immediately, as if the process of the peer ended."""
        self._cut(connection, reset=False)

    def reset(self, connection: int | None = None) -> None:
        """Close connections on both sides with a TCP reset, as if the machine of the peer were restarted."""
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
        """Insert a frame after the frame that is being passed on, as if the broker or the client had sent it.

        The frame overtakes stalled and delayed bytes. If a message is being transferred, the frame may come between two
        frames of this message.

        Args:
            frame: a method, such as ``pamqp.commands.Channel.Flow(False)``, or the bytes of a complete frame.
            channel: number of the channel of the method and of its answer.
            answer: type of the method that answers the frame, such as ``pamqp.commands.Channel.FlowOk``. The proxy
                removes the next method of this type on the channel, because the other side did not send `frame`. For
                example, RabbitMQ closes a connection that sends ``Channel.FlowOk``. ``None`` to remove nothing.

        Raises:
            ValueError: a connection uses TLS, or does not use AMQP.
        """
        data = frame if isinstance(frame, bytes) else pamqp.frame.marshal(frame, channel)
        towards = _direction(direction)
        back = Direction.TO_BROKER if towards is Direction.TO_CLIENT else Direction.TO_CLIENT

        def inject() -> None:
            picked = self._picked(connection)
            for each in picked:
                if not each.ways[towards].borders.is_amqp:
                    raise ValueError(
                        f"connection {each.number} has no AMQP frames {towards}; is it encrypted with TLS?"
                    )
            for each in picked:
                if answer is not None:
                    each.ways[back].take_out(answer, channel)
                each.ways[towards].inject(data)

        self._call(inject)

    # Lasting faults.

    def stall(self, direction: Direction | str | None = None, connection: int | None = None) -> None:
        """Stop reading, so that the sender's socket becomes full. After `heal` the proxy passes all bytes on."""
        self._change(direction, connection, stalls=True)

    def black_hole(self, direction: Direction | str | None = None, connection: int | None = None) -> None:
        """Read and discard all bytes. If the sender closes its connection, the receiver's connection stays open.

        After discarding bytes of a direction, the proxy passes on no more bytes of this direction, even after `heal`.
        While both directions are black holes, the proxy accepts new clients but does not connect to the broker. These
        clients never get an answer, even after `heal`.
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
        """Delay all bytes that the proxy receives from now on. Their order does not change.

        Args:
            seconds: delay in seconds.
            jitter: maximum additional random delay in seconds.
            direction: affected direction; ``None`` for both, which delays a round trip by two times `seconds`.

        Raises:
            ValueError: a time is negative.
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
        """Limit the bandwidth of each connection and direction to `bytes_per_second`, which must be more than 0."""
        if not bytes_per_second > 0:
            raise ValueError(
                f"bytes_per_second must be more than 0, not {bytes_per_second!r}; use stall() to let no bytes pass"
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
        """Pass all bytes on in small writes.

        Args:
            lowest: minimum bytes of a write. If the proxy has fewer bytes, the write is smaller.
            highest: maximum bytes of a write; ``None`` for the value of `lowest`. The size of each write is random
                between `lowest` and `highest`.
            pause: seconds between two writes.

        Raises:
            ValueError: `lowest` is less than 1, `highest` is less than `lowest`, or `pause` is negative.
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
        """Collect bytes, and pass them on in writes of a fixed size.

        Args:
            size: number of bytes that the proxy collects for each write.
            wait: maximum seconds to collect bytes. After this time the proxy writes the bytes that it has.

        Raises:
            ValueError: the size is less than 1, or the time is negative.
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
        """Close connections after an exact number of frames or bytes.

        For a current connection the count starts with this call, and for a future connection when it is accepted.

        Args:
            frames: number of complete frames; 0 for no limit. A protocol header counts as one frame.
            size: number of bytes; 0 for no limit.
            direction: direction of the counted frames or bytes.

        Raises:
            ValueError: a number is negative.
        """
        _at_least(0, frames=frames, size=size)
        self._change(_direction(direction), connection, last_frame=frames, last_byte=size)

    def refuse(self) -> None:
        """Close the listening port until `heal`, so that new connections are refused. Current connections stay open."""
        self._call(self._stop_listening)

    def heal(self, connection: int | None = None) -> None:
        """End all lasting faults. Stalled bytes are passed on now, and delayed bytes when their delay has passed.

        If `connection` is ``None``, the proxy also ends `refuse` and accepts connections again.

        Raises:
            OSError: the proxy cannot accept connections again, because another process uses the port now.
        """
        self._change(None, connection, **asdict(NO_RULES))
        if connection is None:
            self._call(lambda: self._listen() if self._listener is None else None)

    def schedule(self, steps: Iterable[tuple[float, Callable[[FaultProxy], object]]]) -> Schedule:
        """Execute steps at given times, such as ``[(0.5, FaultProxy.cut), (2.0, lambda proxy: proxy.delay(0.1))]``.

        Args:
            steps: pairs of a time and a function. The times are in seconds after this call, and must not decrease. The
                proxy's thread calls the function with the proxy as its argument. The function must not block. Each pair
                is read after the function of the previous pair has returned, so `steps` may be endless.

        When the proxy stops, it cancels a schedule that has not ended.
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
