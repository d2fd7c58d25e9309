"""When answers are read, by what is in flight and how fast it is answered."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qflow_client.amqp.coalescing import Coalescing

# Of an ack, in bytes.
_SIZE = 21


@dataclass
class _Producer:
    in_flight: int = 0
    settled_so_far: int = 0


def _answered_in(coalescing: Coalescing, producer: _Producer, seconds: float, now: float = 100.0) -> float:
    """The delay once what is in flight is answered after so many seconds, and as much is in flight again."""
    coalescing.delay(_SIZE, now)
    producer.settled_so_far += producer.in_flight - 1
    before = coalescing.delay(_SIZE, now + seconds)
    producer.settled_so_far += 1
    after = coalescing.delay(_SIZE, now + seconds)
    # Nothing changes before the last of them.
    assert before == 0.0 or after == before
    return after


@pytest.mark.parametrize(
    ("in_flight", "seconds", "delay"),
    [
        (1000, 0.0099, 0.0),
        (1000, 0.0101, 0.00101),
        (1000, 0.015, 0.0015),
        (1000, 0.02, 0.002),
        # Never more than 2 ms, however slow the broker is.
        (1000, 5.0, 0.002),
        (256, 0.015, 0.0015),
        (255, 0.015, 0.0),
    ],
)
def test_the_delay_is_a_tenth_of_the_time_that_answers_take(in_flight: int, seconds: float, delay: float) -> None:
    producer = _Producer(in_flight)
    assert _answered_in(Coalescing(producer), producer, seconds) == pytest.approx(delay)


def test_the_delay_follows_the_broker() -> None:
    producer = _Producer(1000)
    coalescing = Coalescing(producer)
    assert _answered_in(coalescing, producer, 0.015, 100.0) == pytest.approx(0.0015)
    # It holds until all that is in flight now is answered, too.
    producer.settled_so_far += 999
    assert coalescing.delay(_SIZE, 100.016) == pytest.approx(0.0015)
    producer.settled_so_far += 1
    assert coalescing.delay(_SIZE, 100.035) == pytest.approx(0.002)
    producer.settled_so_far += 1000
    assert coalescing.delay(_SIZE, 100.040) == 0.0


def test_time_in_which_little_was_in_flight_says_nothing() -> None:
    producer = _Producer(1000)
    coalescing = Coalescing(producer)
    assert _answered_in(coalescing, producer, 0.02) == pytest.approx(0.002)
    producer.in_flight = 255
    assert coalescing.delay(_SIZE, 100.03) == 0.0
    # An hour later there is a burst, whose first answers are read as they come.
    producer.in_flight = 1000
    for read in range(10):
        producer.settled_so_far += 99
        assert coalescing.delay(_SIZE, 3600.0 + read / 500) == 0.0
    producer.settled_so_far += 109
    assert coalescing.delay(_SIZE, 3600.020) == pytest.approx(0.002)


def test_nothing_waits_behind_messages_that_come_back() -> None:
    producer = _Producer(1000)
    coalescing = Coalescing(producer)
    assert _answered_in(coalescing, producer, 0.02) == pytest.approx(0.002)
    assert coalescing.delay(8193, 100.021) == 0.0
    # That says nothing about the answers after them.
    assert coalescing.delay(8192, 100.022) == pytest.approx(0.002)


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 500), st.floats(1e-6, 10.0)), max_size=60))
def test_the_delay_is_short_and_only_where_much_is_in_flight(reads: list[tuple[int, int, float]]) -> None:
    producer = _Producer()
    coalescing = Coalescing(producer)
    now = 0.0
    for in_flight, settled, seconds in reads:
        now += seconds
        producer.in_flight = in_flight
        producer.settled_so_far += settled
        delay = coalescing.delay(_SIZE, now)
        assert delay == 0.0 or (0.001 <= delay <= 0.002 and in_flight >= 256)


def _throughput(window: int, way: float, coalesces: bool) -> float:
    """Messages per second of a producer that only the window limits, with a broker so many seconds away."""
    producer = _Producer()
    coalescing = Coalescing(producer)
    now, paused_until = 0.0, 0.0
    # When the answer to each message can be read.
    answers = [way] * window
    producer.in_flight = window
    while now < 40 * way:
        now = max(answers[0], paused_until)
        read = 0
        while answers and answers[0] <= now:
            heapq.heappop(answers)
            read += 1
        producer.settled_so_far += read
        producer.in_flight -= read
        delay = coalescing.delay(_SIZE, now) if coalesces else 0.0
        paused_until = now + delay
        # Each takes its time to be made, and so the answers spread out.
        for at in range(read):
            heapq.heappush(answers, now + way + 3e-6 * at)
        producer.in_flight += read
    return producer.settled_so_far / now


@pytest.mark.parametrize(
    ("window", "way"),
    [(200, 0.02), (300, 0.02), (1000, 0.008), (1000, 0.012), (1000, 0.02), (1000, 0.1), (5000, 0.012)],
)
def test_a_broker_far_away_costs_a_producer_little_more(window: int, way: float) -> None:
    assert _throughput(window, way, coalesces=True) >= 0.89 * _throughput(window, way, coalesces=False)
