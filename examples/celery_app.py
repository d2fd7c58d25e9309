"""A Celery application under flow control. Only the broker's URL changes, to ``qflow://``.

The example starts its own broker, which stops the producer when the queue is full.
"""

from __future__ import annotations

from celery import Celery
from kombu import Queue
from kombu.exceptions import OperationalError

from qflow_client import FlowControlTimeout
from qflow_client.broker import Broker

with Broker() as broker:
    # Before: broker=broker.url, which is amqp://…
    app = Celery("shop", broker=broker.url.replace("amqp://", "qflow://"))
    app.conf.task_ignore_result = True
    app.conf.task_queues = [Queue("orders", queue_arguments={"qpid.flow_stop_count": 10})]
    app.conf.broker_transport_options = {"confirm_publish": "pipelined", "max_producer_flow_control_wait": 1.0}

    @app.task(name="shop.ship")
    def ship(number: int) -> None:
        """Run by a worker: ``celery -A celery_app worker``."""

    sent = 0
    try:
        while True:
            ship.apply_async((sent,), queue="orders")
            sent += 1
    except OperationalError as error:
        # The task was not sent and will not be sent. A ConfirmTimeout would mean that the outcome is unknown.
        if not isinstance(error.__cause__, FlowControlTimeout):
            raise
        print(f"after {sent} tasks: {error.__cause__}")

    # When a worker takes the tasks, calls continue.
    broker.wait_until(lambda broker: broker.queue("orders").depth == sent)
    broker.purge("orders")
    ship.apply_async((sent,), queue="orders")
    broker.wait_until(lambda broker: broker.queue("orders").depth == 1)
    print("a worker has taken them, and it goes on")
    app.close()
