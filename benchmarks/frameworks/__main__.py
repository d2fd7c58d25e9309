"""Compares framework applications with and without the drop-ins: during an alarm, and while connections are cut.

    python -m benchmarks.frameworks --cuts 100 --json
    python -m benchmarks.frameworks --cuts 5 --applications taskiq dramatiq

Each application publishes to one RabbitMQ: once unchanged, and once with the change that its page in the documentation
shows. During the memory alarm it publishes one message, and after the alarm another one. Then its connections are cut
repeatedly while its senders publish numbered messages. Finally the queue is read.

The exit code is 1 if a changed application hangs, loses a message that was published without an error, or sends the
first copies of a sender's messages out of order. With aio-pika and with pipelined pika, which have the option
`republish`, each further copy must be marked. With aio-pika, a publish that raises an error is also a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import pika

from benchmarks.frameworks.application import APPLICATIONS
from qflow_client.message import REPUBLISHED
from qflow_client.testing.proxy import FaultProxy
from qflow_client.testing.rabbitmq import RabbitMQNode

__all__ = ["Result", "faults_of", "main", "run"]

# Applications whose drop-in publishes again by itself, so that no publish raises.
_REPUBLISHING: Final = ("taskiq", "faststream")
# Applications in which every further copy of a message is marked.
_MARKING: Final = (*_REPUBLISHING, "pika-pipelined")
_WORKER: Final = (
    *("celery", "-A", "benchmarks.frameworks.worker", "worker", "-P", "gevent"),
    *("--without-gossip", "--without-mingle"),
)
# Seconds after which a publish during an alarm counts as hanging.
_HANGS: Final = 10.0
# Maximum seconds that a publish of a changed application waits during an alarm.
_WAIT: Final = 3.0
# Maximum seconds that a publish waits while connections are cut.
_LONG_WAIT: Final = 30.0
# Maximum seconds to wait for an answer of an application.
_PATIENCE: Final = 60.0
# Bytes after which a connection is cut, so that messages are on their way.
_CUT_AFTER: Final = 12_000
_TOKEN: Final = re.compile(rb"(\d+)-(\d+)")


@dataclass
class Result:
    """The results of one application.

    Attributes:
        kind: "original" or "changed".
        alarm: result of the first publish during the alarm; "hangs" after `_HANGS` seconds. RabbitMQ blocks the
            connection only after this publish.
        alarm_next: result of the second publish during the alarm.
        after: result of a publish after the alarm.
        cuts: number of times that all connections were cut.
        published: number of messages whose publish ended without an error.
        errors: for each error, the number of publishes that failed with it.
        longest: seconds of the longest publish.
        missing: number of published messages that are not in the queue.
        copies: number of second and further copies in the queue.
        unmarked: number of messages with more than one copy without a mark.
        disordered: number of first copies that came after a later message of the same sender.
        stuck: number of senders that did not end.
    """

    application: str
    kind: str
    alarm: str = ""
    alarm_seconds: float = 0.0
    alarm_next: str = ""
    after: str = ""
    cuts: int = 0
    published: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    longest: float = 0.0
    missing: int = 0
    copies: int = 0
    unmarked: int = 0
    disordered: int = 0
    stuck: int = 0


class _Application:
    """An application in a child process."""

    def __init__(self, name: str, kind: str, url: str, wait: float) -> None:
        query = ""
        if name in _REPUBLISHING:
            # aio-pika waits for this number of seconds before it reconnects.
            query = "?reconnect_interval=0.1" + ("&on_disconnect=republish" if kind == "changed" else "")
        environment = {**os.environ, "QFLOW_MAX_PRODUCER_FLOW_CONTROL_WAIT": str(wait)}
        command = ["benchmarks.frameworks.application", name, kind, url + query]
        if name == "celery-gevent":
            command = [*_WORKER]
            environment["CELERY_BROKER_URL"] = url.replace("amqp", "qflow", 1) if kind == "changed" else url
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.expect()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def expect(self, timeout: float = _PATIENCE) -> Any:
        """Return the next answer, or ``None`` if no answer comes in time."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            return None
        return json.loads(self._process.stdout.readline() or "null")

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def _outcome(answer: Any) -> tuple[str, float]:
    return ("hangs", _HANGS) if answer is None else (answer["outcome"], round(answer["seconds"], 1))


def _alarm(result: Result, node: RabbitMQNode) -> None:
    application = _Application(result.application, result.kind, node.url, _WAIT)
    try:
        application.tell("publish")
        assert application.expect()["outcome"] == "published"
        node.raise_memory_alarm()
        try:
            application.tell("publish")
            result.alarm, result.alarm_seconds = _outcome(application.expect(_HANGS))
            if result.alarm != "hangs":
                application.tell("publish")
                result.alarm_next, _ = _outcome(application.expect(_HANGS))
        finally:
            node.clear_memory_alarm()
        if "hangs" in (result.alarm, result.alarm_next):
            application.expect()
        application.tell("publish")
        result.after, _ = _outcome(application.expect(_HANGS))
    finally:
        application.end()


def _cut(result: Result, node: RabbitMQNode, cuts: int) -> None:
    with FaultProxy(node.url) as proxy:
        application = _Application(result.application, result.kind, proxy.url, _LONG_WAIT)
        try:
            application.tell("stream")
            application.expect()
            for _ in range(cuts):
                proxy.wait_until(_carries, _PATIENCE)
                proxy.cut()
                result.cuts += 1
            proxy.wait_until(_carries, _PATIENCE)
            application.tell("stop")
            report = application.expect()
        finally:
            application.end()
    result.errors, result.stuck, result.longest = report["errors"], report["stuck"], report["longest"]
    result.published = sum(report["published"])
    _read(result, node.url, report["published"])


def _carries(proxy: FaultProxy) -> bool:
    return any(each.bytes_to_broker > _CUT_AFTER for each in proxy.connections)


def _read(result: Result, url: str, published: Sequence[int]) -> None:
    """Compare the queue with the published messages."""
    first: dict[int, int] = {}
    copies: Counter[tuple[int, int]] = Counter()
    # The broker may handle the last bytes of a cut connection after the marked copies from the next connection.
    unmarked: Counter[tuple[int, int]] = Counter()
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        for _method, properties, body in channel.consume(
            APPLICATIONS[result.application][1], True, inactivity_timeout=2
        ):
            if body is None:
                break
            found = _TOKEN.search(body)
            if found is None:
                continue
            sender, number = map(int, found.groups())
            copies[sender, number] += 1
            unmarked[sender, number] += REPUBLISHED not in (getattr(properties, "headers", None) or {})
            if copies[sender, number] > 1:
                continue
            result.disordered += number < first.get(sender, 0)
            first[sender] = max(number, first.get(sender, 0))
    result.missing = sum(
        (sender, number) not in copies for sender, count in enumerate(published) for number in range(count)
    )
    result.copies = copies.total() - len(copies)
    result.unmarked = sum(count > 1 for count in unmarked.values())


def run(application: str, kind: str, cuts: int, node: RabbitMQNode) -> Result:
    """Run one application, original or changed. The queue of the application is empty afterwards."""
    result = Result(application, kind)
    _alarm(result, node)
    _cut(result, node, cuts)
    return result


def faults_of(result: Result) -> list[str]:
    """Return the faults of a changed application, or an empty list for an unchanged application."""
    if result.kind == "original":
        return []
    found = {
        "hangs under the alarm": "hangs" in (result.alarm, result.alarm_next) or result.alarm_seconds > _WAIT + 2,
        "does not raise under the alarm": "published" in (result.alarm, result.alarm_next),
        "does not go on after the alarm": result.after != "published",
        f"has {result.stuck} senders that hang": result.stuck > 0,
        f"misses {result.missing} messages": result.missing > 0,
        f"has {result.disordered} first copies out of order": result.disordered > 0,
    }
    if result.application in _REPUBLISHING:
        found[f"raises {result.errors} while connections are cut"] = bool(result.errors)
    if result.application in _MARKING:
        found[f"has {result.unmarked} messages with two copies without a mark"] = result.unmarked > 0
    return [f"{result.application}: {what}" for what, is_so in found.items() if is_so]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the applications, print the results, and return 1 if a changed application has a fault."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cuts", type=int, default=100, help="how often the connections are cut (%(default)s)")
    parser.add_argument("--applications", nargs="*", default=[*APPLICATIONS], choices=[*APPLICATIONS])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    results, faults = [], []
    with RabbitMQNode() as node:
        for application in options.applications:
            for kind in ("original", "changed"):
                result = run(application, kind, options.cuts, node)
                results.append(result)
                faults += faults_of(result)
                print(result, file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        json.dump({"results": [asdict(each) for each in results], "faults": faults}, sys.stdout, indent=2)
        print()
    else:
        print("\n".join(faults) if faults else "no changed application hangs, loses, or reorders messages")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
