"""Creates the three tables of the outbox, as `qflow_client.sqlalchemy` defines them."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations

from qflow_client.django import outbox
from qflow_client.django.tables import create, drop


class Migration(migrations.Migration):
    """Creates the tables of the outbox."""

    initial = True
    operations: ClassVar[list[Any]] = [migrations.RunPython(create(outbox.metadata), drop(outbox.metadata))]
