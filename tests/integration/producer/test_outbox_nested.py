"""E2 with an outbox: signal handlers and finalizers call producers at any moment, and no step is entered twice."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qflow_client import AsyncProducer, NotDurable, Outbox, Producer, ProducerFlowed
from qflow_client.broker import Broker
from tests.collecting import collect
from tests.interrupting import EVERY, each_interrupt

from .test_nested import Garbage, in_time
from .tools import PATIENCE, bodies, eventually

pytestmark = pytest.mark.usefixtures("patient_sends")

# Calls of an application. Each waits for the disk.
CALLS: dict[str, Callable[[Producer], object]] = {
    "send": lambda producer: producer.send(b"own", timeout=PATIENCE),
    "send for ever": lambda producer: producer.send(b"own", timeout=None),
    "send_nowait": lambda producer: producer.send_nowait(b"own"),
    "send_many": lambda producer: producer.send_many([b"own"] * 3, timeout=PATIENCE),
}


class Nested:
    """Sends by a producer from inside anything, and keeps what comes of it.

    Args:
        send: sends a message and returns its receipt.
    """

    def __init__(self, send: Callable[[], Any]) -> None:
        self._send = send
        self.calls = 0
        self.receipts: list[Any] = []

    def __call__(self) -> None:
        self.calls += 1
        try:
            self.receipts.append(self._send())
        except ProducerFlowed:
            return
        except NotDurable as error:
            self.receipts.append(error.receipt)

    def check(self, broker: Broker) -> None:
        """All that was admitted is confirmed, and has an id of its own."""
        assert all(receipt.delivered for receipt in self.receipts)
        ids = [receipt.message_id for receipt in self.receipts]
        assert len(set(ids)) == len(ids)
        assert bodies(broker).count(b"nested") == len(ids)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("when_flowed", ["block", "spill"])
def test_E2_with_an_outbox_a_signal_handler_may_send_at_any_point_of_a_send(
    broker: Broker, tmp_path: Path, when_flowed: str, call: Callable[[Producer], object]
) -> None:
    path = tmp_path / "outbox"

    def run() -> Nested:
        with Producer(broker.url, routing_key="q", outbox=path, when_flowed=when_flowed) as producer:  # type: ignore[arg-type]
            nested = Nested(lambda: producer.send(b"nested", timeout=0))
            for interrupt in each_interrupt(least=60, every=EVERY):
                interrupt(lambda: call(producer), handler=nested)
            producer.flush(PATIENCE)
        return nested

    nested = in_time(run)
    assert nested.calls > 60 / EVERY
    nested.check(broker)
    assert Outbox.look(path) == []


def test_E2_with_an_outbox_finalizers_on_any_thread_may_send(broker: Broker, tmp_path: Path) -> None:
    def run() -> Nested:
        threshold = gc.get_threshold()
        with Producer(broker.url, routing_key="q", outbox=tmp_path / "outbox", when_flowed="spill") as producer:
            nested = Nested(lambda: producer.send(b"nested", timeout=0))
            try:
                # The thread of the outbox collects garbage, too.
                gc.set_threshold(1)
                for _ in range(200):
                    Garbage(nested)
                    producer.send(b"own", timeout=PATIENCE)
            finally:
                gc.set_threshold(*threshold)
            collect()
            producer.flush(PATIENCE)
        return nested

    nested = in_time(run)
    assert nested.calls == 200
    nested.check(broker)


def test_E2_with_an_outbox_a_signal_handler_may_send_at_any_point_of_an_asyncio_send(
    broker: Broker, tmp_path: Path
) -> None:
    async def run() -> Nested:
        async with AsyncProducer(broker.url, routing_key="q", outbox=tmp_path / "outbox") as producer:
            nested = Nested(lambda: producer.send_nowait(b"nested"))
            for interrupt in each_interrupt(least=60, every=EVERY):
                interrupt(lambda: producer.send_nowait(b"own"), handler=nested)
                await asyncio.sleep(0)
            await producer.flush(PATIENCE)
        return nested

    nested = in_time(lambda: asyncio.run(run()))
    assert nested.calls > 60 / EVERY
    nested.check(broker)
    eventually(lambda: Outbox.look(tmp_path / "outbox") == [], "an empty outbox")
