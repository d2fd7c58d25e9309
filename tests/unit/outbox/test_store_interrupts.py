"""Ctrl-C at every line of a main thread that uses an outbox: each message is admitted completely or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qflow_client import Message
from qflow_client.core.tickets import SendTicket
from qflow_client.core.waiters import Waiters
from qflow_client.outbox import Outbox
from qflow_client.receipt import Outcome, Receipt
from tests.interrupting import EVERY, each_interrupt, interrupted, pressed_in
from tests.unit.core.support import Wire, place

from .support import Kept, leave

DAY = 86_400.0
# The modules of an outbox, and their callers. The other modules are interrupted in tests/unit/core.
MODULES = (
    "access.py",
    "backlog.py",
    "database.py",
    "outbox/file.py",
    "outbox/outbox.py",
    "protocol.py",
    "noted.py",
    "requests.py",
    "sendline.py",
    "store.py",
    "waiters.py",
)
OWN = {"plain": b"own", "with an id of its own": Message(b"own", message_id="own")}


@pytest.fixture(autouse=True)
def _an_interrupted_turn_is_found_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qflow_client.outbox.access._LOST", 0.001)


def all_gets_out(kept: Kept) -> list[bytes]:
    """Let the producer send and the broker confirm until nothing is left.

    Returns:
        The messages that the broker got, in order.
    """
    seen = Wire()
    protocol = kept.protocol
    # As a producer does after an interrupt.
    protocol.on_timer(kept.now)
    protocol.lift("paused", kept.now)
    for _ in range(30):
        kept.turn()
        seen.read(kept.write())
        protocol.on_ack(0, True, kept.now)
    kept.turn()
    assert protocol.unsettled == protocol.window.used == protocol.controller.waiting == 0
    assert not kept.store.has_backlog
    assert protocol.gate.is_open
    assert not protocol.gate.holds
    assert not kept.store._sequences
    kept.outbox.commit()
    # No message, and no room of a message, stays that would never be removed.
    assert (len(kept.outbox), kept.outbox.left, kept.outbox.size) == (0, 0, 0)
    assert Outbox.look(kept.outbox.path) == []
    return [message.body for message in seen.messages]


def every_line(
    path: Path, begin: Callable[[Kept], Any], call: Callable[[Kept], Any], least: int, **settings: Any
) -> Iterator[tuple[Kept, int]]:
    """Yield a producer for every line at which a call is interrupted, after the interrupt; and last, one without an
    interrupt.
    """
    for interrupt in each_interrupt(least=least, every=EVERY):
        kept = Kept(path, f"{interrupt.at}-", **settings)
        try:
            begin(kept)
            yield kept, interrupt(lambda: call(kept), only=MODULES)  # noqa: B023  # called at once
        finally:
            kept.outbox.close()


@pytest.mark.parametrize("payload", OWN.values(), ids=OWN)
def test_with_an_outbox_a_send_that_ctrl_c_interrupts_admits_the_whole_message_or_nothing(
    path: Path, payload: bytes | Message
) -> None:
    admitted = []

    def begin(kept: Kept) -> None:
        assert kept.send(b"before") is not None

    for kept, come in every_line(path, begin, lambda kept: kept.send(payload), 30):
        admitted.append(len(kept.protocol.unsettled_receipts) == 2)
        assert kept.send(b"after") is not None
        assert all_gets_out(kept) == [b"before", *([b"own"] if admitted[-1] else []), b"after"]
        assert come or admitted[-1]
    assert admitted == sorted(admitted), "from one line on"
    assert not admitted[0]


def test_a_send_that_ctrl_c_interrupts_while_it_spills_leaves_the_message_on_disk_or_withdrawn(path: Path) -> None:
    def begin(kept: Kept) -> None:
        kept.protocol.hold("paused", kept.now)
        assert kept.send(b"before", spills=True) is not None

    spilled = []
    for kept, come in every_line(path, begin, lambda kept: kept.send(b"own", spills=True), 30, when_flowed="spill"):
        assert kept.send(b"after", spills=True) is not None
        bodies = all_gets_out(kept)
        spilled.append(b"own" in bodies)
        assert bodies == [b"before", *([b"own"] if spilled[-1] else []), b"after"]
        assert come or spilled[-1]
    assert not spilled[0]


def test_no_later_message_overtakes_a_message_that_was_spilled_to_disk_when_ctrl_c_came(path: Path) -> None:
    for kept, _ in every_line(
        path,
        lambda kept: kept.protocol.hold("paused", kept.now),
        lambda kept: kept.send(b"own", spills=True),
        30,
        when_flowed="spill",
    ):
        kept.protocol.on_timer(kept.now)
        kept.protocol.lift("paused", kept.now)
        kept.send(b"after")
        assert all_gets_out(kept) in ([b"own"], [b"after"], [b"own", b"after"])


@pytest.mark.parametrize("way", ["resume", "capacity"])
def test_messages_on_disk_are_read_once_and_in_order_even_if_ctrl_c_interrupts_the_reading(
    path: Path, way: str
) -> None:
    def begin(kept: Kept) -> None:
        kept.send(b"before")
        kept.write()
        if way == "resume":
            kept.protocol.hold("paused", kept.now)
        for number in range(3):
            assert kept.send(b"%d" % number, spills=True) is not None
        kept.turn()
        # Messages are read as far as they could be sent.
        assert len(kept.backlog.ready) == (0 if way == "resume" else 3)

    def call(kept: Kept) -> None:
        if way == "resume":
            kept.protocol.lift("paused", kept.now)
        else:
            kept.protocol.set_capacity(3, kept.now)

    for kept, _ in every_line(path, begin, call, 15, when_flowed="spill", capacity=1):
        assert all_gets_out(kept) == [b"0", b"1", b"2"]


def test_E2_a_flush_ends_even_if_ctrl_c_comes_while_its_messages_are_removed_from_disk(
    path: Path,
) -> None:
    kept = Kept(path, when_flowed="spill", capacity=1)
    kept.send(b"before")
    for body in (b"0", b"1"):
        kept.send(body, spills=True)
    kept.turn()
    assert kept.protocol.waiters.when_flushed("flush")
    with pressed_in(Waiters, "add_settled"):
        kept.protocol.set_capacity(3, kept.now)
    assert all_gets_out(kept) == [b"before", b"0", b"1"]
    assert "flush" in kept.woken
    kept.outbox.close()


def test_waiting_senders_are_spilled_to_disk_once_and_in_order_even_if_ctrl_c_comes(path: Path) -> None:
    tickets: list[SendTicket] = []

    def begin(kept: Kept) -> None:
        kept.send(bytes(500))
        kept.write()
        kept.protocol.hold("paused", kept.now)
        tickets[:] = [place(kept.protocol, b"%d" % number * 300, kept.now, waiter=number) for number in range(3)]
        # There is room for the others, which no step has noticed yet.
        kept.protocol.on_ack(1, False, kept.now)
        kept.outbox.commit()
        assert not any(ticket.decided for ticket in tickets)

    def call(kept: Kept) -> None:
        kept.protocol.line.give_up(tickets[0], kept.now)

    for kept, _ in every_line(path, begin, call, 40, when_flowed="spill", outbox_max_bytes=800):
        # As the skins do.
        kept.protocol.line.give_up(tickets[0], kept.now)
        bodies = all_gets_out(kept)
        assert [body[:1] for body in bodies] == [b"1", b"2"]
        assert all(ticket.receipt is not None for ticket in tickets[1:])
        assert {1, 2} <= set(kept.woken)


@pytest.mark.parametrize("told", [False, True], ids=["failures", "on_delivery"])
def test_a_message_that_is_too_old_when_it_is_admitted_is_settled_and_reported_once_even_if_ctrl_c_comes(
    path: Path, told: bool
) -> None:
    receipts: list[Receipt | None] = []

    def begin(kept: Kept) -> None:
        if told:
            kept.protocol.reports.settled = []
        kept.protocol.hold("paused", kept.now)
        receipts[:] = [kept.send(b"%d" % number, spills=True) for number in range(2)]
        kept.protocol.lift("paused", kept.now)
        kept.protocol.hold("paused", kept.now)
        kept.turn()
        assert len(kept.backlog.ready) == 2
        kept.now += DAY

    for kept, _ in every_line(
        path,
        begin,
        lambda kept: kept.protocol.lift("paused", kept.now),
        25,
        when_flowed="spill",
        outbox_max_age=60.0,
    ):
        assert all_gets_out(kept) == []
        # In this order, because looking at an outcome marks it as seen.
        found = kept.protocol.reports.take_failures() if not told else kept.protocol.reports.settled or []
        assert [receipt.message.body for receipt in found] == [b"0", b"1"]
        assert [receipt and receipt.outcome for receipt in receipts] == [Outcome.FAILED] * 2


def test_a_wait_for_the_outbox_file_that_ctrl_c_interrupts_can_be_restarted(path: Path) -> None:
    def begin(kept: Kept) -> None:
        assert kept.store.send(b"own", "", "q", kept.now, spills=False) is not None

    for kept, _ in every_line(path, begin, lambda kept: kept.outbox.wait_durable(kept.outbox.last), 15):
        kept.outbox.wait_durable(kept.outbox.last)
        assert [stored.message.body for stored in Outbox.look(path)] == [b"own"]
        assert all_gets_out(kept) == [b"own"]


def test_a_read_of_the_outbox_that_ctrl_c_interrupts_can_be_restarted(path: Path) -> None:
    for kept, _ in every_line(
        path, lambda kept: kept.outbox.put(b"own", "", "q", "id"), lambda kept: kept.outbox.read(), 10
    ):
        (stored,) = kept.outbox.read()
        kept.outbox.settle(stored.sequence)
        kept.outbox.commit()
        assert (len(kept.outbox), kept.outbox.size) == (0, 0)


def test_messages_that_were_stored_in_the_outbox_before_ctrl_c_survive_a_later_crash(path: Path) -> None:
    # In any state of the memory, the file has the admitted messages.
    leave(path, b"left", permit=True)
    kept = Kept(path)
    kept.turn()
    kept.write()
    sequence = kept.outbox.last
    for interrupt in each_interrupt(least=30):
        kept.protocol.on_timer(kept.now)
        interrupt(lambda: kept.send(b"own"), only=MODULES)
    kept.crash()
    found = Outbox.look(path)
    assert found[0].message.body == b"left"
    assert found[-1].message.body == b"own"
    assert found[-1].sequence > sequence


def test_E2_ctrl_c_after_the_end_of_the_producer_removes_no_stored_message_from_the_outbox(path: Path) -> None:
    kept = Kept(path)
    receipts = [kept.store.send(b"%d" % number, "", "q", kept.now, spills=False) for number in range(3)]
    kept.outbox.commit()
    kept.protocol.connection_lost("the end", kept.now)
    assert [receipt is not None and receipt.outcome for receipt in receipts] == [Outcome.STORED] * 3
    assert interrupted(lambda: kept.protocol.flow_state(kept.now), 3)
    kept.protocol.on_timer(kept.now)
    kept.outbox.close()
    assert [stored.message.body for stored in Outbox.look(path)] == [b"0", b"1", b"2"]


def test_E2_ctrl_c_while_messages_are_settled_leaves_no_settled_message_in_the_outbox(path: Path) -> None:
    for interrupt in each_interrupt(least=10, every=EVERY):
        kept = Kept(path, f"{interrupt.at}-")
        for number in range(3):
            kept.store.send(b"%d" % number, "", "q", kept.now, spills=False)
        while data := kept.protocol.data_to_write(1 << 20):
            kept.protocol.advance(len(data), kept.now)
        interrupt(lambda: kept.protocol.on_ack(3, True, kept.now))  # noqa: B023  # called at once
        # A later ack settles the messages that the interrupted one did not.
        kept.protocol.on_ack(0, True, kept.now)
        kept.outbox.close()
        assert not Outbox.look(path)
