"""`qflow://` with a Python that gevent has patched, as in the gevent pool of Celery."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kombu import Connection

from qflow_client import SettingsError
from qflow_client.broker import Broker
from tests.integration.producer.tools import go_on, stop

from .scenarios import a_chord, application, ends_when_told

ROOT = Path(__file__).parents[3]


class Greenlets:
    """A running process of the program `greenlets.py`."""

    def __init__(self, url: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.kombu.greenlets", url.replace("amqp", "qflow")],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "QFLOW_MAX_PRODUCER_FLOW_CONTROL_WAIT": "0.5"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def publish(self, line: str) -> Any:
        """Write a line to the program, and return the program's answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@pytest.fixture
def greenlets(broker: Broker) -> Iterator[Greenlets]:
    pytest.importorskip("gevent")
    found = Greenlets(broker.url)
    yield found
    found.process.communicate()
    assert found.process.returncode == 0


@pytest.mark.program
@pytest.mark.parametrize("how", ["alarm", "flow"])
def test_J7_greenlets_that_wait_to_publish_let_other_greenlets_run_and_raise_at_their_deadline(
    broker: Broker, greenlets: Greenlets, how: str
) -> None:
    assert greenlets.publish("going")[0] == ["sent"] * 5
    stop(broker, how)
    outcomes, took = greenlets.publish("stopped")
    assert outcomes == ["FlowControlTimeout"] * 5
    assert took >= 0.5
    # The main greenlet runs while the other greenlets wait.
    assert greenlets.publish("waiting") == "waiting"
    go_on(broker, how)
    assert greenlets.answer()[0] == ["sent"] * 5
    broker.wait_until(lambda broker: broker.queue("q").depth == 10)


@pytest.mark.program
@pytest.mark.parametrize("how", ["alarm", "flow"])
def test_in_a_celery_worker_with_the_gevent_pool_a_task_waits_for_the_end_of_a_stop_or_for_its_deadline(
    tmp_path: Path, how: str
) -> None:
    pytest.importorskip("gevent")
    alone = ("--without-gossip", "--without-mingle")
    with Broker() as broker:
        url = broker.url.replace("amqp://", "qflow://")
        with application(url, tmp_path, f"file://{tmp_path}", "-P", "gevent", "-c", "10", *alone) as of:
            a_chord(of)
            ended, unread = of.task("until_it_raises").delay(1.0), f"{of.name}-unread"
            broker.wait_until(lambda broker: any(each.name == unread and each.depth for each in broker.queues()))
            stop(broker, how)
            cause, seconds = ended.get(timeout=60)
            assert cause == "FlowControlTimeout"
            assert seconds >= 1.0
            go_on(broker, how)
            count, is_late = 500, True
            # If the worker has published everything before this thread stops the broker, repeat with more tasks.
            while is_late:
                last = broker.queue(of.name).published + count + 1
                spread = of.task("spread").delay(count)
                broker.wait_until(lambda broker: broker.queue(of.name).published >= last - count + 9)  # noqa: B023  # at once
                stop(broker, how)
                is_late = broker.queue(of.name).published == last
                go_on(broker, how)
                assert len(spread.get(timeout=60)) == count
                broker.wait_until(lambda broker: broker.queue(of.name).published == last)  # noqa: B023  # called at once
                count *= 2
            ends_when_told(of)


def test_connecting_under_eventlet_raises_an_error_that_names_other_pools(
    monkeypatch: pytest.MonkeyPatch, broker: Broker
) -> None:
    patcher: Any = SimpleNamespace(is_monkey_patched=lambda _name: True)
    monkeypatch.setitem(sys.modules, "eventlet.patcher", patcher)
    with pytest.raises(SettingsError, match="use the pool gevent, threads or prefork"):
        Connection(broker.url.replace("amqp", "qflow")).connect()
