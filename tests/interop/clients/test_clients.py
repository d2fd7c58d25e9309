"""The broker here with clients of other projects. Each client runs its own program, which follows `script`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qflow_client.broker import Broker, ChannelSnapshot
from tests.integration.parity import until_release
from tests.integration.producer.tools import Wire, eventually
from tests.interop import matrix
from tests.interop.clients.script import FIRST, GO, ORDERS, PATIENCE, SECOND, TOLD, body
from tests.interop.toolchains import built, tool

# The first run may have to download and build the client's program.
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
    # Use the installed release of Go. Do not download another one.
    environment = {"GOFLAGS": "-mod=readonly -buildvcs=false", "GOTOOLCHAIN": "local", "CGO_ENABLED": "0"}
    folder = built(HERE / "go", [[tool("go", "golang-go"), "build", "-o", "client", "."]], environment)
    return [str(folder / "client")]


def java(program: str = "Client") -> list[str]:
    runs, javac, maven = (
        tool("java", "default-jdk-headless"),
        tool("javac", "default-jdk-headless"),
        tool("mvn", "maven"),
    )
    folder = built(
        HERE / "java",
        [
            [maven, "-B", "-q", "dependency:copy-dependencies", "-DincludeScope=runtime", "-DoutputDirectory=jars"],
            [javac, "--release", "11", "-cp", "jars/*", "-d", ".", "Client.java", "Features.java"],
        ],
    )
    return [runs, "-cp", os.pathsep.join([str(folder), str(folder / "jars" / "*")]), program]


@dataclass(frozen=True)
class Behaviour:
    """The expected reactions of a release of a client."""

    #: Whether the client answers `Channel.Flow`.
    answers: bool
    #: What the program reports after a stop: it "went on" publishing, was "held", or has "ended".
    stopped: str = "went on"
    #: The values of `Channel.Flow` that the client passes to its user. None if it passes none.
    flow: list[bool] | None = None
    #: The result of a request on the channel that was stopped.
    request: str = "ok"


@dataclass(frozen=True)
class Expected:
    """A client and its expected behaviour."""

    name: str
    #: A function that builds the program if necessary, and returns the command that runs it.
    command: Callable[[], list[str]]
    #: The behaviour of the release with which the program is built. None if any release may be installed. Then the test
    #: records the behaviour, and checks only the duties of the broker.
    pinned: Behaviour | None = None
    #: The newest releases of the client's packages that are known to keep the connection after a stop.
    known: Mapping[str, str] = field(default_factory=dict)


EXPECTED = [
    Expected("pika", python("with_pika"), known={"pika": "1.4.4"}),
    Expected("aio-pika", python("with_aio_pika"), known={"aio-pika": "10.2.1", "aiormq": "7.2.4"}),
    Expected("py-amqp", python("with_py_amqp"), known={"amqp": "5.4.2"}),
    Expected("kombu", python("with_kombu"), known={"amqp": "5.4.2", "kombu": "5.7.0"}),
    Expected("AMQPStorm", python("with_amqpstorm"), known={"AMQPStorm": "3.1.4"}),
    # amqplib interprets the frame as an unexpected reply, and closes the connection.
    Expected("amqplib", node, Behaviour(answers=False, stopped="ended", request="")),
    Expected("amqp091-go", go, Behaviour(answers=True, flow=[False, True])),
    Expected("RabbitMQ Java client", java, Behaviour(answers=True, stopped="held")),
]
# Seconds without a report after which the test starts a client again, because the client may be held.
SILENCE = 20.0


class Program:
    """A running program of a client."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, broker: Broker) -> None:
        self._process = process
        self._folder = folder
        self._broker = broker

    def _has_told(self) -> bool:
        return self._process.poll() is not None or bool(self._broker.queue(TOLD).ready)

    def told(self) -> str:
        """Wait for the next report of the program. Return "ended" if the program ends."""
        eventually(self._has_told, "a word of it", timeout=PATIENCE)
        told = self._broker.get(TOLD)
        return "ended" if told is None else told.body.decode()

    def told_soon(self) -> str | None:
        """Do as `told`, but return None if the program reports nothing for `SILENCE` seconds."""
        end = time.monotonic() + SILENCE
        while not self._has_told():
            if time.monotonic() > end:
                return None
            time.sleep(0.01)
        return self.told()

    def expect(self, words: str) -> None:
        """Wait for the next report, and check it."""
        told = self.told()
        assert told == words, f"it told {told!r}, not {words!r}\n{self.errors()}"

    def go_on(self) -> None:
        self._broker.publish(b"", GO)

    def report(self) -> Any:
        """Wait until the program has ended with exit code 0, and return its JSON document."""
        assert self._process.wait(PATIENCE) == 0, self.errors()
        return json.loads((self._folder / "stdout").read_bytes())

    def errors(self) -> str:
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
    """Return the program's first channel."""
    (found,) = (
        each for each in broker.channels() if each.confirms and ORDERS in {to.routing_key for to in each.targets}
    )
    return found


def stop_pinned(program: Program, broker: Broker, expected: Behaviour) -> None:
    """Stop a client, check that it behaves as expected, and start it again."""
    broker.flow(False, channel=publisher(broker).name)
    program.go_on()
    program.expect(expected.stopped)
    if expected.stopped == "ended":
        return
    if expected.answers:
        eventually(lambda: publisher(broker).flow_ok, "its answer", timeout=PATIENCE)
    channel = publisher(broker)
    assert channel.flowed
    assert channel.flow_ok == expected.answers
    assert channel.published == FIRST + (SECOND if expected.stopped == "went on" else 0)
    broker.flow(True, channel=channel.name)
    program.go_on()


def stop_any(program: Program, broker: Broker) -> None:
    """Stop a client whose behaviour is not known, and start it again."""
    name = publisher(broker).name
    broker.flow(False, channel=name)
    program.go_on()
    told = program.told_soon()
    if told != "ended":
        # A client that has lost its connection has no channel.
        with suppress(LookupError):
            broker.flow(True, channel=name)
    if told is None:
        told = program.told()
    assert told in ("went on", "ended"), told
    program.go_on()


@pytest.mark.parametrize("expected", EXPECTED, ids=lambda each: each.name)
def test_a_client_of_another_project_gets_confirms_and_deliveries_and_reacts_to_a_stop_as_expected(
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
            # The broker only sends the notice. It still reads from the connection.
            broker.block("low on memory")
            program.go_on()
            program.expect("blocked")
            broker.unblock()
            program.go_on()
            program.expect("unblocked")
            if expected.pinned is None:
                stop_any(program, broker)
            else:
                stop_pinned(program, broker, expected.pinned)
            report = program.report()
        ended = bool(report.get("lost"))
        orders = broker.queue(ORDERS)
        # Get these frames before the broker stops, because it then also sends a close.
        closed = [frame for frame in wire.frames if frame[0] == "out" and frame[3].endswith(".Close")]

    # The messages are confirmed and in order.
    assert report["version"]
    assert report["received"] == [[body(number).decode(), str(number)] for number in range(len(report["received"]))]
    if not ended:
        count = FIRST + SECOND
        assert (orders.published, orders.acked, orders.depth) == (count, count, 0)
        assert (report["confirmed"], len(report["received"])) == (count, count)
    else:
        assert FIRST <= len(report["received"]) <= orders.published
        assert FIRST <= report["confirmed"] <= orders.published
    assert closed == [], f"the broker closed it: {report}"
    flows = wire.where("out", "Channel.Flow")
    answers = wire.count("in", "Channel.FlowOk")
    assert answers <= len(flows) <= 2
    published = [
        at for at in wire.where("in", "Basic.Publish") if wire.frames[at][2] == channel.number and flows[0] < at
    ]
    if ended:
        stopped = "ended"
    else:
        assert len(flows) == 2
        assert len(published) == SECOND
        stopped = "held" if flows[1] < published[0] else "went on"
    if expected.pinned is not None:
        assert stopped == expected.pinned.stopped
        assert report["blocked"] == [True, False]
        assert report["flow"] == expected.pinned.flow
        assert report["request"] == expected.pinned.request
        assert answers == (len(flows) if expected.pinned.answers else 0)
        if ended:
            assert published == []
            assert report["confirmed"] == orders.published == orders.acked == FIRST
            assert wire.count("in", "Connection.Close") == 0
        elif stopped == "went on":
            assert published[-1] < flows[1]
    shown = {name: report[name] for name in ("version", "blocked", "flow", "request")}
    record_property(
        matrix.CLIENT, {"client": expected.name, "stopped": stopped, "answers": answers == len(flows), **shown}
    )
    if expected.pinned is None:
        with until_release(**expected.known):
            assert not ended, f"{report['lost']} when it was stopped"


@pytest.mark.rabbitmq
@pytest.mark.parametrize("is_ours", [True, False], ids=["qflow", "RabbitMQ"])
def test_the_java_client_logs_in_with_amqplain_and_uses_shared_prefetch_direct_reply_to_and_dead_letters(
    is_ours: bool, installed: Callable[..., list[str]], request: pytest.FixtureRequest
) -> None:
    command = installed(partial(java, "Features"))
    with Broker() if is_ours else nullcontext(request.getfixturevalue("rabbitmq")) as broker:
        run = subprocess.run([*command, broker.url], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert (sum(found["shares"]), min(found["shares"]) >= 20) == (99, True), found["shares"]
    assert found["answer"] == "7 42"
    assert found["death"] == {"entries": 1, "reason": "rejected", "count": 3, "class": "Long"}
