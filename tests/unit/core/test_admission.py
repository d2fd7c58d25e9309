"""Admission: the window, the line, the rate, and the end of waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from qflow_client import FlowControlTimeout, FlowEventKind, HoldKind, Message, ProducerClosed, SettingsError
from qflow_client.amqp.frames import Content, Prepared, PublishEncoder
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.tickets import SendTicket
from qflow_client.flow import WeightedLine
from qflow_client.settings import ProducerSettings

from .support import (
    CHANNEL,
    FRAME_MAX,
    MAX_BODY,
    PREFIX,
    drain,
    holds,
    logged,
    make,
    place,
    publish,
    send,
    wait,
    wire,
    write,
    write_and_ack,
)

NO_KEY = "k" * 256


def test_a_producer_without_a_connection_is_flowed_and_admits_waiting_messages_when_it_connects() -> None:
    protocol = make(opened=False)
    assert holds(protocol) == [HoldKind.DISCONNECTED]
    ticket = wait(protocol, waiter="me")
    assert ticket.receipt is None
    protocol.channel_opened(1, FRAME_MAX, 1.0)
    assert ticket.receipt is not None
    assert protocol.reports.wake == ["me"]
    assert protocol.gate.is_open


def test_C6_the_number_of_unsettled_messages_never_exceeds_the_capacity() -> None:
    protocol = make(capacity=3)
    for _ in range(3):
        send(protocol)
    assert protocol.gate.is_open, "a full window is no hold before somebody meets it"
    assert protocol.admission.send(b"x", "", "q", 1.0) is None
    assert holds(protocol) == [HoldKind.CAPACITY]
    assert protocol.unsettled == protocol.window.used == 3
    drain(protocol)
    assert protocol.admission.send(b"x", "", "q", 1.0) is None, "what is written is not settled"
    protocol.on_ack(1, False, 2.0)
    send(protocol, now=2.0)
    assert protocol.admission.send(b"x", "", "q", 2.0) is None


def test_C6_the_bytes_of_unsettled_messages_never_exceed_capacity_bytes() -> None:
    protocol = make(capacity_bytes=100)
    send(protocol, b"a" * 60)
    assert protocol.admission.send(b"b" * 41, "", "q", 0.0) is None
    assert holds(protocol) == [HoldKind.CAPACITY]
    send(protocol, Message(b"c" * 40))
    assert protocol.admission.send(Message(b"d"), "", "q", 0.0) is None
    # An empty message always fits.
    send(protocol, b"")
    write_and_ack(protocol, 1, 1.0)
    assert protocol.limits.byte_window is not None
    assert protocol.limits.byte_window.used == 40
    send(protocol, b"e" * 60, now=1.0)


def test_a_message_larger_than_capacity_bytes_is_admitted_alone() -> None:
    protocol = make(capacity_bytes=100)
    send(protocol, b"a")
    large = wait(protocol, b"b" * 1000)
    write_and_ack(protocol, 1, 1.0)
    assert large.receipt is not None
    after = wait(protocol, b"", now=1.0)
    write_and_ack(protocol, 2, 2.0)
    assert after.receipt is not None


def test_a_message_counts_as_in_flight_from_its_first_written_byte_until_it_is_settled() -> None:
    protocol = make()
    send(protocol, b"1")
    size = protocol.unwritten
    send(protocol, b"2")
    assert protocol.in_flight == 0
    write(protocol, 1)
    assert (protocol.unsettled, protocol.in_flight) == (2, 1)
    write(protocol, size - 1)
    assert protocol.in_flight == 1
    write(protocol, 1)
    assert protocol.in_flight == 2
    write_and_ack(protocol, 1, 0.0)
    assert (protocol.unsettled, protocol.in_flight) == (1, 1)
    send(protocol, b"3")
    assert (protocol.unsettled, protocol.in_flight) == (2, 1)


def test_after_the_capacity_is_lowered_no_message_is_admitted_until_there_is_room() -> None:
    protocol = make(capacity=4)
    receipts = [send(protocol) for _ in range(4)]
    protocol.set_capacity(2, 1.0)
    drain(protocol)
    assert protocol.unsettled == 4
    ticket = wait(protocol, now=1.0)
    protocol.on_ack(2, True, 2.0)
    assert ticket.receipt is None, "two of two are still unsettled"
    protocol.on_ack(3, False, 3.0)
    assert ticket.receipt is not None
    assert [receipt.delivered for receipt in receipts] == [True, True, True, False]


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True, "5", None])
def test_setting_an_invalid_capacity_raises_settings_error_and_changes_nothing(capacity: Any) -> None:
    protocol = make(capacity=3)
    with pytest.raises(SettingsError, match=r"capacity=.*: it must be a whole number of messages, at least 1"):
        protocol.set_capacity(capacity, 1.0)
    assert protocol.window.capacity == 3


def test_F4_waiting_messages_are_admitted_in_order_and_never_overtaken_by_new_messages() -> None:
    protocol = make(capacity=1)
    send(protocol, b"0")
    tickets = [place(protocol, b"%d" % number, 0.0, waiter=number) for number in (1, 2, 3)]
    written = drain(protocol)
    for tag in (1, 2, 3):
        protocol.on_ack(tag, False, 1.0)
        assert protocol.admission.send(b"late", "", "q", 1.0) is None
        written += drain(protocol)
    assert protocol.reports.wake == [1, 2, 3]
    assert wire(written).short == [b"0", b"1", b"2", b"3"]
    assert all(ticket.receipt for ticket in tickets)


def test_F4_a_producer_with_a_weighted_waiting_line_admits_messages_in_the_order_of_that_line() -> None:
    settings = ProducerSettings(capacity=1)
    protocol = ProducerProtocol(settings, id_prefix=PREFIX, now=0.0, line=WeightedLine({"heavy": 2}))
    protocol.channel_opened(1, FRAME_MAX, 0.0)
    assert protocol.admission.send(b"0", "", "q", 0.0) is not None
    for number, source in enumerate(["", "", "", "heavy", "heavy", "heavy", "heavy"]):
        place(protocol, b"x", 0.0, waiter=(source, number), source=source)
    for tag in range(1, 8):
        write_and_ack(protocol, tag, 0.0)
    assert [source for source, _ in protocol.reports.wake] == ["", "heavy", "heavy", "", "heavy", "heavy", ""]


def test_a_message_that_joins_the_waiting_line_of_an_open_producer_is_admitted_immediately() -> None:
    protocol = make()
    ticket = place(protocol, b"x", 0.0, waiter="me")
    assert ticket.receipt is not None
    assert protocol.reports.wake == ["me"]
    assert protocol.line.look_at(ticket, 0.0) is None


def test_A4_a_message_withdrawn_before_its_admission_is_never_sent() -> None:
    protocol = make(capacity=1)
    send(protocol, b"first")
    ticket = wait(protocol, b"gone")
    assert protocol.line.give_up(ticket, 1.0)
    written = drain(protocol)
    protocol.on_ack(1, False, 2.0)
    assert protocol.unsettled == 0
    assert ticket.receipt is None
    assert wire(written + drain(protocol)).short == [b"first"]
    send(protocol, b"next", now=3.0)


def admitted(protocol: ProducerProtocol, ticket: SendTicket) -> None:
    write_and_ack(protocol, 1, 1.0, multiple=True)
    assert ticket.receipt is not None


def refused(protocol: ProducerProtocol, ticket: SendTicket) -> None:
    ticket.routing_key = NO_KEY
    write_and_ack(protocol, 1, 1.0, multiple=True)
    assert isinstance(ticket.error, ValueError)


def timed_out(protocol: ProducerProtocol, ticket: SendTicket) -> None:
    with pytest.raises(FlowControlTimeout):
        protocol.line.look_at(ticket, 100.0)


def given_up(protocol: ProducerProtocol, ticket: SendTicket) -> None:
    assert protocol.line.give_up(ticket, 1.0)


def dismissed(protocol: ProducerProtocol, ticket: SendTicket) -> None:
    protocol.close("closed by hand", 1.0)
    assert isinstance(ticket.error, ProducerClosed)


def lost(protocol: ProducerProtocol, ticket: SendTicket) -> None:
    protocol.connection_lost("reset by peer", 1.0)
    assert isinstance(ticket.error, ProducerClosed)


@pytest.mark.parametrize("decide", [admitted, refused, timed_out, given_up, dismissed, lost])
def test_a_waiting_send_gets_one_result_and_leaves_the_waiting_line_once(
    decide: Callable[[ProducerProtocol, SendTicket], None],
) -> None:
    protocol = make(capacity=1)
    protocol.reports.events = []
    send(protocol)
    ticket, other = wait(protocol, timeout=50.0), wait(protocol, b"other")
    decide(protocol, ticket)
    fate = ticket.receipt, ticket.error
    waiting = protocol.controller.waiting
    assert waiting == (0 if other.decided else 1)
    protocol.reports.events.clear()
    for now in (101.0, 200.0):
        assert not protocol.line.give_up(ticket, now)
        assert protocol.line.look_at(ticket, now) is None
        assert protocol.controller.waiting == waiting
    assert (ticket.receipt, ticket.error) == fate
    assert protocol.reports.events == [], "nothing is said of one who no longer waits"
    protocol.close("closed by hand", 201.0)
    assert not protocol.line.give_up(ticket, 202.0)
    assert protocol.controller.waiting == 0
    assert (ticket.receipt, ticket.error) == fate


def test_when_a_large_message_at_the_head_of_the_line_is_withdrawn_small_messages_behind_it_are_admitted() -> None:
    protocol = make(capacity_bytes=100)
    send(protocol, b"a" * 90)
    head = wait(protocol, b"b" * 50)
    small = [place(protocol, b"c" * 5, 0.0, waiter=number) for number in range(2)]
    assert [ticket.receipt for ticket in small] == [None, None], "no small one passes the head"
    assert protocol.line.give_up(head, 1.0)
    assert all(ticket.receipt for ticket in small)
    assert protocol.reports.wake == [0, 1]


def test_when_all_waiting_messages_are_withdrawn_together_none_of_them_is_admitted() -> None:
    protocol = make(capacity_bytes=100)
    send(protocol, b"a" * 90)
    large = wait(protocol, b"b" * 50, waiter="large")
    small = wait(protocol, b"c" * 5, waiter="small")
    in_front = wait(protocol, b"d" * 50, waiter="in front", first=True)
    protocol.line.give_up_all("the channel is closed", 1.0)
    assert protocol.reports.wake == ["large", "small", "in front"]
    for ticket in (large, small, in_front):
        assert isinstance(ticket.error, ProducerClosed)
        assert (str(ticket.error), ticket.error.message) == ("the channel is closed", ticket.payload)
        assert ticket.receipt is None
        assert not protocol.line.give_up(ticket, 2.0)
        assert protocol.line.look_at(ticket, 2.0) is None
    assert protocol.controller.waiting == 0
    assert protocol.gate.is_open, "ten bytes of room are left"
    protocol.line.give_up_all("the channel is closed", 3.0)
    assert send(protocol, b"e" * 5).message.body == b"e" * 5
    assert protocol.unsettled == 2


def test_C6_the_hold_for_a_full_window_ends_when_there_is_room_even_if_no_sender_waits() -> None:
    protocol = make(capacity=1)
    protocol.reports.events = []
    send(protocol)
    assert protocol.admission.send(b"x", "", "q", 1.0) is None
    write_and_ack(protocol, 1, 3.0)
    assert [(event.kind, event.seconds) for event in protocol.reports.events] == [
        (FlowEventKind.FLOWED, 0.0),
        (FlowEventKind.UNFLOWED, 2.0),
    ]
    assert protocol.flow_state(10.0).seconds_flowed[HoldKind.CAPACITY] == 2.0


# Deadlines and notices.


def test_J7_a_message_that_waits_until_its_deadline_times_out_and_is_never_sent() -> None:
    protocol = make(capacity=1)
    send(protocol)
    payload = b"late"
    ticket = wait(protocol, payload, now=10.0, timeout=0.5)
    assert protocol.line.look_at(ticket, 10.0) == 10.5
    assert protocol.line.look_at(ticket, 10.499) == 10.5, "never early"
    with pytest.raises(FlowControlTimeout) as caught:
        protocol.line.look_at(ticket, 10.5)
    assert caught.value.message is payload
    assert caught.value.waited == 0.5
    assert [hold.kind for hold in caught.value.holds] == [HoldKind.CAPACITY]
    assert not protocol.line.give_up(ticket, 11.0), "that was decided"
    write_and_ack(protocol, 1, 11.0)
    assert protocol.unsettled == 0


def test_a_message_that_the_rate_limit_admits_exactly_at_its_deadline_does_not_time_out() -> None:
    protocol = make(rate=10.0)
    send(protocol, now=0.0)
    ticket = wait(protocol, timeout=1.0)
    assert protocol.line.look_at(ticket, 1.0) is None
    assert ticket.receipt is not None


def test_a_notice_is_logged_once_in_each_notify_period_while_a_send_waits() -> None:
    protocol = make(capacity=1, flow_control_wait_notify_period=2.0, name="orders", wall_offset=1000.0)
    protocol.reports.events = []
    send(protocol)
    ticket = wait(protocol, now=10.0, timeout=5.0)
    protocol.reports.events.clear()
    protocol.reports.logs.clear()
    assert protocol.line.look_at(ticket, 11.9) == 12.0
    assert not protocol.reports.events
    assert protocol.line.look_at(ticket, 12.5) == 14.5
    assert protocol.line.look_at(ticket, 14.5) == 15.0, "the deadline comes before the next notice"
    assert [(event.kind, event.since, event.at, event.seconds, event.waiting) for event in protocol.reports.events] == [
        (FlowEventKind.WAITING, 1010.0, 1012.5, 2.5, 1),
        (FlowEventKind.WAITING, 1010.0, 1014.5, 4.5, 1),
    ]
    assert protocol.reports.events[0].hold is not None
    assert protocol.reports.events[0].hold.kind == HoldKind.CAPACITY
    assert logged(protocol)[0] == "WARNING orders: a send has been waiting for 2.5 s: capacity"


def test_one_log_notice_per_period_shows_the_number_of_waiting_senders_and_the_longest_wait() -> None:
    protocol = make(capacity=1, flow_control_wait_notify_period=2.0)
    protocol.reports.events = []
    send(protocol)
    tickets = [wait(protocol, now=10.0 + number / 100) for number in range(100)]
    protocol.reports.events.clear()
    protocol.reports.logs.clear()
    at = [protocol.line.look_at(ticket, 13.0) for ticket in tickets]
    assert at == [15.0] * 100, "they all look again when the next is due"
    assert [(event.waiting, event.seconds) for event in protocol.reports.events] == [(100, 3.0)]
    assert logged(protocol) == ["WARNING producer: 100 sends have been waiting, the longest for 3.0 s: capacity"]
    # Notices do not count a message that is next to be admitted, or one that was given up.
    protocol.set_capacity(2, 14.0)
    protocol.line.give_up(tickets[1], 14.0)
    protocol.reports.events.clear()
    for ticket in reversed(tickets[2:]):
        protocol.line.look_at(ticket, 15.0)
    ((waiting, seconds),) = [(event.waiting, event.seconds) for event in protocol.reports.events]
    assert (waiting, round(seconds, 6)) == (98, 4.98)


def test_a_sender_that_starts_to_wait_later_logs_no_notice_before_the_next_period() -> None:
    protocol = make(capacity=1, flow_control_wait_notify_period=2.0)
    protocol.reports.events = []
    send(protocol)
    first, second = wait(protocol, now=10.0), wait(protocol, now=11.0)
    protocol.reports.events.clear()
    assert protocol.line.look_at(first, 12.0) == 14.0
    assert protocol.line.look_at(second, 13.0) == 14.0
    assert len(protocol.reports.events) == 1
    protocol.line.give_up(first, 13.5)
    assert protocol.line.look_at(second, 14.0) == 16.0
    assert [event.seconds for event in protocol.reports.events if event.waiting] == [2.0, 3.0]


def test_one_call_logs_the_wait_notices_for_all_waiting_senders() -> None:
    protocol = make(flow_control_wait_notify_period=2.0)
    assert protocol.line.notice(1.0) is None, "nobody waits"
    protocol.hold("paused", 1.0)
    first, second = wait(protocol, now=10.0, timeout=3.0), wait(protocol, now=11.5)
    protocol.reports.logs.clear()
    assert protocol.line.notice(11.9) == 12.0
    assert logged(protocol) == []
    assert protocol.line.notice(12.0) == 14.0
    # The caller that looks at the ticket gets the timeout.
    assert protocol.line.notice(14.0) == 16.0
    assert not first.decided
    protocol.line.give_up(first, 14.5)
    assert protocol.line.notice(14.5) == 16.0, "it was said for all of them"
    assert protocol.line.notice(16.5) == 18.5
    assert [text.partition(": ")[2].partition(":")[0] for text in logged(protocol)] == [
        "2 sends have been waiting, the longest for 2.0 s",
        "2 sends have been waiting, the longest for 4.0 s",
        "a send has been waiting for 5.0 s",
    ]
    protocol.line.give_up(second, 17.0)
    assert protocol.line.notice(18.5) is None


def test_a_wait_notice_names_no_hold_if_the_sender_only_waits_behind_other_senders() -> None:
    protocol = make(capacity_bytes=10)
    send(protocol, b"a" * 8)
    wait(protocol, b"b" * 5)
    behind = place(protocol, b"c", 0.0)
    protocol.controller.gate.lift(HoldKind.CAPACITY, now=0.0)
    protocol.reports.logs.clear()
    protocol.line.look_at(behind, 5.0)
    assert logged(protocol) == [
        "WARNING producer: 2 sends have been waiting, the longest for 5.0 s: other sends wait first"
    ]
    protocol.reports.events = []
    protocol.line.look_at(behind, 10.0)
    assert protocol.reports.events[0].hold is None


# Receipts that are reported by callbacks.


def behind(capacity: int = 4, **settings: Any) -> ProducerProtocol:
    """Return a producer that is held because its callbacks are slower than the confirms."""
    protocol = make(capacity=capacity, **settings)
    protocol.reports.settled = []
    for turn in range(2):
        for _ in range(capacity):
            send(protocol)
        write_and_ack(protocol, 0, 0.0, multiple=True)
        assert protocol.gate.is_open == (turn == 0), "more than a whole window is behind"
        assert len(protocol.take_settled(0.0)) == capacity
    return protocol


def test_slow_receipt_callbacks_hold_the_producer_until_half_of_the_receipts_are_reported() -> None:
    protocol = behind()
    assert list(map(str, protocol.gate.holds)) == ["capacity (on_delivery: callbacks are slower than confirms)"]
    ticket = wait(protocol)
    protocol.reported(5, 1.0)
    assert ticket.receipt is None
    protocol.reported(1, 2.0)
    assert ticket.receipt is not None
    assert protocol.gate.is_open


def test_receipts_settled_by_the_close_of_the_producer_raise_no_hold_for_slow_callbacks() -> None:
    protocol = make(capacity=4)
    protocol.reports.settled = []
    protocol.close("the producer is closed", 1.0)
    protocol.parts.unreported.count = 5
    protocol.take_settled(1.0)
    assert holds(protocol) == []


def test_a_send_in_a_receipt_callback_does_not_wait_for_slow_callbacks_or_for_senders_held_because_of_them() -> None:
    protocol = behind()
    other = wait(protocol, b"other", waiter="other")
    for _ in range(4):
        assert place(protocol, b"x", 1.0, waiter="callback", first=True).receipt is not None
    assert protocol.reports.wake == ["callback"] * 4
    assert other.receipt is None
    # The number of unsettled messages never exceeds the limit (C6).
    fifth = place(protocol, b"x", 1.0, waiter="fifth", first=True)
    assert fifth.receipt is None
    protocol.reported(8, 2.0)
    assert (fifth.receipt, other.receipt) == (None, None)
    write_and_ack(protocol, 9, 2.0)
    assert (fifth.receipt is not None, other.receipt) == (True, None), "it was the first"
    protocol.on_ack(10, False, 2.0)
    assert other.receipt is not None


@pytest.mark.parametrize(("kind", "source"), [("paused", ""), ("capacity", "operator"), ("channel_flow", "")])
def test_a_send_in_a_receipt_callback_waits_for_every_hold_except_the_hold_for_slow_callbacks(
    kind: str, source: str
) -> None:
    protocol = behind()
    protocol.hold(kind, 1.0, source=source)
    ticket = place(protocol, b"x", 1.0, first=True)
    assert ticket.receipt is None
    protocol.lift(kind, 2.0, source=source)
    assert ticket.receipt is not None


def test_F2_a_send_in_a_receipt_callback_waits_for_the_rate_limit() -> None:
    protocol = make(rate=1.0)
    send(protocol)
    assert protocol.admission.send(b"x", "", "q", 0.25) is None
    ticket = place(protocol, b"x", 0.25, first=True)
    assert ticket.receipt is None
    assert protocol.next_timer(0.25) == 1.0
    protocol.on_timer(1.0)
    assert ticket.receipt is not None


def test_a_send_in_a_receipt_callback_waits_for_room_in_a_full_window_and_is_admitted_by_an_ack() -> None:
    protocol = make(capacity=1)
    send(protocol)
    ticket = place(protocol, b"x", 0.0, first=True)
    assert holds(protocol) == [HoldKind.CAPACITY]
    write_and_ack(protocol, 1, 0.0)
    assert ticket.receipt is not None


def test_a_waiting_send_in_a_receipt_callback_ends_if_it_is_withdrawn_times_out_or_the_producer_closes() -> None:
    protocol = make(capacity=1)
    send(protocol)
    ticket = place(protocol, b"x", 0.0, first=True)
    assert protocol.line.give_up(ticket, 0.0)
    assert ticket.decided
    late = place(protocol, b"x", 0.0, timeout=1.0, first=True)
    with pytest.raises(FlowControlTimeout):
        protocol.line.look_at(late, 1.0)
    last = place(protocol, b"x", 2.0, waiter="first", first=True)
    wait(protocol, waiter="line")
    protocol.close("closed by hand", 3.0)
    assert isinstance(last.error, ProducerClosed)
    assert protocol.reports.wake == ["first", "line"]


def test_F4_no_send_overtakes_a_waiting_send_in_a_receipt_callback() -> None:
    protocol = make(rate=10.0)
    send(protocol)
    assert protocol.admission.send(b"callback", "", "q", 0.01) is None
    first = place(protocol, b"callback", 0.01, first=True)
    now = 0.01
    while not first.decided:
        now = protocol.next_timer(now) or now
        assert protocol.admission.send(b"newcomer", "", "q", now) is None
        with pytest.raises(FlowControlTimeout) as caught:
            protocol.line.look_at(place(protocol, b"newcomer", now, timeout=0.0), now)
        assert [hold.kind for hold in caught.value.holds] == ["rate"]
    assert now == pytest.approx(0.1)


def test_a_send_in_a_receipt_callback_that_times_out_raises_an_error_that_names_the_hold() -> None:
    protocol = make(capacity_bytes=100)
    send(protocol, b"x" * 60)
    ticket = place(protocol, b"y" * 50, 0.0, timeout=1.0, first=True)
    assert [hold.kind for hold in protocol.flow_state(0.5).holds] == ["capacity"]
    assert protocol.admission.send(b"z", "", "q", 0.5) is None, "it is not its turn"
    with pytest.raises(FlowControlTimeout) as caught:
        protocol.line.look_at(ticket, 1.0)
    assert [hold.kind for hold in caught.value.holds] == ["capacity"]
    send(protocol, b"z")


def test_a_send_in_a_receipt_callback_needs_a_timer_only_if_it_waits_for_the_rate_limit() -> None:
    protocol = make(rate=10.0)
    protocol.hold("paused", 0.0)
    first = place(protocol, b"a", 0.0, first=True)
    assert [protocol.next_timer(now) for now in (0.0, 1.0, 2.0)] == [None] * 3
    protocol.lift("paused", 3.0)
    assert first.receipt is not None


def test_wait_unflowed_in_a_receipt_callback_ignores_the_hold_for_slow_callbacks() -> None:
    protocol = behind()
    assert [str(hold) for hold in protocol.gate.holds] == ["capacity (on_delivery: callbacks are slower than confirms)"]
    assert not protocol.waiters.when_unflowed("callback", 1.0, in_callback=True)
    assert protocol.waiters.when_unflowed("other", 1.0)
    protocol.hold("paused", 1.0)
    assert protocol.waiters.when_unflowed("callback", 1.0, in_callback=True)
    protocol.lift("paused", 2.0)
    assert protocol.reports.wake == ["callback"]
    protocol.reported(8, 3.0)
    assert protocol.reports.wake == ["callback", "other"]


# Messages that cannot be encoded.


def test_a_send_with_an_exchange_or_key_that_cannot_be_encoded_raises_an_error_and_uses_no_capacity() -> None:
    protocol = make(capacity=1, capacity_bytes=10)
    for payload in (b"x", Message(b"x")):
        with pytest.raises(ValueError, match="routing_key has 256 bytes"):
            protocol.admission.send(payload, "", NO_KEY, 0.0)
    assert protocol.unsettled == protocol.window.used == 0
    assert protocol.unwritten == 0
    receipt = send(protocol)
    assert receipt.message_id == "p-000000000001", "no number is spent"


def test_a_send_of_a_message_that_cannot_be_encoded_raises_an_error_before_it_waits() -> None:
    protocol = make(capacity=1)
    send(protocol)
    with pytest.raises(ValueError, match="exchange has 256 bytes"):
        protocol.line.make_ticket(b"x", NO_KEY, "q", 0.0)
    with pytest.raises(TypeError, match=r"headers\['k'\] is <object"):
        place(protocol, Message(b"x", headers={"k": object()}), 0.0)
    with pytest.raises(TypeError):
        protocol.line.make_ticket(b"x", 3, "q", 0.0)  # type: ignore[arg-type]
    assert protocol.controller.waiting == 0


class Fickle(PublishEncoder):
    """Fails to encode messages while an error is set: they are too large, or Ctrl-C comes."""

    def __init__(self, error: type[BaseException] = ZeroDivisionError) -> None:
        super().__init__(CHANNEL, FRAME_MAX, id_prefix=PREFIX)
        self.error: type[BaseException] | None = error

    def prepare(self, message: Content, *, has_id: bool) -> Prepared:
        assert isinstance(message, Message)
        if self.error is not None and message.headers:
            raise self.error("of the encoder's own")
        return super().prepare(message, has_id=has_id)


MARKED = Message(b"x", headers={"k": "v"})


def test_a_send_whose_encoding_raises_an_error_uses_no_capacity() -> None:
    protocol = make(capacity=1, capacity_bytes=10)
    protocol.admission.encoder = Fickle()
    with pytest.raises(ZeroDivisionError):
        protocol.admission.send(MARKED, "", "q", 0.0)
    assert protocol.window.used == protocol.unsettled == 0
    assert protocol.limits.byte_window is not None
    assert protocol.limits.byte_window.used == 0
    send(protocol)


def test_a_send_in_which_the_telemetry_observer_raises_an_error_uses_no_capacity() -> None:
    class Refusing(dict[int, float]):
        def __setitem__(self, number: int, value: float) -> None:
            raise ZeroDivisionError

    class Watch:
        began = Refusing()

    protocol = make(capacity=2)
    send(protocol, Message(b"x", message_id="own"))
    protocol.admission.observer = Watch()  # type: ignore[assignment]  # it is never told
    with pytest.raises(ZeroDivisionError):
        protocol.admission.send(Message(b"y", message_id="own"), "", "q", 0.0)
    protocol.admission.observer = None
    protocol.on_timer(0.0)
    assert protocol.window.used == protocol.unsettled == 1
    assert list(map(len, protocol.parts.returns.by_id.values())) == [1]
    assert len(wire(drain(protocol)).messages) == 1
    assert protocol.unwritten == 0


def test_a_waiting_send_whose_encoding_raises_an_error_fails_and_the_next_message_is_admitted() -> None:
    protocol = make(capacity=1, capacity_bytes=10)
    send(protocol)
    bad, after = wait(protocol, MARKED, waiter="bad"), wait(protocol, b"y", waiter="after")
    protocol.admission.encoder = Fickle()
    write_and_ack(protocol, 1, 1.0)
    assert isinstance(bad.error, ZeroDivisionError)
    assert after.receipt is not None
    assert protocol.reports.wake == ["bad", "after"]
    assert protocol.limits.byte_window is not None
    assert protocol.window.used == protocol.limits.byte_window.used == 1


def test_after_ctrl_c_during_the_admission_of_a_waiting_message_the_message_still_waits() -> None:
    protocol = make(capacity=1)
    send(protocol)
    protocol.admission.encoder = encoder = Fickle(KeyboardInterrupt)
    other = place(protocol, MARKED, 0.0, waiter="other")
    with pytest.raises(KeyboardInterrupt):
        protocol.set_capacity(2, 1.0)
    encoder.error = None
    assert not other.decided
    assert len(protocol.unsettled_receipts) == 1
    protocol.on_timer(2.0)
    assert other.receipt is not None
    assert protocol.reports.wake == ["other"]


# The rate.


def test_F2_the_rate_limit_of_a_producer_limits_the_number_of_messages() -> None:
    protocol = make(rate=10.0, rate_burst=2)
    send(protocol)
    send(protocol)
    assert protocol.next_timer(0.0) is None
    assert protocol.admission.send(b"x", "", "q", 0.0) is None
    assert holds(protocol) == [HoldKind.RATE]
    ticket = place(protocol, b"x", 0.0, waiter="me")
    at = protocol.next_timer(0.0)
    assert at is not None
    assert at == pytest.approx(0.1)
    protocol.on_timer(at - 0.001)
    assert ticket.receipt is None
    assert protocol.next_timer(at - 0.001) == at
    protocol.on_timer(at)
    assert ticket.receipt is not None
    assert protocol.reports.wake == ["me"]
    assert holds(protocol) == [HoldKind.RATE], "the next would have to wait"
    assert protocol.next_timer(at) == pytest.approx(0.2)
    protocol.on_timer(0.21)
    assert protocol.gate.is_open
    assert protocol.next_timer(0.21) is None


def test_C6_the_hold_for_a_full_window_is_reported_only_once_while_many_senders_wait() -> None:
    protocol = make(capacity=2)
    protocol.reports.events = []
    send(protocol)
    send(protocol)
    for _ in range(10):
        wait(protocol)
    assert protocol.waiters.when_unflowed("me", 0.0)
    for tag in range(1, 12):
        write_and_ack(protocol, tag, 1.0)
        assert ("me" in protocol.reports.wake) == protocol.gate.is_open == (tag == 11)
    assert [event.kind for event in protocol.reports.events] == [FlowEventKind.FLOWED, FlowEventKind.UNFLOWED]
    assert protocol.flow_state(2.0).times_flowed == 1


def test_F2_a_producer_with_a_rate_limit_and_a_full_window_admits_nothing_as_time_passes() -> None:
    protocol = make(rate=1.0, capacity=1)
    send(protocol)
    wait(protocol, now=5.0)
    assert holds(protocol) == [HoldKind.CAPACITY]
    assert protocol.next_timer(5.0) is None


def test_if_a_hold_by_the_rate_limit_follows_a_hold_by_the_full_window_no_unflowed_event_is_reported() -> None:
    protocol = make(rate=1.0, capacity=1)
    protocol.reports.events = []
    send(protocol, now=10.0)
    ticket = wait(protocol, now=10.0)
    write_and_ack(protocol, 1, 10.5)
    assert holds(protocol) == [HoldKind.RATE]
    assert FlowEventKind.UNFLOWED not in {event.kind for event in protocol.reports.events}
    protocol.on_timer(11.0)
    assert ticket.receipt is not None


# The transport.


def test_the_hold_for_unwritten_bytes_begins_above_max_unwritten_bytes_and_ends_at_half_of_it() -> None:
    protocol = make(max_unwritten_bytes=1000)
    while protocol.gate.is_open:
        send(protocol, b"x" * 50)
        assert protocol.gate.is_open == (protocol.unwritten <= 1000)
    assert holds(protocol) == [HoldKind.TRANSPORT]
    ticket = wait(protocol, waiter="me")
    write(protocol, protocol.unwritten - 501)
    assert not protocol.gate.is_open
    write(protocol, 1)
    assert protocol.gate.is_open
    assert ticket.receipt is not None
    assert protocol.reports.wake == ["me"]


def test_the_bytes_of_a_waiting_message_count_as_unwritten_only_from_its_admission() -> None:
    protocol = make(capacity=1, max_unwritten_bytes=100)
    publish(protocol)
    wait(protocol, bytes(200), 1.0)
    protocol.on_ack(1, False, 9.0)
    assert {hold.kind: hold.since for hold in protocol.gate.holds}["transport"] == 9.0


def test_waiting_messages_are_admitted_only_until_the_hold_for_unwritten_bytes_begins() -> None:
    protocol = make(capacity=1, max_unwritten_bytes=100)
    send(protocol)
    tickets = [place(protocol, b"y" * 200, 0.0) for _ in range(2)]
    drain(protocol)
    protocol.set_capacity(10, 1.0)
    assert [ticket.receipt is not None for ticket in tickets] == [True, False]
    drain(protocol, 2.0)
    assert tickets[1].receipt is not None


@pytest.mark.parametrize("limit", [1, 900, 1000, 5000])
@pytest.mark.parametrize("headers", [None, {"k": 1}])
def test_the_data_for_one_write_exceeds_the_requested_size_only_if_a_single_message_is_larger(
    limit: int, headers: dict[str, Any] | None
) -> None:
    protocol = make()
    sizes = [0, 400, 300, 200, 2000, 0, 100, 3 * MAX_BODY, 0, 700, MAX_BODY, 50]
    for size in sizes:
        send(protocol, Message(bytes(size), headers=headers))
    outbound = protocol.parts.unconfirmed.outbound
    while True:
        before = outbound.given
        data = protocol.data_to_write(limit)
        if not data:
            break
        assert len(data) <= limit or outbound.given - before <= 1
        protocol.advance(len(data), 0.0)
    assert outbound.finished == len(sizes)


@pytest.mark.parametrize("body", [MAX_BODY, 3 * MAX_BODY])
def test_a_message_is_added_to_the_data_of_a_write_only_if_all_frames_of_the_message_fit(body: int) -> None:
    for lack in (0, 1, 2, 20):
        protocol = make()
        send(protocol, b"first")
        first = protocol.unwritten
        send(protocol, Message(bytes(body), headers={"k": 1}))
        data = protocol.data_to_write(protocol.unwritten - lack)
        assert len(data) == (first if lack else protocol.unwritten)


# The end of admission.


def test_when_the_producer_closes_waiting_senders_get_an_error_and_admitted_messages_are_still_sent() -> None:
    protocol = make(capacity=1)
    admitted = send(protocol, b"admitted")
    ticket = wait(protocol, b"waits", waiter="me")
    cancelled = place(protocol, b"cancelled", 0.0, waiter="cancelled")
    protocol.line.give_up(cancelled, 0.0)
    assert protocol.waiters.when_unflowed("unflow", 0.0)
    protocol.close("closed by hand", 1.0)
    assert isinstance(ticket.error, ProducerClosed)
    assert ticket.error.message == b"waits"
    assert str(ticket.error) == "closed by hand"
    assert sorted(protocol.reports.wake) == ["me", "unflow"]
    assert protocol.line.look_at(ticket, 1.0) is None
    assert wire(drain(protocol)).short == [b"admitted"]
    protocol.on_ack(1, False, 2.0)
    assert admitted.delivered
    assert not protocol.gate.is_open


def test_a_closed_producer_admits_no_message() -> None:
    protocol = make()
    protocol.close("closed by hand", 1.0)
    protocol.close("a second time", 2.0)
    for payload in (b"x", Message(b"x")):
        with pytest.raises(ProducerClosed, match="closed by hand") as caught:
            protocol.admission.send(payload, "", "q", 3.0)
        assert caught.value.message is payload
        with pytest.raises(ProducerClosed, match="closed by hand"):
            place(protocol, payload, 3.0)
    assert not protocol.gate.is_open
    assert not protocol.gate.holds, "to be closed by hand is no flow control"
    protocol.connection_lost("the producer is closed", 4.0)
    assert not protocol.gate.holds


def test_wait_unflowed_on_a_closed_producer_does_not_wait() -> None:
    protocol = make()
    protocol.close("closed by hand", 1.0)
    assert not protocol.waiters.when_unflowed("me", 2.0)


# Waiting for an open gate, and for settled messages.


def test_wait_unflowed_ends_when_the_last_hold_of_the_producer_ends() -> None:
    protocol = make(capacity=1)
    assert not protocol.waiters.when_unflowed("at once", 0.0)
    send(protocol)
    assert protocol.waiters.when_unflowed("me", 0.0), "a full window is a hold to one who asks"
    protocol.hold(HoldKind.PAUSED, 1.0)
    write_and_ack(protocol, 1, 2.0)
    assert protocol.reports.wake == []
    protocol.lift(HoldKind.PAUSED, 3.0)
    assert protocol.reports.wake == ["me"]
    protocol.hold(HoldKind.PAUSED, 4.0)
    protocol.lift(HoldKind.PAUSED, 5.0)
    assert protocol.reports.wake == ["me"], "once"


def test_a_caller_that_has_stopped_waiting_is_not_woken() -> None:
    protocol = make(capacity=1)
    send(protocol)
    assert protocol.waiters.when_unflowed("unflow", 0.0)
    assert protocol.waiters.when_flushed("flush")
    assert protocol.waiters.forget("unflow")
    assert protocol.waiters.forget("flush")
    assert not protocol.waiters.forget("never there")
    write_and_ack(protocol, 1, 1.0)
    assert protocol.reports.wake == []


def test_a_flush_waits_only_for_messages_admitted_before_it() -> None:
    protocol = make()
    assert not protocol.waiters.when_flushed("nothing to wait for")
    for _ in range(3):
        send(protocol)
    assert protocol.waiters.when_flushed("three")
    send(protocol)
    assert protocol.waiters.when_flushed("four")
    write_and_ack(protocol, 3, 1.0)
    protocol.on_ack(1, False, 1.0)
    assert protocol.reports.wake == []
    protocol.on_nack(2, False, 1.0)
    assert protocol.reports.wake == ["three"]
    protocol.on_ack(4, False, 1.0)
    assert protocol.reports.wake == ["three", "four"]


def test_F4_a_closed_producer_takes_no_message_from_its_former_line_which_another_producer_uses() -> None:
    line = WeightedLine()
    old = make(capacity=1, line=line)
    send(old)
    drain(old)
    refused = wait(old)
    old.close("it is closed", 1.0)
    assert isinstance(refused.error, ProducerClosed)
    new = make(opened=False, line=line)
    ticket = wait(new)
    old.on_ack(1, False, 2.0)
    old.connection_lost("the end", 3.0)
    assert not ticket.decided
    new.channel_opened(1, FRAME_MAX, 4.0)
    assert ticket.receipt is not None
    assert old.unsettled == 0
