"""pika's thread-safe `Connection`, new in version 1.5.

One process cannot have two releases of a library. If the installed pika is older, `QFLOW_BENCH_PIKA_NEXT` has the path
of a Python with the new release.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from typing import Any

import pika

from benchmarks.peers.base import MESSAGE_ID, Job, Stopwatch, Timing

__all__ = ["ThreadSafe"]


class ThreadSafe:
    """Publishes from one thread. A semaphore limits the window, and each confirm releases it."""

    title = "pika 1.5 Connection"
    distribution = "pika"
    varies = False

    def __init__(self) -> None:
        self._python = os.environ.get("QFLOW_BENCH_PIKA_NEXT")
        if self._python is None and not hasattr(pika, "Connection"):
            raise ModuleNotFoundError("pika 1.5 is not installed", name="pika 1.5")

    def run(self, job: Job) -> Timing:
        if self._python is None:
            return publish(job)
        values = json.dumps(asdict(replace(job, body=b"")) | {"body": len(job.body)})
        done = subprocess.run(
            [self._python, "-m", "benchmarks.peers.pika_next"],
            input=values,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return Timing(**json.loads(done.stdout))


def publish(job: Job) -> Timing:
    """Run the job in this process."""
    # The type stubs belong to an older release and do not have this class.
    connection_type: Any = pika.Connection  # type: ignore[attr-defined]
    connection = connection_type(pika.URLParameters(job.url))
    try:
        channel = connection.channel()
        room = threading.Semaphore(job.window)
        confirmed = 0
        refused: list[str] = []
        done = threading.Event()

        def answered(frame: Any) -> None:
            nonlocal confirmed
            method = frame.method
            if method.NAME != "Basic.Ack":
                refused.append(method.NAME)
            before, confirmed = confirmed, method.delivery_tag if method.multiple else confirmed + 1
            room.release(confirmed - before)
            if confirmed >= job.count:
                done.set()

        if job.confirmed:
            channel.confirm_delivery(answered)
        properties = pika.BasicProperties(delivery_mode=2, message_id=MESSAGE_ID % 1)
        watch = Stopwatch()
        for _ in range(job.count):
            if job.confirmed:
                room.acquire()
            channel.basic_publish("", job.queue, job.body, properties, mandatory=True)
        if not job.confirmed:
            channel.close()
        elif not done.wait(60):
            raise TimeoutError(f"{confirmed} of {job.count} messages were confirmed within 60 s")
        if refused:
            raise ConnectionError(f"the broker did not confirm a message, but answered {refused[0]}")
        return watch.stop()
    finally:
        connection.close()


if __name__ == "__main__":
    given = json.load(sys.stdin)
    print(json.dumps(asdict(publish(Job(**(given | {"body": b"x" * given["body"]}))))))
