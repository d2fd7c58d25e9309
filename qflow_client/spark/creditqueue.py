"""Credits in a queue of the broker: what the driver looks after, and what a task takes and gives back (C6).

A credit that a task holds is a delivery that is not acknowledged, so a task that is killed gives it back by itself. It
is on the connection that the task publishes on: what ends the one ends the other.

Beside the queue of credits there is one with ``.tasks`` behind its name. It never holds a message; each task consumes
it, so that its consumers are the tasks that may hold credits. It is declared when the credits are there, so where it is
missing they have not been issued. A queue with ``.lock`` behind the name exists while a driver looks at the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import uuid4

import pika

from qflow_client import connect
from qflow_client.errors import ConnectionFailed
from qflow_client.events import HoldKind
from qflow_client.settings import ProducerSettings
from qflow_client.skin import GOOD_BYE, none_of
from qflow_client.spark.credits import Credit, CreditError, Purse, issue, number_of_credits
from qflow_client.sync import Producer

__all__ = ["CreditLine", "prepare"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_CLASSIC = {"x-queue-type": "classic"}

# Reply codes.
_NOT_FOUND = 404
_LOCKED = 405

# Seconds between two looks at what is settled while credits are held, and at the longest while none are.
_LOOK = 0.005
_REST = 1.0
# Seconds between two looks at a queue that has what it should not.
_PAUSE = 0.05
# Seconds without a credit after which a task asks whether there are any.
_PATIENCE = 5.0
# The source of the hold of a task that has no credit.
_SOURCE = "credits"


def _connect(settings: ProducerSettings, *, blocked: float | None = None) -> pika.BlockingConnection:
    """Connect to the first of the hosts that can be connected to.

    Args:
        settings: of the job, or the task.
        blocked: seconds that the broker may keep it blocked; ``None`` for no limit.
    """
    errors = []
    for url in settings.urls:
        parameters = pika.URLParameters(url)
        parameters.blocked_connection_timeout = blocked
        try:
            return connect(
                parameters, timeout=settings.connect_timeout, client_properties={"connection_name": settings.name}
            )
        except ConnectionFailed as error:
            errors.append(error)
    raise none_of(errors)


def _count(connection: pika.BlockingConnection, queue: str) -> tuple[int, int] | None:
    """How many messages of a queue are ready, and how many consumers it has; ``None`` if there is no such queue."""
    channel = connection.channel()
    try:
        found = channel.queue_declare(queue, passive=True).method
    except pika.exceptions.ChannelClosedByBroker as error:
        if error.reply_code == _NOT_FOUND:
            return None
        raise
    channel.close()
    return int(found.message_count), int(found.consumer_count)


def _no_credit(queue: str, body: bytes) -> CreditError:
    return CreditError(
        f"queue {queue!r} holds a message that is no credit ({body[:60]!r}): name a queue in creditQueue that nothing "
        "else uses"
    )


def _way_out(queue: str) -> str:
    return f"when no job uses it, delete the queues {queue!r} and '{queue}.tasks', and the next job makes them anew"


def _check(credit: Credit | None, body: bytes, queue: str, capacity: int) -> Credit:
    """Refuse what is no credit of this capacity."""
    if credit is None:
        raise _no_credit(queue, body)
    if credit.capacity != capacity:
        raise CreditError(
            f"capacity={capacity}: the credits in queue {queue!r} are of a capacity of {credit.capacity}; say "
            f"capacity={credit.capacity}, or name another queue in creditQueue, or, {_way_out(queue)}"
        )
    return credit


def _capacity_of(settings: ProducerSettings) -> int:
    assert isinstance(settings.capacity, int), "the options have been looked at"
    return settings.capacity


# On the driver.


def prepare(settings: ProducerSettings, queue: str) -> None:
    """See to it that a queue holds the credits of a job: issue them if it is new, and look whether they are all there.

    Args:
        settings: of the job; its capacity is that of the credits.
        queue: its name.

    Raises:
        CreditError: the credits are of another capacity, or lost, or too many, or it is another kind of queue.
        ConnectionFailed: the broker cannot be reached, or refuses.
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
    """While no other driver looks at the same queue."""
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
    """Put the credits into a queue into which nobody has."""
    tasks = _count(connection, f"{queue}.tasks")
    if tasks is not None:
        if _count(connection, queue) is not None:
            return
        if tasks[1]:
            raise CreditError(
                f"the queue of credits {queue!r} was deleted, and {tasks[1]} tasks still send by what they had of it; "
                "wait for their end"
            )
    found = _count(connection, queue)
    channel = connection.channel()
    if found is None:
        # Not of the kind that drops a message which has come back often.
        channel.queue_declare(queue, durable=True, arguments=_CLASSIC)
    if found is not None and found[0]:
        # A driver died when it had issued them, or they are somebody else's.
        _look_at_one(connection, queue, capacity)
    else:
        # All or none, whatever happens to this process.
        channel.tx_select()
        properties = pika.BasicProperties(content_type="application/json", delivery_mode=2)
        for credit in issue(uuid4().hex, capacity):
            channel.basic_publish("", queue, credit.encode(), properties)
        channel.tx_commit()
        logger.info("queue %r has the credits of a capacity of %d", queue, capacity)
    channel.queue_declare(f"{queue}.tasks", durable=True, arguments=_CLASSIC)
    channel.close()


def _look_through(connection: pika.BlockingConnection, queue: str, capacity: int, patience: float) -> None:
    """Look whether the credits are right, as far as they are in the queue."""
    due = number_of_credits(capacity)
    deadline = time.monotonic() + patience
    while True:
        _look_at_one(connection, queue, capacity)
        _, tasks = _count(connection, f"{queue}.tasks") or (0, 0)
        ready, _ = _count(connection, queue) or (0, 0)
        if ready == due or (tasks and ready < due):
            return
        # Those of tasks that have just been killed come back in a moment.
        if ready > due or time.monotonic() >= deadline:
            raise _wrong_number(queue, ready, due, capacity)
        connection.sleep(_PAUSE)


def _look_at_one(connection: pika.BlockingConnection, queue: str, capacity: int) -> None:
    channel = connection.channel()
    _, _, body = channel.basic_get(queue)
    # Closing it gives the message back.
    channel.close()
    if body is not None:
        _check(Credit.decode(body), body, queue, capacity)


def _wrong_number(queue: str, ready: int, due: int, capacity: int) -> CreditError:
    return CreditError(
        f"queue {queue!r} holds {ready} credits, no task holds any, and a capacity of {capacity} has {due}: the queue "
        f"was purged, or something else consumed or published there; {_way_out(queue)}"
    )


# In a task.


class CreditLine:
    """Takes credits for one task and gives them back, on a thread of its own; holds its producer meanwhile.

    A context manager. Leaving it ends the connection, which gives back what is held.

    Args:
        settings: of the task.
        queue: of the credits.

    Raises:
        CreditError: the queue does not exist.
        ConnectionFailed: the broker cannot be reached.
    """

    def __init__(self, settings: ProducerSettings, queue: str) -> None:
        self._queue = queue
        self._capacity = _capacity_of(settings)
        # Messages sent, and how many there will be when the rows in hand are; set by the task's thread.
        self._sent = self._goal = 0
        self._purse = Purse()
        # The numbers of the credits in it, by their tags, and the set that they are of, once one has come.
        self._numbers: dict[int, int] = {}
        self._pool: str | None = None
        # What the producer's window is now; 0 if it is held.
        self._window = 0
        # None while it consumes no credits.
        self._consumer_tag: str | None = None
        # When it last had a credit, or asked where they are, and whether all were missing then.
        self._since = time.monotonic()
        self._missed = False
        # What ended it, if that was not the connection.
        self._error: Exception | None = None
        self._stopping = False
        # It belongs to the thread, once that runs.
        self._connection = _connect(settings)
        try:
            self._channel = self._open()
            #: The task's.
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
                f"queue '{self._queue}.tasks' cannot be consumed: {error.reply_code} {error.reply_text}; it was there "
                "when the job was planned"
            ) from error
        return channel

    # The task's thread.

    def use(self, rows: Iterator[_T], count: int) -> Iterator[_T]:
        """Pass on rows, of which each is sent before the next is asked for, and have credits for them.

        Args:
            rows: them.
            count: how many they are.
        """
        self._goal = self._sent + count
        # A connection that has ended is found out by the producer.
        with suppress(pika.exceptions.ConnectionWrongStateError):
            self._connection.add_callback_threadsafe(_nothing)
        for row in rows:
            yield row
            self._sent += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping = True
        with suppress(pika.exceptions.ConnectionWrongStateError):
            self._connection.add_callback_threadsafe(_nothing)
        self._thread.join(GOOD_BYE)
        # Of what is confirmed nothing need be told; otherwise it is what comes first.
        if self._error is not None and exc is not None:
            raise self._error from exc

    # Its own.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
                self._connection.process_data_events(_LOOK if len(self._purse) else _REST)
                if not self._channel.is_open:
                    raise pika.exceptions.ChannelWrongStateError("Channel is closed.")
        except pika.exceptions.AMQPError as error:
            # With its connection the producer ends by itself, and says why.
            if self._connection.is_open:
                self._error = CreditError(
                    f"the channel on which the credits of queue {self._queue!r} are held was closed: {error!r}"
                )
        except Exception as error:
            self._error = error
        finally:
            # Without credits nothing may be sent, and so the producer ends with it.
            with suppress(pika.exceptions.AMQPError):
                self._connection.close()

    def _turn(self) -> None:
        purse, producer = self._purse, self.producer
        sent = self._sent
        purse.plan(sent, producer.unsettled, self._goal - sent)
        self._set_window(purse.window)
        if purse.wants and self._consumer_tag is None:
            # One more than there are, so that one too many is found out.
            self._channel.basic_qos(prefetch_count=number_of_credits(self._capacity) + 1)
            self._consumer_tag = self._channel.basic_consume(self._queue, self._take)
        elif self._consumer_tag is not None and not purse.wants:
            # pika gives back what comes meanwhile.
            self._channel.basic_cancel(self._consumer_tag)
            self._consumer_tag = None
        tags = purse.release(producer.unsettled)
        if tags:
            # They are the oldest that there are.
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
        self.producer.hold(HoldKind.CAPACITY, source=_SOURCE, detail=f"no credit of queue {self._queue!r}")

    def _take(self, channel: Any, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
        credit = _check(Credit.decode(body), body, self._queue, self._capacity)
        self._pool = self._pool or credit.pool
        if credit.pool != self._pool or credit.number in self._numbers.values():
            raise CreditError(
                f"queue {self._queue!r} holds more credits than the capacity of {self._capacity} has: some were issued "
                f"twice; {_way_out(self._queue)}"
            )
        self._numbers[method.delivery_tag] = credit.number
        self._purse.grant(method.delivery_tag, credit.units, self._sent)

    def _cancelled(self, method: Any) -> None:
        raise CreditError(f"the queue of credits {self._queue!r}, or '{self._queue}.tasks', was deleted")

    def _ask(self) -> None:
        """Where are the credits? Found missing twice, they are lost: on their way they are not so long."""
        self._since = time.monotonic()
        ready, _ = _count(self._connection, self._queue) or (0, 0)
        _, tasks = _count(self._connection, f"{self._queue}.tasks") or (0, 0)
        missing = tasks == 1 and not ready and not len(self._purse)
        if missing and self._missed:
            due = number_of_credits(self._capacity)
            raise _wrong_number(self._queue, 0, due, self._capacity)
        self._missed = missing
        logger.info("a task waits for credits of queue %r: %d are ready, %d tasks take some", self._queue, ready, tasks)


def _ignore(*_: object) -> None:
    """Nothing comes from there."""


def _nothing() -> None:
    """What wakes the thread."""
