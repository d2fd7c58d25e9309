"""E8: passwords on the command line."""

from __future__ import annotations

import io
import logging
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qflow_client import Producer
from qflow_client.cli import main
from qflow_client.cli.passwords import broker_users
from tests.integration.forked import Forked

SECRET = re.compile("s3cr3t|cr3t|3cr3")
HERE = "127.0.0.1:1/%2F"
VALUES = {
    "plain": f"amqp://user:s3cr3t-pw@{HERE}",
    "encoded": f"amqp://user:s3cr3t%2Dpw@{HERE}",
    "slash": f"amqp://user:s3cr3t/cr3t-pw@{HERE}",
    "HTTP": "http://user:s3cr3t-pw@127.0.0.1:1",
    "no host": "amqp://user:s3cr3t-pw",
    "no scheme": f"user:s3cr3t-pw@{HERE}",
    "TLS": f"amqps://{HERE}?ssl_options={{'certfile': '/nowhere.pem', 'password': 's3cr3t-pw'}}",
}
DOORS = {
    "send url": ["send", "-", "-k", "q", "--url", "{}"],
    "send url quiet": ["send", "-q", "-k", "q", "--url={}"],
    "send file": ["send", "{}", "-k", "q"],
    "send two files": ["send", "-", "{}", "-k", "q"],
    "send capacity": ["send", "--capacity", "{}"],
    "send capacity in one": ["send", "--capacity={}"],
    "send wait": ["send", "--max-producer-flow-control-wait", "{}"],
    "send outbox": ["send", "-", "-k", "q", "--url", f"amqp://{HERE}", "--outbox", "{}"],
    "outbox drain": ["outbox", "drain", "{}"],
    "outbox drain url": ["outbox", "drain", "orders.outbox", "--url", "{}"],
    "outbox ls": ["outbox", "ls", "{}"],
    "admin": ["admin", "--url", "{}", "queues"],
    "admin token": ["admin", "--token", "{}", "--url", "http://127.0.0.1:1", "queues"],
    "broker user": ["broker", "--user", ":{}", "--port", "0"],
    "broker token": ["broker", "--http-token", "s3 cr3t", "--http-port", "0", "--port", "{}"],
    "broker short token": ["broker", "--http-token", "s3cr3t", "--http-port", "0", "--port", "0"],
    "broker port": ["broker", "--port", "{}"],
    "broker policy": ["broker", "--port", "0", "--policy", "{}"],
    "broker profile": ["broker", "--profile", "{}"],
    "broker config": ["broker", "--config", "{}"],
    "broker certificate": ["broker", "--tls-certificate", "{}"],
    "broker store": ["broker", "--port", "0", "--store", "nowhere/{}"],
    "broker users file": ["broker", "--port", "0", "--users-file", "{}"],
    "report": ["report", "{}"],
    "no command": ["{}"],
    "no option": ["send", "--password={}"],
}


@pytest.mark.parametrize("door", DOORS)
def test_E8_no_command_prints_a_password(
    door: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a record\n")))
    caplog.set_level(logging.DEBUG)
    for kind, value in VALUES.items():
        assert main([each.format(value) for each in DOORS[door]]) != 0, kind
        said = "".join(capfd.readouterr()) + caplog.text
        assert not SECRET.search(said), (kind, said)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["outbox", "drain", "none", "--url", VALUES["plain"]],
            "--url: other users .* can see a password .*use QFLOW_URL",
        ),
        (
            ["send", "none", "-k", "q", "--url", VALUES["plain"]],
            "--url: other users .* can see a password .*use QFLOW_URL",
        ),
        (["admin", "--url", "http://127.0.0.1:1", "--token", "s3cr3t-pw", "queues"], "--token: .*use QFLOW_HTTP_TOKEN"),
        (["broker", "--port", "-1", "--user", "ann:s3cr3t"], "--user: .*use --users-file, QFLOW_BROKER_USERS or"),
        (["broker", "--port", "-1", "--http-token", "s3cr3t-pw"], "--http-token: .*use QFLOW_HTTP_TOKEN or"),
    ],
)
def test_E8_a_password_on_the_command_line_causes_a_warning(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) != 0
    assert re.search(words, capsys.readouterr().err)


@pytest.mark.parametrize("arguments", [["--url", f"amqp://guest:guest@{HERE}"], ["--url", f"amqp://{HERE}"], []])
def test_E8_a_url_without_a_secret_on_the_command_line_causes_no_warning(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QFLOW_URL", VALUES["plain"])
    assert main(["send", "none", "-k", "q", *arguments]) != 0
    assert "can see a password" not in capsys.readouterr().err


def test_a_users_file_must_not_be_empty_and_cannot_be_combined_with_the_option_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "users"
    file.write_text("\n")
    assert main(["broker", "--users-file", str(file)]) != 0
    assert "the file has no users; write one NAME:PASSWORD in each line" in capsys.readouterr().err
    assert main(["broker", "--users-file", str(file), "--user", "guest:guest"]) != 0
    assert "--user and --users-file cannot be combined; put all users into the file" in capsys.readouterr().err


@pytest.mark.parametrize("users", [[""], ["ann:s3cr3t", " "]])
def test_a_blank_option_user_does_not_start_a_broker_with_the_user_guest(
    users: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    # With allowed options, the command would end with the exit code 1, because the host does not exist.
    options = [each for user in users for each in ("--user", user)]
    assert main(["broker", "--host", "nowhere.invalid", *options]) == 2
    assert capsys.readouterr().err.endswith("qflow: --user '': this is not a user; write NAME:PASSWORD\n")


@pytest.mark.parametrize("command", [["hash-password"], ["broker", "--users-file", "-"]])
@pytest.mark.parametrize("content", [b"s3cr3t\xff:s3cr3t\n", None])
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_E8_standard_input_that_is_closed_or_not_utf_8_is_reported_without_the_password(
    command: list[str],
    content: bytes | None,
    errors: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # In the locale C, Python decodes standard input with surrogateescape.
    stdin = None if content is None else io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(command) == (1 if content is None else 2)
    err = capsys.readouterr().err
    assert ("standard input is closed" if content is None else "the text is not valid utf-8") in err
    assert SECRET.search(err) is None


def test_a_byte_order_mark_is_not_part_of_the_first_user(tmp_path: Path) -> None:
    file = tmp_path / "users"
    file.write_bytes(b"\xef\xbb\xbfann:s3cr3t\r\n")
    assert broker_users(None, file) == {"ann": "s3cr3t"}


def test_a_users_file_that_is_not_utf_8_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "users"
    file.write_bytes(b"ann:s3cr3t\xff\n")
    assert main(["broker", "--users-file", str(file)]) == 2
    assert capsys.readouterr().err == f"qflow: --users-file {file}: the text is not valid utf-8\n"


@pytest.mark.program
@pytest.mark.parametrize("way", ["file", "standard input", "environment"])
def test_E8_users_can_be_passed_by_a_file_by_standard_input_or_by_the_environment(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = "ann:s3cr3t:x\n\nbob:two words \n"
    file = tmp_path / "users"
    file.write_text(users)
    if way == "environment":
        monkeypatch.setenv("QFLOW_BROKER_USERS", users)
    given = {"file": ["--users-file", str(file)], "standard input": ["--users-file", "-"], "environment": []}[way]
    process = Forked[str](
        [sys.executable, "-m", "qflow_client.cli", "broker", "--port", "0", "--queue", "q", "--quiet", *given],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(users)
    process.stdin.close()
    url = process.stdout.readline().strip()
    port = url.partition("@")[2]
    for names in ("ann:s3cr3t%3Ax", "bob:two%20words%20"):
        with Producer(f"amqp://{names}@{port}", routing_key="q") as producer:
            producer.send(b"x").result(20)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    process.stdout.close()
