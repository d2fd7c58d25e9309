"""Ctrl-C raises KeyboardInterrupt at any point of a main thread that sends: a message is admitted as a whole or not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import qflow_client
from qflow_client import Message
from qflow_client.protocol import ProducerProtocol

from .support import MAX_BODY, Wire, drain, make, returned, send, wait, write

PACKAGE = str(Path(qflow_client.__file__).parent)


def interrupted(call: Callable[[], Any], at: int, within: str | None = None) -> bool:
    """Call, with Ctrl-C before the so many-th line of ours that is run, or of that function and all that it calls.

    Returns:
        Whether it came to that.
    """
    lines = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal lines
        if event == "line" and frame.f_code.co_filename.startswith(PACKAGE) and (within is None or inside(frame)):
            lines += 1
            if lines == at:
                raise KeyboardInterrupt
        return trace

    def inside(frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code.co_name != within:
            frame = frame.f_back
        return frame is not None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


PAYLOADS = {
    "plain": b"abc",
    "empty": b"",
    "with an id of its own": Message(b"abc", message_id="own"),
    "of many frames": b"x" * (3 * MAX_BODY),
}


def started() -> tuple[ProducerProtocol, Wire]:
    """A producer of which one message is written, one has begun and one has not."""
    protocol = make(capacity_bytes=1 << 20)
    protocol.settled = []
    send(protocol, Message(b"1", message_id="own"))
    size = protocol.outbound.size
    send(protocol, b"2" * 2 * MAX_BODY)
    send(protocol, Message(b"3", message_id="own"))
    return protocol, Wire().read(write(protocol, size + MAX_BODY + 200))


def interrupts(payload: bytes | Message, key: str) -> Iterator[tuple[ProducerProtocol, Wire]]:
    """A producer for every line in which sending this can be interrupted, after it was."""
    for at in range(1, 1000):
        protocol, read = started()
        if not interrupted(lambda: protocol.send(payload, "", key, 0.0), at):  # noqa: B023  # called at once
            assert at > 15
            return
        yield protocol, read


@pytest.mark.parametrize("key", ["q", "another"])
@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_a_send_that_is_interrupted_at_any_line_is_admitted_whole_or_not_at_all(
    payload: bytes | Message, key: str
) -> None:
    admitted = []
    for protocol, read in interrupts(payload, key):
        admitted.append(protocol.unsettled == 4)
        assert protocol.window.used == protocol.unsettled
        assert protocol.byte_window is not None
        assert protocol.byte_window.used == sum(receipt.size for receipt in protocol.unsettled_receipts)
        assert protocol.in_flight == 2

        after = send(protocol, b"after", key=key)
        read.read(drain(protocol))
        body = payload.body if isinstance(payload, Message) else payload
        bodies = [b"1", b"2" * 2 * MAX_BODY, b"3", *([body] if admitted[-1] else []), b"after"]
        assert [(each.body, each.routing_key) for each in read.messages] == [
            (each, key if number >= 3 else "q") for number, each in enumerate(bodies)
        ]
        receipts = protocol.unsettled_receipts
        assert [each.message.body for each in receipts] == bodies
        assert [each.message_id for each in receipts] == [each.properties.message_id for each in read.messages]

        returned(protocol, after.message_id, body=b"after", key=key)
        protocol.on_ack(len(bodies), True, 0.0)
        assert [each.delivered for each in receipts] == [True] * (len(bodies) - 1) + [False]
        assert protocol.window.used == protocol.byte_window.used == protocol.outbound.size == 0
        assert not protocol._by_id
        assert protocol.settled == list(receipts)
    assert admitted == sorted(admitted), "from one line on"
    assert not admitted[0]


def test_of_an_interrupted_message_with_an_id_of_its_own_no_return_is_expected_unless_it_is_admitted() -> None:
    for protocol, _ in interrupts(Message(b"abc", message_id="its own"), "q"):
        assert ("its own" in protocol._by_id) == (protocol.unsettled == 4)


def test_a_grant_that_is_interrupted_at_any_line_of_the_admission_decides_its_ticket() -> None:
    for at in range(1, 1000):
        protocol = make(capacity=1)
        send(protocol)
        ticket, after = wait(protocol, b"2", waiter="ticket"), wait(protocol, b"3", waiter="after")
        if not interrupted(lambda: protocol.set_capacity(2, 0.0), at, within="_admit"):  # noqa: B023  # called at once
            assert at > 10
            return
        assert isinstance(ticket.error, KeyboardInterrupt)
        assert protocol.wake == ["ticket"]
        assert protocol.window.used == protocol.unsettled
        assert not protocol.give_up(ticket, 0.0)
        protocol.set_capacity(3, 0.0)
        assert after.receipt is not None
        assert protocol.controller.waiting == 0


@pytest.mark.parametrize("settings", [{"capacity": 1}, {"capacity": 2, "rate": 1.0}, {"capacity": 1, "rate": 1.0}])
def test_a_limit_that_is_met_or_left_and_interrupted_at_any_line_leaves_no_hold(settings: dict[str, Any]) -> None:
    for at in range(1, 1000):
        protocol = make(**settings)
        send(protocol, now=10.0)
        come = False
        for now in (10.0, 10.0, 10.5, 11.5, 11.5, 20.0):
            come = interrupted(lambda: protocol.send(b"x", "", "q", now), at)  # noqa: B023  # called at once
            drain(protocol, now)
            if come:
                break
            # Not the first, so that one kind of hold follows another.
            if now > 10.0:
                protocol.on_ack(0, True, now)
        protocol.on_ack(0, True, 30.0)
        protocol.on_timer(100.0)
        assert protocol.send(b"x", "", "q", 100.0) is not None
        assert protocol.gate.is_open
        assert not protocol.gate.holds
        if not come:
            assert at > 15
            return
