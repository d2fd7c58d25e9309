"""Which messages the broker's answers settle: acks, nacks and returns."""

from __future__ import annotations

import sys

import pytest

from qflow_client import (
    FlowEventKind,
    HoldKind,
    Message,
    MessageNacked,
    MessageReturned,
    Outcome,
    Receipt,
)
from qflow_client.amqp.frames import FrameError, Route
from qflow_client.core.protocol import ProducerProtocol
from tests.interrupting import each_interrupt
from tests.unit.messages import PROPERTIES

from .support import FRAME_MAX, PREFIX, Wire, drain, logged, make, publish, returned, send, wait, wire, write


def test_a_multiple_ack_confirms_all_messages_up_to_its_delivery_tag() -> None:
    protocol = make()
    receipts = [send(protocol) for _ in range(5)]
    drain(protocol)
    protocol.on_ack(3, False, 0.0)
    protocol.on_ack(4, True, 0.0)
    assert [receipt.done for receipt in receipts] == [True, True, True, True, False]
    assert protocol.window.used == 1
    protocol.on_ack(2, True, 0.0)
    assert protocol.unsettled == 1


def test_a_multiple_ack_with_delivery_tag_0_confirms_exactly_the_written_messages() -> None:
    protocol = make()
    receipts = [send(protocol, b"1")]
    size = protocol.unwritten
    receipts += [send(protocol, b"2"), send(protocol, b"3")]
    write(protocol, size + 5)
    protocol.on_ack(0, True, 0.0)
    assert [receipt.outcome for receipt in receipts] == [Outcome.CONFIRMED, None, None], "half written is not written"
    drain(protocol)
    protocol.on_nack(0, True, 0.0)
    assert [receipt.outcome for receipt in receipts[1:]] == [Outcome.NACKED, Outcome.NACKED]


def test_acks_in_any_order_settle_each_message_once() -> None:
    protocol = make(capacity_bytes=1000)
    protocol.reports.settled = []
    receipts = [send(protocol, b"x" * (tag + 1)) for tag in range(6)]
    drain(protocol)
    for tag in (5, 2, 6, 2, 1, 5, 4, 3, 3):
        protocol.on_ack(tag, False, 0.0)
    protocol.on_ack(6, True, 0.0)
    assert [receipts.index(receipt) + 1 for receipt in protocol.reports.settled] == [5, 2, 6, 1, 4, 3]
    assert protocol.window.used == 0
    assert protocol.limits.byte_window is not None
    assert protocol.limits.byte_window.used == 0


@pytest.mark.parametrize(("tag", "multiple"), [(0, False), (3, False), (3, True), (99, True), ((1 << 64) - 1, False)])
def test_an_ack_for_a_message_that_was_not_written_settles_nothing_and_is_logged(tag: int, multiple: bool) -> None:
    protocol = make(name="orders")
    protocol.reports.logs.clear()
    receipts = [send(protocol, b"12")]
    size = protocol.unwritten
    receipts += [send(protocol, b"34"), send(protocol, b"56")]
    write(protocol, 2 * size)
    protocol.on_ack(tag, multiple, 0.0)
    protocol.on_nack(tag, multiple, 0.0)
    assert [receipt.outcome for receipt in receipts] == [None, None, None]
    said = f"WARNING orders: the broker answered delivery tag {tag}, but 2 messages were written; ignored"
    assert logged(protocol) == [said] * 2


def test_an_ack_confirms_a_message_only_if_its_last_byte_was_written() -> None:
    protocol = make()
    receipt = send(protocol)
    write(protocol, protocol.unwritten - 1)
    protocol.on_ack(1, False, 0.0)
    assert not receipt.done
    write(protocol, 1)
    protocol.on_ack(1, False, 0.0)
    assert receipt.delivered


def test_a_nack_settles_its_message_as_nacked_and_frees_capacity() -> None:
    protocol = make(capacity=2)
    receipts = [send(protocol), send(protocol)]
    ticket = wait(protocol)
    drain(protocol)
    protocol.on_nack(2, True, 0.0)
    assert [receipt.outcome for receipt in receipts] == [Outcome.NACKED, Outcome.NACKED]
    assert isinstance(receipts[0].error(), MessageNacked)
    assert receipts[0].may_have_arrived, "one queue has refused it, and others may have it"
    assert ticket.receipt is not None


def test_a_caller_that_waits_for_a_receipt_is_woken_when_the_receipt_is_settled() -> None:
    protocol = make()
    receipts = [send(protocol), send(protocol), send(protocol)]
    receipts[0]._waiter = "acked"
    receipts[1]._waiter = "nacked"
    drain(protocol)
    protocol.on_ack(1, False, 0.0)
    assert protocol.reports.wake == ["acked"]
    protocol.on_nack(2, False, 0.0)
    protocol.on_ack(3, False, 0.0)
    assert protocol.reports.wake == ["acked", "nacked"]


# Returns.


def test_a_basic_return_followed_by_an_ack_settles_the_message_as_returned() -> None:
    protocol = make()
    receipts = [send(protocol), send(protocol)]
    drain(protocol)
    returned(protocol, "p-000000000002")
    assert not receipts[1].done, "the ack settles it"
    protocol.on_ack(2, True, 0.0)
    assert [receipt.outcome for receipt in receipts] == [Outcome.CONFIRMED, Outcome.RETURNED]
    error = receipts[1].error()
    assert isinstance(error, MessageReturned)
    assert (error.reply_code, error.reply_text) == (312, "NO_ROUTE")
    assert "(312 NO_ROUTE)" in str(error)


def test_a_basic_return_with_a_generated_message_id_finds_its_message_among_many() -> None:
    protocol = make()
    with pytest.raises(ValueError):
        protocol.admission.send(b"x", "", "k" * 256, 0.0)
    receipts = [send(protocol, b"%d" % number) for number in range(20)]
    drain(protocol)
    protocol.on_ack(10, True, 0.0)
    returned(protocol, receipts[15].message_id)
    protocol.on_ack(20, True, 0.0)
    assert [receipt for receipt in receipts if receipt.outcome is Outcome.RETURNED] == [receipts[15]]


def test_a_basic_return_with_a_message_id_set_by_the_application_finds_its_message() -> None:
    protocol = make()
    receipts = [send(protocol, Message(b"x", message_id=f"order {number}")) for number in range(3)]
    drain(protocol)
    returned(protocol, "order 1")
    protocol.on_ack(3, True, 0.0)
    assert [receipt.outcome for receipt in receipts] == [Outcome.CONFIRMED, Outcome.RETURNED, Outcome.CONFIRMED]
    assert not protocol.parts.returns.by_id


def test_the_first_basic_return_belongs_to_the_first_of_two_messages_with_the_same_id() -> None:
    protocol = make()
    receipts = [send(protocol, Message(b"x", message_id="same")) for _ in range(3)]
    drain(protocol)
    returned(protocol, "same")
    protocol.on_ack(1, False, 0.0)
    returned(protocol, "same")
    protocol.on_ack(3, True, 0.0)
    assert [receipt.outcome for receipt in receipts] == [Outcome.RETURNED, Outcome.RETURNED, Outcome.CONFIRMED]
    assert not protocol.parts.returns.by_id


def test_E2_removing_a_message_id_twice_keeps_another_message_with_that_id() -> None:
    protocol = make()
    first, second = [send(protocol, Message(b"x", message_id="same")) for _ in range(2)]
    for _ in range(2):
        protocol.parts.returns.forget([first])
        assert protocol.parts.returns.by_id == {"same": [second]}


def test_a_basic_return_finds_its_message_among_two_with_the_same_id_and_different_destinations() -> None:
    protocol = make()
    good = send(protocol, Message(b"x", message_id="same"), key="good")
    bad = send(protocol, Message(b"x", message_id="same"), key="bad")
    drain(protocol)
    returned(protocol, "same", key="bad")
    protocol.on_ack(2, True, 0.0)
    assert (good.outcome, bad.outcome) == (Outcome.CONFIRMED, Outcome.RETURNED)


def test_a_message_id_from_the_application_that_looks_generated_is_not_mistaken_for_a_generated_id() -> None:
    protocol = make()
    ours = send(protocol, b"1")
    own = send(protocol, Message(b"2", message_id=ours.message_id))
    drain(protocol)
    returned(protocol, ours.message_id)
    protocol.on_ack(2, True, 0.0)
    assert own.outcome is Outcome.RETURNED
    assert ours.outcome is Outcome.CONFIRMED


@pytest.mark.parametrize(
    "message_id", [None, "", "another", PREFIX, "p-no number", "p-000000000001 ", "p-000000000009", "p-000000000003"]
)
def test_a_basic_return_that_matches_no_message_in_flight_settles_nothing_and_is_logged(message_id: str | None) -> None:
    protocol = make()
    receipts = [send(protocol), send(protocol, Message(b"x", message_id="own")), send(protocol)]
    drain(protocol)
    protocol.on_ack(3, False, 0.0)
    protocol.reports.logs.clear()
    returned(protocol, message_id)
    (said,) = logged(protocol)
    assert said.startswith(
        f"WARNING producer: the broker returned message {message_id or None} to ''/'q' (312 NO_ROUTE), which"
    )
    protocol.on_ack(2, True, 0.0)
    assert all(receipt.delivered for receipt in receipts)


@pytest.mark.parametrize("message_id", [None, "own"])
def test_a_basic_return_for_a_message_that_is_not_fully_written_settles_nothing(message_id: str | None) -> None:
    protocol = make()
    first = send(protocol, Message(b"1", message_id=message_id))
    size = protocol.unwritten
    second = send(protocol, Message(b"2", message_id=message_id))
    write(protocol, size + 1)
    returned(protocol, second.message_id)
    returned(protocol, second.message_id)
    drain(protocol)
    protocol.on_ack(2, True, 0.0)
    # If two messages have the same id, the first return belongs to the first message.
    assert first.outcome is (Outcome.RETURNED if message_id else Outcome.CONFIRMED)
    assert second.outcome is Outcome.CONFIRMED
    assert not protocol.parts.returns.by_id


def test_a_message_that_is_returned_twice_settles_as_returned() -> None:
    protocol = make()
    receipts = [send(protocol), send(protocol, Message(b"x", message_id="own"))]
    drain(protocol)
    for receipt in receipts * 2:
        returned(protocol, receipt.message_id)
    protocol.on_ack(2, True, 0.0)
    assert [receipt.outcome for receipt in receipts] == [Outcome.RETURNED] * 2
    assert protocol.window.used == 0


# Without confirms.


def test_without_confirms_a_message_settles_as_sent_once_it_is_fully_written() -> None:
    protocol = make(confirms=False, capacity=2)
    protocol.reports.settled = []
    receipts = [send(protocol, b"1")]
    size = protocol.unwritten
    receipts.append(send(protocol, b"2"))
    ticket = wait(protocol, waiter="me")
    write(protocol, size - 1)
    assert not receipts[0].done
    write(protocol, 2)
    assert [receipt.outcome for receipt in receipts] == [Outcome.SENT, None]
    assert receipts[0].delivered
    assert ticket.receipt is not None
    drain(protocol)
    assert [*receipts, ticket.receipt] == protocol.reports.settled
    assert protocol.unsettled == 0


def test_without_confirms_messages_with_the_same_message_id_each_settle_as_sent() -> None:
    protocol = make(confirms=False)
    for _ in range(3):
        receipt = publish(protocol, Message(b"x", message_id="own"))
        assert receipt.outcome is Outcome.SENT
    assert not protocol.parts.returns.by_id


def test_without_confirms_a_basic_return_is_reported_as_a_failure_besides_the_outcome_sent() -> None:
    protocol = make(confirms=False)
    receipt = publish(protocol, b"lost")
    returned(protocol, receipt.message_id, body=b"lost", key="nowhere")
    (failure,) = protocol.reports.take_failures()
    assert failure.outcome is Outcome.RETURNED
    assert (failure.message.body, failure.message_id) == (b"lost", receipt.message_id)
    assert (failure.exchange, failure.routing_key) == ("", "nowhere")
    assert protocol.window.used == 0


def test_without_confirms_a_basic_return_does_not_change_a_message_that_is_not_written() -> None:
    protocol = make(confirms=False)
    receipt = send(protocol)
    returned(protocol, receipt.message_id)
    drain(protocol)
    assert receipt.outcome is Outcome.SENT
    assert len(protocol.reports.take_failures()) == 1


def test_without_confirms_a_basic_return_with_invalid_names_raises_frame_error() -> None:
    protocol = make(confirms=False)
    with pytest.raises(FrameError, match="routing_key has 765 bytes"):
        returned(protocol, None, key="\ufffd" * 255)
    assert not protocol.reports.failures


def test_without_confirms_a_basic_return_does_not_report_the_receipt_of_the_message_again() -> None:
    protocol = make(confirms=False, max_failed_bytes=1000 * 516)
    protocol.reports.settled = []
    publish(protocol)
    assert [receipt.outcome for receipt in protocol.reports.settled] == [Outcome.SENT]
    returned(protocol, "p-000000000001")
    assert len(protocol.reports.settled) == 1
    assert [receipt.outcome for receipt in protocol.reports.failures] == [Outcome.RETURNED]
    assert "WARNING producer: message p-000000000001 to ''/'q': returned (312 NO_ROUTE)" in logged(protocol)
    for number in range(2000):
        returned(protocol, "p-000000000001", body=b"%d" % number)
    # Programs that get receipts by a callback may never flush.
    assert protocol.reports.take_dropped() == 1000, "one was looked at"
    assert [receipt.message.body for receipt in protocol.reports.take_failures()] == [
        b"%d" % n for n in range(1000, 2000)
    ]


# What is on the wire.


def test_every_message_without_an_id_gets_a_generated_id_of_fixed_width() -> None:
    protocol = make()
    receipts = [
        send(protocol, b"plain"),
        send(protocol, Message(b"with properties", priority=3)),
        send(protocol, Message(b"own", message_id="own")),
        send(protocol, b"x" * 10_000),
    ]
    messages = wire(drain(protocol)).messages
    ids = ["p-000000000001", "p-000000000002", "own", "p-000000000004"]
    assert [message.properties.message_id for message in messages] == ids
    assert [receipt.message_id for receipt in receipts] == ids
    assert [receipt.message.message_id for receipt in receipts] == ids
    assert receipts[1].message.priority == 3
    assert [message.properties.delivery_mode for message in messages] == [2, 2, 2, 2]


def test_with_message_ids_off_a_message_has_only_an_id_that_the_application_set() -> None:
    protocol = make(message_ids=False)
    receipts = [send(protocol, b"x"), send(protocol, Message(b"y", message_id="own")), send(protocol, Message(b""))]
    messages = wire(drain(protocol)).messages
    assert [message.properties.message_id for message in messages] == [None, "own", None]
    assert not any(message.mandatory for message in messages), "no return could be told"
    assert not protocol.parts.returns.by_id
    assert [receipt.message_id for receipt in receipts] == [None, "own", None]
    assert receipts[0].message == Message(b"x")
    assert receipts[2].message == receipts[2]._payload
    assert "message 1 to ''/'q': unsettled" in repr(receipts[0])
    returned(protocol, "p-000000000001")
    protocol.on_ack(3, True, 0.0)
    assert all(receipt.delivered for receipt in receipts)


def test_basic_publish_has_the_mandatory_flag_exactly_if_the_setting_mandatory_is_on() -> None:
    for mandatory in (True, False):
        protocol = make(mandatory=mandatory)
        send(protocol)
        send(protocol, Message(b"y", message_id="own"))
        assert [message.mandatory for message in wire(drain(protocol)).messages] == [mandatory, mandatory]
        assert bool(protocol.parts.returns.by_id) == mandatory, "what is never returned need not be found"


def test_every_message_goes_to_its_exchange_and_routing_key_even_after_the_channel_is_reopened() -> None:
    protocol = make(exchange="ex", routing_key="q")
    places = [("ex", "q"), ("ex", "q"), ("", "q"), ("ex", "a"), ("ex", "a"), ("", "a"), ("ex", "q")]
    for channel in (1, 2):
        for exchange, key in places:
            for payload in (b"x", Message(b"x")):
                assert protocol.admission.send(payload, exchange, key, 0.0) is not None
        with pytest.raises(ValueError):
            protocol.admission.send(b"x", "ex", "k" * 256, 0.0)
        assert protocol.admission.send(b"x", "ex", "q", 0.0) is not None
        read = Wire().read(drain(protocol), channel).messages
        assert [(each.exchange, each.routing_key) for each in read[::2]] == [*places, ("ex", "q")]
        assert [(each.exchange, each.routing_key) for each in read[1::2]] == places
        protocol.on_ack(0, True, 0.0)
        protocol.channel_opened(2, FRAME_MAX, 0.0)


def test_messages_with_bodies_of_every_length_around_the_frame_size_arrive_whole() -> None:
    protocol = make(max_unwritten_bytes=1 << 30)
    lengths = [0, 1, 4087, 4088, 4089, 8176, 8177, 50_000]
    bodies = [bytes([number]) * length for number, length in enumerate(lengths)]
    for body in bodies:
        send(protocol, body)
        send(protocol, Message(body, type="t"))
    messages = wire(drain(protocol)).messages
    assert [message.body for message in messages] == [body for body in bodies for _ in range(2)]
    assert [message.frames for message in messages[::2]] == [0, 1, 1, 1, 2, 2, 3, 13]


def test_a_message_with_every_property_arrives_with_every_property() -> None:
    protocol = make()
    send(protocol, Message(b"x", **PROPERTIES))
    (message,) = wire(drain(protocol)).messages
    for name, value in PROPERTIES.items():
        found = getattr(message.properties, "message_type" if name == "type" else name)
        assert (int(found.timestamp()) if name == "timestamp" else found) == value, name


# Failures that the application has not seen.


def test_the_failure_of_a_message_is_kept_until_the_application_reads_it() -> None:
    protocol = make()
    receipts = [send(protocol) for _ in range(4)]
    drain(protocol)
    protocol.on_nack(3, False, 0.0)
    protocol.on_nack(1, False, 0.0)
    protocol.on_ack(2, False, 0.0)
    protocol.on_nack(4, False, 0.0)
    receipts[3].error()
    assert protocol.reports.take_failures() == [receipts[0], receipts[2]], (
        "in the order of admission, but the one looked at"
    )
    assert protocol.reports.take_failures() == []


def test_a_producer_that_reports_all_receipts_to_a_callback_keeps_no_list_of_failures() -> None:
    protocol = make()
    protocol.reports.settled = []
    receipt = publish(protocol)
    protocol.on_nack(1, False, 0.0)
    assert protocol.reports.settled == [receipt]
    assert protocol.reports.take_failures() == []


def test_failed_messages_that_the_application_has_read_are_not_stored_until_the_next_flush() -> None:
    protocol = make()
    kept: list[Receipt] = []
    for tag in range(1, 1001):
        receipt = publish(protocol)
        protocol.on_nack(tag, False, 0.0)
        if tag % 100 == 0:
            kept.append(receipt)
        else:
            receipt.error()
    assert len(protocol.reports.failures) <= 64 + len(kept)
    assert protocol.reports.take_failures() == kept


def test_a_producer_stores_nothing_about_settled_messages() -> None:
    protocol = make()
    message = Message(b"x", message_id="own")
    before = sys.getrefcount(message)
    publish(protocol, message)
    protocol.on_ack(1, False, 0.0)
    assert sys.getrefcount(message) == before


def test_a_confirm_that_frees_capacity_admits_no_waiting_message_while_the_producer_is_paused() -> None:
    protocol = make(capacity=1)
    protocol.reports.events = []
    send(protocol)
    ticket = wait(protocol)
    drain(protocol)
    protocol.hold(HoldKind.PAUSED, 1.0)
    protocol.on_ack(1, False, 2.0)
    assert ticket.receipt is None
    assert [event.kind for event in protocol.reports.events] == [
        FlowEventKind.FLOWED,
        FlowEventKind.HOLD_RAISED,
        FlowEventKind.HOLD_LIFTED,
    ]
    protocol.lift(HoldKind.PAUSED, 3.0, source="another")
    assert ticket.receipt is None
    protocol.lift(HoldKind.PAUSED, 3.0)
    assert ticket.receipt is not None


def test_E6_a_missing_confirm_keeps_only_its_own_message_in_memory() -> None:
    protocol = make(capacity=10)
    first = publish(protocol, b"first")
    for tag in range(2, 1000):
        publish(protocol, b"x")
        protocol.on_ack(tag, False, 0.0)
    assert protocol.parts.unconfirmed.flight == {1: first}
    assert protocol.in_flight == protocol.unsettled == 1
    protocol.on_ack(0, True, 0.0)
    assert first.outcome is Outcome.CONFIRMED


# The limit of failures that the application never asks for.


def nack(protocol: ProducerProtocol, body: bytes) -> Receipt:
    receipt = publish(protocol, body)
    protocol.on_nack(0, True, 0.0)
    return receipt


def test_E6_the_list_of_failed_messages_that_nobody_reads_is_bounded_and_the_oldest_are_dropped() -> None:
    protocol = make(max_failed_bytes=100 * 1512, on_refused="fail")
    receipts = [nack(protocol, b"%01000d" % number) for number in range(1000)]
    assert 90 < len(protocol.reports.failures) <= 100
    kept = protocol.reports.take_failures()
    assert kept == receipts[-len(kept) :]
    assert protocol.reports.take_dropped() == 1000 - len(kept)
    assert protocol.reports.take_dropped() == 0
    said = [line for line in logged(protocol) if "max_failed_bytes" in line]
    (line,) = said
    assert line.startswith(
        f"WARNING producer: failed messages take more than max_failed_bytes={100 * 1512}; the oldest"
    )
    assert not protocol.reports.failures
    nack(protocol, b"after")
    assert len(protocol.reports.take_failures()) == 1, "it begins anew"


def test_E6_messages_that_fail_together_are_all_kept_even_if_they_exceed_max_failed_bytes() -> None:
    protocol = make(max_failed_bytes=1, on_refused="fail")
    receipts = [send(protocol, b"x" * 100) for _ in range(50)]
    drain(protocol)
    protocol.on_nack(0, True, 0.0)
    assert protocol.reports.take_failures() == receipts
    assert protocol.reports.take_dropped() == 0


def test_E6_failed_messages_that_the_application_has_read_are_not_counted_as_dropped() -> None:
    protocol = make(max_failed_bytes=10_000, on_refused="fail")
    for _ in range(1000):
        nack(protocol, b"x" * 100).error()
    assert protocol.reports.take_failures() == []
    assert protocol.reports.take_dropped() == 0
    assert not [line for line in logged(protocol) if "max_failed_bytes" in line]


def test_E6_failures_of_messages_after_the_producer_is_closed_are_kept() -> None:
    protocol = make(max_failed_bytes=1, on_refused="fail")
    receipts = [send(protocol, b"x" * 100) for _ in range(50)]
    drain(protocol)
    protocol.close("closed", 0.0)
    for tag in range(1, 51):
        protocol.on_nack(tag, False, 0.0)
    assert protocol.reports.take_failures() == receipts, "no more than was unsettled"


def test_E7_the_cost_to_store_a_failed_message_does_not_depend_on_the_number_of_unread_failures() -> None:
    protocol = make(max_failed_bytes=2000 * 613, on_refused="fail")
    looks = 0

    class Watched(Receipt):
        __slots__ = ()

        @property
        def held_bytes(self) -> int:
            nonlocal looks
            looks += 1
            return super().held_bytes

    for number in range(20_000):
        made = Watched(b"x" * 101, Route(1, "", "q", True), "p-")
        made._number, made._outcome = number + 1, Outcome.NACKED
        protocol.reports.add_failures((made,))
    assert len(protocol.reports.failures) == 2000
    assert looks < 5 * 20_000


def test_E6_ctrl_c_while_the_oldest_unread_failures_are_dropped_loses_no_other_failure() -> None:
    for interrupt in each_interrupt(least=10):
        protocol = make(max_failed_bytes=5 * 612, on_refused="fail")
        for _ in range(5):
            nack(protocol, b"x" * 100)
        receipt = publish(protocol, b"x" * 100)
        interrupt(lambda: protocol.on_nack(6, False, 0.0))  # noqa: B023  # called at once
        protocol.on_timer(0.0)
        if receipt._outcome is None:
            # It came before the step had begun.
            protocol.on_nack(6, False, 0.0)
        assert list(protocol.reports.failures).count(receipt) == 1
        assert len(protocol.reports.failures) + protocol.reports.dropped == 6
