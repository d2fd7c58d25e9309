from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self

import pytest

from qflow_client import (
    AsyncProducer,
    AsyncReceipt,
    ConfirmTimeout,
    ConnectionFailed,
    Outcome,
    ProducerClosed,
    ProducerFlowed,
    QflowError,
    UndeliveredMessages,
    WrongLoop,
    flow_manager,
)
from qflow_client.aio.link import Link
from qflow_client.broker import Broker
from tests.effort import rounds
from tests.integration.producer.tools import PATIENCE, bodies, message_ids, takes

from .tools import Run, soon


async def test_F4_a_thousand_tasks_can_send_with_one_async_producer(broker: Broker) -> None:
    tasks = rounds(1000, least=300)
    async with AsyncProducer(broker.url, routing_key="q", capacity=100) as producer:

        async def work(task: int) -> None:
            for number in range(5):
                receipt = await producer.send(b"%d %d" % (task, number))
                assert await receipt is Outcome.CONFIRMED

        await asyncio.gather(*map(work, range(tasks)))
        assert (producer.unsettled, producer.available) == (0, 100)
    by_task = defaultdict(list)
    for body in bodies(broker):
        task, number = map(int, body.split())
        by_task[task].append(number)
    assert by_task == {task: list(range(5)) for task in range(tasks)}
    ids = message_ids(broker)
    assert ids == sorted(set(ids))


async def test_F8_a_send_that_need_not_wait_takes_no_loop_iteration_and_one_write_contains_many_messages(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncProducer(broker.url, routing_key="q") as producer:
        assert producer._engine.link is not None
        tapped = producer._engine.link.writer
        assert tapped is not None
        writes: list[int] = []
        write = tapped._send

        def counted(data: bytes) -> int:
            writes.append(len(data))
            return write(data)

        monkeypatch.setattr(tapped, "_send", counted)
        receipts = []
        for number in range(500):
            sending = producer.send(b"%d" % number)
            with pytest.raises(StopIteration) as done:
                sending.send(None)
            receipts.append(done.value.value)
        # Nobody waits for them, so nothing was made to wait by.
        assert {receipt._waiter for receipt in receipts} == {None}
        assert writes == []
        await producer.flush()
        assert len(writes) == 1
    assert bodies(broker) == [b"%d" % number for number in range(500)]


async def test_many_tasks_can_wait_for_one_receipt_and_cancelling_one_does_not_affect_the_others(
    broker: Broker,
) -> None:
    async with AsyncProducer(broker.url, routing_key="q") as producer:
        broker.withhold_confirms()
        receipt = await producer.send(b"")

        async def wait() -> Outcome:
            return await receipt

        tasks = [asyncio.create_task(wait()) for _ in range(6)]
        limited = asyncio.create_task(receipt.result(timeout=30))
        await asyncio.sleep(0)
        for doomed in (tasks[0], tasks[3]):
            doomed.cancel()
        await asyncio.sleep(0)
        late = asyncio.create_task(wait())
        await asyncio.sleep(0)
        tasks[1].cancel()
        with pytest.raises(ConfirmTimeout):
            await receipt.result(timeout=0.05)
        assert not await receipt.wait(timeout=0)
        broker.release_confirms()
        results = await asyncio.gather(*tasks, limited, late, return_exceptions=True)
        cancelled = {at for at, result in enumerate(results) if isinstance(result, asyncio.CancelledError)}
        assert cancelled == {0, 1, 3}
        assert {result for at, result in enumerate(results) if at not in cancelled} == {Outcome.CONFIRMED}
        assert await receipt.wait()


async def test_an_async_producer_connects_only_once_and_before_it_sends(broker: Broker) -> None:
    producer = AsyncProducer(broker.url, routing_key="q")
    for call in (
        lambda: producer.send(b"1"),
        lambda: producer.send(b"1", timeout=0),
        producer.wait_unflowed,
    ):
        with pytest.raises(ProducerClosed, match="not connected yet"):
            await call()
    with pytest.raises(ProducerClosed, match="not connected yet"):
        producer.send_nowait(b"1")
    assert list(flow_manager.resources) == []
    async with await producer.connect() as same:
        assert same is producer
        assert list(flow_manager.resources) == [producer]
        await (await producer.send(b"2"))
        with pytest.raises(QflowError, match="can connect only once"):
            await producer.connect()
    with pytest.raises(ProducerClosed):
        await producer.connect()
    assert bodies(broker) == [b"2"]


async def test_a_producer_that_never_connected_can_be_closed(broker: Broker) -> None:
    producer = AsyncProducer(broker.url)
    events = producer.flow_events()
    await producer.close()
    with pytest.raises(StopAsyncIteration):
        await anext(events)
    with pytest.raises(ProducerClosed):
        await producer.connect()


async def test_a_producer_that_cannot_connect_is_closed_and_reports_the_reason() -> None:
    producer = AsyncProducer("amqp://guest:secret@127.0.0.1:1/%2F")
    waiting: asyncio.Task[Any] | None = None
    connecting = asyncio.create_task(producer.connect())
    await asyncio.sleep(0)
    # It may be used by others while it connects.
    waiting = asyncio.create_task(producer.send(b"", timeout=None))
    with pytest.raises(ConnectionFailed, match=r"127\.0\.0\.1:1"):
        await connecting
    with takes(0.0), pytest.raises(ProducerClosed, match="could not connect"):
        await waiting
    assert producer.closed
    await producer.close()


async def test_a_send_may_wait_until_an_async_producer_is_connected(broker: Broker) -> None:
    producer = AsyncProducer(broker.url, routing_key="q")
    connecting = asyncio.create_task(producer.connect())
    await asyncio.sleep(0)
    receipts = await asyncio.gather(*(producer.send(b"%d" % number) for number in range(3)))
    async with await connecting:
        assert [await receipt for receipt in receipts] == [Outcome.CONFIRMED] * 3
    assert bodies(broker) == [b"0", b"1", b"2"]


async def test_a_producer_that_is_closed_while_it_connects_leaves_no_connection(broker: Broker) -> None:
    producer = AsyncProducer(broker.url, routing_key="q")
    connecting = asyncio.create_task(producer.connect())
    await asyncio.sleep(0)
    await producer.close()
    with pytest.raises(ProducerClosed):
        await connecting
    await soon(lambda: not broker.connections())


async def test_a_producer_whose_event_loop_is_closed_admits_no_message(broker: Broker) -> None:
    closed = asyncio.new_event_loop()
    closed.close()
    async with AsyncProducer(broker.url, routing_key="q") as producer:
        # A program that runs a second loop, and did not close the producer in the first, sends from there.
        own, producer._engine.loop = producer._engine.loop, closed
        try:
            with pytest.raises(ProducerClosed, match="the event loop of the producer is closed"):
                producer.send_nowait(b"")
            with pytest.raises(ProducerClosed, match="the event loop of the producer is closed"):
                await producer.send(b"")
            for call in lambda: producer.send_many([b""]), producer.flush, producer.wait_unflowed:
                with pytest.raises(ProducerClosed, match="the event loop of the producer is closed"):
                    await call()
            async with asyncio.timeout(PATIENCE):
                assert [event async for event in producer.flow_events()] == []
        finally:
            producer._engine.loop = own
        assert producer.unsettled == 0
    assert bodies(broker) == []


@pytest.mark.usefixtures("patient_sends")
@pytest.mark.parametrize("outbox", [None, "orders.outbox"])
async def test_a_message_that_a_signal_handler_sends_while_the_producer_connects_is_delivered(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outbox: str | None
) -> None:
    opened = Link.open
    receipts: list[AsyncReceipt] = []

    async def open_and_send(link: Link) -> None:
        await opened(link)
        receipts.append(producer.send_nowait(b"nowait"))
        receipts.append(await producer.send(b"send"))

    monkeypatch.setattr(Link, "open", open_and_send)
    producer = AsyncProducer(broker.url, routing_key="q", outbox=outbox and tmp_path / outbox)
    await producer.connect()
    assert [await receipt.result(PATIENCE) for receipt in receipts] == [Outcome.CONFIRMED] * 2
    await producer.close()
    assert bodies(broker) == [b"nowait", b"send"]


class _OtherLoop:
    """A loop that has a producer, and runs on another thread or does not run."""

    def __init__(self, url: str, elsewhere: bool, **settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="the other loop") if elsewhere else None
        if self._thread is not None:
            self._thread.start()
        self.producer: AsyncProducer = self.run(self._made(url, **settings))

    @staticmethod
    async def _made(url: str, **settings: Any) -> AsyncProducer:
        return await AsyncProducer(url, routing_key="q", **settings).connect()

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        if self._thread is None:
            return self._loop.run_until_complete(call)
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.producer.close())
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(PATIENCE)
        self._loop.close()


def test_tasks_of_two_event_loops_can_wait_for_one_receipt(run: Run, broker: Broker) -> None:
    async def main() -> list[Outcome]:
        waiting = [asyncio.ensure_future(receipt.result(PATIENCE)) for _ in range(3)]
        own = asyncio.ensure_future(asyncio.to_thread(other.run, receipt.result(PATIENCE)))
        await soon(lambda: isinstance(receipt._waiter, set) and len(receipt._waiter) == 4)
        waiting[0].cancel()
        broker.release_confirms()
        return await asyncio.gather(*waiting[1:], own)

    with _OtherLoop(broker.url, True) as other:
        broker.withhold_confirms()
        receipt = other.run(other.producer.send(b"m"))
        assert run(main()) == [Outcome.CONFIRMED] * 3


@pytest.mark.parametrize("debug", [False, True])
def test_a_message_of_send_nowait_from_another_thread_is_written_by_the_event_loop(
    run: Run, broker: Broker, debug: bool
) -> None:
    kinds: list[str] = []

    async def main() -> None:
        receipt = other.producer.send_nowait(b"m")
        # The other loop is woken for the message, and then for the flow event.
        await soon(lambda: broker.queue("q").depth == 1)
        with pytest.raises(ProducerFlowed):
            other.producer.send_nowait(b"never")
        await soon(lambda: kinds == ["flowed"])
        broker.release_confirms()
        assert await receipt is Outcome.CONFIRMED
        await soon(lambda: kinds == ["flowed", "unflowed"])

    broker.withhold_confirms()
    with _OtherLoop(broker.url, True, capacity=1, on_flow=lambda event: kinds.append(event.kind)) as other:
        # In debug mode, asyncio raises an error in methods that are not thread-safe.
        other._loop.set_debug(debug)
        run(main())


@pytest.mark.parametrize("elsewhere", [True, False])
def test_calls_from_another_event_loop_that_may_wait_raise_an_error_immediately(
    run: Run, broker: Broker, elsewhere: bool
) -> None:
    async def main() -> None:
        events = producer.flow_events()
        for call in (
            lambda: producer.send(b"never"),
            lambda: producer.send_many([b"never"]),
            producer.flush,
            producer.wait_unflowed,
            lambda: anext(events),
            producer.close,
            lambda: producer.__aexit__(None, None, None),
        ):
            with pytest.raises(WrongLoop, match=r"belongs to the event loop .* call it there"):
                await call()
        if elsewhere:
            assert await producer.send_nowait(b"without a wait") is Outcome.CONFIRMED
        else:
            with pytest.raises(WrongLoop):
                producer.send_nowait(b"never")
        assert producer.health().state == "ready"

    with _OtherLoop(broker.url, elsewhere) as other:
        producer = other.producer
        run(main())
        other.run(producer.send(b"sent"))
    assert bodies(broker) == [*([b"without a wait"] if elsewhere else []), b"sent"]

    async def again() -> None:
        # It is closed, so there is nothing to wait for.
        await producer.close()
        with pytest.raises(ProducerClosed):
            await producer.send(b"never")

    run(again())


async def test_E12_a_producer_that_was_shut_down_before_it_connected_never_connects(broker: Broker) -> None:
    producer = AsyncProducer(broker.url, routing_key="q")
    producer.shutdown()
    with pytest.raises(ProducerClosed):
        await producer.connect()
    assert not broker.connections()


async def test_E12_close_after_shutdown_raises_the_error_for_undelivered_messages_once(broker: Broker) -> None:
    async with AsyncProducer(broker.url, routing_key="q", close_timeout=0.3) as producer:
        broker.withhold_confirms()
        await producer.send(b"1")
        producer.shutdown()
        # `shutdown` closes in another task.
        await soon(lambda: producer._engine.ended)
        with pytest.raises(UndeliveredMessages) as caught:
            await producer.close()
        assert [message.body for message in caught.value.unknown] == [b"1"]


async def test_E12_a_second_shutdown_continues_the_first_shutdown(broker: Broker) -> None:
    async with AsyncProducer(broker.url, routing_key="q") as producer:
        broker.withhold_confirms()
        receipt = await producer.send(b"1")
        tasks = []
        for _ in range(2):
            producer.shutdown()
            await soon(lambda: producer._engine._ending)
            tasks.append(producer._engine._ending)
        await asyncio.sleep(0)
        assert tasks[0] is tasks[1] is producer._engine._ending
        broker.release_confirms()
        assert await receipt is Outcome.CONFIRMED
