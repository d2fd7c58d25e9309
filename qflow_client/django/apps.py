"""The Django application for ``INSTALLED_APPS``."""

from __future__ import annotations

from django.apps import AppConfig

__all__ = ["OutboxConfig"]


class OutboxConfig(AppConfig):
    """The Django application. Its migrations create the tables of the outbox and the inbox. It has no models."""

    name = "qflow_client.django"
    label = "qflow_outbox"
    verbose_name = "Outbox"
