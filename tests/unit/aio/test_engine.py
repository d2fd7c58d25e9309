"""The engine of an `AsyncProducer`, without a connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
import uvloop

from qflow_client import AsyncProducer, Outcome, Receipt
from qflow_client.aio.dispatcher import Dispatcher
from qflow_client.logs import flush_logs

_monotonic = time.monotonic


@pytest.mark.parametrize("where", ["in the protocol", "taken", "scheduled"])
def test_E6_a_failed_message_that_on_delivery_did_not_get_before_its_loop_was_closed_is_logged(
    caplog: pytest.LogCaptureFixture, where: str
) -> None:
    told: list[Receipt] = []
    producer = AsyncProducer("amqp://localhost", routing_key="q", on_delivery=told.append, on_refused="fail")
    engine, loop = producer._engine, asyncio.new_event_loop()
    engine.loop, engine.dispatcher = loop, Dispatcher(loop)

    def nack() -> None:
        engine.step(lambda protocol: protocol.on_nack(1, False, _monotonic()))

    async def main() -> Receipt:
        engine.step(lambda protocol: protocol.channel_opened(1, 0, _monotonic()))
        receipt = producer.send_nowait(b"body")
        engine.step(lambda protocol: protocol.take_output(_monotonic()))
        if where == "scheduled":
            # The loop calls `after` once more, and stops before it calls `on_delivery`.
            nack()
        return receipt

    receipt = loop.run_until_complete(main())
    if where == "in the protocol":
        nack()
    loop.close()
    if where == "taken":
        nack()
    assert engine.protocol.reports.is_empty is (where != "in the protocol")
    engine.end_soon()
    assert flush_logs(20.0)
    assert told == []
    assert "1 admitted messages were not delivered" in caplog.text
    assert receipt.outcome is Outcome.NACKED


@pytest.mark.filterwarnings("ignore:.*dropped without close:ResourceWarning")
@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_dropped_producer_ends_when_its_loop_is_closed_even_if_the_loop_has_begun_to_end_it(
    make_loop: Callable[[], asyncio.AbstractEventLoop], caplog: pytest.LogCaptureFixture
) -> None:
    producer = AsyncProducer("amqp://localhost", routing_key="q")
    engine, loop = producer._engine, make_loop()
    engine.loop, engine.dispatcher = loop, Dispatcher(loop)

    async def main() -> None:
        engine.step(lambda protocol: protocol.channel_opened(1, 0, _monotonic()))
        producer.send_nowait(b"body")
        engine.abandon()
        for _ in range(5):
            await asyncio.sleep(0)

    loop.run_until_complete(main())
    assert engine.protocol.waiters.settled
    assert not engine._all_ended.is_set()
    # Otherwise asyncio logs that the task never ended.
    engine._ending._log_destroy_pending = False  # type: ignore[union-attr]  # as asyncio itself does
    loop.close()
    assert engine._all_ended.is_set()
    assert flush_logs(20.0)
    assert caplog.text.count("dropped without close(): 1 admitted messages were not delivered") == 1
