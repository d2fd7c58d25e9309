"""A Celery application on the broker in this repository, with kombu's own transport and with ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from qflow_client.broker import Broker
from tests.integration.kombu.scenarios import SCENARIOS, a_chord, application, ends_when_told


@pytest.mark.parametrize("scheme", ["pyamqp", "qflow"])
def test_a_celery_application_works_as_ever(scheme: str, tmp_path: Path) -> None:
    # One after the other in one test, as each worker takes longer to start than most of them take.
    with Broker() as broker:
        url = broker.url.replace("amqp://", f"{scheme}://")
        with application(url, tmp_path, "rpc://") as of:
            for scenario in SCENARIOS:
                scenario(of)
            ends_when_told(of)


def test_chords_in_every_kind_of_worker(tmp_path: Path) -> None:
    alone = ("--without-gossip", "--without-mingle")
    with Broker() as broker:
        url = broker.url.replace("amqp://", "qflow://")
        for pool in "prefork", "threads", "solo":
            folder = tmp_path / pool
            folder.mkdir()
            with application(url, folder, f"file://{folder}", "-P", pool, "-c", "2", *alone) as of:
                a_chord(of)
                ends_when_told(of)
