"""The thread that does for a producer with an outbox what must keep neither senders nor the I/O waiting."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from qflow_client.logs import log
from qflow_client.outbox.errors import OutboxError
from qflow_client.outbox.outbox import Outbox
from qflow_client.outbox.store import Plan, StoringProtocol

__all__ = ["Keeper", "StoringStep"]

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
        # When a read that has failed is tried again; None if none has.
        self._retry_at: float | None = None
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
            times = [at for at in (look_at if self._period >= 0 else None, self._retry_at) if at is not None]
            left = max(0.0, min(times) - time.monotonic()) if times else -1.0
            rung = self._bell.acquire(timeout=left)
            protocol = self._protocol
            if self._period >= 0 and time.monotonic() >= look_at:
                look_at = time.monotonic() + self._period
                self._deliver(StoringProtocol.look_for_old)
            if self._retry_at is not None and time.monotonic() >= self._retry_at:
                self._retry_at = None
                self._deliver(lambda protocol, _now: protocol.refuse_plan())
            if not rung:
                continue
            if not self._urgent and protocol.plan is None and not protocol.controller.waiting:
                # Unless somebody has it that soon.
                self._bell.acquire(timeout=_GATHER)
            if not self.work():
                self._end.wait(_PAUSE)
                self.set()

    def work(self) -> bool:
        """What is to be done once it was rung.

        Returns:
            False if nothing could be committed, and it is to be tried again.
        """
        protocol = self._protocol
        # Whoever notes anything from now on rings again.
        self._urgent = protocol.called = False
        try:
            durable = self._outbox.commit()
        except Exception as error:
            if not self._end.is_set():
                self._tell(error)
                if self._committed is not None:
                    self._committed(self._outbox.durable, error)
            return False
        if self._committed is not None:
            self._committed(durable, None)
        plan = protocol.plan
        # What was tried before is on its way to the protocol.
        if plan is not None and plan is not self._tried:
            self._tried = plan
            self._read(plan)
        elif not protocol.gate.is_open:
            # What has left may have made room.
            self._deliver(StoringProtocol.on_timer)
        return True

    def _read(self, plan: Plan) -> None:
        """Have the protocol fed, or asked once more in a while."""
        outbox = self._outbox
        known = outbox.damaged
        try:
            batch = outbox.read(plan.after, _AT_ONCE, _BYTES_AT_ONCE)
            if plan.sends and batch:
                outbox.permit(batch[-1].sequence)
                outbox.commit()
        except Exception as error:
            # Whoever waits for a commit has nothing to do with it: those go on.
            if not self._end.is_set():
                self._tell(error)
                self._retry_at = time.monotonic() + _PAUSE
            return
        damaged = {sequence: why for sequence, why in outbox.damaged.items() if sequence not in known}
        for sequence, why in damaged.items():
            words = "%s: %s: message %d is damaged, and set aside: %s; see qflow outbox ls, and drop"
            log(logging.ERROR, words, self._protocol.settings.name, outbox.path, sequence, why)
        self._deliver(lambda protocol, now: protocol.feed(plan, batch, now, damaged))

    def _tell(self, error: Exception) -> None:
        known = None if isinstance(error, OutboxError) else error
        words = "%s: %s; it is tried again in %.3g s"
        log(logging.ERROR, words, self._protocol.settings.name, error, _PAUSE, error=known)
