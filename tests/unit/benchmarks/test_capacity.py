"""The functions of `benchmarks.capacity` without measurements. Measured values are not tested."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.capacity import Measurement, Plan, document, parser, summarize, table

PLAN = Plan(("slow",), ("auto", 100), 1.0, 1.0, 2, 100, 0.02, 500.0)
AUTO = Measurement("slow", "auto", 0, 90.0, 12.0, (0.002, 0.001), overshoot=60, overshoot_later=10)
MEASURED = [
    AUTO,
    replace(AUTO, round=1, rate=110.0, window=14.0, latencies=(0.009,), overshoot=30, overshoot_later=11),
    Measurement("slow", 100, 0, 100.0, 100.0, (), 100, 100),
    Measurement("slow", 100, 1, 100.0, 100.0, (), 100, 100),
    # The best of one round, but not over all rounds.
    Measurement("slow", 1000, 0, 120.0, 1000.0, (), 990, 0),
    Measurement("slow", 1000, 1, 60.0, 1000.0, (), 990, 0),
    Measurement("fast", "auto", 0, 1000.0, 300.0, (0.005,)),
]


def test_a_row_of_the_capacity_benchmark_has_medians_over_the_rounds_and_the_worst_overshoot() -> None:
    auto, hundred, _, fast = summarize(MEASURED)
    assert (auto.place, auto.capacity, auto.rate, auto.slowest, auto.fastest) == ("slow", "auto", 100.0, 90.0, 110.0)
    assert (auto.window, auto.latency, auto.latency_p99) == (13.0, 0.002, 0.009)
    assert (auto.overshoot, auto.overshoot_later) == (60, 11)
    assert (hundred.latency, hundred.latency_p99) == (None, None)
    assert (fast.overshoot, fast.overshoot_later, fast.to_best) == (None, None, None)


def test_each_throughput_ratio_is_relative_to_the_fixed_capacity_that_is_best_over_all_rounds() -> None:
    auto, hundred, thousand, _ = summarize(MEASURED)
    assert auto.to_best == pytest.approx((0.9 + 1.1) / 2)
    assert hundred.to_best == 1.0
    assert thousand.to_best == pytest.approx((1.2 + 0.6) / 2)


def test_the_table_of_the_capacity_benchmark_has_one_line_for_each_row() -> None:
    title, headings, *lines = table("a title", summarize(MEASURED)).splitlines()
    assert title == "a title"
    assert headings.split()[:3] == ["place", "capacity", "msg/s"]
    assert lines[0].split() == ["slow", "auto", "100", "90", "–", "110", "1.000", "13", "2.00", "9.00", "60", "11"]
    assert lines[1].split()[-4:] == ["–", "–", "100", "100"]
    assert len({len(line) for line in [headings, *lines]}) == 1


def test_the_json_document_of_the_capacity_benchmark_has_all_results_except_single_latencies() -> None:
    found = json.loads(json.dumps(document(PLAN, summarize(MEASURED), MEASURED, {"product": "x", "version": "1"})))
    assert found["rows"][0]["latency_p99"] == 0.009
    assert [each["latencies"] for each in found["measurements"]] == [[]] * len(MEASURED)
    assert found["settings"]["stop"] == 1000


def test_the_capacities_and_places_on_the_command_line_are_separated_by_commas() -> None:
    options = parser().parse_args(["--capacities", "auto,5,auto", "--places", "far,fast"])
    assert (options.capacities, options.places) == (("auto", 5), ("far", "fast"))


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--capacities", "0", "a capacity must be auto or at least 1, not 0"),
        ("--places", "near", "unknown place 'near'; the places are fast, slow, far"),
        ("--round-trip", "0", "must be more than 0, not 0"),
    ],
)
def test_an_invalid_command_line_argument_ends_the_benchmark_with_a_message(
    option: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([option, value])
    assert words in capsys.readouterr().err
