"""When answers are read, depending on the messages in flight and the size of the answers."""

from __future__ import annotations

import heapq

import pytest

from qflow_client.amqp import coalescing

# The size of an ack, in bytes.
_SIZE = 21
# Seconds. Loops round up to whole milliseconds.
_TICK = 0.001


@pytest.mark.parametrize(
    ("size", "in_flight", "delay"),
    [(_SIZE, 255, 0.0), (_SIZE, 256, 0.001), (8192, 5000, 0.001), (8193, 5000, 0.0)],
)
def test_the_next_read_of_confirms_is_delayed_only_if_many_messages_are_in_flight_and_few_bytes_came(
    size: int, in_flight: int, delay: float
) -> None:
    assert coalescing.delay(size, in_flight) == delay


def _throughput(window: int, way: float, coalesces: bool) -> float:
    """Return the messages per second of a producer that only its window limits. The broker is `way` seconds away."""
    now, paused_until = 0.0, 0.0
    # The times at which the answer to each message can be read.
    answers = [way] * window
    settled, in_flight = 0, window
    while now < 40 * way:
        now = max(answers[0], paused_until)
        read = 0
        while answers and answers[0] <= now:
            heapq.heappop(answers)
            read += 1
        settled += read
        delay = coalescing.delay(_SIZE, in_flight - read) if coalesces else 0.0
        paused_until = now + (_TICK if delay else 0.0)
        # Making each message takes time, so the answers are spread out.
        for at in range(read):
            heapq.heappush(answers, now + way + 3e-6 * at)
    return settled / now


@pytest.mark.parametrize(
    ("window", "way", "least"),
    [
        (200, 0.02, 1.0),
        (300, 0.004, 0.8),
        (300, 0.02, 0.95),
        (1000, 0.008, 0.88),
        (1000, 0.02, 0.95),
        (5000, 0.012, 0.9),
    ],
)
def test_reading_confirms_of_a_distant_broker_with_a_delay_costs_little_throughput(
    window: int, way: float, least: float
) -> None:
    ratio = _throughput(window, way, coalesces=True) / _throughput(window, way, coalesces=False)
    assert ratio >= least
