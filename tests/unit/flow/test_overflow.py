"""Sources that cannot wait (F3): an element beyond the limit is accepted, and its source is blocked (J3 J4 J6)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qflow_client.flow import (
    Capacity,
    CompositeLimiter,
    FlowController,
    FlowSource,
    Limiter,
    RateLimiter,
    SizeLimiter,
    StopResume,
    ThresholdLimiter,
    Ticket,
    WindowLimiter,
)
from tests.interleavings import Stepwise


class Source(FlowSource):
    """A source that records its calls."""

    def __init__(self, name: str = "source") -> None:
        super().__init__(name)
        self.told: list[str] = []

    def on_blocked(self) -> None:
        assert self.is_blocked
        self.told.append("blocked")

    def on_unblocked(self) -> None:
        assert not self.is_blocked
        self.told.append("unblocked")


def overfilled(limiter: Limiter, count: int) -> tuple[FlowController, Source]:
    """Return a controller, and a source that has offered `count` elements to it."""
    controller, source = FlowController(limiter), Source()
    for _ in range(count):
        controller.offer(source, 1, 0.0)
    return controller, source


def test_a_source_without_callbacks_shows_whether_it_is_blocked() -> None:
    source, controller = FlowSource("plain"), FlowController(WindowLimiter(1))
    controller.offer(source, 1, 0.0)
    assert not source.is_blocked
    controller.offer(source, 1, 0.0)
    assert source.is_blocked
    controller.release(1)
    assert not source.is_blocked
    assert source.name == "plain"


def test_F3_an_element_beyond_the_limit_is_accepted_and_its_source_is_blocked() -> None:
    window = WindowLimiter(1)
    controller, source = FlowController(window), Source()
    assert not controller.offer(source, 1, 0.0)
    assert source.told == []
    assert controller.offer(source, 1, 0.0)
    assert window.used == 2, "it is inside, beyond the limit"
    assert source.told == ["blocked"]
    assert controller.blocked == (source,)


def test_J3_an_overflow_blocks_only_the_source_whose_element_exceeded_the_limit() -> None:
    controller, good, bad = FlowController(WindowLimiter(2)), Source("good"), Source("bad")
    controller.offer(good, 1, 0.0)
    controller.offer(bad, 1, 0.0)
    controller.offer(bad, 1, 0.0)
    assert (good.is_blocked, bad.is_blocked) == (False, True)


def test_J4_a_blocked_source_that_exceeds_the_limit_again_is_notified_only_once() -> None:
    controller, source = overfilled(WindowLimiter(1), 4)
    assert source.told == ["blocked"]
    controller.release(3, 3)
    assert source.told == ["blocked", "unblocked"]


def test_J4_a_source_blocked_by_two_controllers_is_unblocked_when_both_have_released_it() -> None:
    first, second, source = FlowController(WindowLimiter(1)), FlowController(WindowLimiter(1)), Source()
    for controller in (first, second):
        for _ in range(2):
            controller.offer(source, 1, 0.0)
    assert list(source.blocked_by) == [first, second]
    assert source.told == ["blocked"], "one notice per transition, not per controller"
    first.release(1)
    assert source.is_blocked
    assert source.told == ["blocked"]
    first.release(1)
    assert source.is_blocked, "it does not matter how much more room the first has"
    second.release(1)
    assert source.told == ["blocked", "unblocked"]


def test_J4_blocked_sources_of_a_controller_are_unblocked_together_beginning_with_the_longest_blocked() -> None:
    controller = FlowController(WindowLimiter(1))
    order: list[str] = []

    class Ordered(FlowSource):
        def on_unblocked(self) -> None:
            order.append(self.name)

    sources = [Ordered(name) for name in "cab"]
    controller.offer(Ordered("good"), 1, 0.0)
    for source in sources:
        controller.offer(source, 1, 0.0)
    controller.release(2, 2)
    assert order == []
    controller.release(1)
    assert order == ["c", "a", "b"]


def test_J6_every_release_of_an_element_unblocks_sources_that_can_continue() -> None:
    controller, source = overfilled(ThresholdLimiter(StopResume(stop_count=3, resume_count=2)), 4)
    assert source.is_blocked
    controller.release(1)
    controller.release(1)
    assert source.is_blocked, "2 are not fewer than 2"
    controller.release(1)
    assert not source.is_blocked


def test_J2_between_resume_and_stop_a_blocked_source_stays_blocked_and_an_unblocked_source_continues() -> None:
    controller = FlowController(ThresholdLimiter(Capacity(100, 50)))
    blocked, other = Source("blocked"), Source("other")
    assert controller.offer(blocked, 101, 0.0)
    controller.release(40, 0)
    assert not controller.offer(other, 10, 0.0), "71 bytes are within the capacity"
    assert controller.offer(blocked, 0, 0.0), "it is still blocked, although this message did no harm"
    controller.release(20, 0)
    assert blocked.is_blocked
    controller.release(1, 0)
    assert not blocked.is_blocked


def test_D4_after_the_thresholds_are_raised_a_call_of_resume_unblocks_sources() -> None:
    queue = ThresholdLimiter(StopResume(stop_count=1))
    controller, source = overfilled(queue, 2)
    controller.resume()
    assert source.is_blocked
    queue.change(StopResume(stop_count=10))
    controller.resume()
    assert source.told == ["blocked", "unblocked"]


def test_D12_a_source_that_does_not_offer_an_element_can_be_blocked_while_the_limit_is_exceeded() -> None:
    controller, offender = overfilled(ThresholdLimiter(StopResume(stop_count=1)), 2)
    recent = Source("recent")
    controller.block(recent)
    controller.block(recent)
    assert controller.blocked == (offender, recent)
    assert recent.told == ["blocked"]
    controller.release(2, 2)
    assert not recent.is_blocked
    controller.block(recent)
    assert not recent.is_blocked, "there is no reason any more"
    assert recent.told == ["blocked", "unblocked"], "so it is not even told"
    assert len(controller.blocked) == 0


def test_D12_a_source_that_releases_elements_when_it_is_blocked_is_unblocked_again() -> None:
    controller = FlowController(WindowLimiter(1))

    class Yielding(Source):
        """A source that takes its elements back when it is blocked."""

        def on_blocked(self) -> None:
            super().on_blocked()
            controller.release(1)

    offender, recent = Source("offender"), Yielding("recent")
    controller.offer(recent, 1, 0.0)
    controller.offer(offender, 1, 0.0)
    controller.block(recent)
    assert recent.told == ["blocked", "unblocked"]
    assert offender.told == ["blocked", "unblocked"]
    assert not controller.blocked


def test_a_controller_forgets_a_blocked_source_that_is_removed() -> None:
    controller, gone, stays = FlowController(WindowLimiter(1)), Source("gone"), Source("stays")
    for source in (gone, stays):
        controller.offer(source, 1, 0.0)
    controller.offer(gone, 1, 0.0)
    controller.forget(gone)
    controller.forget(gone)
    assert controller.blocked == (stays,)
    assert not gone.is_blocked
    controller.forget(Source("never seen"))


def test_unblocking_a_source_that_is_not_blocked_changes_nothing() -> None:
    controller, source = FlowController(WindowLimiter(1)), Source()
    source.unblock(controller)
    assert source.told == []


# Rates: time unblocks.


def test_F6_a_source_that_exceeds_the_rate_is_blocked_until_the_average_is_within_the_rate() -> None:
    controller, source = FlowController(RateLimiter(2.0, burst=3)), Source()
    for _ in range(3):
        assert not controller.offer(source, 1, 0.0)
    assert controller.ready_at(0.0) is None, "nobody is blocked"
    for _ in range(2):
        assert controller.offer(source, 1, 0.0)
    assert controller.ready_at(0.0) == 1.0
    controller.resume(1.0 - 1 / 1024)
    controller.resume()
    assert source.told == ["blocked"]
    controller.resume(1.0)
    assert source.told == ["blocked", "unblocked"]
    assert controller.gate.is_open, "who cannot wait is not refused"
    assert not controller.blocked
    assert controller.ready_at(1.0) is None


def test_F6_a_source_that_always_continues_as_soon_as_it_is_unblocked_keeps_to_the_rate() -> None:
    controller, source = FlowController(RateLimiter(4.0)), Source()
    now, passed = 0.0, 0
    while now < 100.0:
        while not source.is_blocked:
            controller.offer(source, 1, now)
            passed += 1
        at = controller.ready_at(now)
        assert at is not None
        assert at > now
        now = at
        controller.resume(now)
    assert passed == 1 + 400, "one at once, and then one every quarter of a second"


def test_F6_raising_the_rate_immediately_unblocks_sources_that_only_the_lower_rate_blocked() -> None:
    limiter = RateLimiter(1 / 1024)
    controller, source = overfilled(limiter, 2)
    assert controller.ready_at(0.5) == 1024.0
    limiter.rate = 2.0
    assert controller.ready_at(0.5) == 0.5
    controller.resume(0.5)
    assert not source.is_blocked


def test_F6_releasing_elements_does_not_unblock_sources_that_a_rate_blocks() -> None:
    controller, source = overfilled(CompositeLimiter([WindowLimiter(1), RateLimiter(1.0)]), 2)
    assert controller.ready_at(0.0) is None, "time alone does not empty a window"
    controller.release(2, 2)
    assert source.is_blocked
    assert controller.ready_at(0.0) == 1.0
    controller.resume(0.5)
    assert source.is_blocked
    controller.resume(1.0)
    assert not source.is_blocked


def test_F6_releasing_elements_unblocks_sources_that_no_rate_blocks() -> None:
    controller, source = overfilled(CompositeLimiter([WindowLimiter(1), RateLimiter(1.0, burst=2)]), 2)
    controller.release(1)
    assert not source.is_blocked


def test_D12_a_source_that_offers_no_element_can_be_blocked_only_while_the_rate_is_exceeded() -> None:
    controller, _ = overfilled(RateLimiter(1.0), 2)
    recent = Source("recent")
    controller.block(recent, 1.0)
    assert recent.told == []
    controller.block(recent)
    assert recent.told == ["blocked"], "for all that is known, it is still too early"
    controller.resume(1.0)
    assert recent.told == ["blocked", "unblocked"]


def test_ready_at_returns_the_earliest_time_at_which_a_waiting_or_blocked_source_can_continue() -> None:
    rate = RateLimiter(1.0, burst=4)
    controller, source = overfilled(rate, 5)
    ticket = Ticket(1)
    controller.stand_in_line(ticket, 0.0)
    assert controller.ready_at(0.0) == 1.0
    controller.resume(1.0)
    assert not source.is_blocked
    assert controller.ready_at(1.0) == 2.0
    assert controller.grant(1.0) is None
    assert controller.grant(2.0) is ticket


# Gates: other holds.


def test_F3_an_element_offered_while_the_gate_is_closed_is_accepted_and_its_source_is_blocked() -> None:
    window = WindowLimiter(5)
    controller, source = FlowController(window), Source()
    controller.gate.hold("paused", now=0.0)
    assert controller.offer(source, 1, 0.0)
    assert controller.offer(source, 1, 0.0)
    assert window.used == 2, "it has nowhere else to be"
    assert source.told == ["blocked"]
    assert controller.ready_at(0.0) is None, "time does not lift it"
    controller.release(1)
    controller.resume(1.0)
    assert source.is_blocked
    controller.gate.lift("paused", now=2.0)
    controller.resume()
    assert source.told == ["blocked", "unblocked"]
    assert not controller.offer(source, 1, 2.0)


def test_J5_an_element_offered_while_the_gate_is_closed_is_taken_before_its_source_is_blocked() -> None:
    controller, source = Stepwise(WindowLimiter(5)), Source()
    assert list(controller.offer_steps(source, 1, 0.0)) == []
    controller.gate.hold("paused", now=0.0)
    assert list(controller.offer_steps(source, 1, 0.0)) == ["taken", "blocked"]
    assert source.is_blocked


def test_F3_a_source_blocked_by_gate_and_limiter_continues_when_both_have_released_it_in_any_order() -> None:
    for gate_first in (True, False):
        controller, source = FlowController(WindowLimiter(1)), Source()
        controller.gate.hold("paused", now=0.0, source="operator")
        for _ in range(2):
            controller.offer(source, 1, 0.0)
        for step in (gate_first, not gate_first):
            assert source.is_blocked
            if step:
                controller.gate.lift("paused", now=1.0, source="operator")
                controller.resume(1.0)
            else:
                controller.release(1)
        assert source.told == ["blocked", "unblocked"]


def test_F3_a_gate_that_is_closed_only_by_the_limiter_blocks_only_sources_that_exceed_the_limit() -> None:
    controller, source = FlowController(SizeLimiter(10)), Source()
    controller.try_acquire(6, 0.0)
    assert not controller.try_acquire(5, 0.0), "it is too large, which closes the gate"
    assert not controller.gate.is_open
    assert not controller.offer(source, 4, 0.0)
    assert source.told == []
    controller.block(source)
    assert source.told == []
    controller.gate.hold("capacity", now=0.0, source="operator")
    assert controller.offer(source, 0, 0.0), "the same reason, but another's"
    controller.gate.lift("capacity", now=1.0, source="operator")
    controller.resume()
    assert source.told == ["blocked", "unblocked"], "although the limiter's own hold is still there"
    assert [hold.kind for hold in controller.gate.holds] == ["capacity"]


def test_D5_a_closed_gate_can_block_a_source_that_offers_no_element() -> None:
    controller, source = FlowController(ThresholdLimiter(StopResume())), Source()
    controller.gate.hold("paused", now=0.0)
    controller.block(source)
    assert source.told == ["blocked"]
    controller.gate.lift("paused", now=1.0)
    controller.resume()
    assert source.told == ["blocked", "unblocked"]


def test_J6_sources_behind_one_that_fills_the_limiter_again_when_unblocked_stay_blocked() -> None:
    controller = FlowController(WindowLimiter(1))

    class Eager(Source):
        """A source that offers elements as long as it is not blocked."""

        def on_unblocked(self) -> None:
            super().on_unblocked()
            while not controller.offer(self, 1, 0.0):
                pass

    first, second = Eager("first"), Eager("second")
    controller.offer(first, 1, 0.0)
    controller.offer(first, 1, 0.0)
    controller.offer(second, 1, 0.0)
    controller.release(2, 2)
    assert first.told == ["blocked", "unblocked", "blocked"]
    assert second.told == ["blocked"], "there is no room for it any more"
    controller.release(1)
    assert second.told == ["blocked", "unblocked", "blocked"], "and the next turn is its own"
    assert controller.blocked == (first, second)


# From one resource to the next.


def test_F3_an_element_passed_to_a_controller_with_room_is_released_by_the_previous_controller_immediately() -> None:
    upstream, downstream = SizeLimiter(10), SizeLimiter(10)
    above, below, source = FlowController(upstream), FlowController(downstream), Source()
    above.try_acquire(4, 0.0)
    assert not source.forward(4, below, 0.0, held=above)
    assert (upstream.used, downstream.used) == (0, 4)


def test_F3_an_element_passed_to_a_full_controller_counts_in_the_previous_one_until_the_source_is_unblocked() -> None:
    upstream, downstream = SizeLimiter(10), SizeLimiter(10)
    above, below, source = FlowController(upstream), FlowController(downstream), Source()
    for _ in range(2):
        above.try_acquire(5, 0.0)
    below.try_acquire(8, 0.0)
    assert source.forward(5, below, 0.0, held=above)
    assert downstream.used == 13, "taken at once"
    assert upstream.used == 10, "and still accounted for where it came from"
    assert not above.try_acquire(1, 0.0)
    below.release(2)
    assert upstream.used == 10, "11 is still too much"
    below.release(1)
    assert upstream.used == 5
    assert source.told == ["blocked", "unblocked"]
    assert above.try_acquire(1, 0.0)


def test_F3_elements_that_a_blocked_source_passes_on_count_in_the_previous_controller_until_it_is_unblocked() -> None:
    upstream = SizeLimiter(10)
    above, below, source = FlowController(upstream), FlowController(SizeLimiter(1)), Source()
    for size in (2, 3, 4):
        above.try_acquire(size, 0.0)
    # A source that is informed late continues meanwhile.
    for size in (2, 3, 4):
        assert source.forward(size, below, 0.0, held=above)
    assert upstream.used == 9
    below.release(8, 2)
    assert upstream.used == 0


def test_F3_forward_without_a_held_controller_only_offers_the_element_to_the_next_controller() -> None:
    downstream = SizeLimiter(1)
    below, source = FlowController(downstream), Source()
    assert source.forward(2, below, 0.0)
    below.release(2)
    assert source.told == ["blocked", "unblocked"]


def test_F3_backpressure_in_a_chain_of_controllers_reaches_the_first_and_is_released_from_the_last() -> None:
    limiters = [WindowLimiter(1) for _ in range(3)]
    chain = [FlowController(limiter) for limiter in limiters]
    outside, *sources = [Source(name) for name in ("outside", "first", "second")]
    # One element passes all stages, then each stage overflows the next.
    chain[2].offer(sources[1], 1, 0.0)
    chain[1].offer(sources[0], 1, 0.0)
    assert sources[1].forward(1, chain[2], 0.0, held=chain[1])
    chain[0].offer(outside, 1, 0.0)
    assert sources[0].forward(1, chain[1], 0.0, held=chain[0])
    assert chain[0].offer(outside, 1, 0.0)
    assert [limiter.used for limiter in limiters] == [2, 2, 2]
    assert all(source.is_blocked for source in (outside, *sources))
    chain[2].release(1)
    assert [limiter.used for limiter in limiters] == [1, 1, 1]
    assert not any(source.is_blocked for source in (outside, *sources))


@given(
    st.integers(1, 30),
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 10), st.integers(0, 20)), max_size=60),
)
def test_F3_the_limit_is_exceeded_by_at_most_one_element_of_each_source(
    capacity: int, steps: list[tuple[str, int, int]]
) -> None:
    limiter = SizeLimiter(capacity)
    controller = FlowController(limiter)
    sources = {name: Source(name) for name in "abcd"}
    largest = dict.fromkeys("abcd", 0)
    for name, size, leaving in steps:
        if not sources[name].is_blocked:
            largest[name] = max(largest[name], size)
            controller.offer(sources[name], size, 0.0)
        assert limiter.used <= capacity + sum(largest.values())
        controller.release(min(leaving, limiter.used))


class Stage(Source):
    """A resource that passes its elements on whenever it may, even inside a callback."""

    def __init__(self, name: str, limiter: SizeLimiter | WindowLimiter, after: Stage | None) -> None:
        super().__init__(name)
        self.limiter = limiter
        self.controller = FlowController(limiter, name=name)
        self.after = after
        self.inside: list[tuple[str, int, int]] = []

    def on_unblocked(self) -> None:
        super().on_unblocked()
        self.pump()

    def pump(self) -> None:
        while self.after is not None and self.inside and not self.is_blocked:
            element = self.inside.pop(0)
            # The element is added to the list first, because a callback may come before `forward` returns.
            self.after.inside.append(element)
            self.forward(element[2], self.after.controller, 0.0, held=self.controller)
            self.after.pump()


class Client(Source):
    """A source that has many elements, and sends them whenever it may."""

    def __init__(self, name: str, sizes: list[int], into: Stage) -> None:
        super().__init__(name)
        self.backlog = [(name, number, size) for number, size in enumerate(sizes)]
        self.into = into

    def on_unblocked(self) -> None:
        super().on_unblocked()
        self.send()

    def send(self) -> None:
        while self.backlog and not self.is_blocked:
            element = self.backlog.pop(0)
            self.into.inside.append(element)
            self.forward(element[2], self.into.controller, 0.0)
            self.into.pump()


@given(
    st.lists(st.lists(st.integers(1, 8), max_size=12), min_size=1, max_size=4),
    st.tuples(st.integers(1, 15), st.integers(1, 15), st.integers(1, 3)),
    st.data(),
)
def test_F3_sources_that_offer_elements_inside_a_callback_lose_no_element_and_keep_the_order(
    backlogs: list[list[int]], capacities: tuple[int, int, int], data: st.DataObject
) -> None:
    last = Stage("last", WindowLimiter(capacities[2]), None)
    middle = Stage("middle", SizeLimiter(capacities[1]), last)
    first = Stage("first", SizeLimiter(capacities[0]), middle)
    clients = [Client(f"client {number}", sizes, first) for number, sizes in enumerate(backlogs)]
    for client in clients:
        client.send()
    arrived: list[tuple[str, int, int]] = []
    while last.inside:
        for stage in (first, middle, last):
            assert not (stage.controller.blocked and stage.limiter.resumable)
        count = data.draw(st.integers(1, len(last.inside)))
        gone, last.inside = last.inside[:count], last.inside[count:]
        arrived += gone
        last.controller.release(sum(size for _, _, size in gone), count)
    for number, sizes in enumerate(backlogs):
        mine = [(place, size) for name, place, size in arrived if name == f"client {number}"]
        assert mine == list(enumerate(sizes))
    assert [stage.limiter.used for stage in (first, middle, last)] == [0, 0, 0]
    assert not any(source.is_blocked for source in (*clients, first, middle))


# The machine: two resources flow into one, and that one into two (fan-in and fan-out, F4).

NAMES = ("left", "right", "middle", "up", "down")
NEXT = {"left": ("middle",), "right": ("middle",), "middle": ("up", "down"), "up": (), "down": ()}
SIZES = st.integers(0, 8)


class NetworkMachine(RuleBasedStateMachine):
    """Five resources, and lists of the elements in each.

    The rule of F3 is formulated a second time as a fixed point: while a resource is within its capacity, it blocks no
    source, and nothing is reserved because of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.limiters = {name: SizeLimiter(1) for name in NAMES}
        self.controllers = {name: FlowController(self.limiters[name], name=name) for name in NAMES}
        # Each resource is the source of the elements that leave it. Clients create elements.
        self.sources = {name: Source(name) for name in (*NAMES, "client 1", "client 2")}
        self.inside: dict[str, list[int]] = {name: [] for name in NAMES}
        # Elements that are in one resource and still count in the one before: (before, in, size).
        self.reserved: list[tuple[str, str, int]] = []
        self.blocked: set[tuple[str, str]] = set()
        self.notices: dict[str, int] = dict.fromkeys(self.sources, 0)

    @initialize(capacities=st.lists(st.integers(1, 12), min_size=5, max_size=5))
    def set_up(self, capacities: list[int]) -> None:
        for limiter, capacity in zip(self.limiters.values(), capacities, strict=True):
            limiter.capacity = capacity

    def used(self, name: str) -> int:
        return sum(self.inside[name]) + sum(size for before, _, size in self.reserved if before == name)

    def is_blocked(self, source: str) -> bool:
        return any(each == source for each, _ in self.blocked)

    def block(self, source: str, by: str) -> None:
        if not self.is_blocked(source):
            self.notices[source] += 1
        self.blocked.add((source, by))

    def settle(self) -> None:
        changed = True
        while changed:
            changed = False
            for name in NAMES:
                if self.used(name) > self.limiters[name].capacity:
                    continue
                for entry in [entry for entry in self.blocked if entry[1] == name]:
                    self.blocked.remove(entry)
                    self.notices[entry[0]] += not self.is_blocked(entry[0])
                    changed = True
                for reservation in [each for each in self.reserved if each[1] == name]:
                    self.reserved.remove(reservation)
                    changed = True

    @rule(client=st.sampled_from(["client 1", "client 2"]), into=st.sampled_from(["left", "right"]), size=SIZES)
    def arrive(self, client: str, into: str, size: int) -> None:
        if self.is_blocked(client):
            return
        self.inside[into].append(size)
        overflows = self.used(into) > self.limiters[into].capacity
        if overflows:
            self.block(client, into)
        assert self.controllers[into].offer(self.sources[client], size, 0.0) is overflows

    @rule(name=st.sampled_from(["left", "right", "middle"]), data=st.data())
    def forward(self, name: str, data: st.DataObject) -> None:
        if not self.inside[name] or self.is_blocked(name):
            return
        self.pass_on(name, data.draw(st.sampled_from(NEXT[name])))

    def pass_on(self, name: str, into: str) -> None:
        size = self.inside[name].pop(0)
        self.inside[into].append(size)
        overflows = self.used(into) > self.limiters[into].capacity
        if overflows:
            self.reserved.append((name, into, size))
            self.block(name, into)
        self.settle()
        source, downstream, held = self.sources[name], self.controllers[into], self.controllers[name]
        assert source.forward(size, downstream, 0.0, held=held) is overflows

    @rule(name=st.sampled_from(["up", "down"]), data=st.data())
    def consume(self, name: str, data: st.DataObject) -> None:
        inside = self.inside[name]
        if inside:
            count = data.draw(st.integers(1, len(inside)))
            gone, self.inside[name] = inside[:count], inside[count:]
            self.settle()
            self.controllers[name].release(sum(gone), count)

    @rule(name=st.sampled_from(NAMES), capacity=st.integers(1, 12))
    def change_capacity(self, name: str, capacity: int) -> None:
        self.limiters[name].capacity = capacity
        self.settle()
        self.controllers[name].resume()

    @invariant()
    def every_element_is_accounted_for(self) -> None:
        assert {name: self.limiters[name].used for name in NAMES} == {name: self.used(name) for name in NAMES}

    @invariant()
    def sources_are_blocked_exactly_by_what_they_overflowed(self) -> None:
        for name, source in self.sources.items():
            assert {each.name for each in source.blocked_by} == {by for each, by in self.blocked if each == name}
            assert source.is_blocked is self.is_blocked(name)
        for name, controller in self.controllers.items():
            assert {source.name for source in controller.blocked} == {each for each, by in self.blocked if by == name}

    @invariant()
    def every_transition_is_told_once(self) -> None:
        for name, source in self.sources.items():
            assert source.told == ["blocked", "unblocked"] * (self.notices[name] // 2) + ["blocked"] * (
                self.notices[name] % 2
            )

    @invariant()
    def nobody_is_blocked_by_one_that_has_room(self) -> None:
        for controller in self.controllers.values():
            assert not (controller.blocked and controller.limiter.resumable)

    def teardown(self) -> None:
        # If it is drained from its end, all elements come out, and nothing stays reserved or blocked.
        while any(self.inside.values()):
            for name in NAMES:
                for into in NEXT[name][:1]:
                    while self.inside[name] and not self.is_blocked(name):
                        self.pass_on(name, into)
            for name in ("up", "down"):
                gone, self.inside[name] = self.inside[name], []
                self.settle()
                self.controllers[name].release(sum(gone), len(gone))
            self.every_element_is_accounted_for()
        assert not self.blocked
        assert not self.reserved
        assert not any(limiter.used for limiter in self.limiters.values())
        self.sources_are_blocked_exactly_by_what_they_overflowed()


TestNetworkMachine = NetworkMachine.TestCase


class ToldMachine(RuleBasedStateMachine):
    """Sources at one entrance with a limiter, time and an operator as reasons to hold, and the rule for blocked
    sources.

    After each change that a controller cannot notice, the test calls `grant` and `resume`, as its user must.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        # Both are None if the variant does not limit.
        self.capacity: int | None = None
        self.rate: float | None = None
        self.burst = 3
        self.level = 3.0
        self.inside = 0
        self.paused = False
        self.sources = [Source(name) for name in "abc"]
        self.blocked: list[Source] = []
        self.limiters: list[Limiter] = []
        self.controller = FlowController(WindowLimiter(1))

    @initialize(flavour=st.sampled_from(["window", "rate", "both"]), capacity=st.integers(1, 4))
    def set_up(self, flavour: str, capacity: int) -> None:
        if flavour != "rate":
            self.capacity = capacity
            self.limiters.append(WindowLimiter(capacity))
        if flavour != "window":
            self.rate = 2.0
            self.limiters.append(RateLimiter(2.0, burst=self.burst))
        self.controller = FlowController(
            self.limiters[0] if len(self.limiters) == 1 else CompositeLimiter(self.limiters)
        )

    def may_go_on(self) -> bool:
        within = self.capacity is None or self.inside <= self.capacity
        return within and (self.rate is None or self.level >= 0) and not self.paused

    def resume(self) -> None:
        if self.may_go_on():
            self.blocked.clear()
        assert self.controller.grant(self.now) is None, "nobody is in line"
        self.controller.resume(self.now)

    @rule(at=st.integers(0, 2))
    def offer(self, at: int) -> None:
        source = self.sources[at]
        too_many = self.capacity is not None and self.inside >= self.capacity
        too_soon = self.rate is not None and self.level < 1
        self.inside += 1
        self.level -= 1
        if (too_many or too_soon or self.paused) and source not in self.blocked:
            self.blocked.append(source)
        assert self.controller.offer(source, 1, self.now) is (source in self.blocked)

    @rule(at=st.integers(0, 2))
    def block(self, at: int) -> None:
        source = self.sources[at]
        if not self.may_go_on() and source not in self.blocked:
            self.blocked.append(source)
        self.controller.block(source, self.now)

    @rule(at=st.integers(0, 2))
    def forget(self, at: int) -> None:
        if self.sources[at] in self.blocked:
            self.blocked.remove(self.sources[at])
        self.controller.forget(self.sources[at])

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.inside))
        self.inside -= count
        self.controller.release(count, count)
        self.resume()

    @rule()
    def pause_or_resume(self) -> None:
        self.paused = not self.paused
        if self.paused:
            self.controller.gate.hold("paused", now=self.now)
        else:
            self.controller.gate.lift("paused", now=self.now)
            self.resume()

    @rule()
    def find_no_room(self) -> None:
        # A source that can wait closes the gate, or finds room after all.
        if self.controller.try_acquire(1, self.now):
            self.inside += 1
            self.level -= 1

    @rule(sixteenths=st.integers(0, 40))
    def wait(self, sixteenths: int) -> None:
        self.now += sixteenths / 16
        if self.rate is not None:
            self.level = min(self.burst, self.level + sixteenths / 16 * self.rate)
        self.resume()

    @precondition(lambda self: self.blocked)
    @rule()
    def wait_until_ready(self) -> None:
        at = self.controller.ready_at(self.now)
        if at is None:
            within = self.capacity is None or self.inside <= self.capacity
            assert self.paused or not within, "a rate alone lets go at some time"
            return
        assert at > self.now
        self.controller.resume(at - 1 / 1024)
        self.they_are_blocked_exactly_while_something_holds()
        self.wait(int((at - self.now) * 16))
        # The reason for the wait may have been the hold of a source that can wait.
        assert self.controller.ready_at(self.now) != at

    @invariant()
    def they_are_blocked_exactly_while_something_holds(self) -> None:
        assert list(self.controller.blocked) == self.blocked
        for source in self.sources:
            assert source.is_blocked is (source in self.blocked)
            assert source.told == (["blocked", "unblocked"] * len(source.told))[: len(source.told)]
            assert len(source.told) % 2 == source.is_blocked
        assert not (self.blocked and self.may_go_on())

    def teardown(self) -> None:
        if self.paused:
            self.pause_or_resume()
        self.controller.release(self.inside, self.inside)
        self.inside = 0
        self.resume()
        for _ in range(2):
            at = self.controller.ready_at(self.now)
            if at is not None:
                self.wait(int((at - self.now) * 16))
        assert not self.blocked, "no source starves"
        assert self.controller.ready_at(self.now) is None


TestToldMachine = ToldMachine.TestCase


@pytest.mark.parametrize("shares", [True, False])
def test_if_two_controllers_block_a_source_each_frees_only_its_own_elements_in_the_previous_controller(
    shares: bool,
) -> None:
    limiter = SizeLimiter(10)
    above, source = FlowController(limiter), Source()
    paused, full = FlowController(SizeLimiter(10)), FlowController(SizeLimiter(1))
    paused.gate.hold("paused", now=0.0)
    above.try_acquire(4, 0.0)
    above.try_acquire(3, 0.0)
    assert source.forward(4, paused, 0.0, held=above)
    if shares:
        assert source.forward(3, full, 0.0, held=above)
    paused.gate.lift("paused", now=1.0)
    paused.resume(1.0)
    assert limiter.used == 3
    assert source.is_blocked is shares
