"""Taskiq and FastStream with connections of the drop-in instead of aio-pika."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import qflow_client.aio_pika
from qflow_client import FlowControlTimeout, flow_manager
from qflow_client.aio_pika.flow import ChannelFlow
from qflow_client.broker import Broker
from tests.integration.aio.tools import soon
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
    # Ignore channels that an earlier test left because it failed.
    earlier = set(flow_manager.resources)

    def stop() -> None:
        broker.block() if how == "alarm" else broker.flow(False)

    def go_on() -> None:
        broker.unblock() if how == "alarm" else broker.flow(True)

    async def use(publish: Publish) -> None:
        loop = asyncio.get_running_loop()

        def publishing() -> list[ChannelFlow]:
            """Return the flow control of the channels that have published."""
            flows = [each for each in flow_manager.resources if isinstance(each, ChannelFlow) and each not in earlier]
            return [flow for flow in flows if flow.protocol.admission.admitted]

        def wait_at_most(seconds: float) -> None:
            for flow in publishing():
                flow.settings = flow.settings.replace(max_producer_flow_control_wait=seconds)

        assert await failure(publish(1)) == []
        assert len(publishing()) == 1
        stop()
        await soon(lambda: all(flow.look().flowed for flow in publishing()))
        wait_at_most(0.5)
        began = loop.time()
        assert FlowControlTimeout in await failure(publish(2))
        assert loop.time() - began >= 0.5
        wait_at_most(PATIENCE)
        go_on()
        assert await failure(publish(3)) == []
        assert len(bodies(broker, queue)) == 2

    # The waits that must succeed, such as the wait for a confirm, may be long.
    asyncio.run(run(f"{broker.url}?max_producer_flow_control_wait={PATIENCE}", monkeypatch, use))
