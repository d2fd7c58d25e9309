"""A relay in an asyncio application. The application awaits its end, and the loop continues meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import create_async_engine

from qflow_client import SettingsError
from qflow_client.broker import Broker
from qflow_client.sqlalchemy import Outbox, OutboxRelay
from qflow_client.testing.proxy import FaultProxy

from .support import FAST, PATIENCE, add, bodies, depth, eventually, permitted, sqlite_engine

engine = sqlite_engine


async def until(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(eventually, condition)


def test_E14_a_relay_runs_inside_an_async_with_block(engine: Engine, outbox: Outbox, broker: Broker) -> None:
    async def main() -> None:
        async with OutboxRelay(engine, broker.url, outbox=outbox, **FAST):
            await asyncio.to_thread(add, engine, outbox, b"1")
            await until(lambda: bodies(broker) == [b"1"])

    asyncio.run(main())
    assert permitted(engine, outbox) == 0


def test_E14_a_cancelled_relay_task_settles_all_rows_that_it_has_sent(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    relay = OutboxRelay(engine, broker.url, outbox=outbox, **FAST)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(relay.run())
            await asyncio.to_thread(add, engine, outbox, b"1")
            await until(lambda: bodies(broker) == [b"1"])
            task.cancel()
        assert task.cancelled()
        assert relay.health().state == "closed"
        with pytest.raises(RuntimeError, match="once"):
            await relay.run()

    asyncio.run(main())
    assert (permitted(engine, outbox), depth(engine, outbox)) == (0, 0)


def test_E14_the_task_of_a_relay_ends_when_the_relay_is_closed(engine: Engine, outbox: Outbox, broker: Broker) -> None:
    relay = OutboxRelay(engine, broker.url, outbox=outbox, **FAST)

    async def main() -> None:
        task = asyncio.create_task(relay.run())
        await until(lambda: relay.is_ready)
        assert await asyncio.to_thread(relay.close, PATIENCE)
        await task

    asyncio.run(main())


async def unconfirmed(relay: OutboxRelay, proxy: FaultProxy, engine: Engine, outbox: Outbox) -> None:
    """Have one row on its way, whose confirm does not come."""
    await until(lambda: relay.is_ready)
    await asyncio.to_thread(proxy.stall)
    await asyncio.to_thread(add, engine, outbox, b"1")
    await until(lambda: permitted(engine, outbox) == 1 and relay.health().unsettled == 1)


def test_E14_the_event_loop_runs_while_a_closing_relay_waits_for_the_last_confirm(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    async def main() -> None:
        with FaultProxy(broker.url) as proxy:
            # Half of the lease is the longest that it waits.
            relay = OutboxRelay(engine, proxy.url, outbox=outbox, lease=20 * PATIENCE, **FAST)
            task = asyncio.create_task(relay.run())
            await unconfirmed(relay, proxy, engine, outbox)
            task.cancel()
            # The confirm can come because the loop is not blocked.
            await asyncio.sleep(0)
            assert not task.done()
            await asyncio.to_thread(proxy.heal)
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert bodies(broker) == [b"1"]
    assert (permitted(engine, outbox), depth(engine, outbox)) == (0, 0)


def test_E4_a_relay_task_that_is_cancelled_twice_stops_waiting_and_the_relay_ends_later(
    engine: Engine, outbox: Outbox, broker: Broker
) -> None:
    with FaultProxy(broker.url) as proxy:
        relay = OutboxRelay(engine, proxy.url, outbox=outbox, lease=20 * PATIENCE, **FAST)

        async def main() -> None:
            task = asyncio.create_task(relay.run())
            await unconfirmed(relay, proxy, engine, outbox)
            for _ in range(2):
                assert not task.done()
                task.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        # It still waits for the confirm. The loop is gone.
        assert not relay.close(0)
        proxy.heal()
        assert relay.close(PATIENCE)
    assert bodies(broker) == [b"1"]
    assert depth(engine, outbox) == 0


def test_E14_a_relay_with_an_asynchronous_engine_raises_a_clear_error(broker: Broker) -> None:
    with pytest.raises(SettingsError, match=r"give engine\.url"):
        OutboxRelay(create_async_engine("postgresql+asyncpg://nowhere/shop"), broker.url)  # type: ignore[arg-type]
