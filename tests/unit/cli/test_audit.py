from __future__ import annotations

import json
from dataclasses import replace

import pytest

from qflow_client.broker import Enforcement
from qflow_client.cli.demo.audit import ConsumerTally, ProducerTally, QueueTally, Run, audit, to_json

FAST = ProducerTally(
    "fast", 50, sent=70, confirmed=70, checksum=0xA0, times_flowed=3, seconds_flowed={"channel_flow": 0.25}
)
SLOW = ProducerTally(
    "slow", 15, sent=30, confirmed=30, checksum=0x0B, times_flowed=1, seconds_flowed={"channel_flow": 0.001}
)
RUN = Run(
    messages=100,
    producers=(FAST, SLOW),
    consumer=ConsumerTally(consumed=100, checksum=0xAB),
    queue=QueueTally(
        Enforcement.BOTH, stop=100, resume=70, depth=0, peak_depth=140, flow_stopped=False, flow_stopped_count=2
    ),
)


def failures(run: Run) -> dict[str, str]:
    return {line.statement: line.difference for line in audit(run) if not line.passed}


def with_producer(run: Run, producer: ProducerTally) -> Run:
    return replace(run, producers=tuple(producer if p.name == producer.name else p for p in run.producers))


def test_the_audit_of_a_correct_demo_run_finds_no_fault() -> None:
    assert failures(RUN) == {}
    assert all(line.measured for line in audit(RUN))


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (
            with_producer(RUN, replace(FAST, sent=69)),
            {"every message is sent": "1 too few", "every sent message is confirmed": "1 too many"},
        ),
        (
            with_producer(RUN, replace(FAST, confirmed=60)),
            {"every sent message is confirmed": "10 too few", "every confirmed message is consumed": "10 too many"},
        ),
        (replace(RUN, messages=98), {"every message is sent": "2 too many"}),
        (
            replace(RUN, consumer=replace(RUN.consumer, consumed=101, repeated=1)),
            {"every confirmed message is consumed": "1 too many", "every message arrived exactly once": "1 wrong"},
        ),
        # One message is lost and one is doubled, so the totals agree but the ledger does not.
        (
            replace(RUN, consumer=replace(RUN.consumer, repeated=1, missing=1)),
            {"every message arrived exactly once": "2 wrong"},
        ),
        (replace(RUN, consumer=replace(RUN.consumer, unknown=3)), {"every message arrived exactly once": "3 wrong"}),
        (
            replace(RUN, consumer=replace(RUN.consumer, checksum=0xAC)),
            {"the bodies are unchanged": "checksum ab was sent"},
        ),
        (replace(RUN, queue=replace(RUN.queue, depth=4)), {"the queue is empty and OFF at the end": "4 left"}),
        (
            replace(RUN, queue=replace(RUN.queue, flow_stopped=True)),
            {"the queue is empty and OFF at the end": "still ON"},
        ),
        (
            with_producer(RUN, replace(FAST, seconds_flowed={"transport": 3.0, "rate": 1.0})),
            {"fast was blocked (flowed) by channel_flow": "it must be more than 0 s"},
        ),
        (
            with_producer(RUN, replace(SLOW, holds=("channel_flow",))),
            {"slow was released (unflowed) again": "still held by channel_flow"},
        ),
    ],
)
def test_the_audit_names_each_fault_of_a_demo_run_and_shows_by_how_much_the_numbers_differ(
    run: Run, expected: dict[str, str]
) -> None:
    assert failures(run) == expected


@pytest.mark.parametrize(
    ("enforcement", "kind", "not_enough"),
    [
        (Enforcement.BOTH, "channel_flow", "capacity"),
        (Enforcement.CHANNEL_FLOW, "channel_flow", "capacity"),
        (Enforcement.COMPLETION, "capacity", "channel_flow"),
    ],
)
def test_the_audit_of_a_demo_run_fails_if_the_chosen_enforcement_never_held_a_producer(
    enforcement: Enforcement, kind: str, not_enough: str
) -> None:
    run = replace(RUN, queue=replace(RUN.queue, enforcement=enforcement))
    held = with_producer(run, replace(FAST, seconds_flowed={kind: 1.0}))
    held = with_producer(held, replace(SLOW, seconds_flowed={kind: 1.0}))
    assert failures(held) == {}
    otherwise = with_producer(held, replace(SLOW, seconds_flowed={not_enough: 1.0}))
    assert failures(otherwise) == {f"slow was blocked (flowed) by {kind}": "it must be more than 0 s"}


@pytest.mark.parametrize(
    ("peak", "expected"),
    [
        (99, {"the peak is above the stop threshold, 100": "2 too few"}),
        (100, {"the peak is above the stop threshold, 100": "1 too few"}),
        (101, {}),
        (164, {}),
        (165, {}),
        (166, {"the peak is at most the worst case, 165": "1 too many"}),
    ],
)
def test_C6_the_audit_checks_the_peak_depth_against_a_lower_and_an_upper_bound(
    peak: int, expected: dict[str, str]
) -> None:
    assert failures(replace(RUN, queue=replace(RUN.queue, peak_depth=peak))) == expected


def test_the_audit_as_json_contains_the_result_the_rates_and_each_failed_line() -> None:
    run = replace(RUN, queue=replace(RUN.queue, peak_depth=200))
    told = json.loads(json.dumps(to_json(run, audit(run), seconds=2.0)))
    assert told["passed"] is False
    assert told["messages_per_second"] == 50.0
    assert told["queue"]["highest_allowed"] == 165
    assert [line["difference"] for line in told["audit"] if not line["passed"]] == ["35 too many"]
    assert [producer["capacity"] for producer in told["producers"]] == [50, 15]
