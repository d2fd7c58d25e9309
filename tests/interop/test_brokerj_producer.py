"""The threaded producer against a real Apache Qpid Broker-J, which sends `Channel.Flow` to producers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pika
import pika.exceptions
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from qflow_client import (
    FlowControlTimeout,
    FlowEvent,
    FlowEventKind,
    HoldKind,
    MessageNacked,
    Outcome,
    Producer,
)
from qflow_client.amqp.frames import CHANNEL_CLOSE, CHANNEL_FLOW, CHANNEL_FLOW_OK, HEARTBEAT_FRAME, PUBLISH
from qflow_client.testing.brokerj import BrokerJ, BrokerJNode
from tests.effort import rounds
from tests.integration.producer.tools import eventually
from tests.interop.contract.producers import PRODUCERS
from tests.interop.relay import Relay

pytestmark = pytest.mark.brokerj

PATIENCE = 100.0
# Maximum bytes that the broker counts for a message with a body of 1,000 bytes and the producer's header.
MESSAGE = 1_100
FLOW = HoldKind.CHANNEL_FLOW
RAISED = FlowEventKind.FLOWED, FlowEventKind.HOLD_RAISED
LIFTED = FlowEventKind.UNFLOWED, FlowEventKind.HOLD_LIFTED
FLOW_CONTROL = "PRODUCER_FLOW_CONTROL"
MAKERS = [pytest.param(PRODUCERS[name], id=name) for name in ("Producer", "AsyncProducer")]


@pytest.fixture
def channel(brokerj: BrokerJ) -> Iterator[BlockingChannel]:
    connection = pika.BlockingConnection(pika.URLParameters(brokerj.url))
    yield connection.channel()
    if connection.is_open:
        connection.close()


@pytest.fixture
def queue(channel: BlockingChannel) -> Iterator[Callable[..., str]]:
    """A function that declares queues with the given arguments. The queues are deleted at the end."""
    names: list[str] = []

    def declare(**arguments: object) -> str:
        names.append(f"qflow-{uuid4().hex}")
        channel.queue_declare(names[-1], arguments={key.replace("_", "-"): each for key, each in arguments.items()})
        return names[-1]

    yield declare
    for name in names:
        channel.queue_delete(name)


class Flows:
    """Records the events of the hold `channel_flow`: False when it is raised, True when it is lifted."""

    def __init__(self, producer: Producer) -> None:
        self.seen: list[bool] = []
        self._changed = threading.Condition()
        producer.on_flow(self._take)

    def _take(self, event: FlowEvent) -> None:
        if event.hold is not None and event.hold.kind is FLOW and event.kind in (*RAISED, *LIFTED):
            with self._changed:
                self.seen.append(event.kind in LIFTED)
                self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.seen) >= count, PATIENCE), self.seen


def body(number: int) -> bytes:
    return b"%06d" % number + bytes(994)


def held(producer: Producer) -> bool:
    return FLOW in (hold.kind for hold in producer.flow_state.holds)


def fill(producer: Producer, *, limit: int = 1_000) -> int:
    """Send until the broker stops the producer and has all written messages. Return the number of admitted messages."""
    number = 0
    end = time.monotonic() + PATIENCE
    while number < limit and time.monotonic() < end:
        try:
            producer.send(body(number), timeout=0.5)
            number += 1
        except FlowControlTimeout:
            # On a slow machine, the send may also time out because confirms are late.
            if held(producer):
                break
    # Messages that were written before may still be in flight.
    eventually(lambda: producer.in_flight == 0, "the broker has what was written", timeout=PATIENCE)
    assert held(producer)
    return number


def depth_of(brokerj: BrokerJ, queue: str) -> int:
    return int(brokerj.queue(queue)["statistics"]["queueDepthMessages"])


def take(channel: BlockingChannel, queue: str, count: int, *, wait: Callable[[], object] = lambda: None) -> list[bytes]:
    """Consume `count` messages, call `wait` before each ack, check that the queue is empty, and return the bodies."""
    bodies: list[bytes] = []
    channel.basic_qos(prefetch_count=5)
    for method, _properties, content in channel.consume(queue, inactivity_timeout=PATIENCE):
        assert method is not None, f"{len(bodies)} of {count} messages came"
        assert content is not None
        assert method.delivery_tag is not None
        bodies.append(content)
        wait()
        channel.basic_ack(method.delivery_tag)
        if len(bodies) == count:
            break
    channel.cancel()
    assert channel.queue_declare(queue, passive=True).method.message_count == 0
    return bodies


@pytest.mark.parametrize("make", MAKERS)
def test_J7_with_a_slow_consumer_the_broker_stops_the_producer_and_every_message_arrives(
    brokerj: BrokerJ, channel: BlockingChannel, queue: Callable[..., str], make: Callable[..., Any]
) -> None:
    capacity, window, count = 100_000, 20, 1_000
    name = queue(x_qpid_capacity=capacity, x_qpid_flow_resume_capacity=capacity // 2)
    with Relay(brokerj.url, brokerj.port) as relay:
        with make(relay.url, routing_key=name, capacity=window) as producer:
            flows = Flows(producer)

            def publish() -> None:
                for number in range(count):
                    producer.send(body(number))

            publisher = threading.Thread(target=publish)
            publisher.start()

            def wait() -> None:
                # Three times, wait until the producer is stopped, even if it is slow.
                if flows.seen.count(True) < 3:
                    eventually(lambda: held(producer), "it is flowed", timeout=PATIENCE)

            assert take(channel, name, count, wait=wait) == [body(number) for number in range(count)]
            publisher.join(PATIENCE)
            assert not publisher.is_alive()
            producer.flush(timeout=PATIENCE)
            # The queue is empty, so the broker's last Channel.Flow lets the producer continue.
            assert producer.wait_unflowed(PATIENCE)
            said = [bool(each[4]) for each in relay.methods("in", CHANNEL_FLOW)]
            flows.wait_for(len(said))
            # Each frame on the wire has exactly one event.
            assert flows.seen == said
            assert said == [number % 2 == 1 for number in range(len(said))]
            assert said.count(True) >= 3, "it was hardly ever flowed: what is to be shown did not happen"
            # The last answer may still be in flight.
            relay.wait_for_method("out", CHANNEL_FLOW_OK, len(said))
            assert [bool(each[4]) for each in relay.methods("out", CHANNEL_FLOW_OK)] == said
        stopped = False
        for way, _kind, _channel, payload in relay.frames:
            if (way, payload[:4]) == ("out", CHANNEL_FLOW_OK):
                stopped = not payload[4]
            elif (way, payload[:4]) == ("in", CHANNEL_FLOW) and payload[4]:
                stopped = False
            assert not (stopped and payload[:4] == PUBLISH), "published after Flow-Ok"
        assert not relay.methods("in", CHANNEL_CLOSE)
    # The broker reads the whole socket, acks the messages, and then sends Channel.Flow. So it gets one window before
    # the acks, and one window that the acks release.
    peak = int(brokerj.queue(name)["statistics"]["queueDepthBytesHighWatermark"])
    assert capacity < peak <= capacity + 2 * window * MESSAGE
    if isinstance(brokerj, BrokerJNode):
        # The log has all crossings of the thresholds. The broker sends no Channel.Flow if the depth crosses back.
        words = [line for line in brokerj.log.splitlines() if f"qu({name})" in line]
        assert sum("QUE-1003" in line for line in words) >= said.count(False)
        assert sum("QUE-1004" in line for line in words) >= said.count(True)


def test_after_a_stop_pika_publishes_and_loses_its_channel_and_our_producer_waits(
    brokerj: BrokerJ, channel: BlockingChannel, queue: Callable[..., str]
) -> None:
    name = queue(x_qpid_capacity=20_000, x_qpid_flow_resume_capacity=10_000)
    with (
        Producer(brokerj.url, routing_key=name, capacity=10) as producer,
        Relay(brokerj.url, brokerj.port) as relay,
    ):
        fill(producer)
        before = depth_of(brokerj, name)
        connection = pika.BlockingConnection(pika.URLParameters(relay.url))
        theirs = connection.channel()
        published: list[int] = []

        def publish() -> None:
            end = time.monotonic() + PATIENCE
            while time.monotonic() < end:
                theirs.basic_publish("", name, body(len(published)))
                published.append(len(published))
                connection.process_data_events(time_limit=0.02)

        with pytest.raises((pika.exceptions.ChannelClosedByBroker, pika.exceptions.ChannelWrongStateError)):
            publish()
        (close,) = relay.methods("in", CHANNEL_CLOSE)
        assert int.from_bytes(close[4:6], "big") == 311
        assert [each[4] for each in relay.methods("in", CHANNEL_FLOW)] == [0]
        assert not relay.methods("out", CHANNEL_FLOW_OK)
        connection.close()
        # Our producer has been stopped for longer, and still has its channel.
        assert held(producer)
        # The queue was full when pika began. The first message of pika was accepted, and pika published after the stop.
        assert depth_of(brokerj, name) > before
        assert len(relay.methods("out", PUBLISH)) > 1
        channel.queue_purge(name)
        assert producer.wait_unflowed(PATIENCE)
        producer.send(b"still there").result(PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS)
def test_C6_two_producers_exceed_the_capacity_of_a_queue_by_at_most_twice_their_own_capacities(
    brokerj: BrokerJ, channel: BlockingChannel, queue: Callable[..., str], make: Callable[..., Any]
) -> None:
    """This needs many rounds, because the result of a round depends on how much the broker reads at once."""
    capacity, windows, count = 20_000, (50, 15), rounds(4)
    worst = 0.0
    with make(brokerj.url, capacity=windows[0]) as one, make(brokerj.url, capacity=windows[1]) as other:
        for _ in range(count):
            name = queue(x_qpid_capacity=capacity, x_qpid_flow_resume_capacity=capacity // 2)

            def overfill(producer: Any) -> None:
                end = time.monotonic() + PATIENCE
                while time.monotonic() < end:
                    try:
                        producer.send(body(0), routing_key=name, timeout=0.2)  # noqa: B023 - called at once
                    except FlowControlTimeout:
                        # On a slow machine, the send may also time out because confirms are late.
                        if held(producer):
                            return
                raise AssertionError("it was not held")

            with ThreadPoolExecutor(2) as threads:
                for job in [threads.submit(overfill, producer) for producer in (one, other)]:
                    job.result()
            peak = int(brokerj.queue(name)["statistics"]["queueDepthBytesHighWatermark"])
            assert capacity < peak <= capacity + 2 * sum(windows) * MESSAGE
            worst = max(worst, (peak - capacity) / sum(windows) / MESSAGE)
            # After a purge, messages that were admitted and held are sent, and may fill the queue again.
            end = time.monotonic() + PATIENCE
            while one.flow_state.flowed or other.flow_state.flowed or one.unsettled or other.unsettled:
                assert time.monotonic() < end, (one.flow_state, other.flow_state)
                channel.queue_purge(name)
                # Broker-J may leave a producer stopped until the queue changes again (J5).
                channel.basic_publish("", name, b"look again")
    print(f"at most {worst:.2f} windows in {count} rounds")


def test_J4_a_producer_that_two_queues_have_stopped_continues_when_both_queues_have_room(
    brokerj: BrokerJ, channel: BlockingChannel, queue: Callable[..., str]
) -> None:
    arguments = {"x_qpid_capacity": 20_000, "x_qpid_flow_resume_capacity": 10_000}
    exchange = "amq.fanout"
    names = queue(**arguments), queue(**arguments)
    for name in names:
        channel.queue_bind(name, exchange)
    with Producer(brokerj.url, exchange=exchange, capacity=10) as producer:
        flows = Flows(producer)
        fill(producer)
        flows.wait_for(1)
        channel.queue_purge(names[0])
        # The purge uses another connection. Its reply follows the effects of the purge. The producer must stay stopped.
        with pytest.raises(FlowControlTimeout):
            producer.send(b"held by the other", timeout=0.5)
        assert flows.seen == [False]
        channel.queue_purge(names[1])
        assert producer.wait_unflowed(PATIENCE)
        flows.wait_for(2)
        assert flows.seen == [False, True]


def overflow_argument(brokerj: BrokerJ, channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, arguments={"qpid.policy_type": "producer_flow_control", "qpid.max_count": 10})


def overflow_over_rest(brokerj: BrokerJ, channel: BlockingChannel, name: str) -> None:
    brokerj.make_queue(name, overflowPolicy="PRODUCER_FLOW_CONTROL", maximumQueueDepthMessages=10)


@pytest.mark.parametrize("make", [overflow_argument, overflow_over_rest])
def test_a_queue_with_the_overflow_policy_PRODUCER_FLOW_CONTROL_stops_and_starts_the_producer(
    brokerj: BrokerJ, channel: BlockingChannel, make: Callable[[BrokerJ, BlockingChannel, str], None]
) -> None:
    name = f"qflow-{uuid4().hex}"
    make(brokerj, channel, name)
    assert brokerj.queue(name)["overflowPolicy"] == "PRODUCER_FLOW_CONTROL"
    with Producer(brokerj.url, routing_key=name, capacity=5) as producer:
        flows = Flows(producer)
        assert 10 < fill(producer) <= 10 + 2 * 5
        # Raise the limit, without removing a message.
        brokerj.change_queue(name, maximumQueueDepthMessages=1_000)
        assert producer.wait_unflowed(PATIENCE)
        producer.send(b"through").result(PATIENCE)
        flows.wait_for(2)
        assert flows.seen == [False, True]
    channel.queue_delete(name)


@pytest.mark.usefixtures("no_retries")
def test_a_full_queue_with_the_policy_REJECT_nacks_mandatory_messages_and_drops_other_messages(
    brokerj: BrokerJ, channel: BlockingChannel
) -> None:
    name = f"qflow-{uuid4().hex}"
    brokerj.make_queue(name, overflowPolicy="REJECT", maximumQueueDepthMessages=2)
    with Producer(brokerj.url, routing_key=name) as producer:
        receipts = [producer.send(body(number)) for number in range(3)]
        with pytest.raises(MessageNacked):
            receipts[2].result(PATIENCE)
        assert [receipt.result(PATIENCE) for receipt in receipts[:2]] == [Outcome.CONFIRMED] * 2
    with Producer(brokerj.url, routing_key=name, mandatory=False) as producer:
        assert producer.send(b"dropped").result(PATIENCE) is Outcome.CONFIRMED
    assert take(channel, name, 2) == [body(0), body(1)]
    channel.queue_delete(name)


def test_a_full_ring_queue_confirms_all_messages_and_keeps_the_last(brokerj: BrokerJ, channel: BlockingChannel) -> None:
    name = f"qflow-{uuid4().hex}"
    brokerj.make_queue(name, overflowPolicy="RING", maximumQueueDepthMessages=2)
    with Producer(brokerj.url, routing_key=name) as producer:
        for number in range(5):
            producer.send(body(number)).result(PATIENCE)
    assert take(channel, name, 2) == [body(3), body(4)]
    channel.queue_delete(name)


def test_a_full_queue_that_flows_to_disk_confirms_and_keeps_all_messages(
    brokerj: BrokerJ, channel: BlockingChannel
) -> None:
    name = f"qflow-{uuid4().hex}"
    brokerj.make_queue(name, overflowPolicy="FLOW_TO_DISK", maximumQueueDepthMessages=2)
    with Producer(brokerj.url, routing_key=name) as producer:
        for number in range(50):
            producer.send(body(number))
        producer.flush(timeout=PATIENCE)
        assert FLOW not in producer.flow_state.seconds_flowed
    assert take(channel, name, 50) == [body(number) for number in range(50)]
    channel.queue_delete(name)


@pytest.mark.parametrize("make", MAKERS)
def test_J3_J6_the_message_that_overfills_a_queue_is_accepted_and_the_resume_capacity_ends_the_hold(
    brokerj: BrokerJ, channel: BlockingChannel, queue: Callable[..., str], make: Callable[..., Any]
) -> None:
    resume = 10_000
    name = queue(x_qpid_capacity=2 * resume, x_qpid_flow_resume_capacity=resume)
    with make(brokerj.url, routing_key=name, capacity=5) as producer:
        fill(producer)
        found = brokerj.queue(name)["statistics"]
        count, size = int(found["queueDepthMessages"]), int(found["queueDepthBytes"])
        assert size > 2 * resume, "the one past the mark is there"
        taken = 0
        # Admitted messages that are held arrive later, so count only the messages that were in the queue.
        while size * (count - taken) / count > resume:
            assert held(producer), "let go too early"
            assert take_one(channel, name) == body(taken)
            taken += 1
        assert producer.wait_unflowed(PATIENCE)
        assert 0 < taken < count
        producer.send(b"through").result(PATIENCE)
    channel.queue_purge(name)


def test_heartbeats_continue_while_the_producer_is_stopped(
    brokerj: BrokerJ, channel: BlockingChannel, queue: Callable[..., str]
) -> None:
    name = queue(x_qpid_capacity=20_000, x_qpid_flow_resume_capacity=10_000)
    with (
        Relay(brokerj.url, brokerj.port) as relay,
        Producer(f"{relay.url}?heartbeat=2", routing_key=name, capacity=10) as producer,
    ):
        fill(producer)
        # This is longer than the time after which each side closes a silent connection.
        for way in ("in", "out"):
            relay.wait_for(way, HEARTBEAT_FRAME, relay.count(way, HEARTBEAT_FRAME) + 3)
        assert held(producer)
        channel.queue_purge(name)
        assert producer.wait_unflowed(PATIENCE)
        producer.send(b"still there").result(PATIENCE)


# Differences between Broker-J and our broker (docs/decisions/0021-broker-j-differences.md).


def test_J1_a_capacity_without_a_resume_capacity_holds_no_producer(brokerj: BrokerJ, queue: Callable[..., str]) -> None:
    name = queue(x_qpid_capacity=1_000)
    assert brokerj.queue(name)["overflowPolicy"] == "NONE"
    with Producer(brokerj.url, routing_key=name, capacity=1) as producer:
        for number in range(20):
            producer.send(body(number)).result(PATIENCE)
        assert FLOW not in producer.flow_state.seconds_flowed


def test_J1_a_queue_with_capacity_0_stops_the_producer_at_the_first_message(
    brokerj: BrokerJ, channel: BlockingChannel, queue: Callable[..., str]
) -> None:
    name = queue(x_qpid_capacity=0, x_qpid_flow_resume_capacity=0)
    with Producer(brokerj.url, routing_key=name, capacity=1) as producer:
        flows = Flows(producer)
        producer.send(body(0))
        flows.wait_for(1)
        channel.queue_purge(name)
        flows.wait_for(2)
        assert flows.seen == [False, True]


def test_J2_the_capacity_of_a_virtual_host_is_the_default_capacity_of_its_queues(own_brokerj: BrokerJNode) -> None:
    own_brokerj.set_context(
        {"queue.defaultMaximumQueueDepthBytes": 10_000, "queue.defaultOverflowPolicy": FLOW_CONTROL}
    )
    with pika.BlockingConnection(pika.URLParameters(own_brokerj.url)) as connection:
        connection.channel().queue_declare("q")
        assert own_brokerj.queue("q")["overflowPolicy"] == FLOW_CONTROL
        with Producer(own_brokerj.url, routing_key="q", capacity=5) as producer:
            fill(producer)
            connection.channel().queue_purge("q")
            assert producer.wait_unflowed(PATIENCE)


def test_J2_a_resume_capacity_above_the_capacity_ends_the_connection(brokerj: BrokerJ) -> None:
    connection: Any = pika.BlockingConnection(pika.URLParameters(brokerj.url))
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        connection.channel().queue_declare(
            f"qflow-{uuid4().hex}", arguments={"x-qpid-capacity": 1_000, "x-qpid-flow-resume-capacity": 2_000}
        )


def test_J6_the_channel_of_a_consumer_that_gets_a_message_from_an_overfull_queue_is_stopped(
    brokerj: BrokerJ, channel: BlockingChannel, queue: Callable[..., str]
) -> None:
    name = queue(x_qpid_capacity=10_000, x_qpid_flow_resume_capacity=5_000)
    # Only the last message exceeds the capacity, so this channel publishes nothing after the stop.
    messages = [body(0), body(1), bytes(20_000)]
    for each in messages:
        channel.basic_publish("", name, each)
    # After this answer all messages are in the queue.
    assert channel.queue_declare(name, passive=True).method.message_count == len(messages)
    with Relay(brokerj.url, brokerj.port) as relay:
        connection = pika.BlockingConnection(pika.URLParameters(relay.url))
        assert take_one(connection.channel(), name) == body(0)
        relay.wait_for_method("in", CHANNEL_FLOW)
        # The broker still accepts the acks of the consumer.
        assert take_one(connection.channel(), name) == body(1)
        connection.close()


def take_one(channel: BlockingChannel, queue: str) -> bytes:
    method, _properties, content = channel.basic_get(queue)
    assert method is not None
    assert content is not None
    assert method.delivery_tag is not None
    channel.basic_ack(method.delivery_tag)
    return content


def test_the_depth_in_bytes_that_Broker_J_reports_includes_the_headers_of_messages(
    brokerj: BrokerJ, queue: Callable[..., str]
) -> None:
    name = queue()
    with Producer(brokerj.url, routing_key=name) as producer:
        producer.send(body(0)).result(PATIENCE)
    assert 1_000 < int(brokerj.queue(name)["statistics"]["queueDepthBytes"]) < MESSAGE
