from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from qflow_client import FlowControlTimeout, Outcome, Producer, SettingsError
from qflow_client.broker import Broker
from tests.effort import rounds

from .tools import bodies, eventually, finish, holds, start, wait_in_line


def test_C6_the_window_of_a_producer_is_full_when_capacity_messages_are_unsettled(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(capacity=3)
    assert (producer.capacity, producer.available, producer.unsettled, producer.in_flight) == (3, 3, 0, 0)
    broker.withhold_confirms()
    for number in range(3):
        assert producer.available == 3 - number
        producer.send(b"")
    assert (producer.available, producer.unsettled) == (0, 3)
    broker.wait_until(lambda b: b.queue("q").depth == 3)
    eventually(lambda: producer.in_flight == 3)
    with pytest.raises(FlowControlTimeout, match="capacity"):
        producer.send(b"", timeout=0.1)
    assert producer.unsettled == 3
    broker.release_confirms()
    producer.flush(timeout=20)
    assert (producer.available, producer.unsettled, producer.in_flight) == (3, 0, 0)
    assert holds(producer) == []
    assert producer.flow_state.seconds_flowed["capacity"] >= 0.1


def test_C6_raising_the_capacity_admits_exactly_as_many_waiting_messages_as_it_was_raised_by(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(capacity=2)
    broker.withhold_confirms()
    jobs = []
    for number in range(2):
        producer.send(b"%d" % number)
    for number in range(2, 7):
        jobs.append(start(producer.send, b"%d" % number, timeout=None))
        wait_in_line(producer, number - 1)
    producer.capacity = 5
    for job in jobs[:3]:
        job.result()
    broker.wait_until(lambda b: b.queue("q").depth == 5)
    wait_in_line(producer, 2)
    assert (producer.capacity, producer.available, producer.unsettled) == (5, 0, 5)
    producer.capacity = 2
    assert (producer.available, producer.unsettled) == (0, 5)
    assert [job.is_alive() for job in jobs] == [False] * 3 + [True] * 2
    broker.release_confirms()
    for job in jobs:
        assert job.result().result(timeout=20) is Outcome.CONFIRMED
    assert bodies(broker) == [b"%d" % number for number in range(7)]


def under_load(producer: Producer, broker: Broker) -> Iterator[None]:
    """Send from four threads, yield while they send, and check that the broker has all messages."""
    count = rounds(1500)
    jobs = [start(lambda: [producer.send(b"") for _ in range(count)]) for _ in range(4)]
    while any(job.is_alive() for job in jobs):
        yield
        before = broker.queue("q").published
        broker.wait_until(lambda b, before=before: b.queue("q").published > min(before, 4 * count - 1))  # type: ignore[misc]
    finish(jobs)
    producer.flush(timeout=20)
    assert broker.queue("q").depth == 4 * count
    assert producer.available == producer.capacity


def test_C6_changes_of_the_capacity_under_load_lose_no_message(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(capacity=50)
    capacities = itertools.cycle([1, 200, 3, 17, 1000, 2])
    for _ in under_load(producer, broker):
        producer.capacity = next(capacities)
    assert not producer.flow_state.flowed


def test_an_adaptive_capacity_loses_no_message_and_stops_adapting_when_a_number_is_set(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(capacity="auto", capacity_max=64)
    for _ in under_load(producer, broker):
        assert 8 <= producer.capacity <= 64
    producer.capacity = 500
    assert (producer.capacity, producer.available) == (500, 500)


@pytest.mark.parametrize("capacity", [0, -1, 1.5, "7", "auto", None, True])
def test_setting_an_invalid_capacity_of_a_producer_raises_an_error_and_changes_nothing(
    producer: Producer, capacity: object
) -> None:
    with pytest.raises(SettingsError, match="capacity="):
        producer.capacity = capacity  # type: ignore[assignment]  # that is the point
    assert producer.capacity == 1000
