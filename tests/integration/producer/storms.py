"""Programs in which signal handlers, finalizers and log handlers use a producer at any moment.

Each program prints the number of admitted messages. A call from a handler is called an inside call.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from qflow_client import AsyncProducer, FlowControlTimeout, Outcome, Producer, ProducerFlowed, Receipt, guard
from qflow_client.logs import flush_logs

CAPACITY = 50
# Minimum number of inside calls and of messages in each program.
ENOUGH = 50
# Seconds from one signal to the next.
_PERIOD = 130e-6


class Storm:
    """Handlers and finalizers that run during calls of the producer.

    Args:
        kind: ``"signal"``: a signal handler raises while `armed` is set. ``"gc"``: finalizers send. ``"both"``: both.
            ``"log"``: a signal handler and a log handler send.
        send: function that sends a message without waiting.
        receipts: list to which the receipts are added.
    """

    def __init__(self, kind: str, send: Callable[[bytes], Receipt], receipts: list[Receipt]) -> None:
        self.kind = kind
        self.armed = False
        self.nested = 0
        self.errors: list[BaseException] = []
        self._send = send
        self._receipts = receipts
        self._is_over = False

    def send_from_inside(self) -> None:
        """Send a message from a handler or a finalizer."""
        if self._is_over:
            return
        self.nested += 1
        try:
            self._receipts.append(self._send(b"inside"))
        except ProducerFlowed:
            # The message was not admitted, because it would have had to wait.
            pass
        except Exception as error:
            self.errors.append(error)

    @property
    def is_enough(self) -> bool:
        """Whether there were enough inside calls. The kind ``signal`` makes no inside calls."""
        return self.kind == "signal" or self.nested >= ENOUGH

    def begin(self) -> None:
        """Start the signals and the finalizers."""
        if self.kind != "gc":
            signal.signal(signal.SIGALRM, self._on_signal)
            signal.setitimer(signal.ITIMER_REAL, _PERIOD, _PERIOD)
        if self.kind in ("gc", "both"):
            gc.set_threshold(5)
        if self.kind == "log":
            logging._lock = _LockOfLogging(self.errors)  # type: ignore[attr-defined]  # private, and the one lock that matters
            logger = logging.getLogger("qflow_client")
            logger.addHandler(_Sender(self))
            logger.setLevel(logging.DEBUG)
            logger.propagate = False

    def litter(self) -> None:
        """Create garbage whose finalizer sends a message."""
        if self.kind in ("gc", "both"):
            Litter(self)

    def end(self) -> None:
        """Stop the signals and the finalizers."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        gc.set_threshold(700, 10, 10)
        self._is_over = True
        # The thread of the log may have sent a message, and not yet added the receipt.
        assert flush_logs(20)

    def _on_signal(self, *_: object) -> None:
        if self.kind == "log":
            self.send_from_inside()
        elif self.armed:
            raise KeyboardInterrupt


class _LockOfLogging:
    """Replaces the lock of `logging`. A protocol step must not take it, because its holder may wait for the step.

    Args:
        errors: list to which an error is added for each step that takes the lock.
    """

    def __init__(self, errors: list[BaseException]) -> None:
        self._lock = threading.RLock()
        self._errors = errors

    def acquire(self) -> None:
        if threading.get_ident() in guard._inside:
            self._errors.append(AssertionError("a step takes the lock of logging"))
        self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Sender(logging.Handler):
    """A log handler that sends a message for each log record."""

    def __init__(self, storm: Storm) -> None:
        super().__init__()
        self._storm = storm

    def emit(self, record: logging.LogRecord) -> None:
        self._storm.send_from_inside()


class Litter:
    """Garbage that only the garbage collector finds, because it refers to itself."""

    def __init__(self, storm: Storm) -> None:
        self.me = self
        self._storm = storm

    def __del__(self) -> None:
        self._storm.send_from_inside()


def check(producer: Any, receipts: list[Receipt], storm: Storm) -> None:
    """Check that no number was used twice, that all receipts are confirmed, and that no message waits."""
    assert not storm.errors, storm.errors
    assert all(receipt.outcome is Outcome.CONFIRMED for receipt in receipts)
    protocol = producer._protocol
    numbers = [receipt._number for receipt in receipts]
    assert len(set(numbers)) == len(numbers)
    admitted = protocol.admission.admitted
    assert len(numbers) <= admitted
    left = protocol.window.used, protocol.controller.waiting, protocol.unwritten, list(protocol.line.tickets)
    assert left == (0, 0, 0, []), left
    if storm.kind != "signal":
        # Only an interrupt may lose a receipt, because the caller does not get it.
        assert storm.kind == "both" or sorted(numbers) == list(range(1, admitted + 1))
    print(admitted, flush=True)


def threads(url: str, kind: str, seconds: str) -> None:
    """Use a `Producer` on two threads. The main thread gets the signals."""
    producer = Producer(url, routing_key="q", capacity=CAPACITY)
    receipts: list[Receipt] = []
    storm = Storm(kind, producer.send_nowait, receipts)
    until = time.monotonic() + float(seconds)
    others: list[Receipt] = []

    def goes_on() -> bool:
        return time.monotonic() < until or not storm.is_enough or len(others) < ENOUGH

    def work() -> None:
        while goes_on():
            storm.litter()
            others.append(producer.send(b"other", timeout=20))
            assert producer.unsettled <= CAPACITY

    other = threading.Thread(target=work)
    other.start()
    storm.begin()
    while goes_on():
        try:
            storm.litter()
            storm.armed = True
            receipts.append(producer.send(b"own", timeout=0.001))
            storm.armed = False
        except (FlowControlTimeout, KeyboardInterrupt):
            storm.armed = False
    other.join()
    storm.end()
    # If a second interrupt has ended a waiting send, its message may be admitted during the first flush.
    while producer._protocol.line.tickets or producer.unsettled:
        producer.flush(timeout=20)
    check(producer, receipts + others, storm)
    producer.close()


def tasks(url: str, kind: str, seconds: str) -> None:
    """Use an `AsyncProducer` in two tasks. Signals raise only inside `send_nowait`, because asyncio tolerates none."""

    async def main() -> None:
        producer = await AsyncProducer(url, routing_key="q", capacity=CAPACITY).connect()
        receipts: list[Receipt] = []
        storm = Storm(kind, producer.send_nowait, receipts)
        until = time.monotonic() + float(seconds)

        def goes_on() -> bool:
            return time.monotonic() < until or not storm.is_enough or len(receipts) < ENOUGH

        async def wait() -> None:
            while goes_on():
                storm.litter()
                receipts.append(await producer.send(b"other", timeout=20))
                assert producer.unsettled <= CAPACITY

        other = asyncio.create_task(wait())
        storm.begin()
        while goes_on():
            try:
                storm.litter()
                storm.armed = True
                receipts.append(producer.send_nowait(b"own"))
                storm.armed = False
            except (ProducerFlowed, KeyboardInterrupt):
                storm.armed = False
            await asyncio.sleep(0)
        await other
        storm.end()
        await producer.flush(timeout=20)
        check(producer, receipts, storm)
        await producer.close()

    asyncio.run(main())


if __name__ == "__main__":
    # After a deadlock, print where each thread waits.
    faulthandler.dump_traceback_later(100, exit=True)
    globals()[sys.argv[1]](*sys.argv[2:])
