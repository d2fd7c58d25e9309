"""A Celery application on the broker in this repository, with kombu's own transport and with ours."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from qflow_client.broker import Broker
from tests.integration.kombu.scenarios import SCENARIOS, a_chord, application, ends_when_told
from tests.integration.producer.tools import ends_within, eventually

pytestmark = pytest.mark.program

PATIENCE = 30.0
# Maximum seconds of a publish under flow control, and of the end of a worker.
WAIT = "2"
LIMIT = 10.0


@pytest.mark.parametrize("scheme", ["pyamqp", "qflow"])
def test_a_celery_application_works_with_the_url_schemes_pyamqp_and_qflow(scheme: str, tmp_path: Path) -> None:
    # Run all scenarios in one test, because starting a worker takes longer than most scenarios.
    with Broker() as broker:
        url = broker.url.replace("amqp://", f"{scheme}://")
        with application(url, tmp_path, "rpc://") as of:
            for scenario in SCENARIOS:
                scenario(of)
            ends_when_told(of)


def test_chords_work_in_celery_workers_with_the_pools_prefork_threads_and_solo(tmp_path: Path) -> None:
    alone = ("--without-gossip", "--without-mingle")
    with Broker() as broker:
        url = broker.url.replace("amqp://", "qflow://")
        for pool in "prefork", "threads", "solo":
            folder = tmp_path / pool
            folder.mkdir()
            with application(url, folder, f"file://{folder}", "-P", pool, "-c", "2", *alone) as of:
                a_chord(of)
                ends_when_told(of)


def test_a_celery_worker_that_gets_SIGTERM_during_an_alarm_ends_in_time_and_loses_no_confirmed_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QFLOW_MAX_PRODUCER_FLOW_CONTROL_WAIT", WAIT)
    noted, results = tmp_path / "confirmed", tmp_path / "results"
    results.mkdir()
    options = ("-P", "prefork", "-c", "1", "--without-gossip", "--without-mingle")
    with Broker() as broker:
        url = broker.url.replace("amqp://", "qflow://")
        with application(url, tmp_path, f"file://{results}", *options) as of:
            # Only the worker has the short wait.
            monkeypatch.delenv("QFLOW_MAX_PRODUCER_FLOW_CONTROL_WAIT")
            of.task("note").delay(100_000)
            eventually(lambda: noted.exists() and len(noted.read_text().splitlines()) > 100)
            broker.block("no memory")
            # The alarm stays, so the task waits in a publish until the publish times out.
            of.process.send_signal(signal.SIGTERM)
            with ends_within(LIMIT):
                assert of.process.wait(PATIENCE) == 0
            log = of.log.read_text()
            assert "Warm shutdown" in log, log
            assert re.search(r"was not sent within \S+ s,", log), log
            confirmed = set(noted.read_text().split())
            done = {path.name.removeprefix("celery-task-meta-") for path in results.iterdir()}

            def ready() -> set[str]:
                return {str((message.properties.headers or {})["id"]) for message in broker.messages(of.name)}

            # The broker requeues the messages that the worker had not acknowledged.
            eventually(lambda: confirmed <= done | ready(), "a confirmed task is done or in the queue")
