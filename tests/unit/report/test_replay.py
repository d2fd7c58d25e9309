"""The replay of a recording with other thresholds, and the advised thresholds."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qflow_client.flow import StopResume
from qflow_client.report.advice import AdviceError, advise, samples_in, windows
from qflow_client.report.replay import Sample, replay
from qflow_client.report.tables import QueueTotals, sum_up
from tests.unit.simulation.telemetry import lines_of

NAMES = ("one", "two", "three")

samples = st.lists(
    st.builds(
        Sample,
        seconds=st.just(0.1),
        arrivals=st.dictionaries(st.sampled_from(NAMES), st.integers(1, 60), max_size=3),
        left=st.integers(0, 60),
        was_busy=st.booleans(),
    ),
    max_size=12,
)


@given(samples, st.integers(1, 50), st.tuples(*(st.integers(1, 30) for _ in NAMES)), st.data())
def test_C6_the_replayed_depth_never_exceeds_the_stop_threshold_plus_the_sum_of_the_capacities(
    recorded: list[Sample], stop: int, capacities: tuple[int, ...], data: st.DataObject
) -> None:
    marks = StopResume(stop, data.draw(st.integers(1, stop)))
    result = replay(recorded, marks, dict(zip(NAMES, capacities, strict=True)), drain_rate=100.0)
    assert result.peak <= stop + sum(capacities)
    assert result.overshoot == max(0, result.peak - stop)
    # All recorded messages are either sent or unsent.
    assert result.sent + result.unsent == sum(sum(each.arrivals.values()) for each in recorded)
    assert (result.seconds_held == 0) >= (result.unsent == 0 and result.times_on == 0 and not recorded)


def test_C6_the_replayed_depth_can_reach_the_stop_threshold_plus_the_sum_of_the_capacities() -> None:
    # The depth reaches exactly the stop threshold, and then each publisher sends a whole window.
    sent = [{"one": 50, "two": 15}, {"one": 35}, {"one": 99, "two": 99}, {"one": 99}]
    bursts = [Sample(0.005, each, 0, was_busy=True) for each in sent]
    result = replay(bursts, StopResume(100, 80), {"one": 50, "two": 15}, drain_rate=0.0)
    assert result.peak == 165


def test_a_replay_holds_no_producer_if_the_thresholds_are_high_enough() -> None:
    bursts = [Sample(0.1, {"one": 100}, 50, was_busy=True), Sample(0.1, {}, 50, was_busy=True)]
    low = replay(bursts, StopResume(10, 5), {"one": 1000}, drain_rate=500.0)
    high = replay(bursts, StopResume(500, 250), {"one": 1000}, drain_rate=500.0)
    assert low.seconds_flowed > 0 == high.seconds_flowed
    assert (low.times_on > 0, high.times_on) == (True, 0)


def _queue(rate: int = 100, stop: int = 20, resume: int = 10) -> QueueTotals:
    return QueueTotals(samples=10, us=10_000_000, arrived=1000, left=1000, busy_us=10_000_000, busy_left=10 * rate,
                       marks=(1, stop, resume, 0, 0))  # fmt: skip


BURSTS = [Sample(1.0, {"one": 300, "two": 100}, 100, was_busy=True), *([Sample(1.0, {}, 100, was_busy=True)] * 4)]
PUBLISHERS = {"one": 300, "two": 100}


@pytest.mark.parametrize(
    ("maximum", "delay", "bound"), [(200, None, 200), (None, 1.5, 150), (200, 1.5, 150), (150, 9, 150)]
)
def test_the_advised_thresholds_keep_the_given_maximum_depth_and_delay_for_any_load(maximum, delay, bound) -> None:
    advice = advise("q", _queue(), BURSTS, PUBLISHERS, {}, maximum=maximum, delay=delay)
    assert advice.worst_case == bound
    assert advice.longest_delay == bound / 100
    for result in advice.tried:
        assert result.stop + sum(result.capacities.values()) == bound
        assert result.peak <= bound
        assert result.seconds_held >= advice.expected.seconds_held
    assert all(capacity >= 1 for capacity in advice.capacities.values())
    assert advice.recorded is not None
    assert advice.recorded.seconds_held > advice.expected.seconds_held
    assert {row["what"] for row in advice.replay_rows()} == {"recorded", "advice", "tried"}


def test_with_a_higher_maximum_depth_the_advised_thresholds_never_hold_producers_longer() -> None:
    held = [advise("q", _queue(), BURSTS, PUBLISHERS, {}, maximum=n).expected.seconds_held for n in (30, 100, 300, 900)]
    assert all(more >= less - 0.1 for more, less in pairwise(held))
    assert held[-1] < held[0]


def test_a_maximum_or_delay_that_no_thresholds_can_keep_raises_an_error_with_the_numbers() -> None:
    with pytest.raises(AdviceError, match=r"queue 'q': maximum=2 allows 2 messages, but 2 publishers .* can reach 3"):
        advise("q", _queue(), BURSTS, PUBLISHERS, {}, maximum=2)
    with pytest.raises(AdviceError, match=r"delay=0.01 s at 100 messages per second allows 1 message"):
        advise("q", _queue(), BURSTS, PUBLISHERS, {}, delay=0.01)
    with pytest.raises(ValueError, match="delay=0: it must be more than 0"):
        advise("q", _queue(), BURSTS, PUBLISHERS, {}, delay=0)
    with pytest.raises(ValueError, match="give a maximum, a delay, or both"):
        advise("q", _queue(), BURSTS, PUBLISHERS, {})


def test_the_report_selects_the_depth_samples_around_the_time_of_the_greatest_depth_in_order() -> None:
    lines = list(lines_of(range(3, 4), 5000))
    tables = sum_up(lines, 1_000_000)
    wanted = windows(tables)
    found = samples_in(lines, wanted)
    assert found == samples_in(reversed(lines), wanted)
    (queue,) = found
    depths = [line for line in lines if line["kind"] == "depth"]
    assert sum(sum(each.arrivals.values()) for each in found[queue]) <= sum(line["arrived"] for line in depths)
    peak = max(line["peak"] for line in depths)
    (deepest, *_) = (line for line in depths if line["peak"] == peak)
    assert wanted[queue][0] <= deepest["at"] <= wanted[queue][1]
    assert Sample(deepest["us"] / 1e6, deepest["arrivals"], deepest["left"], was_busy=True) in found[queue]
