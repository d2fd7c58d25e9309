"""The report of Spark on flow logs equals the report of one process, even for logs that are still being written."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession

from qflow_client.cli import main
from qflow_client.report import FlowLogError, FlowLogs, to_parquet
from qflow_client.report import flow_report as plain_report
from qflow_client.report.tables import bin_width
from qflow_client.spark import flow_events, flow_report, flow_report_of_stream, flow_report_stream
from tests.effort import rounds
from tests.unit.report.reference import reference
from tests.unit.simulation.telemetry import lines_of

# Queues with advice. Advice replays the log, which takes longer than all other parts.
ADVISED = ["queue-0", "queue-3"]
COUNT = rounds(8000, least=4000)

Lines = Sequence[dict[str, Any]]


def _write(path: Path, lines: Lines, end: str = "") -> None:
    path.parent.mkdir(exist_ok=True)
    path.with_name(f"_{path.name}").write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
    path.with_name(f"_{path.name}").rename(path)


@pytest.fixture(scope="module", name="lines")
def _lines() -> Lines:
    return list(lines_of(range(16), COUNT))


@pytest.fixture(scope="module", name="folder")
def _folder(lines: Lines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    for start in range(0, COUNT, COUNT // 3 - 500):
        end = '{"at":179000' if not start else ""
        _write(folder / f"flow-{start}.jsonl", lines[start : start + COUNT // 3 - 500], end)
    return folder


def test_the_report_computed_by_Spark_equals_the_report_of_one_process_and_a_reference(
    spark: SparkSession, lines: Lines, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Split each file into many parts, as for larger files.
    monkeypatch.setattr(sys.modules[flow_report.__module__], "_PART", 150_000)
    found = flow_report(spark, folder, maximum=60, queues=ADVISED)
    expected = plain_report(folder, maximum=60, queues=ADVISED)
    assert found.tables.keys() == expected.tables.keys()
    for name, rows in expected.tables.items():
        assert rows, name
        assert found.tables[name] == rows, name
    assert found == expected
    assert (found.unreadable, sum(found.lines.values())) == (1, COUNT)
    plain = reference(lines, bin_width(lines[0]["at"], lines[-1]["at"]))
    assert plain.keys() <= found.tables.keys()
    for name, rows in plain.items():
        assert found.tables[name] == rows, name


def test_the_report_from_parquet_equals_the_report_from_the_logs(
    spark: SparkSession, folder: Path, tmp_path: Path
) -> None:
    target = tmp_path / "flow.parquet"
    assert to_parquet(FlowLogs([folder]), target) == COUNT
    before = plain_report(folder)
    for found in (plain_report(target), flow_report(spark, target)):
        assert (found.tables, found.lines) == (before.tables, before.lines)
    events = flow_events(spark, target)
    lifted = events.where("kind = 'lifted' and reason = 'paused'")
    seconds, count = lifted.selectExpr("sum(at - begun) / 1e6", "count(*)").collect()[0]
    held = [row for row in before.tables["holds"] if row["reason"] == "paused"]
    assert seconds == pytest.approx(sum(row["seconds"] for row in held))
    assert count == sum(row["episodes"] - row["unfinished"] for row in held)


def test_the_command_report_writes_parquet_tables_and_an_html_page(folder: Path, tmp_path: Path, capsys: Any) -> None:
    chosen = ["--maximum", "60", "--queue", "queue-3"]
    assert main(["report", str(folder), *chosen, "--output", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    report = plain_report(folder, maximum=60, queues=["queue-3"])
    for name, rows in report.tables.items():
        assert pyarrow.parquet.read_table(tmp_path / "out" / f"{name}.parquet").to_pylist() == rows
    page = (tmp_path / "out" / "report.html").read_text()
    for words in ("What to set", "producer-003", "Queue queue-3", "uPlot"):
        assert words in page
    # The page loads nothing from other files.
    assert "src=" not in page.partition("<script>")[0]
    assert main(["convert", str(folder), "--output", str(tmp_path / "flow.parquet")]) == 0
    assert f"{COUNT:,} lines" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"no Parquet"])
def test_the_commands_report_and_convert_name_an_invalid_parquet_file(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flow.parquet"
    path.write_bytes(content)
    for command in (["report"], ["convert", "--output", str(tmp_path / "out.parquet")]):
        assert main([*command, str(path)]) == 1
        assert f"qflow: {path}: Parquet " in capsys.readouterr().err


def test_the_commands_report_and_convert_name_a_file_that_is_not_a_flow_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), other)
    assert main(["report", str(other)]) == 1
    assert f"qflow: {other}: this is not a flow log" in capsys.readouterr().err
    lines = tmp_path / "other.jsonl"
    lines.write_text('{"at": 1, "kind": "depth", "queue": 5}')
    assert main(["convert", str(lines), "--output", str(tmp_path / "out.parquet")]) == 1
    assert f"qflow: {lines}: a line or row does not belong to a flow log" in capsys.readouterr().err


def _hold(at: float, since: float, reason: str = "paused") -> dict[str, Any]:
    at_us, since_us = int(at * 1e6), int(since * 1e6)
    who = {"origin": "producer", "producer": "p", "connection": "p", "queue": "q", "reason": reason}
    return {"at": at_us, "kind": "lifted", **who, "since": since_us, "begun": since_us, "flowed_since": since_us}


def test_the_report_of_a_streaming_query_equals_the_report_of_the_whole_logs(
    spark: SparkSession, lines: Lines, tmp_path: Path
) -> None:
    some = sorted(lines[:3000], key=lambda line: line["at"])
    folder, output = tmp_path / "logs", tmp_path / "out"
    with pytest.raises(FlowLogError, match="no window is complete yet"):
        flow_report_of_stream(spark, output)
    last = some[-1]["at"]
    now = {"availableNow": True}
    for number in range(2):
        _write(folder / f"flow-{number}.jsonl", some[number * 1500 : (number + 1) * 1500])
        flow_report_stream(spark, folder, output, window=10.0, late=30.0, trigger=now).awaitTermination()
    # A line that is more than `late` seconds later completes all earlier windows.
    _write(folder / "flow-later.jsonl", [_hold(last / 1e6 + 60, last / 1e6 + 59, "later")])
    flow_report_stream(spark, folder, output, window=10.0, late=30.0, trigger=now).awaitTermination()
    found = flow_report_of_stream(spark, output).tables
    _write(tmp_path / "whole" / "whole.jsonl", some)
    expected = plain_report(tmp_path / "whole").tables
    assert found.keys() == expected.keys()
    for name in ("holds", "publishers", "queues", "waits"):
        assert found[name] == expected[name], name
    for name in ("held_over_time", "depth_over_time"):
        measure = "seconds" if name == "held_over_time" else "depth_max"
        assert sum(row[measure] for row in found[name]) > 0


def test_a_line_that_is_not_UTF_8_is_counted_as_unreadable() -> None:
    # Spark's text reader passes such a line to the task as a string.
    line = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"]).buffers())
    rows = pa.RecordBatch.from_arrays([line], ["value"])
    (facts,) = sys.modules[flow_report.__module__]._summing(1000, 1000)(iter([rows]))
    assert facts.column("table").to_pylist() == ["unreadable/0"]


def test_a_late_line_counts_within_the_allowed_delay_and_is_dropped_after_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    folder, output = tmp_path / "logs", tmp_path / "out"
    begin = 1_790_000_000

    def run(name: str, *holds: dict[str, Any]) -> Any:
        _write(folder / f"{name}.jsonl", holds)
        trigger = {"availableNow": True}
        query = flow_report_stream(spark, folder, output, window=10.0, late=60.0, trigger=trigger)
        query.awaitTermination()
        return query

    def dropped(query: Any) -> int:
        return sum(
            operator["numRowsDroppedByWatermark"]
            for progress in query.recentProgress
            for operator in progress["stateOperators"]
        )

    run("a", _hold(begin + 5, begin))
    run("b", _hold(begin + 55, begin + 50))
    # This line is about fifty seconds older than an earlier line.
    assert dropped(run("c", _hold(begin + 6, begin + 4))) == 0
    assert dropped(run("d", _hold(begin + 500, begin + 499))) == 0
    assert dropped(run("e", _hold(begin + 7, begin + 1))) > 0
    (row,) = flow_report_of_stream(spark, output).tables["holds"]
    # The report has the first three lines. The window of the fourth is incomplete, and the fifth is too late.
    assert (row["episodes"], row["seconds"]) == (3, 5 + 5 + 2)


def test_the_error_for_unfinished_logs_or_an_invalid_window_names_the_problem(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "_flow.jsonl").touch()
    with pytest.raises(FlowLogError, match="no file is finished"):
        flow_report(spark, tmp_path)
    with pytest.raises(ValueError, match=r"window=0: it must be at least 0\.001 seconds"):
        flow_report_stream(spark, tmp_path, tmp_path / "out", window=0)
