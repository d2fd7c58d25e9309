"""A peer that stops reading (J8)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from qflow_client import FlowControlTimeout, FlowEventKind, Outcome, Producer, ProducerClosed, UndeliveredMessages
from qflow_client.broker import Broker
from tests.effort import COMPLETE

from .tools import (
    PATIENCE,
    Flows,
    Proxy,
    Wire,
    bodies,
    ends_within,
    eventually,
    fill_transport,
    hold,
    holds,
    send_until_heartbeat_with_a_full_socket,
    send_until_heartbeat_with_a_slow_peer,
    start,
    start_send,
    takes,
    wait_done,
    wait_in_line,
)


@pytest.fixture
def stuck(proxy: Proxy, broker: Broker, make_producer: Callable[..., Producer]) -> Producer:
    """A producer whose peer reads nothing."""
    producer = make_producer(proxy.url(broker))
    proxy.stop_reading()
    return producer


def test_J8_while_the_socket_accepts_no_bytes_sends_wait_until_their_deadlines(
    stuck: Producer, proxy: Proxy, broker: Broker
) -> None:
    flows = Flows(stuck)
    receipts = list(fill_transport(stuck))
    assert holds(stuck) == ["transport"]
    assert 0 < stuck.in_flight < stuck.unsettled == len(receipts)
    with takes(0.3), pytest.raises(FlowControlTimeout, match="transport"):
        stuck.send(b"no", timeout=0.3)
    jobs = [start(stuck.send, b"waits %d" % number, timeout=None) for number in range(3)]
    wait_in_line(stuck, 3)

    proxy.go_on_reading()
    for job in jobs:
        job.result().result(timeout=20)
    stuck.flush(timeout=20)
    assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}
    found = bodies(broker)
    assert [int(body[:8]) for body in found[:-3]] == list(range(len(receipts)))
    assert sorted(found[-3:]) == [b"waits 0", b"waits 1", b"waits 2"]
    assert holds(stuck) == []
    flows.wait_for(FlowEventKind.UNFLOWED)
    assert flows.kinds[0] is FlowEventKind.FLOWED


def test_J8_the_bytes_that_wait_for_a_full_socket_are_bounded(
    proxy: Proxy, broker: Broker, make_producer: Callable[..., Producer]
) -> None:
    producer = make_producer(proxy.url(broker), max_unwritten_bytes=100_000, capacity=10_000)
    proxy.stop_reading()
    count = len(list(fill_transport(producer, size=20_000)))
    # The one that went over the mark is in; and the hold stays until half of that has left.
    assert 50_000 - 20_000 <= (producer.unsettled - producer.in_flight) * 20_000 <= 100_000 + 20_000
    proxy.go_on_reading()
    producer.flush(timeout=20)
    assert broker.queue("q").depth == count


def test_J7_after_channel_flow_with_a_full_socket_only_the_half_written_message_is_completed(
    stuck: Producer, proxy: Proxy, broker: Broker, wire: Wire
) -> None:
    receipts = list(fill_transport(stuck, size=300_000))
    # What the broker says passes.
    hold(broker, stuck)
    answers = 1
    while "transport" not in holds(stuck):
        # The kernel has made room since.
        answers += 2
        broker.flow(True)
        receipts += fill_transport(stuck, size=300_000, number=len(receipts))
        hold(broker, stuck)
    assert set(holds(stuck)) == {"transport", "channel_flow"}
    in_flight = stuck.in_flight
    proxy.go_on_reading()
    wire.wait_for("in", "Channel.FlowOk", answers)
    # All that had begun came, and whole.
    broker.wait_until(lambda b: b.queue("q").published == in_flight)
    with pytest.raises(FlowControlTimeout, match="channel_flow"):
        stuck.send(b"no", timeout=0.3)
    assert wire.came_between(wire.where("in", "Channel.FlowOk")[-1]) == []
    eventually(lambda: (stuck.unsettled, stuck.in_flight) == (len(receipts) - in_flight, 0), "all confirms")
    broker.flow(True)
    stuck.flush(timeout=20)
    assert [int(body[:8]) for body in bodies(broker)] == list(range(len(receipts)))


def test_close_keeps_its_deadline_on_a_blocked_connection_whose_broker_reads_nothing(
    stuck: Producer, broker: Broker
) -> None:
    list(fill_transport(stuck))
    hold(broker, stuck, "connection_blocked")
    with takes(0.2), pytest.raises(UndeliveredMessages):
        stuck.close(timeout=0.2)


def test_J8_closing_a_producer_whose_socket_accepts_no_bytes_reports_lost_messages(
    stuck: Producer, proxy: Proxy, broker: Broker
) -> None:
    receipts = list(fill_transport(stuck))
    with takes(0.2), pytest.raises(UndeliveredMessages) as caught:
        stuck.close(timeout=0.2)
    assert caught.value.receipts == tuple(receipts)
    unknown = [receipt for receipt in receipts if receipt.outcome is Outcome.UNKNOWN]
    failed = [receipt for receipt in receipts if receipt.outcome is Outcome.FAILED]
    assert unknown
    assert failed
    assert unknown + failed == receipts
    assert [message.message_id for message in caught.value.unknown] == [r.message_id for r in unknown]
    assert [message.message_id for message in caught.value.unsent] == [r.message_id for r in failed]


def test_leaving_the_with_block_by_an_exception_does_not_wait_for_a_peer_that_does_not_read(stuck: Producer) -> None:
    list(fill_transport(stuck))
    with ends_within(2.0), pytest.raises(KeyError) as caught, stuck:
        raise KeyError
    assert caught.value.undelivered.unsent  # type: ignore[attr-defined]  # set on the exception


def test_leaving_the_with_block_by_an_exception_waits_for_a_peer_that_still_reads(
    stuck: Producer, proxy: Proxy, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So long as a slow machine may take to confirm the first.
    monkeypatch.setattr("qflow_client.core.calls._LULL", PATIENCE)
    count = len(list(fill_transport(stuck)))

    def go_on() -> None:
        eventually(lambda: stuck._protocol.waiters.settled)
        proxy.go_on_reading()

    job = start(go_on)
    with pytest.raises(KeyError) as caught, stuck:
        raise KeyError
    job.result()
    assert not hasattr(caught.value, "__notes__")
    assert broker.queue("q").depth == count


@pytest.mark.parametrize("confirms", [True, False])
@pytest.mark.usefixtures("one_connection")
def test_after_a_cut_inside_a_frame_messages_settle_by_the_bytes_that_were_written(
    proxy: Proxy, broker: Broker, make_producer: Callable[..., Producer], confirms: bool
) -> None:
    producer = make_producer(proxy.url(broker), confirms=confirms)
    proxy.stop_reading()
    receipts = list(fill_transport(producer))
    job = start_send(producer, b"waits")
    proxy.cut()
    assert isinstance(job.wait(), ProducerClosed)
    wait_done(receipts)
    outcomes = [receipt.outcome for receipt in receipts]
    # What was not begun has failed, and comes last.
    failed = outcomes.count(Outcome.FAILED)
    assert failed > 0
    assert set(outcomes[-failed:]) == {Outcome.FAILED}
    assert set(outcomes[:-failed]) <= ({Outcome.UNKNOWN} if confirms else {Outcome.SENT, Outcome.UNKNOWN})
    with pytest.raises(ProducerClosed):
        producer.send(b"")
    broker.wait_until(lambda b: not b.connections())
    assert len(bodies(broker)) <= len(receipts) - failed


# Less than the mark, and more than the socket takes at once.
@pytest.mark.parametrize(
    ("skin", "size"),
    [("threads", 5000), ("threads", 150_000), ("asyncio", 150_000), *([("uvloop", 5000)] if COMPLETE else [])],
    indirect=["skin"],
)
def test_heartbeats_and_messages_are_interleaved_at_frame_boundaries(
    proxy: Proxy, broker: Broker, make_producer: Callable[..., Producer], wire: Wire, size: int
) -> None:
    """pika must send its own frames while the socket is full, and the broker can read every frame."""
    producer = make_producer(f"{proxy.url(broker)}?heartbeat=1", max_unwritten_bytes=10_000)
    send_until_heartbeat_with_a_full_socket(producer, broker, proxy, wire, size)


@pytest.mark.parametrize(
    ("skin", "size"),
    [("threads", 5000), ("threads", 150_000), ("asyncio", 150_000), *([("uvloop", 5000)] if COMPLETE else [])],
    indirect=["skin"],
)
def test_a_producer_sends_heartbeats_even_while_the_socket_always_has_input(
    proxy: Proxy, broker: Broker, make_producer: Callable[..., Producer], wire: Wire, size: int
) -> None:
    """Each write of the producer ends in the middle of a frame, and pika may write only at the end of a frame."""
    producer = make_producer(f"{proxy.url(broker)}?heartbeat=1", capacity=10_000)
    send_until_heartbeat_with_a_slow_peer(producer, broker, proxy, wire, size)
