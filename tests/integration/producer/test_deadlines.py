from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path

import pytest

from qflow_client import (
    ConfirmTimeout,
    FlowControlTimeout,
    FlowEventKind,
    Outcome,
    Producer,
    ProducerFlowed,
    UndeliveredMessages,
)
from qflow_client.broker import Broker
from qflow_client.logs import flush_logs
from qflow_client.sync.engine import Waiter
from qflow_client.testing.proxy import FaultProxy
from tests.effort import rounds

from .tools import (
    PATIENCE,
    Flows,
    bodies,
    eventually,
    finish,
    hold,
    nothing_expires,
    send_unconfirmed,
    start,
    takes,
    wait_in_line,
)


@pytest.mark.parametrize("timeout", [0, 0.0, -1])
def test_A4_a_send_with_timeout_0_does_not_wait(producer: Producer, broker: Broker, timeout: float) -> None:
    hold(broker, producer)
    with takes(0.0), pytest.raises(FlowControlTimeout) as caught:
        producer.send(b"no", timeout=timeout)
    assert caught.value.waited == 0.0
    broker.flow(True)
    assert producer.wait_unflowed(timeout=20)
    producer.send(b"yes", timeout=timeout).result(timeout=20)
    assert bodies(broker) == [b"yes"]


@pytest.mark.parametrize("timeout", [0.05, 0.3])
def test_A4_a_send_keeps_its_deadline_and_the_message_is_not_enqueued(
    producer: Producer, broker: Broker, timeout: float
) -> None:
    hold(broker, producer)
    with takes(timeout), pytest.raises(FlowControlTimeout) as caught:
        producer.send("text", timeout=timeout)
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, ProducerFlowed)
    assert not isinstance(caught.value, ConfirmTimeout)
    assert caught.value.waited >= timeout
    broker.flow(True)
    assert producer.wait_unflowed(timeout=20)
    producer.send(b"later")
    producer.flush(timeout=20)
    assert bodies(broker) == [b"later"]


def test_A4_the_setting_max_producer_flow_control_wait_is_the_default_timeout_of_a_send(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(max_producer_flow_control_wait=0.3)
    hold(broker, producer)
    with takes(0.3), pytest.raises(FlowControlTimeout):
        producer.send(b"")
    with takes(0.05), pytest.raises(FlowControlTimeout):
        producer.send(b"", timeout=0.05)


@pytest.mark.parametrize("how", ["send", "setting"])
def test_A4_a_send_with_timeout_none_waits_without_a_time_limit(
    make_producer: Callable[..., Producer], broker: Broker, how: str
) -> None:
    producer = make_producer(max_producer_flow_control_wait=None if how == "setting" else 0.01)
    hold(broker, producer)
    job = start(producer.send, b"", **({} if how == "setting" else {"timeout": None}))
    wait_in_line(producer, 1)
    with pytest.raises(FlowControlTimeout):
        producer.send(b"", timeout=0.2)
    assert job.is_alive()
    broker.flow(True)
    assert job.result().result(timeout=20) is Outcome.CONFIRMED


def test_A4_each_of_several_sending_threads_has_its_own_deadline(producer: Producer, broker: Broker) -> None:
    hold(broker, producer)
    deadlines = [0.6, 0.1, 0.4, 0.2, 0.5, 0.3]

    def work(timeout: float) -> None:
        with takes(timeout), pytest.raises(FlowControlTimeout):
            producer.send(b"no", timeout=timeout)

    finish([start(work, timeout) for timeout in deadlines])
    broker.flow(True)
    assert producer.wait_unflowed(timeout=20)
    assert producer.send(b"yes").result(timeout=20) is Outcome.CONFIRMED
    assert bodies(broker) == [b"yes"]


@pytest.mark.parametrize("turn", range(rounds(3)))
def test_A4_each_send_either_admits_its_message_or_raises_an_error(
    make_producer: Callable[..., Producer], broker: Broker, turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deadlines expire when the hold ends. A message whose call raised is in no queue, all others are in the queue."""
    monkeypatch.setattr("qflow_client.guard.PATIENCE", PATIENCE)
    producer = make_producer(capacity=5)
    least = rounds(150, least=40)

    def work(thread: int) -> tuple[list[bytes], list[bytes]]:
        sent: list[bytes] = []
        refused: list[bytes] = []
        # However the threads take their turns, both happen.
        for number in count():
            if number >= least and sent and refused:
                break
            body = b"%d %d" % (thread, number)
            try:
                producer.send(body, timeout=0.0002 * (number % 10))
            except FlowControlTimeout:
                refused.append(body)
            else:
                sent.append(body)
        return sent, refused

    jobs = [start(work, thread) for thread in range(8)]
    while any(job.is_alive() for job in jobs):
        broker.flow(False)
        broker.flow(True)
    results = [job.result() for job in jobs]
    producer.flush(timeout=20)
    sent = {body for some, _ in results for body in some}
    refused = {body for _, some in results for body in some}
    assert sent
    assert refused
    found = bodies(broker)
    assert len(found) == len(set(found))
    assert set(found) == sent
    assert producer.available == 5


def test_D1_with_when_flowed_raise_a_send_does_not_wait(make_producer: Callable[..., Producer], broker: Broker) -> None:
    producer = make_producer(when_flowed="raise")
    hold(broker, producer)
    with takes(0.0), pytest.raises(ProducerFlowed, match="channel_flow") as caught:
        producer.send(b"no", timeout=20)
    assert not isinstance(caught.value, TimeoutError)
    assert caught.value.message == b"no"
    broker.flow(True)
    assert producer.wait_unflowed(timeout=20)
    assert producer.send(b"yes").result(timeout=20) is Outcome.CONFIRMED
    assert bodies(broker) == [b"yes"]


@pytest.mark.usefixtures("patient_sends")
@pytest.mark.parametrize(
    ("when_flowed", "of_send", "of_send_nowait"),
    [
        ("block", "set a longer timeout to wait", "call send() to wait"),
        ("raise", "set when_flowed='block' to wait", "call send() and set when_flowed='block' to wait"),
        ("spill", None, "call send() to put it into the outbox"),
    ],
    ids=["block", "raise", "spill"],
)
def test_D1_the_error_of_a_send_that_may_not_wait_says_which_call_would_wait(
    make_producer: Callable[..., Producer], tmp_path: Path, when_flowed: str, of_send: str | None, of_send_nowait: str
) -> None:
    outbox = {"outbox": tmp_path / "orders.outbox"} if of_send is None else {}
    producer = make_producer(when_flowed=when_flowed, **outbox)
    producer.pause()
    with pytest.raises(ProducerFlowed) as caught:
        producer.send_nowait(b"no")
    assert type(caught.value) is ProducerFlowed
    assert str(caught.value).endswith(f"; {of_send_nowait}")
    assert producer.stored == 0
    if of_send is None:
        producer.send(b"yes", timeout=0)
        assert producer.stored == 1
    else:
        with pytest.raises(ProducerFlowed) as caught:
            producer.send(b"no", timeout=0)
        assert str(caught.value).endswith(f"; {of_send}")


def test_a_waiting_send_logs_a_notice_repeatedly(
    make_producer: Callable[..., Producer], broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    producer = make_producer(flow_control_wait_notify_period=0.1)
    flows = Flows(producer)
    hold(broker, producer)
    with caplog.at_level(logging.WARNING, "qflow_client"):
        job = start(producer.send, b"", timeout=None)
        flows.wait_for(FlowEventKind.WAITING, 3)
        broker.flow(True)
        job.result()
        # What came before it has been told.
        flows.wait_for(FlowEventKind.UNFLOWED)
        assert flush_logs(20)
    notices = [event for event in flows.events if event.kind is FlowEventKind.WAITING]
    for earlier, later in pairwise(notices):
        assert later.at - earlier.at >= 0.099
        assert later.since == earlier.since
    assert notices[0].seconds >= 0.1
    assert [hold.kind for hold in notices[0].holds] == ["channel_flow"]
    logged = [record.getMessage() for record in caplog.records if "has been waiting" in record.getMessage()]
    assert len(logged) == len(notices)
    assert "channel_flow" in logged[0]


def test_a_confirm_timeout_is_not_a_flow_control_timeout(producer: Producer, broker: Broker) -> None:
    broker.withhold_confirms()
    receipts = [producer.send(b"%d" % number) for number in range(3)]
    with takes(0.2), pytest.raises(ConfirmTimeout) as caught:
        receipts[0].result(timeout=0.2)
    assert not isinstance(caught.value, ProducerFlowed)
    assert isinstance(caught.value, TimeoutError)
    assert str(receipts[0].message_id) in str(caught.value)
    with takes(0.2), pytest.raises(ConfirmTimeout) as caught:
        producer.flush(timeout=0.2)
    assert caught.value.unsettled == 3
    assert receipts[0].wait(timeout=0.01) is False
    assert receipts[0].outcome is None
    with pytest.raises(ConfirmTimeout):
        receipts[0].result(timeout=0)
    with pytest.raises(ConfirmTimeout):
        producer.flush(timeout=0)
    broker.release_confirms()
    # The outcome was only not known yet.
    assert [receipt.result(timeout=20) for receipt in receipts] == [Outcome.CONFIRMED] * 3
    producer.flush(timeout=0)


def test_a_full_window_raises_a_flow_control_error_and_a_missing_confirm_raises_another_error(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(capacity=1, max_producer_flow_control_wait=0.1)
    broker.withhold_confirms()
    receipt = producer.send(b"1", timeout=PATIENCE)
    with pytest.raises(FlowControlTimeout, match="capacity"):
        producer.send(b"2")
    with pytest.raises(ConfirmTimeout):
        producer.flush()
    with pytest.raises(ConfirmTimeout):
        receipt.result(timeout=0.05)
    broker.release_confirms()
    assert receipt.result(timeout=20) is Outcome.CONFIRMED


def test_flush_and_wait_unflowed_succeed_if_their_condition_becomes_true_exactly_at_the_deadline(
    producer: Producer, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(do: Callable[[], None], condition: Callable[[], object]) -> None:
        class Late(Waiter):
            def wait_until(self, deadline: float) -> None:
                do()
                eventually(condition)

        monkeypatch.setattr("qflow_client.sync.producer.Waiter", Late)

    broker.withhold_confirms()
    producer.send(b"")
    late(broker.release_confirms, lambda: producer.unsettled == 0)
    producer.flush(timeout=0.01)
    producer.pause()
    late(producer.resume, lambda: not producer.flow_state.flowed)
    assert producer.wait_unflowed(timeout=0.01)


def test_wait_unflowed_with_a_full_window_immediately_raises_the_hold_for_a_full_window(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(capacity=1)
    flows = Flows(producer)
    send_unconfirmed(producer, broker, b"")
    job = start(producer.wait_unflowed, timeout=20)
    flows.wait_for(FlowEventKind.FLOWED)
    assert job.is_alive()
    broker.release_confirms()
    assert job.result() is True


def test_wait_unflowed_keeps_its_deadline(producer: Producer, broker: Broker) -> None:
    assert producer.wait_unflowed(timeout=0)
    hold(broker, producer)
    with takes(0.2):
        assert not producer.wait_unflowed(timeout=0.2)
    jobs = [start(producer.wait_unflowed) for _ in range(4)]
    eventually(lambda: len(producer._protocol.waiters.unflowed) == 4)
    broker.flow(True)
    assert [job.result() for job in jobs] == [True] * 4


def test_F2_messages_are_not_sent_faster_than_the_rate_limit(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(rate=100, rate_burst=5)
    began = time.monotonic()
    for number in range(30):
        producer.send(b"%d" % number)
    assert time.monotonic() - began >= 0.24

    jobs = [start(producer.send, b"thread", timeout=20) for _ in range(10)]
    finish(jobs)
    producer.flush(timeout=20)
    assert bodies(broker) == [b"%d" % number for number in range(30)] + [b"thread"] * 10


def test_F2_a_send_with_timeout_0_that_exceeds_the_rate_limit_raises_an_error(
    make_producer: Callable[..., Producer],
) -> None:
    producer = make_producer(rate=4, rate_burst=5)

    def send_at_once() -> None:
        # A machine would have to take a quarter of a second for each.
        for number in range(20):
            producer.send_nowait(b"%d" % number)

    with pytest.raises(ProducerFlowed) as caught:
        send_at_once()
    assert [hold.kind for hold in caught.value.holds] == ["rate"]
    assert producer.wait_unflowed(timeout=20)


def test_a_send_that_is_held_by_the_rate_limit_keeps_its_deadline(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(rate=0.1)
    producer.send(b"1")
    with takes(0.2), pytest.raises(FlowControlTimeout, match="rate"):
        producer.send(b"2", timeout=0.2)
    producer.flush(timeout=20)
    assert bodies(broker) == [b"1"]


@pytest.mark.parametrize("call", ["send", "flush", "close", "wait_unflowed", "wait", "result"])
def test_an_invalid_timeout_raises_an_error_even_if_no_wait_is_needed(producer: Producer, call: str) -> None:
    receipt = producer.send(b"")
    assert receipt.wait(20)
    arguments = [b"no"] if call == "send" else []
    for timeout in ("5", math.nan, b"", [1]):
        with pytest.raises((TypeError, ValueError), match=r"timeout=.*: it must be None .for ever. or seconds"):
            getattr(receipt if call in ("wait", "result") else producer, call)(*arguments, timeout=timeout)
        assert not producer.closed
        assert producer.unsettled == 0


@pytest.mark.parametrize("timeout", [1e12, math.inf])
def test_a_timeout_may_be_longer_than_the_longest_wait_that_the_system_supports(
    producer: Producer, broker: Broker, timeout: float
) -> None:
    broker.withhold_confirms()
    receipt = producer.send(b"1", timeout=timeout)
    producer.pause()
    jobs = [
        start(producer.send, b"2", timeout=timeout),
        start(producer.wait_unflowed, timeout=timeout),
        start(producer.flush, timeout=timeout),
        start(receipt.result, timeout=timeout),
    ]
    wait_in_line(producer, 1)
    eventually(lambda: producer._protocol.waiters.unflowed and producer._protocol.waiters.settled and receipt._waiter)
    producer.resume()
    broker.release_confirms()
    finish(jobs)
    producer.close(timeout=timeout)
    producer.close(timeout=timeout)


def test_a_call_with_a_negative_timeout_does_not_wait(producer: Producer, broker: Broker) -> None:
    """A caller passes the rest of its own deadline, which may be negative."""
    broker.withhold_confirms()
    receipt = producer.send(b"", timeout=-0.1)
    assert not receipt.wait(timeout=-0.1)
    with pytest.raises(ConfirmTimeout):
        producer.flush(timeout=-0.1)
    producer.pause()
    assert not producer.wait_unflowed(timeout=-0.1)
    with pytest.raises(FlowControlTimeout):
        producer.send(b"", timeout=-0.1)
    with pytest.raises(UndeliveredMessages):
        producer.close(timeout=-0.1)


def test_E16_a_message_is_settled_after_its_delivery_timeout(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(delivery_timeout=0.3, capacity=1)
    began = time.monotonic()
    with nothing_expires(producer):
        (receipt,) = send_unconfirmed(producer, broker, b"written")
    assert receipt.wait(timeout=20)
    assert time.monotonic() - began >= 0.3, "never early"
    assert receipt.outcome is Outcome.UNKNOWN
    # There is room, although the broker has not answered.
    with nothing_expires(producer):
        following = producer.send(b"next", timeout=20)
        broker.release_confirms()
        assert following.result(timeout=20) is Outcome.CONFIRMED


def test_E16_no_message_is_republished_after_its_delivery_timeout(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    with FaultProxy(broker.url) as proxy:
        producer = make_producer(proxy.url, delivery_timeout=0.3, reconnect_delay=0.05)
        with nothing_expires(producer):
            (receipt,) = send_unconfirmed(producer, broker, b"stale")
        proxy.refuse()
        proxy.cut()
        assert receipt.wait(timeout=20)
        assert receipt.outcome is Outcome.UNKNOWN
        broker.release_confirms()
        proxy.heal()
        with nothing_expires(producer):
            assert producer.send(b"fresh", timeout=20).result(timeout=20) is Outcome.CONFIRMED
        assert bodies(broker) == [b"stale", b"fresh"]
        producer.close()
