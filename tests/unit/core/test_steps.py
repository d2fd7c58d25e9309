"""E2: every step can be interrupted at every point. The next step repairs the state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from qflow_client import FlowEventKind, Message, Receipt
from qflow_client.amqp.frames import PublishEncoder
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.sendline import SendLine
from qflow_client.core.unconfirmed import Unconfirmed
from qflow_client.receipt import Outcome
from qflow_client.recovery import Backoff
from tests.effort import EFFORT
from tests.interrupting import EVERY, each_interrupt, pressed_in

from .support import CHANNEL, FRAME_MAX, Wire, drain, make, publish, reconnect, returned, send, wait, wire, write
from .test_store import Store, attached


class Watch:
    """Counts how often each message is observed as settled."""

    def __init__(self) -> None:
        self.began: dict[int, float] = {}
        self.peer: tuple[str, int] | None = None
        self.seen: list[Receipt] = []

    def settled(self, receipts: Sequence[Receipt], now: float) -> None:
        self.seen += receipts

    def spilled(self, payload: bytes | Message, receipt: Receipt) -> None: ...

    def failed_on_disk(self, receipt: Receipt) -> None: ...

    def record(self, *, now: float) -> None: ...


class Life:
    """A producer with much state, and the messages that the broker gets from it.

    Four messages are written. The third is returned. The next has begun, and another one has not. Two senders
    wait.

    Args:
        told: True if every receipt is reported, False if only failures are kept.
        settings: of the producer.
    """

    def __init__(self, told: bool, **settings: Any) -> None:
        self.protocol = protocol = make(capacity=6, capacity_bytes=1000, **settings)
        self.holds = set(protocol.gate.holds)
        protocol.reports.events = []
        protocol.reports.settled = [] if told else None
        self.store = Store()
        protocol.attach_store(self.store, 0.0)
        self.watch = protocol.admission.observer = Watch()
        self.receipts = [send(protocol, b"1"), send(protocol, b"2"), send(protocol, Message(b"3", message_id="own"))]
        self.receipts.append(send(protocol, b"4"))
        size = protocol.unwritten
        self.receipts += [send(protocol, b"5"), send(protocol, b"6")]
        self.tickets = [wait(protocol, b"%d" % number, waiter=number) for number in (7, 8)]
        self.now = 1.0
        self.bodies: list[bytes] = []
        self.wire = Wire().read(write(protocol, size + 10))
        returned(protocol, "own")

    def end(self) -> None:
        """Let the broker confirm everything, on another channel if this one has ended."""
        protocol = self.protocol
        quiet = 0
        while quiet < 3 and self.now < 200.0:
            before = len(self.wire.seen)
            self.now += 10.0
            protocol.on_timer(self.now)
            if protocol.is_stopped:
                protocol.on_flow(True, self.now)
            if protocol.channel.number is None and protocol.wants_channel:
                self.take_wire()
                protocol.channel_opened(CHANNEL, FRAME_MAX, self.now)
            self.wire.read(drain(protocol, self.now))
            if protocol.written:
                protocol.on_ack(0, True, self.now)
            quiet = quiet + 1 if not protocol.unsettled and len(self.wire.seen) == before else 0
        self.take_wire()

    def take_wire(self) -> None:
        """Record the messages that the broker has got on a channel."""
        self.bodies += [message.body for message in self.wire.messages if len(message.body) == message.body_size]
        self.wire = Wire()

    def check(self) -> None:
        """Check that all messages are settled and reported once, in order of first copies, and that no room is used."""
        protocol = self.protocol
        receipts = self.receipts + [ticket.receipt for ticket in self.tickets if ticket.receipt is not None]
        assert all(ticket.decided for ticket in self.tickets)
        assert {ticket.waiter for ticket in self.tickets} <= set(protocol.reports.wake)
        assert all(receipt._outcome is not None for receipt in receipts)
        assert not protocol.unsettled_receipts
        assert protocol.window.used == protocol.unwritten == protocol.controller.waiting == 0
        assert protocol.limits.byte_window is not None
        assert protocol.limits.byte_window.used == 0
        assert not protocol.parts.returns.by_id
        assert not self.store.kept
        assert self.reported_holds() == {hold.kind for hold in protocol.gate.holds}
        reported: Iterable[Receipt] | None = protocol.reports.settled
        if reported is None:
            reported, receipts = protocol.reports.failures, [each for each in receipts if each._failed]
        assert sorted(map(id, reported)) == sorted(map(id, receipts))
        assert len(self.watch.seen) == len(set(self.watch.seen))
        firsts = list(dict.fromkeys(self.bodies))
        assert firsts == sorted(firsts)

    def reported_holds(self) -> set[str]:
        """Return the kinds of the holds that are left after all flow events. Each must be raised and lifted in turn."""
        held = {hold.kind for hold in self.holds}
        for event in self.protocol.reports.events or ():
            assert event.hold is not None
            is_raised = event.kind in (FlowEventKind.FLOWED, FlowEventKind.HOLD_RAISED)
            assert (event.hold.kind in held) is not is_raised, event
            held ^= {event.hold.kind}
        return held


def _open_again(life: Life) -> None:
    life.take_wire()
    life.protocol.channel_opened(CHANNEL, FRAME_MAX, 2.0)


def _lose(life: Life) -> None:
    life.protocol.connection_lost("lost", 1.0, reconnects=True)


def _lose_and_open(life: Life) -> None:
    _lose(life)
    _open_again(life)


def _probe(life: Life) -> None:
    life.protocol.on_nack(4, True, 1.0)
    life.protocol.on_timer(3.0)
    _write(life)


def _lose_and_expire(life: Life) -> None:
    life.protocol.on_timer(0.5)
    _lose(life)
    life.protocol.on_timer(9.0)


def _stop_and_go(life: Life) -> None:
    life.protocol.on_flow(False, 1.0)
    life.protocol.on_flow(True, 1.0)


def _write(life: Life) -> None:
    while data := life.protocol.data_to_write(1 << 20):
        life.wire.read(data)
        life.protocol.advance(len(data), 1.0)


PATIENT: dict[str, Any] = {"retries": Backoff(1.0, 8.0, 0.0), "retry_for": 15.0}

STEPS: dict[str, tuple[Callable[[Life], object], dict[str, Any]]] = {
    "ack run": (lambda life: life.protocol.on_acks([(1, 4)], 1.0), {}),
    "acks one by one": (lambda life: life.protocol.on_acks([(3, 4)], 1.0), {}),
    "ack": (lambda life: life.protocol.on_ack(3, True, 1.0), {}),
    "nack": (lambda life: life.protocol.on_nack(4, True, 1.0), {}),
    "refuse": (lambda life: life.protocol.on_nack(4, True, 1.0), PATIENT),
    "probe": (
        _probe,
        PATIENT | {"retry_for": 1e9},
    ),
    "expire": (lambda life: (life.protocol.on_nack(4, True, 1.0), life.protocol.on_timer(20.0)), PATIENT),
    "stop": (_stop_and_go, {}),
    "lose": (_lose, {}),
    "lose and open": (_lose_and_open, {}),
    "lose and fail": (_lose, {"on_disconnect": "fail"}),
    "channel closed": (lambda life: life.protocol.channel_closed(404, "NOT_FOUND", (60, 40), 1.0), {}),
    "no room": (lambda life: life.protocol.channel_closed(506, "NO_ROOM", (60, 40), 1.0), PATIENT),
    "no room, too late": (
        lambda life: life.protocol.channel_closed(506, "NO_ROOM", (60, 40), 1.0),
        PATIENT | {"retry_for": 0.0},
    ),
    "closed and failed": (
        lambda life: life.protocol.channel_closed(404, "NOT_FOUND", (60, 40), 1.0),
        {"on_disconnect": "fail"},
    ),
    "deliver in time": (
        lambda life: (life.protocol.on_timer(0.5), life.protocol.on_timer(9.0)),
        {"delivery_timeout": 8.0},
    ),
    "lose, and deliver in time": (
        _lose_and_expire,
        {"delivery_timeout": 8.0},
    ),
    "end": (lambda life: life.protocol.connection_lost("the end", 1.0), {}),
    "withdraw": (lambda life: life.protocol.withdraw(life.receipts[-1], 1.0), {}),
    "capacity": (lambda life: life.protocol.set_capacity(8, 1.0), {}),
    "hold and lift": (lambda life: (life.protocol.hold("paused", 1.0), life.protocol.lift("paused", 1.0)), {}),
}


@pytest.mark.parametrize("told", [True, False], ids=["all receipts", "failures"])
@pytest.mark.parametrize("name", STEPS)
def test_E2_every_message_is_settled_and_reported_once_even_if_ctrl_c_interrupts_any_producer_method(
    name: str, told: bool
) -> None:
    step, settings = STEPS[name]
    # A producer that keeps only failures differs only in its reports. In CI each third place is enough for it.
    for interrupt in each_interrupt(least=10, every=EVERY if told or EFFORT != "ci" else 3):
        life = Life(told, **settings)
        interrupt(lambda: step(life))  # noqa: B023  # called at once
        life.protocol.lift("paused", 1.0)
        life.end()
        if name == "withdraw" and life.receipts[-1]._outcome is Outcome.FAILED:
            # The outcome is reported only to the caller.
            del life.receipts[-1]
        life.check()


@pytest.mark.parametrize(
    "follow",
    [
        lambda protocol: protocol.on_acks([(1, 4)], 1.0),
        lambda protocol: protocol.advance(0, 1.0),
        lambda protocol: protocol.data_to_write(1),
    ],
    ids=["acks", "advance", "write"],
)
def test_E2_the_next_call_of_any_producer_method_completes_a_call_that_ctrl_c_interrupted(
    follow: Callable[[ProducerProtocol], object],
) -> None:
    life = Life(told=False)
    # The window is set, but the rest of the call has not been done.
    with pressed_in(SendLine, "grant"):
        life.protocol.set_capacity(8, 1.0)
    assert not any(ticket.decided for ticket in life.tickets)
    follow(life.protocol)
    assert all(ticket.decided for ticket in life.tickets)
    life.end()
    life.check()


def test_a_message_encoded_for_a_lost_channel_is_encoded_again_for_the_next_channel() -> None:
    protocol = make()
    send(protocol, b"1")
    protocol.parts.unconfirmed.encoder = PublishEncoder(CHANNEL, FRAME_MAX, id_prefix="p-", mandatory=True)
    assert wire(drain(protocol)).short == [b"1"]


def test_E2_if_ctrl_c_interrupts_the_handling_of_a_basic_return_the_message_still_settles_as_returned() -> None:
    for interrupt in each_interrupt(least=10, every=EVERY):
        life = Life(told=False)
        message = Message(b"again", message_id="again")
        for ticket in life.tickets:
            life.protocol.line.give_up(ticket, 1.0)
        life.protocol.on_ack(4, True, 1.0)
        receipt = send(life.protocol, message)
        drain(life.protocol)
        interrupt(lambda: returned(life.protocol, "again"))  # noqa: B023  # called at once
        returned(life.protocol, "again")
        life.protocol.on_ack(0, True, 1.0)
        assert receipt._outcome is Outcome.RETURNED


def test_E2_a_retry_that_ctrl_c_interrupts_before_it_is_written_is_written_by_the_next_call() -> None:
    protocol = make(retries=Backoff(1.0, 8.0, 0.0), retry_for=1e9)
    publish(protocol, b"refused")
    protocol.on_nack(1, False, 0.0)
    protocol.on_timer(1.0)
    with pressed_in(Unconfirmed, "make"):
        protocol.data_to_write(1 << 20)
    assert [message.body for message in wire(drain(protocol, 1.0)).messages] == [b"refused"]


def test_E2_a_flush_does_not_wait_for_a_message_whose_admission_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(told=False)
    life.end()

    def refuse(*_: object) -> None:
        raise ValueError("no room")

    monkeypatch.setattr(life.store, "admitting", refuse)
    with pytest.raises(ValueError, match="no room"):
        life.protocol.admission.send(b"x", "", "q", life.now)
    assert not life.protocol.waiters.when_flushed("me")
    assert not life.protocol.waiters.when_settled("me")


@pytest.mark.parametrize("told", [True, False])
def test_a_message_whose_admission_failed_is_settled_and_reported(told: bool) -> None:
    protocol = make()
    protocol.reports.settled = [] if told else None
    admitted = send(protocol)
    receipt = Receipt(b"x", admitted._route, None)
    protocol.reports.logs.clear()
    assert protocol.reports.is_empty
    receipt._waiter = "waiter" if told else None
    protocol.reports.settle_unadmitted(receipt, Outcome.FAILED)
    assert protocol.reports.wake == ["waiter"] * told
    assert (protocol.reports.settled if told else protocol.reports.take_failures()) == [receipt]
    assert protocol.unsettled == 1


def test_a_half_written_message_cannot_be_withdrawn() -> None:
    protocol = make()
    receipt = send(protocol, b"1")
    begun = write(protocol, 1)
    assert not protocol.withdraw(receipt, 0.0)
    assert wire(begun + drain(protocol)).short == [b"1"]


def test_E2_ctrl_c_leaves_no_hold_for_unwritten_bytes_if_the_socket_has_accepted_all_bytes() -> None:
    for interrupt in each_interrupt(least=10):
        protocol = make(max_unwritten_bytes=100)
        send(protocol, bytes(200))
        ticket = wait(protocol, b"waits")
        interrupt(lambda: drain(protocol))  # noqa: B023  # called at once
        protocol.on_timer(1.0)
        drain(protocol)
        assert ticket.receipt is not None
        assert protocol.gate.is_open


def test_E2_ctrl_c_leaves_no_hold_for_receipt_callbacks_that_have_finished() -> None:
    lifted = 0
    for interrupt in each_interrupt(least=5):
        protocol = make(capacity=2)
        protocol.reports.settled = []
        for tag in (1, 2, 3):
            publish(protocol)
            protocol.on_ack(tag, False, 0.0)
        assert len(protocol.take_settled(0.0)) == 3
        assert protocol.gate.is_held_by("capacity")
        interrupt(lambda: protocol.reported(3, 0.0))  # noqa: B023  # called at once
        protocol.on_timer(1.0)
        assert protocol.gate.is_open is (protocol.parts.unreported.count == 0)
        lifted += protocol.gate.is_open
    assert lifted > 5


@pytest.mark.parametrize("lose", [_lose, lambda life: life.protocol.channel_closed(541, "ERROR", (0, 0), 1.0)])
def test_E2_if_ctrl_c_interrupts_the_loss_of_a_channel_either_all_or_none_of_its_holds_are_lifted(
    lose: Callable[[Life], object],
) -> None:
    for interrupt in each_interrupt(least=10, every=EVERY):
        life = Life(told=False)
        protocol = life.protocol
        protocol.on_flow(False, 1.0)
        protocol.on_blocked("memory", 1.0)
        come = interrupt(lambda: lose(life))  # noqa: B023  # called at once
        protocol.on_timer(1.0)
        ended = protocol.channel.number is None
        assert {str(hold.kind) for hold in protocol.gate.holds} - {"capacity"} == (
            {"disconnected"} if ended else {"channel_flow", "connection_blocked"}
        )
        if not come:
            assert ended


def test_E2_a_withdrawal_that_ctrl_c_interrupts_is_completed_by_a_second_call() -> None:
    for interrupt in each_interrupt(least=10):
        protocol = make()
        receipt = send(protocol)
        interrupt(lambda: protocol.withdraw(receipt, 0.0))  # noqa: B023  # called at once
        assert protocol.withdraw(receipt, 0.0)
        assert (receipt._outcome, protocol.unsettled, drain(protocol)) == (Outcome.FAILED, 0, b"")


def test_E2_even_if_ctrl_c_interrupts_its_end_the_time_of_a_block_does_not_count_for_retry_for() -> None:
    for interrupt in each_interrupt(least=10):
        protocol = make(retries=Backoff(1.0, 8.0, 0.0), retry_for=15.0)
        receipt = publish(protocol)
        protocol.on_nack(1, False, 0.0)
        protocol.on_blocked("memory", 1.0)
        interrupt(lambda: protocol.on_unblocked(100.0))  # noqa: B023  # called at once
        protocol.hold("paused", 100.0)
        if protocol.is_stopped:
            protocol.on_unblocked(100.0)
        protocol.on_timer(110.0)
        assert receipt.outcome is None, "it was tried again for 11 of 15 seconds"


def test_E2_ctrl_c_while_a_nack_is_handled_loses_no_message() -> None:
    for interrupt in each_interrupt(least=10, every=EVERY):
        protocol = make(retries=Backoff(1.0, 8.0, 0.0), retry_for=1e9)
        receipts = [send(protocol) for _ in range(3)]
        drain(protocol)
        interrupt(lambda: protocol.on_nack(3, True, 0.0))  # noqa: B023  # called at once
        # A skin ends the connection, because the answer may be lost.
        reconnect(protocol)
        for now in range(1, 20):
            due = protocol.next_timer(float(now))
            if due is not None and due <= now:
                protocol.on_timer(float(now))
            drain(protocol, float(now))
            protocol.on_ack(0, True, float(now))
        assert {receipt._outcome for receipt in receipts} == {Outcome.CONFIRMED}
        assert protocol.gate.is_open


def test_E2_if_ctrl_c_interrupts_the_end_of_the_producer_all_messages_are_still_settled() -> None:
    for interrupt in each_interrupt(least=10, every=EVERY):
        life = Life(told=False)
        protocol = life.protocol
        interrupt(lambda: protocol.connection_lost("closed", 1.0))  # noqa: B023  # called at once
        has_begun = protocol.channel.is_over
        protocol.on_timer(1.0)
        if has_begun:
            assert protocol.closed is not None
            assert protocol.unsettled == 0


def test_E2_receipts_whose_fetch_was_interrupted_are_fetched_again_by_the_next_call() -> None:
    for interrupt in each_interrupt(least=5):
        protocol = make(capacity=2)
        protocol.reports.settled = []
        receipts = []
        for tag in (1, 2, 3):
            receipts.append(send(protocol))
            drain(protocol)
            protocol.on_ack(tag, False, 0.0)
        taken = []
        interrupt(lambda: taken.extend(protocol.take_settled(0.0)))  # noqa: B023  # called at once
        taken += protocol.take_settled(0.0)
        assert taken == receipts


def test_E2_a_first_channel_whose_opening_ctrl_c_interrupts_counts_as_opened_only_if_it_is_open() -> None:
    for interrupt in each_interrupt(least=10):
        protocol = make(opened=False)
        interrupt(lambda: protocol.channel_opened(CHANNEL, FRAME_MAX, 0.0))  # noqa: B023  # called at once
        protocol.on_timer(0.0)
        assert protocol.channel.was_open is (protocol.channel.number is not None)


def test_no_retry_timer_is_set_while_a_nacked_message_waits_for_the_disk() -> None:
    protocol, store = attached(retries=Backoff(1.0, 8.0, 0.0), retry_for=2.0)
    refused = publish(protocol)
    protocol.on_nack(1, False, 0.0)
    # As for messages that were on their way to the disk.
    protocol.lift("refused", 0.0)
    send(protocol)
    protocol.on_timer(2.0)
    assert refused.outcome is Outcome.NACKED
    assert protocol.next_timer(2.0) == 1.0
    store.kept_back = 0
    assert protocol.next_timer(2.0) is None


def stop(protocol: ProducerProtocol) -> None:
    protocol.on_flow(False, 0.0)


@pytest.mark.parametrize("then", [drain, stop])
@pytest.mark.parametrize(
    "payloads",
    [
        [],
        [b"plain"],
        [Message(b"1", priority=1)],
        [Message(b"1", priority=1), b"2"],
        [Message(b"x" * 2 * FRAME_MAX, priority=1)],
    ],
    ids=["none", "a plain message", "one message", "two messages", "several frames"],
)
def test_take_output_has_the_same_effect_as_writing_all_output(
    payloads: list[bytes | Message], then: Callable[[ProducerProtocol], object]
) -> None:
    protocol, twin = make(), make()
    for each in protocol, twin:
        for payload in payloads:
            send(each, payload)
        then(each)
        for payload in payloads:
            send(each, payload) if not each.is_stopped else wait(each, payload)
    taken = b""
    while data := protocol.take_output(1.0):
        taken += data
    assert taken == drain(twin)
    assert protocol.take_output(1.0) == b""
    for each in protocol, twin:
        assert each.steps.now == (1.0 if each is protocol else 0.0)
        each.on_flow(True, 2.0)
    assert (protocol.written, protocol.in_flight, protocol.unwritten) == (twin.written, twin.in_flight, twin.unwritten)
    assert drain(protocol) == drain(twin)
    assert list(protocol.parts.unconfirmed.flight) == list(twin.parts.unconfirmed.flight)


def test_E2_ctrl_c_while_the_output_is_taken_leaves_each_message_either_unsent_or_written() -> None:
    written = []
    for interrupt in each_interrupt(least=2):
        protocol = make()
        receipt = send(protocol, Message(b"1", priority=1))
        interrupt(lambda: protocol.take_output(0.0))  # noqa: B023  # called at once
        written.append(protocol.written)
        assert bool(protocol.take_output(0.0)) != bool(written[-1])
        assert list(protocol.parts.unconfirmed.flight) == [1]
        assert not protocol.admission.unsent
        assert protocol.unwritten == 0
        protocol.on_ack(1, False, 0.0)
        assert receipt.delivered
        assert protocol.unsettled == 0
    assert written == sorted(written)
    assert set(written) == {0, 1}
