"""The benchmark compares two checkouts. Here it compares a checkout with itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.against import main
from benchmarks.embedded import EMBEDDED

ROOT = Path(__file__).parents[3]
SMALL = [str(ROOT), "--url", EMBEDDED, "--peers", "plain", "--sizes", "10", "--messages", "20", "--repeat", "1"]


@pytest.mark.program
def test_the_benchmark_of_two_checkouts_runs_both_and_prints_a_table_that_compares_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL, "--latency", "--floor", "1000"]) == 1
    printed = capsys.readouterr()
    title, head, *rows = printed.out.splitlines()
    assert title == "after / before, median of 2 rounds"
    assert head.split() == ["peer", "bytes", "before,", "1/s", "rate", "processor", "time", "p99"]
    assert [row.split()[:2] for row in rows] == [["plain", "10"]]
    assert printed.err.splitlines() == ["below 1000.0: plain with 10 bytes"]


def test_the_benchmark_of_two_checkouts_reports_a_folder_that_is_not_a_checkout(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"peer 'plain' of {tmp_path} ended with exit code 1"):
        main([str(tmp_path), *SMALL[1:]])
