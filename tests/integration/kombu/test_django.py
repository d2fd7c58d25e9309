"""Celery in a Django project, whose views send tasks."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from kombu.exceptions import OperationalError

from qflow_client.broker import Broker
from tests.integration.producer.tools import PATIENCE, bodies, eventually, takes


def test_J7_a_django_view_that_sends_a_task_answers_503_in_time_during_an_alarm_and_202_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    django = pytest.importorskip("django")
    with Broker() as broker:
        monkeypatch.setenv("PROJECT_BROKER", broker.url.replace("amqp", "qflow"))
        monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "tests.integration.kombu.django_project")
        django.setup()
        from django.test import Client

        from . import django_project

        client: Any = Client()

        def order(number: int) -> Any:
            return client.get("/order", {"number": number})

        def is_blocked() -> bool:
            with django_project.app.producer_pool.acquire() as producer:
                return bool(producer.channel.flow_state.flowed)

        def goes_on() -> bool:
            # The connection is still open, and the pool opens a new channel.
            with suppress(OperationalError):
                return not is_blocked()
            return False

        def wait_at_most(seconds: float | None) -> float | None:
            """Set the maximum wait of the connection in the pool, and return the maximum that it had before."""
            with django_project.app.producer_pool.acquire() as producer:
                channel = producer.channel
                before = channel.connection.flow_settings
                settings = before.replace(max_producer_flow_control_wait=seconds)
                channel.connection.flow_settings = channel._flow.settings = settings
                return before.max_producer_flow_control_wait  # type: ignore[no-any-return]  # kombu has no types

        try:
            # The project has a short maximum wait. The confirms of tasks that must be sent may take longer.
            short = wait_at_most(PATIENCE)
            assert order(1).status_code == 202
            broker.block("no memory")
            eventually(is_blocked)
            wait_at_most(short)
            with takes(0.5):
                answer = order(2)
            assert answer.status_code == 503
            assert b"no memory" in answer.content
            broker.unblock()
            eventually(goes_on)
            wait_at_most(PATIENCE)
            assert order(3).status_code == 202
            assert [json.loads(body)[0] for body in bodies(broker, "orders")] == [["1"], ["3"]]
        finally:
            django_project.app.close()
            django_project.app.pool.force_close_all()
