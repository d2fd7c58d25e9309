"""Ctrl-C raises KeyboardInterrupt at any point of a main thread that sends. A message is admitted completely or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from qflow_client import Message, Outcome, ProducerClosed
from qflow_client.amqp.outbound import Outbound
from qflow_client.core.admission import Admission
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.resending import Resending
from qflow_client.core.tickets import SendTicket
from qflow_client.flow import FifoLine, Line, Ticket, WeightedLine
from tests.effort import EFFORT
from tests.interrupting import EVERY, each_interrupt, interrupted

from .support import (
    CHANNEL,
    MAX_BODY,
    Wire,
    check_order,
    drain,
    make,
    place,
    publish,
    reconnect,
    returned,
    send,
    wait,
    wire,
    write,
)
from .test_steps import Watch

PAYLOADS = {
    "plain": b"abc",
    "empty": b"",
    "with an id of its own": Message(b"abc", message_id="own"),
    "of many frames": b"x" * (3 * MAX_BODY),
}


def started() -> tuple[ProducerProtocol, Wire]:
    """Return a producer with one written message, one that has begun, and one that has not."""
    protocol = make(capacity_bytes=1 << 20)
    protocol.reports.settled = []
    send(protocol, Message(b"1", message_id="own"))
    size = protocol.unwritten
    send(protocol, b"2" * 2 * MAX_BODY)
    send(protocol, Message(b"3", message_id="own"))
    return protocol, Wire().read(write(protocol, size + MAX_BODY + 200))


def interrupts(payload: bytes | Message, key: str) -> Iterator[tuple[ProducerProtocol, Wire]]:
    """Yield a producer for every line at which sending this can be interrupted, after the interrupt."""
    for interrupt in each_interrupt(least=15):
        protocol, read = started()
        if interrupt(lambda: protocol.admission.send(payload, "", key, 0.0)):  # noqa: B023  # called at once
            protocol.on_timer(0.0)
            yield protocol, read


@pytest.mark.parametrize(
    ("payload", "key"),
    [*((payload, "q") for payload in PAYLOADS.values()), (b"abc", "another")],
    ids=[*PAYLOADS, "key"],
)
def test_a_send_interrupted_by_ctrl_c_at_any_line_admits_the_whole_message_or_nothing(
    payload: bytes | Message, key: str
) -> None:
    admitted = []
    for protocol, read in interrupts(payload, key):
        admitted.append(protocol.unsettled == 4)
        assert protocol.window.used == protocol.unsettled
        assert protocol.limits.byte_window is not None
        assert protocol.limits.byte_window.used == sum(receipt.size for receipt in protocol.unsettled_receipts)
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
        assert protocol.window.used == protocol.limits.byte_window.used == protocol.unwritten == 0
        assert not protocol.parts.returns.by_id
        assert protocol.reports.settled == list(receipts)
    assert admitted == sorted(admitted), "from one line on"
    assert not admitted[0]


def test_the_id_of_a_message_whose_send_is_interrupted_is_registered_only_if_the_message_is_admitted() -> None:
    for protocol, _ in interrupts(Message(b"abc", message_id="its own"), "q"):
        assert ("its own" in protocol.parts.returns.by_id) == (protocol.unsettled == 4)


def consistent(protocol: ProducerProtocol) -> bool:
    """Return True if the protocol's counts match its messages."""
    check_order(protocol)
    costs = sum(map(protocol.admission.cost, (*protocol.parts.resending.again, *protocol.admission.unsent)))
    return protocol.unwritten == protocol.parts.unconfirmed.outbound.size + costs


@pytest.mark.parametrize("payload", [b"abc", Message(b"abc", message_id="own")])
def test_a_second_ctrl_c_while_the_producer_repairs_its_state_leaves_the_state_correct(
    payload: bytes | Message,
) -> None:
    twice = 0
    every, then = {"quick": (13, 13), "ci": (1, 3), "nightly": (1, 1)}[EFFORT]
    for interrupt in each_interrupt(least=15, every=every):
        # In CI the loop begins at one of the first places, and tries each EVERY-th place after it.
        for again in range(1 + interrupt.at % then, 1000, then):
            protocol, _ = started()
            if not interrupt(lambda: protocol.admission.send(payload, "", "q", 0.0)):  # noqa: B023  # called at once
                break
            come = interrupted(lambda: protocol.on_timer(0.0), again)  # noqa: B023  # likewise
            protocol.on_timer(0.0)
            assert consistent(protocol), (interrupt.at, again)
            if not come:
                break
            twice += 1
        else:
            pytest.fail("the repair has too many points")
    assert twice > 100 / every / then


def test_an_observer_stores_the_start_of_an_interrupted_send_only_if_the_message_is_admitted() -> None:
    kept = []
    for interrupt in each_interrupt(least=15):
        protocol, _ = started()
        protocol.admission.observer = Watch()
        interrupt(lambda: protocol.admission.send(b"abc", "", "q", 0.0))  # noqa: B023  # called at once
        protocol.on_timer(0.0)
        assert set(protocol.admission.observer.began) == ({4} if protocol.unsettled == 4 else set())
        kept.append(protocol.unsettled == 4)
    assert True in kept
    assert False in kept


# The effects of an interrupted step on other senders: they stay in order, are admitted once, and are woken.


def fifo() -> Line:
    return FifoLine()


def weighted() -> Line:
    return WeightedLine({"b": 2.0})


LINES = [fifo, weighted]
#: The line, whether a callback is first, and whether there is unnoticed room: all pairs of values.
PAIRS = [(fifo, False, False), (fifo, True, True), (weighted, False, True), (weighted, True, False)]


def crowd(line: Line, *, first: bool = False, **settings: Any) -> tuple[ProducerProtocol, list[SendTicket]]:
    """Return a producer with a full window, and the tickets of waiting messages."""
    protocol = make(line=line, **{"capacity": 2, "capacity_bytes": 1000} | settings)
    send(protocol, b"1")
    send(protocol, b"2")
    drain(protocol)
    tickets = [wait(protocol, b"%d" % number, waiter=number, source="ab"[number % 2]) for number in (3, 4, 5, 6)]
    if first:
        tickets.insert(0, place(protocol, b"callback", 0.0, waiter="callback", first=True))
    protocol.reports.wake.clear()
    return protocol, tickets


def bodies_of(tickets: list[SendTicket]) -> list[bytes]:
    return sorted(ticket.payload for ticket in tickets if isinstance(ticket.payload, bytes))


def all_get_out(protocol: ProducerProtocol, tickets: list[SendTicket]) -> list[bytes]:
    """Confirm until no message waits.

    Returns:
        The bodies that the broker got, in order.
    """
    seen = Wire()
    for step in range(20):
        seen.read(drain(protocol))
        protocol.on_ack(0, True, 5.0 + step)
    assert protocol.controller.waiting == protocol.unsettled == protocol.window.used == 0
    assert protocol.limits.byte_window is not None
    assert protocol.limits.byte_window.used == 0
    assert not protocol.gate.holds
    assert protocol.gate.is_open == (protocol.closed is None)
    assert all(ticket.decided for ticket in tickets)
    for ticket in tickets:
        assert ticket.cancelled or ticket.waiter in protocol.reports.wake
    return [message.body for message in seen.messages]


# The new capacity admits one message, some of them, or all of them.
@pytest.mark.parametrize(
    ("line", "first", "capacity"),
    [
        (fifo, False, 3),
        (fifo, True, 4),
        (fifo, True, 9),
        (weighted, True, 3),
        (weighted, False, 4),
        (weighted, True, 9),
    ],
)
def test_admitting_waiting_senders_skips_none_of_them_if_ctrl_c_comes_at_any_line(
    line: Callable[[], Line], first: bool, capacity: int
) -> None:
    for interrupt in each_interrupt(least=40, every=EVERY):
        protocol, tickets = crowd(line(), first=first)
        interrupt(lambda: protocol.set_capacity(capacity, 1.0))  # noqa: B023  # called at once
        bodies = all_get_out(protocol, tickets)
        assert sorted(bodies) == bodies_of(tickets)
        if first:
            assert bodies[0] == b"callback"
        if line is fifo:
            assert bodies[first:] == [b"3", b"4", b"5", b"6"]


@pytest.mark.parametrize(("line", "first", "room"), PAIRS)
def test_a_waiting_send_that_is_interrupted_is_no_longer_in_the_waiting_line(
    line: Callable[[], Line], first: bool, room: bool
) -> None:
    for interrupt in each_interrupt(least=20, every=EVERY):
        protocol, tickets = crowd(line())
        if room:
            # There is room, which no step has noticed yet.
            protocol.window.capacity = 9
        come = interrupt(lambda: place(protocol, b"own", 1.0, waiter="own", first=first))  # noqa: B023  # called at once
        own = sum(receipt.message.body == b"own" for receipt in protocol.unsettled_receipts)
        bodies = all_get_out(protocol, tickets)
        if come:
            # It was admitted before the interrupt, or never.
            assert bodies.count(b"own") == own
        else:
            assert b"own" in bodies
        assert sorted(body for body in bodies if body != b"own") == [b"3", b"4", b"5", b"6"]


@pytest.mark.parametrize(("line", "first", "room"), PAIRS)
def test_a_waiting_send_is_withdrawn_even_if_ctrl_c_interrupts_the_withdrawal(
    line: Callable[[], Line], first: bool, room: bool
) -> None:
    for interrupt in each_interrupt(least=10, every=EVERY):
        protocol, tickets = crowd(line(), first=first)
        if room:
            protocol.window.capacity = 9
        gone, *others = tickets
        come = interrupt(lambda: protocol.line.give_up(gone, 1.0))  # noqa: B023  # called at once
        if come:
            # As the skins do.
            protocol.line.give_up(gone, 1.0)
        bodies = all_get_out(protocol, tickets)
        assert sorted(bodies) == bodies_of(others)


@pytest.mark.parametrize("again", [2, 3, 8, 21])
def test_a_second_ctrl_c_shortly_after_the_first_loses_no_waiting_sender(again: int) -> None:
    for interrupt in each_interrupt(least=10, every=EVERY):
        protocol, (gone, *others) = crowd(FifoLine())
        protocol.window.capacity = 9
        come = interrupt(lambda: protocol.line.give_up(gone, 1.0))  # noqa: B023  # called at once
        if come:
            assert interrupted(lambda: protocol.line.give_up(gone, 1.0), again)  # noqa: B023  # likewise
            protocol.line.give_up(gone, 1.0)
        assert sorted(all_get_out(protocol, [gone, *others])) == bodies_of(others)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("line", LINES)
def test_if_ctrl_c_interrupts_the_withdrawal_of_all_senders_each_sender_is_withdrawn_or_still_waits(
    line: Callable[[], Line], first: bool
) -> None:
    for interrupt in each_interrupt(least=10):
        protocol, tickets = crowd(line(), first=first)
        come = interrupt(lambda: protocol.line.give_up_all("ended", 1.0))  # noqa: B023  # called at once
        protocol.on_timer(1.0)
        stay = [ticket for ticket in tickets if ticket.error is None]
        assert protocol.controller.waiting == len(stay)
        assert {ticket.waiter for ticket in tickets if ticket.error is not None} <= set(protocol.reports.wake)
        assert sorted(all_get_out(protocol, tickets)) == bodies_of(stay)
        if not come:
            assert not stay


@pytest.mark.parametrize("first", [False, True])
def test_if_ctrl_c_interrupts_the_close_of_a_producer_the_end_of_the_connection_completes_the_close(
    first: bool,
) -> None:
    for interrupt in each_interrupt(least=10):
        protocol, tickets = crowd(FifoLine(), first=first)
        assert protocol.waiters.when_unflowed("unflowed", 1.0)
        interrupt(lambda: protocol.close("closed by hand", 1.0))  # noqa: B023  # called at once
        protocol.connection_lost("the producer is closed", 2.0)
        for ticket in tickets:
            assert isinstance(ticket.error, ProducerClosed)
            assert ticket.waiter in protocol.reports.wake
        assert "unflowed" in protocol.reports.wake
        assert protocol.controller.waiting == protocol.unsettled == protocol.window.used == 0
        with pytest.raises(ProducerClosed):
            protocol.admission.send(b"x", "", "q", 3.0)


@pytest.mark.parametrize("settings", [{"capacity": 1}, {"capacity": 2, "rate": 1.0}, {"capacity": 1, "rate": 1.0}])
def test_if_ctrl_c_interrupts_a_send_that_nearly_reaches_a_limit_no_needless_hold_remains(
    settings: dict[str, Any],
) -> None:
    for interrupt in each_interrupt(least=15):
        protocol = make(**settings)
        send(protocol, now=10.0)
        come = 0
        for now in (10.0, 10.0, 10.5, 11.5, 11.5, 20.0):
            come = interrupt(lambda: protocol.admission.send(b"x", "", "q", now))  # noqa: B023  # called at once
            drain(protocol, now)
            if come:
                break
            # The interrupt does not come at the first time, so that one kind of hold follows another.
            if now > 10.0:
                protocol.on_ack(0, True, now)
        protocol.on_ack(0, True, 30.0)
        protocol.on_timer(100.0)
        assert protocol.admission.send(b"x", "", "q", 100.0) is not None
        assert protocol.gate.is_open
        assert not protocol.gate.holds


# The same, but the interrupt always comes.


class Pressed(FifoLine):
    """A line with one interrupt, at one of its ends."""

    __slots__ = ("at",)

    def __init__(self, at: str = "") -> None:
        super().__init__()
        self.at = at

    def _press(self, at: str) -> None:
        if self.at == at:
            self.at = ""
            raise KeyboardInterrupt

    def push(self, ticket: Ticket) -> None:
        super().push(ticket)
        self._press("push")

    def pop(self) -> None:
        super().pop()
        self._press("pop")

    def clear(self) -> None:
        super().clear()
        self._press("clear")


@pytest.mark.parametrize("admitted", [False, True])
def test_a_waiting_sender_that_ctrl_c_interrupts_was_admitted_or_has_left_the_waiting_line(admitted: bool) -> None:
    line = Pressed()
    protocol, tickets = crowd(line)
    if admitted:
        protocol.window.capacity = 9
        for ticket in tickets:
            protocol.line.give_up(ticket, 0.0)
    line.at = "pop" if admitted else "push"
    with pytest.raises(KeyboardInterrupt):
        place(protocol, b"own", 1.0, waiter="own")
    protocol.on_timer(1.0)
    assert protocol.controller.waiting == (0 if admitted else 4)
    assert b"own" not in all_get_out(protocol, tickets)


def test_a_send_that_ctrl_c_interrupts_while_it_also_admits_other_senders_is_withdrawn() -> None:
    line = Pressed()
    protocol, (gone, *others) = crowd(line)
    protocol.window.capacity = 9
    line.at = "pop"
    with pytest.raises(KeyboardInterrupt):
        protocol.line.give_up(gone, 1.0)
    assert gone.cancelled
    assert all_get_out(protocol, others) == [b"4", b"5", b"6"]


def test_ctrl_c_while_all_waiting_senders_are_withdrawn_leaves_none_in_the_waiting_line() -> None:
    line = Pressed("clear")
    protocol, tickets = crowd(line)
    with pytest.raises(KeyboardInterrupt):
        protocol.line.give_up_all("ended", 1.0)
    assert all(isinstance(ticket.error, ProducerClosed) for ticket in tickets)
    assert protocol.reports.wake == [3, 4, 5, 6]
    assert all_get_out(protocol, tickets) == []


def test_a_waiting_message_whose_admission_ctrl_c_interrupts_is_admitted_and_reported_once() -> None:
    class Admitted(Admission):
        __slots__ = ()
        pressed = False

        def admit(self, *message: Any) -> None:
            super().admit(*message)
            if Admitted.pressed:
                Admitted.pressed = False
                raise KeyboardInterrupt

    protocol = make(capacity=1)
    protocol.admission.__class__ = Admitted
    first = send(protocol)
    ticket, after = wait(protocol, b"2", waiter="ticket"), wait(protocol, b"3", waiter="after")
    drain(protocol)
    Admitted.pressed = True
    with pytest.raises(KeyboardInterrupt):
        protocol.on_ack(1, False, 1.0)
    protocol.on_timer(1.0)
    assert first.delivered
    assert ticket.receipt is not None
    assert protocol.unsettled_receipts == (ticket.receipt,)
    assert protocol.reports.wake == ["ticket"]
    assert not after.decided
    # Also for the interrupted message, whose ticket is not in the test's list.
    protocol.window.capacity = 9
    protocol.line.give_up(after, 2.0)
    Admitted.pressed = True
    with pytest.raises(KeyboardInterrupt):
        place(protocol, b"own", 2.0, waiter="own")
    protocol.on_timer(2.0)
    assert [receipt.message.body for receipt in protocol.unsettled_receipts] == [b"2", b"own"]
    assert protocol.controller.waiting == 0


def test_a_send_that_ctrl_c_cancelled_does_not_replace_the_next_message_that_gets_the_same_number() -> None:
    class Interrupted(Admission):
        __slots__ = ()
        pressed = False

        def admit(self, *message: Any) -> None:
            if Interrupted.pressed:
                Interrupted.pressed = False
                raise KeyboardInterrupt
            super().admit(*message)

    protocol = make(capacity=1)
    protocol.admission.__class__ = Interrupted
    send(protocol)
    ticket = wait(protocol, b"2", waiter="ticket")
    for capacity, payload in ((2, b"callback"), (3, b"another")):
        Interrupted.pressed = True
        with pytest.raises(KeyboardInterrupt):
            protocol.set_capacity(capacity, 1.0)
        protocol.window.capacity = capacity
        first = place(protocol, payload, 1.0, waiter=payload, first=True)
        assert first.receipt is not None
        assert not ticket.decided
    protocol.set_capacity(9, 2.0)
    assert ticket.receipt is not None
    assert [receipt.message.body for receipt in protocol.unsettled_receipts] == [b"x", b"callback", b"another", b"2"]


def test_if_ctrl_c_interrupts_the_end_of_a_pause_at_any_line_waiting_senders_are_still_admitted() -> None:
    for interrupt in each_interrupt(least=20):
        protocol = make(capacity=2)
        protocol.hold("paused", 0.0)
        ticket = wait(protocol, b"waits", waiter="ticket")
        assert protocol.waiters.when_unflowed("unflowed", 0.0)
        interrupt(lambda: protocol.lift("paused", 1.0))  # noqa: B023  # called at once
        protocol.on_timer(1.0)
        if protocol.gate.holds:
            # The interrupt came before the step had begun.
            protocol.lift("paused", 2.0)
        assert ticket.receipt is not None
        assert set(protocol.reports.wake) == {"ticket", "unflowed"}
        assert protocol.gate.is_open


def test_an_interrupted_send_never_returns_the_id_of_another_message() -> None:
    for interrupt in each_interrupt(least=15):
        protocol = make()
        # As after 254 messages.
        protocol.admission.next_number = 255
        protocol.window.used = 0
        send(protocol)
        interrupt(lambda: protocol.admission.send(b"x", "", "q", 0.0))  # noqa: B023  # called at once
        send(protocol)
        protocol.admission.send(b"y", "", "q", 0.0)
        published = Wire().read(drain(protocol)).messages
        receipts = protocol.unsettled_receipts
        assert [each.properties.message_id for each in published] == [receipt.message_id for receipt in receipts]


# A message has a delivery tag if and only if it is on the wire.

BODIES = (b"1", b"2" * 2 * MAX_BODY, b"3", b"4", b"5" * 3 * MAX_BODY, b"6")


def make_frames(protocol: ProducerProtocol) -> None:
    protocol.data_to_write(2 * MAX_BODY)


def stop(protocol: ProducerProtocol) -> None:
    protocol.on_flow(False, 0.0)


@pytest.mark.parametrize("written", [0, 300, 3 * MAX_BODY])
@pytest.mark.parametrize("second", [0, 2, 20])
@pytest.mark.parametrize("step", [make_frames, stop])
def test_every_message_is_written_once_and_in_order_even_if_ctrl_c_interrupts_any_producer_method(
    step: Callable[[ProducerProtocol], None], second: int, written: int
) -> None:
    for interrupt in each_interrupt(least=3, every=EVERY):
        protocol = make()
        receipts = [send(protocol, body) for body in BODIES]
        read = Wire().read(write(protocol, written))
        interrupt(lambda: step(protocol), again=second)  # noqa: B023  # called at once
        protocol.on_timer(0.0)
        if protocol.is_stopped:
            protocol.on_flow(True, 0.0)
        assert consistent(protocol), interrupt.at
        read.read(drain(protocol))
        assert [message.body for message in read.messages] == list(BODIES), interrupt.at
        assert [receipt._tag for receipt in receipts] == [1, 2, 3, 4, 5, 6], interrupt.at
        protocol.on_ack(6, True, 0.0)
        assert all(receipt.delivered for receipt in receipts)
        assert protocol.window.used == protocol.unwritten == 0


@pytest.mark.parametrize(
    "payloads",
    [
        [b"%d" % number for number in range(4)],
        [b"x" * number for number in range(1, 5)],
        [Message(b"%d" % number, priority=1) for number in range(4)],
    ],
    ids=["equal", "different", "with properties"],
)
def test_messages_have_their_own_ids_even_if_ctrl_c_comes_while_their_frames_are_made(
    payloads: Sequence[bytes | Message],
) -> None:
    for interrupt in each_interrupt(least=15):
        protocol = make()
        # The digits of the third id differ from those of the second in more than the last two places.
        protocol.admission.next_number = 254
        receipts = [send(protocol, payload) for payload in payloads]
        interrupt(lambda: make_frames(protocol))  # noqa: B023  # called at once
        protocol.on_timer(0.0)
        assert consistent(protocol), interrupt.at
        messages = wire(drain(protocol)).messages
        assert [each.body for each in messages] == [each.message.body for each in receipts], interrupt.at
        assert [each.properties.message_id for each in messages] == [each.message_id for each in receipts]


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Outbound, "put"),
        (Outbound, "put_control"),
        (Outbound, "discard_unbegun"),
        (Outbound, "advance"),
        (Resending, "put_back"),
    ],
)
def test_a_producer_method_that_raises_memory_error_leaves_no_message_lost_or_repeated(
    kind: type[Any], name: str, done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol = make()
    for body in BODIES[:4]:
        send(protocol, body)
    write(protocol, 300)
    reconnect(protocol)
    for body in BODIES[4:]:
        send(protocol, body)
    # On the wire are two second copies. One of them has begun.
    read = Wire().read(write(protocol, 10))
    step = getattr(kind, name)
    failed: list[str] = []

    def fail_once(*arguments: Any) -> Any:
        if failed:
            return step(*arguments)
        failed.append(name)
        if done:
            step(*arguments)
        raise MemoryError

    monkeypatch.setattr(kind, name, fail_once)
    taken: list[bytes] = []

    def stop_and_write() -> None:
        protocol.on_flow(False, 0.0)
        protocol.on_flow(True, 0.0)
        while data := protocol.data_to_write(100):
            taken.append(data)
            protocol.advance(len(data), 0.0)

    with pytest.raises(MemoryError):
        stop_and_write()
    read.read(b"".join(taken[:-1] if name == "advance" and not done else taken))
    protocol.on_timer(0.0)
    if protocol.is_stopped:
        protocol.on_flow(True, 0.0)
    assert consistent(protocol)
    read.read(drain(protocol))
    assert [message.body for message in read.messages] == list(BODIES)
    assert list(protocol.parts.unconfirmed.flight) == [1, 2, 3, 4, 5, 6]


def test_messages_too_large_for_a_new_channel_end_as_failed_or_unknown_even_if_ctrl_c_interrupts_its_opening() -> None:
    for interrupt in each_interrupt(least=100, every=EVERY):
        protocol = make()
        protocol.reports.settled = []
        large = Message(b"large", headers={"k": "x" * 1000})
        written = publish(protocol, large)
        unwritten = [send(protocol, large), send(protocol, b"small")]
        protocol.connection_lost("gone", 1.0, reconnects=True)
        interrupt(lambda: protocol.channel_opened(CHANNEL, 512, 2.0))  # noqa: B023  # called at once
        protocol.on_timer(2.0)
        if protocol.channel.number is None:
            # The interrupt came before the step had begun.
            protocol.channel_opened(CHANNEL, 512, 2.0)
        assert [each.outcome for each in (written, *unwritten)] == [Outcome.UNKNOWN, Outcome.FAILED, None], interrupt.at
        assert protocol.take_settled(3.0) == [written, unwritten[0]]
        assert consistent(protocol)
