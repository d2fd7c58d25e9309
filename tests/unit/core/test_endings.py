"""The end of a channel or a connection: every receipt is settled once, with the outcome that is known and no other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qflow_client import (
    HoldKind,
    Message,
    MessageFailed,
    MessageRejected,
    MessageReturned,
    Outcome,
    OutcomeUnknown,
    ProducerClosed,
)

from .support import FRAME_MAX, drain, holds, logged, make, publish, publish_many, returned, send, wait, write

PUBLISH = (60, 40)


def test_a_lost_connection_settles_written_messages_as_unknown_and_unwritten_messages_as_failed() -> None:
    protocol = make(capacity_bytes=1000)
    protocol.reports.settled = []
    receipts = [send(protocol, b"1")]
    size = protocol.unwritten
    receipts += [send(protocol, b"2"), send(protocol, b"3")]
    write(protocol, size + 1)
    protocol.connection_lost("reset by peer", 1.0)
    assert [receipt.outcome for receipt in receipts] == [Outcome.UNKNOWN, Outcome.UNKNOWN, Outcome.FAILED]
    assert [receipt.may_have_arrived for receipt in receipts] == [True, True, False]
    assert isinstance(receipts[1].error(), OutcomeUnknown)
    assert isinstance(receipts[2].error(), MessageFailed)
    assert protocol.reports.settled == receipts
    assert protocol.unsettled == protocol.in_flight == protocol.window.used == 0
    assert protocol.limits.byte_window is not None
    assert protocol.limits.byte_window.used == 0
    assert protocol.unwritten == 0


def test_messages_that_were_acked_or_nacked_before_the_end_of_the_connection_keep_their_outcome() -> None:
    protocol = make()
    receipts = publish_many(protocol, 3)
    protocol.on_ack(1, False, 0.0)
    protocol.on_nack(2, False, 0.0)
    protocol.connection_lost("reset by peer", 1.0)
    assert protocol.reports.take_failures() == receipts[1:]
    assert [receipt.outcome for receipt in receipts] == [Outcome.CONFIRMED, Outcome.NACKED, Outcome.UNKNOWN]


@pytest.mark.parametrize("code", [312, 313, 404])
def test_a_lost_connection_settles_a_returned_message_without_ack_as_returned(code: int) -> None:
    protocol = make()
    receipt = publish(protocol, Message(b"x", message_id="own"))
    returned(protocol, "own", code=code)
    protocol.connection_lost("reset by peer", 1.0)
    assert receipt.outcome is Outcome.RETURNED
    assert not protocol.parts.returns.by_id


def test_a_lost_connection_is_raised_as_an_error_from_waiting_and_later_sends() -> None:
    protocol = make(capacity=1)
    receipt = send(protocol)
    receipt._waiter = "receipt"
    ticket = wait(protocol, b"waits", waiter="ticket")
    assert protocol.waiters.when_unflowed("unflow", 0.0)
    assert protocol.waiters.when_flushed("flush")
    protocol.connection_lost("reset by peer", 1.0)
    assert isinstance(ticket.error, ProducerClosed)
    assert ticket.error.message == b"waits"
    assert sorted(protocol.reports.wake) == ["flush", "receipt", "ticket", "unflow"]
    with pytest.raises(ProducerClosed, match="reset by peer"):
        protocol.admission.send(b"x", "", "q", 2.0)


def test_holds_raised_for_the_broker_or_the_socket_end_with_the_connection() -> None:
    protocol = make(max_unwritten_bytes=1)
    protocol.reports.events = []
    send(protocol)
    protocol.on_flow(False, 1.0)
    protocol.on_blocked("low on memory", 1.0)
    protocol.hold(HoldKind.PAUSED, 1.0)
    protocol.connection_lost("reset by peer", 2.0)
    assert set(holds(protocol)) == {HoldKind.PAUSED, HoldKind.DISCONNECTED}
    assert not protocol.is_stopped
    assert protocol.channel.number is None
    assert all(event.flowed for event in protocol.reports.events), "it is never unflowed in between"


def test_a_second_report_that_the_connection_is_lost_changes_nothing() -> None:
    protocol = make()
    protocol.reports.settled = []
    receipt = send(protocol)
    protocol.close("closed by hand", 1.0)
    assert not receipt.done
    protocol.connection_lost("reset by peer", 2.0)
    protocol.connection_lost("again", 3.0)
    assert protocol.reports.settled == [receipt]
    assert protocol.closed == "closed by hand"
    assert protocol.in_flight == 0


def test_an_ack_that_is_read_after_the_end_of_the_connection_settles_nothing() -> None:
    protocol = make()
    receipt = publish(protocol)
    protocol.connection_lost("reset by peer", 1.0)
    settled = protocol.flow_state(2.0)
    protocol.on_ack(1, False, 2.0)
    protocol.on_ack(1, True, 2.0)
    protocol.on_acks([(1, 3)], 2.0)
    protocol.on_nack(0, True, 2.0)
    returned(protocol, receipt.message_id)
    protocol.on_flow(False, 2.0)
    protocol.on_flow(True, 2.0)
    protocol.on_unblocked(2.0)
    assert receipt.outcome is Outcome.UNKNOWN
    assert protocol.window.used == 0
    assert protocol.flow_state(2.0) == settled
    assert drain(protocol) == b""


def test_a_channel_close_caused_by_basic_publish_rejects_the_only_message_in_flight() -> None:
    protocol = make()
    suspect = publish(protocol, key="nowhere")
    unwritten = send(protocol)
    protocol.channel_closed(404, "NOT_FOUND - no exchange 'nowhere'", PUBLISH, 1.0)
    error = suspect.error()
    assert isinstance(error, MessageRejected)
    assert (error.reply_code, error.reply_text) == (404, "NOT_FOUND - no exchange 'nowhere'")
    assert suspect.outcome is Outcome.REJECTED
    assert not unwritten.done
    assert protocol.wants_channel
    assert protocol.admission.send(b"x", "", "q", 2.0) is None
    assert [str(hold) for hold in protocol.gate.holds] == [
        "disconnected (the broker closed the channel: 404 NOT_FOUND - no exchange 'nowhere')"
    ]


def test_with_on_disconnect_fail_no_message_is_resent_on_a_new_channel() -> None:
    protocol = make(on_disconnect="fail")
    receipts = [send(protocol), send(protocol)]
    drain(protocol)
    receipts.append(send(protocol))
    protocol.channel_closed(404, "NOT_FOUND", PUBLISH, 1.0)
    assert [receipt.outcome for receipt in receipts] == [Outcome.UNKNOWN, Outcome.UNKNOWN, Outcome.FAILED]
    protocol.channel_opened(1, FRAME_MAX, 2.0)
    lone = publish(protocol)
    protocol.channel_closed(404, "NOT_FOUND", PUBLISH, 3.0)
    assert lone.outcome is Outcome.REJECTED
    assert protocol.wants_channel


def test_a_channel_close_that_basic_publish_did_not_cause_rejects_no_message() -> None:
    protocol = make()
    receipt = publish(protocol)
    protocol.channel_closed(406, "PRECONDITION_FAILED", (50, 10), 1.0)
    assert not receipt.done


def test_a_channel_close_does_not_reject_a_message_that_the_broker_had_returned() -> None:
    protocol = make()
    back = publish(protocol)
    returned(protocol, back.message_id)
    protocol.channel_closed(404, "NOT_FOUND", PUBLISH, 1.0)
    error = back.error()
    assert isinstance(error, MessageReturned)
    assert (error.reply_code, error.reply_text) == (312, "NO_ROUTE")


def test_a_channel_close_rejects_the_only_message_in_flight_that_the_broker_has_not_returned() -> None:
    protocol = make()
    receipts = [send(protocol), send(protocol)]
    drain(protocol)
    returned(protocol, receipts[0].message_id)
    protocol.channel_closed(404, "NOT_FOUND", PUBLISH, 1.0)
    assert [receipt.outcome for receipt in receipts] == [Outcome.RETURNED, Outcome.REJECTED]


def test_without_confirms_a_channel_close_rejects_no_message() -> None:
    protocol = make(confirms=False)
    written, half = send(protocol), send(protocol)
    write(protocol, protocol.unwritten - 1)
    protocol.channel_closed(404, "NOT_FOUND", PUBLISH, 1.0)
    assert [written.outcome, half.outcome] == [Outcome.SENT, None]
    assert any("messages may be lost, and without confirms it is not known which" in line for line in logged(protocol))
    # It is alone on its channel, so it must be the cause.
    protocol.channel_opened(1, FRAME_MAX, 2.0)
    write(protocol, protocol.unwritten - 1)
    protocol.channel_closed(404, "NOT_FOUND", PUBLISH, 3.0)
    assert half.outcome is Outcome.REJECTED


def test_a_channel_close_with_no_message_in_flight_fails_no_message() -> None:
    protocol = make()
    receipt = send(protocol)
    protocol.channel_closed(404, "NOT_FOUND", PUBLISH, 1.0)
    assert not receipt.done


def test_without_confirms_a_lost_connection_settles_a_half_written_message_as_unknown() -> None:
    protocol = make(confirms=False)
    receipts = [send(protocol), send(protocol)]
    write(protocol, 5)
    protocol.connection_lost("reset by peer", 1.0)
    assert [receipt.outcome for receipt in receipts] == [Outcome.UNKNOWN, Outcome.FAILED]


def test_unsettled_receipts_are_listed_in_the_order_of_admission() -> None:
    protocol = make()
    receipts = publish_many(protocol, 4)
    protocol.on_ack(2, False, 0.0)
    assert protocol.unsettled_receipts == (receipts[0], receipts[2], receipts[3])


@given(
    st.lists(st.sampled_from([0, 1, 5000]), min_size=1, max_size=8),
    st.floats(0, 1),
    st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans()), max_size=8),
)
def test_a_lost_connection_settles_every_receipt_exactly_once_whatever_was_written_or_answered(
    sizes: list[int], share: float, answers: list[tuple[int, bool, bool]]
) -> None:
    protocol = make(capacity_bytes=1 << 20)
    protocol.reports.settled = []
    receipts = [send(protocol, b"x" * size) for size in sizes]
    write(protocol, int(protocol.unwritten * share))
    for tag, multiple, ack in answers:
        (protocol.on_ack if ack else protocol.on_nack)(tag, multiple, 0.0)
    finished, begun = protocol.written, protocol.parts.unconfirmed.outbound.begun
    protocol.connection_lost("reset by peer", 1.0)
    assert sorted(map(id, protocol.reports.settled)) == sorted(map(id, receipts))
    for number, receipt in enumerate(receipts, 1):
        if number > begun:
            assert receipt.outcome is Outcome.FAILED
        elif number > finished:
            assert receipt.outcome is Outcome.UNKNOWN
        else:
            assert receipt.outcome in (Outcome.CONFIRMED, Outcome.NACKED, Outcome.UNKNOWN)
    assert protocol.window.used == protocol.in_flight == 0


def test_closing_a_producer_reports_no_flow_event_and_no_hold() -> None:
    protocol = make()
    protocol.reports.events = []
    protocol.reports.logs.clear()
    protocol.close("the producer is closed", 1.0)
    protocol.connection_lost("the producer is closed", 2.0)
    assert (protocol.reports.events, protocol.reports.logs) == ([], [])
    state = protocol.flow_state(3.0)
    assert (state.flowed, state.times_flowed, state.closed) == (False, 0, "the producer is closed")


def test_a_lost_connection_is_reported_as_exactly_one_flowed_event() -> None:
    protocol = make()
    protocol.reports.events = []
    protocol.connection_lost("reset by peer", 2.0)
    assert [str(event) for event in protocol.reports.events] == ["producer: flowed: disconnected (reset by peer)"]
    assert protocol.flow_state(3.0).times_flowed == 1


def test_the_error_of_a_message_that_failed_with_the_channel_contains_the_reason_of_the_close() -> None:
    protocol = make(on_disconnect="fail")
    receipts = [send(protocol) for _ in range(3)]
    write(protocol, 2 * protocol.unwritten // 3)
    protocol.channel_closed(404, "NOT_FOUND - no exchange", PUBLISH, 1.0)
    assert [str(receipt.error()).split(": ", 1)[1] for receipt in receipts] == [
        f"{outcome} (the broker closed the channel: 404 NOT_FOUND - no exchange)"
        for outcome in ("unknown", "unknown", "failed")
    ]


def test_the_count_of_settled_messages_never_decreases() -> None:
    protocol = make()
    publish_many(protocol, 3)
    protocol.on_ack(2, False, 0.0)
    assert protocol.settled_so_far == 1
    protocol.connection_lost("cut", 1.0, reconnects=True)
    assert protocol.settled_so_far == 1
    protocol.connection_lost("gone", 1.0)
    assert protocol.settled_so_far == 3
