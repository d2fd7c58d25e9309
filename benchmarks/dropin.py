"""Compares the drop-ins for pika and aio-pika with the original libraries and with the producers of this package.

The loops do the same with each library, and run alternately.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, Final

import aio_pika
import pika

import qflow_client.aio_pika
import qflow_client.pika
from benchmarks.embedded import DEFAULT_URL, EMBEDDED, broker_url
from benchmarks.shares import print_shares
from qflow_client import AsyncProducer, Producer

__all__ = ["LOOPS", "RATIOS", "main", "measure", "ratios", "run_loop"]

_PIPELINED: Final = "pipelined"


@contextmanager
def _queue(url: str, count: int, durable: bool = False) -> Iterator[str]:
    """Declare a queue, and check at the end that the queue has `count` messages."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        queue = channel.queue_declare("", exclusive=not durable, durable=durable).method.queue
        yield queue
        # Without confirms messages may still be on their way.
        end = time.monotonic() + 30
        while (depth := channel.queue_declare(queue, passive=True).method.message_count) != count:
            if time.monotonic() > end:
                raise RuntimeError(f"queue {queue!r} has {depth} of {count} messages after 30 s")
            connection.sleep(0.05)
        channel.queue_delete(queue)


def _pika(module: Any, confirms: str, durable: bool, url: str, count: int, size: int) -> float:
    """Return messages per second of a loop of pika. If confirms are used, the time includes the last confirm."""
    with _queue(url, count, durable) as queue, module.BlockingConnection(module.URLParameters(url)) as connection:
        channel = connection.channel()
        if confirms == _PIPELINED:
            channel.confirm_delivery(pipelined=True)
        elif confirms:
            channel.confirm_delivery()
        properties = module.BasicProperties(delivery_mode=2) if durable else None
        body = b"x" * size
        began = time.perf_counter()
        for _ in range(count):
            channel.basic_publish("", queue, body, properties)
        if confirms == _PIPELINED:
            channel.wait_for_confirms()
        seconds = time.perf_counter() - began
    return count / seconds


def _producer(url: str, count: int, size: int) -> float:
    """Return messages per second of one thread. As in pika's loop, messages are not mandatory and have no id."""
    with (
        _queue(url, count) as queue,
        Producer(url, routing_key=queue, mandatory=False, message_ids=False) as producer,
    ):
        body = b"x" * size
        began = time.perf_counter()
        for _ in range(count):
            producer.send(body)
        producer.flush()
        seconds = time.perf_counter() - began
    return count / seconds


def _aio_pika(module: Any, tasks: int, confirms: bool, url: str, count: int, size: int) -> float:
    """Return messages per second of several tasks; each publishes one message after the other."""
    body = b"x" * size

    async def run() -> float:
        async with await module.connect(url) as connection:
            channel = await connection.channel(publisher_confirms=confirms)
            exchange = channel.default_exchange

            async def publish() -> None:
                for _ in range(count // tasks):
                    await exchange.publish(module.Message(body), queue)

            return await _seconds(publish, tasks)

    with _queue(url, count // tasks * tasks) as queue:
        return count // tasks * tasks / asyncio.run(run())


def _async_producer(tasks: int, url: str, count: int, size: int) -> float:
    """Return messages per second of several tasks; each waits for the receipt of one message after the other."""
    body = b"x" * size

    async def run() -> float:
        async with AsyncProducer(url, routing_key=queue) as producer:

            async def publish() -> None:
                for _ in range(count // tasks):
                    await (await producer.send(body))

            return await _seconds(publish, tasks)

    with _queue(url, count // tasks * tasks) as queue:
        return count // tasks * tasks / asyncio.run(run())


async def _seconds(publish: Callable[[], Any], tasks: int) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(publish() for _ in range(tasks)))
    return time.perf_counter() - began


#: The loops of each library. A loop takes the broker's URL, the number of messages and the bytes of a body. A loop
#: returns messages per second.
LOOPS: Final[dict[str, dict[str, Callable[[str, int, int], float]]]] = {
    "pika": {
        "pika, unconfirmed": partial(_pika, pika, "", False),
        "drop-in, unconfirmed": partial(_pika, qflow_client.pika, "", False),
        "pika, confirm each": partial(_pika, pika, "each", False),
        "drop-in, confirm each": partial(_pika, qflow_client.pika, "each", False),
        "drop-in, pipelined": partial(_pika, qflow_client.pika, _PIPELINED, False),
        "Producer": _producer,
        "pika, confirm each, durable": partial(_pika, pika, "each", True),
        "drop-in, pipelined, durable": partial(_pika, qflow_client.pika, _PIPELINED, True),
    },
    "aio-pika": {
        "aio-pika, 1 task": partial(_aio_pika, aio_pika, 1, True),
        "drop-in, 1 task": partial(_aio_pika, qflow_client.aio_pika, 1, True),
        "aio-pika, 1000 tasks": partial(_aio_pika, aio_pika, 1000, True),
        "drop-in, 1000 tasks": partial(_aio_pika, qflow_client.aio_pika, 1000, True),
        "AsyncProducer, 1000 tasks": partial(_async_producer, 1000),
        "aio-pika, unconfirmed": partial(_aio_pika, aio_pika, 1, False),
        "drop-in, unconfirmed": partial(_aio_pika, qflow_client.aio_pika, 1, False),
    },
}
# Loops that publish one message at a time are slower, so a tenth of the messages is enough.
_ONE_BY_ONE: Final = ("confirm each", "1 task")

#: For each library, the compared pairs of loops and their minimum ratios for ``--check``.
RATIOS: Final = {
    "pika": {
        "unconfirmed": ("drop-in, unconfirmed", "pika, unconfirmed", 0.95),
        "confirm each": ("drop-in, confirm each", "pika, confirm each", 0.95),
        "pipelined": ("drop-in, pipelined", "pika, confirm each", 5.0),
        "pipelined, durable": ("drop-in, pipelined, durable", "pika, confirm each, durable", 5.0),
        "to Producer": ("drop-in, pipelined", "Producer", 0.5),
    },
    "aio-pika": {
        "1 task": ("drop-in, 1 task", "aio-pika, 1 task", 0.95),
        "1000 tasks": ("drop-in, 1000 tasks", "aio-pika, 1000 tasks", 0.95),
        "unconfirmed": ("drop-in, unconfirmed", "aio-pika, unconfirmed", 0.95),
        "to AsyncProducer": ("drop-in, 1000 tasks", "AsyncProducer, 1000 tasks", 0.4),
    },
}

#: For each library, the loops whose processor time ``--shares`` divides among packages.
_PROFILED: Final = {
    "pika": ("drop-in, pipelined", "Producer", "pika, unconfirmed", "drop-in, unconfirmed"),
    "aio-pika": ("drop-in, 1000 tasks", "AsyncProducer, 1000 tasks", "aio-pika, 1000 tasks"),
}


def run_loop(name: str, url: str, count: int, size: int = 100) -> float:
    """Run one loop, and return messages per second. `name` has the form ``library/loop``."""
    library, _, loop = name.partition("/")
    return LOOPS[library][loop](url, count, size)


def measure(url: str, count: int, size: int, rounds: int, library: str = "pika") -> list[dict[str, float]]:
    """For each round, return the messages per second of every loop. In a round each loop runs once."""
    counts = {name: max(1, count // 10) if any(map(name.count, _ONE_BY_ONE)) else count for name in LOOPS[library]}
    return [
        {name: run_loop(f"{library}/{name}", url, number, size) for name, number in counts.items()}
        for _ in range(rounds)
    ]


def ratios(rounds: Sequence[dict[str, float]], library: str = "pika") -> dict[str, float]:
    """Return the median of each ratio over the rounds. A disturbance in a round affects both loops."""
    return {
        name: median(rates[one] / rates[other] for rates in rounds) for name, (one, other, _) in RATIOS[library].items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rates and the ratios; with ``--check`` return 1 if a ratio is below its minimum."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default=DEFAULT_URL, help=f"or {EMBEDDED!r}")
    parser.add_argument("--library", choices=list(LOOPS), default="pika", help="whose drop-in")
    parser.add_argument("--messages", type=int, default=20_000, help="per run; a tenth of it one by one")
    parser.add_argument("--size", type=int, default=100, help="bytes of a body")
    parser.add_argument("--repeat", type=int, default=5, help="rounds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help="fail if a ratio is below its minimum")
    parser.add_argument(
        "--shares", action="store_true", help="show whose the processor time is, by package, instead; needs py-spy"
    )
    arguments = parser.parse_args(argv)
    library = arguments.library
    with broker_url(arguments.url) as url:
        if arguments.shares:
            print_shares("dropin", [f"{library}/{name}" for name in _PROFILED[library]], url, arguments.messages)
            return 0
        rounds = measure(url, arguments.messages, arguments.size, arguments.repeat, library)
    found = ratios(rounds, library)
    release = f"{library} {(pika if library == 'pika' else aio_pika).__version__}"
    if arguments.json:
        json.dump({"library": release, "rounds": rounds, "ratios": found}, sys.stdout, indent=2)
        print()
    else:
        print(f"{release}, {arguments.size}-byte bodies, medians of {arguments.repeat} rounds")
        for name in rounds[0]:
            print(f"{name:30} {median(rates[name] for rates in rounds):10,.0f} msg/s")
        for name, (one, other, least) in RATIOS[library].items():
            print(f"{name:30} {found[name]:10.2f}  ({one} / {other}; at least {least})")
    return int(arguments.check and any(found[name] < least for name, (_, _, least) in RATIOS[library].items()))


if __name__ == "__main__":
    sys.exit(main())
