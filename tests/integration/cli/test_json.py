"""The option ``--json`` of all commands. The other tests of these commands read the text output."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

import qflow_client.cli.report
from qflow_client import Outbox
from qflow_client.broker import Broker, RateLimit, RateScope
from qflow_client.cli import main
from qflow_client.sqlalchemy import Outbox as DatabaseOutbox
from tests.integration.forked import Forked

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker(http_port=0) as broker:
        broker.declare_queue("orders")
        broker.publish(b"first", "orders")
        broker.set_rate_limit(RateLimit(RateScope.QUEUE, "orders", messages=1e6))
        yield broker


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broker: Broker) -> Path:
    """A folder with files for the commands. The environment has the addresses of broker and database."""
    monkeypatch.chdir(tmp_path)
    with Outbox("outbox") as outbox:
        for number in range(3):
            outbox.put(b"body", "", "orders", f"id-{number}", permit=False)
    (tmp_path / "log.jsonl").touch()
    (tmp_path / "definitions").write_text('{"queues": [{"name": "invoices"}], "users": []}')
    monkeypatch.setenv("QFLOW_DATABASE", "sqlite:///application.db")
    engine = create_engine("sqlite:///application.db")
    table = DatabaseOutbox()
    table.metadata.create_all(engine)
    with engine.begin() as connection:
        table.add(connection, b"row", routing_key="orders")
    engine.dispose()
    monkeypatch.setenv("QFLOW_URL", broker.url)
    monkeypatch.setenv("QFLOW_ADMIN_URL", broker.http_url)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    # pyarrow is not installed on every machine.
    monkeypatch.setattr(qflow_client.cli.report, "to_parquet", lambda logs, output: 7)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("hash-password", {}),
        ("convert log.jsonl --output logs.parquet", {"lines": 7, "output": "logs.parquet"}),
        ("outbox ls outbox -n 2", {"total": 3, "may_be_second_copies": 0, "damaged": []}),
        ("outbox drain outbox", {"complete": True, "error": None, "confirmed": 3, "left": 0, "damaged": 0}),
        ("outbox drain outbox --quiet", {"confirmed": 3}),
        ("outbox drop outbox 3 1", {"removed": [1, 3]}),
        ("outbox drop outbox 2 --yes", {"removed": [2]}),
        ("relay retry", {"put_back": 0}),
        ("admin stop", {}),
        ("admin start", {}),
        ("admin purge orders", {"messages": 1}),
        ("admin export", {"bindings": []}),
        ("admin import definitions", {"queues": 1, "ignored": ["users"]}),
        ("admin add queue invoices --capacity 9", {"name": "invoices", "arguments": {"x-qpid-capacity": 9}}),
        ("admin set queue orders --capacity 9", {"name": "orders", "flowStopped": False}),
        ("admin delete queue orders", {"messages": 1}),
        ("admin set rate user guest --messages 5", {"applyTo": "user", "name": "guest", "messages": 5}),
        ("admin delete rate queue orders", {}),
    ],
)
def test_with_json_a_command_prints_exactly_one_json_object(
    command: str, told: dict[str, Any], folder: Path, capsys: Capture
) -> None:
    assert main([*command.split(), "--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    assert {key: found[key] for key in told} == told
    assert out.isascii()


def test_with_json_the_commands_for_outboxes_print_a_json_object_for_each_message(
    folder: Path, capsys: Capture
) -> None:
    assert main(["outbox", "ls", "outbox", "--json", "-n", "2"]) == 0
    first, second = json.loads(capsys.readouterr().out)["messages"]
    assert (first["sequence"], first["message_id"], second["body_bytes"]) == (1, "id-0", 4)
    assert main(["outbox", "export", "outbox", "--json"]) == 0
    assert [json.loads(line)["sequence"] for line in capsys.readouterr().out.splitlines()] == [1, 2, 3]


def test_with_json_the_commands_for_policies_print_the_policy_or_an_empty_object(folder: Path, capsys: Capture) -> None:
    assert main(["admin", "add", "policy", "small pattern=^o policy=ring max_count=9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["definition"]["maxCount"] == 9
    assert main(["admin", "delete", "policy", "small", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {}


def test_with_json_control_characters_in_names_are_escaped(broker: Broker, folder: Path, capsys: Capture) -> None:
    broker.declare_queue("\x9b31m\u202e")
    assert main(["admin", "queues", "--json"]) == 0
    out = capsys.readouterr().out
    assert "\x9b31m\u202e" in [queue["name"] for queue in json.loads(out)]
    assert out.isascii()


def test_with_json_an_error_is_still_printed_on_standard_error(folder: Path, broker: Broker, capsys: Capture) -> None:
    assert main(["admin", "purge", "missing", "--json"]) == 1
    assert capsys.readouterr() == ("", "qflow: no queue 'missing' in vhost '/'\n")
    broker.delete_queue("orders")
    assert main(["outbox", "drain", "outbox", "--json"]) == 1
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["complete"], told["confirmed"], told["left"]) == (False, 0, 3)
    assert told["error"] == "3 messages left: not confirmed by the broker"
    assert err.endswith(f"qflow: {told['error']}\n")


def started(*arguments: str) -> subprocess.Popen[str]:
    return Forked[str](
        [sys.executable, "-m", "qflow_client.cli", *arguments, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.program
def test_with_json_the_broker_command_prints_its_urls_when_the_broker_is_ready(tmp_path: Path) -> None:
    for options, has_http in (["--http-port", "0"], True), ([], False):
        with started("broker", "--port", "0", "--queue", "orders", *options) as process:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            assert (told["http_url"] is not None) == has_http
            if has_http:
                assert main(["admin", "--url", told["http_url"], "purge", "orders"]) == 0
            assert told["url"].startswith("amqp://guest:guest@127.0.0.1:")
            process.send_signal(signal.SIGTERM)
            assert (process.communicate(timeout=20)[0], process.returncode) == ("", 0)


@pytest.mark.program
def test_with_json_the_relay_command_prints_its_counts_of_messages_at_its_end(folder: Path, broker: Broker) -> None:
    with started("relay", broker.url) as process:
        broker.wait_until(lambda broker: broker.queue("orders").depth == 2)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=20)
        assert process.returncode == 0
    assert json.loads(out) == {"confirmed": 1, "marked": 0, "set_aside": 0}
