"""A program that publishes from greenlets, as a Celery worker with the pool gevent does.

The argument of the program is the URL. The program reads lines with "stopped" or "going". For each line it waits until
all channels have this state, publishes messages from five greenlets at the same time, and prints the results, the
duration, and how often another greenlet ran.
"""

from __future__ import annotations

from gevent import monkey  # type: ignore[import-untyped]

# Import these modules before the patch, as a worker does.
import qflow_client.kombu
import qflow_client.logs  # noqa: F401

monkey.patch_all()

import json  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from typing import Any  # noqa: E402

import gevent  # noqa: E402
import gevent.fileobject  # type: ignore[import-untyped]  # noqa: E402
from kombu import Connection  # noqa: E402

COUNT = 5
# Seconds that the other greenlet sleeps between two runs.
TURN = 0.01
# Maximum seconds of a wait for a confirm. The maximum wait of a flowed channel is a setting, and shorter.
PATIENCE = 60.0
turns: list[float] = []


def turn() -> None:
    while True:
        began = time.monotonic()
        gevent.sleep(TURN)
        turns.append(time.monotonic() - began)


def publish(producer: Any) -> str:
    try:
        producer.publish("message", routing_key="q", confirm_timeout=PATIENCE)
    except Exception as error:
        return type(error.__cause__ or error).__name__
    return "sent"


def main() -> None:
    gevent.spawn(turn)
    producers = [Connection(sys.argv[1], transport_options={"confirm_publish": True}).Producer() for _ in range(COUNT)]
    for line in gevent.fileobject.FileObject(sys.stdin.buffer, "rb"):
        while any(producer.channel.flow_state.flowed is (line == b"going\n") for producer in producers):
            gevent.sleep(TURN)
        turns.clear()
        began = time.monotonic()
        jobs = [gevent.spawn(publish, producer) for producer in producers]
        gevent.joinall(jobs)
        took = time.monotonic() - began
        print(json.dumps([[job.value for job in jobs], took, len(turns)]), flush=True)


main()
