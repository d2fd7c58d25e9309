"""The adaptive window and a simulated broker, with seeds and in simulated time, so that each run is the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.model import Conditions, Simulation
from qflow_client.flow import AdaptiveWindow, FlowController, WindowLimiter
from tests.effort import EFFORT

MAXIMUM = 10_000
#: A quick run simulates half of each long time.
PART = 0.5 if EFFORT == "quick" else 1.0
FLOOR = 8

#: A broker on the same machine: each batch has a fixed cost, so a larger window always gains a little.
FAST = Conditions(delay=0.00004, overhead=0.0001, batch=256)
SLOW = Conditions(delay=0.0005, rate=1000, batch=1)
#: A round trip takes 20 ms.
FAR = Conditions(delay=0.01, rate=60_000, batch=32)


def rate(conditions: Conditions, window: WindowLimiter, *, after: float = 2.0, seconds: float = 1.0) -> float:
    """Return the confirmed messages per second after the window has found its size."""
    simulation = Simulation(conditions, [window])
    simulation.run(after)
    return simulation.run(seconds) / seconds


def mean_capacity(simulation: Simulation, seconds: float) -> float:
    """Return the average capacity in use over the next seconds."""
    steps = round(seconds / 0.01)
    total = 0
    for _ in range(steps):
        simulation.run(0.01)
        total += simulation.in_use
    return total / steps


def adapted(conditions: Conditions, seconds: float, *, producers: int = 1) -> Simulation:
    """Return a simulation in which the windows of the producers have adapted for this time."""
    simulation = Simulation(conditions, [AdaptiveWindow(MAXIMUM) for _ in range(producers)])
    simulation.run(seconds)
    return simulation


# The size that the window finds.


# A quick run takes the ends of each range. CI also takes values between them.
@pytest.mark.parametrize(
    ("round_trip", "bottleneck"),
    [(0.0001, 60_000), *([] if EFFORT == "quick" else [(0.001, 30_000), (0.02, 30_000)]), (0.2, 20_000)],
)
def test_the_adaptive_window_grows_to_the_capacity_of_any_network_path_and_only_a_little_above_it(
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
def test_the_adaptive_window_has_the_throughput_of_the_best_fixed_window(conditions: Conditions) -> None:
    best = max(rate(conditions, WindowLimiter(capacity), after=1.0) for capacity in (100, 1000, 10_000))
    assert rate(conditions, AdaptiveWindow(MAXIMUM)) >= 0.95 * best


def test_the_adaptive_window_has_most_of_the_best_throughput_on_a_busy_machine() -> None:
    moody = replace(FAST, mood=0.1, preempted=0.05, turn=0.005)
    best = rate(moody, WindowLimiter(MAXIMUM), after=1.0)
    window = AdaptiveWindow(MAXIMUM)
    assert rate(moody, window) >= 0.9 * best
    assert window.capacity < 1000


def test_the_adaptive_window_for_a_slow_broker_stays_close_to_the_minimum() -> None:
    simulation = adapted(SLOW, 10.0)
    assert mean_capacity(simulation, 5.0) <= 1.5 * FLOOR
    assert simulation.windows[0].capacity >= FLOOR


@pytest.mark.parametrize("commit", [0.005, 0.01, 0.02, 0.05])
@pytest.mark.parametrize("batch", [8, 128])
def test_the_adaptive_window_does_not_mistake_the_latency_of_group_commits_for_a_queue(
    commit: float, batch: int
) -> None:
    conditions = Conditions(delay=0.0001, rate=30_000, commit=commit, batch=batch)
    best = rate(conditions, WindowLimiter(MAXIMUM), after=1.0)
    window = AdaptiveWindow(MAXIMUM)
    assert rate(conditions, window) >= 0.95 * best
    # One commit is under way, and one waits for it.
    assert window.capacity <= 4 * commit * 30_000


# A queue that fills.

QUEUE = Conditions(delay=0.00005, overhead=0.0001, batch=256, stop=1000, resume=700, consumed=500)


def overshoot(simulation: Simulation, seconds: float) -> int:
    """Return the largest number of messages above the stop threshold within this time."""
    simulation.peak = 0
    simulation.run(seconds)
    return simulation.peak - simulation.conditions.stop


def test_the_adaptive_window_shrinks_when_a_full_queue_withholds_confirms() -> None:
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
def test_an_adaptive_window_overshoots_the_stop_threshold_by_less_than_a_fifth_of_a_fixed_window(
    producers: int,
) -> None:
    fixed = Simulation(QUEUE, [WindowLimiter(1000) for _ in range(producers)])
    adaptive = Simulation(QUEUE, [AdaptiveWindow(MAXIMUM) for _ in range(producers)])
    assert overshoot(adaptive, 10.0) < overshoot(fixed, 10.0) / 5
    assert overshoot(adaptive, 10.0) <= 2 * FLOOR * producers


# Two producers drive each other's windows up less than four producers.
@pytest.mark.parametrize("producers", [4] if EFFORT == "quick" else [2, 4])
def test_adaptive_producers_that_share_a_broker_do_not_drive_their_windows_up(producers: int) -> None:
    simulation = adapted(replace(FAST, mood=0.05), 6.0 * PART, producers=producers)
    confirmed = list(simulation.confirmed)
    assert mean_capacity(simulation, 2.0 * PART) < MAXIMUM
    own = [now - before for now, before in zip(simulation.confirmed, confirmed, strict=True)]
    assert sum(own) >= 0.95 * 2 * PART * 57_000
    assert min(own) >= sum(own) / producers / 5, "and none of them starves"


# Changes of the broker and of the network path.


def test_the_adaptive_window_grows_within_a_second_when_the_broker_becomes_faster() -> None:
    simulation = adapted(SLOW, 5.0)
    simulation.conditions = replace(SLOW, rate=60_000, batch=8)
    simulation.run(1.0)
    assert simulation.run(PART) >= 0.95 * PART * 60_000


def test_the_adaptive_window_shrinks_within_two_seconds_when_the_broker_becomes_slower() -> None:
    simulation = adapted(replace(SLOW, rate=60_000, batch=8), 3.0 * PART)
    simulation.conditions = SLOW
    simulation.run(2.0)
    assert mean_capacity(simulation, 1.0) <= 2 * FLOOR
    assert simulation.run(2.0) >= 0.95 * 2000


@pytest.mark.parametrize(
    ("before", "after"), [(0.001, 0.05), (0.05, 0.001), *([] if EFFORT == "quick" else [(0.02, 0.04)])]
)
def test_the_adaptive_window_adapts_to_a_change_of_the_network_path(before: float, after: float) -> None:
    conditions = Conditions(delay=before / 2, rate=8000)
    simulation = adapted(conditions, 3.0)
    simulation.conditions = replace(conditions, delay=after / 2)
    simulation.run(8.0)
    assert simulation.run(2.0) >= 0.95 * 2 * 8000
    window = simulation.windows[0]
    assert isinstance(window, AdaptiveWindow)
    assert window.way <= after * 1.5


def test_the_round_trip_time_is_measured_again_when_the_last_measurement_is_old() -> None:
    simulation = adapted(replace(FAST, rate=10_000), 3.0)
    assert simulation.in_use > 2 * FLOOR
    assert min_capacity(simulation, 9.0) == FLOOR


def min_capacity(simulation: Simulation, seconds: float) -> int:
    least = MAXIMUM
    for _ in range(round(seconds / 0.002)):
        simulation.run(0.002)
        least = min(least, simulation.in_use)
    return least


# Observations from which the window cannot learn anything.


def test_an_application_that_sends_few_messages_does_not_change_the_adaptive_window() -> None:
    simulation = adapted(Conditions(), 1.0)
    simulation.backlog[0] = 0
    simulation.run(0.1)
    before = simulation.in_use
    # Single messages at a third of the broker's rate, for a quarter of a minute.
    for _ in range(500):
        simulation.offer(0, 1)
        simulation.run(0.03)
    assert simulation.in_use == before
    simulation.offer(0, 10**9)
    assert simulation.run(0.5) >= 0.95 * 0.5 * 60_000, "and it is there when it is needed"


def test_a_pause_of_the_application_does_not_change_the_adaptive_window() -> None:
    simulation = adapted(Conditions(), 1.0)
    simulation.backlog[0] = 0
    simulation.run(600.0)
    assert simulation.in_use >= 60
    simulation.offer(0, 10**9)
    assert simulation.run(0.5) >= 0.95 * 0.5 * 60_000


def test_bursts_of_messages_with_pauses_between_them_do_not_shrink_the_adaptive_window() -> None:
    simulation = adapted(Conditions(), 1.0)
    simulation.backlog[0] = 0
    simulation.run(0.1)
    for _ in range(100):
        simulation.offer(0, 600)
        simulation.run(0.2)
        assert simulation.backlog[0] == 0
    assert simulation.in_use >= 60


# The window without a simulation.


def fill(window: WindowLimiter, now: float) -> None:
    while window.try_add(1, now) is None:
        pass


def leave(window: AdaptiveWindow, count: int, now: float) -> None:
    window.observe(count, now)
    window.remove(count, count)


def rounds(window: AdaptiveWindow, count: int, start: float, seconds: float) -> float:
    """Let the broker answer a whole window at once, `count` times. Return the time of the last answer."""
    now = start
    for _ in range(count):
        fill(window, now)
        now += seconds
        leave(window, window.used, now)
    return now


def test_the_adaptive_window_doubles_as_long_as_throughput_doubles() -> None:
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


def test_an_adaptive_window_that_has_reached_its_maximum_stays_there_most_of_the_time() -> None:
    window = AdaptiveWindow(100)
    now = rounds(window, 40, 0.0, 0.1)
    full = 0
    for _ in range(100):
        now = rounds(window, 1, now, 0.1)
        full += window.capacity == 100
    assert full >= 75
    assert window.capacity >= 70


def test_withheld_confirms_halve_the_adaptive_window_before_the_next_message_is_admitted() -> None:
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


def test_an_adaptive_window_at_its_minimum_can_measure_a_round_trip_that_suddenly_gets_much_longer() -> None:
    window = AdaptiveWindow(MAXIMUM)
    now = rounds(window, 4, 0.0, 0.001)
    now = rounds(window, 40, now, 5.0)
    assert window.way == pytest.approx(5.0)
    assert window.capacity > 100


def test_the_adaptive_window_does_not_mistake_a_pause_of_the_application_for_withheld_confirms() -> None:
    window = AdaptiveWindow(MAXIMUM)
    now = rounds(window, 30, 0.0, 0.01)
    before = window.capacity
    now += 30.0
    fill(window, now)
    leave(window, 1, now + 0.01)
    assert window.capacity == before


@pytest.mark.parametrize("maximum", [1, 2, 8, 9, 31])
def test_an_adaptive_window_with_a_small_maximum_never_exceeds_it(maximum: int) -> None:
    window = AdaptiveWindow(maximum)
    now = 0.0
    for _ in range(300):
        now = rounds(window, 1, now, 0.02)
        assert min(FLOOR, maximum) <= window.capacity <= maximum


@pytest.mark.parametrize("maximum", [0, -1])
def test_an_adaptive_window_with_a_maximum_of_0_raises_value_error(maximum: int) -> None:
    with pytest.raises(ValueError, match=f"maximum must be at least 1 and finite, not {maximum}"):
        AdaptiveWindow(maximum)


def test_the_adaptive_window_implements_the_limiter_protocol() -> None:
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


def test_messages_that_settle_at_the_time_of_their_admission_do_not_change_the_measured_round_trip() -> None:
    window = AdaptiveWindow(MAXIMUM)
    now = 0.0
    for _ in range(60):
        now = rounds(window, 1, now, 0.01)
        # Messages that are given up before any time has passed.
        rounds(window, 2, now, 0.0)
    assert window.way == pytest.approx(0.01)


def test_a_capacity_that_a_caller_sets_on_an_adaptive_window_applies_until_its_next_adjustment() -> None:
    window = AdaptiveWindow(MAXIMUM)
    now = 0.0
    for _ in range(3):
        # The capacity is the same again, so an epoch cannot be compared with the previous one.
        window.capacity = 50
        fill(window, now)
        assert window.used == 50
        now = rounds(window, 1, now, 0.1)
    now = rounds(window, 100, now, 0.1)
    assert window.capacity > 50


# Any sequence of events.


class AdaptiveMachine(RuleBasedStateMachine):
    """The window, and a count of the elements inside. Answers come in any order, late, or many at once."""

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
