"""Scenarios for a Celery application with any broker and transport."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, chain, chord, group

from tests.integration.forked import Forked
from tests.integration.producer.tools import eventually

__all__ = ["SCENARIOS", "Application", "all_scenarios", "application"]

PATIENCE = 60.0


class _Worker(Forked[bytes]):
    modules = (
        "celery.apps.beat",
        "celery.apps.worker",
        "celery.backends.filesystem",
        "celery.backends.rpc",
        "celery.bin.celery",
        "celery.concurrency.prefork",
        "celery.concurrency.solo",
        "celery.concurrency.thread",
        "celery.events.state",
        "celery.worker.autoscale",
        "celery.worker.components",
        "celery.worker.consumer",
        "celery.worker.control",
        "kombu.transport.pyamqp",
        "qflow_client.kombu.transport",
    )


class Application:
    """A Celery application and its worker, which also runs Celery beat."""

    def __init__(self, url: str, folder: Path, results: str, *options: str) -> None:
        self.name = f"program-{uuid4().hex[:8]}"
        self.folder = folder
        environment = {
            "PROGRAM_NAME": self.name,
            "PROGRAM_FOLDER": str(folder),
            "PROGRAM_BROKER": url,
            "PROGRAM_RESULTS": results,
        }
        self.app = _load(environment)
        self.log = folder / "worker.log"
        root = Path(__file__).parents[3]
        command = [sys.executable, "-m", "celery", "-A", "tests.integration.kombu.program", "worker", "-E"]
        if "gevent" not in options:
            # With the pool gevent, a worker cannot run Celery beat.
            command.append("-B")
        with self.log.open("wb") as log:
            self.process = _Worker(
                [*command, "-n", f"{self.name}@here", "-l", "INFO", "--heartbeat-interval", "1", *options],
                cwd=root,
                env=os.environ | environment | {"PYTHONPATH": str(root)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.wait_for_log("ready.")

    def wait_for_log(self, text: str) -> None:
        def told() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return text in self.log.read_text()

        try:
            eventually(told, timeout=PATIENCE)
        except AssertionError:
            print(self.log.read_text())
            raise

    def task(self, name: str) -> Any:
        return self.app.tasks[f"{self.name}.{name}"]

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.app.close()


def _load(environment: dict[str, str]) -> Celery:
    """Execute the module of the program again, as another application with another name."""
    source = Path(__file__).with_name("program.py")
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        names: dict[str, Any] = {"__name__": "program", "__file__": str(source)}
        exec(compile(source.read_text(), str(source), "exec"), names)
    finally:
        os.environ.clear()
        os.environ.update(before)
    app = names["app"]
    assert isinstance(app, Celery)
    return app


@contextmanager
def application(url: str, folder: Path, results: str, *options: str) -> Iterator[Application]:
    made = Application(url, folder, results, *options)
    try:
        yield made
    finally:
        made.close()


def a_task_returns_a_result(of: Application) -> None:
    assert of.task("add").delay(2, 3).get(timeout=PATIENCE) == 5


def groups_and_chains(of: Application) -> None:
    add = of.task("add")
    assert group(add.s(number, 1) for number in range(20))().get(timeout=PATIENCE) == list(range(1, 21))
    assert chain(add.s(1, 2), add.s(3), add.s(4))().get(timeout=PATIENCE) == 10


def a_chord(of: Application) -> None:
    add = of.task("add")
    assert chord(add.s(number, number) for number in range(10))(of.task("total").s()).get(timeout=PATIENCE) == 90


def retries(of: Application) -> None:
    assert of.task("third_time").delay().get(timeout=PATIENCE) == 2


def an_eta(of: Application) -> None:
    began = time.monotonic()
    assert of.task("add").apply_async((1, 1), countdown=0.3).get(timeout=PATIENCE) == 2
    assert time.monotonic() - began >= 0.25


def a_task_publishes(of: Application) -> None:
    ids = of.task("spread").delay(20).get(timeout=PATIENCE)
    assert len(set(ids)) == 20


def beat(of: Application) -> None:
    ticks = of.folder / "ticks"
    eventually(lambda: ticks.exists() and len(ticks.read_text().splitlines()) >= 3, timeout=PATIENCE)


def remote_control(of: Application) -> None:
    control = of.app.control
    here = f"{of.name}@here"
    assert control.ping(timeout=PATIENCE, limit=1) == [{here: {"ok": "pong"}}]
    inspect = control.inspect([here], timeout=PATIENCE, limit=1)
    assert [queue["name"] for queue in inspect.active_queues()[here]] == [of.name]
    (reply,) = control.rate_limit(f"{of.name}.total", "10/s", reply=True, timeout=PATIENCE, limit=1)
    assert "ok" in reply[here]


def events(of: Application) -> None:
    wanted = {"task-sent", "task-received", "task-started", "task-succeeded", "worker-heartbeat"}
    heard: set[str] = set()

    def hear(event: dict[str, Any]) -> None:
        if "worker-heartbeat" not in heard and event["type"] == "worker-heartbeat":
            # The worker has now declared its queue.
            of.task("add").delay(1, 2)
        heard.add(event["type"])
        receiver.should_stop = wanted <= heard

    with of.app.connection_for_read() as connection:
        receiver = of.app.events.Receiver(connection, handlers={"*": hear})
        receiver.capture(limit=None, timeout=PATIENCE, wakeup=True)
    assert wanted <= heard


def many_threads_publish(of: Application) -> None:
    add = of.task("add")
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.extend([add.delay(1, 1) for _ in range(25)])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len({result.id for result in results}) == 100


SCENARIOS: tuple[Callable[[Application], None], ...] = (
    a_task_returns_a_result,
    groups_and_chains,
    retries,
    an_eta,
    a_task_publishes,
    beat,
    remote_control,
    events,
    many_threads_publish,
)

all_scenarios = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)


def ends_when_told(of: Application) -> None:
    """Shut an application down, and check that it ends without errors. Call this at the end of an application."""
    of.app.control.shutdown()
    assert of.process.wait(PATIENCE) == 0
    log = of.log.read_text()
    assert "Traceback" not in log, log
