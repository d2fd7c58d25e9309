"""Senders are served in the order in which they arrive (F4)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from qflow_client import AsyncProducer, FlowControlTimeout, Producer
from qflow_client.broker import Broker
from qflow_client.core.sendline import SendLine
from qflow_client.flow import WeightedLine
from tests.effort import rounds

from .processes import in_child
from .tools import PATIENCE, PATIENCE_WITH_JOBS, bodies, eventually, finish, hold, start, start_send, wait_in_line


def _waiting(producer: Producer) -> int:
    return producer._protocol.controller.waiting


def test_F4_withdrawing_a_waiting_message_does_not_change_the_order_of_the_other_messages(
    producer: Producer, broker: Broker
) -> None:
    hold(broker, producer)
    jobs = []
    for number in range(30):
        jobs.append(start(producer.send, b"%d" % number, timeout=0.5 if number % 3 == 0 else None))
        # On a slow machine some may have given up by now.
        eventually(lambda: _waiting(producer) + sum(not job.is_alive() for job in jobs) == len(jobs))
    wait_in_line(producer, 20)
    assert all(isinstance(job.wait(), FlowControlTimeout) for job in jobs[::3])
    broker.flow(True)
    producer.send(b"newcomer")
    for number, job in enumerate(jobs):
        if number % 3:
            job.result()
    producer.flush(timeout=20)
    assert bodies(broker) == [b"%d" % number for number in range(30) if number % 3] + [b"newcomer"]


def test_F4_a_sender_that_is_interrupted_right_after_it_joined_the_waiting_line_leaves_the_line(
    producer: Producer, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    producer.pause()
    with monkeypatch.context() as patched:
        patched.setattr(SendLine, "look_at", interrupt)
        with pytest.raises(KeyboardInterrupt):
            producer.send(b"interrupted", timeout=None)
    producer.resume()
    producer.send(b"after").result(timeout=20)
    assert bodies(broker) == [b"after"]


def test_the_io_thread_wakes_up_even_if_ctrl_c_interrupts_the_call_that_wakes_it(
    producer: Producer, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    wake = producer._services.wake
    calls: list[None] = []

    def interrupted() -> None:
        calls.append(None)
        if len(calls) == 1:
            raise KeyboardInterrupt
        wake()

    monkeypatch.setattr(producer._services, "wake", interrupted)
    with pytest.raises(KeyboardInterrupt):
        producer.send(b"1")
    broker.wait_until(lambda b: b.queue("q").depth == 1)
    producer.send(b"2").result(timeout=20)


def test_F4_no_message_overtakes_a_large_message_that_waits_for_room(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(capacity_bytes=100)
    broker.withhold_confirms()
    producer.send(bytes(80))
    large = start_send(producer, bytes(50))
    with pytest.raises(FlowControlTimeout):
        # There is room for it, and it is not its turn.
        producer.send(b"small", timeout=0.05)
    small = start_send(producer, b"small")
    broker.release_confirms()
    large.result()
    small.result()
    producer.flush(timeout=20)
    assert [len(body) for body in bodies(broker)] == [80, 50, 5]


def test_F4_when_a_waiting_large_message_is_withdrawn_the_next_message_is_admitted(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    # It goes at once, and not when the next notice of its waiting is due.
    producer = make_producer(capacity_bytes=100, flow_control_wait_notify_period=3 * PATIENCE)
    broker.withhold_confirms()
    producer.send(bytes(80))
    large = start(producer.send, bytes(50), timeout=0.5)
    # On a slow machine it may have given up by now.
    eventually(lambda: _waiting(producer) == 1 or not large.is_alive())
    small = start(producer.send, b"small", timeout=None)
    eventually(lambda: _waiting(producer) == 2 or not large.is_alive())
    assert isinstance(large.wait(), FlowControlTimeout)
    small.result()
    broker.release_confirms()
    producer.flush(timeout=20)
    assert [len(body) for body in bodies(broker)] == [80, 5]


def test_F4_no_thread_that_sends_beside_many_others_starves(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(capacity=4)
    enough = threading.Event()
    turns = rounds(500, least=100)
    sent = [0] * 8

    def work(thread: int) -> None:
        while not enough.is_set():
            producer.send(b"%d" % thread)
            sent[thread] += 1

    jobs = [start(work, thread) for thread in range(8)]
    # A machine that is busy may keep a thread from asking, but whoever asks gets a turn.
    broker.wait_until(lambda b: min(sent) >= turns, timeout=PATIENCE_WITH_JOBS)
    enough.set()
    finish(jobs)


def test_F4_a_custom_waiting_line_decides_the_order_of_admission(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    class LastComeFirstServed(WeightedLine):
        def __init__(self) -> None:
            super().__init__()
            self._stack: list[Any] = []

        def push(self, ticket: Any) -> None:
            self._stack.append(ticket)

        def head(self) -> Any:
            while self._stack and self._stack[-1].cancelled:
                self._stack.pop()
            return self._stack[-1] if self._stack else None

        def pop(self) -> None:
            self._stack.pop()

        def clear(self) -> None:
            self._stack.clear()

    producer = make_producer(line=LastComeFirstServed())
    producer.pause()
    jobs = [start_send(producer, b"%d" % number) for number in range(5)]
    producer.resume()
    finish(jobs)
    producer.flush(timeout=20)
    assert bodies(broker) == [b"4", b"3", b"2", b"1", b"0"]


def test_F4_a_weighted_waiting_line_serves_sending_threads_in_proportion_to_their_weights(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(capacity=1, line=WeightedLine({"orders": 3}))
    producer.pause()
    jobs = []
    # The light one comes first, and the heavy one does not wait for all of it.
    for source in ("mail", "orders"):
        for _ in range(24):
            jobs.append(start(producer.send, source, timeout=None, source=source))
            wait_in_line(producer, len(jobs))
    producer.resume()
    finish(jobs)
    producer.flush(timeout=20)
    came = [body.decode() for body in bodies(broker)]
    for turns in range(4, 33, 4):
        assert abs(came[:turns].count("orders") - turns * 3 / 4) <= 1
    assert came.count("orders") == came.count("mail") == 24
    assert producer.send_nowait(b"", source="mail").result(timeout=20)


def test_F4_two_open_producers_cannot_share_a_waiting_line_because_each_would_admit_the_messages_of_both(
    make_producer: Callable[..., Producer],
) -> None:
    line = WeightedLine()
    first = make_producer(line=line)
    with pytest.raises(ValueError, match="another open producer uses this object; give each producer a line of its"):
        make_producer(line=line)
    with pytest.raises(ValueError, match="another open producer"):
        AsyncProducer(line=line)
    first.close()
    make_producer(line=line).send(b"").result(timeout=20)


def test_F4_in_a_forked_child_a_new_producer_does_not_send_what_waits_in_the_line_of_the_parent(
    broker: Broker,
) -> None:
    line = WeightedLine()
    with Producer(broker.url, routing_key="q", line=line) as producer:
        producer.pause()
        job = start_send(producer, b"parent")

        def send() -> None:
            child = Producer(broker.url, routing_key="q", line=line)
            child.pause()
            child.resume()
            child.send(b"child").result(timeout=20)

        in_child(send)
        producer.resume()
        finish([job])
    assert bodies(broker) == [b"child", b"parent"]


def test_F4_after_random_arrivals_and_withdrawals_of_senders_the_waiting_line_is_empty(
    make_producer: Callable[..., Producer], broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qflow_client.guard.PATIENCE", PATIENCE)
    producer = make_producer(capacity=7)
    random_source = random.Random(5)
    seeds = [random_source.random() for _ in range(8)]

    def work(thread: int) -> int:
        own = random.Random(seeds[thread])
        admitted = 0
        for _ in range(rounds(300)):
            try:
                producer.send(b"", timeout=own.choice([0, 0.001, 0.01, None]))
                admitted += 1
            except FlowControlTimeout:
                pass
        return admitted

    jobs = [start(work, thread) for thread in range(8)]
    while any(job.is_alive() for job in jobs):
        producer.pause()
        producer.resume()
    total = sum(job.result() for job in jobs)
    producer.flush(timeout=20)
    assert broker.queue("q").depth == total
    assert producer.available == 7
    wait_in_line(producer, 0)
