"""E16: after `delivery_timeout` a message is settled, and is not sent any more."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qflow_client import Message, Outcome, Receipt
from qflow_client.core.expiry import Expiry
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.recovery import Backoff

from .support import CHANNEL, FRAME_MAX, Wire, drain, make, publish, reconnect, returned, send, wait, wire, write

TIMEOUT = 10.0


def expiring(**settings: Any) -> ProducerProtocol:
    protocol = make(delivery_timeout=TIMEOUT, **settings)
    protocol.on_timer(0.0)
    return protocol


def run_until(protocol: ProducerProtocol, until: float, now: float = 0.0) -> None:
    """Call `on_timer` as the owner of a protocol does."""
    while (at := protocol.next_timer(now)) is not None and now < at <= until:
        now = at
        protocol.on_timer(now)
    protocol.on_timer(until)


def outcomes(receipts: list[Receipt]) -> list[Outcome | None]:
    return [receipt.outcome for receipt in receipts]


@given(
    st.floats(0.01, 100.0),
    st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(0, 3)), min_size=1, max_size=30),
)
def test_a_message_expires_at_its_delivery_timeout_or_at_most_one_check_interval_later(
    timeout: float, steps: list[tuple[float, int]]
) -> None:
    expiry, now, number = Expiry(timeout, 0.0), 0.0, 1
    admitted: dict[int, float] = {}
    expired = 1
    for pause, count in steps:
        end = now + pause
        while (at := expiry.next_at()) <= end:
            now = max(now, at)
            before = expiry.expired_before(number, now)
            assert not before or before >= expired
            for each in range(expired, before):
                assert admitted[each] + timeout <= now
            # An interrupt may come before the messages are settled.
            assert expiry.expired_before(number, now) == before
            expiry.forget(before)
            expired = max(expired, before)
            for each in range(expired, number):
                assert now < admitted[each] + timeout + max(0.005, timeout / 50) + 1e-6
        now = end
        for each in range(number, number + count):
            admitted[each] = now
        number += count


def test_E16_at_the_delivery_timeout_a_written_message_settles_as_unknown_and_an_unwritten_one_as_failed() -> None:
    protocol = expiring(mandatory=True)
    receipts = [send(protocol, b"written"), send(protocol, Message(b"returned", message_id="own"))]
    write(protocol, protocol.unwritten)
    returned(protocol, "own")
    receipts += [send(protocol, b"begun"), send(protocol, b"made and not begun")]
    begun = write(protocol, 10)
    protocol.on_flow(False, 1.0)
    run_until(protocol, 9.9)
    assert protocol.unsettled == 4
    run_until(protocol, 10.5, 9.9)
    assert outcomes(receipts) == [Outcome.UNKNOWN, Outcome.RETURNED, Outcome.UNKNOWN, Outcome.FAILED]
    assert "delivery_timeout=10 s has passed" in receipts[0].describe()
    assert (protocol.unsettled, protocol.in_flight, protocol.window.used) == (0, 0, 0)
    # The partly written message is completed, then comes the answer, then nothing.
    protocol.on_flow(True, 11.0)
    seen = Wire().read(begun + drain(protocol, 11.0))
    assert [each if isinstance(each, bool) else each.body for each in seen.seen] == [b"begun", False, True]
    assert protocol.unwritten == 0
    # The broker's late answer settles nothing.
    protocol.on_ack(0, True, 12.0)
    assert send(protocol, b"next", now=12.0)._number == 5


def test_E16_a_message_is_sent_if_it_is_not_older_than_the_delivery_timeout() -> None:
    protocol = expiring()
    old = publish(protocol, b"old")
    run_until(protocol, 5.0)
    young = send(protocol, b"young", now=5.0)
    run_until(protocol, 10.3, 5.0)
    assert outcomes([old, young]) == [Outcome.UNKNOWN, None]
    assert wire(drain(protocol, 10.3)).short == [b"young"]
    protocol.on_ack(2, False, 10.4)
    assert young.outcome is Outcome.CONFIRMED


def test_E16_a_message_that_has_exceeded_the_delivery_timeout_is_not_resent_after_a_lost_connection() -> None:
    protocol = expiring()
    written = publish(protocol, b"written")
    protocol.on_timer(0.5)
    reconnect(protocol, 1.0, 11.0)
    assert written.outcome is Outcome.UNKNOWN
    assert drain(protocol, 11.0) == b""
    assert protocol.gate.is_open
    assert protocol.unwritten == 0


@pytest.mark.parametrize("probed", [False, True])
def test_E16_a_nacked_message_that_expires_settles_as_nacked_or_as_unknown_if_its_retry_is_in_flight(
    probed: bool,
) -> None:
    protocol = expiring(retries=Backoff(1.0, 8.0, 0.0), retry_for=1000.0)
    refused, other = send(protocol, b"refused"), send(protocol, b"other")
    drain(protocol)
    run_until(protocol, 8.0)
    protocol.on_nack(1, False, 8.0)
    run_until(protocol, 9.0, 8.0)
    if probed:
        assert wire(drain(protocol, 9.0)).messages[0].body == b"refused"
    run_until(protocol, 11.0, 9.0)
    assert outcomes([refused, other]) == [Outcome.UNKNOWN if probed else Outcome.NACKED, Outcome.UNKNOWN]
    assert protocol.unsettled == 0
    assert protocol.gate.is_open, "nothing is left to try"


def test_E16_messages_that_exceed_the_delivery_timeout_make_room_for_waiting_senders() -> None:
    protocol = expiring(capacity=1)
    publish(protocol, b"old")
    ticket = wait(protocol, b"next", now=1.0, waiter="me")
    assert protocol.waiters.when_flushed("flush")
    run_until(protocol, 10.5)
    assert ticket.receipt is not None
    assert {"me", "flush"} <= set(protocol.reports.wake)
    assert wire(drain(protocol, 10.5)).short == [b"next"]


def test_E16_no_timer_is_needed_without_a_delivery_timeout() -> None:
    protocol = make()
    assert not protocol.needs_timer
    assert protocol.next_timer(0.0) is None
    assert expiring().needs_timer


@pytest.mark.parametrize("count", [1_000, 10_000])
def test_E7_the_delivery_deadlines_of_any_number_of_messages_are_stored_in_about_fifty_entries(count: int) -> None:
    expiry = Expiry(TIMEOUT, 0.0)
    for number in range(count):
        expiry.expired_before(number, number / count * TIMEOUT)
    assert len(expiry._marks) <= 51


def test_E16_a_channel_close_rejects_no_message_if_an_expired_message_may_have_caused_it() -> None:
    protocol = expiring()
    culprit = publish(protocol, b"culprit")
    run_until(protocol, 5.0)
    innocent = publish(protocol, b"innocent", now=5.0)
    run_until(protocol, 10.5, 5.0)
    assert outcomes([culprit, innocent]) == [Outcome.UNKNOWN, None]
    protocol.channel_closed(404, "NOT_FOUND", (60, 40), 10.6)
    assert innocent.outcome is None
    protocol.channel_opened(CHANNEL, FRAME_MAX, 10.7)
    assert wire(drain(protocol, 10.7)).short == [b"innocent"]
    protocol.on_ack(1, False, 10.8)
    assert innocent.outcome is Outcome.CONFIRMED


def test_E16_a_message_alone_in_flight_at_two_channel_closes_is_rejected_even_after_another_has_expired() -> None:
    protocol = expiring()
    publish(protocol, b"expires")
    run_until(protocol, 5.0)
    culprit = publish(protocol, b"culprit", now=5.0)
    run_until(protocol, 10.5, 5.0)
    for now in (10.6, 10.8):
        assert culprit.outcome is None
        protocol.channel_closed(404, "NOT_FOUND", (60, 40), now)
        protocol.channel_opened(CHANNEL, FRAME_MAX, now + 0.1)
        drain(protocol, now + 0.1)
    assert culprit.outcome is Outcome.REJECTED


def test_E16_after_a_channel_close_with_506_a_message_is_unknown_if_an_expired_message_was_also_in_flight() -> None:
    protocol = expiring(retries=Backoff(1.0, 8.0, 0.0), retry_for=1000.0)
    publish(protocol, b"expires")
    run_until(protocol, 5.0)
    other = publish(protocol, b"other", now=5.0)
    run_until(protocol, 10.5, 5.0)
    protocol.channel_closed(506, "no room", (60, 40), 10.6)
    protocol.connection_lost("gone", 10.7)
    assert other.outcome is Outcome.UNKNOWN
