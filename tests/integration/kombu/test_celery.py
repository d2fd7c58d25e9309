"""A Celery application on the broker in this repository, with kombu's own transport and with ours."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from qflow_client.broker import Broker
from tests.integration.kombu.scenarios import SCENARIOS, a_chord, application, ends_when_told
from tests.integration.producer.tools import Stopwatch, eventually

pytestmark = pytest.mark.program

PATIENCE = 30.0
# Seconds that a publish waits for the broker, and that a worker may take to end.
WAIT = "1"
LIMIT = 10.0


@pytest.mark.parametrize("scheme", ["pyamqp", "qflow"])
def test_a_celery_application_works_unchanged(scheme: str, tmp_path: Path) -> None:
    # One after the other in one test, as each worker takes longer to start than most of them take.
    with Broker() as broker:
        url = broker.url.replace("amqp://", f"{scheme}://")
        with application(url, tmp_path, "rpc://") as of:
            for scenario in SCENARIOS:
                scenario(of)
            ends_when_told(of)


def test_chords_work_in_every_kind_of_worker(tmp_path: Path) -> None:
    alone = ("--without-gossip", "--without-mingle")
    with Broker() as broker:
        url = broker.url.replace("amqp://", "qflow://")
        for pool in "prefork", "threads", "solo":
            folder = tmp_path / pool
            folder.mkdir()
            with application(url, folder, f"file://{folder}", "-P", pool, "-c", "2", *alone) as of:
                a_chord(of)
                ends_when_told(of)


def test_a_worker_that_gets_sigterm_during_an_alarm_ends_in_time_and_loses_no_confirmed_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QFLOW_MAX_PRODUCER_FLOW_CONTROL_WAIT", WAIT)
    noted, results = tmp_path / "confirmed", tmp_path / "results"
    results.mkdir()
    options = ("-P", "prefork", "-c", "1", "--without-gossip", "--without-mingle")
    with Broker() as broker:
        url = broker.url.replace("amqp://", "qflow://")
        with application(url, tmp_path, f"file://{results}", *options) as of:
            of.task("note").delay(100_000)
            eventually(lambda: noted.exists() and len(noted.read_text().splitlines()) > 100)
            broker.block("no memory")
            # The alarm stays. So the task waits in a publish until that gives up.
            of.process.send_signal(signal.SIGTERM)
            with Stopwatch() as watch:
                assert of.process.wait(PATIENCE) == 0
            assert watch.within(LIMIT)
            log = of.log.read_text()
            assert "Warm shutdown" in log, log
            # A busy machine may be some hundredths late.
            assert re.search(r"was not sent within 1(\.\d+)? s,", log), log
            confirmed = set(noted.read_text().split())
            done = {path.name.removeprefix("celery-task-meta-") for path in results.iterdir()}

            def ready() -> set[str]:
                return {str((message.properties.headers or {})["id"]) for message in broker.messages(of.name)}

            # Some were with the worker, and go back to the queue.
            eventually(lambda: confirmed <= done | ready(), "a confirmed task is done or in the queue")
