from __future__ import annotations

import io
import signal
import subprocess
import sys

import pika
import pytest
from pika.exceptions import ProbableAuthenticationError
from rich.console import Console

from qflow_client import Producer
from qflow_client.broker import Broker
from qflow_client.cli import main
from qflow_client.cli.broker import queue_table


def start(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "qflow_client.cli", "broker", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_runs_until_it_is_told_to_end(number: signal.Signals) -> None:
    process, url = start("--queue", "orders")
    with Producer(url, routing_key="orders") as producer:
        producer.send(b"one").result(10)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", f"{number.name}: the broker ends\n")


def test_its_settings_are_options() -> None:
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
            producer.flush(10)
        with pytest.raises(ProbableAuthenticationError):
            pika.BlockingConnection(pika.URLParameters(url.replace("s3cret", "wrong")))
    finally:
        process.terminate()
        process.communicate(timeout=20)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "70000"], "port must be from 0 to 65535, not 70000"),
        (["--port", "0", "--flow-stop-count", "5"], "for which queue? give --queue NAME"),
        (
            ["--port", "0", "--queue", "q", "--flow-stop-count", "5", "--flow-resume-count", "6"],
            "qpid.flow_stop_count=5 and qpid.flow_resume_count=6",
        ),
        (["--port", "0", "--user", "ann"], "a user is given as NAME:PASSWORD"),
    ],
)
def test_a_wrong_setting_is_a_usage_error(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["broker", *arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_port_in_use_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Broker() as other:
        assert main(["broker", "--port", str(other.port)]) == 1
        assert capsys.readouterr().err.startswith(f"qflow: cannot listen on 127.0.0.1:{other.port}: ")


def test_the_table_shows_depths_and_flow_states() -> None:
    with Broker() as broker:
        assert "no queue yet" in drawn(broker)
        broker.declare_queue("orders", arguments={"qpid.flow_stop_count": 1})
        broker.publish(b"12345", "orders")
        assert "OFF" in drawn(broker)
        broker.publish(b"12345", "orders")
        assert drawn(broker).split("\n")[1].split() == ["orders", "2", "2", "0", "10", "2", "0", "ON", "1"]


def drawn(broker: Broker) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    with console.capture() as capture:
        console.print(queue_table(broker.queues(), 0, 0))
    return capture.get()
