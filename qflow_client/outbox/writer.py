"""`Writer` is the thread that commits and reads the outbox of a producer. So no step (`core.step`) waits for a disk.

The store wakes the thread with `Requests`. The thread then commits the noted changes of the outbox. If the store has
requested a part of the backlog (see `backlog`), the thread reads this part and feeds it to the store. If the part is to
be sent, the thread first notes on disk that the part may be written to a broker. The thread never changes the
producer's state itself. It passes a step to `deliver`, which runs the step with the producer's lock or on its loop.

While the thread uses the outbox, `take` marks the thread as inside a step. Otherwise a finalizer on this thread could
call `send`, and wait forever for a lock that this thread holds itself (E2).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from qflow_client.background import join
from qflow_client.guard import is_inside, take
from qflow_client.logs import log
from qflow_client.outbox.errors import OutboxError
from qflow_client.outbox.file import StoredMessage
from qflow_client.outbox.outbox import Outbox
from qflow_client.outbox.requests import ReadRequest
from qflow_client.outbox.store import OutboxStore
from qflow_client.settings import ProducerSettings

__all__ = ["StoreStep", "Writer", "close_outbox"]

# Seconds for which the thread waits before a commit, so that the commit deletes more settled messages at once.
_GATHER = 0.05
# The same wait in seconds if messages can be sent only after the commit. A longer wait would fill the window.
_GATHER_WAITED_FOR = 0.002
# Maximum number of messages, and maximum bytes, that are read from the backlog at once.
_BATCH = 500
_BATCH_BYTES = 1 << 20
# Seconds from a failed commit or read to the next try.
_PAUSE = 1.0
# The longest and the shortest time between two searches for messages that are too old, in seconds.
_SEARCH_MAX = 60.0
_SEARCH_MIN = 0.05
# The thread searches for messages that are too old this many times in `outbox_max_age` seconds.
_SEARCHES = 8

#: A step of the store. The argument is the time of `time.monotonic` in seconds.
StoreStep = Callable[[float], None]


def close_outbox(outbox: Outbox, name: str, timeout: float | None = None) -> None:
    """Close an outbox, unless it is closed, and log errors. Wait at most `timeout` seconds; ``None`` for no limit."""
    try:
        if is_inside():
            outbox.close(timeout)
        else:
            take(lambda: outbox.close(timeout))
    except OutboxError as error:
        # If settled messages stay in the file, the next producer sends them once more, marked as second copies.
        log(
            logging.ERROR,
            "%s: the outbox was not closed properly, so settled messages may be sent once more: %s",
            name,
            error,
        )


class Writer:
    """Commits the noted changes of an outbox, and reads its backlog on request.

    Args:
        deliver: runs a step of the store with the producer's lock, or on the producer's loop.
        committed: called after each try to commit and at the end, with the last sequence on disk, and any error.
    """

    #: The store, which makes the requests; set before `start`.
    store: OutboxStore

    def __init__(
        self,
        outbox: Outbox,
        settings: ProducerSettings,
        deliver: Callable[[StoreStep], None],
        committed: Callable[[int, Exception | None], None],
    ) -> None:
        self._outbox = outbox
        self._name = settings.name
        self._deliver = deliver
        self._committed = committed
        # A lock that `set` releases when the thread has a task.
        self._wake = threading.Lock()
        self._wake.acquire()
        # The last read request that the thread has tried to serve.
        self._tried: ReadRequest | None = None
        # Whether a caller waits for a requested commit.
        self._is_urgent = False
        self._end = threading.Event()
        # Failures before this time are not logged.
        self._quiet_until = -math.inf
        # When to search next for messages that are too old; ``None`` before `begin_searches`, and without searches.
        self._search_at: float | None = None
        # When a failed read is tried again; ``None`` without a failed read.
        self._retry_at: float | None = None
        age = settings.outbox_max_age
        # Seconds between two searches for messages that are too old; ``None`` for no searches.
        self._period = None if age is None else min(_SEARCH_MAX, max(_SEARCH_MIN, age / _SEARCHES))
        self._thread = threading.Thread(target=self._run, name=f"qflow-outbox {settings.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin_searches(self) -> None:
        """Start the regular searches for messages that are too old."""
        if self._period is not None:
            self._search_at = time.monotonic() + self._period
            self.set()

    def set(self) -> None:
        """Wake the thread, because there is a task."""
        try:
            self._wake.release()
        except RuntimeError:
            # The lock is released already: the thread was woken before, and has not run since then.
            return

    # An asyncio producer wakes the thread like a future, with the next two methods.

    def done(self) -> bool:
        """Return False: the thread can be woken at any time."""
        return False

    def set_result(self, _result: None) -> None:
        self.set()

    def commit_now(self) -> None:
        """Wake the thread for a commit without delay, because the caller waits for it."""
        self._is_urgent = True
        self.set()

    def stop(self, timeout: float) -> None:
        """Stop the thread, and wait at most `timeout` seconds for its end. At its end, the thread closes the outbox."""
        self._end.set()
        self.set()
        if self._thread.is_alive():
            join(self._thread, timeout)

    # The methods below run on the thread.

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            close_outbox(self._outbox, self._name)
            # Wake callers that wait for a commit. Otherwise they would wait until their deadlines.
            self._committed(self._outbox.durable, OutboxError("the producer was closed"))

    def _serve(self) -> None:
        while not self._end.is_set():
            times = [at for at in (self._search_at, self._retry_at) if at is not None]
            timeout = max(0.0, min(times) - time.monotonic()) if times else -1.0
            is_woken = self._wake.acquire(timeout=timeout)
            now = time.monotonic()
            if self._search_at is not None and now >= self._search_at and self._period is not None:
                self._search_at = now + self._period
                self._deliver(self.store.expire)
            if self._retry_at is not None and now >= self._retry_at:
                self._retry_at = None
                self._deliver(self.store.read_again)
            if not is_woken:
                continue
            if not self._is_urgent and self.store.requests.read is None and not self.store.has_waiting:
                self._gather()
            if not self.work():
                self._pause()
                self.set()

    def _gather(self) -> None:
        """Wait for a moment, so that one commit deletes more settled messages. A wake-up ends the wait."""
        if self._end.is_set():
            # If a wake-up was still pending, `stop` could not add another one that would end this wait.
            return
        if not self.store.waits_for_disk:
            self._wake.acquire(timeout=_GATHER)
        if self.store.waits_for_disk and not self._is_urgent:
            self._wake.acquire(timeout=_GATHER_WAITED_FOR)

    def _pause(self) -> None:
        """Wait after a failed commit. Return early if a caller waits for a commit, or at the end of the thread."""
        end = time.monotonic() + _PAUSE
        while not self._is_urgent and not self._end.is_set() and (left := end - time.monotonic()) > 0:
            self._wake.acquire(timeout=left)

    def work(self) -> bool:
        """Commit, and serve the read request if there is one. Return False if the commit has to be tried again."""
        requests = self.store.requests
        # Clear the flags before the commit, because a request during the commit wakes the thread again.
        self._is_urgent = requests.commit = False
        try:
            durable = take(self._outbox.commit)
        except Exception as error:
            if not self._end.is_set():
                self._log_failure(error)
            self._committed(self._outbox.durable, error)
            return False
        self._committed(durable, None)
        request = requests.read
        # Do not try a request twice: its result is on its way, or `read_again` will replace the request.
        if request is not None and request is not self._tried:
            self._tried = request
            self._read(request)
            is_looked_at = not self.store.waits_for_disk
        else:
            is_looked_at = not (self.store.waits_for_disk or self.store.is_held)
        if not is_looked_at:
            # Messages that waited for this commit can be sent now, and the deletion of messages may have made room.
            self._deliver(self.store.look_again)
        return True

    def _read(self, request: ReadRequest) -> None:
        """Read a part of the backlog for the store. If the read fails, set the time of the next try."""
        outbox, store = self._outbox, self.store
        known = outbox.damaged

        def read() -> list[StoredMessage]:
            batch = outbox.read(request.after, _BATCH, _BATCH_BYTES)
            if request.sends and batch:
                outbox.permit(batch[-1].sequence)
                outbox.commit()
            return batch

        try:
            batch = take(read)
        except Exception as error:
            # Do not raise the error, because commits are still possible.
            if not self._end.is_set():
                self._log_failure(error)
                self._retry_at = time.monotonic() + _PAUSE
            return
        damaged = {sequence: why for sequence, why in outbox.damaged.items() if sequence not in known}
        for sequence, why in damaged.items():
            words = "%s: %s: message %d is damaged, and set aside: %s; see qflow outbox ls and qflow outbox drop"
            log(logging.ERROR, words, self._name, outbox.path, sequence, why)
        self._deliver(lambda now: store.feed(request, batch, damaged, now))

    def _log_failure(self, error: Exception) -> None:
        now = time.monotonic()
        if now < self._quiet_until:
            return
        self._quiet_until = now + _PAUSE
        known = None if isinstance(error, OutboxError) else error
        words = "%s: %s; the next try is in %.3g s"
        log(logging.ERROR, words, self._name, error, _PAUSE, error=known)
