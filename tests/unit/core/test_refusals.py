"""A message for which the broker has no room is sent again, for a while."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qflow_client import Message, Outcome, Receipt
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.refusals import means_no_room
from qflow_client.core.resending import Resending
from qflow_client.message import REPUBLISHED
from qflow_client.recovery import Backoff

from .support import (
    CHANNEL,
    FRAME_MAX,
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

PUBLISH = (60, 40)


def patient(**settings: Any) -> ProducerProtocol:
    """Return a producer that waits 1, 2, 4, 8, 8, … s."""
    return make(retries=Backoff(1.0, 8.0, 0.0), **settings)


def lines(call: Callable[[], object]) -> int:
    """Return how many lines of Python a call executes."""
    taken = 0

    def trace(*_: Any) -> Any:
        nonlocal taken
        taken += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return taken


def left(protocol: ProducerProtocol, now: float = 0.0) -> list[bytes]:
    return [message.body for message in wire(drain(protocol, now)).messages]


def three(protocol: ProducerProtocol) -> list[Receipt]:
    receipts = [send(protocol, b"%d" % number) for number in range(1, 4)]
    assert left(protocol) == [b"1", b"2", b"3"]
    return receipts


def test_a_nacked_message_holds_the_producer_and_is_retried_alone_before_all_other_messages() -> None:
    protocol = patient(capacity=4)
    receipts = three(protocol)
    protocol.on_nack(3, True, 10.0)
    assert holds(protocol) == ["refused"]
    assert (protocol.unsettled, protocol.window.used) == (3, 3)
    assert protocol.admission.send(b"new", "", "q", 10.0) is None
    assert left(protocol) == []
    assert protocol.next_timer(10.0) == 11.0
    protocol.on_timer(10.9)
    assert left(protocol) == []
    protocol.on_timer(11.0)
    (probe,) = wire(drain(protocol)).messages
    assert (probe.body, probe.properties.headers) == (b"1", {REPUBLISHED: True})
    assert probe.properties.message_id == receipts[0].message_id
    # The other messages settle in time, whatever happens to the retried message.
    assert protocol.next_timer(11.0) == 10.0 + protocol.settings.retry_for
    protocol.on_ack(4, False, 11.1)
    assert left(protocol) == [b"2", b"3"]
    assert holds(protocol) == []
    protocol.on_ack(6, True, 11.2)
    assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}
    assert (protocol.unsettled, protocol.window.used) == (0, 0)
    assert "WARNING producer: blocked (flowed): refused (Basic.Nack)" in logged(protocol)


def test_a_retried_message_that_is_nacked_again_stays_first_and_the_retry_delays_grow() -> None:
    protocol = patient()
    three(protocol)
    protocol.on_nack(3, True, 0.0)
    now, tag = 1.0, 4
    for pause in (2.0, 4.0, 8.0, 8.0):
        protocol.on_timer(now)
        assert left(protocol) == [b"1"]
        protocol.on_nack(tag, False, now)
        assert protocol.next_timer(now) == now + pause
        now, tag = now + pause, tag + 1
    protocol.on_timer(now)
    assert left(protocol) == [b"1"]
    protocol.on_ack(tag, False, now)
    assert left(protocol) == [b"2", b"3"]


def test_messages_sent_after_a_nacked_message_can_be_confirmed_and_nacked_messages_are_retried_in_order() -> None:
    protocol = patient(capacity=10)
    receipts = three(protocol)
    protocol.on_nack(3, False, 0.0)
    protocol.on_nack(1, False, 0.0)
    protocol.on_ack(2, False, 0.1)
    assert [receipt.outcome for receipt in receipts] == [None, Outcome.CONFIRMED, None]
    protocol.on_timer(1.0)
    assert left(protocol) == [b"1"]
    protocol.on_ack(4, False, 1.1)
    assert left(protocol) == [b"3"]


def test_a_nacked_message_is_settled_when_retry_for_is_over_even_if_it_waits_or_is_nacked_again() -> None:
    protocol = patient(retry_for=2.5)
    receipts = three(protocol)
    assert protocol.waiters.when_flushed("me")
    protocol.on_nack(3, True, 0.0)
    protocol.on_timer(1.0)
    assert left(protocol) == [b"1"]
    protocol.on_nack(4, False, 1.5)
    # Not 3.5, because no message is tried after its time limit.
    assert protocol.next_timer(1.5) == 2.5
    protocol.on_timer(2.5)
    assert [receipt.outcome for receipt in receipts] == [Outcome.NACKED] * 3
    assert protocol.reports.wake == ["me"]
    assert holds(protocol) == []
    again = send(protocol, b"4", 3.0)
    assert left(protocol) == [b"4"]
    protocol.on_nack(5, False, 3.0)
    protocol.on_timer(4.0)
    assert left(protocol) == [b"4"]
    protocol.on_nack(6, False, 5.6)
    assert again.outcome is Outcome.NACKED
    assert holds(protocol) == []


def test_waiting_senders_are_admitted_after_all_nacked_messages_were_retried() -> None:
    protocol = patient(capacity=3)
    three(protocol)
    waiting = wait(protocol, b"4")
    protocol.on_nack(3, True, 0.0)
    protocol.on_timer(1.0)
    write_and_ack(protocol, 4, 1.0)
    assert waiting.receipt is not None
    assert left(protocol) == [b"2", b"3", b"4"]


def test_a_message_that_is_returned_and_then_nacked_is_not_retried() -> None:
    protocol = patient()
    receipts = three(protocol)
    returned(protocol, receipts[0].message_id)
    protocol.on_nack(1, False, 0.0)
    assert receipts[0].outcome is Outcome.NACKED
    assert holds(protocol) == []


def test_a_nacked_message_that_is_returned_before_its_retry_settles_as_returned_and_is_not_retried() -> None:
    protocol = patient()
    receipts = three(protocol)
    protocol.on_nack(3, True, 0.0)
    returned(protocol, receipts[0].message_id)
    protocol.on_timer(1.0)
    assert receipts[0].outcome is Outcome.RETURNED
    assert left(protocol) == [b"2"]
    protocol.on_ack(4, False, 1.0)
    assert left(protocol) == [b"3"]


def test_a_retried_message_that_is_returned_and_acked_ends_the_hold_for_nacked_messages() -> None:
    protocol = patient()
    receipts = three(protocol)
    protocol.on_nack(3, True, 0.0)
    protocol.on_timer(1.0)
    drain(protocol)
    returned(protocol, receipts[0].message_id)
    protocol.on_ack(4, False, 1.0)
    assert receipts[0].outcome is Outcome.RETURNED
    assert holds(protocol) == []


def test_a_channel_close_for_lack_of_room_has_the_effect_of_a_nack_and_rejects_no_message() -> None:
    protocol = patient(retry_for=20)
    receipts = three(protocol)
    late = send(protocol, b"4")
    text = "PRECONDITION_FAILED - Server low on disk space"
    protocol.channel_closed(406, text, PUBLISH, 0.0)
    assert holds(protocol) == ["disconnected", "refused"]
    assert protocol.next_timer(0.0) is None
    protocol.channel_opened(CHANNEL, FRAME_MAX, 0.5)
    assert holds(protocol) == ["refused"]
    assert left(protocol) == []
    assert protocol.next_timer(0.5) == 1.0
    protocol.on_timer(1.0)
    assert left(protocol) == [b"1"]
    protocol.channel_closed(406, text, PUBLISH, 1.5)
    assert not receipts[0].done
    protocol.channel_opened(CHANNEL, FRAME_MAX, 1.6)
    protocol.on_timer(3.5)
    assert left(protocol) == [b"1"]
    protocol.on_ack(1, False, 4.0)
    assert left(protocol) == [b"2", b"3", b"4"]
    assert holds(protocol) == []
    protocol.channel_closed(406, text, PUBLISH, 21.0)
    # They were refused long ago. The close does not say which message caused it.
    assert [receipt.outcome for receipt in receipts] == [Outcome.CONFIRMED, Outcome.UNKNOWN, Outcome.UNKNOWN]
    assert not late.done


def test_a_channel_close_for_lack_of_room_after_retry_for_is_over_leaves_no_hold() -> None:
    protocol = patient(retry_for=0)
    receipt = publish(protocol)
    protocol.channel_closed(506, "RESOURCE_ERROR", PUBLISH, 0.0)
    assert receipt.outcome is Outcome.REJECTED
    assert "506" in str(receipt.error())
    protocol.channel_opened(CHANNEL, FRAME_MAX, 0.5)
    assert holds(protocol) == []


def test_without_retries_messages_in_flight_that_did_not_cause_a_channel_close_for_lack_of_room_are_resent() -> None:
    protocol = patient(retry_for=0)
    refused = publish(protocol, b"1")
    late = [send(protocol, b"2"), send(protocol, b"3")]
    protocol.channel_closed(506, "RESOURCE_ERROR", PUBLISH, 0.0)
    assert refused.outcome is Outcome.REJECTED
    protocol.channel_opened(CHANNEL, FRAME_MAX, 0.5)
    assert left(protocol) == [b"2"]
    protocol.on_ack(1, False, 1.0)
    assert left(protocol) == [b"3"]
    protocol.on_ack(2, False, 1.0)
    assert [receipt.outcome for receipt in late] == [Outcome.CONFIRMED] * 2
    assert holds(protocol) == []


def test_a_connection_lost_during_the_retry_delay_of_a_nacked_message_does_not_end_the_delay() -> None:
    protocol = patient()
    three(protocol)
    protocol.on_nack(1, False, 0.0)
    reconnect(protocol, 0.5, 0.6)
    assert left(protocol) == []
    protocol.on_timer(1.0)
    assert left(protocol) == [b"1"]
    protocol.on_ack(1, False, 1.0)
    assert left(protocol) == [b"2", b"3"]


def test_E1_nacked_messages_are_resent_before_younger_messages_that_were_lost_with_the_connection() -> None:
    protocol = patient(capacity=20)
    bodies = [b"%d" % number for number in range(10)]
    for body in bodies:
        send(protocol, body)
    drain(protocol)
    assert protocol.waiters.when_flushed("me")
    protocol.on_nack(5, True, 0.0)
    reconnect(protocol, 0.5, 0.6)
    protocol.on_timer(1.0)
    assert left(protocol) == bodies[:1]
    protocol.on_ack(1, False, 1.0)
    assert left(protocol) == bodies[1:]
    # The flush waits for all messages that were admitted before it, also in the new order.
    protocol.on_ack(9, True, 1.0)
    assert protocol.reports.wake == []
    protocol.on_ack(10, False, 1.0)
    assert protocol.reports.wake == ["me"]


def test_a_message_that_is_resent_counts_only_once_as_admitted() -> None:
    protocol = patient()
    protocol.reports.events = []
    three(protocol)
    protocol.on_nack(3, True, 0.0)
    protocol.on_timer(1.0)
    drain(protocol)
    protocol.on_nack(4, False, 1.0)
    assert (protocol.admission.admitted, protocol.settled_so_far) == (3, 0)
    protocol.on_timer(3.0)
    write_and_ack(protocol, 5, 3.0)
    assert (protocol.admission.admitted, protocol.settled_so_far) == (3, 1)
    assert {event.admitted for event in protocol.reports.events} == {3}


def test_messages_that_wait_for_a_retry_settle_as_nacked_when_the_producer_ends() -> None:
    protocol = patient()
    receipts = three(protocol)
    protocol.on_nack(1, False, 0.0)
    protocol.connection_lost("the producer is closed", 0.5)
    assert [receipt.outcome for receipt in receipts] == [Outcome.NACKED, Outcome.UNKNOWN, Outcome.UNKNOWN]
    assert "refused" not in holds(protocol)


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        (311, "Channel flow control was requested, but not enforced by sender", True),
        (506, "RESOURCE_ERROR", True),
        (406, "PRECONDITION_FAILED - Server low on disk space, can not accept new message", True),
        (406, "PRECONDITION_FAILED - message size 9 is larger than configured max size 8", False),
        (404, "NOT_FOUND - no exchange 'disk'", False),
    ],
)
def test_the_reply_code_and_text_of_a_channel_close_show_whether_the_broker_lacked_room(
    code: int, text: str, expected: bool
) -> None:
    assert means_no_room(code, text) is expected


@given(st.lists(st.sampled_from(["send", "write", "ack", "nack", "nacks", "lose", "room", "time"]), max_size=80))
@example(["send", "send", "nack", "lose"])
def test_with_retries_any_sequence_of_events_settles_every_message_once_and_keeps_the_window_correct(
    steps: list[str],
) -> None:
    protocol = patient(capacity=6, retry_for=1000)
    receipts: list[Receipt] = []
    seen = [Wire()]
    answered: set[int] = set()
    now = 0.0

    def write() -> list[int]:
        seen[0].read(drain(protocol, now))
        # Only a message that was refused on a channel is sent again on it after younger messages that were in flight
        # (E1).
        first_copies = list(dict.fromkeys(str(message.properties.message_id) for message in seen[0].messages))
        assert first_copies == sorted(first_copies)
        return [tag for tag in range(1, len(seen[0].messages) + 1) if tag not in answered]

    def anew() -> None:
        seen[0] = Wire()
        answered.clear()
        protocol.channel_opened(CHANNEL, FRAME_MAX, now)

    def answer(tags: list[int], good: bool, multiple: bool) -> None:
        answered.update(tags)
        (protocol.on_ack if good else protocol.on_nack)(tags[-1], multiple, now)

    for step in steps:
        now += 0.1
        if step == "send":
            receipt = protocol.admission.send(b"x", "", "q", now)
            if receipt is not None:
                receipts.append(receipt)
        elif step == "time":
            now += 3.0
            protocol.on_timer(now)
        elif step == "lose":
            protocol.connection_lost("cut", now, reconnects=True)
            anew()
        elif step == "room":
            protocol.channel_closed(506, "RESOURCE_ERROR", PUBLISH, now)
            anew()
        else:
            tags = write()
            if tags and step != "write":
                answer(tags if step == "nacks" else tags[:1], step == "ack", step == "nacks")
        assert protocol.window.used == protocol.unsettled == sum(not receipt.done for receipt in receipts)
        check_order(protocol)
    for _ in range(30):
        now += 10.0
        protocol.on_timer(now)
        tags = write()
        if tags:
            answer(tags, True, True)
    assert {receipt.outcome for receipt in receipts} <= {Outcome.CONFIRMED}
    assert holds(protocol) == []


def test_a_multiple_nack_does_not_affect_messages_that_are_already_settled() -> None:
    protocol = patient()
    receipts = three(protocol)
    protocol.on_ack(2, False, 0.0)
    protocol.on_nack(3, True, 0.0)
    protocol.on_timer(1.0)
    write_and_ack(protocol, 4, 1.0)
    write_and_ack(protocol, 5, 1.0)
    assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}


def test_new_messages_do_not_overtake_messages_that_are_resent_one_at_a_time() -> None:
    """A new message would get the delivery tag of a waiting message, and an answer to that would confirm it."""
    protocol = patient(capacity=10)
    receipts = three(protocol)
    protocol.channel_closed(404, "NOT_FOUND", PUBLISH, 1.0)
    protocol.channel_opened(CHANNEL, FRAME_MAX, 1.0)
    assert left(protocol) == [b"1"]
    protocol.on_nack(1, False, 2.0)
    assert holds(protocol) == ["disconnected", "refused"]
    protocol.on_timer(3.0)
    assert left(protocol) == [b"1"]
    assert holds(protocol) == ["disconnected", "refused"]
    protocol.on_ack(2, False, 4.0)
    assert left(protocol) == [b"2"]
    assert holds(protocol) == ["disconnected"]
    assert protocol.admission.send(b"new", "", "q", 4.0) is None
    protocol.on_ack(3, False, 5.0)
    assert left(protocol) == [b"3"]
    assert holds(protocol) == []
    new = send(protocol, b"new", 5.0)
    protocol.on_ack(4, False, 6.0)
    assert [receipt.outcome for receipt in (*receipts, new)] == [Outcome.CONFIRMED] * 3 + [None]
    assert left(protocol) == [b"new"]
    protocol.on_ack(5, False, 7.0)
    assert new.outcome is Outcome.CONFIRMED


def test_a_flush_waits_for_retried_messages_even_if_younger_messages_were_sent_before_them() -> None:
    protocol = patient(capacity=10)
    first = three(protocol)[0]
    protocol.on_nack(1, False, 0.0)
    protocol.on_timer(1.0)
    assert left(protocol) == [b"1"]
    new = send(protocol, b"new", 1.0) if protocol.gate.is_open else None
    assert new is None
    assert protocol.waiters.when_flushed("flush")
    protocol.on_ack(3, True, 2.0)
    assert protocol.reports.wake == []
    check_order(protocol)
    protocol.on_ack(4, False, 3.0)
    assert first.outcome is Outcome.CONFIRMED
    assert protocol.reports.wake == ["flush"]


def test_a_nacked_message_that_becomes_too_large_by_the_second_copy_header_settles_as_nacked() -> None:
    protocol = patient()
    room = FRAME_MAX - 8
    # Class, weight and body size; flags; delivery mode; message id; the table's head; a key and its value's head.
    message = Message(b"x", headers={"k": "x" * (room - 12 - 2 - 1 - 15 - 4 - 2 - 5)})
    large, other = send(protocol, message), send(protocol, b"other")
    drain(protocol)
    protocol.on_nack(2, True, 0.0)
    assert large.outcome is Outcome.NACKED
    assert "it cannot be sent again: the message's properties need a frame of" in str(large.error())
    assert other.outcome is None
    assert (protocol.unsettled, protocol.window.used) == (1, 1)
    protocol.on_timer(1.0)
    assert left(protocol, 1.0) == [b"other"]
    check_order(protocol)


@pytest.mark.parametrize("how", ["nacked", "closed channel", "lost"])
def test_E7_the_cost_to_withdraw_a_nacked_message_does_not_depend_on_the_number_of_nacked_messages(how: str) -> None:
    def cost(count: int) -> int:
        protocol = patient(capacity=count, retry_for=5.0)
        receipts = [send(protocol, b"x") for _ in range(count)]
        drain(protocol)
        for tag in range(1, count + 1):
            protocol.on_nack(tag, False, 0.0)
        if how != "nacked":
            if how == "lost":
                protocol.connection_lost("lost", 0.0, reconnects=True)
            else:
                protocol.channel_closed(506, "RESOURCE_ERROR", (0, 0), 0.0)
            protocol.channel_opened(CHANNEL, FRAME_MAX, 0.0)
        taken = lines(partial(protocol.on_timer, 6.0))
        assert {receipt.outcome for receipt in receipts} == {Outcome.NACKED}
        return taken

    assert cost(400) < 4.4 * cost(100)


def test_E7_the_cost_of_a_flush_does_not_grow_with_the_number_of_messages_resent_out_of_order() -> None:
    def cost(count: int) -> int:
        protocol = patient(capacity=2 * count)
        for _ in range(2 * count):
            send(protocol, b"x")
        drain(protocol)
        # The older half is sent again: first one message as a probe, then the others.
        protocol.on_nack(count, True, 0.0)
        protocol.on_timer(1.0)
        drain(protocol, 1.0)
        protocol.on_ack(2 * count + 1, False, 1.0)
        drain(protocol, 1.0)
        assert protocol.waiters.when_flushed("flush")

        def answer() -> None:
            for tag in range(count + 1, 3 * count + 1):
                assert protocol.reports.wake == []
                protocol.on_ack(tag, False, 1.0)

        taken = lines(answer)
        assert (protocol.reports.wake, protocol.unsettled) == (["flush"], 0)
        return taken

    assert cost(400) < 4.4 * cost(100)


def test_E6_messages_that_are_settled_during_a_flush_are_freed_even_if_an_older_message_is_unsettled() -> None:
    protocol = patient(capacity=10)
    one, two, three = (send(protocol, b"%d" % number) for number in range(1, 4))
    drain(protocol)
    protocol.on_nack(2, True, 0.0)
    protocol.on_timer(1.0)
    write_and_ack(protocol, 4, 1.0)
    # This copy is written after the younger message, and is not answered yet.
    assert left(protocol, 1.0) == [b"2"]
    assert protocol.waiters.when_flushed("flush")
    for tag in range(6, 1000):
        publish(protocol, b"x", now=1.0)
        protocol.on_ack(tag, False, 1.0)
    assert [one.outcome, two.outcome, three.outcome] == ["confirmed", None, None]
    assert len(protocol.parts.unconfirmed._by_number) < 100
    protocol.on_ack(5, False, 1.0)
    assert protocol.reports.wake == []
    check_order(protocol)
    protocol.on_ack(3, False, 1.0)
    assert protocol.reports.wake == ["flush"]


def test_a_nack_of_a_retried_message_after_retry_for_does_not_end_the_hold_for_the_other_nacked_messages() -> None:
    protocol = make(retries=Backoff(1.0, 8.0, 0.0), retry_for=1.5)
    probe, other = send(protocol, b"probe"), send(protocol, b"other")
    drain(protocol)
    protocol.on_nack(1, False, 0.0)
    protocol.on_nack(2, False, 1.0)
    protocol.on_timer(1.0)
    assert wire(drain(protocol, 1.0)).messages[0].body == b"probe"
    protocol.on_nack(3, False, 1.6)
    assert (probe.outcome, other.outcome) == (Outcome.NACKED, None)
    assert holds(protocol) == ["refused"]
    assert drain(protocol, 1.6) == b""


@pytest.mark.parametrize("retry_for", [0.0, 5.0])
def test_E6_nothing_is_stored_about_nacked_messages_after_they_are_settled(retry_for: float) -> None:
    protocol = make(retries=Backoff(1.0, 8.0, 0.0), retry_for=retry_for, mandatory=True)
    for tag in range(1, 101):
        publish(protocol, Message(b"x", message_id=str(tag)))
        # Broker-J nacks messages that it has returned.
        returned(protocol, str(tag))
        protocol.on_nack(tag, False, 0.0)
    assert not protocol.parts.resending.refusals._first_refused
    assert protocol.unsettled == 0


def test_E7_no_retry_timer_runs_while_channel_flow_stops_the_channel() -> None:
    protocol = make(retries=Backoff(1.0, 8.0, 0.0), retry_for=60.0)
    publish(protocol, b"refused")
    protocol.on_nack(1, False, 0.0)
    assert protocol.next_timer(0.0) == 1.0
    protocol.on_flow(False, 0.5)
    drain(protocol, 0.5)
    assert protocol.next_timer(2.0) is None
    protocol.on_flow(True, 3.0)
    protocol.data_to_write(1)
    # The answer is not written yet, so the probe waits for the socket.
    assert protocol.next_timer(3.0) == 3.05


def test_a_nacked_message_that_is_also_resent_alone_waits_for_the_longer_of_its_two_delays() -> None:
    resending = Resending(5.0, Backoff(1.0, 8.0, 0.0), 15.0)
    resending.again.append(send(make()))
    resending.poison.candidate = 1
    resending.poison.note_open(0.0)
    resending.refusals.probe_at = 1.0
    assert [min(resending.next_times(True, now)) for now in (0.5, 1.0, 4.0)] == [1.0, 5.0, 5.0]


def test_the_hold_for_unwritten_bytes_ends_when_the_unwritten_messages_are_settled_as_nacked() -> None:
    protocol = patient(max_unwritten_bytes=1000, retry_for=0.5)
    receipts = []
    for _ in range(20):
        receipts.append(send(protocol, bytes(100)))
        drain(protocol)
    protocol.on_nack(20, True, 0.0)
    reconnect(protocol, 0.1, 0.1)
    assert "transport" in holds(protocol)
    protocol.on_timer(1.0)
    assert {receipt.outcome for receipt in receipts} == {Outcome.NACKED}
    assert (protocol.unwritten, holds(protocol)) == (0, [])


@pytest.mark.parametrize(("is_written", "outcome"), [(True, Outcome.UNKNOWN), (False, Outcome.NACKED)])
@pytest.mark.parametrize("end", ["closed", "too late"])
def test_a_nacked_message_settles_as_unknown_if_its_second_copy_may_have_arrived_and_else_as_nacked(
    end: str, is_written: bool, outcome: Outcome
) -> None:
    protocol = patient(retry_for=5.0)
    receipt = publish(protocol)
    protocol.on_nack(1, False, 0.0)
    protocol.on_timer(1.0)
    # Without the write, the frames of the retry are made, but the socket accepts none of their bytes.
    assert left(protocol, 1.0) if is_written else protocol.data_to_write(1 << 20)
    protocol.connection_lost("gone", 1.1, reconnects=True)
    if end == "closed":
        protocol.connection_lost("gone", 1.2)
    else:
        protocol.channel_opened(CHANNEL, FRAME_MAX, 1.2)
        protocol.on_timer(60.0)
    assert receipt.outcome is outcome


def test_a_nacked_message_whose_second_copy_is_also_nacked_settles_as_nacked() -> None:
    protocol = patient(retry_for=5.0)
    receipt = publish(protocol)
    protocol.on_nack(1, False, 0.0)
    protocol.on_timer(1.0)
    assert left(protocol, 1.0)
    reconnect(protocol, 1.1, 1.2)
    assert left(protocol, 1.2)
    protocol.on_nack(1, False, 1.3)
    protocol.connection_lost("gone", 1.4)
    assert receipt.outcome is Outcome.NACKED


@pytest.mark.parametrize(("count", "outcome"), [(1, Outcome.NACKED), (2, Outcome.UNKNOWN)])
def test_a_channel_close_for_lack_of_room_means_a_nack_only_for_a_message_alone_in_flight(
    count: int, outcome: Outcome
) -> None:
    protocol = patient(retry_for=5.0)
    receipts = publish_many(protocol, count)
    protocol.channel_closed(506, "no room", PUBLISH, 0.0)
    protocol.connection_lost("gone", 0.1)
    assert {receipt.outcome for receipt in receipts} == {outcome}


def test_several_messages_whose_retry_for_is_over_at_a_channel_close_for_lack_of_room_settle_as_unknown() -> None:
    protocol = patient(retry_for=10.0)
    one, two, three = (send(protocol) for _ in range(3))
    drain(protocol)
    protocol.on_nack(3, True, 0.0)
    protocol.on_timer(9.0)
    write_and_ack(protocol, 4, 9.0)
    drain(protocol, 9.0)
    protocol.channel_closed(506, "no room", PUBLISH, 11.0)
    assert [each.outcome for each in (one, two, three)] == [Outcome.CONFIRMED, Outcome.UNKNOWN, Outcome.UNKNOWN]


def test_a_nacked_message_that_is_too_large_for_the_next_channel_settles_as_nacked() -> None:
    protocol = patient()
    receipt = publish(protocol, Message(b"x", headers={"k": "x" * 3000}))
    protocol.on_nack(1, False, 0.0)
    protocol.connection_lost("gone", 0.1, reconnects=True)
    protocol.channel_opened(CHANNEL, 2048, 0.2)
    assert receipt.outcome is Outcome.NACKED
    assert "it cannot be encoded again" in str(receipt.error())


def test_a_retry_that_fails_because_of_its_size_does_not_end_the_hold_for_the_other_nacked_messages() -> None:
    protocol = patient(retry_for=0.5)
    send(protocol, b"refused")
    # As in the test of a message that is nacked alone.
    large = send(protocol, Message(b"x", headers={"k": "x" * (FRAME_MAX - 8 - 12 - 2 - 1 - 15 - 4 - 2 - 5)}))
    send(protocol, b"other")
    write(protocol, 1)
    protocol.on_flow(False, 0.0)
    drain(protocol)
    protocol.on_nack(1, False, 0.0)
    protocol.on_flow(True, 0.0)
    protocol.on_timer(0.5)
    assert left(protocol, 0.5) == [b"x"]
    protocol.on_nack(2, False, 0.5)
    assert large.outcome is Outcome.NACKED
    assert holds(protocol) == ["refused"]
    assert left(protocol, 0.5) == []
    protocol.on_timer(2.5)
    assert left(protocol, 2.5) == [b"other"]


def test_nacked_messages_settle_when_retry_for_is_over_even_if_the_retried_message_gets_no_answer() -> None:
    protocol = patient(retry_for=10.0)
    receipts = publish_many(protocol, 3)
    for tag, now in ((1, 0.0), (2, 2.0), (3, 4.0)):
        protocol.on_nack(tag, False, now)
    protocol.on_timer(5.0)
    drain(protocol, 5.0)
    assert protocol.next_timer(5.0) == 12.0
    protocol.on_timer(12.0)
    assert protocol.next_timer(12.0) == 14.0
    protocol.on_timer(14.0)
    assert protocol.next_timer(14.0) is None
    assert [each.outcome for each in receipts] == [None, Outcome.NACKED, Outcome.NACKED]


def test_no_timer_is_set_while_a_message_to_resend_alone_waits_for_answers_to_other_messages() -> None:
    protocol = patient(retry_for=0.5)
    others = [send(protocol) for _ in range(2)]
    suspect = protocol.admission.send(b"x", "b", "q", 0.0)
    assert suspect is not None
    drain(protocol)
    protocol.channel_closed(404, "no exchange 'b' in vhost '/'", PUBLISH, 0.0)
    protocol.channel_opened(CHANNEL, FRAME_MAX, 0.0)
    assert len(left(protocol)) == 2
    protocol.on_nack(1, False, 0.0)
    for _ in range(100):
        at = protocol.next_timer(1.0)
        if at is None or at > 1.0:
            break
        protocol.on_timer(1.0)
    else:
        pytest.fail("the timer is always due")
    protocol.on_ack(2, False, 1.1)
    assert left(protocol, 5.0)
    assert others[0].outcome is Outcome.NACKED
    assert suspect.outcome is None


def test_a_message_that_is_withdrawn_while_there_is_no_channel_no_longer_counts_as_unwritten() -> None:
    protocol = make()
    receipt = send(protocol)
    protocol.connection_lost("gone", 0.0, reconnects=True)
    assert protocol.withdraw(receipt, 0.0)
    assert protocol.unwritten == 0
