"""The same program with kombu's transport for py-amqp and with ours, against a broker that sends ``Channel.Flow``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import kombu
import pytest
from celery import Celery
from kombu.exceptions import OperationalError

from qflow_client import ConfirmTimeout, FlowControlTimeout, HoldKind
from qflow_client.broker import Broker
from tests.integration.producer.tools import PATIENCE, Job, eventually, start

MARK = 10
ARGUMENTS = {"qpid.flow_stop_count": MARK, "qpid.flow_resume_count": 5}
COUNT = 50
# Maximum seconds of a wait that must time out. Waits that must succeed have the maximum `PATIENCE`.
WAIT = 1.0
# A transport option also creates a separate connection in Celery's pool.
SHORT: dict[str, Any] = {"max_producer_flow_control_wait": WAIT}

Send = Callable[[int], object]


@contextmanager
def of_kombu(url: str, queue: str, options: dict[str, Any]) -> Iterator[Send]:
    with kombu.Connection(url, transport_options=options) as connection:
        producer = connection.Producer(serializer="json")
        yield lambda number: producer.publish(number, routing_key=queue)


def ship(number: int) -> None:
    raise AssertionError("no worker is there to run it")


@contextmanager
def of_celery(url: str, queue: str, options: dict[str, Any]) -> Iterator[Send]:
    app = Celery("shop", broker=url)
    app.conf.update(task_ignore_result=True, broker_transport_options=options)
    app.conf.task_queues = [kombu.Queue(queue, durable=False, queue_arguments=ARGUMENTS)]
    task = app.task(ship, name="ship", shared=False)
    try:
        yield lambda number: task.apply_async((number,), queue=queue)
    finally:
        # Close the pool of connections, because the next program with this URL would use it.
        app.close()


PROGRAMS = pytest.mark.parametrize("program", [of_kombu, of_celery], ids=["kombu", "celery"])


@pytest.fixture
def queues(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    # Set the deadline in the environment, so that the programs differ only in the scheme of the URL.
    monkeypatch.setenv("QFLOW_MAX_PRODUCER_FLOW_CONTROL_WAIT", str(PATIENCE))
    for queue in "theirs", "ours":
        broker.declare_queue(queue, arguments=ARGUMENTS)


def has_taken(broker: Broker, queue: str, count: int) -> bool:
    return broker.queue(queue).published >= count


def publish_all(program: Any, broker: Broker, scheme: str, queue: str, count: int = COUNT, **options: Any) -> None:
    """Publish each message after the broker has received the previous message."""
    with program(broker.url.replace("amqp", scheme), queue, options) as send:
        for number in range(count):
            send(number)
            broker.wait_until(partial(has_taken, queue=queue, count=number + 1), PATIENCE)


@PROGRAMS
@pytest.mark.usefixtures("queues")
def test_C3_pyamqp_publishes_during_a_stop_and_the_qflow_transport_waits_until_its_deadline(broker, program):
    publish_all(program, broker, "pyamqp", "theirs")
    assert broker.queue("theirs").depth == COUNT
    with pytest.raises(OperationalError, match="channel_flow") as caught:
        publish_all(program, broker, "qflow", "ours", **SHORT)
    assert isinstance(caught.value.__cause__, FlowControlTimeout)
    # The queue gets one message above the threshold, and the messages in flight until the client reads the stop.
    assert MARK < broker.queue("ours").peak_depth < COUNT


@PROGRAMS
@pytest.mark.usefixtures("queues")
def test_C3_the_qflow_transport_continues_to_publish_when_a_stop_ends(broker, program):
    job: Job = start(publish_all, program, broker, "qflow", "ours")
    taken = 0
    eventually(lambda: broker.queue("ours").flow_stopped)

    def take() -> bool:
        nonlocal taken
        taken += broker.get("ours") is not None
        return taken == COUNT

    eventually(take)
    job.result()
    assert broker.queue("ours").flow_stopped_count >= 1
    assert broker.queue("ours").peak_depth < COUNT


@PROGRAMS
@pytest.mark.usefixtures("queues")
def test_C5_if_a_confirm_is_withheld_pyamqp_hangs_and_the_qflow_transport_raises(broker, program):
    hanging = start(publish_all, program, broker, "pyamqp", "theirs", MARK + 2, confirm_publish=True)
    broker.wait_until(lambda broker: broker.queue("theirs").flow_stopped)
    publish_all(program, broker, "qflow", "ours", MARK, confirm_publish=True)
    with pytest.raises(OperationalError, match="held by channel_flow") as caught:
        publish_all(program, broker, "qflow", "ours", 1, confirm_publish=True, **SHORT)
    assert isinstance(caught.value.__cause__, ConfirmTimeout), "it was written, and nobody knows what became of it"
    assert broker.queue("ours").peak_depth == MARK + 1
    assert hanging.is_alive(), "pyamqp hangs"
    for queue in "theirs", "ours":
        broker.purge(queue)
    hanging.result()
    publish_all(program, broker, "qflow", "ours", MARK, confirm_publish=True)


@pytest.mark.usefixtures("queues")
def test_A4_after_a_ConfirmTimeout_on_a_stopped_channel_the_next_publish_is_held_and_not_sent(broker):
    url = broker.url.replace("amqp", "qflow")
    with kombu.Connection(url, transport_options={"confirm_publish": True}) as connection:
        producer = connection.Producer(serializer="json")
        send = partial(producer.publish, routing_key="ours")
        for number in range(MARK):
            send(number)
        with pytest.raises(OperationalError) as caught:
            send(MARK, confirm_timeout=WAIT)
        assert isinstance(caught.value.__cause__, ConfirmTimeout)
        eventually(lambda: producer.channel.flow_state.flowed)
        with pytest.raises(OperationalError) as caught:
            send(MARK, timeout=WAIT)
        cause = caught.value.__cause__
        assert isinstance(cause, FlowControlTimeout)
        assert [hold.kind for hold in cause.holds] == [HoldKind.CHANNEL_FLOW]
        assert broker.purge("ours") == MARK + 1
        send(0)
