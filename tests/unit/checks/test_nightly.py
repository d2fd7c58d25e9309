"""The parts of the nightly checks, and the page that is made from their records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from checks import nightly
from checks.nightly import PARTS, Part, Record, last_line, load, load_all, load_totals, render, run_part, save
from checks.stages import PASSED, Stage


def test_the_page_about_nightly_checks_matches_the_recorded_results() -> None:
    page = render(load_all(), load_totals())
    assert nightly.PAGE.read_text(encoding="utf-8") == page, "make it again: tox -e nightly -- --page"


def test_each_part_of_the_nightly_checks_takes_about_two_hours_and_has_distinct_step_names() -> None:
    for part in PARTS.values():
        names = [step.name for step in part.steps]
        assert len(set(names)) == len(names)
        assert max(step.limit for step in part.steps) <= 7200


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(nightly, "UNFINISHED", tmp_path / "unfinished")
    monkeypatch.setattr(nightly, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(nightly, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(nightly, "commit_of", lambda *_, **__: "c1")
    monkeypatch.setattr(nightly, "is_same_code", lambda commit: commit == "c1")
    steps = [
        Stage("first", f"echo one >> {tmp_path}/ran; echo 5 passed in 3 s"),
        Stage("second", f"echo two >> {tmp_path}/ran; test -e {tmp_path}/mended; echo 'a | b'"),
        Stage("third", f"echo three >> {tmp_path}/ran"),
    ]
    monkeypatch.setattr(nightly, "PARTS", {"part": Part("what it shows", steps)})
    return tmp_path


def test_a_nightly_part_that_is_run_again_continues_with_the_step_that_failed(folders: Path) -> None:
    assert nightly.main([]) == 1
    assert "**failed**" in (folders / "page.md").read_text()
    (folders / "mended").touch()
    assert nightly.main([]) == 0
    assert (folders / "ran").read_text().split() == ["one", "two", "two", "three"]
    record = load(folders / "records" / "part.json")
    assert record is not None
    assert record.passed
    assert [step["said"] for step in record.steps] == ["5 passed in 3 s", "a | b", ""]
    page = (folders / "page.md").read_text()
    assert f"{record.date}, commit `c1`" in page
    assert re.search(r"\| second \| passed \| \d+ \| a \\\| b \|", page)
    # The part has already passed on this code.
    assert nightly.main([]) == 0
    assert len((folders / "ran").read_text().split()) == 4
    # A part that is named runs again.
    assert nightly.main(["part"]) == 0
    assert len((folders / "ran").read_text().split()) == 7


def test_a_nightly_part_that_is_run_again_starts_over_if_the_code_has_changed(folders: Path) -> None:
    run_part("part")
    save(Record("part", "c0", steps=[{"name": "first", "outcome": PASSED}]), folders / "unfinished")
    (folders / "ran").unlink()
    record = run_part("part")
    assert (folders / "ran").read_text().split() == ["one", "two"]
    assert record.commit == "c1"


def test_the_page_sums_what_passed_steps_of_nightly_parts_have_proved_over_all_runs(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [
        Stage("kills", "echo 'proved: 1,500 kills of producers'; echo 'proved: 500 kills of producers'"),
        Stage("more", f"echo 'proved: 1 kills of producers'; test ! -e {folders}/fails"),
    ]
    monkeypatch.setattr(nightly, "PARTS", {"part": Part("what it shows", steps)})
    (folders / "fails").touch()
    # A step that fails proves nothing, and the step before it is not counted twice when the part continues.
    assert nightly.main(["part"]) == 1
    (folders / "fails").unlink()
    assert nightly.main(["part"]) == 0
    assert nightly.main(["part"]) == 0
    runs = load_totals()
    assert [(run["commit"], run["proved"]["kills of producers"]) for run in runs] == [("c1", 2000), ("c1", 1)] * 2
    row = f"| kills of producers | 4,002 | 4 | {runs[0]['date']} | {runs[1]['date']} |"
    assert row in (folders / "page.md").read_text()


def test_an_unknown_part_of_the_nightly_checks_raises_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        nightly.main(["moon"])
    assert "unknown part moon; the parts are properties, " in capsys.readouterr().err


def test_the_recorded_last_line_of_a_step_is_the_pytest_summary_if_there_is_one() -> None:
    assert last_line("== 7 passed in 1.0s ==\n  py: OK (3 s)\n\n") == "7 passed in 1.0s"
    assert last_line("one\n=====\n") == "one"
    assert last_line("") == ""
