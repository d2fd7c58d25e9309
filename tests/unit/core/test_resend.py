"""Messages that are sent again on a new channel after a connection was lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qflow_client import Message, Outcome, UndeliveredMessages
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.message import REPUBLISHED

from .support import (
    CHANNEL,
    FRAME_MAX,
    PREFIX,
    Published,
    Wire,
    check_order,
    drain,
    holds,
    logged,
    make,
    publish,
    publish_many,
    reconnect,
    returned,
    send,
    wait,
    wire,
    write,
    write_and_ack,
)


def lose(protocol: ProducerProtocol, now: float = 1.0) -> None:
    assert protocol.connection_lost("cut", now, reconnects=True)


def reopen(protocol: ProducerProtocol, now: float = 2.0, frame_max: int = FRAME_MAX) -> list[Published]:
    """Return the messages that the broker reads on the new channel."""
    protocol.channel_opened(CHANNEL, frame_max, now)
    return wire(drain(protocol, now)).messages


def is_marked(message: Published) -> bool:
    return bool((message.properties.headers or {}).get(REPUBLISHED))


def test_unsettled_messages_are_resent_in_order_before_new_messages() -> None:
    protocol = make(capacity=4)
    receipts = [send(protocol, body) for body in (b"1", b"2", b"3", b"4")]
    waiting = wait(protocol, b"5", waiter="me")
    write_and_ack(protocol, 2, 0.5)
    assert waiting.receipt is not None
    lose(protocol)
    assert "disconnected" in holds(protocol)
    assert [receipt.done for receipt in receipts] == [False, True, False, False]
    assert protocol.closed is None
    again = reopen(protocol)
    assert [message.body for message in again] == [b"1", b"3", b"4", b"5"]
    protocol.on_ack(4, True, 3.0)
    assert all(receipt.outcome is Outcome.CONFIRMED for receipt in (*receipts, waiting.receipt))
    assert (protocol.unsettled, protocol.window.used) == (0, 0)
    assert [message.body for message in wire(_sent(protocol, b"6")).messages] == [b"6"]


def _sent(protocol: ProducerProtocol, body: bytes) -> bytes:
    send(protocol, body)
    return drain(protocol)


def test_only_resent_messages_that_may_have_arrived_are_marked_as_second_copies_and_all_keep_their_ids() -> None:
    protocol = make()
    receipts = [send(protocol, b"whole"), send(protocol, b"begun"), send(protocol, Message(b"not", headers={"k": 1}))]
    data = protocol.data_to_write(1 << 20)
    half = data.index(b"begun") - 3
    write(protocol, half)
    lose(protocol)
    again = reopen(protocol)
    assert [is_marked(message) for message in again] == [True, True, False]
    assert [message.properties.message_id for message in again] == [receipt.message_id for receipt in receipts]
    assert again[2].properties.headers == {"k": 1}


def test_a_message_stays_marked_as_a_second_copy_if_the_connection_is_lost_again_before_it_is_resent() -> None:
    protocol = make()
    receipt = publish(protocol, Message(b"x", headers={"k": 1}))
    lose(protocol)
    protocol.channel_opened(CHANNEL, FRAME_MAX, 2.0)
    lose(protocol, 3.0)
    (message,) = reopen(protocol, 4.0)
    assert message.properties.headers == {"k": 1, REPUBLISHED: True}
    protocol.on_ack(1, False, 5.0)
    assert receipt.outcome is Outcome.CONFIRMED


def test_a_closing_producer_resends_unsettled_messages_and_then_needs_no_connection() -> None:
    protocol = make()
    receipt = publish(protocol)
    protocol.close("the producer is closed", 1.0)
    lose(protocol, 2.0)
    assert holds(protocol) == ["disconnected"]
    assert [message.body for message in reopen(protocol, 3.0)] == [b"x"]
    protocol.on_ack(1, False, 4.0)
    assert receipt.outcome is Outcome.CONFIRMED
    assert not protocol.connection_lost("cut", 5.0, reconnects=True)
    assert holds(protocol) == []


def test_with_on_disconnect_fail_a_lost_connection_settles_all_messages_and_the_producer_continues() -> None:
    protocol = make(on_disconnect="fail", capacity=3)
    written = publish(protocol)
    unwritten = send(protocol)
    again = send(protocol)
    waiting = wait(protocol, b"new")
    assert protocol.waiters.when_flushed("me")
    lose(protocol)
    assert [receipt.outcome for receipt in (written, unwritten, again)] == [
        Outcome.UNKNOWN,
        Outcome.FAILED,
        Outcome.FAILED,
    ]
    assert "(cut)" in str(written.error())
    assert protocol.reports.wake == ["me"]
    assert (protocol.closed, protocol.unsettled, protocol.window.used) == (None, 0, 0)
    assert waiting.receipt is None
    assert [(message.body, is_marked(message)) for message in reopen(protocol)] == [(b"new", False)]
    protocol.on_ack(1, False, 3.0)
    assert waiting.receipt is not None
    assert waiting.receipt.outcome is Outcome.CONFIRMED


def test_with_on_disconnect_fail_a_closed_producer_needs_no_connection() -> None:
    protocol = make(on_disconnect="fail")
    receipt = publish(protocol)
    protocol.close("the producer is closed", 1.0)
    assert not protocol.connection_lost("cut", 2.0, reconnects=True)
    assert receipt.outcome is Outcome.UNKNOWN


def test_a_lost_connection_is_logged_as_a_warning_and_connecting_for_the_first_time_is_not() -> None:
    protocol = make()
    assert [line.split()[0] for line in logged(protocol)] == ["DEBUG"] * 2
    protocol.reports.logs.clear()
    lose(protocol, 1.0)
    protocol.channel_opened(CHANNEL, FRAME_MAX, 3.5)
    assert logged(protocol) == [
        "WARNING producer: blocked (flowed): disconnected (cut)",
        "WARNING producer: hold lifted after 2.5 s: disconnected (cut)",
    ]


def test_a_returned_message_whose_ack_was_lost_with_the_connection_is_settled_as_returned() -> None:
    protocol = make(capacity=2)
    receipt, other = send(protocol), send(protocol)
    drain(protocol)
    returned(protocol, receipt.message_id)
    lose(protocol)
    assert receipt.outcome is Outcome.RETURNED
    assert not other.done
    assert protocol.window.used == 1
    assert len(reopen(protocol)) == 1


@pytest.mark.parametrize("outcome", [Outcome.RETURNED, Outcome.REJECTED])
def test_a_message_may_have_arrived_if_only_its_second_copy_is_known_to_be_refused(outcome: Outcome) -> None:
    protocol = make()
    receipt = publish(protocol)
    lose(protocol)
    reopen(protocol)
    if outcome is Outcome.RETURNED:
        returned(protocol, receipt.message_id)
        protocol.on_ack(1, False, 3.0)
    else:
        protocol.channel_closed(404, "no exchange", (60, 40), 3.0)
    assert receipt.outcome is outcome
    assert UndeliveredMessages([receipt]).unknown == (receipt.message,)


@pytest.mark.parametrize("own_id", [None, "mine"])
def test_a_basic_return_finds_a_resent_message_as_soon_as_that_message_is_written(own_id: str | None) -> None:
    protocol = make()
    first = send(protocol)
    settled = send(protocol)
    receipt = send(protocol, Message(b"x", message_id=own_id))
    write_and_ack(protocol, 2, 0.5)
    lose(protocol)
    protocol.channel_opened(CHANNEL, FRAME_MAX, 2.0)
    returned(protocol, receipt.message_id)
    drain(protocol)
    returned(protocol, settled.message_id)
    protocol.on_ack(1, False, 3.0)
    assert first.outcome is Outcome.CONFIRMED
    returned(protocol, receipt.message_id)
    protocol.on_ack(2, False, 3.0)
    assert receipt.outcome is Outcome.RETURNED


def test_a_flush_after_a_lost_connection_waits_only_for_messages_admitted_before_the_flush() -> None:
    protocol = make()
    publish_many(protocol, 3)
    assert protocol.waiters.when_flushed("all three")
    send(protocol)
    protocol.on_ack(2, False, 0.5)
    lose(protocol)
    reopen(protocol)
    protocol.on_ack(1, False, 3.0)
    assert protocol.reports.wake == []
    protocol.on_ack(2, False, 3.0)
    assert protocol.reports.wake == ["all three"]
    assert protocol.unsettled == 1


def test_a_resent_message_with_headers_too_large_for_the_new_broker_is_settled_and_all_others_are_sent() -> None:
    protocol = make()
    large = Message(b"", headers={"k": "v" * (FRAME_MAX - 200)})
    receipts = [send(protocol, payload) for payload in (large, b"1", large, b"3")]
    drain(protocol)
    receipts.append(send(protocol, large))
    lose(protocol)
    again = reopen(protocol, frame_max=1024)
    assert [message.body for message in again] == [b"1", b"3"]
    assert [receipt.outcome for receipt in receipts] == [Outcome.UNKNOWN, None, Outcome.UNKNOWN, None, Outcome.FAILED]
    assert "cannot be encoded again" in str(receipts[2].error())
    protocol.on_ack(2, True, 3.0)
    assert [receipts[1].outcome, receipts[3].outcome] == [Outcome.CONFIRMED] * 2
    assert protocol.window.used == 0


def test_too_many_bytes_to_resend_cause_a_hold_for_unwritten_bytes_until_half_are_written() -> None:
    protocol = make(max_unwritten_bytes=1000)
    publish(protocol, bytes(3000))
    lose(protocol)
    protocol.channel_opened(CHANNEL, FRAME_MAX, 2.0)
    assert holds(protocol) == ["transport"]
    drain(protocol, 3.0)
    assert holds(protocol) == []


def test_channel_flow_on_the_new_channel_holds_the_messages_to_resend() -> None:
    protocol = make()
    publish(protocol, b"1")
    lose(protocol)
    protocol.channel_opened(CHANNEL, FRAME_MAX, 2.0)
    protocol.on_flow(False, 2.0)
    assert wire(drain(protocol)).short == [False]
    protocol.on_flow(True, 3.0)
    assert wire(drain(protocol)).short == [True, b"1"]


def test_without_confirms_messages_that_were_not_fully_written_are_resent() -> None:
    protocol = make(confirms=False)
    receipts = [send(protocol, b"1"), send(protocol, b"22222")]
    data = protocol.data_to_write(1 << 20)
    write(protocol, data.index(b"22222") + 2)
    lose(protocol)
    assert [receipt.outcome for receipt in receipts] == [Outcome.SENT, None]
    (message,) = reopen(protocol)
    assert (message.body, is_marked(message)) == (b"22222", True)
    assert receipts[1].outcome is Outcome.SENT


def test_messages_without_a_message_id_are_resent_after_a_lost_connection() -> None:
    protocol = make(message_ids=False)
    receipt = publish(protocol, b"x")
    lose(protocol)
    (message,) = reopen(protocol)
    assert (message.body, message.properties.message_id, is_marked(message)) == (b"x", None, True)
    protocol.on_ack(1, False, 3.0)
    assert receipt.outcome is Outcome.CONFIRMED


@given(st.lists(st.sampled_from(["send", "write", "ack", "acks", "lose"]), max_size=60))
def test_whatever_connections_are_lost_every_message_settles_once_and_first_copies_stay_in_order(
    steps: list[str],
) -> None:
    protocol = make(capacity=5)
    receipts = []
    seen: list[str] = []
    tags: list[int] = []

    def written() -> None:
        for message in wire(drain(protocol)).messages:
            assert message.properties.message_id is not None
            assert is_marked(message) == (message.properties.message_id in seen), "marked if and only if a copy"
            seen.append(message.properties.message_id)
            tags.append(len(tags) + 1)

    for step in steps:
        if step == "send":
            is_full = protocol.unsettled == 5
            receipt = protocol.admission.send(b"x", "", "q", 0.0)
            assert (receipt is None) == is_full
            if receipt is not None:
                receipts.append(receipt)
        elif step == "write":
            written()
        elif step == "lose":
            # On a shared connection no message becomes a suspect, however often the connection is lost.
            protocol.connection_lost("lost", 0.0, reconnects=True, shared=True)
            protocol.channel_opened(CHANNEL, FRAME_MAX, 0.0)
            tags.clear()
        elif tags:
            protocol.on_ack(tags[-1], step == "acks", 0.0)
        assert protocol.window.used == protocol.unsettled == sum(not receipt.done for receipt in receipts)
    written()
    protocol.on_ack(0, True, 0.0)
    assert all(receipt.outcome is Outcome.CONFIRMED for receipt in receipts)
    firsts = list(dict.fromkeys(seen))
    assert firsts == [f"{PREFIX}{number:012x}" for number in range(1, len(receipts) + 1)]


def test_the_receipt_of_a_resent_message_has_the_delivery_tag_of_the_last_channel() -> None:
    protocol = make()
    receipts = [send(protocol, b"%d" % number) for number in range(3)]
    drain(protocol)
    assert [receipt._tag for receipt in receipts] == [1, 2, 3]
    protocol.on_ack(1, False, 0.0)
    reconnect(protocol, 1.0, 2.0)
    receipts.append(send(protocol, b"new", 2.0))
    write_and_ack(protocol, 0, 3.0, multiple=True)
    assert [receipt._tag for receipt in receipts[1:]] == [1, 2, 3]


def test_resent_messages_are_encoded_only_as_fast_as_the_socket_accepts_them() -> None:
    protocol = make(capacity=1000, max_unwritten_bytes=10_000_000)
    body = bytes(100_000)
    for _ in range(50):
        send(protocol, body)
    drain(protocol)
    lose(protocol)
    protocol.channel_opened(CHANNEL, FRAME_MAX, 1.0)
    assert protocol.unwritten > 50 * len(body), "all of it counts"
    outbound = protocol.parts.unconfirmed.outbound
    assert outbound.size == 0, "and nothing is made"
    most = seen = 0
    while data := protocol.data_to_write(1 << 14):
        most = max(most, len(data))
        seen += 1
        assert outbound.size < 2 * len(body)
        protocol.advance(len(data), 1.0)
    assert seen > 50
    assert most < (1 << 14) + FRAME_MAX
    assert protocol.unwritten == 0


def test_while_the_topology_is_redeclared_only_flow_ok_frames_are_written_and_no_messages() -> None:
    protocol = make()
    publish(protocol, b"written")
    send(protocol, b"never written")
    lose(protocol)
    protocol.channel_opened(CHANNEL, FRAME_MAX, 2.0, restores=True)
    assert holds(protocol) == ["disconnected"]
    waiting = wait(protocol, b"waits", 2.0)
    protocol.on_flow(False, 2.0)
    protocol.on_flow(True, 2.0)
    sent = wire(drain(protocol, 2.0))
    assert sent.seen == [False, True]
    protocol.on_blocked("no memory", 2.0)
    protocol.restored(3.0)
    assert drain(protocol, 3.0) == b""
    protocol.on_unblocked(4.0)
    assert [message.body for message in wire(drain(protocol, 4.0)).messages] == [b"written", b"never written", b"waits"]
    assert waiting.receipt is not None
    assert holds(protocol) == []


def test_if_a_channel_is_lost_while_the_topology_is_redeclared_the_next_channel_sends_all_messages() -> None:
    protocol = make()
    publish(protocol, b"1")
    for now in (1.0, 3.0):
        lose(protocol, now)
        protocol.channel_opened(CHANNEL, FRAME_MAX, now + 1.0, restores=True)
        assert drain(protocol, now + 1.0) == b""
    protocol.restored(5.0)
    (message,) = wire(drain(protocol, 5.0)).messages
    assert is_marked(message)
    assert holds(protocol) == []


def test_a_channel_that_was_lost_while_the_topology_was_redeclared_leaves_no_hold() -> None:
    protocol = make()
    lose(protocol, 1.0)
    protocol.channel_opened(CHANNEL, FRAME_MAX, 2.0, restores=True)
    lose(protocol, 3.0)
    protocol.channel_opened(CHANNEL, FRAME_MAX, 4.0)
    assert holds(protocol) == []
    send(protocol, b"x", 4.0)
    assert drain(protocol, 4.0)


def test_a_producer_that_is_closed_while_the_topology_is_redeclared_has_no_hold_left() -> None:
    protocol = make()
    lose(protocol, 1.0)
    protocol.channel_opened(CHANNEL, FRAME_MAX, 2.0, restores=True)
    protocol.connection_lost("the end", 3.0)
    assert [hold.source for hold in protocol.gate.holds] == [""]


def test_a_message_is_resent_on_a_new_channel_that_has_a_different_number() -> None:
    protocol = make()
    receipt = send(protocol, Message(b"own", type="t"))
    lose(protocol)
    protocol.channel_opened(CHANNEL + 1, FRAME_MAX, 2.0)
    (message,) = Wire().read(drain(protocol, 2.0), CHANNEL + 1).messages
    assert (message.body, message.properties.message_type) == (b"own", "t")
    protocol.on_ack(1, False, 3.0)
    assert receipt.outcome is Outcome.CONFIRMED


@given(st.lists(st.sampled_from([b"x", b"", b"y" * 5000, Message(b"own", type="t"), Message(b"z" * 9000)]), max_size=6))
def test_messages_have_the_same_bytes_and_delivery_tags_if_they_are_written_one_by_one_or_together(
    payloads: list[bytes | Message],
) -> None:
    together, single = make(), make()
    receipts = [send(together, payload) for payload in payloads]
    data, one_by_one = drain(together), b""
    for receipt, payload in zip(receipts, payloads, strict=True):
        other = send(single, payload)
        one_by_one += drain(single)
        assert (other._number, other._tag) == (receipt._number, receipt._tag)
        check_order(single)
    assert one_by_one == data
