"""A Celery application on the broker in this repository, with kombu's own transport and with ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qflow_client.broker import Broker
from tests.integration.kombu.scenarios import Application, a_chord, all_scenarios, application, ends_when_told


@pytest.fixture(scope="module", params=["pyamqp", "qflow"])
def of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    with Broker() as broker:
        url = broker.url.replace("amqp://", f"{request.param}://")
        with application(url, tmp_path_factory.mktemp("rpc"), "rpc://") as made:
            yield made
            ends_when_told(made)


@all_scenarios
def test_a_celery_application_works_as_ever(of: Application, scenario: Any) -> None:
    scenario(of)


@pytest.mark.parametrize("scheme", ["pyamqp", "qflow"])
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_chords_in_every_kind_of_worker(scheme: str, pool: str, tmp_path: Path) -> None:
    with Broker() as broker:
        url = broker.url.replace("amqp://", f"{scheme}://")
        with application(url, tmp_path, f"file://{tmp_path}", "-P", pool, "-c", "2") as of:
            a_chord(of)
            ends_when_told(of)
