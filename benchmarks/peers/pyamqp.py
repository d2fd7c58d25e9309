"""py-amqp, which waits for the confirm of each message."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

import amqp

from benchmarks.peers.base import MESSAGE_ID, Job, Stopwatch, Timing, one_by_one

__all__ = ["OneByOne"]


class OneByOne:
    """`Channel.basic_publish` on a connection with ``confirm_publish``."""

    title = "py-amqp, one by one"
    distribution = "amqp"
    varies = False

    def run(self, job: Job) -> Timing:
        url = urlsplit(job.url)
        connection = amqp.Connection(
            f"{url.hostname or 'localhost'}:{url.port or 5672}",
            unquote(url.username or "guest"),
            unquote(url.password or "guest"),
            virtual_host=unquote(url.path[1:]) or "/",
            confirm_publish=job.confirmed,
        )
        with connection:
            channel = connection.channel()
            message = amqp.Message(job.body, delivery_mode=2, message_id=MESSAGE_ID % 1)
            publish, queue = channel.basic_publish, job.queue
            watch = Stopwatch()
            latencies = one_by_one(job, lambda: publish(message, "", queue, mandatory=True))
            if not job.confirmed:
                channel.close()
            return watch.stop(latencies)
