"""A program that publishes from greenlets, as a Celery worker with the pool gevent does.

The argument of the program is the URL. The program reads lines with "going", "stopped" or "waiting". For each line it
waits until all channels are unflowed ("going") or flowed, publishes messages from five greenlets at the same time, and
prints the results and the duration. For "waiting", the greenlets wait long, and the program first prints "waiting".
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
# Seconds that the main greenlet sleeps between two runs.
TURN = 0.01
# Maximum seconds of a wait that must succeed. For channels that stay flowed, the setting is shorter.
PATIENCE = 20.0


def publish(producer: Any, timeout: float | None) -> str:
    try:
        producer.publish("message", routing_key="q", timeout=timeout, confirm_timeout=PATIENCE)
    except Exception as error:
        return type(error.__cause__ or error).__name__
    return "sent"


def main() -> None:
    producers = [Connection(sys.argv[1], transport_options={"confirm_publish": True}).Producer() for _ in range(COUNT)]
    for line in gevent.fileobject.FileObject(sys.stdin.buffer, "rb"):
        while any(producer.channel.flow_state.flowed is (line == b"going\n") for producer in producers):
            gevent.sleep(TURN)
        began = time.monotonic()
        timeout = None if line == b"stopped\n" else PATIENCE
        jobs = [gevent.spawn(publish, producer, timeout) for producer in producers]
        if line == b"waiting\n":
            for _ in range(10):
                gevent.sleep(TURN)
            assert not any(job.ready() for job in jobs)
            print(json.dumps("waiting"), flush=True)
        gevent.joinall(jobs)
        print(json.dumps([[job.value for job in jobs], time.monotonic() - began]), flush=True)


main()
