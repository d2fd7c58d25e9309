"""Incoming answers are coalesced for a while, and so are outgoing messages if a thread writes them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from qflow_client import AsyncProducer, Producer, connect, connect_async
from qflow_client.aio.aiormq_io import TapTransport
from qflow_client.amqp import coalescing
from qflow_client.broker import Broker
from tests.effort import COMPLETE

from .tools import PATIENCE, hold

# Seconds; far more than it ever is.
_GATHERS = 0.3


class _Gathering:
    """Has what comes after the first answers gather for a long time, once."""

    def __init__(self) -> None:
        self.began = 0.0
        self.begun = threading.Event()

    def delay(self, _size: int, _in_flight: int) -> float:
        if self.begun.is_set():
            return 0.0
        self.began = time.monotonic()
        self.begun.set()
        return _GATHERS

    def wait(self) -> None:
        assert self.begun.wait(PATIENCE)

    @property
    def over(self) -> bool:
        # Loops wait for half of it, and count from when their turn began; never by so much less.
        return time.monotonic() >= self.began + _GATHERS / 4


@pytest.fixture
def gathering(monkeypatch: pytest.MonkeyPatch) -> _Gathering:
    made = _Gathering()
    monkeypatch.setattr(coalescing, "delay", made.delay)
    return made


@pytest.fixture
def end_of_gathering(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What has gathered is not read before this is set, however long that takes."""
    end = threading.Event()
    read_on = TapTransport._read_on

    def wait(tapped: TapTransport) -> None:
        if end.is_set():
            read_on(tapped)
        else:
            tapped._gathers = tapped._loop.call_later(0.01, tapped._read_on)

    monkeypatch.setattr(TapTransport, "_read_on", wait)
    return end


@pytest.fixture
def delaying(make_producer: Callable[..., Producer], gathering: _Gathering) -> Producer:
    """A producer that has read the confirm of its message ``1``, and delays its next read."""
    producer = make_producer()
    assert producer.send(b"1").wait(PATIENCE)
    gathering.wait()
    return producer


@pytest.mark.parametrize("skin", ["asyncio", "uvloop"] if COMPLETE else ["asyncio"], indirect=True)
def test_a_message_is_sent_while_the_reading_of_confirms_is_delayed(
    end_of_gathering: threading.Event, delaying: Producer, broker: Broker
) -> None:
    try:
        receipt = delaying.send(b"2")
        broker.wait_until(lambda b: b.queue("q").depth == 2)
        assert not receipt.done
    finally:
        end_of_gathering.set()
    assert receipt.wait(PATIENCE)
    # From then on all is as it was.
    delaying.send(b"3").result(PATIENCE)


@pytest.mark.parametrize("skin", ["threads"], indirect=True)
def test_messages_sent_while_the_io_thread_delays_its_next_read_are_written_after_the_delay(
    delaying: Producer, gathering: _Gathering
) -> None:
    # They wake nobody.
    receipts = [delaying.send(b"%d" % number) for number in range(2, 5)]
    for receipt in receipts:
        receipt.result(PATIENCE)
    assert gathering.over


def test_a_channel_flow_that_was_read_after_a_delay_is_obeyed_immediately(
    delaying: Producer, broker: Broker, gathering: _Gathering
) -> None:
    hold(broker, delaying)
    assert gathering.over
    broker.flow(True)
    delaying.send(b"2", timeout=PATIENCE).result(PATIENCE)


def test_a_connection_that_is_lost_while_the_reading_of_confirms_is_delayed_is_replaced(
    delaying: Producer, broker: Broker, gathering: _Gathering
) -> None:
    broker.drop_connections()
    # The new connection knows nothing of the old one.
    receipts = [delaying.send(b"%d" % number, timeout=PATIENCE) for number in range(2, 5)]
    for receipt in receipts:
        receipt.result(PATIENCE)
    assert gathering.over
    assert {message.body for message in broker.messages("q")} == {b"1", b"2", b"3", b"4"}


def test_a_producer_closes_without_error_while_the_reading_of_confirms_is_delayed(
    delaying: Producer, broker: Broker
) -> None:
    receipt = delaying.send(b"2")
    delaying.close(timeout=PATIENCE)
    receipt.result()
    broker.wait_until(lambda b: not b.connections())


def test_the_reading_of_confirms_on_a_shared_pika_connection_is_not_delayed(
    broker: Broker, gathering: _Gathering
) -> None:
    with connect(broker.url) as connection, Producer(connection=connection, routing_key="q") as producer:
        for number in range(10):
            producer.send(b"%d" % number).result(PATIENCE)
    assert not gathering.begun.is_set()


def test_the_reading_of_confirms_on_a_shared_asyncio_connection_is_not_delayed(
    broker: Broker, gathering: _Gathering
) -> None:
    async def run() -> None:
        async with (
            await connect_async(broker.url) as connection,
            AsyncProducer(connection=connection, routing_key="q") as producer,
        ):
            for number in range(10):
                await (await producer.send(b"%d" % number)).result(PATIENCE)

    asyncio.run(run())
    assert not gathering.begun.is_set()


def test_the_delay_for_reading_confirms_depends_on_the_bytes_of_confirms_that_were_read(
    make_producer: Callable[..., Producer], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def delay(size: int, _in_flight: int) -> float:
        sizes.append(size)
        return 0.0

    monkeypatch.setattr(coalescing, "delay", delay)
    assert make_producer().send(bytes(20_000), routing_key="nowhere").wait(PATIENCE)
    assert sum(sizes) > 20_000
