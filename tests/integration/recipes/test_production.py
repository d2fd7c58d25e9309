"""The programs of docs/production.md run unchanged, and its table of errors quotes the errors correctly."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from qflow_client import ConnectionFailed, DeliveryError, FlowControlTimeout, Outbox, Producer, ProducerClosed, Queue
from qflow_client.broker import Broker
from tests.integration.producer.tools import PATIENCE, eventually, unused_port
from tests.integration.recipes.services import PAGE, Service, running, write_programs

# What a Django project has around its views.
DJANGO = """
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.urls import path

settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="of a test")
application = get_wsgi_application()

import views

urlpatterns = [path("orders", views.order), path("ready/", views.ready)]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The programs of the page."""
    write_programs(tmp_path)
    (tmp_path / "site_of_shop.py").write_text(DJANGO, encoding="utf-8")
    conf = (tmp_path / "gunicorn.conf.py").read_text(encoding="utf-8")
    (tmp_path / "django.conf.py").write_text(conf.replace("from kiosk", "from views"), encoding="utf-8")
    return tmp_path


def arrived(broker: Broker) -> list[str | None]:
    return [message.properties.message_id for message in broker.messages("orders")]


@pytest.mark.program
@pytest.mark.parametrize(
    "program",
    [
        ("uvicorn", "shop:app", "--timeout-graceful-shutdown", "10", "--port"),
        ("gunicorn", "kiosk:app", "--bind"),
        ("gunicorn", "site_of_shop:application", "--config", "django.conf.py", "--bind"),
    ],
    ids=lambda program: program[1].partition(":")[0],
)
def test_E12_the_recipe_for_a_service_starts_without_its_broker_rejects_orders_in_time_and_loses_none(
    folder: Path, program: tuple[str, ...]
) -> None:
    amqp, http = unused_port(), unused_port()
    service = Service(http)
    at = f"127.0.0.1:{http}" if program[0] == "gunicorn" else str(http)
    with running(folder, amqp, "-m", *program, at) as process:
        eventually(service.is_there, "the service")
        assert service.order() == (503, "5")
        with Broker(port=amqp) as broker:
            eventually(lambda: service.order() == (202, None))
            broker.block("low on memory")
            eventually(lambda: service.order() == (503, "5"))
            if program[1] != "kiosk:app":
                assert service.ask("/ready/")[:2] == (503, "5")
            broker.unblock()
            eventually(lambda: service.order() == (202, None))
            eventually(lambda: sorted(map(str, arrived(broker))) == sorted(service.accepted))
        service.accepted.clear()
        # It has lost its queue.
        with Broker(port=amqp) as broker:
            eventually(lambda: service.order() == (202, None))
            for _ in range(20):
                service.order()
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == (-signal.SIGTERM if program[0] == "uvicorn" else 0)
            assert set(service.accepted) <= set(map(str, arrived(broker)))


@pytest.mark.program
def test_E12_the_recipe_with_an_outbox_accepts_orders_during_an_alarm_and_loses_none_when_it_ends(folder: Path) -> None:
    amqp, http = unused_port(), unused_port()
    service, outbox = Service(http), folder / "orders.outbox"
    shop = folder / "shop.py"
    # An alarm that stays keeps it for as long as that.
    shop.write_text(
        shop.read_text(encoding="utf-8").replace("close_timeout=10.0", "close_timeout=0.5"), encoding="utf-8"
    )
    spills = {"QFLOW_OUTBOX": str(outbox), "QFLOW_WHEN_FLOWED": "spill"}
    with running(folder, amqp, "-m", "uvicorn", "shop:app", "--port", str(http), **spills) as process:
        eventually(service.is_there, "the service")
        # There is no broker yet.
        assert service.order() == (202, None)
        with Broker(port=amqp) as broker:
            eventually(lambda: "orders" in [queue.name for queue in broker.queues()])
            eventually(lambda: set(service.accepted) <= set(map(str, arrived(broker))))
            broker.block("low on memory")
            eventually(lambda: service.order() == (202, None) and len(Outbox.look(outbox)) >= 5)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == -signal.SIGTERM
            left = {stored.message.message_id for stored in Outbox.look(outbox)}
            assert left
            assert set(service.accepted) <= {*arrived(broker), *left}


@pytest.mark.program
def test_E12_the_recipe_with_gunicorn_ends_in_time_while_the_broker_blocks_the_connection(folder: Path) -> None:
    http = unused_port()
    service, kiosk = Service(http), folder / "kiosk.py"
    kiosk.write_text(
        kiosk.read_text(encoding="utf-8").replace("close_timeout=10.0", "close_timeout=0.5"), encoding="utf-8"
    )
    arguments = ("-m", "gunicorn", "kiosk:app", "--bind", f"127.0.0.1:{http}")
    with Broker() as broker, running(folder, broker.port, *arguments) as process:
        eventually(service.is_there, "the service")
        eventually(lambda: service.order() == (202, None))
        broker.withhold_confirms()
        assert service.order() == (202, None)
        eventually(lambda: set(service.accepted) <= set(map(str, arrived(broker))))
        # The broker does not read what comes from now on.
        broker.block("low on memory")
        eventually(lambda: service.order() == (503, "5"))
        process.send_signal(signal.SIGTERM)
        # The limit of the page, `graceful_timeout`.
        output, _ = process.communicate(timeout=15)
        assert process.returncode == 0, output
        # The workers ended by themselves, and named what was not confirmed.
        assert "UndeliveredMessages" in output


@pytest.mark.program
@pytest.mark.parametrize("start", ["fork", "forkserver", "spawn"])
def test_in_the_recipe_for_a_process_pool_each_process_creates_its_own_producer(folder: Path, start: str) -> None:
    with Broker() as broker, running(folder, broker.port, "pool.py", start) as process:
        output, _ = process.communicate(timeout=PATIENCE)
        assert (process.returncode, output) == (0, "{'confirmed'}\n")
        assert sorted(map(str, arrived(broker))) == sorted(set(map(str, arrived(broker))))
        assert broker.queue("orders").depth == 100


@pytest.mark.program
def test_E12_a_worker_process_that_gets_sigterm_delivers_its_admitted_messages(folder: Path) -> None:
    with Broker() as broker, running(folder, broker.port, "worker.py") as process:
        eventually(lambda: "orders" in [queue.name for queue in broker.queues()] and broker.queue("orders").depth > 100)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, output
        assert output == f"{broker.queue('orders').depth} orders are confirmed\n"


FORKS = """
import os
from qflow_client import Producer, ProducerClosed
with Producer(os.environ["AMQP_URL"]) as producer:
    if os.fork():
        os.wait()
    else:
        try:
            producer.send(b"")
        except ProducerClosed as error:
            print(error, flush=True)
        os._exit(0)
"""


def test_the_table_of_errors_in_the_documentation_quotes_each_error_correctly(tmp_path: Path) -> None:
    told: list[str] = []

    def note(expected: type[Exception], call: object) -> None:
        assert callable(call)
        with pytest.raises(expected) as caught:
            call()
        told.append(str(caught.value))

    with Broker() as broker:
        with running(tmp_path, broker.port, "-c", FORKS) as process:
            told.append(process.communicate(timeout=PATIENCE)[0])
        broker.declare_queue("orders")
        with Producer(broker.url, routing_key="orders", capacity=1) as producer:
            broker.flow(False)
            broker.wait_until(lambda broker: broker.producers()[0].flow_ok)
            note(FlowControlTimeout, lambda: producer.send(b"", timeout=0))
            broker.block("low on memory")
            broker.flow(True)
            eventually(lambda: [hold.kind for hold in producer.flow_state.holds] == ["connection_blocked"])
            note(FlowControlTimeout, lambda: producer.send(b"", timeout=0))
            broker.unblock()
            broker.withhold_confirms()
            eventually(lambda: not producer.flow_state.holds)
            producer.send(b"")
            note(FlowControlTimeout, lambda: producer.send(b"", timeout=0))
            broker.release_confirms()
            producer.flush(PATIENCE)
            note(DeliveryError, lambda: producer.send(b"", routing_key="nowhere").result(PATIENCE))
            note(ConnectionFailed, lambda: Producer(broker.url, declare=Queue("orders", arguments={"x-expires": 1})))
        note(ProducerClosed, lambda: producer.send(b""))
        lost = Producer(broker.url, routing_key="orders")
    eventually(lambda: lost.flow_state.holds)
    note(FlowControlTimeout, lambda: lost.send(b"", timeout=0))
    lost.close(timeout=0)
    table = PAGE[PAGE.index("## What an error means") :]
    rows = [re.findall(r"`([^`]+)`", row.split("|")[1]) for row in table.splitlines()[4:] if row]
    assert len(rows) == 8
    for words in rows:
        assert any(all(word in text for word in words) for text in told), words
