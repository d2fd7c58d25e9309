from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from qflow_client import Producer
from qflow_client.broker import Broker, ThresholdsSnapshot
from qflow_client.cli import main
from qflow_client.cli.admin import _flow_lines
from tests.integration.forked import Forked

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(name="broker")
def _broker() -> Iterator[Broker]:
    with Broker(http_port=0) as broker:
        yield broker


@pytest.fixture(name="run")
def _run(broker: Broker, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["admin", "--url", broker.http_url, *arguments])
        return (code, *capsys.readouterr())

    return run


def test_C7_a_queue_can_be_added_with_the_options_of_the_qpid_cpp_tool(broker: Broker, run: Run) -> None:
    marks = ["--flow-stop-size", "1000", "--flow-resume-size", "700", "--flow-stop-count", "100"]
    assert run("add", "queue", "orders", *marks, "--flow-resume-count", "70") == (0, "", "")
    assert broker.queue("orders").arguments == {
        "qpid.flow_stop_size": 1000,
        "qpid.flow_resume_size": 700,
        "qpid.flow_stop_count": 100,
        "qpid.flow_resume_count": 70,
    }
    more = ["--durable", "--capacity", "5", "--argument", "qpid.max_count=9", "--argument", "qpid.policy_type=ring"]
    assert run("add", "queue", "a/b", *more)[0] == 0
    queue = broker.queue("a/b")
    assert queue.durable
    assert queue.arguments == {"x-qpid-capacity": 5, "qpid.max_count": 9, "qpid.policy_type": "ring"}


def test_the_command_queues_lists_depths_flow_states_and_thresholds(broker: Broker, run: Run) -> None:
    broker.declare_queue("orders", arguments={"qpid.flow_stop_count": 1, "x-qpid-capacity": 9000})
    for _ in range(2):
        broker.publish(b"x" * 1000, "orders")
    code, out, err = run("queues")
    assert (code, err) == (0, "")
    head, row = (line.split() for line in out.splitlines())
    assert head == [
        "queue",
        "depth",
        "ready",
        "unacked",
        "bytes",
        "consumers",
        "flow",
        "state",
        "times",
        "ON",
        "thresholds",
    ]
    assert row == ["orders", "2", "2", "0", "2,000", "0", "ON", "1", "1/1,", "9,000/9,000", "B", "capacity"]
    assert json.loads(run("queues", "--json")[1])[0]["flowStopped"] is True


def test_D5_producers_can_be_listed_stopped_and_started_with_commands(broker: Broker, run: Run) -> None:
    broker.declare_queue("orders")
    with Producer(broker.url, routing_key="orders") as producer:
        producer.send(b"x").result(20)
        events = producer.flow_events()
        assert run("stop") == (0, "", "")
        assert next(events).flowed
        _, out, _ = run("producers")
        (name,) = (channel.name for channel in broker.producers())
        assert out.splitlines()[1].startswith(f"{name}")
        assert out.splitlines()[1].split()[2:8] == ["producer", "1", "0", "flowed", "operator", "1"]
        assert run("start")[0] == 0
        producer.send(b"x").result(20)
        assert run("stop", name)[0] == 0
        assert broker.producers()[0].flowed
        assert not broker.producers_stopped
        assert run("start", name)[0] == 0
        producer.send(b"x").result(20)
    code, _, err = run("stop", "absent")
    assert (code, err) == (1, "qflow: there is no channel 'absent'; the broker has: none\n")


def test_D4_thresholds_can_be_set_on_a_queue_in_use(broker: Broker, run: Run) -> None:
    broker.declare_queue("orders")
    broker.publish(b"12345", "orders")
    assert run("set", "queue", "orders", "--flow-stop-size", "4") == (0, "orders: 4/3 B, ON\n", "")
    assert run("set", "queue", "orders", "--flow-stop-size", "0", "--capacity", "10") == (
        0,
        "orders: 10/10 B capacity, OFF\n",
        "",
    )
    assert broker.queue("orders").thresholds == ThresholdsSnapshot(capacity=10, flow_resume_capacity=10)
    code, out, err = run("set", "queue", "orders", "--flow-stop-count", "5", "--flow-resume-count", "6")
    assert (code, out) == (2, "")
    assert "flow_stop_count=5 and flow_resume_count=6" in err
    assert (
        run("set", "queue", "orders")[2]
        == "qflow: nothing to change: give at least one threshold, such as --flow-stop-count\n"
    )


def test_a_queue_can_be_purged_and_deleted(broker: Broker, run: Run) -> None:
    broker.declare_queue("orders")
    broker.publish(b"x", "orders")
    assert run("purge", "orders") == (0, "1 message removed\n", "")
    assert run("delete", "queue", "orders") == (0, "0 messages removed\n", "")
    assert run("delete", "queue", "orders") == (1, "", "qflow: no queue 'orders' in vhost '/'\n")


def test_definitions_can_be_exported_and_imported(broker: Broker, run: Run, tmp_path: Path) -> None:
    broker.declare_queue("orders", durable=True)
    broker.bind("amq.fanout", "orders")
    code, out, _ = run("export")
    assert code == 0
    path = tmp_path / "definitions.json"
    path.write_text(json.dumps(json.loads(out) | {"users": []}))
    broker.delete_queue("orders")
    assert run("import", str(path)) == (0, "", "0 exchanges, 1 queue, 1 binding; ignored: users\n")
    assert broker.queue("orders").durable
    path.write_text("{")
    assert run("import", str(path))[0] == 2
    path.write_text('{"queues": [{"name": "q"}, {"name": 5}]}')
    assert run("import", str(path)) == (2, "", "qflow: queues[1].name: Input should be a valid string\n")


def test_if_the_http_token_is_missing_the_error_says_how_to_pass_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Broker(http_port=0, http_token="correct-horse") as broker:
        monkeypatch.setenv("QFLOW_ADMIN_URL", broker.http_url)
        assert main(["admin", "queues"]) == 1
        assert capsys.readouterr().err.endswith("requires the right token: set QFLOW_HTTP_TOKEN, or give --token\n")
        assert main(["admin", "--token", "correct-horse", "queues"]) == 0
        monkeypatch.setenv("QFLOW_HTTP_TOKEN", "correct-horse")
        assert main(["admin", "queues"]) == 0


@pytest.mark.parametrize("token", ["correct-horse\n", "correct-\u20acuro"])
def test_a_token_that_http_cannot_carry_is_refused_and_not_printed(
    token: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QFLOW_HTTP_TOKEN", token)
    assert main(["admin", "--url", "http://127.0.0.1:1", "queues"]) == 2
    err = capsys.readouterr().err
    assert err == "qflow: the token of --token or QFLOW_HTTP_TOKEN must be printable ASCII characters\n"


@pytest.mark.parametrize(
    ("document", "words"),
    [("[" * 100_000, "not valid JSON: "), ("null", "not an export"), ("[]", "not an export")],
)
def test_the_error_of_an_import_names_the_file(
    document: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "definitions.json"
    path.write_text(document)
    assert main(["admin", "--url", "http://127.0.0.1:1", "import", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"qflow: {path}: {words}")


def test_an_import_from_a_closed_standard_input_or_a_missing_file_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["admin", "--url", "http://127.0.0.1:1", "import", "-"]) == 1
    assert capsys.readouterr().err == "qflow: standard input is closed\n"
    assert main(["admin", "--url", "http://127.0.0.1:1", "import", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"qflow: {tmp_path}/none: No such file or directory\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ["--url", "ftp://there", "queues"],
            2,
            "--url must be http://HOST:PORT or https://HOST:PORT, not 'ftp://there'",
        ),
        (["--url", "127.0.0.1:15672", "queues"], 2, "--url must be http://HOST:PORT"),
        (["--url", "http://127.0.0.1:1", "queues"], 1, "cannot reach the HTTP API at http://127.0.0.1:1: "),
        (
            ["--url", "https://127.0.0.1:1", "--cacert", __file__, "queues"],
            2,
            f"{__file__}: cannot load certificates of authorities: ",
        ),
        (["add", "queue", "q", "--argument", "x"], 2, "--argument must be NAME=VALUE, not 'x'"),
        (["watch", "--period", "0"], 2, "0.1"),
        (
            ["--url", "http://127.0.0.1:1/\u20ac", "queues"],
            1,
            "cannot reach the HTTP API at http://127.0.0.1:1/\u20ac: ",
        ),
        (["--url", f"http://{'x' * 64}.invalid", "queues"], 1, "cannot reach the HTTP API at http://xxx"),
        (["purge", ""], 2, "'': this is not a name"),
        (["stop", ""], 2, "'': this is not a name"),
        (["delete", "rate", "exchange", ""], 2, "'': this is not a name"),
        (["purge", "\udcff"], 2, "'\\udcff': this is not a name"),
    ],
)
def test_an_admin_command_that_fails_prints_the_reason(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["admin", *arguments]) == code
    assert words in " ".join(capsys.readouterr().err.split())


def test_if_the_url_leads_to_another_http_server_the_error_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert main(["admin", "--url", url, "queues"]) == 1
        thread.join()
    assert capsys.readouterr().err == f"qflow: {url} is not the HTTP API of a broker: 404 Not Found; check --url\n"


@contextmanager
def watching(broker: Broker, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "qflow_client.cli", "admin", "--url", broker.http_url, "watch", "--period", "0.1"]
    process = Forked[str]([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


@pytest.mark.program
def test_the_watch_command_reports_flow_states_until_ctrl_c(broker: Broker) -> None:
    broker.declare_queue("orders", arguments={"qpid.flow_stop_count": 1})
    with Producer(broker.url, routing_key="orders") as producer:
        for _ in range(2):
            producer.send(b"12345")
        broker.wait_until(lambda broker: broker.producers() and broker.producers()[0].flowed)
        name = broker.producers()[0].name
        with watching(broker) as process:
            assert process.stdout is not None
            lines = (line.split(" ", 1)[1].rstrip("\n") for line in process.stdout)
            assert next(lines) == "queue orders: ON at 2 messages, 10 bytes"
            assert next(lines) == f"producer {name}: blocked (flowed) by orders"
            broker.purge("orders")
            assert next(lines) == "queue orders: OFF at 0 messages, 0 bytes"
            assert next(lines).startswith(f"producer {name}: unblocked (unflowed), blocked for ")
            broker.flow(active=False)
            assert next(lines) == "operator: all producers are stopped"
            assert next(lines) == f"producer {name}: blocked (flowed) by operator"
            broker.flow(active=True)
            assert next(lines) == "operator: all producers are started"
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=20)
            assert (process.returncode, err) == (0, "")


@pytest.mark.program
def test_the_watch_command_ends_with_an_error_when_the_broker_stops() -> None:
    with ExitStack() as stack:
        broker = stack.enter_context(Broker(http_port=0))
        process = stack.enter_context(watching(broker, "--json"))
        url = broker.http_url
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["queues"] == []
        broker.declare_queue("orders")
        assert json.loads(process.stdout.readline())["queues"][0]["name"] == "orders"
        broker.__exit__(None, None, None)
        _, err = process.communicate(timeout=20)
        stack.pop_all()
    assert (process.returncode, err) == (1, f"qflow: {url}: the broker has stopped\n")


def test_the_watch_command_does_not_blame_the_broker_if_its_output_cannot_be_written(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("qflow_client.cli.admin.print_json", fail)
    assert run("watch", "--json") == (1, "", "qflow: the disk is full\n")


def test_the_watch_command_reports_how_often_a_queue_turned_ON_between_two_events() -> None:
    known: dict[str, dict[str, Any]] = {}
    queue = {"name": "q", "flowStopped": False, "flowStoppedCount": 5, "depth": 1, "bytes": 1}

    def lines(**changes: Any) -> list[str]:
        return list(_flow_lines({"queues": [queue | changes]}, known))

    assert lines() == []
    assert lines(flowStoppedCount=7) == ["queue q: OFF at 1 message, 1 byte, turned ON 2 times in between"]
    assert lines(flowStoppedCount=8, flowStopped=True) == ["queue q: ON at 1 message, 1 byte"]
    assert lines(flowStoppedCount=8) == ["queue q: OFF at 1 message, 1 byte"]
    assert lines(flowStoppedCount=10, flowStopped=True) == [
        "queue q: ON at 1 message, 1 byte, turned ON 2 times in between"
    ]
    assert list(_flow_lines({"gone": {"queues": ["q", "never seen"]}}, known)) == ["queue q: gone"]


def test_D3_policies_can_be_added_listed_and_deleted_with_commands(broker: Broker, run: Run) -> None:
    broker.declare_queue("orders")
    assert run("add", "policy", "narrow pattern=^orders$ policy=ring max_count=9 priority=2") == (0, "", "")
    assert broker.queue("orders").policies == ("narrow",)
    _, out, _ = run("policies")
    assert out.splitlines()[1].split("  ")[0] == "narrow"
    assert out.splitlines()[1].split()[1:] == ["queues", "'^orders$'", "2", "policy", "ring,", "maxCount", "9"]
    assert run("delete", "policy", "narrow") == (0, "", "")
    assert broker.queue("orders").policies == ()
    assert run("delete", "policy", "narrow")[0] == 1
    code, _, err = run("add", "policy", "narrow max_cont=9")
    assert (code, err) == (2, "qflow: a policy has no 'max_cont'; did you mean 'max_count'?\n")


def test_F6_rate_limits_can_be_set_listed_and_deleted_with_commands(broker: Broker, run: Run) -> None:
    assert run("set", "rate", "user", "guest", "--messages", "1500", "--burst", "2") == (0, "", "")
    (limit,) = broker.rate_limits
    assert (limit.apply_to, limit.name, limit.messages, limit.bytes, limit.burst) == ("user", "guest", 1500, None, 2)
    assert run("rates")[1].splitlines()[1].split() == ["user", "guest", "1,500", "-", "2.0", "s"]
    assert run("delete", "rate", "user", "guest") == (0, "", "")
    assert broker.rate_limits == ()
    assert run("delete", "rate", "user", "guest")[0] == 1
    code, _, err = run("set", "rate", "host", "x", "--messages", "1")
    assert (code, err) == (2, "qflow: scope: Input should be 'exchange', 'queue' or 'user'\n")


def test_a_command_succeeds_if_standard_output_is_closed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert run("queues")[0] == 0


def test_names_chosen_by_clients_are_printed_without_control_characters(broker: Broker, run: Run) -> None:
    name = "\x1b]0;title\x07\x9b31m\u202e"
    broker.declare_queue(name, arguments={"qpid.flow_stop_count": 5})
    for arguments in (["queues"], ["set", "queue", name, "--flow-stop-count", "7"], ["purge", "\x1b[31mmissing"]):
        code, out, err = run(*arguments)
        assert code == (1 if arguments[0] == "purge" else 0)
        assert (out + err).replace("\n", "").isprintable(), (arguments, out, err)
    assert "\\x1b]0;title\\x07\\x9b31m\\u202e" in run("queues")[1]
