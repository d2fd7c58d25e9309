"""The producers and the consumer of the demonstration, in processes of their own as they would be in earnest."""

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

# Seconds between two reports.
_PERIOD = 0.1
# Seconds that a producer which has sent everything waits to be unflowed.
_PATIENCE = 60.0
# Messages that the consumer acknowledges at once, and how many it may have.
_BATCH = 10
_PREFETCH = 40
# The beginning of a message id; the number of the flight follows.
_ID = "flight-"


class Failed(Exception):
    """Sent in place of a report: the process cannot go on."""


def _run(reports: Connection, body: Callable[[], None]) -> None:
    # Ctrl-C goes to the whole group of processes; the one in the foreground decides what it means for the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        body()
    except (BrokenPipeError, EOFError):
        # Nobody is there any more to report to.
        return
    except Exception as error:
        reports.send(Failed(f"{type(error).__name__}: {error}"))
        raise


class _Feeder(threading.Thread):
    """A producer that sends from a supply which it shares with others, until there is no more.

    Args:
        url: of the broker.
        queue: where to.
        capacity: of the producer.
        take: gives the next record; ``None`` if there is no more.
    """

    def __init__(self, url: str, queue: str, capacity: int, take: Callable[[], Record | None]) -> None:
        name = f"producer-{capacity}"
        super().__init__(name=name, daemon=True)
        self._take = take
        self._begun = ProducerTally(name, capacity)
        self._sent = 0
        self._checksum = 0
        # Counted on the producer's callback thread.
        self._confirmed = 0
        # What ended it early; None if nothing did.
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
            # Confirmed does not mean unflowed: that takes the consumer.
            self._producer.wait_unflowed(_PATIENCE)
        except Exception as error:
            # Raised where the process ends, and not only in this thread.
            self.error = error

    def report(self) -> ProducerTally:
        """How far it is."""
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
        """How far it got; it has ended, and so does the producer."""
        report = self.report()
        self._producer.close(timeout=1.0)
        # Only now all callbacks have been called.
        return replace(report, confirmed=self._confirmed)


def produce(url: str, queue: str, capacities: Sequence[int], messages: int, reports: Connection) -> None:
    """Publish flights with one producer for every capacity, each as fast as it may.

    Args:
        url: of the broker.
        queue: where to.
        capacities: of the producers.
        messages: how many flights, all producers together.
        reports: takes a list of `ProducerTally` ten times a second, and is closed after the last.
    """
    # The demonstration is the same whatever the settings of the user's own producers.
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
                feeder.join(_PERIOD)
                reports.send([each.report() for each in feeders])
        for feeder in feeders:
            if feeder.error is not None:
                raise feeder.error
        reports.send([feeder.last_report() for feeder in feeders])


class Ledger:
    """What has come, by number.

    Args:
        messages: how many there will be, numbered from 1.
    """

    def __init__(self, messages: int) -> None:
        # How often each number came; more than twice is twice.
        self._times = bytearray(messages + 1)
        self._consumed = 0
        self._repeated = 0
        self._unknown = 0
        self._checksum = 0

    def enter(self, message_id: str | None, body: bytes) -> None:
        """Take note of a message."""
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
        """What has come so far; what is missing is only counted at last."""
        missing = self._times.count(0) - 1 if last else 0
        return ConsumerTally(self._consumed, self._repeated, missing, self._unknown, self._checksum)


def consume(url: str, queue: str, messages: int, rate: float, reports: Connection) -> None:
    """Take messages from a queue, not faster than told, and acknowledge them in batches.

    Args:
        url: of the broker.
        queue: where from.
        messages: how many there will be.
        rate: messages per second, on average.
        reports: takes a `ConsumerTally` ten times a second; whatever comes from the other end is the sign to begin, and
            after that the sign to end.
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
    for method, properties, body in channel.consume(queue, inactivity_timeout=_PERIOD):
        if method is not None:
            assert properties is not None
            assert body is not None
            assert method.delivery_tag is not None
            ledger.enter(properties.message_id, body)
            taken += 1
            unacked += 1
            last_tag = method.delivery_tag
        # Nothing came for a while: whoever waits for room must not wait for a batch to be full.
        if unacked == _BATCH or (method is None and unacked):
            # It keeps to a schedule from the beginning, so that what a busy machine costs does not add up.
            ahead = taken / rate - (time.monotonic() - begun)
            if ahead > 0:
                time.sleep(ahead)
            channel.basic_ack(last_tag, multiple=True)
            unacked = 0
        now = time.monotonic()
        if now - reported >= _PERIOD:
            reported = now
            if method is None and reports.poll():
                reports.recv()
                break
            reports.send(ledger.report(last=False))
    reports.send(ledger.report(last=True))
    connection.close()
