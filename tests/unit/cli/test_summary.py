from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from qflow_client import Outcome
from qflow_client.cli.errors import CommandError
from qflow_client.cli.records import Record
from qflow_client.cli.send import _summarise
from qflow_client.cli.sending import Tally


def tally(outcomes: str, skip: int = 0) -> Tally:
    """Return the tally of records that were confirmed (c) or nacked (n)."""
    made = Tally(confirmed_up_to=skip)
    for number, letter in enumerate(outcomes, skip + 1):
        outcome, error = (Outcome.CONFIRMED, None) if letter == "c" else (Outcome.NACKED, "it was nacked")
        failure = outcome if error else None
        receipt: Any = SimpleNamespace(outcome=outcome, error=lambda error=error: error, failure=failure)
        made.settle(Record(number, number, b""), receipt)
    return made


@pytest.mark.parametrize(
    ("outcomes", "skip", "advice"),
    [
        ("", 0, []),
        ("n", 0, []),
        ("nn", 0, []),
        ("ccn", 0, ["the records up to 2 need not be sent again: --skip 2 continues after them"]),
        ("", 5, ["the records up to 5 need not be sent again: --skip 5 continues after them"]),
        ("cn", 5, ["the records up to 6 need not be sent again: --skip 6 continues after them"]),
        ("nc", 0, ["confirmed after the first gap: 1 record, which would arrive twice if sent again"]),
        (
            "cncncc",
            0,
            [
                "the records up to 1 need not be sent again: --skip 1 continues after them",
                "confirmed after the first gap: 3 records, which would arrive twice if sent again",
            ],
        ),
    ],
)
def test_the_summary_of_a_send_says_where_to_resume_and_which_messages_would_be_sent_twice(
    outcomes: str, skip: int, advice: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _summarise(tally(outcomes, skip), 1.0, CommandError("no"), as_json=False, quiet=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "gap" in line or "--skip" in line] == advice


def test_the_json_summary_of_a_send_contains_the_same_counts_as_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    _summarise(tally("cncncc"), 1.0, CommandError("no"), as_json=True, quiet=False)
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["confirmed_up_to_record"], told["confirmed_behind_a_gap"]) == (1, 3)
    assert (told["confirmed"], told["not_confirmed"]) == (4, {"nacked": 2})
    assert err == "qflow: record 2 (line 2): it was nacked\nqflow: record 4 (line 4): it was nacked\n"


def test_the_summary_of_a_send_has_no_colon_if_it_lists_no_hold(capsys: pytest.CaptureFixture[str]) -> None:
    made = tally("c")
    made.times_flowed = 1
    _summarise(made, 1.0, None, as_json=False, quiet=False)
    assert capsys.readouterr().out.splitlines()[-1] == "blocked (flowed) 1 time"


def test_the_summary_of_a_send_prints_failures_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    made = Tally(failures=["no exchange '\x1b[31m'"])
    _summarise(made, 1.0, CommandError("no"), as_json=False, quiet=True)
    assert capsys.readouterr().err == "qflow: no exchange '\\x1b[31m'\n"


def test_the_summary_of_a_send_lists_only_the_first_failures_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    _summarise(tally("n" * 8), 1.0, CommandError("no"), as_json=False, quiet=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-2:] == ["qflow: record 5 (line 5): it was nacked", "qflow: and 3 more records"]
