"""The Django application for ``INSTALLED_APPS``."""

from __future__ import annotations

from django.apps import AppConfig

__all__ = ["OutboxConfig"]


class OutboxConfig(AppConfig):
    """The Django application, which has tables but no models."""

    name = "qflow_client.django"
    label = "qflow_outbox"
    verbose_name = "Outbox"
