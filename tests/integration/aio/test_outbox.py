"""The asynchronous producer while it opens its outbox. Tests of both producers are in tests/integration/producer."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from qflow_client import AsyncProducer, FlowControlTimeout, Outbox, OutboxError, OutboxFull, Outcome, ProducerClosed
from qflow_client.aio.link import Link
from qflow_client.broker import Broker
from qflow_client.outbox.storage import Storage
from tests.collecting import collect
from tests.integration.producer.tools import PATIENCE, bodies

from .tools import Run, in_line, soon


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, no outbox is opened."""
    event = threading.Event()
    opens = Storage.open

    def late(self: Storage) -> None:
        assert event.wait(PATIENCE)
        opens(self)

    monkeypatch.setattr(Storage, "open", late)
    return event


@pytest.mark.usefixtures("patient_ends", "patient_sends")
def test_a_message_that_is_spilled_while_the_producer_connects_is_on_disk_when_send_returns(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "outbox"

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            producer = AsyncProducer(f"amqp://127.0.0.1:{silent.getsockname()[1]}", outbox=path, when_flowed="spill")
            connecting = asyncio.create_task(producer.connect())
            await soon(lambda: producer._engine.storage is not None)
            await producer.send(b"body", routing_key="q", timeout=0)
            assert [stored.message.body for stored in Outbox.look(path)] == [b"body"]
            connecting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await connecting

    run(main())
    Outbox(path).close()


@pytest.mark.parametrize("when_flowed", ["block", "spill"])
async def test_senders_that_wait_while_the_outbox_opens_are_admitted_when_it_is_open(
    broker: Broker, tmp_path: Path, go_on: threading.Event, when_flowed: str
) -> None:
    settings: Any = {"when_flowed": when_flowed, "capacity": 2}
    producer = AsyncProducer(broker.url, routing_key="q", outbox=tmp_path / "outbox", **settings)
    connecting = asyncio.create_task(producer.connect())
    await asyncio.sleep(0)
    sends = [asyncio.create_task(producer.send(b"%d" % number, timeout=None)) for number in range(5)]
    await in_line(producer, 5)
    # They have the outbox's protocol in place of the one in which they stood in line.
    with pytest.raises(FlowControlTimeout, match="disconnected"):
        await producer.send(b"too late", timeout=0.05)
    unflowed = asyncio.create_task(producer.wait_unflowed(PATIENCE))
    sends[4].cancel()
    go_on.set()
    await connecting
    receipts = await asyncio.gather(*sends[:4])
    assert await unflowed
    await producer.flush(PATIENCE)
    assert [receipt.outcome for receipt in receipts] == [Outcome.CONFIRMED] * 4
    await producer.close()
    assert producer.stored == 0
    assert bodies(broker) == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("outbox_full", ["block", "raise"])
async def test_a_message_that_is_too_large_for_the_outbox_does_not_block_other_messages(
    broker: Broker, tmp_path: Path, go_on: threading.Event, outbox_full: str
) -> None:
    settings: Any = {"outbox_full": outbox_full, "outbox_max_bytes": 1000}
    producer = AsyncProducer(broker.url, routing_key="q", outbox=tmp_path / "outbox", **settings)
    connecting = asyncio.create_task(producer.connect())
    await asyncio.sleep(0)
    large = asyncio.create_task(producer.send(bytes(5000), timeout=None))
    small = asyncio.create_task(producer.send(b"small", timeout=None))
    await in_line(producer, 2)
    go_on.set()
    await connecting
    with pytest.raises(OutboxFull, match="no room for a message of 5000 bytes") as caught:
        await large
    assert (caught.value.message, caught.value.exchange, caught.value.routing_key) == (bytes(5000), "", "q")
    receipt = await small
    assert await receipt.result(PATIENCE) is Outcome.CONFIRMED
    await producer.close()
    assert bodies(broker) == [b"small"]


async def test_a_sender_gets_an_error_if_its_producer_is_closed_while_the_outbox_opens(
    broker: Broker, tmp_path: Path, go_on: threading.Event
) -> None:
    producer = AsyncProducer(broker.url, routing_key="q", outbox=tmp_path / "outbox")
    connecting = asyncio.create_task(producer.connect())
    await asyncio.sleep(0)
    sending = asyncio.create_task(producer.send(b"one", timeout=None))
    await in_line(producer, 1)
    await producer.close(timeout=0)
    go_on.set()
    for task in (connecting, sending):
        with pytest.raises(ProducerClosed):
            await task
    assert bodies(broker) == []


@pytest.mark.usefixtures("patient_ends", "patient_sends")
async def test_E4_if_a_close_is_cancelled_at_any_moment_the_outbox_is_free_for_the_next_producer(
    broker: Broker, tmp_path: Path
) -> None:
    for turns in range(30):
        producer = AsyncProducer(broker.url, routing_key="q", outbox=str(tmp_path / "outbox.db"))
        await producer.connect()
        await producer.send(b"")
        closing = asyncio.create_task(producer.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait((closing,))
        # It was cancelled before it began, or is at its end.
        await producer.close()


async def test_E4_close_of_an_async_producer_needs_no_thread_of_the_executor_of_the_event_loop(
    broker: Broker, tmp_path: Path
) -> None:
    loop, event = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    producer = AsyncProducer(broker.url, routing_key="q", outbox=tmp_path / "outbox")
    await producer.connect()
    # The program ends this thread only after it has closed the producer.
    working = loop.run_in_executor(None, event.wait)
    try:
        async with asyncio.timeout(PATIENCE):
            await producer.close()
    finally:
        event.set()
    await working


async def test_close_of_an_async_producer_frees_the_outbox_even_if_no_thread_can_be_started(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    producer = AsyncProducer(broker.url, routing_key="q", outbox=tmp_path / "outbox")
    await producer.connect()
    with monkeypatch.context() as now:
        now.setattr(threading.Thread, "start", start)
        await producer.close()
    Outbox(tmp_path / "outbox").close()


def test_E4_connect_and_the_end_of_the_loop_do_not_wait_for_a_disk_that_does_not_answer(
    run: Run, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, opened = threading.Event(), []
    opens = Storage.open

    def late(self: Storage) -> None:
        opened.append(answers.wait(PATIENCE))
        opens(self)

    monkeypatch.setattr(Storage, "open", late)
    monkeypatch.setattr("qflow_client.outbox.storage.GRACE", 0.0)

    async def main() -> None:
        producer = AsyncProducer(broker.url, routing_key="q", outbox=tmp_path / "outbox", connect_timeout=0.1)
        with pytest.raises(OutboxError, match=r"outbox: the disk has not answered within 0\.1 s"):
            await producer.connect()

    try:
        run(main())
        assert opened == []
    finally:
        answers.set()


def test_E4_a_cancelled_close_does_not_wait_for_a_disk_that_does_not_answer(
    run: Run, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    closes = Storage.close

    def late(self: Storage, timeout: float) -> None:
        assert answers.wait(10 * PATIENCE)
        closes(self, timeout)

    monkeypatch.setattr(Storage, "close", late)

    async def main() -> None:
        for turns in (1, 50):
            producer = AsyncProducer(broker.url, routing_key="q", outbox=tmp_path / f"outbox{turns}")
            await producer.connect()
            closing = asyncio.create_task(producer.close())
            for _ in range(turns):
                await asyncio.sleep(0)
            closing.cancel()
            done, _ = await asyncio.wait((closing,), timeout=PATIENCE)
            assert done
            assert closing.cancelled()

    try:
        run(main())
    finally:
        answers.set()


async def test_E4_close_exceeds_its_deadline_by_at_most_one_grace_time_for_the_broker_and_the_disk_together(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    closes, ends = Storage.close, Link.close

    def close(self: Storage, timeout: float) -> None:
        waits.append(timeout)
        closes(self, timeout)

    async def end(self: Link, patience: float) -> None:
        waits.append(patience)
        await asyncio.sleep(patience)
        await ends(self, patience)

    monkeypatch.setattr(Storage, "close", close)
    monkeypatch.setattr(Link, "close", end)
    producer = AsyncProducer(broker.url, routing_key="q", outbox=tmp_path / "outbox")
    await producer.connect()
    await producer.close(timeout=0)
    assert len(waits) == 2
    assert sum(waits) < 0.61


# aio-pika's tasks of a loop that was closed too early.
@pytest.mark.filterwarnings("ignore:.*coroutine object OneShotCallback:pytest.PytestUnraisableExceptionWarning")
def test_an_outbox_is_free_after_its_producer_is_closed_on_another_event_loop(
    run: Run, broker: Broker, tmp_path: Path
) -> None:
    async def open_one() -> AsyncProducer:
        producer = AsyncProducer(broker.url, routing_key="q", outbox=tmp_path / "outbox")
        await producer.connect()
        return producer

    async def replace(old: AsyncProducer) -> None:
        await old.close()
        async with await open_one() as producer:
            await producer.send(b"x")

    # It ends with the producer open, which `run` would not allow.
    old = asyncio.run(open_one())
    run(replace(old))
    assert broker.queue("q").depth == 1
    del old
    collect()


@pytest.mark.usefixtures("patient_ends", "patient_sends")
async def test_E4_a_connect_that_is_cancelled_while_the_outbox_opens_leaves_nothing_running(
    broker: Broker, tmp_path: Path, go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()
    opens = Storage.open

    def watched(self: Storage) -> None:
        begun.set()
        try:
            opens(self)
        finally:
            ended.set()

    monkeypatch.setattr(Storage, "open", watched)
    connecting = asyncio.create_task(AsyncProducer(broker.url, outbox=tmp_path / "outbox").connect())
    await asyncio.to_thread(begun.wait, PATIENCE)
    connecting.cancel()
    asyncio.get_running_loop().call_later(0.1, go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert ended.is_set()
    async with AsyncProducer(broker.url, outbox=tmp_path / "outbox"):
        pass
