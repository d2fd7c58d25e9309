"""Celery in a Django project, whose views send tasks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qflow_client.broker import Broker
from tests.integration.producer.tools import Stopwatch, bodies, eventually


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

        try:
            assert order(1).status_code == 202
            broker.block("no memory")
            eventually(is_blocked)
            with Stopwatch() as watch:
                answer = order(2)
            assert answer.status_code == 503
            assert b"no memory" in answer.content
            assert watch.kept(0.5)
            broker.unblock()
            eventually(lambda: order(3).status_code == 202)
            assert [json.loads(body)[0] for body in bodies(broker, "orders")] == [["1"], ["3"]]
        finally:
            django_project.app.close()
            django_project.app.pool.force_close_all()
