from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from qflow_client import FlowControlTimeout, Outcome, Producer, ProducerFlowed
from qflow_client.broker import Broker
from tests.effort import rounds

from .tools import (
    Consumer,
    Stopwatch,
    Wire,
    bodies,
    go_on,
    hold,
    holds,
    message_ids,
    start,
    start_send,
    stop,
    takes,
    wait_flow,
    wait_held,
)


@pytest.mark.parametrize("size", [20, 5000, 300_000], ids=["small", "medium", "frames"])
def test_J7_in_the_middle_of_a_burst_no_message_is_published_after_flow_ok(
    make_producer: Callable[..., Producer], broker: Broker, wire: Wire, size: int
) -> None:
    producer = make_producer(capacity=2000 if size < 1000 else 100)
    tail = bytes(size)
    enough = threading.Event()

    def work(thread: int) -> int:
        number = 0
        while not enough.is_set():
            producer.send(b"%d %d " % (thread, number) + tail)
            number += 1
        return number

    jobs = [start(work, thread) for thread in range(8)]
    broker.wait_until(lambda b: b.queue("q").published >= {20: rounds(3000), 5000: rounds(300), 300_000: 10}[size])
    broker.flow(False)
    wire.wait_for("in", "Channel.FlowOk")
    wait_held(producer, "channel_flow")

    with Stopwatch() as watch, pytest.raises(FlowControlTimeout) as caught:
        producer.send(b"too late", timeout=0.2)
    assert watch.kept(0.2)
    assert caught.value.message == b"too late"
    assert "channel_flow" in [hold.kind for hold in caught.value.holds]
    with pytest.raises(ProducerFlowed) as at_once:
        producer.send_nowait(b"too late")
    for held in (producer.flow_state.holds, caught.value.holds, at_once.value.holds):
        assert all(abs(time.time() - hold.since) < 30 for hold in held), "in seconds since 1970"
    assert 0.2 <= caught.value.waited <= watch.seconds
    assert "channel_flow" in str(caught.value)

    # Its Flow-Ok was to the first Flow, and nothing else was said.
    assert wire.count("out", "Channel.Flow") == 1
    assert wire.came_between(wire.where("in", "Channel.FlowOk")[0]) == []
    assert all(job.is_alive() for job in jobs)
    was_there = broker.queue("q").published

    broker.flow(True)
    broker.wait_until(lambda b: b.queue("q").published > was_there)
    enough.set()
    counts = [job.result() for job in jobs]
    producer.flush(timeout=20)
    answered, _ = wire.where("in", "Channel.FlowOk")
    assert wire.came_between(answered, wire.where("out", "Channel.Flow")[1]) == []
    # Ids are given in the order of admission, so that is the order in which everything left.
    ids = message_ids(broker)
    assert ids == sorted(ids)
    found = [body[:-size] for body in bodies(broker)]
    for thread in range(8):
        own = [body for body in found if body.startswith(b"%d " % thread)]
        assert own == [b"%d %d " % (thread, n) for n in range(counts[thread])], (
            "each thread's in the order of its sends"
        )
    assert len(found) == sum(counts)
    state = producer.flow_state
    assert not state.flowed
    assert state.since is None
    assert state.seconds_flowed["channel_flow"] >= 0.2
    channel = broker.producers()[0]
    assert (channel.times_flowed, channel.flowed) == (1, False)


def test_J7_channel_flow_that_changes_often_is_always_answered_and_obeyed(
    producer: Producer, broker: Broker, wire: Wire
) -> None:
    enough = threading.Event()

    def work() -> int:
        sent = 0
        while not enough.is_set():
            producer.send(b"")
            sent += 1
        return sent

    jobs = [start(work) for _ in range(4)]
    turns = rounds(15, least=5)
    for turn in range(turns):
        broker.flow(False)
        wire.wait_for("in", "Channel.FlowOk", 2 * turn + 1)
        before = broker.queue("q").published
        broker.flow(True)
        if turn % 2:
            broker.wait_until(lambda b, before=before: b.queue("q").published > before)  # type: ignore[misc]
    enough.set()
    sent = sum(job.result() for job in jobs)
    producer.flush(timeout=20)
    assert broker.queue("q").depth == sent
    ids = message_ids(broker)
    assert ids == sorted(set(ids))
    wire.wait_for("in", "Channel.FlowOk", 2 * turns)
    said, answered = wire.where("out", "Channel.Flow"), wire.where("in", "Channel.FlowOk")
    # On and off take turns on either side, so each stop ends before the go-ahead after it was sent.
    for at in range(0, 2 * turns, 2):
        assert wire.came_between(answered[at], said[at + 1]) == []


def test_J7_a_flow_stop_and_a_flow_start_that_arrive_in_one_read_are_both_answered(
    producer: Producer, broker: Broker, wire: Wire
) -> None:
    for _ in range(20):
        broker.flow(False)
        broker.flow(True)
    wire.wait_for("in", "Channel.FlowOk", 40)
    assert producer.send(b"").result(timeout=20) is Outcome.CONFIRMED


def test_J7_channel_flow_does_not_stop_other_channels_connections_consumers_and_acks(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    flowed, other = make_producer(name="flowed"), make_producer(name="other", routing_key="r")
    broker.declare_queue("r")
    flowed.send(b"").result(timeout=20)
    name = next(c.name for c in broker.producers() if c.published)
    broker.flow(False, name)
    wait_held(flowed, "channel_flow")
    count = rounds(500, least=100)
    with Consumer(broker.url, "r") as consumer:
        for number in range(count):
            other.send(b"%d" % number)
        other.flush(timeout=20)
        broker.wait_until(lambda b: b.queue("r").acked == count)
    assert consumer.bodies == [b"%d" % number for number in range(count)]
    assert holds(flowed) == ["channel_flow"]
    assert holds(other) == []


def test_D11_two_producers_that_consume_each_other_s_messages_do_not_deadlock(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    """Each client acks a message after it has forwarded it. Both queues turn ON many times."""
    for name in ("ping", "pong"):
        broker.declare_queue(name, arguments={"qpid.flow_stop_count": 10, "qpid.flow_resume_count": 5})
    first, there, back = (make_producer(routing_key=key) for key in ("ping", "pong", "q"))
    count = rounds(300, least=100)
    sending = start(lambda: [first.send(b"%d" % number, timeout=None) for number in range(count)])
    broker.wait_until(lambda b: b.queue("ping").flow_stopped)
    with (
        Consumer(broker.url, "ping", prefetch=3, on_body=there.send),
        Consumer(broker.url, "pong", prefetch=3, on_body=back.send),
    ):
        sending.result()
        broker.wait_until(lambda b: b.queue("q").depth == count, timeout=60)
    assert bodies(broker) == [b"%d" % number for number in range(count)]
    assert broker.queue("ping").flow_stopped_count > 0


def test_connection_blocked_is_reported_as_a_hold_with_its_kind_and_reason(
    producer: Producer, broker: Broker, wire: Wire
) -> None:
    hold(broker, producer, "connection_blocked")
    with takes(0.2), pytest.raises(FlowControlTimeout, match="low on memory") as caught:
        producer.send(b"no", timeout=0.2)
    assert [hold.kind for hold in caught.value.holds] == ["connection_blocked"]
    job = start_send(producer, b"yes")
    assert wire.came_between(0) == []
    broker.unblock()
    job.result().result(timeout=20)
    assert bodies(broker) == [b"yes"]


@pytest.mark.parametrize(("how", "kind"), [("alarm", "connection_blocked"), ("flow", "channel_flow")])
def test_connection_blocked_and_channel_flow_also_apply_to_a_producer_created_later(
    make_producer: Callable[..., Producer], broker: Broker, how: str, kind: str
) -> None:
    stop(broker, how)
    producer = make_producer()
    wait_held(producer, kind)
    go_on(broker, how)
    assert producer.wait_unflowed(timeout=20)


def test_several_holds_at_one_time_are_all_reported_and_a_send_waits_until_the_last_one_ends(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(capacity=3)
    broker.withhold_confirms()
    for _ in range(3):
        producer.send(b"")
    broker.wait_until(lambda b: b.queue("q").depth == 3)
    with pytest.raises(FlowControlTimeout) as caught:
        producer.send(b"", timeout=0)
    assert [hold.kind for hold in caught.value.holds] == ["capacity"]
    hold(broker, producer)
    hold(broker, producer, "connection_blocked")
    producer.pause("by hand")
    every = ["capacity", "channel_flow", "connection_blocked", "paused"]
    assert holds(producer) == every
    with pytest.raises(ProducerFlowed) as caught_now:
        producer.send_nowait(b"no")
    assert [hold.kind for hold in caught_now.value.holds] == every
    for kind in every:
        assert kind in str(caught_now.value)

    job = start_send(producer, b"last")
    for lift, kind in [
        (broker.release_confirms, "capacity"),
        (lambda: broker.flow(True), "channel_flow"),
        (broker.unblock, "connection_blocked"),
    ]:
        assert job.is_alive()
        lift()
        wait_flow(producer, lambda kind=kind: kind not in holds(producer))  # type: ignore[misc]
        assert broker.queue("q").depth == 3
    producer.resume()
    job.result().result(timeout=20)
    assert producer.flow_state.holds == ()
    assert set(producer.flow_state.seconds_flowed) >= set(every)
