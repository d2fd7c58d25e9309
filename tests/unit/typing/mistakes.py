"""Mistakes that mypy and pyright must find. If a tool misses a mistake, it reports an unused ``type: ignore``."""

from __future__ import annotations

from qflow_client import AsyncProducer, Producer, ProducerSettings, Queue, Topology


def threads(producer: Producer) -> None:
    Producer("amqp://host/", capcity=5)  # type: ignore[call-arg]
    Producer("amqp://host/", capacity="5")  # type: ignore[arg-type]
    Producer("amqp://host/", when_flowed="wait")  # type: ignore[arg-type]
    Producer("amqp://host/", on_flow="print")  # type: ignore[arg-type]
    Producer("amqp://host/", credentials="token")  # type: ignore[arg-type]
    Producer("amqp://host/", declare=["orders"])  # type: ignore[arg-type]
    Producer(settings=ProducerSettings(url=["amqp://a/", "amqp://b/"], on_blocked="failover"))
    ProducerSettings(on_blocked="fail")  # type: ignore[arg-type]
    ProducerSettings(capcity=5)  # type: ignore[call-arg]
    producer.send({"number": 1})  # type: ignore[arg-type]
    producer.send(b"body", key="orders")  # type: ignore[call-arg]
    producer.flush("5")  # type: ignore[arg-type]
    Topology(queues=[Queue(b"orders")])  # type: ignore[arg-type]


async def tasks(producer: AsyncProducer) -> None:
    AsyncProducer("amqp://host/", liveness="2 s")  # type: ignore[arg-type]
    receipt = await producer.send(b"body")
    # `result` returns a coroutine, which has no attribute `name`.
    receipt.result().name  # type: ignore[attr-defined]  # noqa: B018
