"""A program that consumes the flights from a queue, and prints whether they are complete and in order.

``python -m tests.interop.flights.consumer URL QUEUE COUNT`` consumes messages until the body is ``end``. The program
prints ``ready``, and then numbers as JSON. They count the flights among the first COUNT that came, were damaged, were
out of order for their airport, came more than once, or had the mark of a second copy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
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


def judge(came: Iterator[tuple[Any, bytes]], rows: Sequence[bytes]) -> dict[str, Any]:
    """Compare the messages that came with the flights that were sent.

    At most one copy of each flight may be unmarked. The unmarked copy need not come first, because a broker may read
    bytes of a cut connection from a buffer after it has read bytes of the next connection.
    """
    came_before = bytearray(len(rows))
    came_unmarked = bytearray(len(rows))
    last: dict[str, int] = {}
    found = {"flights": 0, "damaged": 0, "out of order": 0, "sent again": 0, "twice": 0, "twice and not marked": 0}
    for properties, body in came:
        number = int(body[:7])
        is_marked = bool((properties.headers or {}).get(REPUBLISHED))
        found["sent again"] += is_marked
        if body != rows[number]:
            found["damaged"] += 1
            continue
        found["twice and not marked"] += came_unmarked[number] and not is_marked
        came_unmarked[number] |= not is_marked
        if came_before[number]:
            found["twice"] += 1
        else:
            came_before[number] = 1
            found["flights"] += 1
            origin = origin_of(body)
            found["out of order"] += number <= last.get(origin, -1)
            last[origin] = number
    return found


if __name__ == "__main__":
    url, queue, count = sys.argv[1:]
    print("ready", flush=True)
    print(json.dumps(judge(deliveries(url, queue), flights(int(count)))), flush=True)
