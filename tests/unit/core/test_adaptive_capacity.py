"""A producer whose window adapts its size; the algorithm is tested in `tests/unit/flow/test_adaptive.py`."""

from __future__ import annotations

import pytest

from qflow_client import HoldKind, SettingsError
from qflow_client.core.protocol import ProducerProtocol

from .support import drain, holds, make, publish, wait


def fill(protocol: ProducerProtocol, now: float) -> None:
    while protocol.admission.send(b"x", "", "q", now) is not None:
        pass
    drain(protocol, now)


def rounds(protocol: ProducerProtocol, count: int, now: float, seconds: float) -> float:
    """Confirm all messages of the window at once, `count` times. Return the time of the last confirm."""
    for _ in range(count):
        fill(protocol, now)
        now += seconds
        protocol.on_ack(0, True, now)
        assert protocol.unsettled == 0
    return now


def test_the_adaptive_window_grows_up_to_its_maximum_while_throughput_grows() -> None:
    protocol = make(capacity="auto", capacity_max=300)
    assert protocol.window.capacity == 32
    now = 0.0
    found = set()
    for _ in range(60):
        now = rounds(protocol, 1, now, 0.1)
        found.add(protocol.window.capacity)
    assert {64, 128, 256, 300} <= found
    assert max(found) == 300


def test_C6_unsettled_messages_never_exceed_the_current_size_of_the_adaptive_window() -> None:
    protocol = make(capacity="auto")
    now = 0.0
    for _ in range(20):
        fill(protocol, now)
        assert protocol.unsettled <= protocol.window.capacity
        now += 0.03
        protocol.on_ack(0, True, now)


def test_waiting_senders_are_admitted_when_a_confirm_enlarges_the_adaptive_window() -> None:
    protocol = make(capacity="auto")
    now = 0.0
    fill(protocol, now)
    tickets = [wait(protocol) for _ in range(300)]
    while protocol.window.capacity == 32:
        drain(protocol, now)
        now += 0.1
        protocol.on_ack(0, True, now)
    assert protocol.unsettled == 64
    assert sum(ticket.receipt is not None for ticket in tickets) % 32 == 0


def test_the_adaptive_window_of_a_producer_shrinks_when_the_broker_withholds_confirms() -> None:
    protocol = make(capacity="auto")
    now = rounds(protocol, 40, 0.0, 0.01)
    before = protocol.window.capacity
    for _ in range(8):
        fill(protocol, now)
        now += 0.01
        protocol.on_ack(protocol.parts.unconfirmed.oldest + protocol.unsettled // 2, True, now)
        fill(protocol, now)
        now += 10.0
        protocol.on_ack(protocol.parts.unconfirmed.oldest, False, now)
    assert protocol.window.capacity < before / 8


def test_a_capacity_that_is_changed_from_auto_to_a_number_no_longer_adapts() -> None:
    protocol = make(capacity="auto")
    now = rounds(protocol, 3, 0.0, 0.1)
    protocol.set_capacity(50, now)
    now = rounds(protocol, 20, now, 0.1)
    assert protocol.window.capacity == 50
    fill(protocol, now)
    assert protocol.unsettled == 50


def test_the_capacity_of_an_existing_producer_can_be_set_to_a_number_but_not_to_auto() -> None:
    for capacity in (10, "auto"):
        protocol = make(capacity=capacity)
        before = protocol.window.capacity
        with pytest.raises(
            SettingsError, match="capacity='auto': the capacity of an existing producer can only be set"
        ):
            protocol.set_capacity("auto", 0.0)  # type: ignore[arg-type]  # that is the point
        assert protocol.window.capacity == before


def test_slow_callbacks_hold_an_adaptive_producer_only_if_more_than_capacity_max_receipts_are_waiting() -> None:
    protocol = make(capacity="auto", capacity_max=100)
    protocol.reports.settled = []
    for unreported in (50, 101):
        for _ in range(unreported - protocol.parts.unreported.count):
            publish(protocol)
            protocol.on_ack(0, True, 0.0)
            protocol.take_settled(0.0)
        assert holds(protocol) == ([] if unreported == 50 else [HoldKind.CAPACITY])
    protocol.reported(51, 0.0)
    assert holds(protocol) == []


def test_the_whole_adaptive_window_is_free_after_a_lost_connection_has_settled_all_messages() -> None:
    protocol = make(capacity="auto")
    now = rounds(protocol, 5, 0.0, 0.1)
    fill(protocol, now)
    protocol.connection_lost("gone", now + 1.0)
    assert protocol.window.used == protocol.unsettled == 0
