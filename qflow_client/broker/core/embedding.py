"""A broker in this process: starting, stopping, and calls from other threads.

The state of a broker belongs to its event loop. So methods with the decorator `on_loop` run on this loop. A call from
another thread waits for the result, and a call on the loop itself runs directly.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from functools import partial, wraps
from typing import Any, Self, TypeVar, cast
from urllib.parse import quote

from qflow_client.broker.core.channelflow import Discipline
from qflow_client.broker.core.controls import Controls
from qflow_client.broker.core.limits import Rules
from qflow_client.broker.core.passwords import is_hash
from qflow_client.broker.core.ports import Disk, Front, Journal
from qflow_client.broker.core.runner import Runner
from qflow_client.broker.core.server import Server
from qflow_client.broker.core.session import Session
from qflow_client.broker.core.settings import Settings
from qflow_client.broker.core.virtualhost import VirtualHost

__all__ = ["EmbeddedBroker", "on_loop", "url_host"]

# Maximum seconds that a stopping broker waits for the bodies of dead messages that are only on disk.
_STOP_LETTERS = 10.0

_Result = TypeVar("_Result")
_Method = TypeVar("_Method", bound=Callable[..., Any])


def url_host(host: str) -> str:
    """Return a host as it is written in a URL. A wildcard such as ``0.0.0.0`` becomes a loopback address."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def on_loop(*, changes: bool = False, lasts: bool = False) -> Callable[[_Method], _Method]:
    """Return a decorator that makes a method of a broker run on the broker's loop, see `EmbeddedBroker._call`."""

    def decorate(method: _Method) -> _Method:
        @wraps(method)
        def call(broker: EmbeddedBroker, /, *args: Any, **kwargs: Any) -> Any:
            return broker._call(partial(method, broker, *args, **kwargs), changes=changes, lasts=lasts)

        return cast(_Method, call)

    return decorate


class EmbeddedBroker:
    """Runs the parts of a broker on one event loop.

    Args:
        settings: see `Settings`.
        rules: computes the limits of each queue; ``None`` for `PlainRules`.
        journal: counts the bytes of messages, and with a store collects the changes for the disk; ``None`` for neither.
        discipline: creates the `Discipline` of each connection; ``None`` for no backlog limit and no sanctions.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        rules: Rules | None = None,
        journal: Journal | None = None,
        discipline: Callable[[Session], Discipline] | None = None,
    ) -> None:
        #: The settings of this broker.
        self.settings = settings
        self._host = VirtualHost(settings, journal=journal, rules=rules)
        self._controls = Controls(watches_publishes=settings.watches_publishes)
        self._server = Server(self._host, self._controls, self._on_turn, discipline)
        # Writes the records of the journal; None without a store.
        self._disk: Disk | None = None
        # Servers of other protocols, such as HTTP, which start after the AMQP server and stop before it.
        self._fronts: list[Front] = []
        self._port: int | None = None
        self._started = AsyncExitStack()
        self._runner = Runner()

    # Starting and stopping.

    def __enter__(self) -> Self:
        self._runner.run(self._start, self._stop)
        return self

    def __exit__(self, *_error: object) -> None:
        self._runner.end(self._stop)

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._stop()

    async def _start(self) -> None:
        if self._port is not None:
            raise RuntimeError("this broker has run already; make a new Broker")
        # If a part fails to start, this `async with` stops the earlier parts. Otherwise `_stop` stops all parts.
        async with AsyncExitStack() as started:
            if self._disk is not None:
                await self._disk.start()
                started.push_async_callback(self._disk.stop)
            started.callback(self._runner.leave)
            started.callback(self._host.end_observing)
            started.push_async_callback(self._send_letters)
            self._port = await self._server.start()
            started.push_async_callback(self._server.stop)
            for front in self._fronts:
                await front.start()
                started.push_async_callback(front.stop)
            self._runner.enter()
            if self._disk is not None:
                await self._disk.watch()
            self._started = started.pop_all()

    async def _send_letters(self) -> None:
        """Send all dead letters before the store stops. Wait for bodies from disk while they come."""
        letters, end = self._host.dead_letters, self._server.clock() + _STOP_LETTERS
        letters.send_all()
        while letters.is_waiting and self._server.clock() < end:
            if self._disk is not None:
                self._disk.flush()
            # Each read needs a new `flush`, so wait for a moment instead of for an event.
            await asyncio.sleep(0.01)
            letters.send_all()

    async def _stop(self) -> None:
        await self._started.aclose()
        self._runner.changed()

    @property
    def port(self) -> int:
        """The port on which the broker listens.

        Raises:
            RuntimeError: the broker has not been started.
        """
        if self._port is None:
            raise RuntimeError("the broker is not running; use it in `with Broker() as broker:`")
        return self._port

    @property
    def url(self) -> str:
        """An AMQP URL for the first user. It has no password if the settings have only the password's hash."""
        user, password = next(iter(self.settings.users.items()))
        scheme = "amqp" if self.settings.ssl_context is None else "amqps"
        host = url_host(self.settings.host)
        names = quote(user, safe="") + ("" if is_hash(password) else f":{quote(password, safe='')}")
        return f"{scheme}://{names}@{host}:{self.port}/{quote(self.settings.virtual_host, safe='')}"

    # Calls.

    def _call(self, function: Callable[[], _Result], *, changes: bool = False, lasts: bool = False) -> _Result:
        """Run a function on the broker's loop. On that loop, or if no loop runs, call the function directly.

        Args:
            lasts: whether the function makes a change that has to be on disk before this method returns. On the loop
                itself, this method does not wait for the disk.
        """
        caller = threading.get_ident()
        durable: Future[None] | None = None

        def run() -> _Result:
            nonlocal durable
            result = function()
            if changes or lasts:
                self._server.touch()
            if lasts and self._disk is not None:
                when_durable = self._disk.when_durable(topology_only=True)
                durable = when_durable if threading.get_ident() != caller else None
            return result

        if (changes or lasts) and self._disk is not None and not self._runner.is_running:
            raise RuntimeError("a broker with a store can be changed only while it runs")
        result = self._runner.call(run)
        if durable is not None:
            durable.result()
        return result

    def _call_in_steps(self, steps: Iterator[object], *, lasts: bool = False) -> None:
        """Run a change in steps on the broker's loop. Other work can run between two steps. For `lasts` see `_call`."""
        self._call(lambda: None, changes=True)
        self._runner.call_in_steps(steps)
        self._call(lambda: None, changes=True, lasts=lasts)

    def _on_turn(self) -> None:
        if self._disk is not None:
            self._disk.flush()
        self._runner.changed()
