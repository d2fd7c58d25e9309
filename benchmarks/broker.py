"""Compares this broker with RabbitMQ in one run: rates, latency, connections, policies.

The clients are plain sockets. Their frames are created before the clock starts, and are the same for both brokers. So
the result measures only the broker. Messages are transient unless stated otherwise. Persistent messages are on disk
when they are confirmed, on both brokers.
"""

from __future__ import annotations

import argparse
import json
import resource
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from statistics import median
from struct import Struct
from tempfile import TemporaryDirectory
from typing import Any

from pamqp import commands

from benchmarks.embedded import DEFAULT_URL
from benchmarks.flow import percentile, resident
from benchmarks.peers.base import Job
from benchmarks.peers.plain import AckWindow, PlainSocket, publish_frames
from benchmarks.report import aligned, broker_name
from benchmarks.wire import Wire, fresh_queue

__all__ = ["BARS", "POLICIES", "connections", "consumed", "latency", "main", "policies", "published"]

BODY = b"x" * 100
WINDOW = 1000
OURS, RABBITMQ = "ours", "rabbitmq"

#: Requirements of ``--check``: the name of a value, the description of the condition, and the condition.
BARS: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    ("published, of RabbitMQ's", ">= 3.5", lambda value: value >= 3.5),
    ("published and consumed, of RabbitMQ's", ">= 1.5", lambda value: value >= 1.5),
    ("published, persistent, of RabbitMQ's", ">= 2.5", lambda value: value >= 2.5),
    ("p99 ms of a confirm at half load", "<= 1", lambda value: value <= 1),
    ("KiB of an idle connection", "<= 64", lambda value: value <= 64),
    ("connections held", ">= 2000", lambda value: value >= 2000),
)

#: Arguments of queues that are never full, so that only the cost of the checks is measured.
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "flow, by count": {"qpid.flow_stop_count": 10**9, "qpid.flow_resume_count": 10**9},
    "flow, by count and bytes": {
        "qpid.flow_stop_count": 10**9,
        "qpid.flow_resume_count": 10**9,
        "qpid.flow_stop_size": 10**12,
        "qpid.flow_resume_size": 10**12,
    },
    "reject": {"x-qflow-policy": "reject", "qpid.max_count": 10**9},
    "wait": {"x-qflow-policy": "wait", "qpid.max_count": 10**9},
    "ring": {"x-qflow-policy": "ring", "qpid.max_count": 10**9},
    "x-max-length": {"x-max-length": 10**9},
    "x-message-ttl": {"x-message-ttl": 3_600_000},
}

_ACK = Struct(">BHIHHQBB")
_READ = 1 << 17
_PATIENCE = 60.0


@contextmanager
def broker_process(*options: str) -> Iterator[tuple[str, int]]:
    """Run a broker in its own process. Yield its URL and its process id."""
    command = [sys.executable, "-m", "qflow_client.cli", "broker", "--port", "0", "--quiet", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.terminate()
            process.wait(10)


def published(url: str, count: int, arguments: Mapping[str, Any] | None = None, *, persistent: bool = False) -> float:
    """Return confirmed messages per second with a full window. Persistent messages go to a durable queue."""
    with Wire(url) as wire, fresh_queue(wire, arguments, durable=persistent) as queue:
        job = Job(url, queue, BODY, count, WINDOW, confirmed=True, persistent=persistent)
        rate = count / PlainSocket().run(job).seconds
        if wire.depth(queue) != count:
            raise RuntimeError(f"queue {queue!r} has {wire.depth(queue)} messages after {count} were published")
        return rate


def consumed(url: str, count: int) -> float:
    """Publish with confirms, and consume and ack each message on another connection. Return messages per second.

    The time runs from the first publish until the broker has answered the close of the channel after the last ack.
    """
    with Wire(url) as wire, fresh_queue(wire) as queue, Wire(url) as publisher, Wire(url) as consumer:
        messages, length = publish_frames(queue, BODY, count, publisher.frame_max, persistent=False)
        publisher.call(commands.Confirm.Select())
        consumer.call(commands.Basic.Qos(prefetch_count=WINDOW))
        consumer.call(commands.Basic.Consume(queue=queue, consumer_tag="c"))
        # All deliveries have the same length: the length of a publish without its reserved and mandatory bytes, plus a
        # tag.
        method = 4 + 2 + 8 + 1 + 1 + 1 + len(queue)
        delivery = length - (4 + 2 + 1 + 1 + len(queue) + 1) + method
        acks = b"".join(_ACK.pack(1, 1, 13, 60, 80, tag, 0, 0xCE) for tag in range(1, count + 1))
        return count / _pump(publisher, consumer, memoryview(messages), length, delivery, memoryview(acks), count)


def _pump(
    publisher: Wire,
    consumer: Wire,
    messages: memoryview,
    length: int,
    delivery: int,
    acks: memoryview,
    count: int,
) -> float:
    """Publish and ack as fast as both sockets allow; return the seconds."""
    out, back = publisher.socket, consumer.socket
    ack = len(acks) // count
    window = AckWindow()
    poll = select.poll()
    written = received = acked = 0
    for sock in (out, back):
        sock.setblocking(False)
    began = time.perf_counter()
    while True:
        allowed = min(window.confirmed + WINDOW, count) * length
        written += _send(out, messages[written:allowed])
        acked += _send(back, acks[acked : received // delivery * ack])
        if acked == len(acks) and window.confirmed == count:
            break
        poll.register(out, select.POLLIN | (select.POLLOUT if written < allowed else 0))
        poll.register(back, select.POLLIN | (select.POLLOUT if acked < received // delivery * ack else 0))
        if not poll.poll(_PATIENCE * 1000):
            raise TimeoutError(f"no byte for {_PATIENCE} s; {received // delivery} of {count} messages were delivered")
        window.feed(_receive(out))
        received += len(_receive(back))
    for sock in (out, back):
        sock.settimeout(_PATIENCE)
    if received != count * delivery:
        raise RuntimeError(f"the deliveries have {received} bytes, not {count} messages of {delivery} bytes")
    # When the broker answers this request, it has read all acks.
    consumer.call(commands.Channel.Close(200, "done", 0, 0))
    return time.perf_counter() - began


def _send(sock: Any, data: memoryview) -> int:
    try:
        return int(sock.send(data)) if data else 0
    except BlockingIOError:
        return 0


def _receive(sock: Any) -> bytes:
    try:
        data: bytes = sock.recv(_READ)
    except BlockingIOError:
        return b""
    if not data:
        raise ConnectionError("the broker closed the connection")
    return data


def latency(url: str, rate: float, seconds: float) -> list[float]:
    """Return the milliseconds from each message's scheduled time to its confirm, at this rate of messages per second.

    The time counts from the schedule and not from the write, so that a blocked broker cannot hide its delay.
    """
    count = int(rate * seconds)
    with Wire(url) as wire, fresh_queue(wire) as queue, Wire(url) as publisher:
        messages, length = publish_frames(queue, BODY, count, publisher.frame_max, persistent=False)
        publisher.call(commands.Confirm.Select())
        sock, view, window = publisher.socket, memoryview(messages), AckWindow()
        sock.setblocking(False)
        # Number of the last message of a batch, and its scheduled time.
        due: deque[tuple[int, float]] = deque()
        found = []
        written = made = 0
        began = time.perf_counter()
        while window.confirmed < count:
            now = time.perf_counter()
            ready = min(count, int((now - began) * rate))
            if ready > made:
                made = ready
                due.append((made, began + made / rate))
            written += _send(sock, view[written : made * length])
            # Wait half a millisecond, or until bytes arrive.
            if select.select([sock], [], [], 0.0005)[0]:
                window.feed(_receive(sock))
            now = time.perf_counter()
            while due and due[0][0] <= window.confirmed:
                found.append((now - due.popleft()[1]) * 1000)
            if now - began > seconds + _PATIENCE:
                raise TimeoutError(f"{window.confirmed} of {count} messages were confirmed in {now - began:.0f} s")
        sock.settimeout(_PATIENCE)
    return found


def connections(count: int) -> dict[str, float]:
    """Open connections with one channel each to a new broker. At the end, use each connection."""
    with broker_process() as (url, pid), ExitStack() as stack:
        first = stack.enter_context(Wire(url))
        queue = stack.enter_context(fresh_queue(first))
        before = resident(pid)
        began = time.perf_counter()
        wires = [stack.enter_context(Wire(url)) for _ in range(count)]
        opened = time.perf_counter() - began
        each = (resident(pid) - before) / count / 1024
        held = 0
        for wire in wires:
            wire.call(commands.Confirm.Select())
            held += wire.depth(queue) == 0
        return {"KiB of an idle connection": each, "connections held": held, "opened per second": count / opened}


def policies(url: str, count: int, rounds: int) -> dict[str, float]:
    """For each policy, return its rate divided by the rate without a policy, as the median of the rounds."""
    rates: dict[str, list[float]] = {name: [] for name in POLICIES}
    for _ in range(rounds):
        for name, arguments in POLICIES.items():
            rates[name].append(published(url, count, arguments))
    plain = rates["none"]
    return {
        name: median(mine / other for mine, other in zip(own, plain, strict=True))
        for name, own in rates.items()
        if own is not plain
    }


def compare(
    runs: Mapping[str, Callable[[str, int], float]],
    url: str,
    ours: str,
    count: int,
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure both brokers alternately, round by round.

    Args:
        runs: functions that take a URL and a number of messages, and return a rate. The keys are names.
        rounds: number of rounds after the warm-up round.

    Returns:
        Medians of the rounds: for each function, the rate of each broker, and this broker's rate divided by RabbitMQ's.
    """
    found: dict[str, Any] = {}
    for name, run in runs.items():
        rates: dict[str, list[float]] = {RABBITMQ: [], OURS: []}
        for at in range(rounds + 1):
            for broker, where in ((RABBITMQ, url), (OURS, ours)):
                say(f"{name}: round {at} of {rounds}, {broker}")
                # Round 0 is the warm-up.
                rate = run(where, count if at else count // 10)
                if at:
                    rates[broker].append(rate)
        found[f"{name}, per second"] = {broker: median(own) for broker, own in rates.items()}
        pairs = zip(rates[OURS], rates[RABBITMQ], strict=True)
        found[f"{name}, of RabbitMQ's"] = median(mine / other for mine, other in pairs)
    return found


def run(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the requested parts, and return the results by name."""
    count, rounds, seconds, number = (
        (2000, 1, 0.5, 50) if options.quick else (options.messages, options.rounds, 5.0, 2000)
    )
    parts = options.parts.split(",")
    found: dict[str, Any] = {}
    with broker_process() if {"rates", "policies"} & set(parts) else nullcontext(("", 0)) as (ours, _):
        if "rates" in parts:
            with Wire(options.url) as wire:
                found["RabbitMQ"] = broker_name(wire.server_properties)
            runs = {"published": published, "published and consumed": consumed}
            found |= compare(runs, options.url, ours, count, rounds, say)
            rates = found["published, per second"]
            for broker, url in ((RABBITMQ, options.url), (OURS, ours)):
                say(f"latency at half load: {broker}")
                values = latency(url, rates[broker] / 2, seconds)
                suffix = "" if broker == OURS else ", RabbitMQ"
                found[f"p50 ms of a confirm at half load{suffix}"] = percentile(values, 0.5)
                found[f"p99 ms of a confirm at half load{suffix}"] = percentile(values, 0.99)
        if "policies" in parts:
            say("policies")
            found["of the rate without a policy"] = policies(ours, count, rounds)
    if "persistent" in parts:
        with TemporaryDirectory() as folder, broker_process("--store", f"{folder}/store") as (ours, _):
            runs = {"published, persistent": partial(published, persistent=True)}
            found |= compare(runs, options.url, ours, count, rounds, say)
    if "connections" in parts:
        say(f"{number} connections")
        found |= connections(number)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if with ``--check`` a requirement is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.broker", description=__doc__)
    parser.add_argument("--url", default=DEFAULT_URL, help="amqp:// URL of RabbitMQ (%(default)s)")
    parser.add_argument("--messages", type=int, default=100_000, help="messages of a run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, whose median is reported (%(default)s)")
    parser.add_argument(
        "--parts",
        default="rates,persistent,policies,connections",
        help="parts to run, separated by commas (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--check", action="store_true", help=f"fail unless {'; '.join(f'{n} {w}' for n, w, _ in BARS)}")
    parser.add_argument("--quick", action="store_true", help="send few messages; the results are meaningless")
    options = parser.parse_args(arguments)
    # Each connection needs a file descriptor in this process and in the broker, which inherits the limit.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found = run(options, lambda text: print(text, file=sys.stderr, flush=True))
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print(aligned("The broker", list(_lines(found))))
    missed = [
        f"{name} {words}, not {found.get(name, 'measured')}"
        for name, words, ok in BARS
        if name not in found or not ok(found[name])
    ]
    for text in missed if options.check else ():
        print(f"missed: {text}", file=sys.stderr)
    return int(options.check and bool(missed))


def _lines(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, value in found.items():
        for key, single in value.items() if isinstance(value, dict) else (("", value),):
            words = single if isinstance(single, str) else f"{single:,.0f}" if single >= 1000 else f"{single:,.2f}"
            yield f"{name}{': ' if key else ''}{key}", words


if __name__ == "__main__":
    sys.exit(main())
