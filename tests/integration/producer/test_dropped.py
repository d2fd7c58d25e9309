"""A producer that the application drops without closing it."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from pathlib import Path

import pytest

from qflow_client import AsyncProducer, Outcome, Producer, Receipt
from qflow_client.broker import Broker
from tests.collecting import collect
from tests.integration.aio.tools import soon

from .tools import PATIENCE, Flows, eventually, outbox_is_free

# An error in a finalizer would only be printed.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


def _drop(held: list[Producer] | list[AsyncProducer]) -> None:
    """Drop the only reference to a producer."""
    gone = weakref.ref(held.pop())
    collect()
    assert gone() is None


def _warnings(recwarn: pytest.WarningsRecorder) -> list[str]:
    """Return the warnings about the test's producer. There may be warnings about the garbage of earlier tests."""
    texts = [str(each.message) for each in recwarn if each.category is ResourceWarning]
    return [text for text in texts if text.startswith("dropped")]


def _threads(kind: str) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == f"qflow-{kind} dropped"]


@pytest.mark.parametrize("listens", [False, True], ids=["plain", "with callbacks"])
def test_E6_a_producer_without_references_emits_a_warning_delivers_admitted_messages_and_ends(
    broker: Broker, listens: bool
) -> None:
    told: list[Receipt] = []
    held = [Producer(broker.url, routing_key="q", name="dropped", on_delivery=told.append if listens else None)]
    if listens:
        held[0].on_flow(Flows())
        held[0].flow_events()
    broker.withhold_confirms()
    receipts = held[0].send_many([b"%d" % number for number in range(100)])
    with pytest.warns(ResourceWarning, match=r"dropped: the producer was dropped without close\(\)"):
        _drop(held)
    broker.release_confirms()
    assert [receipt.result(timeout=PATIENCE) for receipt in receipts] == [Outcome.CONFIRMED] * 100
    eventually(lambda: not broker.connections(), "the connection ends")
    eventually(lambda: not _threads("io") and not _threads("callbacks"), "the threads end")
    assert len(told) == 100 * listens


def test_E6_a_producer_without_references_frees_its_outbox_as_soon_as_a_thread_can_be_started(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    def start(thread: threading.Thread) -> None:
        tries.append(thread.name)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("qflow_client.sync.engine._NEXT_TRY", 0.01)
    held = [Producer(broker.url, routing_key="q", name="dropped", outbox=tmp_path / "outbox")]
    with monkeypatch.context() as now:
        now.setattr(threading.Thread, "start", start)
        with pytest.warns(ResourceWarning, match="dropped"):
            _drop(held)
        eventually(lambda: tries.count("qflow-end dropped") > 1, "another try")
    eventually(lambda: outbox_is_free(tmp_path / "outbox"), "an outbox that is free")


def test_E6_messages_that_a_producer_without_references_could_not_deliver_are_logged(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    held = [Producer(broker.url, routing_key="q", name="dropped", max_producer_flow_control_wait=0.1)]
    broker.withhold_confirms()
    receipt = held[0].send(b"lost", timeout=PATIENCE)
    with caplog.at_level(logging.ERROR, "qflow_client"):
        with pytest.warns(ResourceWarning, match="dropped"):
            _drop(held)
        eventually(lambda: "dropped: the producer was dropped without close(): 1 admitted messages" in caplog.text)
    assert receipt.outcome is Outcome.UNKNOWN
    broker.release_confirms()


def test_a_producer_without_references_releases_its_outbox(broker: Broker, tmp_path: Path) -> None:
    held = [Producer(broker.url, routing_key="q", name="dropped", outbox=tmp_path / "outbox")]
    held[0].send(b"kept")
    with pytest.warns(ResourceWarning, match="dropped"):
        _drop(held)

    eventually(lambda: outbox_is_free(tmp_path / "outbox"))
    assert broker.queue("q").depth == 1


def test_a_closed_producer_emits_no_warning(broker: Broker, recwarn: pytest.WarningsRecorder) -> None:
    held = [Producer(broker.url, routing_key="q", name="dropped")]
    held[0].close()
    _drop(held)
    assert _warnings(recwarn) == []


def test_E6_an_async_producer_without_references_emits_a_warning_delivers_its_messages_and_ends(broker: Broker) -> None:
    async def main() -> None:
        held = [await AsyncProducer(broker.url, routing_key="q", name="dropped").connect()]
        broker.withhold_confirms()
        receipts = await held[0].send_many([b"%d" % number for number in range(100)])
        with pytest.warns(ResourceWarning, match=r"dropped: the producer was dropped without close\(\)"):
            _drop(held)
        broker.release_confirms()
        async with asyncio.timeout(PATIENCE):
            assert [await receipt for receipt in receipts] == [Outcome.CONFIRMED] * 100
            await asyncio.to_thread(broker.wait_until, lambda broker: not broker.connections())

    asyncio.run(main())


def test_an_async_producer_that_never_connected_emits_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    _drop([AsyncProducer("amqp://localhost", routing_key="q", name="dropped")])
    assert _warnings(recwarn) == []


def test_an_async_producer_whose_event_loop_is_closed_can_be_garbage_collected_without_an_error(broker: Broker) -> None:
    # Not the result of a task, which an exception of aiormq may keep alive.
    held: list[AsyncProducer] = []

    async def connect() -> None:
        held.append(AsyncProducer(broker.url, routing_key="q", name="dropped", reconnect_timeout=0))
        await held[0].connect()
        # aio-pika leaves tasks behind in a loop that ends before its connection.
        broker.drop_connections()
        await soon(lambda: held[0].closed)

    asyncio.run(connect())
    with pytest.warns(ResourceWarning, match="dropped"):
        _drop(held)


class Application:
    """Has a producer whose callbacks refer to it."""

    def __init__(self, url: str) -> None:
        self.producer = Producer(url, routing_key="q", on_delivery=self.done)
        self.producer.on_flow(lambda _event: self.done(None))

    def done(self, _receipt: object) -> None:
        """Called by the producer."""


def test_E6_an_application_referenced_by_callbacks_of_a_closed_producer_is_garbage_collected(broker: Broker) -> None:
    held = [Application(broker.url)]
    held[0].producer.close()
    gone = weakref.ref(held.pop())
    eventually(lambda: gc.collect() >= 0 and gone() is None, "the application is collected")


def test_E6_an_async_producer_that_never_connected_keeps_no_object_alive() -> None:
    class Owner:
        def __init__(self) -> None:
            self.producer = AsyncProducer("amqp://localhost", routing_key="q", on_delivery=self.done)

        def done(self, _receipt: Receipt) -> None:
            """Called by the producer."""

    gone = weakref.ref(Owner())
    collect()
    assert gone() is None


@pytest.mark.usefixtures("patient_sends", "patient_ends")
@pytest.mark.parametrize("when", ["as the loop ends", "after the loop"])
def test_a_producer_garbage_collected_with_its_event_loop_frees_the_outbox_and_logs_lost_messages(
    broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    held: list[AsyncProducer] = []

    async def main() -> None:
        producer = await AsyncProducer(
            broker.url, routing_key="q", name="dropped", outbox=tmp_path / "outbox", when_flowed="spill"
        ).connect()
        broker.flow(False)
        await soon(lambda: not producer._protocol.gate.is_open)
        await producer.send(b"stored", timeout=0)
        if when == "after the loop":
            held.append(producer)

    def run() -> None:
        asyncio.run(main())
        if held:
            _drop(held)

    with pytest.warns(ResourceWarning, match="dropped"):
        run()
    eventually(lambda: "dropped without close(): 1 admitted messages" in caplog.text)
    broker.flow(True)
    eventually(lambda: outbox_is_free(tmp_path / "outbox"))
    with Producer(broker.url, routing_key="q", outbox=tmp_path / "outbox"):
        pass
    assert [message.body for message in broker.messages("q")] == [b"stored"]


def test_a_closed_producer_with_an_outbox_uses_no_memory(broker: Broker, tmp_path: Path) -> None:
    async def connect_and_close() -> weakref.ref[object]:
        async with AsyncProducer(broker.url, outbox=tmp_path / "outbox") as producer:
            return weakref.ref(producer._engine)

    with Producer(broker.url, outbox=tmp_path / "outbox") as producer:
        engine = weakref.ref(producer._engine)
    del producer
    gone = asyncio.run(connect_and_close())
    collect()
    assert engine() is gone() is None
