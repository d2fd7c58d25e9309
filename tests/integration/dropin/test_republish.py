"""`confirm_delivery(pipelined=True, republish=…)` resends messages that a lost connection left unconfirmed."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import qflow_client.pika as pika
from qflow_client import ConfirmTimeout, FlowEventKind, HoldKind, flow_manager
from qflow_client.broker import Broker
from qflow_client.core.suspects import PoisonDetector
from qflow_client.message import REPUBLISHED
from tests.effort import rounds
from tests.integration.producer.tools import PATIENCE, Proxy, bodies, eventually, start
from tests.interrupting import EVERY, each_interrupt

from .tools import held, pump

Connect = Callable[..., pika.BlockingConnection]


def marked(broker: Broker) -> list[bool]:
    return [bool((message.properties.headers or {}).get(REPUBLISHED)) for message in broker.messages("q")]


def has_arrived(broker: Broker, count: int) -> bool:
    return broker.queue("q").depth == count


def lost(broker: Broker, channel: Any, *numbers: int, returned: bool = False) -> Any:
    """Publish messages that arrive, and optionally one that is returned. Lose the connection before the confirms."""
    broker.withhold_confirms()
    depth = broker.queue("q").depth
    for number in numbers:
        channel.basic_publish("", "q", b"%d" % number, pika.BasicProperties(message_id=f"id {number}"))
    broker.wait_until(lambda broker: broker.queue("q").depth == depth + len(numbers))
    if returned:
        channel.basic_publish("", "nowhere", b"returned", mandatory=True)
        pump(channel.connection, lambda: channel._flow.returned)
    broker.drop_connections()
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        channel.wait_for_confirms(PATIENCE)
    broker.release_confirms()
    return channel


def pipelined(connect: Connect, republish: Any = None, **settings: Any) -> Any:
    channel = connect(**settings).channel()
    channel.confirm_delivery(pipelined=True, republish=republish)
    return channel


def test_the_next_channel_resends_unconfirmed_messages_first_in_order_with_their_ids_and_a_mark(
    broker: Broker, connect: Connect
) -> None:
    first = lost(broker, pipelined(connect), 0, 1, 2)
    second = pipelined(connect, first)
    assert first.unconfirmed == ()
    second.basic_publish("", "q", b"3")
    second.wait_for_confirms(PATIENCE)
    assert bodies(broker) == [b"0", b"1", b"2"] * 2 + [b"3"]
    assert marked(broker) == [False] * 3 + [True] * 3 + [False]
    assert [each.properties.message_id for each in broker.messages("q")[3:6]] == ["id 0", "id 1", "id 2"]
    assert second.unconfirmed == ()


def test_after_a_second_loss_the_third_channel_resends_only_messages_that_are_still_unconfirmed(
    broker: Broker, connect: Connect
) -> None:
    second = pipelined(connect, lost(broker, pipelined(connect), 0, 1))
    second.wait_for_confirms(PATIENCE)
    third = pipelined(connect, lost(broker, second, 2, 3))
    assert [each.body for each in third.unconfirmed] == [b"2", b"3"]
    third.wait_for_confirms(PATIENCE)
    assert bodies(broker) == [b"0", b"1"] * 2 + [b"2", b"3"] * 2
    assert marked(broker) == [False, False, True, True] * 2


@pytest.mark.parametrize("size", [10, 5000])
def test_a_program_that_reconnects_after_each_lost_connection_loses_no_message(
    broker: Broker, connect: Connect, size: int
) -> None:
    count, losses = rounds(400, least=150), rounds(20, least=8)
    orders = iter(range(count))
    channel, cuts = None, 0
    order = next(orders, None)
    while True:
        try:
            fresh = connect(capacity=20, max_producer_flow_control_wait=PATIENCE).channel()
            # First publish a message without confirms, so that delivery tags differ from the numbers of messages.
            fresh.basic_publish("", "other", b"")
            fresh.confirm_delivery(pipelined=True, republish=channel)
            channel = fresh
            while order is not None:
                channel.basic_publish("", "q", b"%d " % order + bytes(size))
                order = next(orders, None)
                if cuts < losses and order is not None and order > cuts * count / losses:
                    cuts += 1
                    broker.drop_connections()
            channel.wait_for_confirms(PATIENCE)
            break
        except pika.exceptions.AMQPConnectionError:
            pass
    arrived = [int(body.split()[0]) for body in bodies(broker)]
    assert list(dict.fromkeys(arrived)) == list(range(count))
    seen: set[int] = set()
    for number, is_marked in zip(arrived, marked(broker), strict=True):
        assert number not in seen or is_marked, "an unmarked copy"
        seen.add(number)
    assert cuts == losses


def holds(channel: Any) -> list[str]:
    return [hold.kind for hold in channel.flow_state.holds]


@pytest.mark.parametrize("still", [True, False])
def test_a_pause_by_the_flow_manager_also_holds_the_next_channel_until_the_pause_ends(
    broker: Broker, connect: Connect, still: bool
) -> None:
    first = pipelined(connect)
    try:
        flow_manager.stop_all("a test")
        held(first, HoldKind.PAUSED)
        broker.drop_connections()
        with pytest.raises(pika.exceptions.AMQPConnectionError):
            first.connection.sleep(PATIENCE)
        if not still:
            flow_manager.start_all()
        second = pipelined(connect, first)
        assert holds(second) == [HoldKind.PAUSED] * still
    finally:
        flow_manager.start_all()
    held(second)
    second.basic_publish("", "q", b"")


@pytest.mark.parametrize("reason", ["stopped", "blocked", "paused"])
def test_unconfirmed_messages_are_resent_only_when_the_next_channel_is_not_stopped_or_blocked_even_if_it_is_paused(
    broker: Broker, connect: Connect, reason: str
) -> None:
    first = lost(broker, pipelined(connect), 0)
    events: list[Any] = []
    second = connect().channel()
    second.add_on_flow_callback(events.append)
    if reason == "paused":
        flow_manager.stop_all("a test")
        held(second, HoldKind.PAUSED)
    elif reason == "stopped":
        (name,) = (each.name for each in broker.channels())
        broker.flow(False, name)
        held(second, HoldKind.CHANNEL_FLOW)
    elif reason == "blocked":
        broker.block("a test")
        held(second, HoldKind.CONNECTION_BLOCKED)
    try:
        second.confirm_delivery(pipelined=True, republish=first)
        kinds = {"stopped": HoldKind.CHANNEL_FLOW, "blocked": HoldKind.CONNECTION_BLOCKED, "paused": HoldKind.PAUSED}
        assert [hold.kind for hold in second.flow_state.holds] == [kinds[reason]]
        # A pause holds only messages that are not admitted yet. The answer comes after the messages that were written.
        count = 2 if reason == "paused" else 1
        assert second.queue_declare("q", passive=True).method.message_count == count
    finally:
        flow_manager.start_all()
        broker.unblock()
        for each in broker.channels():
            broker.flow(True, each.name)
    second.wait_for_confirms(PATIENCE)
    assert marked(broker) == [False, True]
    held(second)
    second.connection.process_data_events(0)
    assert [(event.kind, event.hold.kind) for event in events] == [
        (FlowEventKind.FLOWED, kinds[reason]),
        (FlowEventKind.UNFLOWED, kinds[reason]),
    ]


def test_a_partly_written_message_is_resent_as_a_whole(broker: Broker, connect: Connect, proxy: Proxy) -> None:
    first = pipelined(connect, url=proxy.url(broker), max_producer_flow_control_wait=0.2)
    proxy.stop_reading()
    body = bytes(16_000_000)
    with pytest.raises(ConfirmTimeout):
        first.basic_publish("", "q", body)
    proxy.cut()
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        first.wait_for_confirms(PATIENCE)
    second = pipelined(connect, first)
    second.wait_for_confirms(PATIENCE)
    assert marked(broker) == [True]
    assert bodies(broker) == [body]


def test_a_publish_whose_message_is_accepted_before_the_connection_is_lost_does_not_raise(
    broker: Broker, connect: Connect, proxy: Proxy
) -> None:
    first = pipelined(connect, url=proxy.url(broker), max_producer_flow_control_wait=PATIENCE)
    proxy.stop_reading()
    job = start(first.basic_publish, "", "q", bytes(16_000_000))
    eventually(lambda: first.unconfirmed)
    proxy.cut()
    job.result()
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        first.basic_publish("", "q", b"not taken")
    assert len(first.unconfirmed) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda channel: channel.basic_publish("", "q", b"not taken"),
        lambda channel: channel.wait_for_confirms(PATIENCE),
        lambda channel: channel.queue_declare("q"),
    ],
)
def test_if_a_message_is_accepted_just_before_the_connection_is_lost_the_next_call_raises_the_error(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch, call: Callable[[Any], Any]
) -> None:
    first = pipelined(connect, capacity=1, max_producer_flow_control_wait=PATIENCE)
    broker.withhold_confirms()
    first.basic_publish("", "q", b"0")
    turn = first._turns.until

    def confirm_and_lose(_deadline: float) -> None:
        at = time.monotonic() + PATIENCE
        broker.release_confirms()
        while first.unconfirmed[0].body != b"1":
            turn(at)
        broker.drop_connections()
        while first.is_open:
            turn(at)

    monkeypatch.setattr(first._turns, "until", confirm_and_lose)
    first.basic_publish("", "q", b"1")
    assert [each.body for each in first.unconfirmed] == [b"1"]
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        call(first)
    with pytest.raises(pika.exceptions.ChannelWrongStateError):
        call(first)
    assert [each.body for each in first.unconfirmed] == [b"1"]


def test_resent_messages_respect_a_smaller_frame_max_of_the_new_connection(broker: Broker, connect: Connect) -> None:
    first = pipelined(connect)
    broker.withhold_confirms()
    first.basic_publish("", "q", bytes(range(256)) * 100)
    broker.drop_connections()
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        first.wait_for_confirms(PATIENCE)
    broker.release_confirms()
    second = pipelined(connect, first, frame_max=8192)
    second.wait_for_confirms(PATIENCE)
    assert bodies(broker)[-1] == bytes(range(256)) * 100


def test_a_message_returned_before_the_connection_is_lost_is_reported_by_the_next_channel(
    broker: Broker, connect: Connect
) -> None:
    first = pipelined(connect)
    first.basic_publish("", "nowhere", b"returned", mandatory=True)
    pump(first.connection, lambda: not first._flow.protocol.unsettled)
    broker.drop_connections()
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        first.connection.sleep(PATIENCE)
    second = pipelined(connect, first)
    with pytest.raises(pika.exceptions.UnroutableError) as caught:
        second.wait_for_confirms(PATIENCE)
    assert [each.body for each in caught.value.messages] == [b"returned"]


def test_messages_that_are_unconfirmed_after_close_can_be_republished(broker: Broker, connect: Connect) -> None:
    first = pipelined(connect, max_producer_flow_control_wait=0.1)
    broker.withhold_confirms()
    first.basic_publish("", "q", b"0")
    with pytest.raises(ConfirmTimeout):
        first.connection.close()
    broker.release_confirms()
    pipelined(connect, first).wait_for_confirms(PATIENCE)
    assert marked(broker) == [False, True]


def test_confirm_delivery_rejects_a_channel_whose_messages_cannot_be_republished(
    broker: Broker, connect: Connect
) -> None:
    closed = pipelined(connect)
    closed.basic_publish("nowhere", "", b"")
    with pytest.raises(pika.exceptions.ChannelClosedByBroker):
        closed.wait_for_confirms(PATIENCE)
    assert [each.body for each in closed.unconfirmed] == [b""]
    taken = lost(broker, pipelined(connect), 0)
    pipelined(connect, taken).wait_for_confirms(PATIENCE)
    plain = connect().channel()
    plain.connection.close()
    for channel, why in (closed, "closed by|closed <"), (taken, "only once"), (plain, "pipelined"):
        with pytest.raises(ValueError, match=why):
            pipelined(connect, channel)
    with pytest.raises(ValueError, match="is open"):
        pipelined(connect, pipelined(connect))
    with pytest.raises(TypeError, match=r"republish=.*must be a BlockingChannel"):
        pipelined(connect, "channel")
    kept = lost(broker, pipelined(connect), 1)
    late = pipelined(connect)
    with pytest.raises(ValueError, match="first confirm_delivery"):
        late.confirm_delivery(pipelined=True, republish=kept)
    with pytest.raises(ValueError, match="pipelined=True"):
        connect().channel().confirm_delivery(republish=kept)
    gone = connect().channel()
    gone.connection.close()
    with pytest.raises(pika.exceptions.AMQPError):
        gone.confirm_delivery(pipelined=True, republish=kept)
    assert [each.body for each in kept.unconfirmed] == [b"1"]


@pytest.mark.parametrize("others", ["none", "before it", "after it"])
def test_after_8_lost_connections_a_message_is_not_resent_unless_other_channels_have_published(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    # Shorten the time after which a connection counts as stable. The connection is lost just after the message is sent.
    monkeypatch.setattr(PoisonDetector, "note_open", lambda self, now: setattr(self, "_send_at", now + 0.01))
    broker.withhold_confirms()
    channel: Any = None
    losses = 0
    while losses < 10:
        connection = connect()
        fresh = connection.channel(2)
        if others != "none":
            connection.channel(1 if others == "before it" else 3).basic_publish("", "other", b"")
        fresh.confirm_delivery(pipelined=True, republish=channel)
        if channel is None:
            fresh.basic_publish("", "q", b"poison", pika.BasicProperties(message_id="7"))
        channel = fresh
        if not channel._flow.protocol.unsettled:
            break
        pump(connection, partial(has_arrived, broker, losses + 1))
        broker.drop_connections()
        losses += 1
        with pytest.raises(pika.exceptions.AMQPConnectionError):
            channel.wait_for_confirms(PATIENCE)
        assert [(each.properties.message_id, each.body) for each in channel.unconfirmed] == [("7", b"poison")]
    if others != "none":
        assert losses == 10
        return
    assert losses == 8
    with pytest.raises(pika.exceptions.NackError) as caught:
        channel.basic_publish("", "q", b"not sent")
    assert [each.body for each in caught.value.messages] == [b"poison"]
    assert (
        "1 of them were not nacked: message 1 to ''/'q': unknown (connections stay open" in caught.value.__notes__[-1]
    )
    assert channel.unconfirmed == ()
    broker.release_confirms()
    channel.basic_publish("", "q", b"goes on")
    channel.wait_for_confirms(PATIENCE)
    assert bodies(broker) == [b"poison"] * 8 + [b"goes on"]


def test_E2_after_an_interrupt_of_confirm_delivery_exactly_one_channel_has_the_messages(
    broker: Broker, connect: Connect
) -> None:
    def confirm(channel: Any) -> None:
        try:
            channel.wait_for_confirms(PATIENCE)
        except pika.exceptions.StreamLostError:
            # An interrupt during a write has ended the connection.
            pipelined(connect, channel).wait_for_confirms(PATIENCE)

    for interrupt in each_interrupt(least=10, every=EVERY):
        broker.purge("q")
        first = lost(broker, pipelined(connect), 0, 1, returned=True)
        second = connect().channel()
        interrupt(partial(second.confirm_delivery, True, first), only=("pika/flow.py", "core/channel.py"))
        if first.unconfirmed:
            second = pipelined(connect, first)
        with pytest.raises(pika.exceptions.UnroutableError) as caught:
            confirm(second)
        # The first return, and the return of the second copy.
        assert [each.body for each in caught.value.messages] == [b"returned"] * 2
        assert bodies(broker)[:4] == [b"0", b"1"] * 2
