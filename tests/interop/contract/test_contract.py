"""The guarantees of sections 3 and 4 of the specification, for each producer on each broker that supports them."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest

from qflow_client import FlowControlTimeout, HoldKind, Message, MessageRejected, Outcome
from qflow_client.message import REPUBLISHED
from qflow_client.testing.brokerj import VERSIONS
from qflow_client.testing.proxy import FaultProxy
from tests.interop.containers import RELEASES
from tests.interop.contract.producers import PRODUCERS
from tests.interop.contract.providers import PATIENCE, ROOM, STOP, Inbox, Provider

# The first test of each broker starts it, and a busy machine takes half a minute to run rabbitmqctl.
pytestmark = pytest.mark.timeout(400)

# Seconds that a send may wait in tests of deadlines.
WAIT = 0.5

OURS = "qflow"
# RabbitMQ of the installed package, and the releases in containers.
RABBITMQ = ("RabbitMQ", *(f"RabbitMQ {release}" for release in RELEASES))
BROKERJ = tuple(f"Broker-J {version}" for version in VERSIONS)
ALL = (OURS, *RABBITMQ, *BROKERJ)
# Producers that reconnect, and resend lost messages.
RECOVERING = ("Producer", "AsyncProducer")

# pika has no confirms on Broker-J. Neither has its drop-in, because it does not read the frames itself.
UNCONFIRMED = frozenset((broker, "pika drop-in") for broker in BROKERJ)

Make = Callable[..., Any]
Numbers = dict[str, Any]


def capability(
    title: str,
    *,
    on: Iterable[str] = ALL,
    of: Iterable[str] = tuple(PRODUCERS),
    without: Container[tuple[str, str]] = UNCONFIRMED,
) -> Any:
    """Run a test with these producers on these brokers, except for some pairs."""
    marks = dict.fromkeys(RABBITMQ, pytest.mark.rabbitmq) | dict.fromkeys(BROKERJ, pytest.mark.brokerj)

    def decorate(test: Any) -> Any:
        pairs = [
            pytest.param(broker, producer, marks=marks.get(broker, ()), id=f"{broker}, {producer}")
            for broker in on
            for producer in of
            if (broker, producer) not in without
        ]
        return pytest.mark.parametrize(("provider", "make"), pairs, indirect=True)(pytest.mark.capability(title)(test))

    return decorate


def if_it_has(make: Make, **settings: object) -> dict[str, object]:
    """Return settings that the drop-ins do not have. For a drop-in, return no settings."""
    return settings if make in (PRODUCERS[name] for name in RECOVERING) else {}


def body(number: int) -> bytes:
    return b"%06d" % number + bytes(994)


def send_until_held(
    producer: Any, kind: HoldKind, numbers: Numbers, body: Callable[[int], bytes] = body
) -> list[bytes]:
    """Send until the broker holds the producer, record the wait of the last send, and return the admitted bodies."""
    admitted: list[bytes] = []
    end = time.monotonic() + PATIENCE
    for number in range(1_000_000):
        assert time.monotonic() < end, f"not held by {kind}"
        began = time.monotonic()
        try:
            producer.send(body(number), timeout=WAIT)
        except FlowControlTimeout as error:
            # The send did not time out too early, and did not hang.
            waited = time.monotonic() - began
            assert WAIT <= waited < PATIENCE
            # On a slow machine, the send may also time out because confirms are late.
            if kind in {hold.kind for hold in error.holds}:
                numbers[f"s for {WAIT:g} s"] = round(waited, 3)
                break
        else:
            admitted.append(body(number))
    return admitted


@capability("confirmed, in order")
def test_confirmed_messages_arrive_in_order(provider: Provider, make: Make, inbox: Inbox, numbers: Numbers) -> None:
    count = 500
    queue = inbox.declare()
    with make(provider.url, routing_key=queue) as producer:
        receipts = [producer.send(body(number)) for number in range(count)]
        producer.flush(timeout=PATIENCE)
        assert [receipt.outcome for receipt in receipts] == [Outcome.CONFIRMED] * count
    assert inbox.bodies(queue, count) == [body(number) for number in range(count)]
    numbers["messages"] = count


@capability("bodies from empty to 10 MB")
def test_message_bodies_from_0_bytes_to_10_MB_arrive(provider: Provider, make: Make, inbox: Inbox) -> None:
    frame = 131_072 - 8
    bodies = [bytes([size % 251]) * size for size in (0, 1, frame - 1, frame, frame + 1, 10_000_000)]
    queue = inbox.declare()
    with make(provider.url, routing_key=queue) as producer:
        receipts = [producer.send(each) for each in bodies]
        assert [receipt.result(PATIENCE) for receipt in receipts] == [Outcome.CONFIRMED] * len(bodies)
    assert inbox.bodies(queue, len(bodies)) == bodies


@capability("all properties and headers")
def test_all_properties_arrive_unchanged(provider: Provider, make: Make, inbox: Inbox) -> None:
    headers = {"text": "größer", "number": 1 << 40, "truth": True, "nothing": None, "list": [1, "two"], "in": {"a": 1}}
    properties: dict[str, Any] = {
        "content_type": "application/json",
        "content_encoding": "identity",
        "headers": headers,
        "delivery_mode": 1,
        "priority": 3,
        "correlation_id": "correlation",
        "reply_to": "answers",
        "expiration": provider.expiration(600),
        "message_id": "mine",
        "timestamp": 1_700_000_000,
        "type": "order",
        "user_id": "guest",
        "app_id": "shop",
    }
    queue = inbox.declare()
    with make(provider.url, routing_key=queue) as producer:
        assert producer.send(Message(b"{}", **properties)).result(PATIENCE) is Outcome.CONFIRMED
    ((taken, content),) = inbox.take(queue, 1)
    assert content == b"{}"
    assert {name: getattr(taken, name) for name in properties} == properties


@capability("a mandatory message without a queue is reported")
def test_an_unroutable_mandatory_message_is_reported(provider: Provider, make: Make, inbox: Inbox) -> None:
    queue = inbox.declare()
    with make(provider.url, routing_key=queue, **if_it_has(make, on_refused="fail")) as producer:
        lost = producer.send(b"nobody's", routing_key=f"{queue}-not")
        kept = producer.send(b"somebody's")
        assert kept.result(PATIENCE) is Outcome.CONFIRMED
        assert lost.wait(PATIENCE)
        assert lost.outcome in provider.unroutable
    assert inbox.bodies(queue, 1) == [b"somebody's"]


@capability("the nacks of a full queue are reported")
def test_messages_to_a_full_queue_with_the_policy_reject_are_nacked(
    provider: Provider, make: Make, inbox: Inbox
) -> None:
    queue = provider.rejecting(inbox)
    with make(provider.url, routing_key=queue, **if_it_has(make, on_refused="fail")) as producer:
        outcomes = []
        for number in range(ROOM + 3):
            receipt = producer.send(body(number))
            assert receipt.wait(PATIENCE)
            outcomes.append(receipt.outcome)
    assert outcomes[:ROOM] == [Outcome.CONFIRMED] * ROOM
    assert set(outcomes[ROOM:]) <= provider.refused
    assert inbox.bodies(queue, ROOM) == [body(number) for number in range(ROOM)]


@capability("a producer that Channel.Flow stops keeps its time limit", on=(OURS, *BROKERJ), without=())
def test_J7_A4_a_producer_that_a_full_queue_stops_keeps_its_deadlines_and_continues_when_there_is_room(
    provider: Provider, make: Make, inbox: Inbox, numbers: Numbers
) -> None:
    queue = provider.stopping(inbox)
    wait = {"max_producer_flow_control_wait": WAIT}
    with make(provider.url, routing_key=queue, **wait, **if_it_has(make, capacity=10)) as producer:
        admitted = send_until_held(producer, HoldKind.CHANNEL_FLOW, numbers)
        assert len(admitted) * len(body(0)) > STOP / 2
        numbers["kB admitted"] = len(admitted) * len(body(0)) // 1_000
        # The queue gets all admitted messages, and no message whose send has timed out.
        assert inbox.bodies(queue, len(admitted)) == admitted
        assert producer.wait_unflowed(PATIENCE)
        assert producer.send(b"later", timeout=PATIENCE).result(PATIENCE) in (Outcome.CONFIRMED, Outcome.SENT)
        assert inbox.bodies(queue, 1) == [b"later"]


@capability("a producer that Connection.Blocked stops keeps its time limit", on=(OURS, *RABBITMQ))
def test_A4_a_blocked_producer_keeps_its_deadlines_and_continues_when_the_connection_is_unblocked(
    provider: Provider, make: Make, inbox: Inbox, numbers: Numbers
) -> None:
    if provider.block is None:
        pytest.skip("a broker that the environment names cannot be blocked from here")
    queue = inbox.declare()
    with make(provider.url, routing_key=queue, max_producer_flow_control_wait=WAIT) as producer:
        with provider.blocked():
            admitted = send_until_held(producer, HoldKind.CONNECTION_BLOCKED, numbers)
        assert producer.wait_unflowed(PATIENCE)
        assert producer.send(b"later", timeout=PATIENCE).result(PATIENCE) is Outcome.CONFIRMED
    assert inbox.bodies(queue, len(admitted) + 1) == [*admitted, b"later"]


@capability("after a lost connection messages are sent again, with a header", of=RECOVERING)
def test_messages_that_are_unconfirmed_when_the_connection_is_cut_are_resent_and_marked(
    provider: Provider, make: Make, inbox: Inbox
) -> None:
    queue = inbox.declare()
    with (
        FaultProxy(provider.url) as proxy,
        make(proxy.url, routing_key=queue, reconnect_delay=0.05) as producer,
    ):
        assert producer.send(b"before").result(PATIENCE) is Outcome.CONFIRMED
        proxy.black_hole("to_client", connection=proxy.accepted)
        receipt = producer.send(b"twice")
        inbox.wait_depth(queue, 2)
        proxy.cut()
        assert receipt.result(PATIENCE) is Outcome.CONFIRMED
        assert producer.send(b"after").result(PATIENCE) is Outcome.CONFIRMED
    taken = inbox.take(queue, 4)
    assert [content for _, content in taken] == [b"before", b"twice", b"twice", b"after"]
    assert [(properties.headers or {}).get(REPUBLISHED) for properties, _ in taken] == [None, None, True, None]
    first, second = (properties.message_id for properties, _ in taken[1:3])
    assert first == second


@capability("after a closed channel only the message that closed it is lost", of=RECOVERING)
def test_a_message_to_a_missing_exchange_is_rejected_and_all_other_messages_are_confirmed(
    provider: Provider, make: Make, inbox: Inbox
) -> None:
    queue = inbox.declare()
    count = 100
    with make(provider.url, routing_key=queue) as producer:
        receipts = [
            producer.send(body(number), exchange="no such exchange" if number == 50 else None)
            for number in range(count)
        ]
        with pytest.raises(MessageRejected, match=r"404|no such exchange"):
            receipts.pop(50).result(PATIENCE)
        producer.flush(timeout=PATIENCE)
        assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}
    found = inbox.bodies(queue, inbox.depth(queue))
    assert list(dict.fromkeys(found)) == [body(number) for number in range(count) if number != 50]
