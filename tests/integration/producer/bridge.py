"""An `AsyncProducer` with the interface of a `Producer`, so that the same tests can check both producers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

from qflow_client import AsyncProducer, AsyncReceipt, FlowEvent, FlowState
from qflow_client.aio.outbox import SpilledReceipt
from qflow_client.health import Health

from .tools import PATIENCE


class _Loop(threading.Thread):
    """An event loop on a separate thread."""

    def __init__(self, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        super().__init__(name="qflow-loop", daemon=True)
        self.loop = new_loop()
        self._lock = threading.Lock()
        # Number of calls that have not returned, and whether the loop ends after these calls.
        self._calls = 0
        self._last = False
        self.start()

    def run(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    def __call__(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the loop, and return its result or raise its exception."""
        assert threading.current_thread() is not self
        with self._lock:
            over = self._last
            self._calls += not over
        if over:
            # A closed producer answers without its loop, so run the coroutine on a new loop.
            self.join(PATIENCE)
            return asyncio.run(_wait_for(coroutine))
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            # In all tests, calls take less time than this.
            return future.result(3 * PATIENCE)
        except TimeoutError:
            assert future.done(), f"{coroutine} does not end"
            raise
        finally:
            future.cancel()
            with self._lock:
                self._calls -= 1
            self._stop_if_done()

    def ask(self, question: Callable[[], Any]) -> Any:
        """Call a function on the loop, and return its result."""
        if threading.current_thread() is self:
            return question()

        async def answer() -> Any:
            return question()

        return self(answer())

    def stop(self) -> None:
        """End the loop when all current calls have returned."""
        with self._lock:
            self._last = True
        self._stop_if_done()

    def _stop_if_done(self) -> None:
        with self._lock:
            if self._last and not self._calls and not self.loop.is_closed():
                self.loop.call_soon_threadsafe(self.loop.stop)


async def _wait_for(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


class _Receipt(AsyncReceipt):
    """An `AsyncReceipt` that a thread can wait for."""

    __slots__ = ()
    run: _Loop

    def wait(self, timeout: float | None = None) -> Any:
        return self._wait_for(super().wait(timeout))

    def result(self, timeout: float | None = None) -> Any:
        return self._wait_for(super().result(timeout))

    def _wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self.run(coroutine)
        # On a loop, return the coroutine like an `AsyncReceipt`.
        return coroutine


class Bridged:
    """An `AsyncProducer` on a separate loop, with the interface of a `Producer`."""

    def __init__(self, url: Any, *, new_loop: Callable[[], asyncio.AbstractEventLoop], **settings: Any) -> None:
        self._loop = _Loop(new_loop)
        try:
            self._producer = self._loop.ask(lambda: AsyncProducer(url, **settings))
            # Each loop needs its own receipt class.
            common = {"__slots__": (), "run": self._loop}
            self._producer._protocol.admission.receipt_type = type("BridgedReceipt", (_Receipt,), common)
            self._loop(self._producer.connect())
            storage = self._producer._engine.storage
            if storage is not None:
                storage.store.backlog.spilled_type = type("BridgedSpilled", (_Receipt, SpilledReceipt), common)
            self._protocol, self._engine = self._producer._protocol, self._producer._engine
        except BaseException:
            self._loop.stop()
            raise
        self.settings = self._producer.settings
        self.name = self._producer.name

    def send(self, *args: Any, **keywords: Any) -> Any:
        return self._loop(self._producer.send(*args, **keywords))

    def send_many(self, *args: Any, **keywords: Any) -> Any:
        return self._loop(self._producer.send_many(*args, **keywords))

    def send_nowait(self, *args: Any, **keywords: Any) -> Any:
        return self._loop.ask(lambda: self._producer.send_nowait(*args, **keywords))

    def position(self, source: str) -> Any:
        return self._loop.ask(lambda: self._producer.position(source))

    def flush(self, *args: Any, **keywords: Any) -> None:
        self._loop(self._producer.flush(*args, **keywords))

    def wait_unflowed(self, *args: Any, **keywords: Any) -> bool:
        return bool(self._loop(self._producer.wait_unflowed(*args, **keywords)))

    def close(self, *args: Any, **keywords: Any) -> None:
        try:
            self._loop(self._producer.close(*args, **keywords))
        finally:
            if self._producer._engine._all_ended.is_set():
                self._loop.stop()

    def health(self) -> Health:
        health: Health = self._producer.health()
        return health

    def shutdown(self, *args: Any, **keywords: Any) -> None:
        # Call `shutdown` on the calling thread, as a signal handler would.
        self._producer.shutdown(*args, **keywords)

    def on_flow(self, callback: Callable[[FlowEvent], object], **keywords: Any) -> Callable[[], None]:
        unsubscribe = self._loop.ask(lambda: self._producer.on_flow(callback, **keywords))
        return lambda: self._loop.ask(unsubscribe)

    def flow_events(self, **keywords: Any) -> Iterator[FlowEvent]:
        events = self._loop.ask(lambda: self._producer.flow_events(**keywords))

        def iterate() -> Iterator[FlowEvent]:
            while True:
                try:
                    yield self._loop(_wait_for(anext(events)))
                except StopAsyncIteration:
                    return

        return iterate()

    def pause(self, reason: str = "") -> None:
        self._loop.ask(lambda: self._producer.pause(reason))

    def resume(self) -> None:
        self._loop.ask(self._producer.resume)

    @property
    def _services(self) -> Any:
        """An object whose attribute `tapped` has the socket, as in a `Producer`."""
        return SimpleNamespace(tapped=self._producer._engine.link.writer)

    @property
    def capacity(self) -> int:
        return int(self._producer.capacity)

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        self._loop.ask(lambda: setattr(self._producer, "capacity", capacity))

    @property
    def available(self) -> int:
        return int(self._loop.ask(lambda: self._producer.available))

    @property
    def unsettled(self) -> int:
        return int(self._loop.ask(lambda: self._producer.unsettled))

    @property
    def stored(self) -> int:
        return int(self._loop.ask(lambda: self._producer.stored))

    @property
    def in_flight(self) -> int:
        return int(self._loop.ask(lambda: self._producer.in_flight))

    @property
    def flow_state(self) -> FlowState:
        state: FlowState = self._loop.ask(lambda: self._producer.flow_state)
        return state

    @property
    def closed(self) -> bool:
        return bool(self._loop.ask(lambda: self._producer.closed))

    def __enter__(self) -> Bridged:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            self._loop(self._producer.__aexit__(kind, error, traceback))
        finally:
            self._loop.stop()

    def __eq__(self, other: object) -> bool:
        return self._producer is (other._producer if isinstance(other, Bridged) else other)

    def __hash__(self) -> int:
        return hash(self._producer)

    def __repr__(self) -> str:
        return repr(self._producer)
