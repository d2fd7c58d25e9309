"""Keeps the credits of a job in a queue of the broker (C6). The driver publishes the credits, and the tasks use them.

Each credit is a message (see `credits.py`). A task has a credit as long as it does not acknowledge the message. So if a
task is killed, its credits return to the queue. A task receives credits and publishes on the same connection. So a task
that loses its credits with this connection cannot publish.

Two more queues have the name of the credit queue plus a suffix. The queue ``.tasks`` never has messages. Each task that
may have credits consumes from ``.tasks``, so the number of its consumers is the number of these tasks. If ``.tasks``
exists, the credits were published. The queue ``.lock`` exists while a driver checks the other two queues.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self, TypeVar
from uuid import uuid4

import pika

from qflow_client import connect
from qflow_client.errors import ConnectionFailed
from qflow_client.events import HoldKind
from qflow_client.settings import ProducerSettings
from qflow_client.skin import GOOD_BYE
from qflow_client.spark.credits import Credit, CreditError, Purse, issue, number_of_credits
from qflow_client.spark.intake import connect_first
from qflow_client.sync import Producer

__all__ = ["CreditLine", "prepare"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_CLASSIC = {"x-queue-type": "classic"}

_NOT_FOUND = 404
_LOCKED = 405

# Maximum seconds between two calls of `CreditLine._turn`: while the task has credits, and while it has none.
_CHECK_PERIOD = 0.005
_IDLE_PERIOD = 1.0
# Seconds until the driver tries again to lock the queue, or to find the right number of credits.
_PAUSE = 0.05
# If a task gets no credit for this number of seconds, the task checks whether credits exist.
_PATIENCE = 5.0
# Source of the hold that a task's producer has while the task has no credits.
_SOURCE = "credits"


def _connect(settings: ProducerSettings, *, blocked: float | None = None) -> pika.BlockingConnection:
    """Connect to a broker. If the broker blocks the connection for `blocked` seconds, pika closes the connection."""

    def opened(parameters: pika.URLParameters) -> pika.BlockingConnection:
        parameters.blocked_connection_timeout = blocked
        return connect(parameters, client_properties={"connection_name": settings.name})

    return connect_first(settings.urls, settings.connect_timeout, opened)


def _count(connection: pika.BlockingConnection, queue: str) -> tuple[int, int] | None:
    """Return the number of ready messages and the number of consumers, or ``None`` if the queue does not exist."""
    channel = connection.channel()
    try:
        found = channel.queue_declare(queue, passive=True).method
    except pika.exceptions.ChannelClosedByBroker as error:
        if error.reply_code == _NOT_FOUND:
            return None
        raise
    channel.close()
    return int(found.message_count), int(found.consumer_count)


def _way_out(queue: str) -> str:
    return f"when no job uses them, delete the queues {queue!r} and '{queue}.tasks'; the next job makes them again"


def _check(body: bytes, queue: str, capacity: int) -> Credit:
    """Return the credit. Raise `CreditError` if `body` is no credit, or the credit is for another capacity."""
    credit = Credit.decode(body)
    if credit is None:
        raise CreditError(
            f"queue {queue!r} contains a message that is not a credit ({body[:60]!r}): name a queue in creditQueue "
            "that nothing else uses"
        )
    if credit.capacity != capacity:
        raise CreditError(
            f"capacity={capacity}: the credits in queue {queue!r} are for a capacity of {credit.capacity}; set "
            f"capacity={credit.capacity}, or name another queue in creditQueue, or, {_way_out(queue)}"
        )
    return credit


def _capacity_of(settings: ProducerSettings) -> int:
    assert isinstance(settings.capacity, int), "the options were checked"
    return settings.capacity


def prepare(settings: ProducerSettings, queue: str) -> None:
    """On the driver, publish the credits of a job if the queue is new, and check the credits.

    Raises:
        CreditError: the queue has credits for another capacity, too few or too many credits, or other messages.
        ConnectionFailed: the broker cannot be reached, or refuses a request.
    """
    patience = settings.connect_timeout
    capacity = _capacity_of(settings)
    connection = _connect(settings, blocked=patience)
    try:
        with _alone(connection, queue, patience):
            _issue_once(connection, queue, capacity)
            _look_through(connection, queue, capacity, patience)
    except pika.exceptions.AMQPError as error:
        raise ConnectionFailed(f"creditQueue={queue!r}: {error!r}") from error
    finally:
        if connection.is_open:
            connection.close()


@contextmanager
def _alone(connection: pika.BlockingConnection, queue: str, patience: float) -> Iterator[None]:
    """Let only one driver at a time execute the ``with`` block for a queue of credits."""
    lock = f"{queue}.lock"
    deadline = time.monotonic() + patience
    while True:
        channel = connection.channel()
        try:
            channel.queue_declare(lock, exclusive=True)
            break
        except pika.exceptions.ChannelClosedByBroker as error:
            if error.reply_code != _LOCKED or time.monotonic() >= deadline:
                raise
        connection.sleep(_PAUSE)
    yield
    channel.queue_delete(lock)


def _issue_once(connection: pika.BlockingConnection, queue: str, capacity: int) -> None:
    """Publish the credits, unless they were published before."""
    tasks = _count(connection, f"{queue}.tasks")
    if tasks is not None:
        if _count(connection, queue) is not None:
            return
        if tasks[1]:
            raise CreditError(
                f"the queue of credits {queue!r} was deleted, but {tasks[1]} tasks still send with credits from it; "
                "wait until they end"
            )
    found = _count(connection, queue)
    channel = connection.channel()
    if found is None:
        # Use a classic queue, because a quorum queue may drop a message that was returned many times.
        channel.queue_declare(queue, durable=True, arguments=_CLASSIC)
    if found is not None and found[0]:
        # A driver may have published these credits, and ended before it declared the queue ``.tasks``. Check one.
        _look_at_one(connection, queue, capacity)
    else:
        # Use a transaction, so that either all credits or no credits are published if this process is killed.
        channel.tx_select()
        properties = pika.BasicProperties(content_type="application/json", delivery_mode=2)
        for credit in issue(uuid4().hex, capacity):
            channel.basic_publish("", queue, credit.encode(), properties)
        channel.tx_commit()
        logger.info("queue %r has new credits for a capacity of %d", queue, capacity)
    channel.queue_declare(f"{queue}.tasks", durable=True, arguments=_CLASSIC)
    channel.close()


def _look_through(connection: pika.BlockingConnection, queue: str, capacity: int, patience: float) -> None:
    """Check the first credit in the queue, and the number of credits."""
    due = number_of_credits(capacity)
    deadline = time.monotonic() + patience
    while True:
        _look_at_one(connection, queue, capacity)
        _, tasks = _count(connection, f"{queue}.tasks") or (0, 0)
        ready, _ = _count(connection, queue) or (0, 0)
        if ready == due or (tasks and ready < due):
            return
        # The credits of tasks that have just been killed return after a moment. So too few credits may be temporary.
        if ready > due or time.monotonic() >= deadline:
            raise _wrong_number(queue, ready, due, capacity)
        connection.sleep(_PAUSE)


def _look_at_one(connection: pika.BlockingConnection, queue: str, capacity: int) -> None:
    channel = connection.channel()
    _, _, body = channel.basic_get(queue)
    # Closing the channel returns the message to the queue.
    channel.close()
    if body is not None:
        _check(body, queue, capacity)


def _wrong_number(queue: str, ready: int, due: int, capacity: int) -> CreditError:
    return CreditError(
        f"queue {queue!r} has {ready} credits, no task has any, and a capacity of {capacity} needs {due}: the queue "
        f"was purged, or another program consumed or published there; {_way_out(queue)}"
    )


class CreditLine:
    """Takes credits for one task from the queue and returns them to the queue, on a separate thread.

    While the task has no credits, the task's producer has the hold ``capacity``.

    At the end of its ``with`` block a `CreditLine` closes the connection, so all credits return to the queue.

    Raises:
        CreditError: the queue ``.tasks`` does not exist, or cannot be consumed.
        ConnectionFailed: the broker cannot be reached.
    """

    def __init__(self, settings: ProducerSettings, queue: str) -> None:
        self._queue = queue
        self._capacity = _capacity_of(settings)
        # Number of messages sent so far, and the number after the current `use`. The task's thread sets both.
        self._sent = self._goal = 0
        self._purse = Purse()
        # Maps the delivery tag of each credit of the task to the number of the credit.
        self._numbers: dict[int, int] = {}
        # `Credit.pool` of the first credit, which all other credits must have; ``None`` before the first credit.
        self._pool: str | None = None
        # Maximum number of unsettled messages of the producer; 0 while the producer is held for lack of credits.
        self._window = 0
        # Tag of the consumer of credits; None if there is no consumer.
        self._consumer_tag: str | None = None
        # Monotonic time at which the task last had credits, needed no credits, or called `_ask`.
        self._since = time.monotonic()
        # Whether all credits were missing in the last call of `_ask`.
        self._missed = False
        # The error that ended the thread; None for a lost connection, which the producer reports.
        self._error: Exception | None = None
        self._stopping = False
        # After the thread has started, other threads only call the connection's `add_callback_threadsafe`.
        self._connection = _connect(settings)
        try:
            self._channel = self._open()
            self.producer = Producer(connection=self._connection, settings=settings)
        except BaseException:
            self._connection.close()
            raise
        self._hold()
        self._thread = threading.Thread(target=self._run, name=f"qflow-credits {queue}", daemon=True)
        self._thread.start()

    def _open(self) -> Any:
        channel = self._connection.channel()
        channel.add_on_cancel_callback(self._cancelled)
        try:
            channel.basic_consume(f"{self._queue}.tasks", _ignore)
        except pika.exceptions.ChannelClosedByBroker as error:
            raise CreditError(
                f"queue '{self._queue}.tasks' cannot be consumed: {error.reply_code} {error.reply_text}; it "
                "existed when the job was planned"
            ) from error
        return channel

    # Called on the task's thread.

    def use(self, rows: Iterator[_T], count: int) -> Iterator[_T]:
        """Yield `count` rows, and take credits for them. The caller sends each row before it requests the next row."""
        self._goal = self._sent + count
        # Wake the thread, which takes credits. If the connection has ended, the producer reports that.
        with suppress(pika.exceptions.ConnectionWrongStateError):
            self._connection.add_callback_threadsafe(_nothing)
        for row in rows:
            yield row
            self._sent += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, exc: BaseException | None, _traceback: object) -> None:
        self._stopping = True
        with suppress(pika.exceptions.ConnectionWrongStateError):
            self._connection.add_callback_threadsafe(_nothing)
        self._thread.join(GOOD_BYE)
        # If the ``with`` block succeeded, all messages are confirmed, and an error of the thread does not matter.
        if self._error is not None and exc is not None:
            raise self._error from exc

    # Called on the separate thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
                self._connection.process_data_events(_CHECK_PERIOD if len(self._purse) else _IDLE_PERIOD)
                if not self._channel.is_open:
                    raise pika.exceptions.ChannelWrongStateError("Channel is closed.")
        except pika.exceptions.AMQPError as error:
            # If the whole connection has ended, the producer reports the loss.
            if self._connection.is_open:
                self._error = CreditError(
                    f"the channel with the credits from queue {self._queue!r} was closed: {error!r}"
                )
        except Exception as error:
            self._error = error
        finally:
            # This thread takes no more credits, so the task must not send. Closing the connection ends the producer.
            with suppress(pika.exceptions.AMQPError):
                self._connection.close()

    def _turn(self) -> None:
        purse, producer = self._purse, self.producer
        sent = self._sent
        purse.plan(sent, producer.unsettled, self._goal - sent)
        self._set_window(purse.window)
        if purse.wants and self._consumer_tag is None:
            # Allow one delivery more than there are credits, so that an excess credit is detected.
            self._channel.basic_qos(prefetch_count=number_of_credits(self._capacity) + 1)
            self._consumer_tag = self._channel.basic_consume(self._queue, self._take)
        elif self._consumer_tag is not None and not purse.wants:
            # pika rejects credits that arrive before ``Basic.Cancel-Ok``, so these credits return to the queue.
            self._channel.basic_cancel(self._consumer_tag)
            self._consumer_tag = None
        tags = purse.release(producer.unsettled)
        if tags:
            # The tags belong to the oldest deliveries, so one nack with `multiple` covers them.
            self._channel.basic_nack(tags[-1], multiple=True, requeue=True)
            for tag in tags:
                del self._numbers[tag]
        if len(purse) or not purse.wants:
            self._since, self._missed = time.monotonic(), False
        elif time.monotonic() >= self._since + _PATIENCE:
            self._ask()

    def _set_window(self, window: int) -> None:
        if window == self._window:
            return
        self._window = window
        if window:
            self.producer.capacity = window
            self.producer.lift(HoldKind.CAPACITY, source=_SOURCE)
        else:
            self._hold()

    def _hold(self) -> None:
        self.producer.hold(HoldKind.CAPACITY, source=_SOURCE, detail=f"no credit from queue {self._queue!r}")

    def _take(self, channel: Any, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
        credit = _check(body, self._queue, self._capacity)
        self._pool = self._pool or credit.pool
        if credit.pool != self._pool or credit.number in self._numbers.values():
            raise CreditError(
                f"queue {self._queue!r} has more credits than a capacity of {self._capacity} needs: some were issued "
                f"twice; {_way_out(self._queue)}"
            )
        self._numbers[method.delivery_tag] = credit.number
        self._purse.grant(method.delivery_tag, credit.units, self._sent)

    def _cancelled(self, method: Any) -> None:
        raise CreditError(f"the queue of credits {self._queue!r}, or '{self._queue}.tasks', was deleted")

    def _ask(self) -> None:
        """Raise an error if the credits are gone. Otherwise log the number of credits and tasks.

        A credit that is on its way to the queue arrives before the next check. So the credits are gone only if two
        checks in a row find no other task, and no credit in the queue or in this task.
        """
        self._since = time.monotonic()
        ready, _ = _count(self._connection, self._queue) or (0, 0)
        _, tasks = _count(self._connection, f"{self._queue}.tasks") or (0, 0)
        missing = tasks == 1 and not ready and not len(self._purse)
        if missing and self._missed:
            due = number_of_credits(self._capacity)
            raise _wrong_number(self._queue, 0, due, self._capacity)
        self._missed = missing
        logger.info(
            "a task waits for credits from queue %r: %d credits are ready, and %d tasks use the queue",
            self._queue,
            ready,
            tasks,
        )


def _ignore(*_: object) -> None:
    """Ignore a delivery. The queue ``.tasks`` never has messages."""


def _nothing() -> None:
    """Do nothing. Scheduling this function as a callback wakes the thread."""
