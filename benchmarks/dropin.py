"""Compares the drop-ins for pika and aio-pika with the original libraries: the same loop with each."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import aio_pika
import pika

import qflow_client.aio_pika as aio_drop_in
import qflow_client.pika as drop_in
from benchmarks.embedded import DEFAULT_URL, EMBEDDED, broker_url

__all__ = ["AIO_LOOPS", "LOOPS", "main", "measure", "ratios"]


def _loop(module: Any, url: str, count: int, size: int, prepare: Callable[[Any], object], durable: bool) -> float:
    """Return messages per second of an unchanged loop, until the last one is confirmed if confirms are used."""
    with module.BlockingConnection(module.URLParameters(url)) as connection:
        channel = connection.channel()
        queue = channel.queue_declare("", exclusive=not durable, durable=durable).method.queue
        prepare(channel)
        properties = module.BasicProperties(delivery_mode=2) if durable else None
        body = b"x" * size
        began = time.perf_counter()
        for _ in range(count):
            channel.basic_publish("", queue, body, properties)
        if getattr(channel, "_is_pipelined", False):
            channel.wait_for_confirms()
        seconds = time.perf_counter() - began
        # Without confirms messages may still be on their way. The count of the queue is then used for the check.
        end = time.monotonic() + 30
        while (depth := channel.queue_declare(queue, passive=True).method.message_count) != count:
            if time.monotonic() > end:
                raise RuntimeError(f"queue {queue!r} has {depth} of {count} messages after 30 s")
            connection.sleep(0.05)
        channel.queue_delete(queue)
    return count / seconds


#: By name: the module, the function that turns confirms on, and whether messages and queue are durable.
LOOPS: dict[str, tuple[Any, Callable[[Any], object], bool]] = {
    "pika, unconfirmed": (pika, lambda _channel: None, False),
    "drop-in, unconfirmed": (drop_in, lambda _channel: None, False),
    "pika, confirm each": (pika, lambda channel: channel.confirm_delivery(), False),
    "drop-in, confirm each": (drop_in, lambda channel: channel.confirm_delivery(), False),
    "drop-in, pipelined": (drop_in, lambda channel: channel.confirm_delivery(pipelined=True), False),
    "pika, confirm each, durable": (pika, lambda channel: channel.confirm_delivery(), True),
    "drop-in, pipelined, durable": (drop_in, lambda channel: channel.confirm_delivery(pipelined=True), True),
}


async def _depth(channel: Any, queue: str) -> Any:
    return (await channel.declare_queue(queue, passive=True)).declaration_result.message_count


async def _aio_loop(module: Any, url: str, count: int, size: int, tasks: int, confirms: bool) -> float:
    """Return messages per second of several tasks; each publishes one message after the other."""
    async with await module.connect(url) as connection:
        channel = await connection.channel(publisher_confirms=confirms)
        queue = await channel.declare_queue(exclusive=True)
        exchange = channel.default_exchange
        body = b"x" * size

        async def publish() -> None:
            for _ in range(count // tasks):
                await exchange.publish(module.Message(body), queue.name)

        began = time.perf_counter()
        await asyncio.gather(*(publish() for _ in range(tasks)))
        seconds = time.perf_counter() - began
        total = count // tasks * tasks
        end = time.monotonic() + 30
        while (depth := await _depth(channel, queue.name)) != total:
            if time.monotonic() > end:
                raise RuntimeError(f"queue {queue.name!r} has {depth} of {total} messages after 30 s")
            await asyncio.sleep(0.05)
    return total / seconds


#: By name: the module, the number of tasks, and whether confirms are used.
AIO_LOOPS: dict[str, tuple[Any, int, bool]] = {
    f"{library}, {what}": (module, tasks, confirms)
    for what, tasks, confirms in (("1 task", 1, True), ("1000 tasks", 1000, True), ("unconfirmed", 1, False))
    for library, module in (("aio-pika", aio_pika), ("drop-in", aio_drop_in))
}

#: The compared pairs, and their minimum ratios.
_RATIOS = {
    "unconfirmed": ("drop-in, unconfirmed", "pika, unconfirmed", 0.95),
    "confirm each": ("drop-in, confirm each", "pika, confirm each", 0.95),
    "pipelined": ("drop-in, pipelined", "pika, confirm each", 5.0),
    "pipelined, durable": ("drop-in, pipelined, durable", "pika, confirm each, durable", 5.0),
}
_AIO_RATIOS = {
    what: (f"drop-in, {what}", f"aio-pika, {what}", 0.95) for what in ("1 task", "1000 tasks", "unconfirmed")
}


def measure(url: str, count: int, size: int, rounds: int, library: str = "pika") -> list[dict[str, float]]:
    """Return messages per second of every loop for each round; all loops run alternately in a round."""
    found = []
    for _ in range(rounds):
        rates = {}
        if library == "aio-pika":
            for name, (module, tasks, confirms) in AIO_LOOPS.items():
                number = count // (10 if tasks == 1 and confirms else 1)
                rates[name] = asyncio.run(_aio_loop(module, url, number, size, tasks, confirms))
            found.append(rates)
            continue
        for name, (module, prepare, durable) in LOOPS.items():
            # One message at a time is slower, so fewer messages are enough.
            number = max(1, count // (10 if "each" in name else 1))
            rates[name] = _loop(module, url, number, size, prepare, durable)
        found.append(rates)
    return found


def ratios(rounds: Sequence[dict[str, float]], library: str = "pika") -> dict[str, float]:
    """Return the medians of the rounds' ratios, because a disturbance of a round affects both loops."""
    compared = _RATIOS if library == "pika" else _AIO_RATIOS
    return {name: median(rates[one] / rates[other] for rates in rounds) for name, (one, other, _) in compared.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rates and the ratios; return 1 if a ratio is below its minimum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default=DEFAULT_URL, help=f"or {EMBEDDED!r}")
    parser.add_argument("--library", choices=["pika", "aio-pika"], default="pika", help="whose drop-in")
    parser.add_argument("--messages", type=int, default=20_000, help="per run; a tenth of it one by one")
    parser.add_argument("--size", type=int, default=100, help="bytes of a body")
    parser.add_argument("--repeat", type=int, default=5, help="rounds")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    with broker_url(arguments.url) as url:
        rounds = measure(url, arguments.messages, arguments.size, arguments.repeat, arguments.library)
    found = ratios(rounds, arguments.library)
    compared = _RATIOS if arguments.library == "pika" else _AIO_RATIOS
    release = f"{arguments.library} {(pika if arguments.library == 'pika' else aio_pika).__version__}"
    if arguments.json:
        json.dump({"library": release, "rounds": rounds, "ratios": found}, sys.stdout, indent=2)
        print()
    else:
        print(f"{release}, {arguments.size}-byte bodies, medians of {arguments.repeat} rounds")
        for name in rounds[0]:
            print(f"{name:30} {median(rates[name] for rates in rounds):10,.0f} msg/s")
        for name, (one, other, least) in compared.items():
            print(f"{name:30} {found[name]:10.2f}  ({one} / {other}; at least {least})")
    return int(any(found[name] < least for name, (_, _, least) in compared.items()))


if __name__ == "__main__":
    sys.exit(main())
