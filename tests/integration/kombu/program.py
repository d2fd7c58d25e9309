"""An ordinary Celery application, which does not mention qflow_client, because the URL selects the transport."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import billiard.pool
from celery import Celery
from kombu.exceptions import OperationalError

# Before its end, a child of a prefork worker waits until the parent has read all results, for up to 300 times this
# number of seconds. A parent that also ends may not read them.
billiard.pool.GUARANTEE_MESSAGE_CONSUMPTION_RETRY_INTERVAL = 0.01

#: Name of the application. Two applications on one broker have different names.
NAME = os.environ.get("PROGRAM_NAME", "program")
FOLDER = Path(os.environ.get("PROGRAM_FOLDER", "."))

app = Celery(
    NAME,
    broker=os.environ.get("PROGRAM_BROKER", "memory://"),
    backend=os.environ.get("PROGRAM_RESULTS", "rpc://"),
)
app.conf.update(
    task_default_queue=NAME,
    control_exchange=f"{NAME}-control",
    event_exchange=f"{NAME}-events",
    broker_connection_retry_on_startup=True,
    broker_transport_options={"confirm_publish": True},
    task_send_sent_event=True,
    worker_send_task_events=True,
    result_chord_retry_interval=0.1,
    beat_schedule={"tick": {"task": f"{NAME}.tick", "schedule": 0.2}},
    beat_schedule_filename=str(FOLDER / "schedule"),
    # The queues of a worker must not stay after its end.
    control_queue_expires=60.0,
    event_queue_expires=60.0,
)


@app.task(name=f"{NAME}.add")
def add(one: int, other: int) -> int:
    return one + other


@app.task(name=f"{NAME}.total")
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(name=f"{NAME}.third_time", bind=True, max_retries=5)
def third_time(self: Any) -> int:
    if self.request.retries < 2:
        raise self.retry(countdown=0.1)
    return int(self.request.retries)


@app.task(name=f"{NAME}.spread")
def spread(count: int) -> list[str]:
    """Publish messages from within a task."""
    return [add.delay(number, number).id for number in range(count)]


@contextmanager
def confirms_may_be_late() -> Iterator[None]:
    """Ignore the error of a missing confirm, because the broker may be late."""
    try:
        yield
    except OperationalError as error:
        if type(error.__cause__).__name__ != "ConfirmTimeout":
            raise


@app.task(name=f"{NAME}.until_it_raises")
def until_it_raises(wait: float) -> tuple[str, float]:
    """Publish from within a task until a call raises. Return the type of the cause, and the seconds of this call."""
    # Do not use `timeout=`, because it does not limit the event that Celery publishes in the same call.
    with app.connection(transport_options={"max_producer_flow_control_wait": wait}) as connection:
        producer = app.amqp.Producer(connection, auto_declare=False)
        while True:
            began = time.monotonic()
            try:
                with confirms_may_be_late():
                    add.apply_async((1, 1), producer=producer, queue=f"{NAME}-unread")
            except OperationalError as error:
                return type(error.__cause__).__name__, time.monotonic() - began


@app.task(name=f"{NAME}.note")
def note(count: int) -> None:
    """Publish messages from within a task, and write the ids of the confirmed messages to a file."""
    with (FOLDER / "confirmed").open("a", buffering=1) as confirmed:
        for number in range(count):
            with confirms_may_be_late():
                confirmed.write(f"{add.delay(number, number).id}\n")


@app.task(name=f"{NAME}.tick", ignore_result=True)
def tick() -> None:
    with (FOLDER / "ticks").open("a") as ticks:
        ticks.write("tick\n")
