"""`Storage` opens and closes the outbox of one producer, and connects its store and its writer to the producer."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from qflow_client.core.protocol import ProducerProtocol
from qflow_client.guard import take
from qflow_client.locks import Lock
from qflow_client.logs import log
from qflow_client.outbox.commits import CommitWaits
from qflow_client.outbox.errors import NotDurable, OutboxError
from qflow_client.outbox.outbox import Outbox
from qflow_client.outbox.spilled import Spilled
from qflow_client.outbox.store import OutboxStore
from qflow_client.outbox.writer import StoreStep, Writer, close_outbox
from qflow_client.receipt import Receipt
from qflow_client.settings import ProducerSettings

__all__ = ["GRACE", "Storage"]

#: Additional seconds for the disk after the deadline of a call. So an admitted message is usually on disk when `send`
#: returns, even with a timeout of 0.
GRACE = 0.5
# A call with fewer seconds until its deadline lets the writer commit, to return in time even if the disk hangs. Other
# calls commit on their own threads, which is faster: 10,500 against 3,700 messages a second with one thread.
_SHORT = 10.0
# Maximum seconds that an interrupted `open_in_time` waits for the end of `open`.
_INTERRUPTED = 0.2
# `close` waits for another process's lock only until this number of seconds before its timeout, to end in time.
_CLOSING = 0.2


class Storage:
    """Opens the outbox of a producer, attaches it to the producer's protocol, and closes it.

    The producer creates this object before it calls `open`. So `close` is possible even if `open` is interrupted.
    """

    #: The open outbox; set by `open`.
    outbox: Outbox
    #: The store, and the writer thread that serves its requests; set by `attach`.
    store: OutboxStore
    writer: Writer
    _deliver: Callable[[StoreStep], None]

    def __init__(self, settings: ProducerSettings) -> None:
        self._settings = settings
        #: The name of the producer.
        self.name = settings.name
        # Guards `_is_closed` and `_opened`, because one thread may close the outbox while another thread opens it.
        self._lock = Lock()
        self._is_closed = False
        self._opened: Outbox | None = None
        self._waits = CommitWaits()

    @property
    def patience(self) -> float:
        """Seconds to wait for `open`. If another process has locked the file, `open` itself ends before that time."""
        return min(self._settings.connect_timeout + GRACE, threading.TIMEOUT_MAX)

    def no_answer(self) -> OutboxError:
        """Return the error if `open` takes longer than `patience`."""
        return OutboxError(f"{self._settings.outbox_path}: the disk has not answered within {self.patience:.3g} s")

    def open(self) -> None:
        """Open the outbox. Any thread may call this once. Raise an `OutboxError` if `close` was called meanwhile."""
        settings = self._settings
        assert settings.outbox_path is not None
        outbox = Outbox(
            settings.outbox_path,
            max_bytes=settings.outbox_max_bytes,
            synchronous=settings.outbox_synchronous,
            timeout=settings.connect_timeout,
        )
        with self._lock:
            self._opened = outbox
            is_closed = self._is_closed
        if is_closed:
            outbox.close()
            raise OutboxError(f"{outbox.path}: its producer was closed")
        self.outbox = outbox

    def open_in_time(self) -> None:
        """Open the outbox on a separate thread, because a disk that does not answer must not stop the caller."""
        opening: Future[None] = Future()

        def run() -> None:
            try:
                self.open()
                opening.set_result(None)
            except BaseException as error:
                opening.set_exception(error)

        threading.Thread(target=run, name=f"qflow-outbox-open {self.name}", daemon=True).start()
        try:
            wait((opening,), self.patience)
        except BaseException:
            # After Ctrl-C, the next producer should not find the outbox in use.
            self.close(0.0)
            wait((opening,), _INTERRUPTED)
            raise
        if not opening.done():
            raise self.no_answer()
        opening.result()

    def attach(
        self,
        protocol: ProducerProtocol,
        spilled_type: type[Spilled],
        deliver: Callable[[StoreStep], None],
        committed: Callable[[int, Exception | None], None] | None = None,
    ) -> None:
        """Attach the outbox to the producer's protocol, which has no messages and executes no step (see `core.step`).

        `deliver` and `committed` are as for `Writer`; `committed` is ``None`` if only threads wait for commits.
        """

        def on_commit(durable: int, error: Exception | None) -> None:
            self._waits.committed(durable, error)
            if committed is not None:
                committed(durable, error)

        self._deliver = deliver
        self.writer = Writer(self.outbox, self._settings, deliver, on_commit)
        self.store = OutboxStore(protocol, self.outbox, spilled_type, self.writer, time.monotonic())
        self.writer.store = self.store
        # Start the writer now, because messages that are sent or spilled while the producer connects need commits.
        self.writer.start()

    def __len__(self) -> int:
        return 0 if self._opened is None or self._opened.is_lost else self._opened.left

    @property
    def spilled(self) -> tuple[Receipt, ...]:
        """The receipts of spilled messages that wait on disk, if other code still refers to these receipts."""
        return tuple(self.store.backlog.spilled.values()) if hasattr(self, "store") else ()

    def begin_searches(self) -> None:
        self.writer.begin_searches()

    def wait_durable(self, receipt: Receipt, deadline: float) -> None:
        """Wait until all messages that any thread has put before this call are on disk.

        Raises:
            NotDurable: the messages could not be written, or were not on disk `GRACE` seconds after the deadline (a
                time of `time.monotonic`). The error contains `receipt`, the receipt of the caller's last message.
        """
        outbox = self.outbox
        sequence = outbox.last
        if outbox.durable >= sequence:
            return
        timeout = max(0.0, deadline - time.monotonic()) + GRACE
        if timeout < _SHORT:
            wait = self._waits.begin(sequence)
            self.writer.commit_now()
            why = self._waits.end(wait, timeout)
            if why:
                raise NotDurable(f"{outbox.path}: {why}", receipt)
            return
        try:
            # Inside `take`, `send` in a signal handler or a finalizer raises an error if it would have to wait.
            # Otherwise this `send` might wait for the commit that it interrupts.
            take(lambda: outbox.wait_durable(sequence, None if timeout == math.inf else timeout))
        except OutboxError as error:
            raise NotDurable(str(error), receipt) from error
        if self.store.waits_for_disk:
            # Messages that waited for this commit can now be written to the broker.
            self._deliver(self.store.look_again)

    def commit(self, timeout: float) -> bool:
        """Let the writer commit all changes. Return True if they are on disk within `timeout` seconds."""
        wait = self._waits.begin(self.outbox.last)
        self.writer.commit_now()
        return not self._waits.end(wait, timeout)

    def close(self, timeout: float) -> None:
        """Commit, and release the outbox for other producers. A call before `open`, or a second call, is allowed.

        If the disk does not answer within `timeout` seconds, the outbox stays in use until the disk answers.
        """
        with self._lock:
            self._is_closed = True
            outbox = self._opened
        if outbox is None:
            return
        timeout = min(timeout, threading.TIMEOUT_MAX)
        outbox.stop_waiting(max(timeout / 2, timeout - _CLOSING))
        try:
            if hasattr(self, "writer"):
                self.writer.stop(timeout)
        finally:
            # Usually the writer has closed the outbox. But perhaps the writer was never started, or is still writing.
            close_outbox(outbox, self._settings.name, 0.0)
            count = self.store.report_unwritten() if hasattr(self, "store") else 0
            if count:
                log(
                    logging.ERROR,
                    "%s: %d messages could not be written to the outbox %s",
                    self._settings.name,
                    count,
                    outbox.path,
                )
