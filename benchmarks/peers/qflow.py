"""Ours, with its defaults: message ids and mandatory on."""

from __future__ import annotations

import threading

from benchmarks.peers.base import Job, Stopwatch, Timing
from qflow_client import Producer

__all__ = ["EightThreads", "OneThread"]


class OneThread:
    """`Producer.send` from one thread; a flush at the end raises if a message is not confirmed."""

    title = "qflow_client.Producer"
    distribution = ""
    threads = 1

    def run(self, job: Job) -> Timing:
        producer = Producer(job.url, routing_key=job.queue, capacity=job.window, confirms=job.confirmed)
        with producer:
            send, body = producer.send, job.body

            def work(count: int) -> None:
                for _ in range(count):
                    send(body)

            shares = [job.count // self.threads + (at < job.count % self.threads) for at in range(self.threads)]
            watch = Stopwatch()
            if self.threads == 1:
                work(job.count)
            else:
                threads = [threading.Thread(target=work, args=(share,)) for share in shares]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            producer.flush()
            if job.confirmed:
                return watch.stop()
        return watch.stop()


class EightThreads(OneThread):
    """One producer, shared by eight threads."""

    title = "qflow_client.Producer, 8 threads"
    threads = 8
