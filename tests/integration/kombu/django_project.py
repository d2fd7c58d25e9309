"""A Django project in one module, whose only view sends a Celery task."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from django.http import HttpResponse
from django.urls import path
from kombu.exceptions import OperationalError

SECRET_KEY = "of a test"
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = __name__
CELERY_BROKER_URL = os.environ["PROJECT_BROKER"]
CELERY_BROKER_TRANSPORT_OPTIONS = {"confirm_publish": True, "max_producer_flow_control_wait": 0.5}
CELERY_TASK_DEFAULT_QUEUE = "orders"

app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")


@app.task
def ship(number: str) -> None:
    """Do nothing, because the tests use only the messages of the task."""


def order(request: Any) -> HttpResponse:
    try:
        ship.delay(request.GET["number"])
    except OperationalError as error:
        return HttpResponse(str(error), status=503)
    return HttpResponse(status=202)


urlpatterns = [path("order", order)]
