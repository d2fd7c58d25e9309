from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pika
import pytest

from qflow_client import Outcome, Producer, Receipt
from qflow_client.broker import Broker
from tests.effort import rounds

from .tools import PATIENCE, Consumer, Job, Wire, bodies, eventually, finish, holds, start, wait_flow, wait_held

_MARKS: dict[str, object] = {"qpid.flow_stop_count": 100, "qpid.flow_resume_count": 50}
# Each more than the queue and both windows take.
_MESSAGES = rounds(400, least=200)


def _two_producers(make_producer: Callable[..., Producer], broker: Broker) -> tuple[list[Producer], list[Job]]:
    producers = [make_producer(broker.url, capacity=capacity) for capacity in (50, 15)]

    def work(producer: Producer, name: bytes) -> list[Receipt]:
        return [producer.send(b"%s %d" % (name, number), timeout=None) for number in range(_MESSAGES)]

    return producers, [start(work, producer, b"%d" % producer.capacity) for producer in producers]


def _drain(broker: Broker, producers: list[Producer], jobs: list[Job]) -> None:
    with Consumer(broker.url, "q", prefetch=7) as consumer:
        receipts = [receipt for job in jobs for receipt in job.result()]
        broker.wait_until(lambda b: b.queue("q").acked == 2 * _MESSAGES)
        for producer in producers:
            producer.flush(timeout=20)
    # The last confirm may come before the last `Channel.Flow`.
    broker.wait_until(lambda b: all(channel.flow_ok for channel in b.producers()))
    assert [producer.wait_unflowed(PATIENCE) for producer in producers] == [True, True]
    assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}
    assert len(set(consumer.bodies)) == len(consumer.bodies) == 2 * _MESSAGES
    for name in (b"50", b"15"):
        own = [body for body in consumer.bodies if body.startswith(name + b" ")]
        assert own == [b"%s %d" % (name, number) for number in range(_MESSAGES)]
    assert not broker.queue("q").flow_stopped
    assert [holds(producer) for producer in producers] == [[], []]


def test_C6_with_enforcement_completion_the_depth_reaches_the_stop_threshold_plus_all_capacities(
    make_broker: Callable[..., Broker], make_producer: Callable[..., Producer]
) -> None:
    broker = make_broker(arguments=_MARKS, enforcement="completion")
    producers, jobs = _two_producers(make_producer, broker)
    broker.wait_until(lambda b: b.queue("q").depth == 165)
    for producer in producers:
        wait_held(producer, "capacity")
        # The broker may have the last message before the producer has noted that it is written.
        eventually(lambda: producer.in_flight == producer.unsettled)  # noqa: B023  # called at once
        assert producer.in_flight == producer.unsettled == producer.capacity
        assert producer.available == 0
    queue = broker.queue("q")
    assert (queue.depth, queue.peak_depth, queue.held_confirms) == (165, 165, 65)
    assert all(job.is_alive() for job in jobs)
    _drain(broker, producers, jobs)
    assert broker.queue("q").peak_depth == 165
    assert all(channel.times_flowed == 0 for channel in broker.producers())
    for producer in producers:
        assert producer.flow_state.times_flowed > 0


@pytest.mark.parametrize("turn", range(rounds(3)))
def test_C6_with_enforcement_both_the_depth_never_exceeds_the_stop_threshold_plus_all_capacities(
    make_broker: Callable[..., Broker], make_producer: Callable[..., Producer], turn: int
) -> None:
    broker = make_broker(arguments=_MARKS)
    producers, jobs = _two_producers(make_producer, broker)
    broker.wait_until(lambda b: b.queue("q").flow_stopped)
    for producer in producers:
        wait_flow(producer, lambda producer=producer: holds(producer))  # type: ignore[misc]
    _drain(broker, producers, jobs)
    assert 100 < broker.queue("q").peak_depth <= 165
    assert any(channel.times_flowed for channel in broker.producers())


def test_J3_channel_flow_holds_every_publishing_producer_when_the_depth_is_above_the_stop_threshold(
    make_broker: Callable[..., Broker], make_producer: Callable[..., Producer]
) -> None:
    broker = make_broker(arguments=_MARKS, enforcement="channel_flow")
    producers, jobs = _two_producers(make_producer, broker)
    for producer in producers:
        wait_held(producer, "channel_flow")
    assert broker.queue("q").held_confirms == 0
    _drain(broker, producers, jobs)
    assert broker.queue("q").peak_depth > 100
    for producer in producers:
        assert producer.flow_state.seconds_flowed["channel_flow"] > 0
    assert all(channel.times_flowed >= 1 for channel in broker.producers())


def test_C6_with_threads_that_share_producers_the_depth_never_exceeds_the_threshold_plus_all_capacities(
    make_broker: Callable[..., Broker], make_producer: Callable[..., Producer]
) -> None:
    broker = make_broker(arguments=_MARKS)
    producers = [make_producer(broker.url, capacity=capacity) for capacity in (50, 15)]
    count = rounds(500)

    def work(producer: Producer) -> None:
        for number in range(count):
            producer.send(b"%d" % number, timeout=None)

    with Consumer(broker.url, "q", prefetch=20):
        jobs = [start(work, producer) for producer in producers for _ in range(4)]
        finish(jobs)
        broker.wait_until(lambda b: b.queue("q").acked == 8 * count)
        for producer in producers:
            producer.flush(timeout=20)
    queue = broker.queue("q")
    assert queue.peak_depth <= 165
    assert queue.published == 8 * count


@pytest.mark.parametrize("first", ["a", "b"])
def test_J4_a_producer_blocked_by_two_queues_stays_flowed_until_both_have_drained(
    make_broker: Callable[..., Broker],
    make_producer: Callable[..., Producer],
    stack: ExitStack,
    wire: Wire,
    first: str,
) -> None:
    broker = make_broker(enforcement="channel_flow")
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        channel = connection.channel()
        channel.exchange_declare("both", "fanout")
        for name, stop, resume in (("a", 10, 5), ("b", 20, 10)):
            broker.declare_queue(name, arguments={"qpid.flow_stop_count": stop, "qpid.flow_resume_count": resume})
            channel.queue_bind(name, "both")
    # One message short of ON, either of them.
    for name, depth in (("a", 10), ("b", 20)):
        for _ in range(depth):
            broker.publish(b"old", name)
    producer = make_producer(broker.url, exchange="both", routing_key="")
    assert producer.send(b"new").result(timeout=20) is Outcome.CONFIRMED
    wait_held(producer, "channel_flow")
    assert set(broker.producers()[0].blocked_by) == {"a", "b"}
    job = start(producer.send, b"waits", timeout=None)
    second = "b" if first == "a" else "a"
    broker.purge(first)
    assert not broker.queue(first).flow_stopped
    assert broker.producers()[0].blocked_by == (second,)
    assert not producer.wait_unflowed(timeout=0.2)
    assert holds(producer) == ["channel_flow"]
    assert job.is_alive()
    broker.purge(second)
    assert job.result().result(timeout=20) is Outcome.CONFIRMED
    assert bodies(broker, "a") == bodies(broker, "b") == [b"waits"]
    wire.wait_for("in", "Channel.FlowOk", 2)
    assert wire.count("out", "Channel.Flow") == 2


def test_C5_a_withheld_confirm_is_sent_only_when_the_queue_is_OFF(
    make_broker: Callable[..., Broker], make_producer: Callable[..., Producer]
) -> None:
    broker = make_broker(arguments={"qpid.flow_stop_count": 2, "qpid.flow_resume_count": 2}, enforcement="completion")
    producer = make_producer(broker.url)
    receipts = [producer.send(b"%d" % number) for number in range(4)]
    assert [receipt.result(timeout=20) for receipt in receipts[:2]] == [Outcome.CONFIRMED] * 2
    broker.wait_until(lambda b: b.queue("q").held_confirms == 2)
    assert not receipts[2].done
    for _ in range(3):
        assert broker.get("q") is not None
    assert [receipt.result(timeout=20) for receipt in receipts[2:]] == [Outcome.CONFIRMED] * 2
