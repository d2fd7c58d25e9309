"""A Celery application on a real RabbitMQ, with kombu's own transport and with ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu.exceptions import OperationalError

from qflow_client import ConfirmTimeout, FlowControlTimeout, HoldKind
from qflow_client.testing.rabbitmq import RabbitMQNode
from tests.integration.kombu import parity
from tests.integration.kombu.scenarios import Application, a_chord, all_scenarios, application, ends_when_told
from tests.integration.producer.tools import Stopwatch, eventually, start

pytestmark = pytest.mark.rabbitmq

# Maximum seconds of a wait of our transport that must time out, and seconds after which a call counts as hanging.
WAIT = 0.5
HANGS = 3 * WAIT
PATIENCE = 100.0

SCHEMES = ["pyamqp", "qflow"]


def url(node: RabbitMQNode, scheme: str) -> str:
    return node.url.replace("amqp://", f"{scheme}://")


@parity.all_scenarios
@pytest.mark.parametrize("confirms", [False, True], ids=["unconfirmed", "confirmed"])
def test_the_qflow_transport_has_the_results_exceptions_and_order_of_callbacks_of_pyamqp(
    rabbitmq: RabbitMQNode, name: str, confirms: bool
) -> None:
    theirs, ours = (parity.outcome(rabbitmq.url, scheme, name, confirms=confirms) for scheme in SCHEMES)
    assert ours == theirs


@pytest.fixture(scope="module", params=SCHEMES)
def of(
    request: pytest.FixtureRequest, rabbitmq: RabbitMQNode, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Application]:
    with application(url(rabbitmq, request.param), tmp_path_factory.mktemp("rpc"), "rpc://") as made:
        yield made
        ends_when_told(made)


@all_scenarios
def test_a_celery_application_works_with_the_url_schemes_pyamqp_and_qflow(
    of: Application, scenario: Callable[[Application], None]
) -> None:
    scenario(of)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_celery_chords_work_with_the_url_schemes_pyamqp_and_qflow(
    rabbitmq: RabbitMQNode, scheme: str, tmp_path: Path
) -> None:
    with application(url(rabbitmq, scheme), tmp_path, f"file://{tmp_path}", "-c", "2") as of:
        a_chord(of)
        ends_when_told(of)


def take(body: str) -> None:
    raise AssertionError("no worker is there to run it")


class Client:
    """A program that calls ``apply_async``. Only the URL differs between the two transports."""

    def __init__(self, node: RabbitMQNode, scheme: str, **transport_options: Any) -> None:
        ours = {"max_producer_flow_control_wait": WAIT} if scheme == "qflow" else {}
        self.app = Celery("client", broker=url(node, scheme))
        self.app.conf.update(task_ignore_result=True, broker_transport_options=transport_options | ours)
        self.task = self.app.task(take, name="take", shared=False)
        self.called = 0
        self.call(confirm_timeout=PATIENCE)

    def call(self, **options: Any) -> None:
        self.task.apply_async(("x" * 100_000,), queue="orders", **options)
        self.called += 1

    def run(self, count: int) -> None:
        for _ in range(count):
            self.call()

    def depth(self) -> int:
        with self.app.connection_for_read() as connection:
            return int(connection.default_channel.queue_declare("orders", passive=True).message_count)

    def close(self) -> None:
        self.app.pool.force_close_all()
        self.app.close()


def goes_on(client: Client) -> bool:
    """Return whether a call is accepted again. A call that raises sends nothing."""
    try:
        client.call(confirm_timeout=PATIENCE)
    except OperationalError as error:
        if not isinstance(error.__cause__, FlowControlTimeout):
            raise
        return False
    return True


def test_during_a_memory_alarm_a_task_sent_with_confirms_hangs_with_pyamqp_and_raises_with_qflow(
    own_rabbitmq: RabbitMQNode,
) -> None:
    theirs, ours = (Client(own_rabbitmq, scheme, confirm_publish=True) for scheme in SCHEMES)
    own_rabbitmq.raise_memory_alarm()
    job = start(theirs.call)
    unknown = 0
    end = time.monotonic() + PATIENCE
    cause: BaseException | None = None
    # The first call makes the broker block the connection. The broker may send its notice after this call's deadline.
    while not isinstance(cause, FlowControlTimeout):
        assert time.monotonic() < end, "the broker does not say that it blocks the connection"
        with Stopwatch() as watch, pytest.raises(OperationalError, match=r"no answer|was not sent") as caught:
            ours.call()
        assert watch.kept(WAIT), "Celery's own retries do not wait again"
        cause = caught.value.__cause__
        unknown += isinstance(cause, ConfirmTimeout)
        assert isinstance(cause, ConfirmTimeout | FlowControlTimeout)
        assert ("was not sent" in str(caught.value)) == isinstance(cause, FlowControlTimeout)
    assert unknown >= 1
    assert [hold.kind for hold in cause.holds] == [HoldKind.CONNECTION_BLOCKED]
    with Stopwatch() as watch, pytest.raises(OperationalError) as caught:
        ours.call(declare=[ours.app.amqp.queues.select_add("another")])
    assert watch.kept(WAIT), "the declaration of a queue would hang, too"
    assert isinstance(caught.value.__cause__, FlowControlTimeout)
    job.join(HANGS)
    assert job.is_alive(), "pyamqp hangs"
    own_rabbitmq.clear_memory_alarm()
    job.result(PATIENCE)
    eventually(lambda: goes_on(ours), timeout=PATIENCE)
    # Messages with an unknown outcome have arrived. Messages that were not sent have not.
    assert ours.depth() == theirs.called + ours.called + unknown
    for client in theirs, ours:
        client.close()


def test_during_a_memory_alarm_a_task_sent_without_confirms_hangs_with_pyamqp_and_raises_with_qflow(
    own_rabbitmq: RabbitMQNode,
) -> None:
    theirs, ours = (Client(own_rabbitmq, scheme) for scheme in SCHEMES)
    own_rabbitmq.raise_memory_alarm()
    # The broker blocks the connection after a first publish, so publish until its notice arrives.
    partly_written = 0
    cause: BaseException | None = None
    while not isinstance(cause, FlowControlTimeout):
        ended = start(ours.run, 1000).wait(PATIENCE)
        assert isinstance(ended, OperationalError)
        cause = ended.__cause__
        assert isinstance(cause, ConfirmTimeout | FlowControlTimeout)
        # If the notice is late, the message that fills the socket may be partly written.
        partly_written += isinstance(cause, ConfirmTimeout)
    job = start(theirs.run, 1000)
    job.join(HANGS)
    assert job.is_alive(), "pyamqp hangs"
    # If the notice came so late that our socket was also full, our socket contains some more messages.
    if not partly_written and HoldKind.TRANSPORT not in [hold.kind for hold in cause.holds]:
        eventually(lambda: theirs.called >= ours.called, "pyamqp has gone on", timeout=PATIENCE)
    # Closing the client must not hang.
    start(ours.close).result(PATIENCE)
    own_rabbitmq.clear_memory_alarm()
    job.result(PATIENCE)
    theirs.close()


def test_a_celery_worker_runs_tasks_during_a_memory_alarm(own_rabbitmq: RabbitMQNode, tmp_path: Path) -> None:
    """The worker cannot send its events and replies, but continues."""
    with application(url(own_rabbitmq, "qflow"), tmp_path, f"file://{tmp_path}", "-c", "2") as of:
        add = of.task("add")
        results = [add.apply_async((number, 1), countdown=3.0) for number in range(20)]
        assert add.delay(1, 1).get(timeout=PATIENCE) == 2
        own_rabbitmq.raise_memory_alarm()
        with Stopwatch() as watch:
            assert [result.get(timeout=PATIENCE) for result in results] == list(range(1, 21))
        # A publish in the worker may wait for a minute.
        assert watch.within(45.0), "no task waits for what its worker has to say"
        own_rabbitmq.clear_memory_alarm()
        assert add.delay(2, 2).get(timeout=PATIENCE) == 4
        of.app.control.shutdown()
        assert of.process.wait(PATIENCE) == 0
