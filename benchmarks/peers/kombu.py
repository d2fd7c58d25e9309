"""kombu on py-amqp, as Celery publishes."""

from __future__ import annotations

from kombu import Connection

from benchmarks.peers.base import MESSAGE_ID, Job, Stopwatch, Timing, one_by_one

__all__ = ["OneByOne"]


class OneByOne:
    """`Producer.publish` with the transport's ``confirm_publish``."""

    title = "kombu, one by one"
    distribution = "kombu"
    varies = False

    def run(self, job: Job) -> Timing:
        with Connection(job.url, transport_options={"confirm_publish": job.confirmed}) as connection:
            channel = connection.channel()
            producer = connection.Producer(channel, auto_declare=False)
            publish, queue, body, message_id = producer.publish, job.queue, job.body, MESSAGE_ID % 1
            watch = Stopwatch()
            latencies = one_by_one(
                job,
                lambda: publish(
                    body,
                    routing_key=queue,
                    delivery_mode=2,
                    mandatory=True,
                    content_type="application/octet-stream",
                    content_encoding="binary",
                    message_id=message_id,
                ),
            )
            if not job.confirmed:
                channel.close()
            return watch.stop(latencies)
