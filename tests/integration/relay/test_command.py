"""``qflow relay``."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from sqlalchemy import Engine, create_engine

from qflow_client import Message
from qflow_client.amqp.frames import content_header
from qflow_client.broker import Broker
from qflow_client.cli import main
from qflow_client.sqlalchemy import Outbox, OutboxRelay
from qflow_client.sqlalchemy.sessions import Aside
from qflow_client.sqlalchemy.sqlite import SqliteSession

from .support import FAST, PATIENCE, add, bodies, environment, eventually, permitted, set_aside

Capture = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("no_settings_from_outside")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/application.db"


@pytest.fixture
def engine(url: str) -> Engine:
    return create_engine(url)


def relay_process(*arguments: str) -> subprocess.Popen[str]:
    """Start the command ``qflow relay``."""
    command = [sys.executable, "-m", "qflow_client.cli", "relay", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())


def test_E14_the_command_relay_run_publishes_rows_until_it_is_terminated(
    engine: Engine, outbox: Outbox, broker: Broker, url: str
) -> None:
    add(engine, outbox, b"1", b"2", key="k")
    add(engine, outbox, b"poison", to="nowhere")
    with relay_process(broker.url, "--database", url) as process:
        eventually(lambda: bodies(broker) == [b"1", b"2"] and set_aside(engine, outbox) == 1)
        assert process.stderr is not None
        assert process.stderr.readline() == "qflow: relay working\n"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
    assert out == "2 messages confirmed, 0 marked as possible copies, 1 set aside\n"
    assert permitted(engine, outbox) == 0


def get(url: str) -> tuple[int, dict[str, Any]]:
    try:
        with urlopen(url, timeout=PATIENCE) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_E12_the_relay_command_answers_readiness_probes(
    engine: Engine, outbox: Outbox, broker: Broker, url: str
) -> None:
    with relay_process(broker.url, "--database", url, "--ready-port", "0") as process:
        try:
            assert process.stderr is not None
            where = process.stderr.readline().removeprefix("qflow: readiness probes at ").strip()
            eventually(lambda: get(where) == (200, {"relay": {"state": "ready", "reasons": []}}))
            # One that says nothing keeps no other waiting.
            with socket.create_connection(("127.0.0.1", int(where.rstrip("/").rpartition(":")[2]))):
                broker.flow(False)
                eventually(lambda: get(where)[0] == 503)
                _, told = get(where)
            assert told["relay"]["state"] == "blocked"
            assert "channel_flow" in told["relay"]["reasons"][0]
            broker.flow(True)
            eventually(lambda: get(where)[0] == 200)
        finally:
            process.terminate()
        assert process.wait(PATIENCE) == 0


def test_E12_the_relay_command_reports_a_readiness_port_that_is_in_use(
    broker: Broker, url: str, capsys: Capture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["relay", broker.url, "--database", url, "--ready-port", port]) == 1
    assert f"cannot answer readiness probes on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--capacity", "--rate"])
def test_the_command_relay_run_refuses_a_capacity_or_rate_of_0(option: str, url: str, capsys: Capture) -> None:
    # With an allowed value, the command would end with the exit code 1, because the port is too large.
    assert main(["relay", "run", "--database", url, "--ready-port", "70000", option, "0"]) == 2
    assert capsys.readouterr().err.startswith(f"qflow: {option.removeprefix('--')}=0")


def test_E14_the_commands_relay_status_relay_failed_and_relay_retry_work(
    engine: Engine, outbox: Outbox, url: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QFLOW_DATABASE", url)
    add(engine, outbox, *"1234", key="k")
    session = SqliteSession(engine, outbox.tables, 30.0)
    header = content_header(Message(b""))
    session.set_aside([Aside(number, header, "returned (312 NO_ROUTE)") for number in (1, 2)])
    session.close()
    assert main(["relay", "status", "--seconds", "0"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("2 rows waiting, the oldest for ")
    assert others == ["0 confirmed so far", "0 relays working", "2 messages set aside: see qflow relay failed"]
    assert main(["relay", "status", "--json", "--seconds", "0.01"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["depth"], status["failed"], status["relayed"], status["rate"]) == (2, 2, 0, 0)
    assert main(["relay", "failed"]) == 0
    found = capsys.readouterr().out
    assert "312 NO_ROUTE" in found
    assert "more" not in found
    assert main(["relay", "failed", "-n", "1"]) == 0
    assert capsys.readouterr().out.endswith("\nand 1 more message\n")
    assert main(["relay", "failed", "--json", "-n", "1"]) == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row["id"], row["routing_key"], row["ordering_key"]) == (1, "q", "k")
    assert main(["relay", "retry", "1"]) == 0
    assert main(["relay", "retry"]) == 0
    assert capsys.readouterr().out == "1 message put back\n1 message put back\n"
    with engine.begin() as connection:
        assert (outbox.status(connection).depth, outbox.status(connection).failed) == (4, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["status", "--seconds", "inf"], "--seconds"),
        (["failed", "--limit", str(2**63)], "--limit"),
        (["retry", str(2**63)], "ID"),
    ],
)
def test_a_number_that_is_too_large_for_a_relay_command_is_a_usage_error(
    arguments: list[str], words: str, outbox: Outbox, url: str, capsys: Capture
) -> None:
    assert main(["relay", *arguments, "--database", url]) == 2
    assert words in capsys.readouterr().err


def test_a_relay_with_a_very_long_lease_can_be_closed(engine: Engine, outbox: Outbox, broker: Broker) -> None:
    with OutboxRelay(engine, broker.url, outbox=outbox, lease=1e12):
        pass


def test_E14_the_command_relay_status_shows_the_holds_of_a_relay(
    engine: Engine, outbox: Outbox, broker: Broker, url: str, capsys: Capture
) -> None:
    def lines() -> list[str]:
        assert main(["relay", "status", "--database", url, "--seconds", "0"]) == 0
        return capsys.readouterr().out.splitlines()

    with OutboxRelay(engine, broker.url, outbox=outbox, **FAST):
        eventually(lambda: "1 relay working" in lines())
        broker.flow(False)
        eventually(lambda: "a relay is blocked (flowed): channel_flow" in lines())
        assert main(["relay", "status", "--database", url, "--json"]) == 0
        status = json.loads(capsys.readouterr().out)
        assert (status["relays"], status["holds"]) == (1, ["channel_flow"])
        broker.flow(True)


def test_E14_a_relay_command_without_a_database_says_which_option_to_pass(capsys: Capture) -> None:
    assert main(["relay", "status"]) == 2
    assert "QFLOW_DATABASE" in capsys.readouterr().err


def test_E14_a_relay_command_reports_missing_outbox_tables(url: str, capsys: Capture) -> None:
    assert main(["relay", "status", "--database", url]) == 1
    assert "no such table: qflow_outbox" in capsys.readouterr().err


def test_E8_no_relay_command_shows_the_password_of_the_database(capsys: Capture) -> None:
    assert main(["relay", "status", "--database", "postgresql://me:s3cr3t@127.0.0.1:1/x"]) == 1
    error = capsys.readouterr().err
    assert "use QFLOW_DATABASE" in error
    assert "127.0.0.1" in error
    assert "s3cr3t" not in error
