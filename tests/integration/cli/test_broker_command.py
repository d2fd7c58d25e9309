from __future__ import annotations

import gc
import inspect
import io
import json
import re
import signal
import subprocess
import sys
import urllib.request
from dataclasses import fields
from pathlib import Path

import pika
import pytest
from pika.exceptions import ProbableAuthenticationError
from rich.console import Console

from qflow_client import MessageNacked, Producer
from qflow_client.broker import Broker, BrokerSettings
from qflow_client.cli import main
from qflow_client.cli.broker import broker, queue_table, seldom_collected
from qflow_client.cli.config import MARKS, SETTINGS
from qflow_client.report import flow_report
from tests.effort import rounds
from tests.integration.forked import Forked


def start(*arguments: str, kind: type[subprocess.Popen[str]] = Forked) -> tuple[subprocess.Popen[str], str]:
    process = kind(
        [sys.executable, "-m", "qflow_client.cli", "broker", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.program
@pytest.mark.parametrize(
    ("number", "kind"),
    # Start one real process, as users do. The other tests fork processes to save time.
    [(signal.SIGINT, subprocess.Popen), (signal.SIGTERM, Forked)],
)
def test_the_broker_command_runs_until_it_gets_SIGINT_or_SIGTERM(
    number: signal.Signals, kind: type[subprocess.Popen[str]]
) -> None:
    process, url = start("--queue", "orders", kind=kind)
    with Producer(url, routing_key="orders") as producer:
        producer.send(b"one").result(20)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", f"{number.name}: the broker ends\n")


@pytest.mark.program
@pytest.mark.parametrize(
    ("options", "warned_of"),
    [
        ((), "but no user can log in from another machine"),
        (("--quiet",), "but no user can log in from another machine"),
        (("--quiet", "--loopback-users", ""), "which other machines may reach, and guest's password is well known"),
    ],
)
def test_E8_a_broker_that_other_machines_can_reach_with_guest_as_its_only_user_prints_a_warning(
    options: tuple[str, ...], warned_of: str
) -> None:
    process, url = start("--host", "0.0.0.0", *options)
    assert url
    assert process.stderr is not None
    # The warning is printed while the broker runs, and not at its end.
    warning = process.stderr.readline()
    process.terminate()
    _, err = process.communicate(timeout=20)
    assert re.fullmatch(rf"qflow: warning: listening on 0\.0\.0\.0:\d+, {warned_of}; set users\n", warning)
    assert err == ("" if options else "SIGTERM: the broker ends\n")


@pytest.mark.program
@pytest.mark.parametrize("by_file", [False, True])
def test_the_broker_command_writes_a_flow_log(tmp_path: Path, by_file: bool) -> None:
    config = tmp_path / "broker.toml"
    config.write_text('flow_log = "log"' if by_file else "")
    given = () if by_file else ("--flow-log", str(tmp_path / "log"))
    process, url = start("--config", str(config), "--queue", "orders", "--flow-stop-count", "1", "--quiet", *given)
    with Producer(url, routing_key="orders", name="shop", capacity=5) as producer:
        events = producer.flow_events(kinds=("channel_flow",))
        for _ in range(2):
            producer.send(b"one")
        next(events)
        with pika.BlockingConnection(pika.URLParameters(url)) as connection:
            connection.channel().queue_purge("orders")
        producer.flush(20)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    (row,) = (row for row in flow_report(tmp_path / "log").tables["waits"] if row["reason"] == "channel_flow")
    assert (row["queue"], row["waited"], row["filled"]) == ("orders", "shop", "shop")


@pytest.mark.program
def test_the_broker_command_shows_while_it_runs_that_its_flow_log_cannot_be_written(tmp_path: Path) -> None:
    # No file may become larger than 0 bytes.
    program = """import resource, sys
from qflow_client.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
sys.exit(main())"""
    options = ("broker", "--port", "0", "--queue", "orders", "--quiet", "--flow-log", str(tmp_path))
    process = Forked(
        [sys.executable, "-c", program, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with Producer(process.stdout.readline().strip(), routing_key="orders") as producer:
        producer.send(b"one").result(20)
    assert "the flow log cannot be written, so lines may be lost: File too large" in process.stderr.readline()
    process.terminate()
    _, err = process.communicate(timeout=20)
    assert err == f"qflow: {tmp_path}: File too large\n"


@pytest.mark.program
def test_settings_of_the_broker_are_options_of_the_broker_command() -> None:
    process, url = start(
        "--user", "ann:s3cret", "--virtual-host", "shop", "--enforcement", "channel_flow", "--quiet",
        "--queue", "orders", "--flow-stop-count", "1", "--flow-resume-count", "1",
    )  # fmt: skip
    try:
        assert url.startswith("amqp://ann:s3cret@127.0.0.1:")
        assert url.endswith("/shop")
        with Producer(url, routing_key="orders") as producer:
            events = producer.flow_events()
            for _ in range(2):
                producer.send(b"x")
            assert next(events).holds[0].kind == "channel_flow"
            producer.flush(20)
        with pytest.raises(ProbableAuthenticationError):
            pika.BlockingConnection(pika.URLParameters(url.replace("s3cret", "wrong")))
    finally:
        process.terminate()
        process.communicate(timeout=20)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "70000"], "port must be from 0 to 65535, not 70000"),
        (
            ["--port", "0", "--flow-stop-count", "5"],
            "flow_stop_count: there is no queue to set this for; give --queue NAME",
        ),
        (
            ["--port", "0", "--queue", "q", "--flow-stop-count", "5", "--flow-resume-count", "6"],
            "qpid.flow_stop_count=5 and qpid.flow_resume_count=6",
        ),
        (["--port", "0", "--policy", "p max_cont=1"], "a policy has no 'max_cont'; did you mean 'max_count'?"),
        (["--port", "0", "--profile", "rabbitmq"], "'rabbitmq' is not one of 'qflow', 'lavinmq', 'wso2'"),
        (["--port", "0", "--user", "ann"], "--user, number 1: this is not a user; write NAME:PASSWORD"),
        (["--port", "0", "--user", "ann:"], "the password of user 'ann' is blank"),
        (
            ["--port", "0", "--max-queues", "1", "--queue", "a", "--queue", "b"],
            "limit of queues is reached (max_queues=1)",
        ),
        (["--port", "0", "--queue", "n" * 256], "name has 256 bytes; AMQP carries at most 255: 'nnn"),
        (["--port", "0", "--queue", "\udcff"], "name cannot be encoded as UTF-8"),
        (["--port", "0", "--max-bindings", "0"], "max_bindings must be from 1"),
        (["--port", "0", "--max-consumers", "0"], "max_consumers must be from 1"),
        (["--port", "0", "--max-unauthenticated", "0"], "max_unauthenticated must be from 1"),
        (["--port", "0", "--max-failed-logins", "-1"], "max_failed_logins must be from 0"),
    ],
)
def test_an_invalid_option_of_the_broker_command_is_a_usage_error(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["broker", *arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.program
@pytest.mark.usefixtures("no_retries")
def test_A4_policies_can_be_passed_as_options_of_the_broker_command() -> None:
    process, url = start(
        "--policy", "narrow pattern=^orders$ policy=wait max_count=1", "--policy", "other pattern=^x max_count=5",
        "--max-producer-flow-control-wait", "0.1", "--queue", "orders", "--quiet",
    )  # fmt: skip
    try:
        with Producer(url, routing_key="orders") as producer:
            producer.send(b"1").result(20)
            receipt = producer.send(b"2")
            with pytest.raises(MessageNacked):
                receipt.result(20)
    finally:
        process.terminate()
        process.communicate(timeout=20)


CONFIG = """
port = 0
enforcement = "channel_flow"
recent = 2.5
http_port = 0

[users]
ann = "s3cret"

[[queue]]
name = "orders"
flow_stop_count = 100
flow_resume_count = 70

[[queue]]
name = "invoices"
flow_stop_size = 1000

[[policy]]
name = "narrow"
pattern = "^invoices$"
policy = "ring"
max_count = 7
"""


@pytest.mark.program
def test_command_line_options_override_options_in_the_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "broker.toml"
    path.write_text(CONFIG)
    process, url = start("--config", str(path), "--enforcement", "completion", "--queue", "more", "--quiet")
    try:
        assert process.stdout is not None
        http_url = process.stdout.readline().strip()
        assert url.startswith("amqp://ann:***@127.0.0.1:")
        with urllib.request.urlopen(f"{http_url}/api/queues", timeout=20) as answer:
            queues = {queue["name"]: queue for queue in json.load(answer)}
        assert list(queues) == ["orders", "invoices", "more"]
        assert {queue["enforcement"] for queue in queues.values()} == {"completion"}
        marks = {name: queue["thresholds"] for name, queue in queues.items()}
        assert (marks["orders"]["flowStopCount"], marks["orders"]["flowResumeCount"]) == (100, 70)
        assert (marks["invoices"]["flowStopSize"], marks["invoices"]["flowResumeSize"]) == (1000, 875)
        assert set(marks["more"].values()) == {0}
        assert (queues["invoices"]["policies"], queues["invoices"]["policy"]) == (["narrow"], "ring")
    finally:
        process.terminate()
        process.communicate(timeout=20)


def test_the_http_token_can_be_set_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QFLOW_HTTP_TOKEN", "short")
    assert main(["broker", "--port", "0", "--http-port", "0"]) == 2
    assert "http_token must be at least 8 visible" in capsys.readouterr().err


def test_an_empty_http_token_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["broker", "--port", "0", "--http-port", "0", "--http-token", "", "--quiet"]) == 2
    assert "http_token must be at least 8 visible" in capsys.readouterr().err


def test_every_setting_of_the_broker_has_an_option_and_a_key_in_the_configuration_file() -> None:
    flags = set(inspect.signature(broker).parameters)
    assert {field.name for field in fields(BrokerSettings)} - set(SETTINGS) == {"authenticate", "ssl_context", "trace"}
    assert {{"users": "user", "policies": "policy"}.get(name, name) for name in SETTINGS} < flags
    assert {"tls_certificate", "tls_key", "tls_client_ca", "queue", *MARKS} < flags


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port = ", "the file is not valid TOML: Invalid value (at "),
        ("prot = 5", "there is no option 'prot'; did you mean 'port'?"),
        ("http-port = 5", "there is no option 'http-port'; did you mean 'http_port'?"),
        ("trace = 5", "there is no option 'trace'; "),
        ("zzzzz = 5", "there is no option 'zzzzz'; the options are host, port, "),
        ("port = 70000", "port must be from 0 to 65535, not 70000"),
        ("port = '5672'", "port must be an int, not str: '5672'"),
        ("enforcement = 'none'", "enforcement must be one of 'channel_flow', 'completion', 'both', not 'none'"),
        ("profile = 'rabbitmq'", "profile must be one of 'qflow', 'lavinmq', 'wso2', 'amqp-0-9-1', 'amqp-0-9', not"),
        ("users = {}", "users must map at least one user name to its password"),
        ("[users]\nproducer = ''", "users: the password of user 'producer' is blank; set one"),
        (
            "default_flow_stop_threshold = 60",
            "default_flow_stop_threshold=60 and default_flow_resume_threshold=70: the stop threshold must not be below",
        ),
        ("http_port = 0\nhttp_host = '0.0.0.0'", "http_host='0.0.0.0' is not a loopback address: set an http_token"),
        ("capacity = 5\nflow_resume_capacity = 6", "capacity=5 and flow_resume_capacity=6"),
        ("[queue]\nname = 'q'", "queue must be a list of tables; begin each table with [[queue]]"),
        ("[[queue]]\nflow_stop_count = 1", "[[queue]] number 1: name must be the name of a queue, not None"),
        (
            "[[queue]]\nname = 'q'\n[[queue]]\nname = 'q'",
            "number 2: the name 'q' is used twice; give each queue its own",
        ),
        ("[[queue]]\nname = 'q'\nflow_stop = 1", "[[queue]] number 1: there is no option 'flow_stop'; did you mean"),
        ("[[queue]]\nname = 'q'\nflow_stop_count = 'x'", "qpid.flow_stop_count='x': it must be an integer, not str"),
        ("[policy]\nname = 'p'", "policy must be a list of tables; begin each table with [[policy]]"),
        ("[[policy]]\nname = 'p'\nmax_cont = 1", "[[policy]] number 1: a policy has no 'max_cont'; did you mean"),
        ("[[policy]]\nmax_count = 1", "[[policy]] number 1: name=None: a policy must have a name"),
        ("policies = []", "there is no option 'policies'; did you mean 'policy'?"),
        ("tls_certificate = 5", "tls_certificate must be a path, not 5"),
        ("tls_certificate = 'none.pem'", "none.pem: cannot load a certificate with its key: [Errno 2]"),
        ("tls_client_ca = 'ca.pem'", "tls_client_ca has no effect without a certificate: set tls_certificate"),
        ("tls_key = 'key.pem'", "tls_key has no effect without a certificate: set tls_certificate"),
    ],
)
def test_the_error_for_an_invalid_option_in_the_configuration_file_shows_the_reason(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broker.toml").write_text(text if "port =" in text else f"port = 0\n{text}")
    assert main(["broker", "--config", "broker.toml"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("qflow: ")
    assert words in err
    assert text.startswith("tls_") or "broker.toml: " in err


def test_the_error_for_an_unknown_option_in_the_configuration_file_names_each_option_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broker.toml"
    path.write_text("zzzzz = 5")
    assert main(["broker", "--config", str(path)]) == 2
    options = capsys.readouterr().err.partition("the options are ")[2].strip().split(", ")
    assert len(options) == len(set(options))


def test_the_error_for_a_missing_configuration_file_names_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["broker", "--config", "none.toml"]) == 1
    assert capsys.readouterr().err == "qflow: none.toml: No such file or directory\n"


def test_the_error_for_an_invalid_command_line_option_does_not_name_the_configuration_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broker.toml"
    path.write_text("port = 0")
    assert main(["broker", "--config", str(path), "--port", "-1"]) == 2
    assert capsys.readouterr().err == "qflow: port must be from 0 to 65535, not -1\n"


def test_the_error_for_a_port_in_use_names_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    with Broker() as other:
        assert main(["broker", "--port", str(other.port)]) == 1
        assert capsys.readouterr().err.startswith(f"qflow: cannot listen on 127.0.0.1:{other.port}: ")
        assert main(["broker", "--port", "0", "--http-port", str(other.port)]) == 1
        assert capsys.readouterr().err.startswith(f"qflow: cannot listen on 127.0.0.1:{other.port}: ")


def test_the_table_of_queues_shows_depths_and_flow_states() -> None:
    with Broker() as running:
        assert "no queue yet" in drawn(running)
        running.declare_queue("orders", arguments={"qpid.flow_stop_count": 1})
        running.publish(b"12345", "orders")
        assert "OFF" in drawn(running)
        running.publish(b"12345", "orders")
        assert drawn(running).split("\n")[1].split() == ["orders", "2", "2", "0", "10", "2", "0", "ON", "1"]


def drawn(running: Broker) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    with console.capture() as capture:
        console.print(queue_table(running.queues(), 0, 0))
    return capture.get()


def test_the_settings_of_the_garbage_collector_are_restored_when_the_broker_ends() -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    with seldom_collected():
        assert gc.get_threshold() != before[0]
        assert gc.get_freeze_count() > before[1]
    assert gc.get_threshold() == before[0]
    # Python 3.12.1 starts with some frozen objects.
    assert gc.get_freeze_count() <= before[1]


@pytest.mark.program
def test_the_store_survives_a_kill_and_a_path_in_the_configuration_file_is_relative_to_the_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "broker.toml"
    config.write_text('store = "messages"\nstore_synchronous = "normal"\n')
    for _ in range(rounds(3)):
        process, url = start("--config", str(config), "--queue", "orders")
        with Producer(url, routing_key="orders") as producer:
            producer.send(b"one").result(20)
        process.kill()
        process.communicate(timeout=20)
        assert (tmp_path / "messages").exists()
    process, url = start("--store", str(tmp_path / "messages"))
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        assert connection.channel().queue_declare("orders", passive=True).method.message_count == rounds(3)
    assert main(["broker", "--port", "0", "--store", str(tmp_path / "messages")]) == 1
    assert f"is used by another broker in process {process.pid}" in capfd.readouterr().err
    process.terminate()
    process.communicate(timeout=20)
