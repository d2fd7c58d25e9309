"""A flow controller for senders that wait for admission. It never exceeds its limit, and admits in order (F4)."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qflow_client.flow import (
    CompositeLimiter,
    FifoLine,
    FlowController,
    FlowSource,
    Gate,
    Limiter,
    RateLimiter,
    SizeLimiter,
    Ticket,
    WeightedLine,
    WindowLimiter,
)


def kinds(controller: FlowController) -> list[str]:
    return [hold.kind for hold in controller.gate.holds]


def occupied(limiter: Limiter, *sizes: int) -> FlowController:
    """Return a controller that has admitted elements of these sizes."""
    controller = FlowController(limiter)
    for size in sizes:
        assert controller.try_acquire(size, 0.0)
    return controller


def line_up(controller: FlowController, *sizes: int, now: float = 0.0) -> list[Ticket]:
    tickets = [Ticket(size) for size in sizes]
    for ticket in tickets:
        controller.stand_in_line(ticket, now)
    return tickets


def test_F8_try_acquire_admits_elements_as_long_as_there_is_room() -> None:
    controller = FlowController(WindowLimiter(2), name="orders")
    assert controller.try_acquire(1, 0.0)
    assert controller.try_acquire(1, 0.0)
    assert controller.gate.is_open, "it is full, but nobody was refused"
    assert controller.waiting == 0
    assert controller.name == "orders"


def test_a_limiter_without_room_for_an_element_closes_the_gate_and_its_kind_is_the_kind_of_the_hold() -> None:
    controller = occupied(WindowLimiter(1, kind="capacity"), 1)
    assert not controller.try_acquire(1, 1.0)
    assert kinds(controller) == ["capacity"]
    assert controller.gate.closed_since == 1.0
    controller.release(1)
    assert controller.try_acquire(1, 2.0)
    assert controller.gate.is_open
    assert controller.gate.seconds_held(2.0) == {"capacity": 1.0}


def test_F4_a_later_element_does_not_overtake_a_waiting_element() -> None:
    controller = occupied(WindowLimiter(1), 1)
    first, second = line_up(controller, 1, 1)
    controller.release(1)
    assert not controller.try_acquire(1, 1.0), "there is room, but it is not this one's turn"
    assert controller.grant(1.0) is first
    assert controller.grant(1.0) is None
    controller.release(1)
    assert controller.grant(1.0) is second
    controller.release(1)
    assert controller.grant(1.0) is None
    assert controller.try_acquire(1, 1.0)


def test_F4_a_small_element_that_fits_does_not_overtake_a_waiting_large_element() -> None:
    controller = occupied(SizeLimiter(10), 6)
    large, small = line_up(controller, 5, 1)
    assert controller.grant(0.0) is None
    controller.release(6)
    assert [controller.grant(0.0), controller.grant(0.0)] == [large, small]


def test_when_the_first_waiting_element_is_withdrawn_the_element_after_it_is_admitted_next() -> None:
    controller = occupied(SizeLimiter(10), 6)
    large, small = line_up(controller, 5, 1)
    controller.leave_line(large)
    assert controller.waiting == 1
    assert controller.grant(1.0) is small
    assert controller.gate.is_open
    assert controller.waiting == 0


def test_a_controller_whose_gate_has_a_hold_of_another_kind_admits_nothing() -> None:
    controller = FlowController(WindowLimiter(5))
    controller.gate.hold("paused", now=0.0)
    assert not controller.try_acquire(1, 0.0)
    (ticket,) = line_up(controller, 1)
    assert controller.grant(0.0) is None
    assert kinds(controller) == ["paused"], "there is room, so the limiter has no hold"
    assert controller.ready_at(0.0) is None, "time does not lift it"
    controller.gate.lift("paused", now=1.0)
    assert controller.grant(1.0) is ticket


def test_the_hold_of_a_full_limiter_begins_and_ends_independently_of_other_holds() -> None:
    controller = occupied(WindowLimiter(1), 1)
    (ticket,) = line_up(controller, 1)
    controller.gate.hold("paused", now=1.0)
    assert kinds(controller) == ["capacity", "paused"]
    controller.release(1)
    assert controller.grant(2.0) is None
    assert kinds(controller) == ["paused"]
    controller.gate.lift("paused", now=3.0)
    assert controller.grant(3.0) is ticket
    assert controller.gate.is_open


def test_try_acquire_lifts_the_outdated_hold_of_the_limiter_even_if_the_gate_has_another_hold() -> None:
    controller = occupied(WindowLimiter(1), 1)
    controller.try_acquire(1, 0.0)
    controller.gate.hold("paused", now=1.0)
    controller.release(1)
    assert not controller.try_acquire(1, 2.0)
    assert kinds(controller) == ["paused"]


def test_the_hold_of_one_limiter_replaces_the_hold_of_another_without_opening_the_gate() -> None:
    rate = RateLimiter(1.0)
    controller = FlowController(CompositeLimiter([WindowLimiter(1), rate]))
    seen: list[bool] = []
    controller.gate.observer = lambda hold, raised, now: seen.append(controller.gate.is_open)
    controller.try_acquire(1, 0.0)
    line_up(controller, 1)
    assert kinds(controller) == ["capacity"]
    controller.release(1)
    assert controller.grant(0.5) is None
    assert kinds(controller) == ["rate"]
    assert controller.gate.closed_since == 0.0
    assert seen == [False, False, False]
    assert controller.grant(1.0) is not None
    assert kinds(controller) == ["capacity"], "it is full again"
    controller.release(1)
    assert controller.grant(2.0) is None
    assert seen == [False] * 5 + [True]


def test_F4_the_hold_of_a_full_limiter_remains_as_long_as_elements_wait() -> None:
    controller = FlowController(WindowLimiter(2))
    seen: list[bool] = []
    controller.gate.observer = lambda hold, raised, now: seen.append(raised)
    assert controller.try_acquire(1, 0.0)
    assert controller.try_acquire(1, 0.0)
    tickets = line_up(controller, 1, 1, 1)
    for now, ticket in enumerate(tickets):
        controller.release(1)
        assert not controller.look(now), "whoever looks meanwhile does not see it open"
        assert controller.grant(now) is ticket
        assert controller.grant(now) is None
        assert not controller.gate.is_open
    assert seen == [True], "raised once, for all"
    controller.release(1)
    assert controller.grant(4.0) is None
    assert seen == [True, False]
    assert controller.gate.times_closed == 1


def test_F2_ready_at_returns_the_time_at_which_the_rate_limiter_admits_the_first_waiting_element() -> None:
    controller = FlowController(RateLimiter(2.0))
    assert controller.ready_at(0.0) is None, "nothing holds"
    controller.try_acquire(1, 0.0)
    (ticket,) = line_up(controller, 1)
    assert controller.ready_at(0.0) == 0.5
    assert controller.grant(0.499) is None
    assert controller.grant(0.5) is ticket


def test_F2_ready_at_returns_the_time_at_which_a_rate_hold_ends_even_if_no_element_waits() -> None:
    controller = occupied(RateLimiter(2.0, burst=2, by_size=True), 2)
    assert not controller.try_acquire(2, 0.0)
    at = controller.ready_at(0.0)
    assert at == 0.5
    assert not controller.look(at - 1 / 1024)
    assert controller.look(at)
    assert controller.ready_at(at) is None, "there is nothing left to wait for"


def test_grant_at_the_time_that_ready_at_returned_lifts_the_rate_hold_even_if_no_element_waits() -> None:
    controller = occupied(RateLimiter(2.0), 1)
    assert not controller.try_acquire(1, 0.0)
    assert controller.ready_at(0.0) == 0.5
    assert controller.grant(0.25) is None
    assert kinds(controller) == ["rate"]
    assert controller.grant(0.5) is None
    assert controller.gate.is_open
    assert controller.ready_at(0.5) is None, "or its user would never get to sleep"


def test_grant_without_a_waiting_element_raises_no_hold_even_if_the_window_is_full() -> None:
    controller = occupied(WindowLimiter(1), 1)
    assert controller.grant(0.0) is None
    assert controller.gate.is_open


def test_the_method_look_lifts_an_outdated_hold_if_no_element_waits() -> None:
    controller = occupied(WindowLimiter(1), 1)
    controller.try_acquire(1, 0.0)
    assert not controller.look(1.0)
    controller.release(1)
    assert not controller.gate.is_open, "a release does not say what time it is"
    assert controller.look(2.0)
    assert controller.gate.is_open


def test_the_method_look_returns_false_while_an_element_waits_even_if_there_is_room() -> None:
    controller = occupied(WindowLimiter(1), 1)
    line_up(controller, 1)
    controller.release(1)
    assert not controller.look(1.0)
    assert kinds(controller) == ["capacity"]


def test_the_method_look_returns_false_for_a_size_limiter_that_is_exactly_full() -> None:
    controller = occupied(SizeLimiter(10), 10)
    assert not controller.look(1.0)
    assert kinds(controller) == ["capacity"]
    assert controller.try_acquire(0, 1.0), "although nothing at all would fit"
    controller.release(1)
    assert controller.look(2.0)


def test_F8_try_acquire_calls_the_limiter_only_once_to_check_and_add_an_element() -> None:
    asked: list[str] = []

    class Watched(WindowLimiter):
        def refusal(self, size: int, now: float) -> str | None:
            asked.append("refusal")
            return super().refusal(size, now)

        def add(self, size: int, now: float) -> bool:
            asked.append("add")
            return super().add(size, now)

        def try_add(self, size: int, now: float) -> str | None:
            asked.append("try_add")
            return super().try_add(size, now)

    controller = FlowController(Watched(1))
    assert controller.try_acquire(1, 0.0)
    assert not controller.try_acquire(1, 0.0)
    assert asked == ["try_add", "try_add"]


def test_a_second_withdrawal_of_a_ticket_has_no_effect() -> None:
    controller = occupied(WindowLimiter(1), 1)
    gone, stays = line_up(controller, 1, 1)
    assert controller.leave_line(gone)
    assert not controller.leave_line(gone)
    assert controller.waiting == 1
    controller.release(1)
    assert controller.grant(1.0) is stays
    assert controller.waiting == 0
    controller.release(1)
    assert controller.try_acquire(1, 1.0), "nobody waits any more"


@pytest.mark.parametrize("end", ["granted", "dismissed", "elsewhere", "never"])
def test_leave_line_returns_false_for_a_ticket_that_does_not_wait(end: str) -> None:
    controller, elsewhere = FlowController(WindowLimiter(1)), FlowController(WindowLimiter(1))
    elsewhere.try_acquire(1, 0.0)
    ticket = Ticket(1)
    if end == "elsewhere":
        elsewhere.stand_in_line(ticket, 0.0)
    elif end != "never":
        controller.stand_in_line(ticket, 0.0)
        assert (controller.grant(0.0) if end == "granted" else controller.dismiss()) is ticket
    assert not controller.leave_line(ticket)
    assert not ticket.cancelled
    assert (controller.waiting, elsewhere.waiting) == (0, end == "elsewhere")


def test_a_ticket_that_already_waited_cannot_join_a_line_again() -> None:
    controller, elsewhere = FlowController(WindowLimiter(1)), FlowController(WindowLimiter(1))
    controller.try_acquire(1, 0.0)
    (ticket,) = line_up(controller, 1)
    for each in (controller, elsewhere):
        with pytest.raises(ValueError, match="take a new one"):
            each.stand_in_line(ticket, 0.0)
    controller.leave_line(ticket)
    with pytest.raises(ValueError, match="take a new one"):
        controller.stand_in_line(ticket, 0.0)
    assert (controller.waiting, elsewhere.waiting) == (0, 0)
    controller.release(1)
    assert controller.try_acquire(1, 0.0)


def test_C6_two_controllers_that_share_a_gate_and_a_kind_of_hold_never_exceed_their_capacities() -> None:
    gate = Gate()
    windows = WindowLimiter(1), WindowLimiter(1)
    one, other = (FlowController(window, gate=gate) for window in windows)
    for controller in (one, other):
        assert controller.try_acquire(1, 0.0)
    (_, ticket), _ = line_up(one, 1, 1), line_up(other, 1)
    one.release(1)
    assert other.grant(1.0) is None
    assert one.grant(1.0) is not None
    assert other.grant(1.0) is None, "there is no room"
    assert windows[1].used == 1
    assert not gate.is_open
    assert one.grant(1.0) is None
    one.release(1)
    assert one.grant(2.0) is ticket


def test_if_other_code_lifts_the_hold_of_a_full_limiter_no_element_is_admitted() -> None:
    window = WindowLimiter(1)
    controller = occupied(window, 1)
    line_up(controller, 1)
    controller.gate.lift("capacity", now=1.0)
    assert controller.grant(1.0) is None
    assert not controller.look(1.0)
    assert window.used == 1
    assert kinds(controller) == ["capacity"]
    controller.gate.lift("capacity", now=1.0)
    # An observer that always lifts the hold again does not change this.
    controller.gate.observer = lambda hold, raised, now: raised and controller.gate.lift(hold.kind, now=now)
    assert controller.grant(2.0) is None
    assert controller.gate.is_open
    assert window.used == 1


def test_F4_a_controller_with_a_weighted_line_admits_waiting_elements_in_the_order_of_that_line() -> None:
    controller = FlowController(WindowLimiter(1), line=WeightedLine())
    controller.try_acquire(1, 0.0)
    for source in "aab":
        controller.stand_in_line(Ticket(1, source), 0.0)
    order = ""
    for _ in range(3):
        controller.release(1)
        ticket = controller.grant(0.0)
        assert ticket is not None
        order += ticket.source
    assert order == "aba"


# The machine.

SIZES = st.integers(0, 12)
FLAVOURS = ["window", "size", "both", "rate", "all"]


class AdmissionMachine(RuleBasedStateMachine):
    """A controller, lists of the elements inside and of waiting tickets, and a bucket of tokens for the rate.

    After each change that may admit an element, the test calls `grant` until it returns None, as every user must.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        # A limit is None if the flavour does not have it.
        self.count: int | None = None
        self.bytes: int | None = None
        self.rate: float | None = None
        self.burst = 2
        self.level = 2.0
        self.inside: list[int] = []
        self.waiting: list[Ticket] = []
        self.paused = False
        self.controller = FlowController(WindowLimiter(1))
        self.window: WindowLimiter | None = None
        self.size: SizeLimiter | None = None

    @initialize(flavour=st.sampled_from(FLAVOURS), count=st.integers(1, 4), size=st.integers(1, 20))
    def set_up(self, flavour: str, count: int, size: int) -> None:
        parts: list[Limiter] = []
        if flavour in ("window", "both", "all"):
            self.count, self.window = count, WindowLimiter(count, kind="capacity")
            parts.append(self.window)
        if flavour in ("size", "both", "all"):
            self.bytes, self.size = size, SizeLimiter(size, kind="capacity")
            parts.append(self.size)
        if flavour in ("rate", "all"):
            self.rate = 2.0
            parts.append(RateLimiter(2.0, burst=self.burst, kind="rate"))
        self.controller = FlowController(parts[0] if len(parts) == 1 else CompositeLimiter(parts))

    def fits(self, size: int) -> bool:
        if self.count is not None and len(self.inside) >= self.count:
            return False
        total = sum(self.inside)
        if self.bytes is not None and total and total + size > self.bytes:
            return False
        return self.rate is None or self.level >= 1

    def entered(self, size: int) -> None:
        self.inside.append(size)
        self.level -= 1
        # The limits are never exceeded.
        assert self.count is None or len(self.inside) <= self.count
        if self.bytes is not None:
            assert sum(self.inside) <= self.bytes or not sum(self.inside[:-1])
        assert self.rate is None or self.level >= 0

    def grant_all(self) -> None:
        while True:
            ticket = self.controller.grant(self.now)
            if ticket is None:
                break
            assert ticket is self.waiting.pop(0), "first come, first served"
            assert not self.paused
            self.entered(ticket.size)
        if self.waiting:
            refused = not self.fits(self.waiting[0].size)
            assert refused or self.paused, "nobody waits for nothing"
            assert refused is any(kind != "paused" for kind in kinds(self.controller)), "nor is a hold outlived"

    @rule(size=SIZES)
    def send(self, size: int) -> None:
        expected = not self.waiting and not self.paused and self.fits(size)
        assert self.controller.try_acquire(size, self.now) is expected
        if expected:
            self.entered(size)
        else:
            ticket = Ticket(size)
            self.waiting.append(ticket)
            self.controller.stand_in_line(ticket, self.now)
            self.grant_all()

    @rule(size=SIZES)
    def send_without_waiting(self, size: int) -> None:
        expected = not self.waiting and not self.paused and self.fits(size)
        assert self.controller.try_acquire(size, self.now) is expected
        if expected:
            self.entered(size)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ticket = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.controller.leave_line(ticket)
        self.grant_all()

    @precondition(lambda self: self.waiting)
    @rule()
    def dismiss(self) -> None:
        assert self.controller.dismiss() is self.waiting.pop(0)
        self.grant_all()

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.inside)))
        gone, self.inside = self.inside[:count], self.inside[count:]
        self.controller.release(sum(gone), count)
        # If no ticket waits, `grant` has nothing to admit. A hold may stay until the next attempt.
        if self.waiting:
            self.grant_all()

    @rule(count=st.integers(1, 4), size=st.integers(1, 20))
    def change_capacity(self, count: int, size: int) -> None:
        if self.window is not None:
            self.count = self.window.capacity = count
        if self.size is not None:
            self.bytes = self.size.capacity = size
        self.grant_all()

    @rule()
    def pause_or_resume(self) -> None:
        self.paused = not self.paused
        if self.paused:
            self.controller.gate.hold("paused", now=self.now)
        else:
            self.controller.gate.lift("paused", now=self.now)
            self.grant_all()

    @rule(sixteenths=st.integers(0, 40))
    def wait(self, sixteenths: int) -> None:
        self.pass_time(sixteenths / 16)
        self.grant_all()

    @precondition(lambda self: self.waiting)
    @rule()
    def wait_until_ready(self) -> None:
        at = self.controller.ready_at(self.now)
        head = self.waiting[0]
        if at is None:
            if self.rate is not None and not self.fits(head.size):
                assert self.window is not None, "a rate alone always is ready at some time"
            return
        assert at > self.now
        assert self.controller.grant(at - 1 / 1024) is None, "not too late"
        self.pass_time(at - self.now)
        waited = len(self.waiting)
        self.grant_all()
        assert self.paused or len(self.waiting) < waited, "not too soon"

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        if self.rate is not None:
            self.level = min(self.burst, self.level + seconds * self.rate)

    @rule()
    def look(self) -> None:
        could = not self.waiting and not self.paused and self.fits(1)
        assert self.controller.look(self.now) is could
        if not self.waiting:
            assert self.controller.gate.is_open is could

    @invariant()
    def nothing_leaks(self) -> None:
        assert self.window is None or self.window.used == len(self.inside)
        assert self.size is None or self.size.used == sum(self.inside)
        assert self.controller.waiting == len(self.waiting)

    @invariant()
    def the_gate_is_open_exactly_when_no_hold_is_left(self) -> None:
        held = kinds(self.controller)
        assert self.controller.gate.is_open is (not held)
        assert ("paused" in held) is self.paused
        assert len([kind for kind in held if kind != "paused"]) <= 1

    def teardown(self) -> None:
        if self.paused:
            self.pause_or_resume()
        while self.waiting or self.inside:
            self.controller.release(sum(self.inside), len(self.inside))
            self.inside.clear()
            self.wait(16)
        assert self.controller.look(self.now + 1000), "once all have left, there is room"


TestAdmissionMachine = AdmissionMachine.TestCase


# In front of the line, and after an interrupted step.


def test_a_ticket_put_in_front_of_the_line_is_granted_first_and_despite_the_holds_that_it_ignores() -> None:
    controller = occupied(WindowLimiter(2, kind="capacity"), 1)
    controller.gate.hold("capacity", now=0.0, source="callbacks")
    waiting, front = Ticket(1), Ticket(1)
    controller.stand_in_line(waiting, 0.0)
    controller.stand_in_front(front, 0.0, ignoring="callbacks")
    assert controller.waiting == 2
    with pytest.raises(ValueError, match="another ticket stands there"):
        controller.stand_in_front(Ticket(1), 0.0, ignoring="callbacks")
    controller.gate.hold("paused", now=0.0)
    assert controller.grant(1.0) is None, "it does not ignore that"
    controller.gate.lift("paused", now=1.0)
    assert controller.grant(1.0) is front
    controller.release(1)
    assert controller.grant(1.0) is None, "the line ignores nothing"
    controller.gate.lift("capacity", now=2.0, source="callbacks")
    assert controller.grant(2.0) is waiting
    controller.stand_in_front(late := Ticket(1), 2.0, ignoring="callbacks")
    assert controller.leave_line(late)
    assert controller.waiting == 0
    with pytest.raises(ValueError, match="take a new one"):
        controller.stand_in_front(late, 2.0, ignoring="callbacks")


def test_a_ticket_put_in_front_of_the_line_raises_the_hold_of_a_full_window_and_is_dismissed_first() -> None:
    controller = occupied(WindowLimiter(1, kind="capacity"), 1)
    front, waiting = Ticket(1), Ticket(1)
    controller.stand_in_front(front, 0.0, ignoring="callbacks")
    assert kinds(controller) == ["capacity"]
    controller.stand_in_line(waiting, 0.0)
    assert [controller.dismiss(), controller.dismiss(), controller.dismiss()] == [front, waiting, None]


def test_a_controller_whose_gate_was_shut_admits_nothing_and_blocks_each_source_that_offers_an_element() -> None:
    controller = FlowController(WindowLimiter(1))
    waiting, source = Ticket(1), FlowSource("source")
    controller.gate.shut()
    assert not controller.try_acquire(1, 0.0)
    controller.stand_in_line(waiting, 0.0)
    assert controller.grant(0.0) is None
    assert controller.offer(source, 1, 0.0)


@pytest.mark.parametrize("line", [FifoLine(), WeightedLine({"b": 2.0})])
def test_after_set_line_exactly_the_given_tickets_wait_in_the_given_order(line: FifoLine | WeightedLine) -> None:
    controller = FlowController(WindowLimiter(1), line=line)
    first, second, third, front = (Ticket(1) for _ in range(4))
    for ticket in (first, second, third):
        controller.stand_in_line(ticket, 0.0)
    controller.stand_in_front(front, 0.0, ignoring="x")
    controller.set_line([third, first, front])
    assert controller.waiting == 3
    assert [controller.dismiss() for _ in range(4)] == [front, third, first, None]
