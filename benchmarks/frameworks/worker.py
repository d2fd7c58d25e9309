"""A Celery worker with the pool gevent, whose tasks publish; `benchmarks.frameworks` starts it.

    CELERY_BROKER_URL=… python -m celery -A benchmarks.frameworks.worker worker -P gevent

The worker answers input lines as `benchmarks.frameworks.application` does. Each sender is a task that does not end.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Final

from celery import Celery
from celery.signals import worker_ready
from gevent import monkey  # type: ignore[import-untyped]  # gevent has no types
from gevent.fileobject import FileObject  # type: ignore[import-untyped]  # as above
from kombu import Queue

from benchmarks.frameworks.application import APPLICATIONS, Senders, serve

__all__ = ["app"]

_SENDERS, _PUBLISHED = APPLICATIONS["celery-gevent"]
# Number of tasks: one for each sender, and one for single messages.
_TASKS: Final = _SENDERS + 1

app = Celery("worker")
app.conf.update(
    # The tasks have a queue of their own, because no worker may take the published messages.
    task_queues=[Queue(f"worker-{os.getpid()}", expires=60.0)],
    task_default_queue=f"worker-{os.getpid()}",
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
    broker_transport_options={"confirm_publish": True},
    worker_concurrency=_TASKS,
)

if not monkey.is_module_patched("socket"):
    raise RuntimeError("start it with celery worker -P gevent, which patches Python")

# Calls that the tasks make, with the futures of the results.
_calls: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], Future[Any]]] = queue.SimpleQueue()
# Celery prints to the standard output, so keep a copy for the answers.
_answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


@app.task(name="task")
def task(token: str) -> None:
    """Do nothing. Only the messages that call this task matter."""


@app.task(name="work")
def work() -> None:
    """Make the calls of `_calls`, one after the other, in a task that does not end."""
    while True:
        function, arguments, future = _calls.get()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)


def _submit(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    future: Future[Any] = Future()
    _calls.put((function, arguments, future))
    return future


def _answer(what: Any) -> None:
    print(json.dumps(what), file=_answers, flush=True)


def _lines() -> Iterator[str]:
    for line in FileObject(sys.stdin.buffer, "rb"):
        yield line.decode()


def _publish(token: str) -> None:
    task.apply_async((token,), queue=_PUBLISHED)


@worker_ready.connect
def _begin(**_: Any) -> None:
    for _number in range(_TASKS):
        work.apply_async()
    arguments = _lines(), Senders(_SENDERS), _publish, lambda: None, _submit, _answer
    threading.Thread(target=serve, args=arguments, daemon=True).start()
