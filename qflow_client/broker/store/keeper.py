"""Opens the file of the message store, restores its contents, and writes the batches of the `Journal`.

The `Store` writes on one thread, and a `BodyReader` reads on another thread, so no read waits for a commit. The event
loop waits for neither thread. While one batch is written, the journal collects changes for the next batch. So a slow
disk leads to larger batches. If a batch cannot be written, the `Keeper` raises an alarm and repeats the write. Until
the write succeeds, the broker confirms no persistent message that stays in a durable queue.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from typing import TypeVar

from qflow_client.broker.core.errors import AmqpError
from qflow_client.broker.core.logs import get_logger
from qflow_client.broker.core.virtualhost import VirtualHost
from qflow_client.broker.store.diskthread import DiskThread
from qflow_client.broker.store.errors import StoreError
from qflow_client.broker.store.journal import Batch, Journal
from qflow_client.broker.store.recovery import Recovery
from qflow_client.broker.store.store import BodyReader, Store

__all__ = ["Keeper"]

_log = get_logger(__name__)

_Result = TypeVar("_Result")


def free_space(folder: Path) -> int:
    """Return the free bytes of a folder's disk."""
    return shutil.disk_usage(folder).free


class Keeper:
    """Opens the store of a broker, and writes the batches of the `Journal`, one at a time.

    Args:
        synchronous: the failures that a commit survives, see `Synchronous`.
        disk_free_limit: minimum free bytes on the disk of the store; 0 for no limit.
        on_done: called on the loop after each written batch, and after each attempt to read bodies.
        on_trouble: called on the loop when an alarm begins or ends. The arguments are the name of the alarm (``disk``
            or ``disk_space``) and the reason. The reason is ``None`` when the alarm ends.
    """

    #: Maximum number of damaged rows that one log message lists.
    NAMED = 20
    #: Seconds after which a failed write or read is repeated.
    RETRY = 1.0
    #: Seconds between two checks of the free disk space.
    LOOK = 1.0
    #: If writes fail while the broker stops, the keeper repeats them for about this number of seconds.
    STOP_GRACE = 2.0
    #: Maximum seconds for which a stopping broker waits for one batch, or for the close of a file.
    STOP_TIMEOUT = 30.0
    #: Maximum number of messages that are restored in one iteration of the loop.
    _AT_ONCE = 100

    def __init__(
        self,
        path: Path,
        synchronous: str,
        disk_free_limit: int,
        host: VirtualHost,
        journal: Journal,
        on_done: Callable[[], None],
        on_trouble: Callable[[str, str | None], None],
    ) -> None:
        self._path = path
        self._synchronous = synchronous
        self._disk_free_limit = disk_free_limit
        self._host = host
        self._journal = journal
        self._on_done = on_done
        self._on_trouble = on_trouble
        self._store: Store | None = None
        self._thread: DiskThread | None = None
        self._writing: asyncio.Task[None] | None = None
        # The task that reads bodies; None if no read is running. The first read sets `_reader_thread` and `_reader`.
        self._reading: asyncio.Task[None] | None = None
        self._reader_thread: DiskThread | None = None
        self._reader: BodyReader | None = None
        self._is_troubled = False
        # The futures from `when_durable` that are not done yet.
        self._waiting: set[Future[None]] = set()
        # The task that checks the free disk space; None before `watch`, and always None if `disk_free_limit` is 0.
        self._looking: asyncio.Task[None] | None = None
        # Whether the alarm ``disk_space`` is raised: too few bytes are free, or their number cannot be read.
        self._lacks_space = False

    async def start(self) -> None:
        """Open the store, and restore its contents to the virtual host.

        Raises:
            StoreError: the store cannot be opened or read. The error contains the reason.
        """
        self._thread = DiskThread("qflow-store")
        try:
            await self._recover(await self._run(self._open))
        except BaseException:
            await self._end()
            raise

    async def _run(self, function: Callable[..., _Result], *values: object) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *values)

    def _open(self) -> Store:
        # Keep the store here, so that `_end` closes it even if `start` was cancelled meanwhile.
        self._store = Store(self._path, synchronous=self._synchronous)
        # The absolute path, for files that are opened later.
        self._path = self._store.path
        return self._store

    async def _recover(self, store: Store) -> None:
        found = await self._run(store.topology)
        host, recovery = self._host, Recovery(self._host, self._journal, time.time)
        self._journal.go_on_from(found.last)
        try:
            recovery.recover_topology(found)
        except AmqpError as error:
            raise StoreError(f"{store.path}: the broker refuses a stored declaration: {error}") from error
        messages = store.messages()
        while page := await self._run(lambda: list(islice(messages, self._AT_ONCE))):
            recovery.recover_messages(page)
            host.relieve()
        await self._run(store.set_aside_messages, recovery.lost, "none of its queues exists")
        await self._run(store.end_deletions, recovery.leftovers)
        recovery.finish()
        self._journal.damaged = len(store.damaged)
        if store.damaged:
            told = "; ".join(store.damaged[: self.NAMED])
            _log.error("%s: %d rows are damaged and were set aside: %s", store.path, len(store.damaged), told)
        queues, restored = len(found.queues), recovery.restored
        if restored or queues:
            _log.info("%s: recovered %d durable queues and %d messages", store.path, queues, restored)

    async def watch(self) -> None:
        """If `disk_free_limit` is not 0, check the free disk space now, and then every `LOOK` seconds."""
        if self._disk_free_limit:
            await self._look()
            self._looking = asyncio.get_running_loop().create_task(self._go_on_looking())

    async def _go_on_looking(self) -> None:
        while True:
            await asyncio.sleep(self.LOOK)
            await self._look()

    async def _look(self) -> None:
        folder, limit = self._path.absolute().parent, self._disk_free_limit
        try:
            free = await self._run(free_space, folder)
        except Exception as error:
            reason = f"{folder}: the free space cannot be read: {error}"
            lacks_space = True
        else:
            reason = f"{free} bytes are free in {folder}, at least {limit} are needed"
            # The alarm ends at 9/8 of the limit. So free space near the limit does not raise the alarm repeatedly.
            lacks_space = free < (limit + limit // 8 if self._lacks_space else limit)
        if lacks_space is not self._lacks_space:
            self._lacks_space = lacks_space
            _log.warning(
                "%s; clients are %s", reason, "blocked" if lacks_space else "no longer blocked for this reason"
            )
            self._on_trouble("disk_space", reason if lacks_space else None)

    def flush(self) -> None:
        """Start the task that writes changes, and the task that reads bodies. Skip a task that runs or has no work."""
        if self._writing is None and self._journal.is_dirty:
            self._writing = asyncio.get_running_loop().create_task(self._write())
        if self._reading is None and self._journal.wants:
            self._reading = asyncio.get_running_loop().create_task(self._read())

    def when_durable(self, *, topology_only: bool = False) -> Future[None]:
        """Return a future that is done when all changes so far are on disk. It fails if the broker stops earlier."""
        done: Future[None] = Future()
        # After this call the future cannot be cancelled, so `told` can always set its result.
        done.set_running_or_notify_cancel()

        def told() -> None:
            self._waiting.remove(done)
            done.set_result(None)

        if self._journal.when_durable(told, topology_only=topology_only):
            self._waiting.add(done)
        else:
            done.set_result(None)
        return done

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            if self._reader_thread is None:
                self._reader_thread = DiskThread("qflow-reader")
            while self._journal.wants:
                numbers = self._journal.take_wanted()
                try:
                    bodies = await loop.run_in_executor(self._reader_thread, self._bodies, numbers)
                    await self._set_aside([number for number, body in bodies.items() if body is None])
                except Exception as error:
                    self._log_error(error, "messages on disk wait until the store can be read")
                    bodies = {}
                if numbers and not bodies:
                    await asyncio.sleep(self.RETRY)
                self._journal.came(bodies)
                self._on_done()
        finally:
            self._reading = None

    async def _set_aside(self, numbers: Sequence[int]) -> None:
        if numbers and self._store is not None:
            _log.error("%s: messages are damaged; they are set aside and not delivered: %s", self._path, numbers)
            await self._run(self._store.set_aside_messages, numbers)

    def _bodies(self, numbers: Sequence[int]) -> dict[int, bytes | None]:
        if self._reader is None:
            self._reader = self._open_reader()
        return self._reader.read(numbers)

    def _open_reader(self) -> BodyReader:
        # Another file may have other messages with the same numbers.
        if self._store is not None:
            self._store.check_path()
        return BodyReader(self._path)

    def read_now(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """Read bodies on the calling thread. Return the bodies by message number, without damaged bodies.

        Raises:
            StoreError: the bodies cannot be read.
        """
        reader = self._open_reader()
        try:
            found = reader.read(numbers)
            damaged = [number for number, body in found.items() if body is None]
            if damaged:
                _log.error("%s: messages are damaged: %s", self._path, damaged)
            return {number: body for number, body in found.items() if body is not None}
        finally:
            reader.close()

    async def _write(self) -> None:
        assert self._store is not None
        try:
            while self._journal.is_dirty:
                batch = self._journal.take()
                delay = 0.0
                while True:
                    await asyncio.sleep(delay)
                    if await self._try(self._store, batch):
                        break
                    delay = self.RETRY
                self._journal.written_down()
                self._on_done()
        finally:
            self._writing = None

    async def _try(self, store: Store, batch: Batch) -> bool:
        try:
            await self._run(store.write, batch)
        except Exception as error:
            # Catch every exception, because this task must repeat the write: confirms wait for the batch.
            if not self._is_troubled:
                self._is_troubled = True
                self._on_trouble(
                    "disk",
                    self._log_error(
                        error,
                        "until the store can be written, persistent messages are not confirmed, and other changes, "
                        "such as declarations, are lost if the broker ends",
                    ),
                )
            return False
        if self._is_troubled:
            self._is_troubled = False
            _log.warning("%s: the store can be written again", store.path)
            self._on_trouble("disk", None)
        return True

    def _log_error(self, error: Exception, consequence: str) -> str:
        """Log an error, and return its reason. The log has a traceback if the error is not a `StoreError`."""
        is_known = isinstance(error, StoreError)
        reason = str(error) if is_known else f"{self._path}: {error!r}"
        _log.error("%s; %s", reason, consequence, exc_info=None if is_known else error)
        return reason

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        try:
            self.flush()
            if self._writing is not None:
                await self._finish(self._writing)
        finally:
            await self._end()
            for each in self._waiting:
                each.set_exception(StoreError(f"{self._path}: the broker ended before the change was on disk"))
            self._waiting.clear()

    async def _finish(self, writing: asyncio.Task[None]) -> None:
        """Wait until the task `writing` has written all changes. If writes fail or hang, cancel the task instead."""
        loop = asyncio.get_running_loop()
        batches, since = self._journal.batches, loop.time()
        while True:
            # Wait in short periods, and check after each period whether writes have begun to fail.
            if (await asyncio.wait([writing], timeout=min(self.STOP_GRACE, self.STOP_TIMEOUT)))[0]:
                return
            if self._journal.batches != batches:
                batches, since = self._journal.batches, loop.time()
            if self._is_troubled:
                why = "the store cannot be written"
            elif loop.time() - since >= self.STOP_TIMEOUT:
                why = f"nothing could be written for {self.STOP_TIMEOUT:g} s"
            else:
                continue
            _log.error(
                "%s: changes that are not on disk are lost, such as unconfirmed messages and new declarations: %s",
                self._path,
                why,
            )
            writing.cancel()
            await asyncio.wait([writing])
            return

    async def _end(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        try:
            if self._reader_thread is not None:
                await self._close(self._reader_thread, self._close_reader)
                self._reader_thread = None
        finally:
            if self._thread is not None:
                await self._close(self._thread, self._close_store)
                self._thread = None

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _close_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            if store.first_gone() == store.path:
                _log.error(
                    "%s: the file was deleted, moved or replaced, so the next broker will not find its queues and "
                    "messages",
                    store.path,
                )
            store.close()

    async def _close(self, thread: DiskThread, close: Callable[[], None]) -> None:
        """Call `close` on `thread`, then end it. If the disk does not answer, stop waiting after `STOP_TIMEOUT`."""
        closing = asyncio.wrap_future(thread.submit(close))
        thread.shutdown(wait=False)
        if (await asyncio.wait([closing], timeout=0.0 if thread.hangs(self.STOP_TIMEOUT) else self.STOP_TIMEOUT))[0]:
            closing.result()
            return
        _log.error(
            "%s: the disk does not answer; the file stays in use until it answers, or this process ends", self._path
        )
