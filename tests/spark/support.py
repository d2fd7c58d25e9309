"""What these tests share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import pika

from qflow_client.broker import Broker

#: The number of files of the stream `lines`, and of rows in each file. Each file is a batch.
FILES, ROWS = 3, 1000

#: Seconds that anything may take: the first job of a session, on a busy machine, takes minutes.
PATIENCE = 300.0


class SlowConsumer:
    """Consumes a queue on a thread of its own, only while it may, and keeps what it got. A context manager.

    It has no rate: on another machine its producers might be slower. While it may not consume, the queue fills.

    Args:
        url: of the broker.
        queue: which.
        may: whether it may, now; asked again and again, on its thread.
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
        # Not all that were delivered: pika may hold some that have not been taken.
        if self._unacked and self._may():
            self._unacked = 0
            self._channel.basic_ack(self._last_tag, multiple=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._connection.process_data_events(0.02)
            self._ack()
        self._connection.close()

    def wait_for(self, count: int, timeout: float = PATIENCE) -> None:
        """Wait until it has got so many."""
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
    """For `SlowConsumer`: only while the queue stops its producers; when it has done so often enough, always."""

    def may() -> bool:
        now = broker.queue(queue)
        return now.flow_stopped or now.flow_stopped_count >= times

    return may


def write(frame: Any, url: str, **options: object) -> None:
    """Append a DataFrame to the broker; options by their names in camel case."""
    given = {"url": url} | {name: str(value) for name, value in options.items()}
    # Makes the session the active one of this thread; Spark finds Python's data sources nowhere else.
    frame.sparkSession.createDataFrame([], "nothing int")
    frame.write.format("amqp").options(**given).mode("append").save()


def bodies(broker: Broker, queue: str) -> list[bytes]:
    """Of all messages in a queue."""
    return [message.body for message in broker.messages(queue)]


def headers_of(properties: Any) -> Mapping[str, object]:
    """The headers of a message; empty if it has none."""
    return properties.headers or {}


def eventually(condition: Callable[[], object], timeout: float = PATIENCE) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def in_background(function: Callable[..., object], *arguments: Any, **keywords: Any) -> Future[object]:
    """Run something on a thread of its own; the future has what it returned or raised."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments, **keywords))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def waiting(folder: Path, at: int) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """For ``mapInArrow``: passes rows on, and waits before one of them until the folder has a file ``go``.

    Args:
        folder: which.
        at: the row, as for `failing`.
    """

    def wait(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if int(batch.column(0)[0].as_py().split()[0]) == at:
                eventually((folder / "go").exists)
            yield batch

    return wait


def failing(folder: Path, url: str, at: int, depth: int, times: int = 1) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """For ``mapInArrow``: passes rows on, and raises when one of them comes; so many times in all.

    Args:
        folder: where it keeps in mind how often it has.
        url: of the broker.
        at: the row, by the number that its body begins with, which must be the first of a batch of Arrow's.
        depth: how many messages the queue must hold before it raises for the first time.
        times: how often.
    """

    def fail(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            failed = len(list(folder.glob("failed-*")))
            if failed < times and int(batch.column(0)[0].as_py().split()[0]) == at:
                if not failed:
                    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
                        declare = connection.channel().queue_declare
                        eventually(lambda: declare("rows", passive=True).method.message_count >= depth)  # noqa: B023  # called at once
                (folder / f"failed-{failed}").touch()
                raise RuntimeError(f"injected {failed}")
            yield batch

    return fail
