"""Attacks a broker in its own process, while another client measures round trips.

Each attack is a program in its own process. First it prepares the broker, for example with 20,000 queues. The resident
size of the broker is then its idle size, and the attack begins. During the attack, and for a moment after its end, the
resident size is sampled. One client declares a queue passively again and again, and idle clients keep their connections
open. The limits are:

- The peak is at most the idle size plus 1.2 times `memory_limit`.
- No round trip takes more than 100 ms.
- No other connection is lost.
- Without the token only the health and the description are answered.

Without ``--url`` a new `qflow broker` is started for each attack. Another broker, such as RabbitMQ, is given by
``--url`` and is attacked with its own settings. Its queues with the names that the attacks use are deleted first. Its
size is known if it runs on this machine. Round trips depend on the machine: on a busy machine compare them with those
of the attack ``none``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

import pamqp.base
from pamqp import commands, frame, header

from benchmarks.report import aligned

__all__ = ["ATTACKS", "Result", "Target", "attack", "clear", "main"]

LIMIT = 64 << 20
#: The broker may use this number times `memory_limit` beyond its idle size.
FACTOR = 1.2
#: Maximum seconds of another client's round trip.
ROUND_TRIP = 0.1
TOKEN = "attack-token"
#: Maximum bytes of the log of an attacked broker.
MOST_LOG = 1 << 20
_BYSTANDERS = 5
_PATIENCE = 60.0
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an attack.

    Attributes:
        idle: resident bytes of the broker before the attack; 0 if unknown.
        peak: maximum resident bytes of the broker during and after the attack.
        worst: seconds of the slowest round trip of another client.
        median: seconds of the median round trip of another client.
        lost: number of lost connections of other clients.
        log: bytes of the broker's log; 0 if unknown.
        told: answers that the broker gave to a client without the token.
    """

    attack: str
    idle: int
    peak: int
    worst: float
    median: float
    lost: int
    log: int
    told: str

    def missed(self, *, factor: float = FACTOR, round_trip: float = ROUND_TRIP) -> list[str]:
        """Return the missed limits.

        Args:
            factor: the broker may use this number times `LIMIT` beyond its idle size.
            round_trip: maximum seconds of another client's round trip.
        """
        bars = {
            "memory": self.peak > self.idle + LIMIT * factor,
            "round trip": self.worst > round_trip,
            "lost connections": self.lost > 0,
            "log": self.log > MOST_LOG,
            "told to strangers": bool(self.told),
        }
        return [name for name, is_missed in bars.items() if is_missed]


class _Peer:
    """A connection that ignores flow control."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, url: str) -> _Peer:
        parts = urlsplit(url)
        peer = cls(*await asyncio.open_connection(parts.hostname, parts.port or 5672))
        peer.writer.write(b"AMQP\0\0\x09\x01")
        await peer.read()
        login = f"\0{unquote(parts.username or 'guest')}\0{unquote(parts.password or 'guest')}"
        told: dict[str, Any] = {"capabilities": {"connection.blocked": True}}
        peer.send(0, commands.Connection.StartOk(told, "PLAIN", login, "en_US"))
        await peer.read()
        peer.send(0, commands.Connection.TuneOk(2047, 131072, 0))
        peer.send(0, commands.Connection.Open(unquote(parts.path[1:]) or "/"))
        await peer.read()
        await peer.call(1, commands.Channel.Open())
        return peer

    def send(self, channel: int, *frames: pamqp.base.Frame | header.ContentHeader) -> None:
        self.writer.write(b"".join(frame.marshal(each, channel) for each in frames))

    async def call(self, channel: int, method: pamqp.base.Frame) -> None:
        self.send(channel, method)
        await self.read()

    async def read(self) -> bytes:
        head = await self.reader.readexactly(7)
        return head + await self.reader.readexactly(int.from_bytes(head[3:7], "big") + 1)

    async def publish(
        self,
        body: bytes,
        routing_key: str = "attack",
        *,
        exchange: str = "",
        size: int | None = None,
        headers: dict[str, Any] | None = None,
    ) -> None:
        """Publish one message. Wait while the broker does not read."""
        self.send(
            1,
            commands.Basic.Publish(0, exchange, routing_key),
            header.ContentHeader(0, len(body) if size is None else size, commands.Basic.Properties(headers=headers)),
        )
        for start in range(0, len(body), 131064):
            part = body[start : start + 131064]
            self.writer.write(b"\3\0\1" + len(part).to_bytes(4, "big") + part + b"\xce")
            await self.writer.drain()
        await self.writer.drain()


def _nulls(count: int) -> bytes:
    array = b"V" * count
    table = b"\1n" + b"A" + len(array).to_bytes(4, "big") + array
    return len(table).to_bytes(4, "big") + table


class Target:
    """The attacked broker. `http_url` is empty if the broker was not started for this attack."""

    def __init__(self, url: str, http_url: str, scale: float) -> None:
        self.url = url
        self.http_url = http_url
        self.scale = scale

    def of(self, count: int) -> int:
        """Return `count`, or a smaller number for a short run."""
        return max(1, int(count * self.scale))

    async def peer(self) -> _Peer:
        return await _Peer.connect(self.url)

    def ask(self, method: str, path: str, body: object = None) -> bytes:
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        raw = None if body is None else json.dumps(body).encode()
        with urlopen(Request(self.http_url + path, raw, headers, method=method), timeout=600) as answer:
            return bytes(answer.read())

    def declare(self, count: int) -> None:
        names = [f"attack {number}" for number in range(count)]
        self.ask("POST", "/api/definitions", {"queues": [{"name": name} for name in names]})


# An attack first prepares the broker, then yields, and then attacks until its process is killed.
Attack = Callable[[Target], AsyncIterator[None]]


async def _forever(steps: Callable[[], Awaitable[object]], peers: int = 1) -> None:
    """Repeat `steps` in several peers. A peer whose connection is closed connects again."""

    async def one() -> None:
        while True:
            with suppress(OSError, asyncio.IncompleteReadError):
                await steps()
            await asyncio.sleep(0.01)

    await asyncio.gather(*(one() for _ in range(peers)))


async def none(target: Target) -> AsyncIterator[None]:
    """No attack, to measure the machine."""
    yield
    await asyncio.sleep(3600)


async def half_sent_bodies(target: Target) -> AsyncIterator[None]:
    """100 bodies of 4 MiB, each without its last byte."""
    yield

    async def step() -> None:
        peer = await target.peer()
        await peer.publish(b"x" * (4 * _MIB - 1), size=4 * _MIB)
        await peer.reader.read()

    await _forever(step, target.of(100))


async def big_headers(target: Target) -> AsyncIterator[None]:
    """Empty bodies with 120 KB of headers."""
    peer = await target.peer()
    await peer.call(1, commands.Queue.Declare(queue="attack"))
    yield

    async def step() -> None:
        peer = await target.peer()
        while True:
            await peer.publish(b"", headers={"h": "x" * 120_000})

    await _forever(step, 2)


async def transactions(target: Target) -> AsyncIterator[None]:
    """Bodies of 1 MiB in a transaction that is never committed."""
    peer = await target.peer()
    await peer.call(1, commands.Queue.Declare(queue="attack"))
    yield

    async def step() -> None:
        peer = await target.peer()
        await peer.call(1, commands.Tx.Select())
        while True:
            await peer.publish(b"x" * _MIB)

    await _forever(step, 4)


async def through_blocked(target: Target) -> AsyncIterator[None]:
    """Publishes that ignore Connection.Blocked and Channel.Flow."""
    peer = await target.peer()
    await peer.call(1, commands.Queue.Declare(queue="attack"))
    yield

    async def step() -> None:
        peer = await target.peer()
        while True:
            await peer.publish(b"x" * 16_384)

    await _forever(step, 4)


async def waiting_publishes(target: Target) -> AsyncIterator[None]:
    """Publishes that wait for room (policy=wait)."""
    peer = await target.peer()
    arguments: Any = {"x-qflow-policy": "wait", "qpid.max_count": 1}
    await peer.call(1, commands.Queue.Declare(queue="attack", arguments=arguments))
    yield

    async def step() -> None:
        peer = await target.peer()
        await peer.call(1, commands.Confirm.Select())
        while True:
            await peer.publish(b"x" * 16_384)

    await _forever(step, 4)


async def fanout(target: Target) -> AsyncIterator[None]:
    """Empty messages from four publishers to a fanout with 1,500 queues."""
    peer = await target.peer()
    for number in range(target.of(1500)):
        await peer.call(1, commands.Queue.Declare(queue=f"attack {number}"))
        await peer.call(1, commands.Queue.Bind(queue=f"attack {number}", exchange="amq.fanout"))
    yield

    async def step() -> None:
        peer = await target.peer()
        while True:
            await peer.publish(b"", exchange="amq.fanout")

    await _forever(step, 4)


async def dead_letters(target: Target) -> AsyncIterator[None]:
    """Rejects of 1,000 messages at once, and messages that expire, with dead letters to 400 queues each."""
    peer = await target.peer()
    for number in range(target.of(400)):
        name = f"attack {number}"
        await peer.call(1, commands.Queue.Declare(queue=name, arguments={"x-max-length": 1}))
        await peer.call(1, commands.Queue.Bind(queue=name, exchange="amq.fanout"))
    letters: Any = {"x-dead-letter-exchange": "amq.fanout"}
    await peer.call(1, commands.Queue.Declare(queue="attack", arguments=letters))
    await peer.call(1, commands.Queue.Declare(queue="expires", arguments=letters | {"x-message-ttl": 500}))
    yield

    async def step() -> None:
        peer = await target.peer()
        await peer.call(1, commands.Basic.Consume(queue="attack"))
        while True:
            for queue in ("expires", "attack"):
                for _ in range(1000):
                    await peer.publish(b"", queue)
            # Each delivery is a method frame and a header frame.
            for _ in range(2000):
                await peer.read()
            peer.send(1, commands.Basic.Nack(0, multiple=True, requeue=False))

    await _forever(step)


async def arrays_of_nulls(target: Target) -> AsyncIterator[None]:
    """Arrays of 120,000 nulls in headers and arguments, and smaller arrays before the login."""
    peer = await target.peer()
    await peer.call(1, commands.Queue.Declare(queue="attack"))
    properties = b"\x20\0" + _nulls(120_000)
    content = b"\0\x3c\0\0" + bytes(8) + properties
    head = b"\2\0\1" + len(content).to_bytes(4, "big") + content + b"\xce"
    arguments = b"\0\x32\0\x0a\0\0\1q\0" + _nulls(120_000)
    declare = b"\1\0\1" + len(arguments).to_bytes(4, "big") + arguments + b"\xce"
    hello = b"\0\x0a\0\x0b" + _nulls(3_900) + b"\5PLAIN\0\0\0\0\5en_US"
    start = b"\1\0\0" + len(hello).to_bytes(4, "big") + hello + b"\xce"
    publish = frame.marshal(commands.Basic.Publish(0, "", "attack"), 1)
    yield

    async def step() -> None:
        stranger = _Peer(*await asyncio.open_connection(urlsplit(target.url).hostname, urlsplit(target.url).port))
        stranger.writer.write(b"AMQP\0\0\x09\x01" + start)
        peer = await target.peer()
        for _ in range(20):
            peer.writer.write(publish + head)
            await peer.writer.drain()
        peer.writer.write(declare)
        await peer.read()
        for each in (stranger, peer):
            each.writer.close()

    await _forever(step, 4)


async def regular_expression(target: Target) -> AsyncIterator[None]:
    """A policy pattern that takes exponential time in many engines, and queue names that trigger this."""
    target.ask("PUT", "/api/policies/attack", {"pattern": "(a+)+$", "definition": {"policy": "reject", "maxCount": 5}})
    yield

    async def step() -> None:
        peer = await target.peer()
        while True:
            await peer.call(1, commands.Queue.Declare(queue="a" * 200 + ","))
            await peer.call(1, commands.Queue.Delete(queue="a" * 200 + ","))

    await _forever(step)


async def many_bindings(target: Target) -> AsyncIterator[None]:
    """Messages that all have new routing keys, to an exchange with 20,000 bindings."""
    peer = await target.peer()
    await peer.call(1, commands.Queue.Declare(queue="attack"))
    for number in range(target.of(20_000)):
        binding = commands.Queue.Bind(queue="attack", exchange="amq.topic", routing_key=f"a.{number}.*", nowait=True)
        peer.send(1, binding)
        if not number % 100:
            await peer.call(1, commands.Queue.Declare(queue="attack"))
    yield

    async def step() -> None:
        peer = await target.peer()
        number = 0
        while True:
            number += 1
            await peer.publish(b"", f"b.{number}.c", exchange="amq.topic")

    await _forever(step)


async def http_strangers(target: Target) -> AsyncIterator[None]:
    """Requests without the token for the description, the health and forbidden pages, and many idle connections."""
    parts = urlsplit(target.http_url)
    paths = ("/api/openapi.json", "/api/health", "/api/queues", "/")
    asked = b"".join(f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode() for path in paths)
    yield

    async def step() -> None:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        while True:
            writer.write(asked)
            await writer.drain()
            if not await reader.read(1 << 20):
                break

    async def silent() -> None:
        reader, _ = await asyncio.open_connection(parts.hostname, parts.port)
        await reader.read()

    await asyncio.gather(_forever(step, 8), _forever(silent, target.of(500)))


async def metrics(target: Target) -> AsyncIterator[None]:
    """Requests with the token for the metrics and the lists of 20,000 queues."""
    target.declare(target.of(20_000))
    yield

    async def step() -> None:
        for path in ("/metrics", "/api/queues", "/api/definitions"):
            await asyncio.to_thread(target.ask, "GET", path)

    await _forever(step, 2)


async def event_streams(target: Target) -> AsyncIterator[None]:
    """A hundred event streams of a broker with 1,000 idle queues and one active queue."""
    target.declare(target.of(1000))
    parts = urlsplit(target.http_url)
    asked = (
        f"GET /api/events?period=0.1 HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    )
    peer = await target.peer()
    await peer.call(1, commands.Queue.Declare(queue="attack"))
    yield

    async def listen() -> None:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(asked)
        while await reader.read(1 << 20):
            pass

    async def change() -> None:
        while True:
            await peer.publish(b"x")
            await asyncio.sleep(0.01)

    await asyncio.gather(_forever(listen, 100), change())


async def descriptors(target: Target) -> AsyncIterator[None]:
    """More connections than the broker has file descriptors."""
    yield
    kept: list[Any] = []

    async def step() -> None:
        parts = urlsplit(target.url)
        kept.append(await asyncio.open_connection(parts.hostname, parts.port))

    await _forever(step, 50)


async def unread_replies(target: Target) -> AsyncIterator[None]:
    """Requests of ten peers that never read the replies."""
    yield
    request = frame.marshal(commands.Queue.Declare(queue="attack"), 1) * 1000

    async def step() -> None:
        peer = await target.peer()
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        while True:
            peer.writer.write(request)
            await peer.writer.drain()

    await _forever(step, 10)


_EVERYWHERE: tuple[Attack, ...] = (
    none,
    half_sent_bodies,
    big_headers,
    transactions,
    through_blocked,
    fanout,
    dead_letters,
    arrays_of_nulls,
    many_bindings,
    descriptors,
    unread_replies,
)
_HERE: tuple[Attack, ...] = (waiting_publishes, regular_expression, http_strangers, metrics, event_streams)
#: Attacks by name.
ATTACKS = {each.__name__: each for each in (*_EVERYWHERE, *_HERE)}


async def clear(target: Target) -> None:
    """Delete the queues of earlier attacks."""
    peer = await target.peer()
    for name in ("attack", "expires", *(f"attack {number}" for number in range(2000))):
        await peer.call(1, commands.Queue.Delete(queue=name))
    peer.writer.close()
    await peer.writer.wait_closed()


async def _child(name: str, target: Target) -> None:
    if not target.http_url:
        # The broker ran before, so it can have these queues, with other arguments.
        await clear(target)
    run = ATTACKS[name](target)
    await anext(run)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    async for _ in run:
        pass


class _Others(threading.Thread):
    """A client that measures round trips, and clients that are idle."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._ends = threading.Event()
        self._is_ready = threading.Event()
        self.times: list[float] = []
        self.lost = 0

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        peers = [await _Peer.connect(self._url) for _ in range(_BYSTANDERS + 1)]
        probe = frame.marshal(commands.Queue.Declare(queue="others"), 1)

        async def round_trip(peer: _Peer) -> None:
            peer.writer.write(probe)
            async with asyncio.timeout(_PATIENCE):
                while (await peer.read())[:1] != b"\1":
                    pass

        self._is_ready.set()
        with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            while not self._ends.is_set():
                began = time.perf_counter()
                await round_trip(peers[0])
                self.times.append(time.perf_counter() - began)
                await asyncio.sleep(0.005)
        for peer in peers:
            try:
                await round_trip(peer)
            except (OSError, asyncio.IncompleteReadError, TimeoutError):
                self.lost += 1
            peer.writer.close()

    def begin(self) -> None:
        self.start()
        if not self._is_ready.wait(_PATIENCE):
            raise TimeoutError(f"the clients that measure round trips did not connect within {_PATIENCE:g} s")

    def end(self) -> None:
        self._ends.set()
        self.join()


def _resident(pid: int) -> int:
    if not pid:
        return 0
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _pid_of(url: str) -> int:
    """Return the id of the process that listens at the URL, or 0 if there is none on this machine."""
    import psutil

    port = urlsplit(url).port or 5672
    found = [each.pid for each in psutil.net_connections("tcp") if each.status == "LISTEN" and each.laddr.port == port]
    return found[0] or 0 if found else 0


def _told_to_strangers(http_url: str) -> str:
    """Return the answers that a client without the token gets."""
    told = []
    for path in ("/api/queues", "/api/connections", "/api/counters", "/api/events", "/api/definitions", "/metrics"):
        try:
            with urlopen(http_url + path, timeout=_PATIENCE):
                told.append(path)
        except HTTPError as error:
            if error.code != 401:
                told.append(f"{path}: {error.code}")
    return ", ".join(told)


@contextmanager
def _broker(descriptor_limit: int = 0) -> Iterator[tuple[str, str, int, Path]]:
    """Run a broker in its own process; yield its URLs, its process id and its log."""
    command = [sys.executable, "-m", "qflow_client.cli", "broker", "--port", "0", "--http-port", "0"]
    command += ["--memory-limit", str(LIMIT)]
    if descriptor_limit:
        command = ["sh", "-c", f'ulimit -n {descriptor_limit}; exec "$@"', "sh", *command]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("w") as errors:
            environment = {**os.environ, "QFLOW_HTTP_TOKEN": TOKEN}
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process.stdout.readline().strip(), process.pid, log
        finally:
            process.kill()
            process.communicate()


def attack(name: str, *, seconds: float, scale: float = 1.0, url: str = "") -> Result:
    """Run one attack.

    Args:
        scale: share of the queues, bindings and peers to use, from 0 to 1.
        url: URL of a running broker; empty to start one.
    """
    with ExitStack() as stack:
        if url:
            http_url, pid, log = "", _pid_of(url), None
        else:
            url, http_url, pid, log = stack.enter_context(_broker(500 if name == "descriptors" else 0))
        child = subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.attack", "--child", name, "--url", url, "--http-url", http_url),
                *("--scale", str(scale)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(child.communicate)
        stack.callback(child.kill)
        assert child.stdin is not None
        assert child.stdout is not None
        others = _Others(url)
        others.begin()
        if child.stdout.readline() != "ready\n":
            raise RuntimeError(f"the process of the attack {name!r} ended before the attack; see its output above")
        idle = peak = _resident(pid)
        others.times.clear()
        child.stdin.write("go\n")
        child.stdin.flush()
        end = time.monotonic() + seconds
        told = ""
        while time.monotonic() < end:
            peak = max(peak, _resident(pid))
            time.sleep(0.01)
        if name == "http_strangers" and http_url:
            told = _told_to_strangers(http_url)
        child.kill()
        end = time.monotonic() + seconds / 4
        while time.monotonic() < end:
            peak = max(peak, _resident(pid))
            time.sleep(0.01)
        others.end()
        times = sorted(others.times) or [_PATIENCE]
        size = log.stat().st_size if log is not None else 0
        return Result(name, idle, peak, times[-1], times[len(times) // 2], others.lost, size, told)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the attacks; the exit code is 1 if a limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attack", description=__doc__)
    parser.add_argument(
        "--url", default="", help="of a broker that runs, such as RabbitMQ; one is started unless given"
    )
    parser.add_argument("--only", default="", help="attacks, separated by commas; all unless given")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one second of each, with a tenth of the queues")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--round-trip", type=float, default=ROUND_TRIP, help="seconds that a round trip may take (%(default)s)"
    )
    parser.add_argument(
        "--factor",
        type=float,
        default=FACTOR,
        help=f"times {LIMIT // _MIB} MiB that the broker may take beyond its idle size (%(default)s)",
    )
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--http-url", default="", help=argparse.SUPPRESS)
    parser.add_argument("--scale", type=float, default=1.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        asyncio.run(_child(options.child, Target(options.url, options.http_url, options.scale)))
        return 0
    every = [each.__name__ for each in _EVERYWHERE] if options.url else list(ATTACKS)
    names = options.only.split(",") if options.only else every
    seconds, scale = (1.0, 0.1) if options.quick else (options.seconds, 1.0)
    found: list[tuple[Result, list[str]]] = []
    for name in names:
        result = attack(name, seconds=seconds, scale=scale, url=options.url)
        found.append((result, result.missed(factor=options.factor, round_trip=options.round_trip)))
        if not options.json:
            print("  ".join(_row(*found[-1])), file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps([asdict(result) | {"missed": missed} for result, missed in found], indent=2))
    else:
        head = ("attack", "idle, MiB", "peak, MiB", "median, ms", "worst, ms", "lost", "missed")
        rows = [_row(result, missed) for result, missed in found]
        print(aligned(f"Attacks, memory_limit {LIMIT // _MIB} MiB", [head, *rows]))
    return int(any(missed for _, missed in found))


def _row(result: Result, missed: list[str]) -> tuple[str, ...]:
    return (
        result.attack,
        f"{result.idle / _MIB:.0f}",
        f"{result.peak / _MIB:.0f}",
        f"{result.median * 1000:.1f}",
        f"{result.worst * 1000:.0f}",
        str(result.lost),
        ", ".join(missed) or "-",
    )


if __name__ == "__main__":
    sys.exit(main())
