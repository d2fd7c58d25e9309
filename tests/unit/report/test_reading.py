"""Files of flow logs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qflow_client.report import FlowLogError, FlowLogs, flow_report
from qflow_client.report import reading as reading_module
from qflow_client.report.reading import line_of, parts_of, raws
from qflow_client.report.tables import SERIES_LENGTH, sum_up
from tests.unit.simulation.telemetry import lines_of


@pytest.fixture(scope="module", name="lines")
def _lines() -> list[dict[str, Any]]:
    return list(lines_of(range(4), 2000))


def _write(path: Path, lines, *, end: str = "") -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines) + end
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def test_a_flow_log_folder_is_read_including_unfinished_and_compressed_files(
    tmp_path: Path, lines: list[dict[str, Any]]
) -> None:
    whole = tmp_path / "whole.jsonl"
    _write(whole, lines)
    folder = tmp_path / "logs"
    folder.mkdir()
    _write(folder / "flow-1.jsonl.gz", lines[:700])
    _write(folder / "flow-2.jsonl", lines[700:1500])
    _write(folder / "_flow-3.jsonl", lines[1500:])
    (folder / "notes.txt").write_text("not a log")
    # A Parquet file can be read only when it is finished.
    (folder / "_all.parquet").write_bytes(b"PAR1")
    assert flow_report(folder) == flow_report(whole)
    assert flow_report([folder / "flow-1.jsonl.gz", folder / "flow-2.jsonl", folder / "_flow-3.jsonl"]) == flow_report(
        whole
    )
    logs = FlowLogs([folder])
    assert logs.span() == FlowLogs([whole]).span() == (lines[0]["at"], lines[-1]["at"])
    assert [line["kind"] for line in logs.lines("off")] == [line["kind"] for line in lines if line["kind"] == "off"]


def test_the_time_series_of_a_report_do_not_depend_on_the_order_of_the_lines_in_a_file(tmp_path: Path) -> None:
    # A line every 2 s, for a longer time than the smallest bins can cover.
    lines = [
        {"at": 2_000_000 * number, "kind": "depth", "queue": "q", "us": 2_000_000, "arrivals": {}}
        | dict.fromkeys(("depth", "left", "arrived", "peak", "peak_bytes", "arrived_bytes"), 1)
        | dict.fromkeys(("stop", "resume", "stop_bytes", "resume_bytes"), 0)
        | {"origin": "broker", "reason": "channel_flow"}
        for number in range(SERIES_LENGTH)
    ]
    tables = sum_up(lines, 2_000_000).tables()
    assert len(tables["depth_over_time"]) == SERIES_LENGTH
    # The ends of the second file do not show its first and last times, as those of a Parquet file do.
    for at in 0, 150:
        path = tmp_path / f"{at}.jsonl"
        _write(path, lines[at:] + lines[:at])
        assert flow_report(path).tables == tables


def test_a_flow_log_line_that_a_killed_process_left_half_written_is_counted_and_skipped(
    tmp_path: Path, lines: list[dict[str, Any]]
) -> None:
    path = tmp_path / "torn.jsonl"
    _write(path, lines, end='{"at":17900000')
    report = flow_report(path)
    assert report.unreadable == 1
    assert sum(report.lines.values()) == len(lines)
    _write(path, lines, end='[1]\n{"kind":"raised"}\n')
    assert flow_report(path).unreadable == 2


@given(
    st.lists(st.binary(max_size=9).map(lambda line: line.replace(b"\n", b"")), max_size=9),
    st.booleans(),
    st.integers(1, 30),
    st.integers(1, 30),
)
def test_every_line_of_a_flow_log_file_belongs_to_exactly_one_of_the_parts_that_are_read_in_parallel(
    lines: list[bytes], is_torn: bool, size: int, block: int
) -> None:
    with TemporaryDirectory() as folder, mock.patch.object(reading_module, "_BLOCK", block):
        text = b"".join(line + b"\n" for line in lines)
        path = Path(folder, "flow.jsonl")
        path.write_bytes(text[:-1] if is_torn else text)
        # As a file is read line by line.
        with path.open("rb") as file:
            expected = [line.removesuffix(b"\n") for line in file]
        assert [raw for part in parts_of(path, size) for some in raws(part) for raw in some] == expected
        packed = Path(folder, "flow.jsonl.gz")
        packed.write_bytes(gzip.compress(path.read_bytes()))
        assert [raw for part in parts_of(packed, size) for some in raws(part) for raw in some] == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ('{"at":1,"kind":"x","n":NaN}', {"at": 1, "kind": "x"}),
        ('{"at":1,"kind":"x","n":1180591620717411303424}', {"at": 1, "kind": "x", "n": 2**70}),
        ('{"at":1,"kind":"x"', None),
        ("", None),
        ("[1]", None),
    ],
)
def test_a_flow_log_line_is_parsed_to_the_same_values_as_by_the_json_module(
    raw: str, expected: dict[str, object] | None
) -> None:
    for given_raw in (raw, raw.encode()):
        line = line_of(given_raw)
        assert line is None if expected is None else line is not None and expected.items() <= line.items()


def test_reading_a_file_that_is_not_a_flow_log_raises_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(FlowLogError, match="nowhere: there is no such file or folder"):
        FlowLogs([tmp_path / "nowhere"])
    with pytest.raises(
        FlowLogError, match=r"there is no flow log, a file that ends with \.jsonl or \.jsonl\.gz or \.parquet"
    ):
        FlowLogs([tmp_path])
    (tmp_path / "a.csv").touch()
    with pytest.raises(FlowLogError, match=r"a\.csv: the name of a flow log must end with \.jsonl or"):
        FlowLogs([tmp_path / "a.csv"])


def test_an_empty_flow_log_makes_an_empty_report(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    report = flow_report(tmp_path, maximum=10)
    assert (report.lines, report.first, report.advice) == ({}, None, {})
    assert all(rows == [] for rows in report.tables.values())
