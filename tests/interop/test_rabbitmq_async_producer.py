"""The asynchronous producer against a real RabbitMQ."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from uuid import uuid4

import aio_pika
import pytest

from qflow_client import (
    AsyncProducer,
    HoldKind,
    MessageRejected,
    MessageReturned,
    Outcome,
    ProducerClosed,
    UndeliveredMessages,
    connect_async,
)
from qflow_client.testing.rabbitmq import RabbitMQNode
from tests.effort import rounds
from tests.interop.test_rabbitmq_producer import ENOUGH_FOR_LOAD, PATIENCE, SECONDS_OF_LOAD, check_nothing_is_lost

pytestmark = pytest.mark.rabbitmq


@asynccontextmanager
async def own_queue(url: str, **options: Any) -> AsyncIterator[tuple[Any, Any]]:
    """A connection from `connect_async`, and a queue with a unique name."""
    async with await connect_async(url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue(f"qflow-{uuid4().hex}", durable=True, **options)
        yield connection, queue
        await queue.delete(if_unused=False, if_empty=False)


async def drain(queue: Any, count: int) -> list[bytes]:
    """Consume `count` messages, check that the queue is empty, and return the bodies."""
    bodies: list[bytes] = []
    enough = asyncio.Event()

    async def take(message: aio_pika.abc.AbstractIncomingMessage) -> None:
        bodies.append(message.body)
        if len(bodies) == count:
            enough.set()

    tag = await queue.consume(take, no_ack=True)
    while len(bodies) < count:
        before = len(bodies)
        # Do not limit the total time, because it depends on the machine.
        with suppress(TimeoutError):
            await asyncio.wait_for(enough.wait(), PATIENCE)
        assert len(bodies) > before, f"{before} of {count} messages came"
    await queue.cancel(tag)
    assert await queue.get(fail=False, timeout=PATIENCE) is None, "there were more messages"
    return bodies


async def held(producer: AsyncProducer, kind: HoldKind, is_held: bool = True) -> None:
    """Wait for flow events until the producer has a hold, or has it no longer."""
    events = producer.flow_events()
    async with asyncio.timeout(PATIENCE):
        while any(hold.kind == kind for hold in producer.flow_state.holds) != is_held:
            await anext(events)


def test_a_thousand_tasks_on_a_shared_connection_get_a_confirm_for_each_message(rabbitmq: RabbitMQNode) -> None:
    each = rounds(5)

    async def main() -> None:
        async with own_queue(rabbitmq.url) as (connection, queue):
            async with AsyncProducer(connection=connection, routing_key=queue.name, capacity=500) as producer:

                async def work(task: int) -> None:
                    for number in range(each):
                        assert await (await producer.send(b"%d %d" % (task, number))) is Outcome.CONFIRMED

                await asyncio.gather(*map(work, range(1000)))
            by_task: dict[bytes, list[int]] = {}
            for body in await drain(queue, 1000 * each):
                task, number = body.split()
                by_task.setdefault(task, []).append(int(number))
            assert len(by_task) == 1000
            assert all(numbers == list(range(each)) for numbers in by_task.values())

    asyncio.run(main())


@pytest.mark.slow
def test_a_connection_with_a_heartbeat_of_2_seconds_stays_open_under_load(rabbitmq: RabbitMQNode) -> None:
    async def main() -> None:
        # RabbitMQ sends no heartbeats while it sends confirms, and the producer does not pass these confirms to aiormq.
        async with own_queue(rabbitmq.url) as (_connection, queue):
            url = f"{rabbitmq.url}?heartbeat=2"
            async with AsyncProducer(url, routing_key=queue.name, rate=1000, mandatory=False) as producer:
                before = producer.flow_state.seconds_flowed.get(HoldKind.DISCONNECTED)
                until = time.monotonic() + SECONDS_OF_LOAD
                sent = 0
                while time.monotonic() < until or sent < ENOUGH_FOR_LOAD:
                    await producer.send(b"x" * 100, timeout=PATIENCE)
                    sent += 1
                await producer.flush(timeout=PATIENCE)
                # The producer did not reconnect.
                assert producer.flow_state.seconds_flowed.get(HoldKind.DISCONNECTED) == before
            assert (await queue.declare()).message_count == sent

    asyncio.run(main())


def test_returned_and_rejected_messages_do_not_close_the_shared_connection(rabbitmq: RabbitMQNode) -> None:
    async def main() -> None:
        async with own_queue(rabbitmq.url) as (connection, queue):
            producer = await AsyncProducer(connection=connection, routing_key=queue.name).connect()
            lost, kept = await producer.send(b"lost", routing_key="no such queue"), await producer.send(b"kept")
            assert await kept is Outcome.CONFIRMED
            with pytest.raises(MessageReturned, match="312"):
                await lost
            with pytest.raises(MessageRejected, match=r"404.*no such exchange"):
                await (await producer.send(b"x", exchange="no such exchange"))
            assert await (await producer.send(b"goes on", timeout=PATIENCE)) is Outcome.CONFIRMED
            await producer.close()
            async with AsyncProducer(connection=connection, routing_key=queue.name) as another:
                assert await (await another.send(b"another")) is Outcome.CONFIRMED
            assert await drain(queue, 3) == [b"kept", b"goes on", b"another"]

    asyncio.run(main())


@asynccontextmanager
async def own_and_shared(url: str, *, robust: bool, **settings: Any) -> AsyncIterator[list[AsyncProducer]]:
    """Two connected producers: one on its own connection, and one on a connection of aio-pika. A test closes them."""
    options: dict[str, Any] = {"robust": True, "reconnect_interval": 0.5} if robust else {}
    connection = await connect_async(url, **options)
    try:
        yield [
            await AsyncProducer(url, **settings).connect(),
            await AsyncProducer(connection=connection, **settings).connect(),
        ]
    finally:
        await connection.close()


@pytest.mark.slow
def test_after_a_kill_and_a_restart_of_the_node_the_queues_have_all_messages(own_rabbitmq: RabbitMQNode) -> None:
    async def send(producer: AsyncProducer, queue: str, enough: asyncio.Event) -> int:
        sent = 0
        while not enough.is_set():
            await producer.send(b"%d" % sent, routing_key=queue, timeout=None)
            sent += 1
            if sent == 1000:
                begun.release()
        await producer.flush(timeout=PATIENCE)
        await producer.close()
        return sent

    async def main() -> list[int]:
        async with await connect_async(own_rabbitmq.url) as first:
            channel = await first.channel()
            for queue in queues:
                await channel.declare_queue(queue, durable=True)
        await asyncio.to_thread(own_rabbitmq.sync)
        enough = asyncio.Event()
        async with (
            own_and_shared(own_rabbitmq.url, robust=True, capacity=500) as producers,
            asyncio.TaskGroup() as tasks,
        ):
            sending = [tasks.create_task(send(*each, enough)) for each in zip(producers, queues, strict=True)]
            for _ in producers:
                await begun.acquire()
            await asyncio.to_thread(own_rabbitmq.kill)
            for producer in producers:
                await held(producer, HoldKind.DISCONNECTED)
            await asyncio.to_thread(own_rabbitmq.start)
            for producer in producers:
                await held(producer, HoldKind.DISCONNECTED, False)
            enough.set()
        return [await each for each in sending]

    queues = ("of its own", "shared")
    begun = asyncio.Semaphore(0)
    for queue, count in zip(queues, asyncio.run(main()), strict=True):
        check_nothing_is_lost(own_rabbitmq.url, queue, count)


@pytest.mark.usefixtures("one_connection")
def test_after_the_broker_is_killed_every_message_has_an_outcome(own_rabbitmq: RabbitMQNode) -> None:
    async def main() -> None:
        async with own_and_shared(own_rabbitmq.url, robust=False, routing_key="q", mandatory=False) as producers:
            for producer in producers:
                await (await producer.send(b"before")).result(PATIENCE)
            own_rabbitmq.pause()
            sent = [[await producer.send(b"%d" % number) for number in range(100)] for producer in producers]
            own_rabbitmq.kill()
            for producer, receipts in zip(producers, sent, strict=True):
                for receipt in receipts:
                    assert await receipt.wait(PATIENCE)
                with pytest.raises(ProducerClosed):
                    await producer.send(b"after")
                with pytest.raises(UndeliveredMessages) as caught:
                    await producer.close(timeout=5)
                assert len(caught.value.unknown) + len(caught.value.unsent) == 100
                assert {receipt.outcome for receipt in receipts} <= {Outcome.UNKNOWN, Outcome.FAILED}

    asyncio.run(main())
