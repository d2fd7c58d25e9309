"""Series of test runs, which can be interrupted and are counted by commit."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from checks import repeat
from checks.repeat import Run, busy, load_runs, run_once, totals


@pytest.mark.program
def test_a_repeated_run_records_how_many_tests_passed_and_which_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The test file needs no plugins, and some take seconds to load.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "test_it.py").write_text("def test_good(): pass\ndef test_bad(): assert False\n")
    command = f"{repeat._PYTEST} -p no:randomly -c /dev/null --rootdir {tmp_path} {tmp_path}"
    run = run_once("mine", command, load=0, limit=100, log=tmp_path / "log")
    assert (run.suite, run.load, run.outcome, run.passed) == ("mine", 0, "exit code 1", 1)
    assert [name.rpartition("::")[2] for name in run.failures] == ["test_bad"]
    assert run.commit == repeat.commit_of(repeat.ROOT)


def test_the_processes_that_load_the_machine_run_during_the_tests_and_end_afterwards() -> None:
    with busy(1) as processes:
        assert [process.poll() for process in processes] == [None]
    assert [process.poll() for process in processes] == [-signal.SIGKILL]


def test_a_series_of_test_runs_ends_when_the_commit_has_been_tested_as_often_as_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(repeat, "SUITES", {"default": f"echo x >> {tmp_path}/ran; echo 3 passed in 1 s"})
    commits = iter(["a"] * 100)
    monkeypatch.setattr(repeat, "commit_of", lambda *_, **__: next(commits))
    record = tmp_path / "runs.jsonl"
    series = ["default", "--load", "0", "--record", str(record)]
    assert repeat.main([*series, "--times", "1"]) == 0
    assert repeat.main([*series, "--times", "3"]) == 0
    assert (tmp_path / "ran").read_text().count("x") == len(load_runs(record)) == 3
    commits = iter(["b"] * 100)
    monkeypatch.setattr(repeat, "SUITES", {"default": "echo FAILED tests/a.py::test_b; exit 1"})
    assert repeat.main([*series, "--times", "1"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^default at a: 3 runs, 0 failed; 9 tests, \d+ s a run$", out, re.M)
    assert re.search(r"^default at b: 1 runs, 1 failed; 0 tests, \d+ s a run\n  tests/a\.py::test_b\n\Z", out, re.M)


def test_the_totals_are_an_empty_text_without_runs_and_show_a_run_that_did_not_end() -> None:
    assert totals([]) == ""
    assert totals([Run("s", "c", 0.0, 2.0, 2, "not over after 2 s", 0, [])]).endswith("not over after 2 s")
