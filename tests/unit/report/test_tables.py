"""The tables against a plain reference, and in any order."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qflow_client.report.histogram import bucket_of, percentile, top_of
from qflow_client.report.tables import Tables, bin_width, sum_up
from tests.effort import rounds
from tests.unit.simulation.telemetry import lines_of

from .reference import reference

COUNT = rounds(20_000, least=10_000)


@pytest.fixture(scope="module", name="lines")
def _lines():
    return list(lines_of(range(16), COUNT))


def test_for_simulated_runs_the_report_tables_exactly_equal_those_of_a_simple_reference(lines) -> None:
    assert len(lines) == COUNT
    times = [line["at"] for line in lines]
    width = bin_width(min(times), max(times))
    expected = reference(lines, width)
    found = sum_up(lines, width).tables()
    for name, rows in expected.items():
        assert rows, name
        assert found[name] == rows, name
    assert found.keys() == expected.keys()
    assert {row["reason"] for row in found["holds"]} >= {
        *("channel_flow", "completion", "connection_blocked", "paused", "capacity", "transport")
    }


def test_if_the_queue_was_empty_in_every_sample_the_drain_rate_is_computed_over_the_whole_time() -> None:
    few = list(lines_of(range(16), 4000))
    times = [line["at"] for line in few]
    width = bin_width(min(times), max(times))
    tables = sum_up(few, width)
    assert any(not queue.busy_us and queue.drain_rate for queue in tables.queues.values())
    assert tables.tables()["queues"] == reference(few, width)["queues"]


def test_the_report_tables_do_not_depend_on_the_order_of_the_lines(lines) -> None:
    shuffled = lines[:10_000]
    before = sum_up(shuffled, 1_000_000).tables()
    Random(1).shuffle(shuffled)
    assert sum_up(shuffled, 1_000_000).tables() == before


def test_the_merged_tables_of_several_parts_equal_the_tables_of_the_whole_flow_log(lines) -> None:
    some = [*lines[:10_000], {"at": lines[0]["at"], "kind": "lost", "lost": 3}]
    whole = sum_up(some, 8_000_000)
    whole.unreadable = 2
    added = Tables(8_000_000)
    for start in range(0, len(some), 2000):
        part = sum_up(some[start : start + 2000], 1_000_000)
        part.unreadable = int(start < 4000)
        for fact in part.facts():
            added.merge(fact)
    assert added.tables() == whole.tables()
    for name in ("lines", "lost", "unreadable", "first", "last"):
        assert getattr(added, name) == getattr(whole, name), name


def test_the_memory_of_a_report_grows_with_producers_and_queues_and_not_with_the_number_of_lines(lines) -> None:
    whole = sum_up(lines, 1_000_000)
    # There are twelve producers with at most eight reasons, and four queues with three publishers and two reasons.
    assert len(whole.holds) <= 12 * 8 + 4 * 3 * 2
    assert len(whole.waits) <= 4 * 3 * 3 * 2
    for spread in (*(hold.ended for hold in whole.holds.values()), *whole.episodes.values()):
        # The number of buckets depends only on the largest value: 32 for each doubling.
        assert len(spread.buckets) <= 32 * max(2, spread.largest.bit_length() - 4)


def test_the_report_counts_a_hold_that_has_not_ended_with_its_last_recorded_duration() -> None:
    who = {"origin": "producer", "producer": "p", "connection": "p", "queue": "q", "reason": "paused"}
    tables = sum_up(
        [
            {"at": 1_000_000, "kind": "raised", **who, "since": 1_000_000},
            {"at": 3_000_000, "kind": "held", **who, "since": 1_000_000, "begun": 1_000_000},
            {"at": 4_000_000, "kind": "held", **who, "since": 1_000_000, "begun": 3_000_000},
        ],
        1_000_000,
    )
    (row,) = tables.tables()["holds"]
    assert (row["episodes"], row["unfinished"], row["seconds"], row["seconds_max"]) == (1, 1, 3.0, 0.0)


def test_the_report_counts_a_hold_whose_first_record_was_rotated_away_from_its_last_record() -> None:
    who = {"origin": "producer", "producer": "p", "connection": "p", "queue": "q", "reason": "paused"}
    line = {"at": 4_000_000, "kind": "lifted", **who, "since": 1_000_000, "begun": 3_000_000}
    (row,) = sum_up([line], 1_000_000).tables()["holds"]
    assert (row["episodes"], row["unfinished"], row["seconds"], row["seconds_max"]) == (1, 0, 1.0, 3.0)


@given(st.integers(0, 10**13))
def test_the_width_of_a_histogram_bucket_is_at_most_a_32nd_of_the_values_in_it(value: int) -> None:
    bucket = bucket_of(value)
    assert value <= top_of(bucket) <= value + value // 32
    assert bucket_of(top_of(bucket)) == bucket
    assert bucket_of(top_of(bucket) + 1) == bucket + 1


@given(st.lists(st.integers(0, 63), min_size=1), st.sampled_from([1, 50, 90, 99, 100]))
def test_percentiles_of_small_numbers_are_exact_in_the_histogram(values: list[int], percent: int) -> None:
    buckets: dict[int, int] = {}
    for value in values:
        buckets[bucket_of(value)] = buckets.get(bucket_of(value), 0) + 1
    found = percentile(buckets, percent, max(values))
    assert found in values
    assert sum(value <= found for value in values) * 100 >= percent * len(values)
    assert sum(value < found for value in values) * 100 < percent * len(values)


def test_a_time_series_of_a_report_has_no_more_points_than_a_page_can_show() -> None:
    for seconds in (1, 1000, 10**6, 10**9):
        assert seconds * 1_000_000 // bin_width(0, seconds * 1_000_000) <= 400
