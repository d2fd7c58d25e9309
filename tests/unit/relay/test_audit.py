from __future__ import annotations

from benchmarks.relay_kills import audit

GOOD = [(b"1 1 x", False), (b"2 1 x", False), (b"1 2 x", False)]
COMMITTED = [body for body, _ in GOOD]


def wrong(queue: list[tuple[bytes, bool]]) -> dict[str, int]:
    return {name: count for name, count in audit(COMMITTED, queue).items() if count and name != "committed"}


def test_E14_the_audit_of_relayed_messages_reports_nothing_for_a_correct_run() -> None:
    assert wrong(GOOD) == {}


def test_E14_the_audit_of_relayed_messages_counts_missing_and_surplus_messages() -> None:
    assert wrong(GOOD[:2]) == {"missing": 1}
    assert wrong([*GOOD, (b"1 3 y", False)]) == {"rolled_back_and_sent": 1}


def test_E14_the_audit_accepts_copies_marked_as_second_and_counts_a_second_copy_without_a_mark() -> None:
    assert wrong([*GOOD, (b"1 1 x", True), (b"1 1 x", True)]) == {"second_copies": 2}
    assert wrong([*GOOD, (b"1 1 x", False)]) == {"second_copies": 1, "unmarked": 1}


def test_E14_the_audit_compares_the_order_of_the_first_copies_of_messages_with_the_same_key() -> None:
    assert wrong([GOOD[2], GOOD[0], GOOD[1]]) == {"out_of_order": 1}
    assert wrong([*GOOD, (b"1 1 x", True)]) == {"second_copies": 1}
