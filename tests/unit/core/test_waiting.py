"""The calls that wait, as a driver runs them."""

from __future__ import annotations

from typing import Any

import pytest

from qflow_client import FlowControlTimeout, ProducerClosed, ProducerFlowed
from qflow_client.core import calls
from qflow_client.core.admission import Admission
from qflow_client.core.calls import CannotWait, resume
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.tickets import SendTicket

from .support import drain, make, publish, send

INF = float("inf")


def full(**settings: Any) -> ProducerProtocol:
    """Return a producer without room, whose message is written."""
    protocol = make(capacity=1, **settings)
    publish(protocol, b"before")
    return protocol


def ticket_of(protocol: ProducerProtocol, **more: Any) -> SendTicket:
    return protocol.line.make_ticket(b"x", "", "q", 0.0, waiter="me", **more)


def test_a_waiting_send_returns_its_receipt_when_there_is_room() -> None:
    protocol = full(flow_control_wait_notify_period=3.0)
    call = calls.send(protocol.line, ticket_of(protocol, timeout=9.0), 0.0)
    assert resume(call, None) == (3.0, None), "when a notice is due"
    assert resume(call, 3.0) == (6.0, None)
    protocol.on_ack(1, False, 4.0)
    assert protocol.reports.wake == ["me"]
    _, receipt = resume(call, 4.0)
    assert receipt is not None
    assert (receipt.message.body, protocol.unsettled_receipts) == (b"x", (receipt,))


def test_a_send_with_wait_notices_disabled_waits_until_its_deadline() -> None:
    protocol = full()
    call = calls.send(protocol.line, ticket_of(protocol, timeout=9.0), 0.0, notices=False)
    assert resume(call, None) == (9.0, None)
    with pytest.raises(FlowControlTimeout) as caught:
        resume(call, 9.0)
    assert caught.value.waited == 9.0
    assert protocol.controller.waiting == 0


def test_a_send_with_timeout_0_to_a_full_producer_raises_producer_flowed_and_is_counted() -> None:
    protocol = full()
    assert protocol.admission.send(b"x", "", "q", 0.0) is None
    cannot_wait = CannotWait(ProducerFlowed, "do something else")
    with pytest.raises(ProducerFlowed, match="do something else") as caught:
        resume(calls.send(protocol.line, ticket_of(protocol, timeout=0.0), 0.0, cannot_wait=cannot_wait), None)
    assert not isinstance(caught.value, FlowControlTimeout)
    assert (caught.value.message, caught.value.waited) == (b"x", 0.0)
    assert protocol.line.flowed_errors == {"capacity": 1}


@pytest.mark.parametrize("room", [False, True])
def test_a_send_in_a_receipt_callback_with_timeout_0_is_admitted_before_all_waiting_senders(room: bool) -> None:
    protocol = full()
    others = calls.send(protocol.line, ticket_of(protocol), 0.0)
    resume(others, None)
    if room:
        # There is room, which no call has noticed yet.
        protocol.window.capacity = 2
    call = calls.send(
        protocol.line,
        ticket_of(protocol, timeout=0.0, first=True),
        0.0,
        cannot_wait=CannotWait(ProducerFlowed, "do something else"),
    )
    if room:
        assert resume(call, None)[1] is not None
    else:
        with pytest.raises(ProducerFlowed, match="do something else"):
            resume(call, None)
    assert protocol.controller.waiting == 1


@pytest.mark.parametrize("waits", [False, True])
def test_a_waiting_send_raises_an_error_when_the_producer_is_closed(waits: bool) -> None:
    protocol = full()
    ticket = ticket_of(protocol)
    call = calls.send(protocol.line, ticket, 0.0)
    if waits:
        resume(call, None)
    protocol.close("closed for a test", 1.0)
    with pytest.raises(ProducerClosed, match="closed for a test"):
        resume(call, 1.0 if waits else None)
    assert not protocol.line.tickets


def test_a_send_that_is_withdrawn_before_it_joins_the_waiting_line_is_never_admitted() -> None:
    protocol = full()
    ticket = ticket_of(protocol)
    assert protocol.line.give_up(ticket, 0.0)
    assert ticket.decided
    assert protocol.controller.waiting == 0


def test_E2_a_send_that_is_withdrawn_while_a_confirm_makes_room_is_never_admitted_and_uses_no_capacity() -> None:
    protocol = full(capacity_bytes=100)
    first, second = (ticket_of(protocol) for _ in range(2))
    for ticket in first, second:
        protocol.line.stand_in_line(ticket, 0.0)
    assert first.claim(for_sender=True)
    protocol.on_ack(1, False, 1.0)
    assert first.decided
    assert first.receipt is None
    assert second.receipt is not None
    assert protocol.unsettled_receipts == (second.receipt,)
    assert protocol.limits.byte_window is not None
    assert (protocol.window.used, protocol.limits.byte_window.used) == (1, 1)
    assert list(protocol.line.tickets) == []


def test_E2_if_a_signal_handler_raises_after_an_admission_the_message_is_admitted_and_keeps_its_capacity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    protocol = full()
    ticket = ticket_of(protocol)
    protocol.line.stand_in_line(ticket, 0.0)
    admit = Admission.admit

    def interrupted(*arguments: Any) -> None:
        admit(*arguments)
        raise ValueError("the handler's")

    with monkeypatch.context() as patched:
        patched.setattr(Admission, "admit", interrupted)
        with pytest.raises(ValueError, match="the handler's"):
            protocol.on_ack(1, False, 1.0)
    protocol.on_timer(1.0)
    assert ticket.receipt is not None
    assert protocol.unsettled_receipts == (ticket.receipt,)
    assert protocol.window.used == 1
    assert "me" in protocol.reports.wake


def test_E2_a_send_cannot_be_withdrawn_while_it_is_being_admitted() -> None:
    ticket = ticket_of(full())
    assert ticket.claim()
    assert not ticket.claim(for_sender=True)
    assert ticket.claim(), "after an interrupt, once more"


@pytest.mark.parametrize("settled", [False, True])
def test_flush_returns_whether_all_messages_are_settled(settled: bool) -> None:
    protocol = full()
    call = calls.flush(protocol, "me", 5.0)
    assert resume(call, None) == (5.0, None)
    if settled:
        protocol.on_ack(1, False, 5.0)
        assert protocol.reports.wake == ["me"]
    assert resume(call, 5.0) == (None, settled)
    assert not protocol.waiters.settled
    if settled:
        assert resume(calls.flush(protocol, "me", 5.0), None) == (None, True), "nothing is left to wait for"


@pytest.mark.parametrize("unflowed", [False, True])
def test_wait_unflowed_returns_whether_the_producer_is_unflowed(unflowed: bool) -> None:
    protocol = make()
    protocol.hold("paused", 0.0)
    call = calls.wait_unflowed(protocol, "me", 5.0, 0.0)
    assert resume(call, None) == (5.0, None)
    if unflowed:
        protocol.lift("paused", 1.0)
        assert protocol.reports.wake == ["me"]
    assert resume(call, 5.0) == (None, unflowed)
    assert not protocol.waiters.unflowed
    protocol.lift("paused", 5.0)
    assert resume(calls.wait_unflowed(protocol, "me", 5.0, 5.0), None) == (None, True)


@pytest.mark.parametrize("waits", [False, True])
def test_wait_unflowed_ends_when_the_producer_is_closed(waits: bool) -> None:
    protocol = make()
    protocol.hold("paused", 0.0)
    call = calls.wait_unflowed(protocol, "me", INF, 0.0)
    if waits:
        resume(call, None)
    protocol.close("closed for a test", 1.0)
    with pytest.raises(ProducerClosed, match="closed for a test"):
        resume(call, 1.0 if waits else None)


def test_closing_a_producer_admits_no_message_and_waits_for_unsettled_messages_despite_any_hold() -> None:
    protocol = full()
    protocol.on_blocked("memory", 0.0)
    call = calls.close(protocol, "me", 5.0, 0.0, "closed for a test", waits_for_holds=True)
    assert resume(call, None) == (5.0, None)
    assert protocol.closed == "closed for a test"
    assert resume(call, 5.0) == (None, None)


def test_a_close_that_ignores_holds_waits_as_long_as_acks_arrive_or_there_is_no_hold() -> None:
    protocol = make(capacity=2)
    send(protocol)
    send(protocol)
    drain(protocol)
    # The window is full, as a fast producer's is.
    assert protocol.admission.send(b"x", "", "q", 0.0) is None
    call = calls.close(protocol, "me", 5.0, 0.0, "closed for a test", waits_for_holds=False)
    assert resume(call, None) == (0.5, None)
    protocol.on_ack(1, False, 0.4)
    assert resume(call, 0.5) == (1.0, None), "one answer has come"
    assert resume(call, 1.0) == (1.5, None), "there is room again, so nothing holds"
    protocol.on_ack(2, False, 1.2)
    assert resume(call, 1.2) == (None, None)


@pytest.mark.parametrize("hold", ["blocked", "capacity", "refused deadline"])
def test_a_close_that_drains_does_not_wait_for_messages_that_cannot_be_sent_because_of_a_hold(hold: str) -> None:
    protocol = full()
    if hold == "blocked":
        protocol.on_blocked("memory", 0.0)
    elif hold == "capacity":
        assert protocol.admission.send(b"x", "", "q", 0.0) is None
    call = calls.drain(protocol, "me", 0.0 if hold == "refused deadline" else 5.0, 0.0)
    until, _ = resume(call, None)
    if hold == "capacity":
        assert until == 0.5
        until, _ = resume(call, 0.5)
    assert until is None


def test_a_close_that_drains_does_not_wait_for_a_silent_broker_if_the_last_message_has_filled_the_window() -> None:
    protocol = make(capacity=2)
    send(protocol)
    send(protocol)
    drain(protocol)
    call = calls.close(protocol, "me", 5.0, 0.0, "closed for a test", waits_for_holds=False)
    assert resume(call, None) == (0.5, None)
    assert resume(call, 0.5) == (None, None)


def test_closing_a_producer_without_unsettled_messages_does_not_wait() -> None:
    assert resume(calls.drain(make(), "me", 5.0, 0.0), None) == (None, None)
