"""D11: two programs consume and publish on one connection, and each consumes the messages of the other."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import qflow_client.pika as pika
from qflow_client import FlowControlTimeout
from tests.integration.producer.tools import PATIENCE, bodies, eventually, start

from .tools import pump, waiting_at_most

# Both programs are stopped soon, and each stays stopped until the other has consumed enough messages.
ARGUMENTS = {"qpid.flow_stop_count": 5, "qpid.flow_resume_count": 2}
COUNT = 60


@pytest.fixture
def queues(broker: Any) -> tuple[str, str]:
    for name in "a", "b":
        broker.declare_queue(name, arguments=ARGUMENTS)
    return "a", "b"


class Program:
    """Publishes to one queue and consumes another, in one thread on one connection."""

    def __init__(self, url: str, takes: str, feeds: str, barrier: threading.Barrier) -> None:
        self.url, self.takes, self.feeds, self.barrier = url, takes, feeds, barrier
        self.taken: list[bytes] = []
        self.times_flowed = 0

    def run(self) -> None:
        with pika.BlockingConnection(pika.URLParameters(self.url)) as connection:
            channel = connection.channel()
            sent = ARGUMENTS["qpid.flow_stop_count"] + 1
            for number in range(sent):
                channel.basic_publish("", self.feeds, b"%d" % number)
            pump(connection, lambda: channel.flow_state.flowed)
            # Each program is stopped because the other has not consumed its messages.
            self.barrier.wait(PATIENCE)
            channel.basic_consume(self.takes, lambda *message: self.taken.append(message[3]), auto_ack=True)
            for number in range(sent, COUNT):
                channel.basic_publish("", self.feeds, b"%d" % number)
            pump(connection, lambda: len(self.taken) == COUNT)
            self.times_flowed = channel.flow_state.times_flowed


@pytest.mark.usefixtures("queues")
def test_D11_two_programs_that_feed_each_other_continue_because_a_waiting_publish_reads_deliveries(broker):
    barrier = threading.Barrier(2)
    one, two = Program(broker.url, "a", "b", barrier), Program(broker.url, "b", "a", barrier)
    jobs = [start(program.run) for program in (one, two)]
    for job in jobs:
        job.result()
    for program in one, two:
        assert program.taken == [b"%d" % number for number in range(COUNT)]
        assert program.times_flowed >= 1


@pytest.mark.usefixtures("queues")
def test_D11_acks_are_sent_while_a_publish_waits(broker, connect):
    # The feeder continues because the taker acks, although the taker's own publish waits all the time.
    feeder, taker = connect(), connect()
    broker.declare_queue("stopped", arguments={"qpid.flow_stop_count": 1, "qpid.flow_resume_count": 1})
    feeds, takes = feeder.channel(), taker.channel()
    for _ in range(6):
        feeds.basic_publish("", "a", b"")
    pump(feeder, lambda: feeds.flow_state.flowed)
    for _ in range(2):
        takes.basic_publish("", "stopped", b"")
    pump(taker, lambda: takes.flow_state.flowed)
    timeouts: list[FlowControlTimeout] = []

    def consume(channel: Any, method: Any, _properties: Any, _body: bytes) -> None:
        channel.basic_ack(method.delivery_tag)
        with waiting_at_most(channel, 0.1), pytest.raises(FlowControlTimeout) as caught:
            channel.basic_publish("", "stopped", b"")
        timeouts.append(caught.value)

    takes.basic_consume("a", consume)
    job = start(feeds.basic_publish, "", "a", b"at last")
    pump(taker, lambda: not job.is_alive())
    job.result()
    assert timeouts
    assert len(bodies(broker, "stopped")) == 2


@pytest.mark.usefixtures("queues")
def test_D11_a_deadline_ends_a_mutual_wait_of_two_programs(broker):
    """Each program consumes its next message only after it has passed one on, but both are stopped."""
    stuck: list[FlowControlTimeout] = []
    for name in "a", "b":
        for _ in range(10):
            broker.publish(b"", routing_key=name)

    def program(takes: str, feeds: str) -> None:
        url = f"{broker.url}?max_producer_flow_control_wait=0.1"
        with pika.BlockingConnection(pika.URLParameters(url)) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=1)

            def pass_on(channel: Any, method: Any, _properties: Any, body: bytes) -> None:
                try:
                    channel.basic_publish("", feeds, body)
                except FlowControlTimeout as error:
                    stuck.append(error)
                channel.basic_ack(method.delivery_tag)

            channel.basic_consume(takes, pass_on)
            pump(connection, lambda: len(stuck) > 20 or not broker.queue(takes).depth)

    jobs = [start(program, "a", "b"), start(program, "b", "a")]
    for job in jobs:
        job.result()
    assert stuck


def test_D11_a_deadline_ends_a_wait_for_a_broker_that_does_not_read(broker, connect, proxy):
    connection = connect(proxy.url(broker))
    channel = connection.channel()
    broker.declare_queue("in")
    broker.publish(b"", routing_key="in")
    proxy.stop_reading()
    broker.block("no memory")
    raised: list[FlowControlTimeout] = []

    def consume(channel: Any, method: Any, _properties: Any, _body: bytes) -> None:
        channel.basic_ack(method.delivery_tag)
        eventually(lambda: channel.flow_state.flowed)
        with waiting_at_most(channel, 0.3), pytest.raises(FlowControlTimeout, match="no memory") as caught:
            channel.basic_publish("", "q", b"")
        raised.append(caught.value)

    proxy.go_on_reading()
    channel.basic_consume("in", consume)
    proxy.stop_reading()
    pump(connection, lambda: raised)
    proxy.go_on_reading()
    broker.unblock()
    broker.wait_until(lambda broker: broker.queue("in").depth == 0)


def test_D11_deadlines_end_a_mutual_wait_if_the_broker_reads_from_neither_program(broker, proxy):
    """Each program has the message that the other waits for, and the broker reads nothing, not even an ack."""
    for name in "a", "b":
        broker.declare_queue(name)
        broker.publish(b"first", routing_key=name)
    in_hand = threading.Barrier(3)
    is_stopped, goes_on = threading.Event(), threading.Event()
    raised: list[str] = []

    def program(takes: str, feeds: str) -> list[bytes]:
        taken: list[bytes] = []

        def pass_on(channel: Any, method: Any, _properties: Any, body: bytes) -> None:
            taken.append(body)
            if body == b"first":
                in_hand.wait(PATIENCE)
                assert is_stopped.wait(PATIENCE)
                eventually(lambda: channel.flow_state.flowed)
                with waiting_at_most(channel, 0.3), pytest.raises(FlowControlTimeout, match="no memory"):
                    channel.basic_publish("", feeds, b"never")
                raised.append(takes)
            channel.basic_ack(method.delivery_tag)

        with pika.BlockingConnection(pika.URLParameters(proxy.url(broker))) as connection:
            channel = connection.channel()
            channel.basic_consume(takes, pass_on)
            pump(connection, lambda: taken)
            assert goes_on.wait(PATIENCE)
            assert channel.wait_unflowed(PATIENCE)
            channel.basic_publish("", feeds, b"second")
            pump(connection, lambda: len(taken) == 2)
        return taken

    jobs = [start(program, "a", "b"), start(program, "b", "a")]
    in_hand.wait(PATIENCE)
    proxy.stop_reading()
    broker.block("no memory")
    is_stopped.set()
    eventually(lambda: sorted(raised) == ["a", "b"])
    proxy.go_on_reading()
    broker.unblock()
    goes_on.set()
    for job in jobs:
        assert job.result() == [b"first", b"second"]
    broker.wait_until(lambda broker: not any(queue.depth for queue in broker.queues()))
