"""The thresholds of a queue: Qpid C++'s stop and resume thresholds (C1-C4), and Qpid Java's capacities (J1 J2)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qflow_client.flow import Capacity, StopResume, ThresholdLimiter, Thresholds


def depth(thresholds: Thresholds, count: int = 0, size: int = 0) -> ThresholdLimiter:
    """Return a queue of this depth that never was deeper."""
    return ThresholdLimiter(thresholds, count=count, size=size)


def on_at(thresholds: Thresholds, count: int = 0, size: int = 0) -> ThresholdLimiter:
    """Return a queue of this depth whose state is ON, because it was deeper before."""
    more, bigger = 1_000_000, 1_000_000_000
    limiter = ThresholdLimiter(thresholds, count=count + more, size=size + bigger)
    assert limiter.on
    limiter.remove(bigger, more)
    return limiter


# C1: ON above a stop.


@pytest.mark.parametrize("unit", ["count", "size"])
@pytest.mark.parametrize(("value", "on"), [(0, False), (899, False), (900, False), (901, True), (902, True)])
def test_C1_the_state_turns_on_only_above_the_stop_count_or_the_stop_size(unit: str, value: int, on: bool) -> None:
    assert depth(StopResume(**{f"stop_{unit}": 900, f"resume_{unit}": 500}), **{unit: value}).on is on


# C1: OFF below a resume.


@pytest.mark.parametrize("unit", ["count", "size"])
@pytest.mark.parametrize(("value", "on"), [(501, True), (500, True), (499, False), (0, False)])
def test_C1_the_state_turns_off_only_below_the_resume_count_or_the_resume_size(unit: str, value: int, on: bool) -> None:
    assert on_at(StopResume(**{f"stop_{unit}": 900, f"resume_{unit}": 500}), **{unit: value}).on is on


def test_C1_with_stop_900_and_resume_500_the_state_turns_on_at_901_messages_and_off_at_499() -> None:
    queue = depth(StopResume(stop_count=900, resume_count=500), 0)
    assert not queue.on, "the initial state is OFF"
    for _ in range(900):
        assert not queue.add(1, 0.0), "while there are 900 or fewer it remains OFF"
    assert queue.add(1, 0.0), "the 901st turns it ON"
    while queue.count > 500:
        queue.remove(1)
        assert queue.on, "it remains ON until there are fewer than 500"
    queue.remove(1)
    assert not queue.on
    for _ in range(900 - 499):
        assert not queue.add(1, 0.0), "and it stays OFF up to the stop threshold again"
    assert queue.add(1, 0.0)
    assert queue.times_on == 2
    assert queue.peak_count == 901


# C2: one dimension is enough to stop, both must allow to resume.

EXAMPLE = StopResume(stop_count=4000, resume_count=3000, stop_size=8 * 1024, resume_size=6 * 1024)
"""The worked example with 4000 messages and 8K bytes, 3000 messages and 6K bytes."""


@pytest.mark.parametrize(
    ("count", "size", "on"),
    [
        (4000, 8192, False),
        (4001, 8192, True),
        (4000, 8193, True),
        (4001, 8193, True),
        (3999, 8191, False),
        (4001, 0, True),
        (1, 8193, True),
    ],
)
def test_C2_exceeding_the_stop_count_or_the_stop_size_turns_the_state_on(count: int, size: int, on: bool) -> None:
    assert depth(EXAMPLE, count, size).on is on


@pytest.mark.parametrize(
    ("count", "size", "on"),
    [
        (3000, 6144, True),
        (2999, 6144, True),
        (3000, 6143, True),
        (2999, 6143, False),
        (3001, 0, True),
        (1, 6145, True),
        (0, 0, False),
    ],
)
def test_C2_the_state_turns_off_only_when_both_resume_thresholds_are_reached(count: int, size: int, on: bool) -> None:
    assert on_at(EXAMPLE, count, size).on is on


def test_C2_with_only_a_stop_count_or_only_a_stop_size_the_other_quantity_neither_stops_nor_resumes() -> None:
    by_count = on_at(StopResume(stop_count=10, resume_count=5), 4, 1_000_000)
    assert not by_count.on, "bytes do not keep it ON"
    by_size = on_at(StopResume(stop_size=10, resume_size=5), 1_000_000, 4)
    assert not by_size.on, "messages do not keep it ON"
    assert not depth(StopResume(stop_count=10, resume_count=5), 10, 1_000_000).on
    assert not depth(StopResume(stop_size=10, resume_size=5), 1_000_000, 10).on


@pytest.mark.parametrize("unit", ["count", "size"])
def test_C2_a_stop_threshold_below_the_resume_threshold_raises_an_error_that_shows_both_values(unit: str) -> None:
    with pytest.raises(ValueError, match=f"flow_stop_{unit}=99 and flow_resume_{unit}=100"):
        StopResume(**{f"stop_{unit}": 99, f"resume_{unit}": 100})
    equal = StopResume(**{f"stop_{unit}": 100, f"resume_{unit}": 100})
    assert equal.is_set
    assert StopResume(**{f"stop_{unit}": 101, f"resume_{unit}": 100}).is_set


@pytest.mark.parametrize("unit", ["count", "size"])
@pytest.mark.parametrize("resume", [0, -1])
def test_C2_a_resume_threshold_below_1_raises_an_error_that_shows_both_thresholds(unit: str, resume: int) -> None:
    with pytest.raises(ValueError, match=f"flow_stop_{unit}=10 and flow_resume_{unit}={resume}"):
        StopResume(**{f"stop_{unit}": 10, f"resume_{unit}": resume})
    assert StopResume(**{f"stop_{unit}": 10, f"resume_{unit}": 1}).is_set


@pytest.mark.parametrize("unit", ["count", "size"])
@pytest.mark.parametrize(
    ("threshold", "value", "error"),
    [
        ("resume", 5, "flow_stop_{unit}=0 and flow_resume_{unit}=5"),
        ("resume", -1, "flow_resume_{unit}=-1: it must be at least 0"),
        ("stop", -1, "flow_stop_{unit}=-1"),
    ],
)
def test_C2_a_negative_threshold_and_a_resume_threshold_without_a_stop_threshold_raise_an_error(
    unit: str, threshold: str, value: int, error: str
) -> None:
    with pytest.raises(ValueError, match=error.format(unit=unit)):
        StopResume(**{f"{threshold}_{unit}": value})


# C3: missing values, and values that switch off.


@pytest.mark.parametrize(("stop", "resume"), [(1, 1), (2, 1), (7, 6), (8, 7), (9, 7), (15, 13), (16, 14), (1000, 875)])
def test_C3_a_stop_threshold_without_a_resume_threshold_gets_a_resume_threshold_of_seven_eighths(
    stop: int, resume: int
) -> None:
    assert StopResume(stop_count=stop).resume_count == resume
    assert StopResume(stop_size=stop).resume_size == resume


def test_C3_stop_thresholds_of_0_turn_flow_control_off_for_the_queue() -> None:
    off = StopResume()
    assert not off.is_set
    assert (off.resume_count, off.resume_size) == (0, 0)
    queue = depth(off, 1_000_000, 1_000_000_000)
    assert not queue.on
    assert not queue.add(1_000_000_000, 0.0)
    assert not StopResume(stop_count=0, resume_count=0, stop_size=0, resume_size=0).is_set


@pytest.mark.parametrize(("count", "size"), [(1, 0), (0, 1), (1, 1)])
def test_C3_thresholds_are_set_if_there_is_a_stop_count_or_a_stop_size(count: int, size: int) -> None:
    assert StopResume(stop_count=count, stop_size=size).is_set


# C4: defaults from a maximum.


@pytest.mark.parametrize(
    ("maximum", "stop", "resume"),
    [(1, 1, 1), (2, 1, 1), (3, 2, 2), (4, 3, 2), (9, 7, 6), (10, 8, 7), (11, 8, 7), (19, 15, 13), (1000, 800, 700)],
)
def test_C4_default_thresholds_are_80_and_70_percent_of_the_maximum_rounded_down_and_at_least_1(
    maximum: int, stop: int, resume: int
) -> None:
    by_count = StopResume.from_limits(max_count=maximum)
    assert by_count == StopResume(stop_count=stop, resume_count=resume)
    by_size = StopResume.from_limits(max_size=maximum)
    assert by_size == StopResume(stop_size=stop, resume_size=resume)


def test_C4_with_90_and_75_percent_of_10000_bytes_the_thresholds_are_9000_and_7500() -> None:
    thresholds = StopResume.from_limits(max_size=10000, stop_percent=90, resume_percent=75)
    assert thresholds == StopResume(0, 0, 9000, 7500)


def test_C4_a_maximum_count_and_size_give_default_thresholds_and_without_a_maximum_there_are_none() -> None:
    assert StopResume.from_limits(100, 1000) == StopResume(80, 70, 800, 700)
    assert not StopResume.from_limits().is_set


def test_C4_percentages_of_0_set_no_default_thresholds() -> None:
    assert not StopResume.from_limits(100, 1000, stop_percent=0, resume_percent=0).is_set


def test_C4_a_resume_percentage_of_0_gives_a_resume_threshold_of_1() -> None:
    assert StopResume.from_limits(100, stop_percent=80, resume_percent=0).resume_count == 1


@pytest.mark.parametrize("percent", [-1, 101])
def test_C4_a_threshold_percentage_must_be_between_0_and_100(percent: int) -> None:
    with pytest.raises(ValueError, match=f"stop_percent={percent}"):
        StopResume.from_limits(100, stop_percent=percent, resume_percent=0)
    with pytest.raises(ValueError, match=f"resume_percent={percent}"):
        StopResume.from_limits(100, stop_percent=100, resume_percent=percent)
    assert StopResume.from_limits(100, stop_percent=100, resume_percent=100) == StopResume(100, 100)


def test_C4_a_stop_percentage_below_the_resume_percentage_raises_an_error_that_shows_both() -> None:
    with pytest.raises(ValueError, match="stop_percent=69 and resume_percent=70"):
        StopResume.from_limits(100, stop_percent=69)
    assert StopResume.from_limits(100, stop_percent=70) == StopResume(70, 70)


@pytest.mark.parametrize("name", ["max_count", "max_size"])
def test_C4_a_negative_maximum_of_a_queue_raises_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=-1"):
        StopResume.from_limits(**{name: -1})


@given(st.integers(1, 10**12), st.integers(1, 100), st.data())
def test_C4_default_thresholds_are_always_valid_and_never_above_the_maximum(
    maximum: int, stop: int, data: st.DataObject
) -> None:
    resume = data.draw(st.integers(0, stop))
    thresholds = StopResume.from_limits(maximum, maximum, stop_percent=stop, resume_percent=resume)
    assert thresholds.resume_count is not None
    assert 1 <= thresholds.resume_count <= thresholds.stop_count <= maximum
    assert (thresholds.stop_count, thresholds.resume_count) == (thresholds.stop_size, thresholds.resume_size)


# J1 J2: capacity and resume capacity.


@pytest.mark.parametrize(("size", "on"), [(0, False), (999, False), (1000, False), (1001, True), (5000, True)])
def test_J1_the_state_turns_on_only_above_the_capacity(size: int, on: bool) -> None:
    assert depth(Capacity(1000, 600), 1, size).on is on


@pytest.mark.parametrize(("size", "on"), [(1000, True), (601, True), (600, False), (599, False), (0, False)])
def test_J2_the_state_turns_off_at_the_resume_capacity(size: int, on: bool) -> None:
    assert on_at(Capacity(1000, 600), 1, size).on is on


@pytest.mark.parametrize(("size", "on"), [(1001, True), (1000, False), (999, False)])
def test_J2_the_resume_capacity_defaults_to_the_capacity(size: int, on: bool) -> None:
    assert Capacity(1000).resume == 1000
    assert on_at(Capacity(1000), 1, size).on is on


def test_J1_a_queue_capacity_of_0_means_no_limit() -> None:
    assert not Capacity().is_set
    assert Capacity(1).is_set
    queue = depth(Capacity(), 1_000_000, 1_000_000_000)
    assert not queue.on
    assert not queue.add(1_000_000_000, 0.0)


def test_J1_the_number_of_messages_does_not_count_for_the_capacity_in_bytes() -> None:
    assert not depth(Capacity(10), 1_000_000, 10).on


def test_J2_a_resume_capacity_above_the_capacity_raises_an_error_that_shows_both_values() -> None:
    with pytest.raises(ValueError, match="capacity=1000 and flow_resume_capacity=1001"):
        Capacity(1000, 1001)
    with pytest.raises(ValueError, match="capacity=0 and flow_resume_capacity=1"):
        Capacity(0, 1)
    assert Capacity(1000, 1000).is_set
    assert Capacity(1000, 0).is_set


def test_J1_a_negative_capacity_or_resume_capacity_raises_an_error() -> None:
    with pytest.raises(ValueError, match="capacity=-1"):
        Capacity(-1)
    with pytest.raises(ValueError, match="capacity=10 and flow_resume_capacity=-1"):
        Capacity(10, -1)


def test_J2_with_a_resume_capacity_of_0_publishers_resume_only_when_the_queue_is_empty() -> None:
    queue = on_at(Capacity(10, 0), 1, 1)
    assert queue.on
    queue.remove(1)
    assert not queue.on


# Which publisher is held.


def test_C1_every_publisher_is_held_while_the_state_is_on() -> None:
    queue = on_at(StopResume(stop_count=10, resume_count=5), 6)
    assert queue.add(1, 0.0), "7 messages are below the stop, but the state is ON"


def test_J3_only_a_publisher_whose_message_exceeds_the_capacity_is_held() -> None:
    queue = on_at(Capacity(10, 5), 1, 6)
    assert queue.on
    assert not queue.add(4, 0.0), "10 bytes are not past it, although the state is still ON"
    assert queue.add(1, 0.0)
    assert queue.on


# The limiter between the thresholds.


def test_a_threshold_limiter_never_refuses_an_element() -> None:
    queue = depth(StopResume(stop_count=1), 100, 100)
    assert queue.on
    assert queue.refusal(1_000_000, 5.0) is None
    assert queue.ready_at(1_000_000, 5.0) == 5.0


def test_removing_more_than_a_threshold_limiter_contains_raises_an_error() -> None:
    queue = depth(StopResume(stop_count=10), 2, 5)
    with pytest.raises(ValueError, match="3 messages of 5 bytes"):
        queue.remove(5, 3)
    with pytest.raises(ValueError, match="2 messages of 6 bytes"):
        queue.remove(6, 2)
    assert (queue.count, queue.size) == (2, 5), "what was refused changed nothing"
    queue.remove(5, 2)
    assert (queue.count, queue.size) == (0, 0)


def test_the_peaks_of_a_queue_are_the_greatest_count_and_the_greatest_size() -> None:
    queue = depth(StopResume(), 1, 100)
    queue.remove(100)
    queue.add(10, 0.0)
    queue.add(10, 0.0)
    queue.remove(20, 2)
    assert (queue.peak_count, queue.peak_size) == (2, 100)


def test_a_queue_that_is_already_too_deep_starts_in_state_on() -> None:
    queue = depth(StopResume(stop_count=10, resume_count=5), 11)
    assert queue.on
    assert queue.times_on == 1


def test_D4_new_thresholds_of_a_queue_apply_immediately() -> None:
    queue = depth(StopResume(stop_count=10, resume_count=5), 8)
    queue.change(StopResume(stop_count=7, resume_count=5))
    assert queue.on
    assert queue.times_on == 1
    queue.change(StopResume(stop_count=20, resume_count=8))
    assert queue.on, "8 is not below the new resume threshold"
    queue.change(StopResume(stop_count=20, resume_count=9))
    assert not queue.on
    queue.change(Capacity(10))
    assert not queue.on
    queue.change(StopResume(stop_count=1))
    queue.change(StopResume())
    assert not queue.on, "without marks nothing keeps it ON"
    assert queue.times_on == 2


@st.composite
def marks(draw: st.DrawFn) -> Thresholds:
    """Draw low thresholds, so that small depths cross them often."""
    if draw(st.booleans()):
        capacity = draw(st.integers(0, 20))
        return Capacity(capacity, draw(st.none() | st.integers(0, capacity)))
    stop_count, stop_size = draw(st.integers(0, 6)), draw(st.integers(0, 20))
    resume_count = draw(st.none() | st.integers(min(1, stop_count), stop_count))
    resume_size = draw(st.none() | st.integers(min(1, stop_size), stop_size))
    return StopResume(stop_count, resume_count, stop_size, resume_size)


@given(marks(), st.integers(0, 30), st.integers(0, 30))
def test_at_no_depth_do_the_thresholds_both_stop_and_resume_publishers(
    thresholds: Thresholds, count: int, size: int
) -> None:
    assert not (thresholds.stops(count, size) and thresholds.resumes(count, size))


class HysteresisMachine(RuleBasedStateMachine):
    """A queue, a list of the messages in it, and a second formulation of the two sources' rules."""

    def __init__(self) -> None:
        super().__init__()
        self.thresholds: Thresholds = StopResume()
        self.queue = ThresholdLimiter(self.thresholds)
        self.messages: list[int] = []
        self.on = False
        self.turned_on = 0
        self.peak = (0, 0)

    @initialize(thresholds=marks())
    def set_up(self, thresholds: Thresholds) -> None:
        self.thresholds = thresholds
        self.queue = ThresholdLimiter(thresholds)

    def crossed(self) -> bool:
        count, size = len(self.messages), sum(self.messages)
        if isinstance(self.thresholds, Capacity):
            return self.thresholds.capacity != 0 and size > self.thresholds.capacity
        assert isinstance(self.thresholds, StopResume)
        by_count = self.thresholds.stop_count != 0 and count > self.thresholds.stop_count
        by_size = self.thresholds.stop_size != 0 and size > self.thresholds.stop_size
        return by_count or by_size

    def satisfied(self) -> bool:
        count, size = len(self.messages), sum(self.messages)
        if isinstance(self.thresholds, Capacity):
            assert self.thresholds.resume is not None
            return self.thresholds.capacity == 0 or size <= self.thresholds.resume
        assert isinstance(self.thresholds, StopResume)
        assert self.thresholds.resume_count is not None
        assert self.thresholds.resume_size is not None
        by_count = self.thresholds.stop_count == 0 or count < self.thresholds.resume_count
        by_size = self.thresholds.stop_size == 0 or size < self.thresholds.resume_size
        return by_count and by_size

    def follow(self) -> None:
        if not self.on and self.crossed():
            self.on = True
            self.turned_on += 1
        elif self.on and self.satisfied():
            self.on = False
        self.peak = max(self.peak[0], len(self.messages)), max(self.peak[1], sum(self.messages))

    @rule(size=st.integers(0, 12))
    def enqueue(self, size: int) -> None:
        self.messages.append(size)
        self.follow()
        held = self.crossed() if isinstance(self.thresholds, Capacity) else self.on
        assert self.queue.add(size, 0.0) is held

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def dequeue(self, data: st.DataObject) -> None:
        size = self.messages.pop(data.draw(st.integers(0, len(self.messages) - 1)))
        self.follow()
        self.queue.remove(size)

    @rule()
    def purge(self) -> None:
        size, count = sum(self.messages), len(self.messages)
        self.messages.clear()
        self.follow()
        self.queue.remove(size, count)

    @rule(thresholds=marks())
    def change(self, thresholds: Thresholds) -> None:
        self.thresholds = thresholds
        self.follow()
        self.queue.change(thresholds)

    @invariant()
    def the_state_is_what_the_sources_say(self) -> None:
        assert self.queue.on is self.on
        assert self.queue.resumable is not self.on
        assert self.queue.times_on == self.turned_on

    @invariant()
    def the_depth_is_what_is_in_the_queue(self) -> None:
        assert (self.queue.count, self.queue.size) == (len(self.messages), sum(self.messages))
        assert (self.queue.peak_count, self.queue.peak_size) == self.peak


TestHysteresisMachine = HysteresisMachine.TestCase
