"""The same program with aio-pika and with the drop-in for it, against a real RabbitMQ."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import aio_pika as original
import pytest

import qflow_client.aio_pika as drop_in
from qflow_client import ConfirmTimeout, FlowControlTimeout, HoldKind
from qflow_client.testing.rabbitmq import RabbitMQNode
from tests.integration.aio.tools import soon
from tests.integration.dropin_aio.scenarios import all_scenarios, outcome
from tests.integration.producer.tools import takes

pytestmark = pytest.mark.rabbitmq

# Maximum seconds of a wait of the drop-in, and seconds after which a call counts as hanging.
WAIT = 0.5
HANGS = 3 * WAIT
PATIENCE = 100.0


def run(test: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(test, 4 * PATIENCE))


@all_scenarios
@pytest.mark.parametrize("robust", [False, True], ids=["plain", "robust"])
def test_the_drop_in_has_the_results_exceptions_and_order_of_callbacks_of_aio_pika(
    rabbitmq: RabbitMQNode, name: str, robust: bool
) -> None:
    ours = run(outcome(drop_in, rabbitmq.url, name, robust=robust))
    assert ours == run(outcome(original, rabbitmq.url, name, robust=robust))


@pytest.mark.parametrize("module", [original, drop_in], ids=["aio-pika", "drop-in"])
def test_update_secret_works_with_aio_pika_and_with_the_drop_in(rabbitmq: RabbitMQNode, module: Any) -> None:
    async def main() -> None:
        async with await module.connect(rabbitmq.url) as connection:
            ok = await connection.update_secret("guest", reason="time", timeout=PATIENCE)
            assert type(ok).__name__ == "UpdateSecretOk"

    run(main())


@pytest.fixture
def alarmed(own_rabbitmq: RabbitMQNode) -> RabbitMQNode:
    """A node for memory alarms, with an empty queue ``orders``."""

    async def declare() -> None:
        async with await original.connect(own_rabbitmq.url) as connection:
            await (await connection.channel()).declare_queue("orders")

    run(declare())
    return own_rabbitmq


async def on_thread(call: Callable[[], Any]) -> None:
    await asyncio.get_running_loop().run_in_executor(None, call)


class Program:
    """A program that publishes. It is the same for aio-pika and the drop-in, except for the module."""

    def __init__(self, module: Any, *, confirms: bool, body: bytes = b"") -> None:
        self.module = module
        self.published = 0
        self.confirms = confirms
        self.body = body

    async def begin(self, node: RabbitMQNode) -> None:
        query = "" if self.module is original else f"?max_producer_flow_control_wait={WAIT}"
        self.connection = await self.module.connect_robust(node.url + query)
        self.channel = await self.connection.channel(publisher_confirms=self.confirms)
        await self.publish(PATIENCE)

    async def publish(self, timeout: float | None = None) -> None:
        message = self.module.Message(b"%06d" % self.published + self.body)
        await self.channel.default_exchange.publish(message, "orders", timeout=timeout)
        self.published += 1

    async def run(self, count: int, timeout: float | None = None) -> None:
        for _ in range(count):
            await self.publish(timeout)


async def bodies(node: RabbitMQNode, count: int) -> list[bytes]:
    """Get `count` messages, check that the queue is empty, and return the bodies."""
    found: list[bytes] = []
    async with await original.connect(node.url) as connection:
        channel = await connection.channel()
        queue = await channel.get_queue("orders")
        while len(found) < count:
            message = await queue.get(no_ack=True, fail=False, timeout=PATIENCE)
            if message is None:
                await asyncio.sleep(0.05)
            else:
                found.append(message.body)
        assert await queue.get(fail=False, timeout=PATIENCE) is None
    return found


@pytest.mark.slow
def test_during_a_memory_alarm_a_publish_with_confirms_hangs_in_aio_pika_and_raises_in_the_drop_in(
    alarmed: RabbitMQNode,
) -> None:
    async def main() -> None:
        theirs, ours = Program(original, confirms=True), Program(drop_in, confirms=True)
        for program in theirs, ours:
            await program.begin(alarmed)
        await on_thread(alarmed.raise_memory_alarm)
        hanging = asyncio.ensure_future(theirs.run(2))
        began = time.time()
        with takes(WAIT), pytest.raises(ConfirmTimeout) as late:
            await ours.publish()
        # This message makes the broker block the connection. The broker may send its notice after the deadline.
        await soon(lambda: ours.channel.flow_state.flowed, timeout=PATIENCE)
        (hold,) = ours.channel.flow_state.holds
        assert hold.kind is HoldKind.CONNECTION_BLOCKED
        assert "held by connection_blocked" in str(late.value) or hold.since >= began + WAIT
        with takes(WAIT), pytest.raises(FlowControlTimeout) as caught:
            await ours.publish()
        assert [hold.kind for hold in caught.value.holds] == [HoldKind.CONNECTION_BLOCKED]
        # This publish waits for as long as its timeout permits.
        waiting = asyncio.ensure_future(
            ours.channel.default_exchange.publish(drop_in.Message(b"patient"), "orders", timeout=PATIENCE)
        )
        done, _ = await asyncio.wait((hanging, waiting), timeout=HANGS)
        assert not done, "aio-pika hangs, and a patient publish waits"
        await on_thread(alarmed.clear_memory_alarm)
        await hanging
        await waiting
        assert await ours.channel.wait_unflowed(PATIENCE)
        await ours.run(2, PATIENCE)
        for program in theirs, ours:
            await program.connection.close()
        # The message with an unknown outcome has arrived. The message that was not sent has not.
        of_theirs, of_ours = [0, 1, 2], [0, 1, 1, 2]
        expected = [b"%06d" % number for number in of_theirs + of_ours] + [b"patient"]
        assert sorted(await bodies(alarmed, 8)) == sorted(expected)

    run(main())


@pytest.mark.slow
def test_during_a_memory_alarm_a_publish_without_confirms_hangs_in_aio_pika_and_raises_in_the_drop_in(
    alarmed: RabbitMQNode,
) -> None:
    async def main() -> None:
        body = bytes(100_000)
        theirs, ours = (Program(module, confirms=False, body=body) for module in (original, drop_in))
        for program in theirs, ours:
            await program.begin(alarmed)
        await on_thread(alarmed.raise_memory_alarm)
        # The broker blocks the connection after a first publish, so publish until its notice arrives.
        with pytest.raises((ConfirmTimeout, FlowControlTimeout)) as caught:
            await ours.run(1000)
        # The message that fills the socket may be partly written. Then its rest is sent later.
        begun = isinstance(caught.value, ConfirmTimeout)
        held_by = [hold.kind for hold in caught.value.holds] if isinstance(caught.value, FlowControlTimeout) else []
        assert begun or HoldKind.CONNECTION_BLOCKED in held_by
        accepted = ours.published + begun
        hanging = asyncio.ensure_future(theirs.run(1000))
        done, _ = await asyncio.wait((hanging,), timeout=HANGS)
        assert not done, "aio-pika hangs"
        # If the notice came so late that our socket was also full, our socket may contain some more messages.
        if not begun and HoldKind.TRANSPORT not in held_by:
            await soon(lambda: theirs.published >= ours.published, timeout=PATIENCE)
        await on_thread(alarmed.clear_memory_alarm)
        await hanging
        await theirs.connection.close()
        assert await ours.channel.wait_unflowed(PATIENCE)
        await ours.run(5, PATIENCE)
        await soon_depth(alarmed, 1001 + accepted + 5)
        await ours.connection.close()

    run(main())


async def soon_depth(node: RabbitMQNode, count: int) -> None:
    async with await original.connect(node.url) as connection:
        channel = await connection.channel()
        found = 0
        end = time.monotonic() + PATIENCE
        while found != count:
            assert time.monotonic() < end, f"{found} of {count} are there"
            await asyncio.sleep(0.05)
            queue = await channel.declare_queue("orders", passive=True)
            found = queue.declaration_result.message_count or 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["connect", "connect_robust"])
def test_during_a_memory_alarm_an_error_leaves_the_async_with_block_in_time(alarmed: RabbitMQNode, kind: str) -> None:
    async def main() -> None:
        url = f"{alarmed.url}?max_producer_flow_control_wait={WAIT}"
        async with await getattr(drop_in, kind)(url) as connection, connection.channel() as channel:
            await channel.default_exchange.publish(drop_in.Message(b"before"), "orders", timeout=PATIENCE)
            await on_thread(alarmed.raise_memory_alarm)
            while True:
                with suppress(ConfirmTimeout):
                    await channel.default_exchange.publish(drop_in.Message(b""), "orders")

    # The alarm continues at the end of the block.
    with pytest.raises(FlowControlTimeout):
        run(main())
    alarmed.clear_memory_alarm()


@pytest.mark.slow
def test_a_publish_on_a_robust_channel_waits_until_a_killed_node_runs_again(own_rabbitmq: RabbitMQNode) -> None:
    async def main() -> None:
        # The publish waits until a node has started, which takes long.
        url = f"{own_rabbitmq.url}?reconnect_interval=1&max_producer_flow_control_wait={4 * PATIENCE}&capacity=1"
        async with await drop_in.connect_robust(url) as connection:
            channel = await connection.channel()
            await channel.declare_queue("orders", durable=True)
            await on_thread(own_rabbitmq.sync)
            await on_thread(own_rabbitmq.raise_memory_alarm)
            exchange = channel.default_exchange
            written = asyncio.ensure_future(exchange.publish(drop_in.Message(b"written"), "orders"))
            await soon(
                lambda: HoldKind.CONNECTION_BLOCKED in [each.kind for each in channel.flow_state.holds],
                timeout=PATIENCE,
            )
            waiting = asyncio.ensure_future(exchange.publish(drop_in.Message(b"waits"), "orders"))
            await on_thread(own_rabbitmq.kill)
            with pytest.raises(drop_in.exceptions.AMQPConnectionError):
                await written
            await on_thread(own_rabbitmq.start)
            assert type(await waiting).__name__ == "Ack"
            assert not channel.flow_state.flowed

    run(main())
