"""``qflow report`` with inputs that it cannot use."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from qflow_client.cli import main
from tests.unit.simulation.telemetry import lines_of

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module", name="log")
def _log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "flow.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines_of(range(3, 4), 1000)))
    return path


def test_the_report_says_why_it_has_no_advice_for_an_unknown_queue(log: Path, capsys: Capture) -> None:
    assert main(["report", str(log), "--maximum", "60", "--queue", "orders", "--queue", "queue-3"]) == 0
    shown = capsys.readouterr().out
    assert "queue 'orders': the log has no messages for this queue" in shown
    assert "queue 'queue-3'" not in shown
    assert main(["report", str(log), "--maximum", "60", "--queue", "orders", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["no_advice"]) == ["orders"]


def test_the_report_says_why_it_has_no_advice_without_a_recorded_queue(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "empty.jsonl").touch()
    assert main(["report", str(tmp_path), "--maximum", "60"]) == 0
    assert "no recommendation: the flow logs have no messages of a queue" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--delay", "inf"], "--delay: inf must be a number of seconds"),
        (["--maximum", "60", "--round-trip", "inf"], "--round-trip: inf must be a number of seconds"),
        (["--queue", "queue-3"], "--queue: give --maximum or --delay too"),
    ],
)
def test_options_of_the_report_that_mean_nothing_are_usage_errors(
    options: list[str], words: str, log: Path, capsys: Capture
) -> None:
    assert main(["report", str(log), *options]) == 2
    assert words in capsys.readouterr().err


def test_without_a_terminal_the_tables_of_the_report_show_whole_names_without_control_characters(
    tmp_path: Path, capsys: Capture
) -> None:
    name = "orders-" + "x" * 90 + "\x1b[31m"
    line = {"at": 5, "kind": "lifted", "origin": "producer", "producer": name, "connection": name, "queue": name}
    line |= {"reason": "paused", "since": 1, "begun": 1, "flowed_since": 1}
    (tmp_path / "flow.jsonl").write_text(json.dumps(line))
    assert main(["report", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    # The tables of producers and of holds have the name of the producer, and that of holds has the name of the queue.
    assert shown.count(name.replace("\x1b", "\\x1b")) == 3


@pytest.mark.parametrize(
    "line",
    [
        {"at": 1, "kind": "depth"},
        {"at": 1, "kind": "depth", "queue": "q"},
        {"at": 1, "kind": "lifted", "origin": "producer", "producer": [], "connection": "", "queue": "", "reason": ""},
    ],
)
def test_the_report_names_a_file_with_lines_that_do_not_belong_to_a_flow_log(
    line: object, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(json.dumps(line))
    assert main(["report", str(path)]) == 1
    assert f"qflow: {path}: a line or row does not belong to a flow log" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ['{"at": "noon", "kind": "depth"}', '{"at": 1, "kind": []}', '{"at": 1e9, "kind": ""}']
)
def test_the_report_counts_a_line_with_a_wrong_type_as_unreadable(line: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "other.jsonl").write_text(line)
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "0 lines\n1 line could not be read\n"


@pytest.mark.parametrize("damage", ["shortened", "overwritten", "no gzip"])
def test_the_report_names_a_compressed_flow_log_that_is_damaged(
    damage: str, log: Path, tmp_path: Path, capsys: Capture
) -> None:
    whole = gzip.compress(log.read_bytes())
    half = len(whole) // 2
    path = tmp_path / "flow.jsonl.gz"
    path.write_bytes(
        {"shortened": whole[:half], "overwritten": whole[:half] + bytes(half), "no gzip": b"x" * half}[damage]
    )
    assert main(["report", str(path)]) == 1
    assert f"qflow: {path}: the compressed data is damaged: " in capsys.readouterr().err


def test_a_flow_log_cannot_be_converted_to_a_folder(log: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["convert", str(log), "--output", str(tmp_path)]) == 1
    assert f"qflow: {tmp_path}: this is a folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_flow_log_cannot_be_converted_to_itself(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "flow.jsonl"
    path.write_text("{}\n")
    assert main(["convert", str(path), "--output", str(path)]) == 2
    assert f"qflow: --output {path}: this is one of the flow logs" in capsys.readouterr().err
    assert path.read_text() == "{}\n"
