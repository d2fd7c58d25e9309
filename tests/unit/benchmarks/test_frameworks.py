"""The results that the benchmark of frameworks counts as faults."""

from __future__ import annotations

import pytest

from benchmarks.frameworks.__main__ import Result, faults_of

GOOD = {"alarm": "ConfirmTimeout", "alarm_seconds": 3.0, "alarm_next": "FlowControlTimeout", "after": "published"}


@pytest.mark.parametrize(
    ("application", "changes", "words"),
    [
        ("taskiq", {}, None),
        ("taskiq", {"alarm": "hangs", "alarm_seconds": 10.0}, "hangs under the alarm"),
        ("taskiq", {"alarm_next": "published"}, "does not raise"),
        ("taskiq", {"after": "hangs"}, "does not go on"),
        ("taskiq", {"stuck": 1}, "1 senders that hang"),
        ("dramatiq", {"missing": 2}, "misses 2 messages"),
        ("dramatiq", {"disordered": 1}, "out of order"),
        ("taskiq", {"errors": {"E": 1}}, "raises {'E': 1}"),
        ("taskiq", {"copies": 3, "unmarked": 1}, "1 messages with two copies without a mark"),
        ("dramatiq", {"errors": {"E": 1}, "copies": 3, "unmarked": 3}, None),
        ("pika-pipelined", {"errors": {"E": 1}, "copies": 3}, None),
        ("pika-pipelined", {"copies": 3, "unmarked": 1}, "1 messages with two copies without a mark"),
        ("pika-pipelined", {"disordered": 1}, "out of order"),
    ],
)
def test_a_wrong_result_counts_as_a_fault_only_if_the_application_was_changed_to_use_qflow(
    application: str, changes: dict[str, object], words: str | None
) -> None:
    given = GOOD | changes
    found = faults_of(Result(application, "changed", **given))  # type: ignore[arg-type]
    assert found == [] if words is None else words in " ".join(found)
    assert faults_of(Result(application, "original", **given)) == []  # type: ignore[arg-type]
