"""The same program with pika and with the drop-in, against a real RabbitMQ."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pika as original
import pytest

import qflow_client.pika as drop_in
from qflow_client import ConfirmTimeout, FlowControlTimeout, HoldKind
from qflow_client.message import REPUBLISHED
from qflow_client.testing.proxy import FaultProxy
from qflow_client.testing.rabbitmq import RabbitMQNode
from tests.effort import rounds
from tests.integration.dropin.scenarios import all_scenarios, outcome
from tests.integration.dropin.tools import wait_at_most
from tests.integration.producer.tools import eventually, start, takes

pytestmark = pytest.mark.rabbitmq

# Maximum seconds of a wait of the drop-in that must time out, and seconds after which a call counts as hanging.
WAIT = 0.5
HANGS = 3 * WAIT
PATIENCE = 100.0


@all_scenarios
def test_the_drop_in_has_the_results_exceptions_and_order_of_callbacks_of_pika(
    rabbitmq: RabbitMQNode, name: str
) -> None:
    assert outcome(drop_in, rabbitmq.url, name) == outcome(original, rabbitmq.url, name)


@pytest.fixture
def alarmed(own_rabbitmq: RabbitMQNode) -> RabbitMQNode:
    """A node for memory alarms, with an empty queue ``orders``."""
    with original.BlockingConnection(original.URLParameters(own_rabbitmq.url)) as connection:
        connection.channel().queue_declare("orders")
    return own_rabbitmq


def connect(module: Any, node: RabbitMQNode, wait: float = PATIENCE) -> Any:
    query = "" if module is original else f"?max_producer_flow_control_wait={wait}"
    return module.BlockingConnection(module.URLParameters(node.url + query))


def bodies(node: RabbitMQNode, count: int) -> list[bytes]:
    """Consume `count` messages, check that the queue is empty, and return the bodies."""
    found: list[bytes] = []
    with original.BlockingConnection(original.URLParameters(node.url)) as connection:
        channel = connection.channel()
        for _, _, body in channel.consume("orders", auto_ack=True, inactivity_timeout=PATIENCE):
            assert body is not None, f"{len(found)} of {count} came"
            found.append(body)
            if len(found) == count:
                break
        channel.cancel()
        assert channel.queue_declare("orders", passive=True).method.message_count == 0
    return found


def pump(connection: Any, until: Callable[[], object]) -> None:
    """Let a connection read until a condition is true."""
    end = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < end
        connection.process_data_events(0.1)


class Program:
    """A program that publishes until an error. It is the same for pika and the drop-in, except for the module."""

    def __init__(self, module: Any, node: RabbitMQNode, *, confirms: bool, body: bytes = b"") -> None:
        self.published = 0
        self.body = body
        self.connection = connect(module, node)
        self.channel = self.connection.channel()
        if confirms:
            self.channel.confirm_delivery()
        self.publish()

    def publish(self) -> None:
        self.channel.basic_publish("", "orders", b"%06d" % self.published + self.body)
        self.published += 1

    def run(self, count: int) -> None:
        for _ in range(count):
            self.publish()


def test_during_a_memory_alarm_a_publish_with_confirms_hangs_in_pika_and_raises_in_the_drop_in(
    alarmed: RabbitMQNode,
) -> None:
    theirs, ours = Program(original, alarmed, confirms=True), Program(drop_in, alarmed, confirms=True)
    alarmed.raise_memory_alarm()
    job = start(theirs.run, 2)
    wait_at_most(ours.channel, WAIT)
    with takes(WAIT), pytest.raises(ConfirmTimeout):
        ours.publish()
    # This message makes the broker block the connection. The broker may send its notice after the deadline.
    pump(ours.connection, lambda: HoldKind.CONNECTION_BLOCKED in [hold.kind for hold in ours.channel.flow_state.holds])
    with takes(WAIT), pytest.raises(ConfirmTimeout, match="held by connection_blocked"):
        ours.channel.wait_for_confirms(WAIT)
    with takes(WAIT), pytest.raises(FlowControlTimeout) as caught:
        ours.publish()
    assert [hold.kind for hold in caught.value.holds] == [HoldKind.CONNECTION_BLOCKED]
    job.join(HANGS)
    assert job.is_alive(), "pika hangs"
    alarmed.clear_memory_alarm()
    job.result(PATIENCE)
    assert ours.channel.wait_unflowed(PATIENCE)
    # The message with an unknown outcome has arrived. The message that was not sent has not.
    ours.channel.wait_for_confirms(PATIENCE)
    wait_at_most(ours.channel, PATIENCE)
    ours.run(2)
    for program in theirs, ours:
        program.connection.close()
    of_pika, of_drop_in = [b"000000", b"000001", b"000002"], [b"000000", b"000001", b"000001", b"000002"]
    assert sorted(bodies(alarmed, 7)) == sorted([*of_pika, *of_drop_in])


def test_during_a_memory_alarm_a_publish_without_confirms_hangs_in_pika_and_raises_in_the_drop_in(
    alarmed: RabbitMQNode,
) -> None:
    body = bytes(100_000)
    ours = Program(drop_in, alarmed, confirms=False, body=body)
    theirs = Program(original, alarmed, confirms=False, body=body)
    alarmed.raise_memory_alarm()
    # The broker blocks the connection after a first publish, so publish until its notice arrives.
    wait_at_most(ours.channel, WAIT)
    ended = start(ours.run, 1000).wait(PATIENCE)
    assert isinstance(ended, ConfirmTimeout | FlowControlTimeout)
    # If the notice is late, the message that fills the socket may be partly written. Then its rest is sent later.
    begun = isinstance(ended, ConfirmTimeout)
    held_by = [hold.kind for hold in ended.holds] if isinstance(ended, FlowControlTimeout) else []
    assert begun or {HoldKind.CONNECTION_BLOCKED, HoldKind.TRANSPORT} & set(held_by)
    pump(ours.connection, lambda: HoldKind.CONNECTION_BLOCKED in [hold.kind for hold in ours.channel.flow_state.holds])
    job = start(theirs.run, 1000)
    job.join(HANGS)
    assert job.is_alive(), "pika hangs"
    # If the notice came so late that our socket was also full, our socket contains some more messages.
    if not begun and HoldKind.TRANSPORT not in held_by:
        eventually(lambda: theirs.published >= ours.published, "pika has gone on", timeout=PATIENCE)
    accepted = ours.published
    with takes(WAIT), pytest.raises(FlowControlTimeout) as caught:
        ours.publish()
    assert HoldKind.CONNECTION_BLOCKED in [hold.kind for hold in caught.value.holds]
    alarmed.clear_memory_alarm()
    job.result(PATIENCE)
    theirs.connection.close()
    assert ours.channel.wait_unflowed(PATIENCE)
    # When the broker answers, the messages of this channel are in the queue.
    ours.channel.queue_declare("orders", passive=True)
    with original.BlockingConnection(original.URLParameters(alarmed.url)) as connection:
        connection.channel().queue_purge("orders")
    wait_at_most(ours.channel, PATIENCE)
    ours.run(5)
    ours.connection.close()
    assert [each[:6] for each in bodies(alarmed, 5)] == [b"%06d" % number for number in range(accepted, accepted + 5)]


def test_during_a_memory_alarm_an_error_leaves_the_with_block_in_time(alarmed: RabbitMQNode) -> None:
    def program() -> None:
        with connect(drop_in, alarmed, WAIT) as connection, connection.channel() as channel:
            wait_at_most(channel, PATIENCE)
            channel.confirm_delivery(pipelined=True)
            channel.basic_publish("", "orders", b"before")
            channel.wait_for_confirms()
            alarmed.raise_memory_alarm()
            wait_at_most(channel, WAIT)
            while True:
                channel.basic_publish("", "orders", b"")

    # The alarm continues at the end of the block.
    with pytest.raises(FlowControlTimeout):
        program()
    alarmed.clear_memory_alarm()


def test_consuming_continues_during_an_alarm_and_acks_are_sent_when_the_alarm_ends(alarmed: RabbitMQNode) -> None:
    connection = connect(drop_in, alarmed, WAIT)
    channel = connection.channel()
    for number in range(3):
        channel.basic_publish("", "orders", b"%d" % number)
    channel.queue_declare("out")
    alarmed.raise_memory_alarm()
    timeouts: list[FlowControlTimeout] = []

    def consume(channel: Any, method: Any, _properties: Any, body: bytes) -> None:
        channel.basic_ack(method.delivery_tag)
        try:
            while True:
                channel.basic_publish("", "out", body)
        except FlowControlTimeout as error:
            timeouts.append(error)

    channel.basic_consume("orders", consume)
    pump(connection, lambda: len(timeouts) == 3)
    alarmed.clear_memory_alarm()
    assert channel.wait_unflowed(PATIENCE)
    connection.close()
    with original.BlockingConnection(original.URLParameters(alarmed.url)) as again:
        assert again.channel().queue_declare("orders", passive=True).method.message_count == 0


def test_pipelined_messages_survive_lost_connections_and_copies_are_marked(rabbitmq: RabbitMQNode) -> None:
    cuts = rounds(10, least=3)
    with FaultProxy(rabbitmq.url) as proxy, original.BlockingConnection(original.URLParameters(rabbitmq.url)) as other:
        reader = other.channel()
        queue = reader.queue_declare("", exclusive=True).method.queue
        last, number, lost = None, 0, 0

        def depth() -> int:
            return int(reader.queue_declare(queue, passive=True).method.message_count)

        while lost <= cuts:
            # The window is never full, so no publish waits for confirms that the proxy drops.
            channel = drop_in.BlockingConnection(drop_in.URLParameters(f"{proxy.url}?capacity=100000")).channel()
            try:
                channel.confirm_delivery(pipelined=True, republish=last)
                last = channel
                while lost < cuts:
                    for _ in range(100):
                        channel.basic_publish("", queue, b"%d" % number)
                        number += 1
                    if any(each.bytes_to_broker > 50_000 for each in proxy.connections):
                        # These messages arrive, but their confirms do not.
                        proxy.black_hole(direction="to_client")
                        channel.basic_publish("", queue, b"%d" % number)
                        number += 1
                        eventually(lambda: depth() >= number)  # noqa: B023  # called at once
                        proxy.cut()
                        proxy.heal()
                channel.wait_for_confirms(PATIENCE)
                channel.connection.close()
                break
            except drop_in.exceptions.AMQPConnectionError:
                lost += 1
        # Number of unmarked copies of each message, in the order of the first copies.
        unmarked: Counter[int] = Counter()
        copies = depth()
        for _ in range(copies):
            _, properties, body = reader.basic_get(queue, auto_ack=True)
            unmarked[int(body or b"")] += REPUBLISHED not in (properties.headers or {})  # type: ignore[union-attr]
    assert lost == cuts
    assert list(unmarked) == list(range(number))
    assert copies > number
    assert max(unmarked.values()) == 1
