"""Takes the flights from a queue, in a process of its own, and tells what came.

``python -m tests.interop.flights.consumer URL QUEUE COUNT`` takes messages until one says ``end``. It prints ``ready``,
and then what it has found as JSON: how many of the first so many flights came, whether each is whole, whether the first
copies of each producer's are in order, and what came more than once or is marked as sent again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pika

from qflow_client.message import REPUBLISHED
from tests.interop.flights.data import END, flights, origin_of


def deliveries(url: str, queue: str) -> Iterator[tuple[Any, bytes]]:
    parameters = pika.URLParameters(url)
    parameters.heartbeat = 0
    with pika.BlockingConnection(parameters) as connection:
        channel: Any = connection.channel()
        for _method, properties, body in channel.consume(queue, auto_ack=True):
            if body == END:
                return
            yield properties, body


def judge(came: Iterator[tuple[Any, bytes]], count: int) -> dict[str, Any]:
    rows = flights(count)
    seen = bytearray(count)
    last: dict[str, int] = {}
    found = {"flights": 0, "damaged": 0, "out of order": 0, "sent again": 0, "twice": 0, "twice and not marked": 0}
    for properties, body in came:
        number = int(body[:7])
        is_marked = bool((properties.headers or {}).get(REPUBLISHED))
        found["sent again"] += is_marked
        if body != rows[number]:
            found["damaged"] += 1
        elif seen[number]:
            found["twice"] += 1
            found["twice and not marked"] += not is_marked
        else:
            seen[number] = 1
            found["flights"] += 1
            origin = origin_of(body)
            found["out of order"] += number <= last.get(origin, -1)
            last[origin] = number
    return found


if __name__ == "__main__":
    url, queue, count = sys.argv[1:]
    print("ready", flush=True)
    print(json.dumps(judge(deliveries(url, queue), int(count))), flush=True)
