"""The web service of docs/production.md runs under uvicorn with a real RabbitMQ."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pika
import pytest
from pika.exceptions import ChannelClosedByBroker

from qflow_client import Outbox, Producer
from qflow_client.testing.proxy import FaultProxy
from qflow_client.testing.rabbitmq import RabbitMQNode
from tests.integration.producer.tools import Stopwatch, ends_within, eventually, unused_port
from tests.integration.recipes.services import Service, running, write_programs

pytestmark = pytest.mark.rabbitmq

# Maximum seconds of a send in the service, of closing its producer, and of the end of its process.
SEND_TIMEOUT = 0.5
CLOSE_TIMEOUT = 1.0
ENDS_WITHIN = 8.0
PATIENCE = 60.0


class Orders:
    """The queue of the service, and the ids of all orders that were got from this queue."""

    def __init__(self, url: str) -> None:
        self._connection = pika.BlockingConnection(pika.URLParameters(url))
        self._taken: set[str] = set()

    def delete(self) -> None:
        self._connection.channel().queue_delete("orders")

    def arrived(self) -> set[str]:
        """Return the ids of the orders that have arrived so far. The queue may not exist yet."""
        channel = self._connection.channel()
        with suppress(ChannelClosedByBroker):
            for _, properties, _ in iter(lambda: channel.basic_get("orders", auto_ack=True), (None, None, None)):
                assert properties is not None
                self._taken.add(str(properties.message_id))
            channel.close()
        return self._taken

    def close(self) -> None:
        self.delete()
        self._connection.close()


@pytest.fixture
def orders(rabbitmq: RabbitMQNode) -> Iterator[Orders]:
    with closing(Orders(rabbitmq.url)) as orders:
        yield orders


def refused_in_time(service: Service) -> bool:
    """Return whether the service refuses an order. It may accept an order if its producer has no hold yet."""
    with Stopwatch() as watch:
        answer = service.order()
    assert answer in [(503, "5"), (202, None)]
    assert answer[0] == 202 or watch.kept(SEND_TIMEOUT)
    return answer[0] == 503


def test_E12_during_a_memory_alarm_a_web_service_answers_503_in_time_ends_in_time_and_loses_no_order(
    rabbitmq: RabbitMQNode, orders: Orders, tmp_path: Path
) -> None:
    write_programs(tmp_path)
    shop = tmp_path / "shop.py"
    limit = f"close_timeout={CLOSE_TIMEOUT}"
    shop.write_text(shop.read_text(encoding="utf-8").replace("close_timeout=10.0", limit), encoding="utf-8")
    amqp, http, outbox = unused_port(), unused_port(), tmp_path / "orders.outbox"
    service = Service(http)
    with running(tmp_path, amqp, "-m", "uvicorn", "shop:app", "--port", str(http), QFLOW_OUTBOX=str(outbox)) as process:
        eventually(service.is_there, "the service", timeout=PATIENCE)
        # No broker listens on the service's port yet.
        assert service.ask("/ready/")[:2] == (503, "5")
        assert refused_in_time(service)
        with FaultProxy(rabbitmq.url, port=amqp) as proxy:
            eventually(lambda: service.order()[0] == 202, "the broker is there", timeout=PATIENCE)
            eventually(lambda: orders.arrived() == set(service.accepted), timeout=PATIENCE)
            # The connection comes back, but the queue does not exist any more.
            orders.delete()
            proxy.cut()
            eventually(lambda: service.order()[0] == 202, "the connection is back", timeout=PATIENCE)
            eventually(lambda: orders.arrived() == set(service.accepted), "the queue is back", timeout=PATIENCE)
            rabbitmq.raise_memory_alarm()
            try:
                eventually(lambda: refused_in_time(service), "the alarm is heard of", timeout=PATIENCE)
                assert all(refused_in_time(service) for _ in range(3))
                assert service.ask("/ready/")[:2] == (503, "5")
                process.send_signal(signal.SIGTERM)
                with ends_within(ENDS_WITHIN):
                    assert process.wait(PATIENCE) == -signal.SIGTERM
                left = {stored.message.message_id for stored in Outbox.look(outbox)}
                assert left, "no order is in doubt"
            finally:
                rabbitmq.clear_memory_alarm()
    with Producer(rabbitmq.url, routing_key="orders", outbox=outbox) as producer:
        producer.flush(PATIENCE)
    assert Outbox.look(outbox) == []
    assert set(service.accepted) <= orders.arrived()
