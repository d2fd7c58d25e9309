"""Limiters (F2): the elements that may be inside at one time, and those that may pass per second."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qflow_client.flow import (
    Capacity,
    CompositeLimiter,
    Limiter,
    RateLimiter,
    SizeLimiter,
    StopResume,
    ThresholdLimiter,
    WindowLimiter,
)

# Window.


def test_F2_a_window_limits_the_number_of_elements_and_not_their_size() -> None:
    window = WindowLimiter(2)
    assert window.refusal(10**9, 0.0) is None
    assert not window.add(10**9, 0.0)
    assert not window.add(0, 0.0)
    assert window.refusal(0, 0.0) == "capacity"
    assert window.ready_at(0, 5.0) is None, "time alone makes no room"
    window.remove(10**9)
    assert window.refusal(1, 0.0) is None
    assert window.ready_at(1, 5.0) == 5.0


def test_C6_after_the_capacity_of_a_window_is_lowered_nothing_is_admitted_until_there_is_room() -> None:
    window = WindowLimiter(3)
    for _ in range(3):
        window.add(1, 0.0)
    window.capacity = 1
    window.remove(2, 2)
    assert window.refusal(1, 0.0) == "capacity"
    window.remove(1)
    assert window.refusal(1, 0.0) is None


def test_removing_more_elements_than_a_window_contains_raises_an_error() -> None:
    window = WindowLimiter(3)
    window.add(1, 0.0)
    with pytest.raises(ValueError, match="2 elements cannot leave a window with 1 elements"):
        window.remove(2, 2)
    assert window.used == 1


@pytest.mark.parametrize("capacity", [0, -1, math.nan, math.inf])
@pytest.mark.parametrize("limiter_type", [WindowLimiter, SizeLimiter])
def test_a_window_or_size_limiter_rejects_an_invalid_capacity_at_construction_and_on_assignment(
    limiter_type: type[WindowLimiter] | type[SizeLimiter], capacity: int
) -> None:
    with pytest.raises(ValueError, match=f"capacity must be at least 1 and finite, not {capacity}"):
        limiter_type(capacity)
    limiter = limiter_type(7)
    with pytest.raises(ValueError, match=f"capacity must be at least 1 and finite, not {capacity}"):
        limiter.capacity = capacity
    assert limiter.capacity == 7, "what was refused changed nothing"
    limiter.capacity = 1
    assert limiter.capacity == 1


def test_the_kind_of_hold_that_a_limiter_returns_for_a_refusal_can_be_chosen() -> None:
    window, size, rate = WindowLimiter(1, kind="w"), SizeLimiter(1, kind="s"), RateLimiter(1, kind="r")
    for limiter in (window, size, rate):
        limiter.add(1, 0.0)
    assert [limiter.refusal(1, 0.0) for limiter in (window, size, rate)] == ["w", "s", "r"]


# Size.


@pytest.mark.parametrize(("size", "refusal"), [(3, None), (4, None), (5, "capacity")])
def test_F2_a_size_limiter_has_room_up_to_its_capacity_and_refuses_one_unit_more(
    size: int, refusal: str | None
) -> None:
    limiter = SizeLimiter(10)
    limiter.add(6, 0.0)
    assert limiter.refusal(size, 0.0) == refusal
    assert limiter.ready_at(size, 7.0) == (7.0 if refusal is None else None)


def test_C6_a_size_limiter_admits_an_element_larger_than_the_capacity_only_if_no_other_element_is_inside() -> None:
    limiter = SizeLimiter(10)
    assert limiter.refusal(11, 0.0) is None
    limiter.add(11, 0.0)
    assert limiter.refusal(0, 0.0) == "capacity", "nobody keeps it company"
    limiter.remove(11)
    limiter.add(1, 0.0)
    assert limiter.refusal(11, 0.0) == "capacity", "and it does not enter beside others"


def test_removing_more_than_a_size_limiter_contains_raises_an_error() -> None:
    limiter = SizeLimiter(10)
    limiter.add(3, 0.0)
    with pytest.raises(ValueError, match="a size of 4 cannot leave a limiter that contains 3"):
        limiter.remove(4)
    assert limiter.used == 3


# Rate.


def test_F2_a_rate_limiter_admits_a_burst_and_then_elements_one_by_one() -> None:
    limiter = RateLimiter(4.0, burst=2)
    assert not limiter.add(100, 0.0)
    assert not limiter.add(100, 0.0)
    assert limiter.refusal(100, 0.0) == "rate"
    assert limiter.ready_at(100, 0.0) == 0.25
    assert limiter.refusal(100, 0.249) == "rate"
    assert limiter.refusal(100, 0.25) is None
    assert not limiter.add(100, 0.25)
    assert limiter.ready_at(100, 0.25) == 0.5


def test_F2_idle_time_refills_a_rate_limiter_only_up_to_the_burst() -> None:
    limiter = RateLimiter(4.0, burst=2)
    for _ in range(2):
        limiter.add(1, 0.0)
    for _ in range(2):
        assert limiter.refusal(1, 1000.0) is None
        limiter.add(1, 1000.0)
    assert limiter.refusal(1, 1000.0) == "rate"


def test_F2_by_size_an_element_larger_than_the_burst_passes_when_the_bucket_is_full_and_delays_the_next() -> None:
    limiter = RateLimiter(10.0, burst=20, by_size=True)
    limiter.add(15, 0.0)
    assert limiter.refusal(5, 0.0) is None
    assert limiter.refusal(6, 0.0) == "rate"
    assert limiter.ready_at(50, 0.0) == 1.5, "it passes when the bucket is full"
    limiter.add(50, 1.5)
    assert limiter.ready_at(0, 1.5) == 1.5 + 3.0, "30 more than the bucket holds are owed"
    assert limiter.ready_at(1, 1.5) == pytest.approx(1.5 + 3.1)


def test_an_element_that_is_added_with_a_time_before_that_of_the_last_element_takes_no_extra_tokens() -> None:
    limiter = RateLimiter(1.0, burst=2)
    limiter.add(1, 10.0)
    limiter.add(1, 9.0)
    assert limiter.ready_at(1, 10.0) == 11.0
    limiter.rate = 2.0
    assert limiter.ready_at(1, 10.0) == 10.5


@pytest.mark.parametrize("rate", [0, -1.0, math.nan, math.inf])
def test_a_rate_limiter_rejects_an_invalid_rate_at_construction_and_on_assignment(rate: float) -> None:
    with pytest.raises(ValueError, match=f"rate must be more than 0 per second and finite, not {rate}"):
        RateLimiter(rate)
    limiter = RateLimiter(7)
    with pytest.raises(ValueError, match=f"rate must be more than 0 per second and finite, not {rate}"):
        limiter.rate = rate
    assert limiter.rate == 7


@pytest.mark.parametrize("burst", [0, 0.5, math.nan, math.inf])
def test_a_rate_limiter_rejects_an_invalid_burst_at_construction_and_on_assignment(burst: float) -> None:
    with pytest.raises(ValueError, match=f"burst must be at least 1 and finite, not {burst}"):
        RateLimiter(1, burst=burst)
    limiter = RateLimiter(1, burst=7)
    with pytest.raises(ValueError, match=f"burst must be at least 1 and finite, not {burst}"):
        limiter.burst = burst
    assert limiter.burst == 7


def test_F6_after_the_rate_is_lowered_the_burst_refills_at_the_lower_rate() -> None:
    limiter = RateLimiter(1024.0, burst=1024)
    for _ in range(1024):
        limiter.add(1, 0.0)
    limiter.rate = 1.0
    assert limiter.ready_at(1, 0.0) == 1.0
    limiter.add(1, 1.0)
    assert limiter.refusal(1, 1.0) == "rate"


def test_F6_a_smaller_burst_cuts_the_token_count_to_the_new_maximum_and_keeps_a_negative_count() -> None:
    limiter = RateLimiter(1.0, burst=8)
    for _ in range(3):
        limiter.add(1, 0.0)
    limiter.burst = 2
    assert limiter.refusal(1, 0.0) is None, "5 were left, of which 2 fit"
    for _ in range(5):
        limiter.add(1, 0.0)
    assert limiter.resumes_at(0.0) == 3.0
    limiter.burst = 1
    assert limiter.resumes_at(0.0) == 3.0, "3 are owed as before"


def test_F6_a_larger_burst_is_available_only_after_enough_idle_time() -> None:
    limiter = RateLimiter(1.0)
    limiter.burst = 4
    for _ in range(4):
        assert not limiter.add(1, 0.0), "all the time before was a rest"
    limiter.burst = 8
    assert limiter.ready_at(1, 0.0) == 1.0
    for _ in range(8):
        assert not limiter.add(1, 8.0)
    assert limiter.add(1, 8.0)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("rate"), st.sampled_from([0.25, 1.0, 8.0])),
            st.tuples(st.just("burst"), st.sampled_from([1.0, 2.0, 8.0])),
            st.tuples(st.just("wait"), st.integers(0, 64).map(lambda n: n / 16)),
        ),
        max_size=20,
    )
)
def test_F6_however_rate_and_burst_change_no_more_passes_than_the_highest_rate_and_burst_allow(
    steps: list[tuple[str, float]],
) -> None:
    limiter = RateLimiter(1.0, burst=2)
    rate, burst, now, passed = 1.0, 2.0, 0.0, 0
    for what, value in [*steps, ("wait", 0.0)]:
        if what == "rate":
            limiter.rate = value
            rate = max(rate, value)
        elif what == "burst":
            limiter.burst = value
            burst = max(burst, value)
        else:
            now += value
            while limiter.try_add(1, now) is None:
                passed += 1
            assert passed <= burst + rate * now
            at = limiter.ready_at(1, now)
            assert at is not None
            assert at <= now + 1 / limiter.rate, "nothing is owed, so one comes in the time of one"


# Composite.


def test_F3_every_part_of_a_composite_limiter_counts_an_element_even_if_an_earlier_part_overflows() -> None:
    window, size = WindowLimiter(1), SizeLimiter(10)
    both = CompositeLimiter([window, size])
    assert not both.add(4, 0.0)
    assert both.add(4, 0.0)
    assert (window.used, size.used) == (2, 8)
    assert not both.resumable
    both.remove(4)
    assert (window.used, size.used) == (1, 4)
    assert both.resumable
    assert both.add(7, 0.0)
    assert not both.resumable


def test_F2_the_slowest_part_of_a_composite_limiter_decides_when_an_element_is_admitted() -> None:
    window, slow, fast = WindowLimiter(2), RateLimiter(1.0), RateLimiter(4.0)
    composite = CompositeLimiter([slow, fast, window])
    assert composite.ready_at(1, 3.0) == 3.0
    composite.add(1, 3.0)
    assert composite.ready_at(1, 3.0) == 4.0
    composite.add(1, 4.0)
    assert composite.ready_at(1, 4.0) is None, "a full window does not empty with time"


def test_F3_the_slowest_part_of_a_composite_limiter_decides_when_blocked_sources_continue() -> None:
    window, slow, fast = WindowLimiter(3), RateLimiter(1.0), RateLimiter(4.0)
    composite = CompositeLimiter([slow, fast, window])
    assert composite.resumes_at(0.0) == 0.0
    for _ in range(3):
        composite.add(1, 0.0)
    assert composite.resumes_at(0.0) == 2.0
    composite.add(1, 0.0)
    assert composite.resumes_at(0.0) is None, "a window does not empty with time"
    composite.remove(1)
    assert composite.resumes_at(0.0) == 3.0
    assert composite.resumes_at(4.0) == 4.0


def test_a_composite_limiter_without_parts_limits_nothing() -> None:
    nothing = CompositeLimiter([])
    assert nothing.refusal(10**9, 0.0) is None
    assert nothing.try_add(10**9, 0.0) is None
    assert not nothing.add(10**9, 0.0)
    assert nothing.resumable
    assert nothing.resumes_at(2.0) == 2.0
    assert nothing.ready_at(1, 2.0) == 2.0
    nothing.remove(1)


# `refusal` and `add` in one call.


def test_a_custom_limiter_needs_only_the_methods_of_the_limiter_protocol() -> None:
    class Even(Limiter):
        """A limiter that admits only elements of even size."""

        def __init__(self) -> None:
            self.used = 0

        def refusal(self, size: int, now: float) -> str | None:
            return "odd" if size % 2 else None

        def add(self, size: int, now: float) -> bool:
            self.used += size
            return bool(self.used % 2)

        def remove(self, size: int, count: int = 1) -> None:
            self.used -= size

        @property
        def resumable(self) -> bool:
            return not self.used % 2

        def ready_at(self, size: int, now: float) -> float | None:
            return None if size % 2 else now

    limiter = Even()
    assert limiter.try_add(3, 0.0) == "odd"
    assert limiter.used == 0
    assert limiter.try_add(2, 0.0) is None
    assert limiter.used == 2
    assert limiter.resumes_at(1.0) == 1.0
    limiter.add(1, 0.0)
    assert limiter.resumes_at(1.0) is None


LIMITERS: dict[str, Callable[[], Limiter]] = {
    "window": lambda: WindowLimiter(3, kind="count"),
    "size": lambda: SizeLimiter(10, kind="size"),
    "rate": lambda: RateLimiter(2.0, burst=3),
    "rate by size": lambda: RateLimiter(8.0, burst=10, by_size=True),
    "stop and resume": lambda: ThresholdLimiter(StopResume(stop_count=3)),
    "capacity": lambda: ThresholdLimiter(Capacity(10)),
    "composite": lambda: CompositeLimiter([RateLimiter(2.0, burst=3), WindowLimiter(3), SizeLimiter(10, kind="size")]),
}


@pytest.mark.parametrize("make", LIMITERS.values(), ids=LIMITERS)
@given(st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.integers(0, 32).map(lambda n: n / 16)), max_size=30))
def test_F2_try_add_of_a_limiter_has_the_same_effect_as_refusal_followed_by_add(
    make: Callable[[], Limiter], steps: list[tuple[int, bool, float]]
) -> None:
    one, two = make(), make()
    now = 0.0
    inside: list[int] = []
    for size, leaves, seconds in steps:
        now += seconds
        if leaves and inside:
            gone = inside.pop(0)
            one.remove(gone)
            two.remove(gone)
        kind = two.refusal(size, now)
        if kind is None:
            two.add(size, now)
            inside.append(size)
        assert one.try_add(size, now) == kind
        assert one.resumes_at(now) == two.resumes_at(now)
        for probe in (0, 1, 5, 12):
            assert one.refusal(probe, now) == two.refusal(probe, now)
            assert one.ready_at(probe, now) == two.ready_at(probe, now)


# Machines.

SIZES = st.integers(0, 12)


class InsideMachine(RuleBasedStateMachine):
    """A window limiter and a size limiter, alone and combined, and a list of the elements inside."""

    def __init__(self) -> None:
        super().__init__()
        self.window = WindowLimiter(1, kind="count")
        self.size = SizeLimiter(1, kind="size")
        self.both = CompositeLimiter([self.window, self.size])
        self.inside: list[int] = []

    @initialize(count=st.integers(1, 5), size=st.integers(1, 20))
    def set_up(self, count: int, size: int) -> None:
        self.window.capacity = count
        self.size.capacity = size

    def expected(self, size: int) -> str | None:
        if len(self.inside) >= self.window.capacity:
            return "count"
        total = sum(self.inside)
        return "size" if total and total + size > self.size.capacity else None

    @rule(size=SIZES)
    def enter_if_allowed(self, size: int) -> None:
        refusal = self.both.refusal(size, 0.0)
        assert refusal == self.expected(size)
        assert (self.both.ready_at(size, 0.0) is None) is (refusal is not None)
        if refusal is None:
            alone = not sum(self.inside)
            self.inside.append(size)
            overflows = self.both.add(size, 0.0)
            assert not overflows or (alone and size > self.size.capacity)
            assert self.window.used <= self.window.capacity
            assert self.size.used <= self.size.capacity or alone

    @rule(size=SIZES)
    def enter_in_one_call(self, size: int) -> None:
        expected = self.expected(size)
        assert self.both.try_add(size, 0.0) == expected
        if expected is None:
            self.inside.append(size)

    @rule(size=SIZES)
    def enter_anyway(self, size: int) -> None:
        self.inside.append(size)
        beyond = len(self.inside) > self.window.capacity or sum(self.inside) > self.size.capacity
        assert self.both.add(size, 0.0) is beyond

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.inside)))
        gone, self.inside = self.inside[:count], self.inside[count:]
        self.both.remove(sum(gone), count)

    @rule(count=st.integers(1, 5), size=st.integers(1, 20))
    def change(self, count: int, size: int) -> None:
        self.window.capacity = count
        self.size.capacity = size

    @invariant()
    def nothing_leaks(self) -> None:
        assert self.window.used == len(self.inside)
        assert self.size.used == sum(self.inside)

    @invariant()
    def it_is_resumable_exactly_when_it_is_within_its_capacity(self) -> None:
        assert self.window.resumable is (len(self.inside) <= self.window.capacity)
        assert self.size.resumable is (sum(self.inside) <= self.size.capacity)
        assert self.both.resumable is (self.window.resumable and self.size.resumable)
        assert self.both.resumes_at(3.0) == (3.0 if self.both.resumable else None)


TestInsideMachine = InsideMachine.TestCase

# Powers of two, and times in sixteenths of a second: all sums are exact, and no tolerance hides an element too many.
RATES = st.sampled_from([0.25, 0.5, 1.0, 2.0, 8.0, 64.0])
SIXTEENTHS = st.integers(0, 64).map(lambda n: n / 16)


class RateMachine(RuleBasedStateMachine):
    """A rate limiter, a bucket of tokens, and a log of all elements that passed."""

    def __init__(self) -> None:
        super().__init__()
        self.limiter = RateLimiter(1.0)
        self.now = 0.0
        self.level = 1.0
        self.passed: list[tuple[float, int]] = []

    @initialize(rate=RATES, burst=st.integers(1, 8), by_size=st.booleans())
    def set_up(self, rate: float, burst: int, by_size: bool) -> None:
        self.limiter = RateLimiter(rate, burst=burst, by_size=by_size)
        self.level = burst

    def cost(self, size: int) -> int:
        return size if self.limiter.by_size else 1

    @rule(seconds=SIXTEENTHS)
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.level = min(self.limiter.burst, self.level + seconds * self.limiter.rate)

    @rule(size=SIZES)
    def pass_if_allowed(self, size: int) -> None:
        cost = self.cost(size)
        enough = self.level >= min(cost, self.limiter.burst)
        assert (self.limiter.refusal(size, self.now) is None) is enough
        if enough:
            assert not self.limiter.add(size, self.now)
            self.level -= cost
            self.passed.append((self.now, cost))
        assert self.limiter.resumes_at(self.now) == self.now + max(0.0, -self.level) / self.limiter.rate

    @rule(size=SIZES)
    def pass_as_soon_as_possible(self, size: int) -> None:
        at = self.limiter.ready_at(size, self.now)
        assert at is not None
        if at > self.now:
            assert self.limiter.refusal(size, at - 1 / 1024) == "rate", "not a moment too late"
            self.wait(at - self.now)
        assert self.limiter.refusal(size, self.now) is None, "not a moment too soon"
        self.pass_if_allowed(size)

    @invariant()
    def the_rate_is_never_exceeded_over_any_interval(self) -> None:
        if not self.passed:
            return
        # Check every interval that ends now. Earlier intervals were checked before.
        end, last = self.passed[-1]
        total = 0
        for start, cost in reversed(self.passed):
            total += cost
            assert total <= max(self.limiter.burst, last) + self.limiter.rate * (end - start)


TestRateMachine = RateMachine.TestCase


@given(RATES, st.integers(1, 8), st.booleans(), st.lists(st.tuples(SIXTEENTHS, SIZES), max_size=30))
def test_F3_each_added_element_takes_exactly_its_cost_from_the_token_count_even_below_0(
    rate: float, burst: int, by_size: bool, arrivals: list[tuple[float, int]]
) -> None:
    limiter = RateLimiter(rate, burst=burst, by_size=by_size)
    now, level = 0.0, float(burst)
    for seconds, size in arrivals:
        now += seconds
        level = min(burst, level + seconds * rate)
        cost = size if by_size else 1
        assert limiter.add(size, now) is (level < min(cost, burst))
        level -= cost
        assert limiter.resumable is (level >= 0)
        assert limiter.resumes_at(now) == now + max(0.0, -level) / rate
    # The bucket is full when all spent tokens are regained.
    assert limiter.ready_at(10**6, now) == (now + (burst - level) / rate if by_size else now + max(0, 1 - level) / rate)
