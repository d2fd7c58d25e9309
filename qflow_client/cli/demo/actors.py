"""The producers and the consumer of the demonstration. As in a real system, they do not run in the broker's process."""

from __future__ import annotations

import os
import signal
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import Connection

import pika

from qflow_client import Message, Producer, Receipt
from qflow_client.cli.demo.audit import ConsumerTally, ProducerTally
from qflow_client.cli.demo.flights import open_flights
from qflow_client.cli.records import Record

__all__ = ["Failed", "Ledger", "consume", "produce"]

# Seconds between two reports of a process.
_REPORT_PERIOD = 0.1
# Maximum seconds that a producer waits to be unblocked (unflowed) after its last message.
_UNFLOW_TIMEOUT = 60.0
# Number of messages that the consumer acknowledges together.
_BATCH = 10
_PREFETCH = 40
# A message id is this text followed by the number of the flight.
_ID = "flight-"


class Failed(Exception):
    """An error that a process sends instead of a report when the process has failed."""


def _run(reports: Connection, body: Callable[[], None]) -> None:
    # The terminal sends Ctrl-C to every process of the group. Ignore it, because the process of the command handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        body()
    except (BrokenPipeError, EOFError):
        # The process that reads the reports has ended.
        return
    except Exception as error:
        reports.send(Failed(f"{type(error).__name__}: {error}"))
        raise


class _Feeder(threading.Thread):
    """Sends records with its own producer. All feeders share `take`, which returns the next record or ``None``."""

    def __init__(self, url: str, queue: str, capacity: int, take: Callable[[], Record | None]) -> None:
        name = f"producer-{capacity}"
        super().__init__(name=name, daemon=True)
        self._take = take
        self._begun = ProducerTally(name, capacity)
        self._sent = 0
        self._checksum = 0
        # Number of confirmed messages. It needs no lock, because only the producer's callback thread changes it.
        self._confirmed = 0
        # The error that ended the thread early; None if there was no error.
        self.error: Exception | None = None
        self._producer = Producer(url, routing_key=queue, capacity=capacity, name=name, on_delivery=self._delivered)

    def _delivered(self, receipt: Receipt) -> None:
        self._confirmed += receipt.delivered

    def run(self) -> None:
        try:
            while (record := self._take()) is not None:
                assert isinstance(record.message, Message)
                body = record.message.body
                self._producer.send(Message(body, content_type="application/json", message_id=f"{_ID}{record.number}"))
                self._sent += 1
                self._checksum += zlib.crc32(body)
            self._producer.flush()
            # Wait, because the demonstration's audit fails if the producer is still blocked (flowed) at the end.
            self._producer.wait_unflowed(_UNFLOW_TIMEOUT)
        except Exception as error:
            self.error = error

    def report(self) -> ProducerTally:
        state = self._producer.flow_state
        return replace(
            self._begun,
            sent=self._sent,
            confirmed=self._confirmed,
            checksum=self._checksum,
            holds=tuple(dict.fromkeys(hold.kind for hold in state.holds)),
            times_flowed=state.times_flowed,
            seconds_flowed=dict(state.seconds_flowed),
        )

    def last_report(self) -> ProducerTally:
        """Close the producer, and return the last report. The thread must have ended."""
        report = self.report()
        self._producer.close(timeout=1.0)
        # The close has waited for all calls of `_delivered`, so the number of confirmed messages is now final.
        return replace(report, confirmed=self._confirmed)


def produce(url: str, queue: str, capacities: Sequence[int], messages: int, reports: Connection) -> None:
    """Publish flights with one producer for each capacity. Send a list of `ProducerTally` to `reports` every 0.1 s."""
    # Ignore the user's settings for producers, because they would change the demonstration.
    for name in tuple(os.environ):
        if name.startswith("QFLOW_"):
            del os.environ[name]
    _run(reports, lambda: _produce(url, queue, capacities, messages, reports))


def _produce(url: str, queue: str, capacities: Sequence[int], messages: int, reports: Connection) -> None:
    lock = threading.Lock()
    with open_flights() as source:
        flights = islice(source, messages)

        def take() -> Record | None:
            with lock:
                return next(flights, None)

        feeders = [_Feeder(url, queue, capacity, take) for capacity in capacities]
        for feeder in feeders:
            feeder.start()
        for feeder in feeders:
            while feeder.is_alive():
                feeder.join(_REPORT_PERIOD)
                reports.send([each.report() for each in feeders])
        for feeder in feeders:
            if feeder.error is not None:
                raise feeder.error
        reports.send([feeder.last_report() for feeder in feeders])


class Ledger:
    """Counts consumed, missing, repeated and unknown messages. The expected message numbers are 1 to `messages`."""

    def __init__(self, messages: int) -> None:
        # For each message number, 1 if the message has arrived, and 0 if it has not. Number 0 is not used.
        self._times = bytearray(messages + 1)
        self._consumed = 0
        self._repeated = 0
        self._unknown = 0
        self._checksum = 0

    def enter(self, message_id: str | None, body: bytes) -> None:
        self._consumed += 1
        self._checksum += zlib.crc32(body)
        digits = (message_id or "").removeprefix(_ID)
        number = int(digits) if digits.isascii() and digits.isdigit() else 0
        if not 0 < number < len(self._times):
            self._unknown += 1
        elif self._times[number]:
            self._repeated += 1
        else:
            self._times[number] = 1

    def report(self, *, last: bool) -> ConsumerTally:
        """Return the counts. If `last` is False, no message counts as missing, because more may arrive."""
        missing = self._times.count(0) - 1 if last else 0
        return ConsumerTally(self._consumed, self._repeated, missing, self._unknown, self._checksum)


def consume(url: str, queue: str, messages: int, rate: float, reports: Connection) -> None:
    """Consume at most `rate` messages per second on average, and send a `ConsumerTally` about every 0.1 s.

    The first object from the pipe `reports` starts the consumer. The second lets it stop when the queue is empty.
    """
    _run(reports, lambda: _consume(url, queue, messages, rate, reports))


def _consume(url: str, queue: str, messages: int, rate: float, reports: Connection) -> None:
    ledger = Ledger(messages)
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=_PREFETCH)
    reports.recv()
    begun = reported = time.monotonic()
    taken = unacked = last_tag = 0
    for method, properties, body in channel.consume(queue, inactivity_timeout=_REPORT_PERIOD):
        if method is not None:
            assert properties is not None
            assert body is not None
            assert method.delivery_tag is not None
            ledger.enter(properties.message_id, body)
            taken += 1
            unacked += 1
            last_tag = method.delivery_tag
        # If no message came for `_REPORT_PERIOD`, acknowledge a partial batch, because producers may wait for room.
        if unacked == _BATCH or (method is None and unacked):
            # Measure the rate since the start, so that the consumer makes up for delays.
            ahead = taken / rate - (time.monotonic() - begun)
            if ahead > 0:
                time.sleep(ahead)
            channel.basic_ack(last_tag, multiple=True)
            unacked = 0
        now = time.monotonic()
        if now - reported >= _REPORT_PERIOD:
            reported = now
            if method is None and reports.poll():
                reports.recv()
                break
            reports.send(ledger.report(last=False))
    reports.send(ledger.report(last=True))
    connection.close()
