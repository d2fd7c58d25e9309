"""Publishes the committed messages of an outbox, in a thread. The module `tenure` explains how.

Even in an asyncio application, the relay works in a thread. `OutboxRelay.run` and ``async with`` start the thread, and
wait for its end without blocking the event loop. The thread calls the event loop only when the thread ends.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Self

from sqlalchemy import URL, Engine, create_engine, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine

from qflow_client.credentials import Credentials
from qflow_client.errors import QflowError, SettingsError
from qflow_client.health import Health
from qflow_client.redaction import hide_password, shown
from qflow_client.settings import ProducerSettings, WhenFlowed, check_argument
from qflow_client.sqlalchemy.backlog import Backlog
from qflow_client.sqlalchemy.outbox import Outbox
from qflow_client.sqlalchemy.postgresql import PostgresqlSession
from qflow_client.sqlalchemy.sessions import RelayError, Session
from qflow_client.sqlalchemy.sqlite import SqliteSession
from qflow_client.sqlalchemy.tenure import RelayCounts, Tenure, Waker
from qflow_client.sync import Producer
from qflow_client.telemetry import RelayMetrics

__all__ = ["OutboxRelay", "RelayCounts", "RelayError", "engine_of"]

_SESSIONS: dict[str, type[PostgresqlSession] | type[SqliteSession]] = {
    "postgresql": PostgresqlSession,
    "sqlite": SqliteSession,
}
# The driver that a relay uses for each database system; the keys are the names of database systems in URLs.
_DRIVERS = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg", "sqlite": "sqlite"}
# Seconds of the pause after the first error, and of the longest pause. Each further error doubles the pause.
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0

_monotonic = time.monotonic

logger = logging.getLogger("qflow_client")


def engine_of(url: str | URL) -> Engine:
    """Create an engine for a relay. The engine uses the driver that relays need, even if the URL names another driver.

    Args:
        url: URL of the database in the format of SQLAlchemy.

    Raises:
        SettingsError: the URL does not have this format, or the database is not supported.
    """
    try:
        made = make_url(url)
        name = made.get_backend_name()
        # Refuse a host with @, because it contains part of an unencoded password, which errors would show.
        if name in _DRIVERS and "@" not in (made.host or ""):
            return create_engine(made.set(drivername=_DRIVERS[name]))
    except (ArgumentError, ValueError):
        # Raise `SettingsError` below instead, because the text of this error contains the URL with its password.
        pass
    raise SettingsError(f"database={shown(str(url))}: use postgresql://user@host/name or sqlite:///path")


class OutboxRelay:
    """Publishes the committed messages of an outbox, in order for each ordering key, with its own `Producer`.

    Any number of relays can run for one outbox. On PostgreSQL they share the work. On SQLite one relay works, and the
    other relays wait. A relay works on its own thread. The thread runs during a ``with`` or ``async with`` block, while
    a task awaits `run`, or from `start` to `close`. Before the thread ends, it waits for missing confirms; see `close`.

    Args:
        database: URL of the database, or an engine of SQLAlchemy, for SQLite or for PostgreSQL with the driver psycopg.
        url: URL of the broker, or several URLs, as for a `Producer`.
        outbox: outbox whose tables the relay reads; ``None`` for tables with the names of ``Outbox()``.
        lease: on PostgreSQL, maximum seconds until another relay takes over the work of a suspended or disconnected
            relay. Another relay takes over the work of a killed relay in about a second. The default of the setting
            ``liveness`` is a sixth of the lease. ``reconnect_delay_max`` is at most a quarter of the lease.
        poll: maximum seconds between two checks for new rows if no ``NOTIFY`` comes.
        credentials: as for a `Producer`.
        settings: as for a `Producer`. A relay replaces `confirms`, `when_flowed`, `outbox` and `delivery_timeout`. It
            does not use `exchange` and `routing_key`, because each message has its own.
        keywords: single settings, as for a `Producer`, without these six.

    Raises:
        SettingsError: a setting is not allowed, or the database is not supported.
    """

    def __init__(
        self,
        database: Engine | str | URL,
        url: str | Sequence[str] | None = None,
        *,
        outbox: Outbox | None = None,
        lease: float = 30.0,
        poll: float = 1.0,
        credentials: Callable[[], Credentials] | None = None,
        settings: ProducerSettings | None = None,
        **keywords: Any,
    ) -> None:
        for name, value in (("lease", lease), ("poll", poll)):
            check_argument(name, value, isinstance(value, (int, float)), "a number of seconds")
        check_argument("outbox", outbox, outbox is None or isinstance(outbox, Outbox), "None or an Outbox")
        if not lease > 0 or not poll > 0:
            raise SettingsError(f"lease={lease!r}, poll={poll!r}: both must be more than 0 seconds")
        check_argument("credentials", credentials, credentials is None or callable(credentials), "None or callable")
        self._credentials = credentials
        forced: dict[str, Any] = {
            "confirms": True,
            "when_flowed": WhenFlowed.BLOCK,
            "outbox": None,
            "delivery_timeout": None,
        }
        for name in ("exchange", "routing_key"):
            if name in keywords:
                raise SettingsError(f"{name}={keywords[name]!r}: each message of the outbox has its own; leave it out")
        given = {"name": "relay", **keywords}
        if wrong := [name for name in keywords if name in forced]:
            raise SettingsError(f"{wrong[0]}: a relay sets this itself; leave it out")
        if settings is not None and "name" not in keywords:
            given.pop("name")
        loaded = ProducerSettings.load(url, settings, **given, **forced)
        # Detect a lost connection to the broker early, so that another relay can take over within the lease.
        liveness = lease / 6 if loaded.liveness is None else loaded.liveness
        # A producer must try more than once to reconnect within half of the lease, which is the limit of a tenure.
        longest = min(loaded.reconnect_delay_max, lease / 4)
        self._settings = loaded.replace(liveness=liveness, reconnect_delay_max=longest)
        if isinstance(database, AsyncEngine):
            raise SettingsError(
                "database: an asynchronous engine works only in its event loop, but a relay works in a thread; "
                "give engine.url, or an engine with the driver psycopg"
            )
        self._owns_engine = not isinstance(database, Engine)
        self._engine = database if isinstance(database, Engine) else engine_of(database)
        if self._engine.dialect.name not in _SESSIONS:
            raise SettingsError(f"database {self._engine.dialect.name!r}: use PostgreSQL or SQLite")
        if self._engine.dialect.name == "postgresql" and self._engine.dialect.driver != "psycopg":
            raise SettingsError(
                f"database: a relay needs the driver psycopg for PostgreSQL, not {self._engine.dialect.driver}; "
                'give engine.url, or create_engine("postgresql+psycopg://…")'
            )
        self._tables = (outbox or Outbox()).tables
        self._lease = lease
        self._poll = poll
        self._metrics = RelayMetrics(self._settings.name, Backlog(self._engine, self._tables).read)
        self.counts = RelayCounts(self._metrics)
        #: The last error, after which the relay starts again; ``None`` while the relay works.
        self.error: Exception | None = None
        self._tenure: Tenure | None = None
        self._producer: Producer | None = None
        self._waker: Waker | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        # Done when the thread has ended.
        self._ended: Future[None] = Future()

    @property
    def partitions(self) -> frozenset[int]:
        """The partitions of this relay. A single relay has all 16, and a relay that cannot work has none."""
        tenure = self._tenure
        return frozenset(() if tenure is None else tenure.mine)

    @property
    def is_ready(self) -> bool:
        """Whether the relay can work: it has a producer, a database that answers, and no error."""
        tenure = self._tenure
        return tenure is not None and self.error is None and tenure.silence <= self._lease

    @property
    def name(self) -> str:
        """The setting ``name``. The default is ``"relay"``."""
        return self._settings.name

    def health(self) -> Health:
        """The health of the relay. `Health.state` is ``"disconnected"`` if the database or the broker is not connected.

        `qflow_client.health.asgi_readiness` accepts a relay in place of a producer.
        """
        producer, error, tenure = self._producer, self.error, self._tenure
        if self._stopping.is_set() or self._thread is None:
            return Health("closed", ("the relay is not running",), None, 0, 0, spills=False)
        if producer is None:
            words = "the relay is starting" if error is None else hide_password(_words(error))
            return Health("disconnected", (words,), None, 0, 0, spills=False)
        if tenure is not None and tenure.silence > self._lease:
            words = f"the database has not answered for {tenure.silence:.3g} s"
            return Health("disconnected", (words,), None, 0, 0, spills=False)
        return producer.health()

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: the relay was started before.
        """
        if self._thread is not None:
            raise RuntimeError("a relay can be started only once; make another relay")
        self._metrics.begin()
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, args=(self._waker,), name="qflow-outbox-relay", daemon=True)
        self._thread.start()

    def close(self, timeout: float | None = None) -> bool:
        """Stop publishing. The thread waits for confirms for at most half of the lease, and then ends.

        Args:
            timeout: maximum seconds to wait for the end of the thread; ``None`` for no limit. If the thread has not
                ended within this time, the result is False.
        """
        self._stop()
        if self._thread is None:
            return True
        self._thread.join(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        return not self._thread.is_alive()

    def _stop(self) -> None:
        self._stopping.set()
        if self._waker is not None:
            self._waker.wake()

    async def run(self) -> None:
        """Start the relay, and wait until the task is cancelled or `close` is called.

        A cancelled task waits for the end of the relay, as ``async with`` does. If the task is cancelled again, it
        stops waiting, and the relay ends by itself.

        Raises:
            RuntimeError: the relay was started before.
        """
        async with self:
            await self._wait_for_end(None)

    async def _wait_for_end(self, timeout: float | None) -> bool:
        """Wait for the thread without blocking the event loop. Return True if the thread has ended."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def report(_: Future[None]) -> None:
            # If the waiting task was cancelled, the loop may be closed, and `call_soon_threadsafe` raises RuntimeError.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(ended.set)

        self._ended.add_done_callback(report)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await ended.wait()
        return ended.is_set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._report_end(self.close(2 * self._lease))

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *about: Any) -> None:
        self._stop()
        self._report_end(await self._wait_for_end(2 * self._lease))

    def _report_end(self, has_ended: bool) -> None:
        # If the database does not answer, the thread's query may last until the operating system ends the connection.
        if not has_ended:
            logger.warning(
                "outbox relay: its thread has not ended after %g s, and continues until its last call returns",
                2 * self._lease,
            )

    def _run(self, waker: Waker) -> None:
        pause = _FIRST_PAUSE
        try:
            while not self._stopping.is_set():
                began = _monotonic()
                try:
                    self._work(waker)
                except Exception as error:
                    self.error = error
                    logger.warning("outbox relay: %s; the relay starts again", _words(error))
                if _monotonic() - began > 2 * _LONGEST_PAUSE:
                    pause = _FIRST_PAUSE
                self._stopping.wait(pause * random.uniform(0.75, 1.25))
                pause = min(_LONGEST_PAUSE, 2 * pause)
        finally:
            try:
                self._metrics.end()
                waker.close()
                if self._owns_engine:
                    self._engine.dispose()
            finally:
                self._ended.set_result(None)

    def _work(self, waker: Waker) -> None:
        session: Session = _SESSIONS[self._engine.dialect.name](self._engine, self._tables, self._lease)
        tenure = Tenure(
            session,
            self.counts,
            self._metrics,
            waker,
            lease=self._lease,
            poll=self._poll,
            is_stopping=self._stopping.is_set,
        )
        producer: Producer | None = None
        try:
            producer = Producer(settings=self._settings, on_delivery=tenure.settled, credentials=self._credentials)
            self.counts.count(tenures=1)
            self._tenure, self._producer, self.error = tenure, producer, None
            tenure.run(producer)
        finally:
            self._tenure = self._producer = None
            tenure.end(producer)


def _words(error: Exception) -> str:
    """Return an error's text for the log: one line of a database error, because further lines may contain data."""
    if isinstance(error, QflowError):
        return str(error)
    origin = getattr(error, "orig", None) or error
    lines = str(origin).splitlines()
    return f"{type(origin).__name__}: {lines[0] if lines else ''}"
