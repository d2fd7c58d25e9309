"""Measures the cost of flow control: an open gate, a resume, a deadline, and thousands of waiting senders."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import re
import socket
import struct
import sys
import threading
import time
import timeit
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from benchmarks.embedded import EMBEDDED, broker_url
from qflow_client import AsyncProducer, FlowControlTimeout, Producer, ProducerSettings
from qflow_client.broker import Broker
from qflow_client.core.protocol import ProducerProtocol

__all__ = ["BARS", "blocked_tasks", "blocked_threads", "deadlines", "main", "open_gate", "resume"]

#: Requirements of ``--check``: the measurement, its value, its description, and the condition.
BARS: tuple[tuple[str, str, str, Callable[[Any], bool]], ...] = (
    ("open gate", "part", "<= 5 %", lambda value: value <= 0.05),
    ("deadline", "earliest_ms", ">= 0", lambda value: value >= 0),
    ("resume", "p99_in_round_trips", "<= 5", lambda value: value <= 5),
    ("resume of AsyncProducer", "p99_in_round_trips", "<= 5", lambda value: value <= 5),
    ("blocked threads", "cpu", "<= 1 %", lambda value: value <= 0.01),
    ("blocked threads", "in_order", "true", bool),
    ("blocked tasks", "cpu", "<= 1 %", lambda value: value <= 0.01),
    ("blocked tasks", "kib_each", "<= 2", lambda value: value <= 2),
    ("blocked tasks", "in_order", "true", bool),
)

_FLOW = b"\1\0\1\0\0\0\5\0\x14\0\x14%b\xce"
_FLOW_OK = b"\0\x14\0\x15"
_PUBLISH = b"\0\x3c\0\x28"
# The whole frame of Channel.FlowOk. The broker has sent no Channel.Flow, so it would refuse the frame. Messages are
# small here, so the frame arrives whole.
_FLOW_OK_FRAME = re.compile(b"\1\0\1\0\0\0\5\0\x14\0\x15[\0\1]\xce")


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def resident(pid: int | str = "self") -> int:
    """Return the resident bytes of a process, or of this process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_gate() -> dict[str, float]:
    """Return the nanoseconds of one check of an open gate, and of one admission with its confirm, without sockets."""
    number = 200_000
    settings = ProducerSettings(capacity=1000)
    protocol = ProducerProtocol(settings, id_prefix="0123456789abcdef-", now=0.0)
    protocol.channel_opened(1, 1 << 17, 0.0)
    body = b"x" * 100
    tag = 0

    def burst() -> None:
        nonlocal tag
        for _ in range(500):
            protocol.admission.send(body, "", "orders", 0.0)
        protocol.advance(len(protocol.data_to_write(1 << 30)), 0.0)
        tag += 500
        protocol.on_ack(tag, True, 0.0)

    gate = protocol.gate
    look = min(timeit.repeat("gate.is_open", globals={"gate": gate}, number=number, repeat=9)) / number
    whole = min(timeit.repeat(burst, number=number // 5000, repeat=9)) / (number // 5000) / 500
    return {"look_ns": look * 1e9, "admission_ns": whole * 1e9, "part": look / whole}


def _inject(url: str, results: Connection, rounds: int) -> None:
    """Stand between a producer and a broker, stop and resume the producer's channel, and time the next publish."""
    broker = urlsplit(url)
    with socket.create_server(("127.0.0.1", 0)) as server:
        results.send(server.getsockname()[1])
        client, _ = server.accept()
    upstream = socket.create_connection((broker.hostname, broker.port))
    for each in (client, upstream):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threading.Thread(target=_copy, args=(upstream, client), daemon=True).start()
    # Only this thread reads the client's bytes.
    _copy_until(client, upstream, _PUBLISH)
    times = []
    for _ in range(rounds):
        client.sendall(_FLOW % b"\0")
        _copy_until(client, upstream, _FLOW_OK + b"\0")
        time.sleep(0.002)
        began = time.perf_counter()
        client.sendall(_FLOW % b"\1")
        _copy_until(client, upstream, _PUBLISH)
        times.append(time.perf_counter() - began)
    results.send(times)
    _copy(client, upstream)


def _copy(source: socket.socket, target: socket.socket) -> None:
    while data := source.recv(1 << 17):
        target.sendall(data)


def _copy_until(client: socket.socket, upstream: socket.socket, found: bytes) -> None:
    seen = b""
    while found not in seen:
        data = client.recv(1 << 17)
        if not data:
            raise ConnectionError(f"the producer closed its connection before it sent {found!r}")
        # A pattern may be split over two reads.
        seen = seen[-len(found) :] + data
        upstream.sendall(_FLOW_OK_FRAME.sub(b"", data))


def _echo(port: Connection) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port.send(server.getsockname()[1])
        client, _ = server.accept()
        with client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := client.recv(100):
                client.sendall(data)


def round_trips(rounds: int) -> list[float]:
    """Return seconds of round trips of one byte to another process on this machine."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_echo, args=(theirs,))
    process.start()
    times = []
    with socket.create_connection(("127.0.0.1", ours.recv())) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(rounds):
            began = time.perf_counter()
            sock.sendall(b"x")
            sock.recv(1)
            times.append(time.perf_counter() - began)
            time.sleep(0.002)
    process.join()
    return times


def _send_by_thread(url: str, results: Connection) -> list[float]:
    done = threading.Event()
    with Producer(url, routing_key="benchmark", mandatory=False, capacity=10) as producer:

        def keep_sending() -> None:
            while not done.is_set():
                producer.send(b"x" * 100, timeout=10)

        sender = threading.Thread(target=keep_sending)
        sender.start()
        try:
            times: list[float] = results.recv()
        finally:
            done.set()
            sender.join()
    return times


def _send_by_task(url: str, results: Connection) -> list[float]:
    async def run() -> list[float]:
        async with AsyncProducer(url, routing_key="benchmark", mandatory=False, capacity=10) as producer:

            async def keep_sending() -> None:
                while True:
                    # An await that returns immediately lets no other task run.
                    await producer.send(b"x" * 100, timeout=10)
                    await asyncio.sleep(0)

            sender = asyncio.create_task(keep_sending())
            try:
                times: list[float] = await asyncio.to_thread(results.recv)
            finally:
                sender.cancel()
        return times

    return asyncio.run(run())


def resume(
    url: str, rounds: int = 500, send: Callable[[str, Connection], list[float]] = _send_by_thread
) -> dict[str, float]:
    """Return milliseconds from the bytes of ``Channel.Flow(active=true)`` to the first publish, and of a round trip."""
    trips = round_trips(rounds)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_inject, args=(url, theirs, rounds))
    process.start()
    # If this end stayed open, a failure of the process would not be noticed.
    theirs.close()
    parts = urlsplit(url)
    through = parts._replace(netloc=f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{ours.recv()}").geturl()
    times = send(through, ours)
    process.join()
    p50, p99 = percentile(times, 0.5) * 1e3, percentile(times, 0.99) * 1e3
    trip50, trip99 = percentile(trips, 0.5) * 1e3, percentile(trips, 0.99) * 1e3
    return {
        "p50_ms": p50,
        "p99_ms": p99,
        "round_trip_p50_ms": trip50,
        "round_trip_p99_ms": trip99,
        "p99_in_round_trips": p99 / trip99,
    }


def deadlines(threads: int = 8, rounds: int = 100, timeout: float = 0.05) -> dict[str, float]:
    """Return by how many milliseconds `FlowControlTimeout` is late. The error must never be early."""
    late: list[float] = []
    with Broker() as broker:
        broker.declare_queue("benchmark")
        with Producer(broker.url, routing_key="benchmark") as producer:
            producer.pause("benchmark")

            def wait() -> None:
                for _ in range(rounds):
                    began = time.monotonic()
                    try:
                        producer.send(b"x", timeout=timeout)
                    except FlowControlTimeout:
                        late.append(time.monotonic() - began - timeout)

            waiters = [threading.Thread(target=wait) for _ in range(threads)]
            for each in waiters:
                each.start()
            for each in waiters:
                each.join()
    return {
        "count": len(late),
        "earliest_ms": min(late) * 1e3,
        "p50_ms": median(late) * 1e3,
        "p99_ms": percentile(late, 0.99) * 1e3,
        "latest_ms": max(late) * 1e3,
    }


def _rest(seconds: float) -> float:
    """Return the CPU seconds of this process per second while it is idle."""
    began = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - began) / seconds


def blocked_threads(url: str, count: int, seconds: float) -> dict[str, Any]:
    """Measure threads that wait in `Producer.send`: their cost, and whether they continue in order."""
    numbers = [0] * count
    with Producer(url, routing_key="benchmark", mandatory=False, capacity=count) as producer:
        producer.pause("benchmark")
        before = resident()
        threads = []
        for at in range(count):

            def work(number: int = at) -> None:
                receipt = producer.send(struct.pack(">I", number), timeout=None)
                # The last digits of the message id are the position in which the message was admitted.
                numbers[number] = int(str(receipt.message_id)[-12:], 16)

            thread = threading.Thread(target=work)
            thread.start()
            threads.append(thread)
            # Wait until this thread waits in `send` before the next thread starts.
            while producer._protocol.controller.waiting <= at:
                time.sleep(0)
        memory, cpu = resident() - before, _rest(seconds)
        began = time.perf_counter()
        producer.resume()
        for thread in threads:
            thread.join()
        out = time.perf_counter() - began
        producer.flush()
    return {
        "count": count,
        "cpu": cpu,
        "kib_each": memory / count / 1024,
        "seconds_out": out,
        "in_order": numbers == list(range(1, count + 1)),
        "all_out": count - numbers.count(0),
    }


def blocked_tasks(url: str, count: int, seconds: float) -> dict[str, Any]:
    """Measure tasks that wait in `AsyncProducer.send`: their cost, and whether they continue in order."""

    async def run() -> dict[str, Any]:
        order: list[int] = []
        async with AsyncProducer(url, routing_key="benchmark", mandatory=False, capacity=1000) as producer:
            producer.pause("benchmark")

            async def work(number: int) -> None:
                receipt = await producer.send(struct.pack(">I", number), timeout=None)
                order.append(struct.unpack(">I", receipt.message.body)[0])

            before = resident()
            tasks = [asyncio.create_task(work(at)) for at in range(count)]
            await asyncio.sleep(0)
            memory = resident() - before
            cpu_before = time.process_time()
            await asyncio.sleep(seconds)
            cpu = (time.process_time() - cpu_before) / seconds
            began = time.perf_counter()
            producer.resume()
            await asyncio.gather(*tasks)
            out = time.perf_counter() - began
            await producer.flush()
        return {
            "count": count,
            "cpu": cpu,
            "kib_each": memory / count / 1024,
            "seconds_out": out,
            "in_order": order == sorted(order),
            "all_out": len(order),
        }

    return asyncio.run(run())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if with ``--check`` a requirement is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flow", description=__doc__)
    parser.add_argument("--url", default=EMBEDDED, help=f"amqp:// URL of the broker, or {EMBEDDED}: ours (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    bars = "; ".join(f"{name}: {key} {words}" for name, key, words, _ in BARS)
    parser.add_argument("--check", action="store_true", help=f"fail unless {bars}".replace("%", "%%"))
    parser.add_argument("--quick", action="store_true", help="few rounds: its figures mean nothing")
    options = parser.parse_args(arguments)
    # The notices of all waiting senders are not part of the measurement.
    logging.getLogger("qflow_client").setLevel(logging.ERROR)
    with broker_url(options.url) as url:
        rounds, threads, tasks, rest = (20, 50, 1000, 0.2) if options.quick else (500, 1000, 100_000, 5.0)
        found: dict[str, dict[str, Any]] = {
            "open gate": open_gate(),
            "deadline": deadlines(rounds=rounds // 5),
            "resume": resume(url, rounds),
            "resume of AsyncProducer": resume(url, rounds, _send_by_task),
            "blocked threads": blocked_threads(url, threads, rest),
            "blocked tasks": blocked_tasks(url, tasks, rest),
        }
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for name, values in found.items():
            shown = ", ".join(f"{key} {value:.4g}" for key, value in values.items())
            print(f"{name}: {shown}")
    missed = [
        f"{name}: {key} {words}, not {found[name][key]:.4g}"
        for name, key, words, ok in BARS
        if not ok(found[name][key])
    ]
    for words in missed if options.check else ():
        print(f"missed: {words}", file=sys.stderr)
    return int(options.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
