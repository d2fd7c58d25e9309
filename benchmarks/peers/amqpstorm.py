"""AMQPStorm, which waits for the confirm of each message."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from amqpstorm.connection import Connection

from benchmarks.peers.base import MESSAGE_ID, Job, Stopwatch, Timing, one_by_one

__all__ = ["Storm"]

_PROPERTIES = {"delivery_mode": 2, "message_id": MESSAGE_ID % 1}


class Storm:
    """`Channel.basic.publish` with `confirm_deliveries`."""

    title = "AMQPStorm, one by one"
    distribution = "AMQPStorm"
    varies = False

    def run(self, job: Job) -> Timing:
        url = urlsplit(job.url)
        connection = Connection(
            url.hostname or "localhost",
            unquote(url.username or "guest"),
            unquote(url.password or "guest"),
            port=url.port or 5672,
            virtual_host=unquote(url.path[1:]) or "/",
        )
        try:
            channel = connection.channel()
            if job.confirmed:
                channel.confirm_deliveries()
            publish, queue, body = channel.basic.publish, job.queue, job.body
            watch = Stopwatch()

            def publish_one() -> None:
                if not publish(body, queue, "", _PROPERTIES, mandatory=True) and job.confirmed:
                    raise ConnectionError(f"the broker nacked or returned a message for queue {queue!r}")

            latencies = one_by_one(job, publish_one)
            if not job.confirmed:
                channel.close()
            return watch.stop(latencies)
        finally:
            connection.close()
