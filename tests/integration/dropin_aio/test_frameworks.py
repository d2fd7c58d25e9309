"""Taskiq and FastStream with connections of the drop-in instead of aio-pika."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import qflow_client.aio_pika
from qflow_client import FlowControlTimeout
from qflow_client.broker import Broker
from tests.integration.producer.tools import PATIENCE, bodies

# A function that publishes one message.
Publish = Callable[[int], Awaitable[object]]


async def with_taskiq(url: str, monkeypatch: pytest.MonkeyPatch, use: Callable[[Publish], Awaitable[None]]) -> None:
    module = pytest.importorskip("taskiq_aio_pika.broker")
    monkeypatch.setattr(module, "connect_robust", qflow_client.aio_pika.connect_robust)
    app = module.AioPikaBroker(url)
    task = app.register_task(lambda number: None, task_name="task")
    await app.startup()
    try:
        await use(task.kiq)
    finally:
        await app.shutdown()


async def with_faststream(url: str, monkeypatch: pytest.MonkeyPatch, use: Callable[[Publish], Awaitable[None]]) -> None:
    module = pytest.importorskip("faststream.rabbit.broker.broker")
    monkeypatch.setattr(module, "connect_robust", qflow_client.aio_pika.connect_robust)
    app = module.RabbitBroker(url)
    async with app:
        await use(lambda number: app.publish(number, "q"))


async def failure(publish: Awaitable[object]) -> list[type]:
    """Return the type of the exception that a publish raises, and the types of its causes."""
    try:
        await publish
    except Exception as error:
        found: list[type] = []
        cause: BaseException | None = error
        while cause is not None:
            found.append(type(cause))
            cause = cause.__cause__ or cause.__context__
        return found
    return []


@pytest.mark.parametrize("how", ["alarm", "flow"])
@pytest.mark.parametrize(
    ("run", "queue"), [(with_taskiq, "taskiq"), (with_faststream, "q")], ids=["taskiq", "faststream"]
)
def test_J7_a_publish_of_Taskiq_or_FastStream_raises_at_its_deadline_during_a_stop_and_works_after_it(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, run: Any, queue: str, how: str
) -> None:
    def stop() -> None:
        broker.block() if how == "alarm" else broker.flow(False)

    def go_on() -> None:
        broker.unblock() if how == "alarm" else broker.flow(True)

    async def use(publish: Publish) -> None:
        loop = asyncio.get_running_loop()
        assert await failure(publish(1)) == []
        began = loop.time()
        stop()
        async with asyncio.timeout(PATIENCE):
            # Messages are still sent until the client has read the stop.
            while not (found := await failure(publish(2))):
                pass
            assert FlowControlTimeout in found
            assert loop.time() - began >= 0.5
            before = len(bodies(broker, queue))
            go_on()
            # Publishes still raise until the client has read the end of the stop.
            while found := await failure(publish(3)):
                assert FlowControlTimeout in found
        assert len(bodies(broker, queue)) == before + 1

    asyncio.run(run(f"{broker.url}?max_producer_flow_control_wait=0.5", monkeypatch, use))
