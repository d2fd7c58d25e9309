"""AMQPStorm, which waits for the confirm of each message."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from amqpstorm.connection import Connection

from benchmarks.peers.base import MESSAGE_ID, Job, Stopwatch, Timing

__all__ = ["Storm"]

_PROPERTIES = {"delivery_mode": 2, "message_id": MESSAGE_ID % 1}


class Storm:
    """`Channel.basic.publish` with `confirm_deliveries`."""

    title = "AMQPStorm, one by one"
    distribution = "AMQPStorm"

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
            for _ in range(job.count):
                delivered = publish(body, queue, "", _PROPERTIES, mandatory=True)
                if job.confirmed and not delivered:
                    raise ConnectionError("the broker refused a message")
            if not job.confirmed:
                channel.close()
            return watch.stop()
        finally:
            connection.close()
