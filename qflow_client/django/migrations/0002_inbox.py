"""Creates the table of the inbox, as `qflow_client.sqlalchemy` defines it."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations

from qflow_client.django import inbox
from qflow_client.django.tables import create, drop


class Migration(migrations.Migration):
    """Creates the table of the inbox."""

    dependencies: ClassVar[list[Any]] = [("qflow_outbox", "0001_initial")]
    operations: ClassVar[list[Any]] = [migrations.RunPython(create(inbox.metadata), drop(inbox.metadata))]
