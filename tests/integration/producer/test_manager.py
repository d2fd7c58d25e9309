from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from qflow_client import (
    FlowControlTimeout,
    FlowManager,
    Outcome,
    Producer,
    ProducerClosed,
    UndeliveredMessages,
    flow_manager,
)
from qflow_client.broker import Broker
from tests.effort import rounds

from .tools import DEADLINE, bodies, finish, holds, start, start_send, wait_closed, wait_in_line


def test_D5_a_producer_can_be_paused_and_resumed(producer: Producer, broker: Broker) -> None:
    producer.pause("maintenance")
    assert holds(producer) == ["paused"]
    with pytest.raises(FlowControlTimeout, match="maintenance"):
        producer.send(b"no", timeout=0.05)
    job = start_send(producer, b"yes")
    producer.pause("again")
    producer.resume()
    job.result().result(timeout=20)
    producer.resume()
    assert bodies(broker) == [b"yes"]


def test_D5_messages_admitted_before_a_pause_are_still_sent(producer: Producer, broker: Broker) -> None:
    count = rounds(1000, least=200)
    receipts = [producer.send(b"%d" % number) for number in range(count)]
    producer.pause()
    producer.flush(timeout=20)
    assert all(receipt.delivered for receipt in receipts)
    assert broker.queue("q").depth == count


def test_D5_stop_all_and_start_all_of_the_flow_manager_apply_to_every_producer(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producers = [make_producer(name=f"p{number}") for number in range(2)]
    assert set(flow_manager.resources) == set(producers)
    assert flow_manager.stop_all("the operator says so") == 2
    try:
        for producer in producers:
            with pytest.raises(FlowControlTimeout, match="the operator says so"):
                producer.send(b"no", timeout=0)
        jobs = [start(producer.send, b"yes", timeout=None) for producer in producers]
        for producer in producers:
            wait_in_line(producer, 1)
        # A late one is stopped too.
        late = make_producer(name="late")
        assert holds(late) == ["paused"]
        with pytest.raises(FlowControlTimeout):
            late.send(b"no", timeout=0.05)
    finally:
        assert flow_manager.start_all() == 3
    for job in jobs:
        job.result().result(timeout=20)
    late.send(b"yes").result(timeout=20)
    assert bodies(broker) == [b"yes"] * 3


def test_D5_a_pause_by_the_application_and_a_pause_by_the_flow_manager_are_two_holds(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    manager = FlowManager("operator")
    producer = make_producer(manager=manager)
    producer.pause()
    manager.stop_all()
    assert holds(producer) == ["paused", "paused"]
    producer.resume()
    assert [hold.source for hold in producer.flow_state.holds] == ["operator"]
    producer.pause()
    manager.start_all()
    assert [hold.source for hold in producer.flow_state.holds] == [""]
    producer.resume()
    producer.send(b"").result(timeout=20)
    assert flow_manager.resources == ()


def test_a_closed_producer_is_not_in_the_registry_of_the_flow_manager(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    manager = FlowManager()
    producer = make_producer(manager=manager)
    assert set(manager.resources) == {producer}
    producer.close()
    assert not manager.resources


def test_D5_a_message_that_waits_for_the_flow_manager_is_not_sent_when_its_producer_is_closed(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    manager = FlowManager()
    producer = make_producer(manager=manager)
    manager.stop_all()
    job = start_send(producer)
    producer.close()
    with pytest.raises(ProducerClosed):
        job.result()
    assert bodies(broker) == []


def test_D5_messages_that_wait_in_the_outbox_for_the_flow_manager_stay_there_when_their_producer_is_closed(
    make_producer: Callable[..., Producer], broker: Broker, tmp_path: Path
) -> None:
    manager = FlowManager()
    producer = make_producer(manager=manager, outbox=tmp_path / "outbox", when_flowed="spill")
    manager.stop_all()
    receipt = producer.send(b"x")
    with pytest.raises(UndeliveredMessages):
        producer.close(timeout=DEADLINE)
    assert receipt.outcome is Outcome.STORED
    assert bodies(broker) == []


@pytest.mark.usefixtures("one_connection")
def test_a_producer_that_ended_by_a_lost_connection_stays_in_the_flow_manager_until_it_is_freed(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    # pika logs its socket itself, and pytest keeps that.
    caplog.set_level(logging.CRITICAL, "pika")
    manager = FlowManager()
    # Not closed at all.
    lost = [Producer(broker.url, manager=manager)]
    broker.drop_connections()
    wait_closed(lost[0])
    with pytest.warns(ResourceWarning, match="dropped without close"):
        lost.clear()
    assert not manager.resources


def test_D5_the_flow_manager_can_stop_and_start_producers_while_all_send(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producers = [make_producer() for _ in range(2)]
    count = rounds(1000, least=200)
    jobs = [start(lambda p: [p.send(b"") for _ in range(count)], producer) for producer in producers for _ in range(2)]
    while alive := [job for job in jobs if job.is_alive()]:
        flow_manager.stop_all()
        flow_manager.start_all()
        # No faster than a loop takes it, which has a turn for each.
        alive[0].join(0.002)
    finish(jobs)
    for producer in producers:
        producer.flush(timeout=20)
    assert broker.queue("q").depth == 4 * count
