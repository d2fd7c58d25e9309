"""Tools that the tests of Spark share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import pika

from qflow_client.broker import Broker

#: Number of files of the stream `lines`, and number of rows in each file. Each file is a batch.
FILES, ROWS = 3, 1000

#: Maximum seconds of any wait. On a busy machine, the first job of a session takes minutes.
PATIENCE = 300.0


class SlowConsumer:
    """A context manager that consumes a queue on a separate thread while `may` allows it, and keeps the messages.

    The consumer has no fixed rate, because producers may be slower on another machine. While `may` returns False, the
    consumer acknowledges nothing, and the queue fills.

    Args:
        url: URL of the broker.
        queue: name of the queue.
        may: function that returns whether to consume now. The consumer's thread calls it again and again.
    """

    PREFETCH = 400

    def __init__(self, url: str, queue: str, may: Callable[[], object]) -> None:
        self.bodies: list[bytes] = []
        self.properties: list[pika.BasicProperties] = []
        self._connection = pika.BlockingConnection(pika.URLParameters(url))
        self._channel = self._connection.channel()
        self._channel.basic_qos(prefetch_count=self.PREFETCH)
        self._channel.basic_consume(queue, self._take)
        self._may = may
        self._unacked = self._last_tag = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _take(self, channel: Any, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
        self.bodies.append(body)
        self.properties.append(properties)
        self._unacked += 1
        self._last_tag = method.delivery_tag
        if self._unacked == self.PREFETCH // 2:
            self._ack()

    def _ack(self) -> None:
        # Acknowledge only the messages that `_take` has got, because pika may have received more messages.
        if self._unacked and self._may():
            self._unacked = 0
            self._channel.basic_ack(self._last_tag, multiple=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._connection.process_data_events(0.02)
            self._ack()
        self._connection.close()

    def wait_for(self, count: int, timeout: float = PATIENCE) -> None:
        """Wait until the consumer has got `count` messages."""
        deadline = time.monotonic() + timeout
        while len(self.bodies) < count:
            assert time.monotonic() < deadline, f"{len(self.bodies)} of {count} messages arrived in {timeout} s"
            assert self._thread.is_alive()
            time.sleep(0.01)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)


def when_stopped(broker: Broker, queue: str, times: int = 3) -> Callable[[], bool]:
    """Return a `may` of `SlowConsumer`: True while the queue is ON, and always when the queue was ON `times` times."""

    def may() -> bool:
        now = broker.queue(queue)
        return now.flow_stopped or now.flow_stopped_count >= times

    return may


def write(frame: Any, url: str, **options: object) -> None:
    """Write a DataFrame to the broker. The names of the options are in camel case."""
    given = {"url": url} | {name: str(value) for name, value in options.items()}
    # Make the session the active session of this thread, because Spark finds Python data sources only there.
    frame.sparkSession.createDataFrame([], "nothing int")
    frame.write.format("amqp").options(**given).mode("append").save()


def bodies(broker: Broker, queue: str) -> list[bytes]:
    return [message.body for message in broker.messages(queue)]


def headers_of(properties: Any) -> Mapping[str, object]:
    """Return the headers of a message, or an empty mapping if the message has no headers."""
    return properties.headers or {}


def eventually(condition: Callable[[], object], timeout: float = PATIENCE) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def in_background(function: Callable[..., object], *arguments: Any, **keywords: Any) -> Future[object]:
    """Run a function on a new thread. The future gets the result or the exception."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments, **keywords))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def waiting(folder: Path, at: int) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a function for ``mapInArrow`` that passes rows on. Before one row it waits for the file ``go``.

    Args:
        folder: folder of the file ``go``.
        at: number with which the body of the row begins. The row must be the first row of an Arrow batch.
    """

    def wait(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if int(batch.column(0)[0].as_py().split()[0]) == at:
                eventually((folder / "go").exists)
            yield batch

    return wait


def failing(folder: Path, url: str, at: int, depth: int, times: int = 1) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a function for ``mapInArrow`` that passes rows on, and raises an error at one row.

    Args:
        folder: folder for the files that count the errors.
        url: URL of the broker.
        at: number with which the body of the row begins. The row must be the first row of an Arrow batch.
        depth: number of messages that the queue must have before the first error.
        times: total number of errors.
    """

    def fail(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            failed = len(list(folder.glob("failed-*")))
            if failed < times and int(batch.column(0)[0].as_py().split()[0]) == at:
                if not failed:
                    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
                        declare = connection.channel().queue_declare
                        eventually(lambda: declare("rows", passive=True).method.message_count >= depth)  # noqa: B023  # called before the loop continues
                (folder / f"failed-{failed}").touch()
                raise RuntimeError(f"injected {failed}")
            yield batch

    return fail
