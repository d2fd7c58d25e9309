"""The thread that does for a producer with an outbox what must keep neither senders nor the I/O waiting."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from qflow_client.logs import log
from qflow_client.outbox import Outbox, OutboxError, StoredMessage
from qflow_client.receipt import Receipt
from qflow_client.settings import ProducerSettings
from qflow_client.storing import Plan, StoringProtocol

__all__ = ["Storage", "StoringStep"]

# Seconds in which what is settled gathers before it leaves the disk, if nobody commits before.
_GATHER = 0.05
# Messages, and bytes of them, that are read of the backlog at once.
_AT_ONCE = 500
_BYTES_AT_ONCE = 1 << 20
# Seconds after a failure before the next try.
_PAUSE = 1.0
# Seconds between two looks for messages that are too old, at the most and at the least, and looks in that time.
_LOOK_AT_MOST = 60.0
_LOOK_AT_LEAST = 0.05
_LOOKS = 8

#: A step of the protocol, at a time.
StoringStep = Callable[[StoringProtocol, float], None]


class Keeper:
    """Commits what is settled, and reads the backlog as `StoringProtocol.plan` has it.

    Rung as a waiter is woken, by either skin.

    Args:
        outbox: the outbox.
        protocol: the producer's state, of which it only looks at `plan`, `called` and the gate.
        deliver: has a step of the protocol taken where such steps are taken.
        committed: called after every commit with what is durable, and why it failed, if it did; ``None`` if nobody
            waits for that.
    """

    def __init__(
        self,
        outbox: Outbox,
        protocol: StoringProtocol,
        deliver: Callable[[StoringStep], None],
        committed: Callable[[int, Exception | None], None] | None,
    ) -> None:
        self._outbox = outbox
        self._protocol = protocol
        self._deliver = deliver
        self._committed = committed
        self._bell = threading.Lock()
        self._bell.acquire()
        # The plan that was tried last.
        self._tried: Plan | None = None
        # Whether a sender waits for the commit.
        self._urgent = False
        # Likewise a bell, for the end alone.
        self._end = threading.Event()
        age = protocol.settings.outbox_max_age
        self._period = -1.0 if age is None else min(_LOOK_AT_MOST, max(_LOOK_AT_LEAST, age / _LOOKS))
        protocol.keeper = self
        self._thread = threading.Thread(target=self._run, name=f"qflow-outbox {protocol.settings.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def set(self) -> None:
        """There is something to do."""
        try:
            self._bell.release()
        except RuntimeError:
            # It was rung, and not heard yet.
            return

    def done(self) -> bool:
        """It can be rung at any time."""
        return False

    def set_result(self, _result: None) -> None:
        """As `set`."""
        self.set()

    def commit_soon(self) -> None:
        """A sender waits for the commit."""
        self._urgent = True
        self.set()

    def stop(self, timeout: float) -> None:
        """End the thread.

        Args:
            timeout: seconds that it may take to end what it does.
        """
        self._end.set()
        self.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        look_at = time.monotonic() + self._period
        while not self._end.is_set():
            left = -1.0 if self._period < 0 else max(0.0, look_at - time.monotonic())
            rung = self._bell.acquire(timeout=left)
            protocol = self._protocol
            if self._period >= 0 and time.monotonic() >= look_at:
                look_at = time.monotonic() + self._period
                self._deliver(StoringProtocol.look_for_old)
            if not rung:
                continue
            if not self._urgent and protocol.plan is None and not protocol.controller.waiting:
                # Unless somebody has it that soon.
                self._bell.acquire(timeout=_GATHER)
            # Whoever notes anything from now on rings again.
            self._urgent = protocol.called = False
            try:
                self._work()
            except Exception as error:
                if self._end.is_set():
                    return
                known = None if isinstance(error, OutboxError) else error
                words = "%s: %s; it is tried again in %.3g s"
                log(logging.ERROR, words, protocol.settings.name, error, _PAUSE, error=known)
                if self._committed is not None:
                    self._committed(self._outbox.durable, error)
                self._end.wait(_PAUSE)
                self._deliver(lambda protocol, _now: protocol.refuse_plan())
                self.set()

    def _work(self) -> None:
        outbox, plan = self._outbox, self._protocol.plan
        if plan is self._tried:
            # It is on its way to the protocol.
            plan = None
        durable = outbox.commit()
        if self._committed is not None:
            self._committed(durable, None)
        if plan is not None:
            self._tried = plan
            batch = self._read(plan)
            self._deliver(lambda protocol, now: protocol.feed(plan, batch, now))
        elif not self._protocol.gate.is_open:
            # What has left may have made room.
            self._deliver(StoringProtocol.on_timer)

    def _read(self, plan: Plan) -> list[StoredMessage]:
        outbox = self._outbox
        batch = outbox.read(plan.after, _AT_ONCE, _BYTES_AT_ONCE)
        if plan.sends and batch:
            outbox.permit(batch[-1].sequence)
            outbox.commit()
        return batch


class Storage:
    """The outbox of a producer, the state that goes with it, and its thread.

    Args:
        settings: the producer's settings.
        take: has a step of the protocol taken where such steps are taken.
        committed: as for `Keeper`.
        options: as for `StoringProtocol`.

    Raises:
        OutboxInUse, OutboxError: as `Outbox`.
    """

    def __init__(
        self,
        settings: ProducerSettings,
        take: Callable[[StoringStep], None],
        committed: Callable[[int, Exception | None], None] | None = None,
        **options: Any,
    ) -> None:
        assert settings.outbox is not None
        self.outbox = Outbox(
            settings.outbox, max_bytes=settings.outbox_max_bytes, synchronous=settings.outbox_synchronous
        )
        try:
            self.protocol = StoringProtocol(settings, outbox=self.outbox, **options)
            self.keeper = Keeper(self.outbox, self.protocol, take, committed)
        except BaseException:
            self.outbox.close()
            raise

    def __len__(self) -> int:
        return self.outbox.left

    def start(self) -> None:
        """Begin with what was left."""
        self.keeper.start()

    def wait_durable(self, receipt: Receipt) -> None:
        """Return when all that was put until now is on disk.

        Args:
            receipt: of the last of it.

        Raises:
            OutboxError: it could not be written; the error has the receipt.
        """
        try:
            self.outbox.wait_durable(self.outbox.last)
        except OutboxError as error:
            error.receipt = receipt
            raise

    def close(self, timeout: float) -> None:
        """Commit, and let others have the outbox.

        Args:
            timeout: seconds that what goes on may take to end.
        """
        self.keeper.stop(timeout)
        try:
            self.outbox.close()
        except OutboxError as error:
            # What is settled and stays in the file is sent once more, and marked.
            log(logging.ERROR, "%s: %s", self.protocol.settings.name, error)
