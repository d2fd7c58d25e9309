"""One application that publishes with a framework, in its own process; `benchmarks.frameworks` starts it.

    python -m benchmarks.frameworks.application APPLICATION original|changed URL

For each input line the program prints one line of JSON. `publish` publishes one message, and answers with the result.
`stream` makes every sender publish numbered messages, one after the other. If a publish raises, the message is
published again, as in a program that must not lose messages. `stop` stops the senders, and answers with the errors.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager, contextmanager
from importlib import import_module
from typing import Any, Final

#: For each application, the number of senders and the name of the queue.
APPLICATIONS: Final = {
    "taskiq": (10, "taskiq"),
    "faststream": (10, "faststream"),
    "dramatiq": (1, "dramatiq"),
    "celery-django": (1, "celery"),
    "celery-gevent": (10, "celery"),
    "pika-pipelined": (1, "pika"),
}
# Seconds until a failed message is published again.
_PAUSE: Final = 0.05
# Maximum seconds to wait for the end of the senders.
_PATIENCE: Final = 20.0


def _name(error: BaseException) -> str:
    """Return the types of an error and of its first cause."""
    cause = error.__cause__ or error.__context__
    return type(error).__name__ + (f" from {type(cause).__name__}" if cause is not None else "")


class Senders:
    """The results of the senders of one application."""

    def __init__(self, count: int) -> None:
        self.errors: Counter[str] = Counter()
        #: Number of messages of each sender that were published without an error.
        self.published = [0] * count
        #: Whether the senders continue.
        self.go_on = False
        #: The longest publish, in seconds.
        self.longest = 0.0

    def numbers(self, sender: int) -> Iterator[str]:
        """Yield the messages of a sender. Repeat each message until it is recorded as published."""
        while self.go_on:
            yield f"{sender}-{self.published[sender]}"

    def failed(self, error: Exception) -> None:
        self.errors[_name(error)] += 1

    def report(self, stuck: int) -> dict[str, Any]:
        """Return the answer to `stop`."""
        return {
            "errors": dict(self.errors),
            "published": self.published,
            "stuck": stuck,
            "longest": round(self.longest, 2),
        }


@asynccontextmanager
async def _taskiq(url: str, changed: bool) -> Any:
    module: Any = import_module("taskiq_aio_pika.broker")
    if changed:
        import qflow_client.aio_pika

        module.connect_robust = qflow_client.aio_pika.connect_robust
    app = module.AioPikaBroker(url)
    task = app.register_task(lambda token: None, task_name="task")
    await app.startup()
    yield task.kiq
    await app.shutdown()


@asynccontextmanager
async def _faststream(url: str, changed: bool) -> Any:
    module: Any = import_module("faststream.rabbit.broker.broker")
    if changed:
        import qflow_client.aio_pika

        module.connect_robust = qflow_client.aio_pika.connect_robust
    # FastStream uses its own argument and ignores the argument in the URL.
    async with module.RabbitBroker(url, reconnect_interval=0.1) as app:
        await app.declare_queue(import_module("faststream.rabbit").RabbitQueue("faststream", durable=True))
        yield lambda token: app.publish(token, "faststream", persist=True)


async def _lines() -> Any:
    loop = asyncio.get_running_loop()
    while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        yield line


async def _run_tasks(name: str, url: str, changed: bool) -> None:
    senders = Senders(APPLICATIONS[name][0])
    application = {"taskiq": _taskiq, "faststream": _faststream}[name]
    async with application(url, changed) as publish:

        async def send(sender: int) -> None:
            for token in senders.numbers(sender):
                began = time.monotonic()
                try:
                    await publish(token)
                except Exception as error:
                    senders.failed(error)
                    await asyncio.sleep(_PAUSE)
                else:
                    senders.published[sender] += 1
                senders.longest = max(senders.longest, time.monotonic() - began)

        tasks: list[asyncio.Task[None]] = []
        _answer("ready")
        async for line in _lines():
            match line:
                case "publish":
                    _answer(await _once_async(publish))
                case "stream":
                    senders.go_on = True
                    tasks = [asyncio.create_task(send(sender)) for sender in range(len(senders.published))]
                    _answer("streaming")
                case "stop":
                    senders.go_on = False
                    _, stuck = await asyncio.wait(tasks, timeout=_PATIENCE)
                    _answer(senders.report(len(stuck)))
        os._exit(0)


async def _once_async(publish: Callable[[str], Awaitable[object]]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        await publish("one")
    except Exception as error:
        return {"outcome": _name(error), "seconds": time.monotonic() - began}
    return {"outcome": "published", "seconds": time.monotonic() - began}


@contextmanager
def _dramatiq(url: str, changed: bool) -> Iterator[tuple[Callable[[str], object], Callable[[], object]]]:
    module: Any = import_module("dramatiq.brokers.rabbitmq")
    if changed:
        import qflow_client.pika

        module.pika = qflow_client.pika
    app = module.RabbitmqBroker(url=url, confirm_delivery=True)
    actor = import_module("dramatiq").actor(lambda token: None, broker=app, actor_name="actor", queue_name="dramatiq")
    yield actor.send, _nothing


def _task(token: str) -> None:
    """Do nothing. Only the messages that call this task matter."""


@contextmanager
def _celery(url: str, changed: bool) -> Iterator[tuple[Callable[[str], object], Callable[[], object]]]:
    import celery
    import django.conf

    if changed:
        url = url.replace("amqp", "qflow", 1)
    django.conf.settings.configure(
        CELERY_BROKER_URL=url,
        CELERY_TASK_IGNORE_RESULT=True,
        CELERY_BROKER_TRANSPORT_OPTIONS={"confirm_publish": True},
    )
    app = celery.Celery("application")
    app.config_from_object("django.conf:settings", namespace="CELERY")
    task = app.task(_task, name="task", shared=False)
    yield lambda token: task.apply_async((token,)), _nothing


class _Pika:
    """A program that uses pika, and connects again after each error.

    Args:
        changed: whether the program uses pipelined confirms, and publishes the unconfirmed messages of a lost
            connection again.
    """

    def __init__(self, url: str, changed: bool) -> None:
        self._pika: Any = import_module("qflow_client.pika" if changed else "pika")
        self._url = url
        self._changed = changed
        # The channel; ``None`` after an error.
        self._channel: Any = None
        # The last channel that was in confirm mode.
        self._last: Any = None

    def publish(self, token: str) -> None:
        self._do(lambda channel: channel.basic_publish("", "pika", token.encode()))

    def finish(self) -> None:
        if self._changed:
            self._do(lambda channel: channel.wait_for_confirms())

    def _do(self, call: Callable[[Any], object]) -> None:
        try:
            if self._channel is None:
                self._connect()
            call(self._channel)
        except self._pika.exceptions.AMQPConnectionError:
            self._channel = None
            raise

    def _connect(self) -> None:
        channel = self._pika.BlockingConnection(self._pika.URLParameters(self._url)).channel()
        channel.queue_declare("pika", durable=True)
        if self._changed:
            channel.confirm_delivery(pipelined=True, republish=self._last)
            self._last = channel
        else:
            channel.confirm_delivery()
        self._channel = channel


@contextmanager
def _pipelined(url: str, changed: bool) -> Iterator[tuple[Callable[[str], object], Callable[[], object]]]:
    program = _Pika(url, changed)
    yield program.publish, program.finish


def _nothing() -> None:
    pass


def serve(
    lines: Iterable[str],
    senders: Senders,
    publish: Callable[[str], object],
    finish: Callable[[], object],
    submit: Callable[..., Future[Any]],
    answer: Callable[[Any], None],
) -> None:
    """Execute the commands of the input lines.

    Args:
        publish: function that publishes a message, and may return before the message is confirmed.
        finish: function that waits until all messages are confirmed.
        submit: function that calls another function with arguments in another thread, like `Executor.submit`.
    """

    def send(sender: int) -> None:
        for token in senders.numbers(sender):
            began = time.monotonic()
            try:
                publish(token)
            except Exception as error:
                senders.failed(error)
                time.sleep(_PAUSE)
            else:
                senders.published[sender] += 1
            senders.longest = max(senders.longest, time.monotonic() - began)
        while True:
            try:
                finish()
                break
            except Exception as error:
                senders.failed(error)
                time.sleep(_PAUSE)

    def once() -> dict[str, Any]:
        began = time.monotonic()
        try:
            publish("one")
            finish()
        except Exception as error:
            return {"outcome": _name(error), "seconds": time.monotonic() - began}
        return {"outcome": "published", "seconds": time.monotonic() - began}

    jobs: list[Future[Any]] = []
    answer("ready")
    for line in lines:
        match line.strip():
            case "publish":
                answer(submit(once).result())
            case "stream":
                senders.go_on = True
                jobs = [submit(send, each) for each in range(len(senders.published))]
                answer("streaming")
            case "stop":
                senders.go_on = False
                answer(senders.report(len(wait(jobs, _PATIENCE).not_done)))


def _run_threads(name: str, url: str, changed: bool) -> None:
    count = APPLICATIONS[name][0]
    application = {"dramatiq": _dramatiq, "celery-django": _celery, "pika-pipelined": _pipelined}[name]
    with application(url, changed) as (publish, finish):
        serve(sys.stdin, Senders(count), publish, finish, ThreadPoolExecutor(count).submit, _answer)
        os._exit(0)


def _answer(what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    name, kind, url = sys.argv[1:]
    if name in ("taskiq", "faststream"):
        asyncio.run(_run_tasks(name, url, kind == "changed"))
    else:
        _run_threads(name, url, kind == "changed")


if __name__ == "__main__":
    main()
