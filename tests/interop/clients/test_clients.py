"""The broker here and clients of other hands: each runs a program of its own, which does what `script` tells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from qflow_client.broker import Broker, ChannelSnapshot
from tests.integration.producer.tools import Wire, eventually
from tests.interop import matrix
from tests.interop.clients.script import FIRST, GO, ORDERS, PATIENCE, SECOND, TOLD, body
from tests.interop.toolchains import built, tool

# The first time, what a program is written with may have to be fetched and built.
pytestmark = pytest.mark.timeout(400)

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def python(module: str) -> Callable[[], list[str]]:
    return lambda: [sys.executable, "-m", f"tests.interop.clients.{module}"]


def node() -> list[str]:
    npm, runs = tool("npm", "npm"), tool("node", "nodejs")
    folder = built(HERE / "node", [[npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]])
    return [runs, str(folder / "client.js")]


def go() -> list[str]:
    # What is there has to do: it fetches no other release of Go.
    environment = {"GOFLAGS": "-mod=readonly -buildvcs=false", "GOTOOLCHAIN": "local", "CGO_ENABLED": "0"}
    folder = built(HERE / "go", [[tool("go", "golang-go"), "build", "-o", "client", "."]], environment)
    return [str(folder / "client")]


def java() -> list[str]:
    runs, javac, maven = (
        tool("java", "default-jdk-headless"),
        tool("javac", "default-jdk-headless"),
        tool("mvn", "maven"),
    )
    folder = built(
        HERE / "java",
        [
            [maven, "-B", "-q", "dependency:copy-dependencies", "-DincludeScope=runtime", "-DoutputDirectory=jars"],
            [javac, "--release", "11", "-cp", "jars/*", "-d", ".", "Client.java"],
        ],
    )
    return [runs, "-cp", os.pathsep.join([str(folder), str(folder / "jars" / "*")]), "Client"]


@dataclass(frozen=True)
class Expected:
    """A client, and what it makes of what a broker says."""

    name: str
    #: Builds its program if need be, and returns how it is run.
    command: Callable[[], list[str]]
    #: Whether it answers `Channel.Flow`.
    answers: bool
    #: What it tells when it has been stopped: "went on" publishing, is "held", or has "ended".
    stopped: str = "went on"
    #: What it tells its user of `Channel.Flow`.
    flow: list[bool] | None = None
    #: What comes of a request on the channel that was stopped.
    request: str = "ok"


EXPECTED = [
    Expected("pika", python("with_pika"), answers=False),
    # It takes the frame for the reply to what it asks next.
    Expected("aio-pika", python("with_aio_pika"), answers=False, request="InvalidFrameError"),
    Expected("py-amqp", python("with_py_amqp"), answers=True, flow=[True]),
    Expected("kombu", python("with_kombu"), answers=True),
    Expected("AMQPStorm", python("with_amqpstorm"), answers=True),
    # It takes the frame for a reply that it has not asked for, and closes the connection.
    Expected("amqplib", node, answers=False, stopped="ended", request=""),
    Expected("amqp091-go", go, answers=True, flow=[False, True]),
    Expected("RabbitMQ Java client", java, answers=True, stopped="held"),
]


class Program:
    """A program that runs."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, broker: Broker) -> None:
        self._process = process
        self._folder = folder
        self._broker = broker

    def _wait_told(self) -> str:
        """What it tells next; or that it has ended."""
        eventually(
            lambda: self._process.poll() is not None or self._broker.queue(TOLD).ready, "a word of it", timeout=PATIENCE
        )
        told = self._broker.get(TOLD)
        return "ended" if told is None else told.body.decode()

    def expect(self, words: str) -> None:
        """Wait for what it tells next, which is to be this."""
        told = self._wait_told()
        assert told == words, f"it told {told!r}, not {words!r}\n{self._errors()}"

    def go_on(self) -> None:
        self._broker.publish(b"", GO)

    def report(self) -> Any:
        """Its one JSON document, when it has ended well."""
        assert self._process.wait(PATIENCE) == 0, self._errors()
        return json.loads((self._folder / "stdout").read_bytes())

    def _errors(self) -> str:
        return (self._folder / "stderr").read_text(errors="replace")


@contextmanager
def running(command: list[str], broker: Broker, folder: Path) -> Iterator[Program]:
    with (
        (folder / "stdout").open("wb") as stdout,
        (folder / "stderr").open("wb") as stderr,
        subprocess.Popen(
            [*command, broker.url], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
        ) as process,
    ):
        try:
            yield Program(process, folder, broker)
        finally:
            process.kill()


def publisher(broker: Broker) -> ChannelSnapshot:
    """The program's first channel."""
    (found,) = (
        each for each in broker.channels() if each.confirms and ORDERS in {to.routing_key for to in each.targets}
    )
    return found


@pytest.mark.parametrize("expected", EXPECTED, ids=lambda each: each.name)
def test_a_client_of_another_hand_is_confirmed_served_blocked_and_stopped(
    expected: Expected,
    installed: Callable[..., list[str]],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    command = installed(expected.command)
    wire = Wire()
    with Broker(trace=wire) as broker:
        for queue in GO, TOLD:
            broker.declare_queue(queue)
        with running(command, broker, tmp_path) as program:
            program.expect("published")
            channel = publisher(broker)
            assert (channel.published, channel.unconfirmed, channel.nacked) == (FIRST, 0, 0)
            assert broker.queue(ORDERS).acked == FIRST
            # A notice, which keeps nobody from anything here.
            broker.block("low on memory")
            program.go_on()
            program.expect("blocked")
            broker.unblock()
            program.go_on()
            program.expect("unblocked")

            broker.flow(False, channel=channel.name)
            program.go_on()
            program.expect(expected.stopped)
            ended = expected.stopped == "ended"
            if not ended:
                channel = publisher(broker)
                assert channel.flowed
                assert channel.flow_ok == expected.answers
                assert channel.published == FIRST + (SECOND if expected.stopped == "went on" else 0)
                broker.flow(True, channel=channel.name)
                program.go_on()
            report = program.report()
        count = FIRST if ended else FIRST + SECOND
        orders = broker.queue(ORDERS)
        assert (orders.published, orders.acked, orders.depth) == (count, count, 0)

    assert report["version"]
    assert report["confirmed"] == count
    assert report["received"] == [[body(number).decode(), str(number)] for number in range(count)]
    assert report["blocked"] == [True, False]
    assert report["flow"] == expected.flow
    assert report["request"] == expected.request
    # What the wire says of it.
    flows = wire.where("out", "Channel.Flow")
    assert len(flows) == (1 if ended else 2)
    assert wire.count("in", "Channel.FlowOk") == (len(flows) if expected.answers else 0)
    published = [
        at for at in wire.where("in", "Basic.Publish") if wire.frames[at][2] == channel.number and flows[0] < at
    ]
    if expected.stopped == "went on":
        assert len(published) == SECOND
        assert published[-1] < flows[1]
    elif expected.stopped == "held":
        assert len(published) == SECOND
        assert flows[1] < published[0]
    else:
        assert published == []
        assert wire.count("in", "Connection.Close") == 0
        assert report["lost"], "it was not told that the connection is lost"
    shown = {name: report[name] for name in ("version", "blocked", "flow", "request")}
    record_property(
        matrix.CLIENT, {"client": expected.name, "stopped": expected.stopped, "answers": expected.answers, **shown}
    )
