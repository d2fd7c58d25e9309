"""A Dramatiq application whose broker uses the drop-in instead of pika."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import qflow_client.pika
from qflow_client import FlowControlTimeout
from qflow_client.broker import Broker
from tests.integration.producer.tools import bodies, eventually, go_on, start, stop, takes

from .tools import waiting_at_most

dramatiq = pytest.importorskip("dramatiq")
rabbitmq = pytest.importorskip("dramatiq.brokers.rabbitmq")

# Maximum milliseconds of a wait for Dramatiq.
PATIENCE = 60_000


@pytest.fixture
def application(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """A function that creates Dramatiq's broker with the given settings."""
    monkeypatch.setattr(rabbitmq, "pika", qflow_client.pika)
    made: list[Any] = []

    def application(**settings: Any) -> Any:
        query = "&".join(f"{name}={value}" for name, value in settings.items())
        made.append(rabbitmq.RabbitmqBroker(url=f"{broker.url}?{query}", confirm_delivery=True))
        return made[-1]

    yield application
    broker.unblock()
    broker.flow(True)
    for each in made:
        each.close()


@pytest.mark.parametrize("how", ["alarm", "flow"])
def test_J7_a_send_of_Dramatiq_raises_at_its_deadline_during_a_stop_and_works_after_it(
    broker: Broker, application: Callable[..., Any], how: str
) -> None:
    app = application(max_producer_flow_control_wait=60)
    actor = dramatiq.actor(lambda number: None, broker=app, actor_name="actor")
    actor.send(1)
    stop(broker, how)
    eventually(lambda: app.channel.flow_state.flowed)
    with waiting_at_most(app.channel, 0.3), takes(0.3), pytest.raises(FlowControlTimeout):
        actor.send(2)
    go_on(broker, how)
    eventually(lambda: not app.channel.flow_state.flowed)
    actor.send(3)
    broker.wait_until(lambda broker: broker.queue("default").depth == 2)
    assert [json.loads(body)["args"] for body in bodies(broker, "default")] == [[1], [3]]


@pytest.mark.parametrize("how", ["alarm", "flow"])
def test_a_worker_whose_actors_send_messages_waits_until_a_stop_ends(
    broker: Broker, application: Callable[..., Any], how: str
) -> None:
    app = application(max_producer_flow_control_wait=60)
    done: list[int] = []
    second = dramatiq.actor(done.append, broker=app, actor_name="second", queue_name="second")
    first = dramatiq.actor(lambda number: second.send(number) and None, broker=app, actor_name="first")
    worker = dramatiq.Worker(app, worker_timeout=100, worker_threads=2)
    worker.start()
    try:
        first.send(0)
        eventually(lambda: done == [0])
        stop(broker, how)
        eventually(lambda: app.channel.flow_state.flowed)
        jobs = [start(first.send, number) for number in range(1, 20)]
        go_on(broker, how)
        for job in jobs:
            job.result()
        app.join("default", timeout=PATIENCE)
        eventually(lambda: sorted(done) == list(range(20)))
    finally:
        worker.stop()
