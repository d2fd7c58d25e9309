"""After Ctrl-C at any line of the construction of a producer, the next producer can use the outbox."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qflow_client import AsyncProducer, Outbox, Producer
from qflow_client.aio.engine import Engine
from qflow_client.broker import Broker
from tests.collecting import collect
from tests.effort import EFFORT
from tests.integration.producer.tools import PATIENCE, eventually, outbox_is_free, wait_for_ends
from tests.interrupting import interrupted

# Each begins hundreds of times, however busy the machine is.
pytestmark = pytest.mark.timeout(600)
# A quick run interrupts every fifth line only.
EVERY = 29 if EFFORT == "quick" else 1
# Where the producers and their outboxes are made.
MAKERS = (
    "producer.py",
    "engine.py",
    "link.py",
    "database.py",
    "outbox.py",
    "outbox/file.py",
    "storage.py",
    "store.py",
    "writer.py",
)

Made = list[Producer | AsyncProducer]


def make(url: str, path: Path, made: Made) -> None:
    made.append(Producer(url, routing_key="q", outbox=path))


def make_async(url: str, path: Path, made: Made) -> None:
    async def connect() -> None:
        producer = AsyncProducer(url, routing_key="q", outbox=path)
        await producer.connect()
        made.append(producer)
        await producer.close(timeout=PATIENCE)

    asyncio.run(connect())


# What was interrupted before anybody had it Python closes by itself, and says so.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
# The loop of those that are made for asyncio ends without them.
@pytest.mark.filterwarnings("ignore:.*dropped without close:ResourceWarning")
# Ctrl-C comes between the call of a coroutine function and its await, too.
@pytest.mark.filterwarnings("ignore:coroutine '.*' was never awaited:RuntimeWarning")
@pytest.mark.parametrize("make", [make, make_async])
def test_if_ctrl_c_interrupts_the_construction_of_a_producer_its_outbox_is_free_for_the_next_producer(
    make: Callable[[str, Path, Made], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_ends(monkeypatch)
    path = tmp_path / "outbox"
    with Broker() as broker:
        broker.declare_queue("q")
        made: Made = []
        for at in range(1, 5000, EVERY):
            interrupted(lambda: make(broker.url, path, made), at, only=MAKERS)
            if made:
                break
            # Nobody has it, and nobody had to collect garbage for that.
            Outbox(path).close()
        else:
            pytest.fail("the construction has too many points")
        for producer in made:
            if isinstance(producer, Producer):
                producer.close(timeout=PATIENCE)
            elif producer._engine.storage is not None:
                producer._engine.storage.close(PATIENCE)
        assert at > 40
        # Nor is anything else left of them.
        broker.wait_until(lambda broker: len(broker.connections()) <= 1, timeout=PATIENCE)
        for thread in threading.enumerate():
            if thread.name.startswith(("qflow-io", "qflow-outbox", "qflow-callbacks")):
                thread.join(PATIENCE)
                assert not thread.is_alive(), thread.name
    # Leave no garbage whose warnings later tests would get.
    collect()


def test_if_the_event_loop_ends_while_a_producer_connects_its_outbox_is_free_for_the_next_producer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "outbox"
    loop = asyncio.new_event_loop()
    opened = asyncio.Event()

    async def connects_for_ever(_self: Any) -> None:
        opened.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Engine, "_connect", connects_for_ever)
    producer = AsyncProducer("amqp://127.0.0.1", routing_key="q", outbox=path)

    async def begin() -> Any:
        connecting = producer.connect()
        task = asyncio.ensure_future(connecting)
        await asyncio.wait_for(opened.wait(), PATIENCE)
        # Its task is lost with the loop.
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # as asyncio itself does
        return connecting

    connecting = loop.run_until_complete(begin())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    gc.disable()
    try:
        connecting.close()
        # Garbage need not be collected. The producer does not wait for the thread that closes the outbox.
        eventually(lambda: outbox_is_free(path))
    finally:
        gc.enable()
