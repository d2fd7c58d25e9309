"""The adaptive window, against a simulated broker: seeded, in simulated time, and so the same every time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.model import Conditions, Simulation
from qflow_client.flow import AdaptiveWindow, FlowController, WindowLimiter
from tests.effort import EFFORT

MAXIMUM = 10_000
#: A quick run simulates half of each time that is long enough to be halved.
PART = 0.5 if EFFORT == "quick" else 1.0
FLOOR = 8

#: A broker on the same machine: each batch costs something of its own, so that no window is ever quite enough.
FAST = Conditions(delay=0.00004, overhead=0.0001, batch=256)
SLOW = Conditions(delay=0.0005, rate=1000, batch=1)
#: 20 ms there and back.
FAR = Conditions(delay=0.01, rate=60_000, batch=32)


def rate(conditions: Conditions, window: WindowLimiter, *, after: float = 2.0, seconds: float = 1.0) -> float:
    """Messages per second that are confirmed, once the window has found its size."""
    simulation = Simulation(conditions, [window])
    simulation.run(after)
    return simulation.run(seconds) / seconds


def mean_capacity(simulation: Simulation, seconds: float) -> float:
    """What is in use on average over the next seconds."""
    steps = round(seconds / 0.01)
    total = 0
    for _ in range(steps):
        simulation.run(0.01)
        total += simulation.in_use
    return total / steps


def adapted(conditions: Conditions, seconds: float, *, producers: int = 1) -> Simulation:
    """A simulation in which producers have adapted for so long."""
    simulation = Simulation(conditions, [AdaptiveWindow(MAXIMUM) for _ in range(producers)])
    simulation.run(seconds)
    return simulation


# What it finds.


# A quick run takes the ends of each range, and CI also what lies between them.
@pytest.mark.parametrize(
    ("round_trip", "bottleneck"),
    [(0.0001, 60_000), *([] if EFFORT == "quick" else [(0.001, 30_000), (0.02, 30_000)]), (0.2, 20_000)],
)
def test_the_window_grows_to_the_capacity_of_any_path_and_only_a_little_above_it(
    round_trip: float, bottleneck: float
) -> None:
    conditions = Conditions(delay=round_trip / 2, rate=bottleneck, batch=max(4, int(bottleneck * round_trip / 100)))
    simulation = adapted(conditions, 2.0 + 20 * round_trip)
    under_way = bottleneck * round_trip
    confirmed = sum(simulation.confirmed)
    mean = mean_capacity(simulation, 1.0)
    assert sum(simulation.confirmed) - confirmed >= 0.95 * bottleneck
    assert under_way < mean <= 1.6 * under_way + FLOOR


@pytest.mark.parametrize("conditions", [FAST, SLOW, FAR], ids=["fast", "slow", "far"])
def test_the_window_keeps_the_throughput_of_the_best_fixed_window(conditions: Conditions) -> None:
    best = max(rate(conditions, WindowLimiter(capacity), after=1.0) for capacity in (100, 1000, 10_000))
    assert rate(conditions, AdaptiveWindow(MAXIMUM)) >= 0.95 * best


def test_the_window_keeps_most_of_the_throughput_on_a_busy_machine() -> None:
    moody = replace(FAST, mood=0.1, preempted=0.05, turn=0.005)
    best = rate(moody, WindowLimiter(MAXIMUM), after=1.0)
    window = AdaptiveWindow(MAXIMUM)
    assert rate(moody, window) >= 0.9 * best
    assert window.capacity < 1000


def test_the_window_of_a_slow_broker_stays_close_to_the_minimum() -> None:
    simulation = adapted(SLOW, 10.0)
    assert mean_capacity(simulation, 5.0) <= 1.5 * FLOOR
    assert simulation.windows[0].capacity >= FLOOR


@pytest.mark.parametrize("commit", [0.005, 0.01, 0.02, 0.05])
@pytest.mark.parametrize("batch", [8, 128])
def test_the_latency_of_group_commits_is_not_mistaken_for_a_queue(commit: float, batch: int) -> None:
    conditions = Conditions(delay=0.0001, rate=30_000, commit=commit, batch=batch)
    best = rate(conditions, WindowLimiter(MAXIMUM), after=1.0)
    window = AdaptiveWindow(MAXIMUM)
    assert rate(conditions, window) >= 0.95 * best
    # A commit under way and one that waits for it.
    assert window.capacity <= 4 * commit * 30_000


# A queue that fills.

QUEUE = Conditions(delay=0.00005, overhead=0.0001, batch=256, stop=1000, resume=700, consumed=500)


def overshoot(simulation: Simulation, seconds: float) -> int:
    """The most messages beyond the stop threshold within so many seconds."""
    simulation.peak = 0
    simulation.run(seconds)
    return simulation.peak - simulation.conditions.stop


def test_the_window_shrinks_when_a_queue_fills_and_withholds_confirms() -> None:
    simulation = adapted(replace(QUEUE, stop=0, consumed=None), 3.0)
    before = simulation.in_use
    assert before > 100
    simulation.conditions = QUEUE
    assert overshoot(simulation, 1.0) <= before, "the first time, the producer cannot know"
    simulation.run(9.0)
    consumed = sum(simulation.confirmed)
    assert overshoot(simulation, 20.0) <= 1.5 * FLOOR
    assert sum(simulation.confirmed) - consumed == pytest.approx(20 * 500, rel=0.05), "the consumer never waits"


@pytest.mark.parametrize("producers", [1, 8] if EFFORT == "quick" else [1, 2, 8])
def test_the_overshoot_is_less_than_a_fifth_of_the_overshoot_of_a_fixed_window(producers: int) -> None:
    fixed = Simulation(QUEUE, [WindowLimiter(1000) for _ in range(producers)])
    adaptive = Simulation(QUEUE, [AdaptiveWindow(MAXIMUM) for _ in range(producers)])
    assert overshoot(adaptive, 10.0) < overshoot(fixed, 10.0) / 5
    assert overshoot(adaptive, 10.0) <= 2 * FLOOR * producers


# Two drive each other up less than four do.
@pytest.mark.parametrize("producers", [4] if EFFORT == "quick" else [2, 4])
def test_producers_that_share_a_broker_do_not_enlarge_each_other_s_window(producers: int) -> None:
    simulation = adapted(replace(FAST, mood=0.05), 6.0 * PART, producers=producers)
    confirmed = list(simulation.confirmed)
    assert mean_capacity(simulation, 2.0 * PART) < MAXIMUM
    own = [now - before for now, before in zip(simulation.confirmed, confirmed, strict=True)]
    assert sum(own) >= 0.95 * 2 * PART * 57_000
    assert min(own) >= sum(own) / producers / 5, "and none of them starves"


# What changes.


def test_the_window_recovers_within_a_second_when_the_broker_becomes_faster() -> None:
    simulation = adapted(SLOW, 5.0)
    simulation.conditions = replace(SLOW, rate=60_000, batch=8)
    simulation.run(1.0)
    assert simulation.run(PART) >= 0.95 * PART * 60_000


def test_the_window_shrinks_within_two_seconds_when_the_broker_becomes_slower() -> None:
    simulation = adapted(replace(SLOW, rate=60_000, batch=8), 3.0 * PART)
    simulation.conditions = SLOW
    simulation.run(2.0)
    assert mean_capacity(simulation, 1.0) <= 2 * FLOOR
    assert simulation.run(2.0) >= 0.95 * 2000


@pytest.mark.parametrize(
    ("before", "after"), [(0.001, 0.05), (0.05, 0.001), *([] if EFFORT == "quick" else [(0.02, 0.04)])]
)
def test_the_window_adapts_to_a_change_of_the_network_path(before: float, after: float) -> None:
    conditions = Conditions(delay=before / 2, rate=8000)
    simulation = adapted(conditions, 3.0)
    simulation.conditions = replace(conditions, delay=after / 2)
    simulation.run(8.0)
    assert simulation.run(2.0) >= 0.95 * 2 * 8000
    window = simulation.windows[0]
    assert isinstance(window, AdaptiveWindow)
    assert window.way <= after * 1.5


def test_the_round_trip_time_is_measured_again_when_it_is_old() -> None:
    simulation = adapted(replace(FAST, rate=10_000), 3.0)
    assert simulation.in_use > 2 * FLOOR
    assert min_capacity(simulation, 9.0) == FLOOR


def min_capacity(simulation: Simulation, seconds: float) -> int:
    least = MAXIMUM
    for _ in range(round(seconds / 0.002)):
        simulation.run(0.002)
        least = min(least, simulation.in_use)
    return least


# What says nothing.


def test_an_application_that_sends_little_does_not_change_the_window() -> None:
    simulation = adapted(Conditions(), 1.0)
    simulation.backlog[0] = 0
    simulation.run(0.1)
    before = simulation.in_use
    # A third of what the broker manages, one by one, for a quarter of a minute.
    for _ in range(500):
        simulation.offer(0, 1)
        simulation.run(0.03)
    assert simulation.in_use == before
    simulation.offer(0, 10**9)
    assert simulation.run(0.5) >= 0.95 * 0.5 * 60_000, "and it is there when it is needed"


def test_a_pause_does_not_change_the_window() -> None:
    simulation = adapted(Conditions(), 1.0)
    simulation.backlog[0] = 0
    simulation.run(600.0)
    assert simulation.in_use >= 60
    simulation.offer(0, 10**9)
    assert simulation.run(0.5) >= 0.95 * 0.5 * 60_000


def test_bursts_with_pauses_between_them_do_not_shrink_the_window() -> None:
    simulation = adapted(Conditions(), 1.0)
    simulation.backlog[0] = 0
    simulation.run(0.1)
    for _ in range(100):
        simulation.offer(0, 600)
        simulation.run(0.2)
        assert simulation.backlog[0] == 0
    assert simulation.in_use >= 60


# Step by step.


def fill(window: WindowLimiter, now: float) -> None:
    while window.try_add(1, now) is None:
        pass


def leave(window: AdaptiveWindow, count: int, now: float) -> None:
    window.observe(count, now)
    window.remove(count, count)


def rounds(window: AdaptiveWindow, count: int, start: float, seconds: float) -> float:
    """Have whole windows answered at once, so many times; returns when the last was."""
    now = start
    for _ in range(count):
        fill(window, now)
        now += seconds
        leave(window, window.used, now)
    return now


def test_the_window_doubles_as_long_as_throughput_doubles() -> None:
    window = AdaptiveWindow(MAXIMUM)
    seen = [window.capacity]
    now = 0.0
    while window.capacity < MAXIMUM:
        now = rounds(window, 1, now, 0.1)
        if window.capacity != seen[-1]:
            seen.append(window.capacity)
    assert seen == [32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, MAXIMUM]
    assert window.way == pytest.approx(0.1)
    assert window.latency == pytest.approx(0.1)
    assert window.rate == pytest.approx(81_920)


def test_a_window_at_its_maximum_is_not_reduced_all_the_time() -> None:
    window = AdaptiveWindow(100)
    now = rounds(window, 40, 0.0, 0.1)
    full = 0
    for _ in range(100):
        now = rounds(window, 1, now, 0.1)
        full += window.capacity == 100
    assert full >= 75
    assert window.capacity >= 70


def test_withheld_answers_halve_the_window_before_the_next_message_is_admitted() -> None:
    window = AdaptiveWindow(MAXIMUM)
    now = rounds(window, 30, 0.0, 0.01)
    before = window.capacity
    for _ in range(2):
        fill(window, now)
        leave(window, before // 2, now)
    fill(window, now)
    now += 30.0
    leave(window, 1, now)
    assert window.capacity == before // 2
    assert window.refusal(1, now) == "capacity", "nothing is cancelled, and nothing enters until there is room"


def test_no_answer_counts_as_withheld_at_the_minimum_window_so_that_a_long_path_can_be_measured() -> None:
    window = AdaptiveWindow(MAXIMUM)
    now = rounds(window, 4, 0.0, 0.001)
    now = rounds(window, 40, now, 5.0)
    assert window.way == pytest.approx(5.0)
    assert window.capacity > 100


def test_a_pause_of_the_application_is_not_mistaken_for_withheld_answers() -> None:
    window = AdaptiveWindow(MAXIMUM)
    now = rounds(window, 30, 0.0, 0.01)
    before = window.capacity
    now += 30.0
    fill(window, now)
    leave(window, 1, now + 0.01)
    assert window.capacity == before


@pytest.mark.parametrize("maximum", [1, 2, 8, 9, 31])
def test_the_capacity_of_an_adaptive_window_stays_within_a_small_maximum(maximum: int) -> None:
    window = AdaptiveWindow(maximum)
    now = 0.0
    for _ in range(300):
        now = rounds(window, 1, now, 0.02)
        assert min(FLOOR, maximum) <= window.capacity <= maximum


@pytest.mark.parametrize("maximum", [0, -1])
def test_a_maximum_of_0_is_refused(maximum: int) -> None:
    with pytest.raises(ValueError, match=f"maximum must be at least 1 and finite, not {maximum}"):
        AdaptiveWindow(maximum)


def test_the_adaptive_window_has_the_interface_of_a_limiter() -> None:
    window = AdaptiveWindow(MAXIMUM, kind="full")
    controller = FlowController(window)
    admitted = 0
    while controller.try_acquire(1, 0.0):
        admitted += 1
    assert admitted == window.used == window.capacity
    assert [hold.kind for hold in controller.gate.holds] == ["full"]
    window.observe(admitted, 0.1)
    controller.release(admitted, admitted)
    assert controller.look(0.1)


def test_messages_that_settle_immediately_give_no_measurement() -> None:
    window = AdaptiveWindow(MAXIMUM)
    now = 0.0
    for _ in range(60):
        now = rounds(window, 1, now, 0.01)
        # Such as are given up before time passes.
        rounds(window, 2, now, 0.0)
    assert window.way == pytest.approx(0.01)


def test_a_capacity_that_is_set_from_outside_applies_until_the_next_epoch() -> None:
    window = AdaptiveWindow(MAXIMUM)
    now = 0.0
    for _ in range(3):
        # The same again, so that an epoch has nothing to be compared with.
        window.capacity = 50
        fill(window, now)
        assert window.used == 50
        now = rounds(window, 1, now, 0.1)
    now = rounds(window, 100, now, 0.1)
    assert window.capacity > 50


# Whatever happens.


class AdaptiveMachine(RuleBasedStateMachine):
    """The window beside a number of what is inside; answers come in any order, late, or many at once."""

    def __init__(self) -> None:
        super().__init__()
        self.window = AdaptiveWindow(1)
        self.inside = 0
        self.now = 0.0
        self.least = 1

    @initialize(maximum=st.integers(1, 300))
    def set_up(self, maximum: int) -> None:
        self.window = AdaptiveWindow(maximum)
        self.least = min(FLOOR, maximum)

    @rule(seconds=st.sampled_from([1e-6, 1e-3, 0.02, 0.06, 1.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(count=st.integers(1, 400))
    def enter(self, count: int) -> None:
        for _ in range(count):
            refusal = self.window.refusal(1, self.now)
            assert (refusal is None) is (self.inside < self.window.capacity)
            assert self.window.try_add(1, self.now) == refusal
            if refusal is not None:
                break
            self.inside += 1
            assert self.window.used <= self.window.capacity

    @rule()
    def enter_anyway(self) -> None:
        self.inside += 1
        assert self.window.add(1, self.now) is (self.inside > self.window.capacity)

    @precondition(lambda self: self.inside)
    @rule(part=st.sampled_from([0.0, 0.3, 1.0]))
    def leave(self, part: float) -> None:
        count = max(1, int(self.inside * part))
        leave(self.window, count, self.now)
        self.inside -= count

    @precondition(lambda self: self.inside)
    @rule(times=st.integers(1, 40), seconds=st.sampled_from([1e-4, 0.01, 0.06, 2.0]))
    def go_round(self, times: int, seconds: float) -> None:
        for _ in range(times):
            self.enter(400)
            self.now += seconds
            self.leave(1.0)
        self.enter(1)

    @rule(part=st.floats(0, 1))
    def set_from_outside(self, part: float) -> None:
        self.window.capacity = max(1, int(self.window.maximum * part))
        self.least = 1

    @invariant()
    def it_stays_in_its_bounds(self) -> None:
        assert self.least <= self.window.capacity <= self.window.maximum

    @invariant()
    def nothing_leaks(self) -> None:
        assert self.window.used == self.inside

    def teardown(self) -> None:
        if self.inside:
            leave(self.window, self.inside, self.now)
        assert self.window.refusal(1, self.now) is None


TestAdaptiveMachine = AdaptiveMachine.TestCase
