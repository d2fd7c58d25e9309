"""All producers with the dialects of other brokers, which the broker here imitates (section 4, docs/dialects.md)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pika
import pytest

import qflow_client.aio_pika
import qflow_client.pika
from qflow_client import ConnectionFailed, FlowControlTimeout, HoldKind, Outcome
from qflow_client.broker import Broker, Profile
from qflow_client.message import REPUBLISHED
from tests.integration.producer.tools import PATIENCE, Wire, bodies, eventually, start, wait_held
from tests.interop.contract.producers import PRODUCERS, AioPikaDropIn

# Seconds that a send may wait in tests of deadlines.
WAIT = 0.3

OURS = ("Producer", "AsyncProducer")
WITHOUT_CONFIRMS = (Profile.WSO2, Profile.AMQP_0_9_1)


class UnconfirmedAioPikaDropIn(AioPikaDropIn):
    async def _connect(self, url: str) -> None:
        self._connection = await qflow_client.aio_pika.connect(url)
        self._channel = await self._connection.channel(publisher_confirms=False)


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def play(wire: Wire) -> Iterator[Callable[..., Broker]]:
    """Starts a broker that plays another, with an empty queue ``q``."""
    with ExitStack() as stack:

        def play(profile: Profile, **options: Any) -> Broker:
            broker = stack.enter_context(Broker(profile=profile, trace=wire, **options))
            broker.declare_queue("q")
            return broker

        yield play


def make(producer: str, url: str, **settings: Any) -> Any:
    return PRODUCERS[producer](url, routing_key="q", **settings)


def unconfirmed(producer: str, url: str, **settings: Any) -> Any:
    """A producer that does without confirms; pika's drop-in finds out by itself, as pika does."""
    if producer in OURS:
        return make(producer, url, confirms=False, **settings)
    if producer == "pika drop-in":
        return make(producer, url, **settings)
    return UnconfirmedAioPikaDropIn(url, routing_key="q", **settings)


def send_until_stopped(producer: Any) -> list[bytes]:
    """Send until the producer is held, and return what was admitted before."""
    admitted: list[bytes] = []
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        body = b"%d" % len(admitted)
        try:
            producer.send(body)
        except FlowControlTimeout as error:
            if HoldKind.CHANNEL_FLOW in {hold.kind for hold in error.holds}:
                return admitted
            # The producer is held for another reason, such as a full window, before it reads `Channel.Flow`.
            continue
        admitted.append(body)
    raise AssertionError("it was not held")


@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.parametrize("profile", WITHOUT_CONFIRMS)
def test_J7_A4_an_alarm_signalled_by_channel_flow_holds_the_producer_until_the_alarm_is_cleared(
    play: Callable[..., Broker], wire: Wire, profile: Profile, producer: str
) -> None:
    broker = play(profile)
    with unconfirmed(producer, broker.url, max_producer_flow_control_wait=WAIT) as made:
        made.send(b"first")
        broker.wait_until(lambda b: b.queue("q").depth == 1)
        broker.raise_alarm("buffer", "the global limit of the message buffer is reached")
        admitted = send_until_stopped(made)
        broker.wait_until(lambda b: all(each.flow_ok for each in b.producers()))
        # The rest of what was admitted is held, too.
        found = bodies(broker)
        assert found == [b"first", *admitted][: len(found)]
        broker.clear_alarm("buffer")
        assert made.wait_unflowed(PATIENCE)
        made.send(b"last", timeout=PATIENCE)
        broker.wait_until(lambda b: b.queue("q").depth == len(admitted) + 2)
    assert bodies(broker) == [b"first", *admitted, b"last"]
    assert wire.count("out", "Connection.Blocked") == 0


@pytest.mark.parametrize("producer", OURS)
def test_after_lavinmq_closed_the_channel_for_a_full_disk_all_messages_are_delivered_when_there_is_room(
    play: Callable[..., Broker], wire: Wire, producer: str
) -> None:
    broker = play(Profile.LAVINMQ)
    with make(producer, broker.url, retry_delay=0.02, retry_delay_max=0.1, reconnect_delay=0.02) as made:
        assert made.send(b"before").result(PATIENCE) is Outcome.CONFIRMED
        broker.raise_alarm("disk_space", "less is free than there must be")
        first = made.send(b"first")
        wait_held(made, "refused")
        (refused,) = (hold for hold in made.flow_state.holds if hold.kind is HoldKind.REFUSED)
        assert refused.detail == "406 PRECONDITION_FAILED - Server low on disk space"
        with pytest.raises(FlowControlTimeout, match="Server low on disk space"):
            made.send(b"held", timeout=WAIT)
        # Each try costs a channel, and nothing is taken.
        closed = wire.count("out", "Channel.Close")
        eventually(lambda: wire.count("out", "Channel.Close") > closed, "it tries again")
        assert bodies(broker) == [b"before"]
        waiting = start(made.send, b"second", timeout=None)
        broker.clear_alarm("disk_space")
        second = waiting.result()
        assert [receipt.result(PATIENCE) for receipt in (first, second)] == [Outcome.CONFIRMED] * 2
    assert bodies(broker) == [b"before", b"first", b"second"]
    marks = [(message.properties.headers or {}).get(REPUBLISHED) for message in broker.messages("q")]
    # Only the one that was tried while there was no room may be a second copy.
    assert marks == [None, True, None]
    assert wire.count("out", "Connection.Blocked") == 0
    assert wire.count("out", "Basic.Nack") == 0


@pytest.mark.parametrize("producer", OURS)
def test_with_on_refused_fail_a_message_that_lavinmq_refuses_for_a_full_disk_settles_as_rejected(
    play: Callable[..., Broker], producer: str
) -> None:
    broker = play(Profile.LAVINMQ)
    with make(producer, broker.url, on_refused="fail", reconnect_delay=0.02) as made:
        made.send(b"before").result(PATIENCE)
        broker.raise_alarm("disk_space", "less is free than there must be")
        receipt = made.send(b"refused")
        assert receipt.wait(PATIENCE)
        assert receipt.outcome is Outcome.REJECTED
        broker.clear_alarm("disk_space")
        assert made.send(b"after").result(PATIENCE) is Outcome.CONFIRMED
    assert bodies(broker) == [b"before", b"after"]


def test_a_full_disk_of_lavinmq_closes_the_channel_of_the_drop_in_for_pika_as_with_pika(
    play: Callable[..., Broker],
) -> None:
    broker = play(Profile.LAVINMQ)
    for module in (pika, qflow_client.pika):
        connection = module.BlockingConnection(module.URLParameters(broker.url))
        channel = connection.channel()
        channel.confirm_delivery()
        broker.raise_alarm("disk_space", "less is free than there must be")
        with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="Server low on disk space") as refused:
            channel.basic_publish("", "q", b"refused")
        assert refused.value.reply_code == 406
        broker.clear_alarm("disk_space")
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish("", "q", b"taken")
        connection.close()
    assert bodies(broker) == [b"taken"] * 2


def test_a_full_disk_of_lavinmq_closes_the_channel_of_the_drop_in_for_aio_pika_as_with_aio_pika(
    play: Callable[..., Broker],
) -> None:
    broker = play(Profile.LAVINMQ)
    exceptions = qflow_client.aio_pika.exceptions
    with make("aio-pika drop-in", broker.url) as made:
        assert made.send(b"taken").outcome is Outcome.CONFIRMED
        broker.raise_alarm("disk_space", "less is free than there must be")
        with pytest.raises(exceptions.ChannelPreconditionFailed, match="Server low on disk space"):
            made.send(b"refused")
    assert bodies(broker) == [b"taken"]


@pytest.mark.parametrize("producer", OURS)
@pytest.mark.parametrize(
    ("code", "text"),
    [(311, "CONTENT_TOO_LARGE - the queue takes no more"), (506, "RESOURCE_ERROR - the queue is full")],
)
def test_messages_are_retried_after_the_broker_closed_the_channel_with_311_or_506_for_lack_of_room(
    play: Callable[..., Broker], producer: str, code: int, text: str
) -> None:
    broker = play(Profile.QFLOW)
    with make(producer, broker.url, retry_delay=0.02, reconnect_delay=0.02) as made:
        broker.withhold_confirms()
        receipts = [made.send(b"%d" % number) for number in range(3)]
        broker.wait_until(lambda b: b.queue("q").depth == 3)
        made_held = made.flow_events(kinds=("refused",))
        broker.close_channels(code, text)
        event = next(made_held)
        assert event.hold is not None
        assert event.hold.detail == f"{code} {text}"
        broker.release_confirms()
        made.flush(timeout=PATIENCE)
        assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}
    messages = broker.messages("q")
    assert [message.body for message in messages] == [b"0", b"1", b"2"] * 2
    marks = [(message.properties.headers or {}).get(REPUBLISHED) for message in messages]
    assert marks == [None] * 3 + [True] * 3


@pytest.mark.parametrize("producer", OURS)
@pytest.mark.parametrize("profile", WITHOUT_CONFIRMS)
def test_a_producer_for_a_broker_without_confirms_raises_an_error_that_says_what_to_do(
    play: Callable[..., Broker], profile: Profile, producer: str
) -> None:
    with pytest.raises(
        ConnectionFailed, match=r"publisher confirms are not available: .*; set confirms=False to publish without"
    ):
        make(producer, play(profile).url)


@pytest.mark.parametrize("profile", WITHOUT_CONFIRMS)
def test_the_drop_in_for_aio_pika_raises_an_error_for_a_broker_without_confirms(
    play: Callable[..., Broker], profile: Profile
) -> None:
    """aio-pika raises the same error if the broker sends a capabilities table, and a KeyError if it sends none."""
    broker = play(profile)

    async def program() -> None:
        async with await qflow_client.aio_pika.connect(broker.url) as connection:
            with pytest.raises(ValueError, match="Server doesn't support publisher_confirms"):
                await connection.channel()

    asyncio.run(program())


@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.parametrize("profile", WITHOUT_CONFIRMS)
def test_a_producer_works_with_small_frames_a_single_channel_and_no_heartbeats(
    play: Callable[..., Broker], wire: Wire, profile: Profile, producer: str
) -> None:
    broker = play(profile)
    dialect = broker.settings.dialect
    body = bytes(range(256)) * 1_000
    with unconfirmed(producer, broker.url) as made:
        made.send(body)
        broker.wait_until(lambda b: b.queue("q").depth == 1)
    assert bodies(broker) == [body]
    frames = -(-len(body) // (dialect.settings["frame_max"] - 8))
    assert wire.count("in", "ContentBody") == frames
    assert wire.count("in", "Channel.Open") == 1


@pytest.mark.parametrize("producer", OURS)
def test_a_producer_immediately_reports_a_broker_with_an_unsupported_protocol_version(
    play: Callable[..., Broker], producer: str
) -> None:
    words = "the header of another AMQP version begins like this: use a port, or a broker, that speaks AMQP 0-9-1"
    with pytest.raises(ConnectionFailed, match=words):
        make(producer, play(Profile.AMQP_0_9).url)


def test_the_drop_ins_raise_a_connection_error_for_a_broker_with_an_unsupported_protocol_version(
    play: Callable[..., Broker],
) -> None:
    url = play(Profile.AMQP_0_9).url
    with pytest.raises(pika.exceptions.IncompatibleProtocolError):
        qflow_client.pika.BlockingConnection(qflow_client.pika.URLParameters(url))

    async def program() -> None:
        with pytest.raises(qflow_client.aio_pika.exceptions.AMQPConnectionError):
            await qflow_client.aio_pika.connect(url)

    asyncio.run(program())


@pytest.mark.parametrize("producer", OURS)
def test_a_producer_reconnects_if_a_channel_error_ends_the_connection(
    play: Callable[..., Broker], wire: Wire, producer: str
) -> None:
    broker = play(Profile.WSO2)
    with unconfirmed(producer, broker.url, reconnect_delay=0.02) as made:
        made.send(b"before")
        broker.wait_until(lambda b: b.queue("q").depth == 1)
        events = made.flow_events(kinds=("disconnected",))
        assert made.send(b"lost", exchange="no such exchange").result(PATIENCE) is Outcome.SENT
        event = next(events)
        assert event.hold is not None
        assert "403" in event.hold.detail
        assert "no such exchange" in event.hold.detail
        assert made.wait_unflowed(PATIENCE)
        made.send(b"after")
        broker.wait_until(lambda b: b.queue("q").depth == 2)
    assert bodies(broker) == [b"before", b"after"]
    assert wire.count("out", "Channel.Close") == 0
