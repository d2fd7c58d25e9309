"""Stages, their lanes, and the report of their failures."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import threading
from functools import partial
from pathlib import Path

import pytest

from checks.stages import LEFT_OUT, PASSED, Ended, Stage, run, summary


def test_a_check_stage_passes_or_shows_how_it_failed_and_prints_its_output(tmp_path: Path) -> None:
    out = io.StringIO()
    stages = [
        Stage("good", "echo $WORD; test -t 0 && exit 3 || true", environment={"WORD": "heard"}),
        Stage("bad", "false | true"),
        Stage("killed", "kill -9 $$"),
    ]
    assert [ended.outcome for ended in run(stages, tmp_path, tmp_path, out)] == [PASSED, "exit code 1", "signal 9"]
    assert re.search(r"=== good: passed \(\d+ s\)\nheard\n", out.getvalue())


def test_a_check_stage_that_depends_on_a_failed_or_skipped_stage_is_skipped(tmp_path: Path) -> None:
    stages = [
        Stage("install", "exit 1", "a"),
        Stage("use", "touch used", "b", ("install",)),
        Stage("use more", "touch used", "a", ("use",)),
        Stage("alone", "touch alone", "b"),
    ]
    ended = run(stages, tmp_path, tmp_path, io.StringIO())
    assert [each.outcome for each in ended] == ["exit code 1", LEFT_OUT, LEFT_OUT, PASSED]
    assert not (tmp_path / "used").exists()
    assert (tmp_path / "alone").exists()


def test_the_lanes_of_a_check_run_in_parallel_and_the_stages_in_a_lane_run_one_after_the_other(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    # Each end of a pipe waits for the other end.
    stages = [
        Stage("write", "echo word > pipe; echo first >> order", "a"),
        Stage("read", "cat < pipe", "b"),
        Stage("after", "echo second >> order", "a"),
    ]
    ended = run(stages, tmp_path, tmp_path, io.StringIO())
    assert [each.outcome for each in ended] == [PASSED] * 3
    assert (tmp_path / "order").read_text() == "first\nsecond\n"


def test_a_check_stage_without_a_lane_runs_in_the_lane_that_finishes_first(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    # The lane with the reader ends only when the stage without a lane has run.
    stages = [
        Stage("free", "echo word > pipe"),
        Stage("read", "cat < pipe", "a"),
        Stage("quick", "true", "b"),
    ]
    ended = run(stages, tmp_path, tmp_path, io.StringIO())
    assert [each.outcome for each in ended] == [PASSED] * 3


def test_a_check_stage_that_exceeds_its_time_limit_is_killed_with_its_child_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    wait = subprocess.Popen.wait

    def wait_for_child(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is not None:
            # The time limit of the stage begins when it has started its child.
            (tmp_path / "begun").open().close()
        return wait(process, timeout)

    os.mkfifo(tmp_path / "begun")
    monkeypatch.setattr(subprocess.Popen, "wait", wait_for_child)
    stages = [Stage("hangs", "sleep 600 & echo $! > child; exec 3> begun; cat pipe", limit=0.1)]
    (ended,) = run(stages, tmp_path, tmp_path, io.StringIO())
    assert ended.outcome == "not over after 0 s"
    _wait_for_end(int((tmp_path / "child").read_text()))


def test_ctrl_c_kills_the_running_check_stages_and_no_further_stage_starts(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # A shell starts background jobs with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(partial(signal.signal, signal.SIGINT, before))
    os.mkfifo(tmp_path / "pipe")

    def interrupt() -> None:
        # The pipe is opened when the stage has opened it.
        with (tmp_path / "pipe").open() as pipe:
            pipe.read(1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    stages = [Stage("hangs", "echo $$ > child; (echo x; sleep 600) > pipe", limit=600), Stage("next", "touch next")]
    with pytest.raises(KeyboardInterrupt):
        run(stages, tmp_path, tmp_path, io.StringIO())
    thread.join()
    assert not (tmp_path / "next").exists()
    _wait_for_end(int((tmp_path / "child").read_text()))


def _wait_for_end(pid: int) -> None:
    """Wait until a process is gone, or is a zombie that is not reaped here. The timeout of the test limits the wait."""
    status = Path(f"/proc/{pid}/stat")
    while status.exists():
        try:
            if status.read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return


@pytest.mark.parametrize(
    ("stages", "error"),
    [
        ([Stage("a", ""), Stage("a", "")], "two stages are called 'a'"),
        ([Stage("a", "", needs=("b",)), Stage("b", "")], "'a' needs 'b', which does not come before it"),
        ([Stage("a", ""), Stage("b", "", "x", ("a",))], "'b' needs 'a', which has no lane and so runs later"),
    ],
)
def test_check_stages_with_equal_names_or_unmet_dependencies_raise_an_error(
    stages: list[Stage], error: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=error):
        run(stages, tmp_path, tmp_path)


def test_the_summary_of_a_check_has_a_line_for_each_stage_and_a_line_that_lists_failures() -> None:
    good, bad = Ended(Stage("docs", "", "python"), PASSED, 12.4), Ended(Stage("spark", ""), "exit code 1", 3.0)
    assert summary([good], 13.0) == "docs  python        12 s  passed\nAll passed (1 stages, 13 s)"
    assert summary([good, bad], 13.0).splitlines()[-1] == "FAILED: spark (2 stages, 13 s)"
