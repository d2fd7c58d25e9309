"""Functions that send the flights of one airport in order, one function for each producer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import kombu

import qflow_client.aio_pika
import qflow_client.kombu
import qflow_client.pika
from qflow_client import AsyncProducer, FlowControlTimeout, Producer
from qflow_client.testing.proxy import FaultProxy
from tests.integration.producer.tools import eventually
from tests.interop.contract.providers import PATIENCE

#: Number of messages in flight when a connection is cut.
CUT = 100
# Fractions of a sender's flights after which its connection is cut.
_PARTS = (0.25, 0.6)
# Maximum seconds of a send while the sender receives nothing.
_STOPPED = 5.0
# Maximum seconds of any other wait, for example if nothing is consumed from the queue.
_PATIENCE = 600.0
# Number of concurrent publishes of a program that waits for each confirm.
_AT_ONCE = 500

Send = Callable[[str, str, Sequence[bytes], FaultProxy | None], None]


class Cuts:
    """Cuts the connection of a sender while messages are in flight. The messages arrive, but their confirms do not.

    Args:
        proxy: the proxy of the connection; ``None`` if the connection is not cut.
        count: number of messages of the sender.
    """

    def __init__(self, proxy: FaultProxy | None, count: int) -> None:
        self._proxy = proxy
        self._begin_at = [int(part * count) for part in _PARTS] if proxy is not None else []
        self._end_at = -1

    def begin(self, at: int) -> bool:
        """Whether the messages in flight begin with this message. All earlier messages must be confirmed before it."""
        return at in self._begin_at

    def deafen(self, at: int) -> None:
        """Let no more bytes of the broker reach the sender."""
        assert self._proxy is not None
        self._end_at = at + CUT - 1
        self._proxy.black_hole("to_client", connection=self._proxy.accepted)

    def timeout(self, at: int) -> float | None:
        """Maximum seconds of a send. A sender that is stopped after `deafen` would never learn that it may continue."""
        return _STOPPED if at <= self._end_at else None

    def missed(self, at: int) -> None:
        """Cut the connection now, because the sender was stopped. Repeat the test with later messages."""
        assert self._proxy is not None
        self._end_at = -1
        self._begin_at.append(at + CUT)
        self._proxy.cut()

    def end(self, at: int) -> bool:
        """Whether this message is the last of the messages in flight."""
        return at == self._end_at

    def cut(self) -> None:
        assert self._proxy is not None
        self._proxy.cut()


def with_producer(url: str, queue: str, bodies: Sequence[bytes], proxy: FaultProxy | None) -> None:
    cuts = Cuts(proxy, len(bodies))
    with Producer(url, routing_key=queue, max_producer_flow_control_wait=_PATIENCE, reconnect_delay=0.05) as producer:
        for at, body in enumerate(bodies):
            if cuts.begin(at):
                producer.flush(timeout=_PATIENCE)
                assert producer.wait_unflowed(PATIENCE)
                cuts.deafen(at)
            try:
                producer.send(body, timeout=cuts.timeout(at))
            except FlowControlTimeout:
                cuts.missed(at)
                producer.send(body)
            if cuts.end(at):
                eventually(lambda: producer.in_flight == CUT, "all have left", timeout=PATIENCE)
                cuts.cut()
        producer.flush(timeout=_PATIENCE)


def with_async_producer(url: str, queue: str, bodies: Sequence[bytes], proxy: FaultProxy | None) -> None:
    cuts = Cuts(proxy, len(bodies))

    async def program() -> None:
        async with AsyncProducer(
            url, routing_key=queue, max_producer_flow_control_wait=_PATIENCE, reconnect_delay=0.05
        ) as producer:
            for at, body in enumerate(bodies):
                if cuts.begin(at):
                    await producer.flush(timeout=_PATIENCE)
                    assert await producer.wait_unflowed(PATIENCE)
                    cuts.deafen(at)
                try:
                    await producer.send(body, timeout=cuts.timeout(at))
                except FlowControlTimeout:
                    cuts.missed(at)
                    await producer.send(body)
                if cuts.end(at):
                    async with asyncio.timeout(PATIENCE):
                        while producer.in_flight != CUT:  # noqa: ASYNC110 - there is no event for this
                            await asyncio.sleep(0.001)
                    cuts.cut()
            await producer.flush(timeout=_PATIENCE)

    asyncio.run(program())


def with_pika_drop_in(url: str, queue: str, bodies: Sequence[bytes], proxy: FaultProxy | None) -> None:
    pika = qflow_client.pika
    parameters = pika.URLParameters(f"{url}{'&' if '?' in url else '?'}max_producer_flow_control_wait=600")
    with pika.BlockingConnection(parameters) as connection:
        channel = connection.channel()
        try:
            channel.confirm_delivery(pipelined=True)
        except pika.exceptions.MethodNotImplemented:
            # The broker does not announce confirms, so pika does not select them.
            pass
        for body in bodies:
            channel.basic_publish("", queue, body)
        if channel.is_open:
            channel.wait_for_confirms()


def with_aio_pika_drop_in(url: str, queue: str, bodies: Sequence[bytes], proxy: FaultProxy | None) -> None:
    async def program() -> None:
        room = asyncio.Semaphore(_AT_ONCE)
        async with await qflow_client.aio_pika.connect(url) as connection:
            channel = await connection.channel()

            async def publish(body: bytes) -> None:
                try:
                    message = qflow_client.aio_pika.Message(body)
                    await channel.default_exchange.publish(message, queue, timeout=600)
                finally:
                    room.release()

            async with asyncio.TaskGroup() as group:
                for body in bodies:
                    await room.acquire()
                    group.create_task(publish(body))

    asyncio.run(program())


def with_kombu(url: str, queue: str, bodies: Sequence[bytes], proxy: FaultProxy | None) -> None:
    options = {"confirm_publish": "pipelined", "max_producer_flow_control_wait": 600}
    with kombu.Connection(url.replace("amqp", "qflow", 1), transport_options=options) as connection:
        producer: Any = connection.Producer()
        for body in bodies:
            producer.publish(
                body, exchange="", routing_key=queue, content_type="text/csv", content_encoding="binary", retry=False
            )
        producer.channel.wait_for_confirms()


SENDERS: dict[str, Send] = {
    "Producer": with_producer,
    "AsyncProducer": with_async_producer,
    "pika drop-in": with_pika_drop_in,
    "aio-pika drop-in": with_aio_pika_drop_in,
    "kombu transport": with_kombu,
}
#: Producers that resend lost messages. The test cuts the connection of one of their senders.
RECOVERING = ("Producer", "AsyncProducer")
