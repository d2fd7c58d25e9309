"""A message that lets the broker close the channel affects no other message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qflow_client import Message, Outcome, Receipt
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.suspects import narrow_down
from qflow_client.message import REPUBLISHED

from .support import CHANNEL, FRAME_MAX, Published, Wire, drain, holds, make, publish, send, wait, wire, write

PUBLISH = (60, 40)


def reopen(protocol: ProducerProtocol, frame_max: int = FRAME_MAX) -> list[bytes]:
    """Return the messages that are sent at once on the next channel."""
    protocol.channel_opened(CHANNEL, frame_max, 2.0)
    return left(protocol)


def left(protocol: ProducerProtocol) -> list[bytes]:
    return [message.body for message in wire(drain(protocol)).messages]


def close(protocol: ProducerProtocol, text: str = "NOT_FOUND", method: tuple[int, int] = PUBLISH) -> None:
    protocol.channel_closed(404, text, method, 1.0)


def five(protocol: ProducerProtocol) -> list[Receipt]:
    receipts = [send(protocol, b"%d" % number, key="bad" if number in (2, 4) else "q") for number in range(1, 6)]
    drain(protocol)
    return receipts


def test_messages_suspected_of_closing_the_channel_are_resent_one_at_a_time_with_nothing_else_in_flight() -> None:
    protocol = make(capacity=6)
    receipts = five(protocol)
    unwritten = send(protocol, b"6")
    waiting = wait(protocol, b"7")
    close(protocol, "NO_ROUTE - no such key 'bad'")
    assert reopen(protocol) == [b"1"]
    assert holds(protocol) == ["capacity", "disconnected"]
    for number in range(1, 5):
        protocol.on_ack(number, False, 3.0)
        assert (waiting.receipt is None) == (number < 4)
        assert left(protocol) == [b"%d" % (number + 1)]
    protocol.on_ack(5, False, 3.0)
    # The last message in flight is answered, so the others may be sent together.
    assert left(protocol) == [b"6", b"7"]
    assert holds(protocol) == []
    protocol.on_ack(7, True, 4.0)
    assert waiting.receipt is not None
    assert {each.outcome for each in (*receipts, unwritten, waiting.receipt)} == {Outcome.CONFIRMED}


def test_if_a_channel_close_names_an_exchange_only_messages_to_that_exchange_are_resent_one_at_a_time() -> None:
    protocol = make()
    receipts = [
        protocol.admission.send(b"%d" % number, "missing" if number == 3 else "there", "q", 0.0)
        for number in range(1, 6)
    ]
    drain(protocol)
    close(protocol, "NOT_FOUND - no exchange 'missing' in vhost '/'")
    protocol.channel_opened(CHANNEL, FRAME_MAX, 2.0)
    assert left(protocol) == [b"1", b"2"]
    protocol.on_ack(2, True, 3.0)
    assert left(protocol) == [b"3"]
    close(protocol, "NOT_FOUND - no exchange 'missing' in vhost '/'")
    assert receipts[2] is not None
    assert receipts[2].outcome is Outcome.REJECTED
    assert "no exchange 'missing'" in str(receipts[2].error())
    assert reopen(protocol) == [b"4", b"5"]
    assert holds(protocol) == []


def test_resent_messages_that_may_have_arrived_are_marked_as_second_copies_even_if_none_is_suspected() -> None:
    protocol = make()
    send(protocol, b"1")
    send(protocol, b"2", key="bad")
    drain(protocol)
    send(protocol, b"3")
    close(protocol, "no queue 'bad'")
    protocol.channel_opened(CHANNEL, FRAME_MAX, 2.0)
    seen: list[Published] = []
    for tag in range(1, 4):
        seen += wire(drain(protocol)).messages
        protocol.on_ack(tag, False, 3.0)
    assert [(each.body, (each.properties.headers or {}).get(REPUBLISHED, False)) for each in seen] == [
        (b"1", True),
        (b"2", True),
        (b"3", False),
    ]


def test_a_channel_close_text_is_not_trusted_after_a_message_that_it_named_was_confirmed() -> None:
    protocol = make()
    protocol.admission.send(b"innocent", "named", "q", 0.0)
    culprit = protocol.admission.send(b"guilty", "other", "q", 0.0)
    last = protocol.admission.send(b"last", "other", "q", 0.0)
    drain(protocol)
    close(protocol, "ACCESS_REFUSED - 'named'")
    assert reopen(protocol) == [b"innocent"]
    protocol.on_ack(1, False, 3.0)
    assert left(protocol) == [b"guilty", b"last"]
    close(protocol, "ACCESS_REFUSED - 'named'")
    assert reopen(protocol) == [b"guilty"]
    close(protocol, "ACCESS_REFUSED - 'named'")
    assert culprit is not None
    assert culprit.outcome is Outcome.REJECTED
    assert reopen(protocol) == [b"last"]
    protocol.on_ack(1, False, 3.0)
    assert last is not None
    assert last.outcome is Outcome.CONFIRMED


def test_the_second_channel_close_without_a_method_rejects_the_only_message_in_flight() -> None:
    protocol = make()
    receipt = publish(protocol, b"1")
    close(protocol, "closed by the operator", (0, 0))
    assert not receipt.done
    assert reopen(protocol) == [b"1"]
    close(protocol, "still", (0, 0))
    assert receipt.outcome is Outcome.REJECTED


def test_a_message_suspected_of_closing_the_channel_is_also_sent_alone_after_a_lost_connection() -> None:
    protocol = make()
    five(protocol)
    close(protocol)
    assert reopen(protocol) == [b"1"]
    protocol.connection_lost("cut", 3.0, reconnects=True)
    assert reopen(protocol) == [b"1"]
    protocol.on_ack(1, False, 4.0)
    assert left(protocol) == [b"2"]


def test_a_message_to_resend_that_is_too_large_for_the_new_broker_is_settled_and_the_next_one_is_sent() -> None:
    protocol = make()
    headers = {"k": "v" * (FRAME_MAX - 200)}
    receipts = [send(protocol, b"1"), send(protocol, Message(b"2", headers=headers)), send(protocol, b"3")]
    drain(protocol)
    receipts.append(send(protocol, b"4"))
    assert protocol.waiters.when_flushed("all")
    close(protocol)
    assert reopen(protocol, 1024) == [b"1"]
    protocol.on_ack(1, False, 3.0)
    assert receipts[1].outcome is Outcome.UNKNOWN
    assert left(protocol) == [b"3"]
    protocol.on_ack(2, False, 3.0)
    assert left(protocol) == [b"4"]
    assert protocol.reports.wake == []
    protocol.on_ack(3, False, 3.0)
    assert [receipt.outcome for receipt in receipts] == [
        Outcome.CONFIRMED,
        Outcome.UNKNOWN,
        Outcome.CONFIRMED,
        Outcome.CONFIRMED,
    ]
    assert protocol.reports.wake == ["all"]
    assert (protocol.unsettled, protocol.window.used) == (0, 0)
    assert left(protocol) == []


def test_messages_that_are_resent_one_at_a_time_are_also_sent_while_the_producer_closes() -> None:
    protocol = make()
    five(protocol)
    close(protocol)
    protocol.close("the producer is closed", 1.0)
    assert protocol.wants_channel
    assert reopen(protocol) == [b"1"]
    for tag in range(1, 6):
        protocol.on_ack(tag, False, 3.0)
        drain(protocol)
    assert protocol.unsettled == 0
    close(protocol)
    assert not protocol.wants_channel


def test_no_message_is_written_without_a_channel_even_if_the_window_has_room() -> None:
    protocol = make()
    five(protocol)
    close(protocol)
    assert drain(protocol) == b""
    assert reopen(protocol) == [b"1"]
    protocol.connection_lost("cut", 3.0, reconnects=True)
    assert drain(protocol) == b""
    assert protocol.window.used < protocol.window.capacity
    assert reopen(protocol) == [b"1"]
    protocol.connection_lost("gone", 4.0)
    assert drain(protocol) == b""
    assert protocol.unsettled == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NOT_FOUND - no exchange 'a' in vhost '/'", [0, 1]),
        ("ACCESS_REFUSED - write access to topic 'x' in exchange 'a' in vhost '/' refused for user 'guest'", [0]),
        ("ACCESS_REFUSED - write access to exchange 'amq.default' in vhost '/' refused", [3]),
        ("PRECONDITION_FAILED - message size 9 is larger than configured max size 8", [0, 1, 2, 3]),
        ("PRECONDITION_FAILED - 'x'", [0, 1, 2, 3]),
    ],
)
def test_messages_to_the_exchange_or_key_that_a_channel_close_names_are_suspected_as_its_cause(
    text: str, expected: list[int]
) -> None:
    protocol = make()
    places = [("a", "x"), ("a", "y"), ("b", "x"), ("", "z")]
    receipts = [protocol.admission.send(b"", exchange, key, 0.0) for exchange, key in places]
    suspects = [receipt for receipt in receipts if receipt is not None]
    assert [suspects.index(each) for each in narrow_down(suspects, text)] == expected


@given(st.lists(st.sampled_from(["send", "poison", "part", "work", "lose", "wait"]), max_size=60), st.booleans())
def test_if_the_broker_closes_the_channel_at_certain_messages_exactly_those_are_rejected(
    steps: list[str], tells: bool
) -> None:
    """The broker reads message by message, and closes the channel at each poisonous one."""
    protocol = make(capacity=6)
    receipts: list[Receipt] = []
    poison: set[str] = set()
    arrived: list[str] = []
    state = {"wire": Wire(), "read": 0}

    def anew() -> None:
        state.update(wire=Wire(), read=0)
        protocol.channel_opened(CHANNEL, FRAME_MAX, 0.0)

    def work() -> None:
        seen = state["wire"].messages  # type: ignore[attr-defined]
        whole = len(seen) - state["wire"].in_message  # type: ignore[attr-defined]
        for message in seen[state["read"] : whole]:
            state["read"] += 1  # type: ignore[operator]
            name = message.properties.message_id
            if name in poison:
                protocol.channel_closed(404, f"no '{message.exchange}'" if tells else "no", PUBLISH, 0.0)
                anew()
                return
            copy = bool((message.properties.headers or {}).get(REPUBLISHED))
            assert copy or name not in arrived, "an unmarked copy"
            arrived.append(name)
            protocol.on_ack(state["read"], False, 0.0)  # type: ignore[arg-type]

    def send_one(exchange: str) -> None:
        receipt = protocol.admission.send(b"x", exchange, "q", 0.0)
        if receipt is not None:
            receipts.append(receipt)
            if exchange == "poison":
                poison.add(str(receipt.message_id))

    for step in steps:
        if step == "send":
            send_one("fine")
        elif step == "poison":
            send_one("poison")
        elif step == "part":
            size = len(protocol.data_to_write(1 << 20))
            state["wire"].read(write(protocol, size * 2 // 3))  # type: ignore[attr-defined]
        elif step == "work":
            state["wire"].read(drain(protocol))  # type: ignore[attr-defined]
            work()
        elif step == "lose":
            protocol.connection_lost("cut", 0.0, reconnects=True)
            anew()
        assert protocol.window.used == protocol.unsettled == sum(not receipt.done for receipt in receipts)
    for _ in range(200):
        if not protocol.unsettled:
            break
        state["wire"].read(drain(protocol))  # type: ignore[attr-defined]
        work()
    assert [receipt.outcome for receipt in receipts] == [
        Outcome.REJECTED if receipt.message_id in poison else Outcome.CONFIRMED for receipt in receipts
    ]
    fine = [receipt.message_id for receipt in receipts if receipt.message_id not in poison]
    assert list(dict.fromkeys(arrived)) == fine
    assert holds(protocol) == []


# A message that causes the loss of the whole connection is even harder to find.

PROVES = 5.0


class Lossy:
    """A broker that confirms up to a message, and then drops the connection; and a clock."""

    def __init__(self, protocol: ProducerProtocol, poison: bytes) -> None:
        self.protocol = protocol
        self.poison = poison
        self.now = 1.0
        self.arrived: list[bytes] = []
        self.alone: list[bool] = []
        self.held: list[float] = []

    def connection(self, *, hears: bool = True) -> None:
        """Run one connection to its end: by the poison, or after an hour."""
        protocol = self.protocol
        protocol.channel_opened(CHANNEL, FRAME_MAX, self.now)
        opened, tag = self.now, 0
        while self.now < opened + 3600.0:
            for message in wire(drain(protocol)).messages:
                self.held.append(self.now - opened)
                if message.body == self.poison:
                    self.alone.append(protocol.in_flight == 1)
                    self.lose()
                    return
                tag += 1
                self.arrived.append(message.body)
                if hears:
                    protocol.on_ack(tag, False, self.now)
            at = protocol.next_timer(self.now)
            self.now = self.now + 1.0 if at is None else max(self.now, at)
            protocol.on_timer(self.now)

    def lose(self, **keywords: bool) -> None:
        self.protocol.connection_lost("the connection is lost: dropped", self.now, reconnects=True, **keywords)
        self.now += 0.1


@pytest.mark.parametrize("hears", [True, False])
def test_if_the_broker_drops_the_connection_at_one_message_only_that_message_is_given_up_as_unknown(
    hears: bool,
) -> None:
    protocol = make(reconnect_delay_max=PROVES)
    receipts = [send(protocol, b"%d" % number) for number in range(1, 6)]
    broker = Lossy(protocol, b"3")
    connections = 0
    while receipts[2].outcome is None:
        broker.connection(hears=hears or broker.protocol.parts.resending.suspects.numbers != set())
        connections += 1
        assert connections < 14
    assert receipts[2].outcome is Outcome.UNKNOWN
    assert "connections stay open without this message, and are lost when it is sent" in str(receipts[2].error())
    assert [receipt.costs_connection for receipt in receipts] == [False, False, True, False, False]
    assert "dropped" in str(receipts[2].error())
    # The message was sent alone, on connections that had stayed open without it.
    assert broker.alone[-6:] == [True] * 6
    assert broker.held[-5:] == pytest.approx([PROVES] * 5)
    broker.connection()
    assert [receipt.outcome for receipt in receipts] == [
        Outcome.CONFIRMED if number != 3 else Outcome.UNKNOWN for number in range(1, 6)
    ]
    assert list(dict.fromkeys(broker.arrived)) == [b"1", b"2", b"4", b"5"]
    assert holds(protocol) == []
    assert not protocol.needs_timer


def test_an_unsent_message_is_not_suspected_as_the_cause_of_lost_connections() -> None:
    protocol = make(reconnect_delay_max=PROVES)
    receipt = send(protocol, b"innocent")
    for at in range(100):
        now = 10.0 * at
        protocol.channel_opened(CHANNEL, FRAME_MAX, now)
        drain(protocol)
        # Only at the first three times the message is sent immediately.
        assert protocol.in_flight == (at < 3)
        assert protocol.next_timer(now) == (None if at < 3 else now + PROVES)
        protocol.on_timer(now + 4.9)
        assert protocol.in_flight == (at < 3)
        protocol.connection_lost("lost", now + 4.9, reconnects=True)
    assert receipt.outcome is None


def test_a_message_is_not_suspected_as_the_cause_of_a_connection_loss_long_after_its_sending() -> None:
    protocol = make(reconnect_delay_max=PROVES)
    receipt = send(protocol, b"innocent")
    for at in range(100):
        now = 100.0 * at
        protocol.channel_opened(CHANNEL, FRAME_MAX, now)
        protocol.on_timer(now + PROVES)
        drain(protocol)
        protocol.connection_lost("lost", now + 2 * PROVES + 0.1, reconnects=True)
    assert receipt.outcome is None
    protocol.channel_opened(CHANNEL, FRAME_MAX, 1e6)
    protocol.on_timer(1e6 + PROVES)
    drain(protocol)
    protocol.on_ack(1, False, 1e6 + PROVES)
    assert receipt.outcome is Outcome.CONFIRMED


@pytest.mark.parametrize("shared", [True, False])
def test_no_message_is_suspected_as_the_cause_of_the_loss_of_a_connection_that_producers_share(shared: bool) -> None:
    protocol = make(reconnect_delay_max=PROVES)
    receipt = send(protocol, b"1")
    for at in range(20):
        now = 100.0 * at
        protocol.channel_opened(CHANNEL, FRAME_MAX, now)
        protocol.on_timer(now + PROVES)
        drain(protocol)
        protocol.connection_lost("lost", now + PROVES, reconnects=True, shared=shared)
    assert receipt.outcome is (None if shared else Outcome.UNKNOWN)


def test_a_message_is_not_given_up_while_each_lost_connection_confirmed_another_message() -> None:
    protocol = make(reconnect_delay_max=PROVES)
    receipts = [send(protocol, b"%d" % number) for number in range(20)]
    for at in range(19):
        protocol.channel_opened(CHANNEL, FRAME_MAX, float(at))
        assert len(left(protocol)) == 20 - at
        protocol.on_ack(1, False, float(at))
        protocol.connection_lost("lost", float(at), reconnects=True)
    assert [receipt.outcome for receipt in receipts] == [Outcome.CONFIRMED] * 19 + [None]


def test_a_connection_lost_with_no_message_in_flight_does_not_count_against_any_message() -> None:
    protocol = make(reconnect_delay_max=PROVES)
    for at in range(10):
        protocol.channel_opened(CHANNEL, FRAME_MAX, float(at))
        protocol.connection_lost("lost", float(at), reconnects=True)
    receipts = [wait(protocol, b"%d" % number) for number in range(2)]
    protocol.channel_opened(CHANNEL, FRAME_MAX, 20.0)
    assert left(protocol) == [b"0", b"1"]
    protocol.connection_lost("lost", 20.0, reconnects=True)
    assert reopen(protocol) == [b"0", b"1"]
    assert all(ticket.receipt is not None for ticket in receipts)


def test_if_the_text_of_lost_connections_names_an_exchange_only_messages_to_it_are_resent_one_at_a_time() -> None:
    protocol = make(reconnect_delay_max=PROVES)
    for number, exchange in enumerate(("a", "b", "a", "b")):
        protocol.admission.send(b"%d" % number, exchange, "q", 0.0)
    for _ in range(3):
        protocol.channel_opened(CHANNEL, FRAME_MAX, 1.0)
        assert len(left(protocol)) == 4
        protocol.connection_lost("lost: 541 INTERNAL_ERROR - exchange 'b'", 1.0, reconnects=True)
    assert reopen(protocol) == [b"0"]
    protocol.on_ack(1, False, 1.0)
    assert left(protocol) == [b"1"]
    protocol.on_ack(2, False, 1.0)
    assert left(protocol) == [b"2"]
