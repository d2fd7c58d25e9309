"""The three tables, by the statements of `qflow_client.sqlalchemy`."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations
from django.db.utils import NotSupportedError
from sqlalchemy import Dialect
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateIndex, CreateTable, DropTable

from qflow_client.django import outbox

_DIALECTS: dict[str, type[Dialect]] = {"postgresql": postgresql.dialect, "sqlite": sqlite.dialect}


def _dialect(editor: Any) -> Dialect:
    vendor = editor.connection.vendor
    if vendor not in _DIALECTS:
        raise NotSupportedError(
            f"no outbox in a database of {vendor}: route the application qflow_outbox to PostgreSQL or SQLite"
        )
    return _DIALECTS[vendor]()


def create(_apps: Any, editor: Any) -> None:
    """Make the tables."""
    dialect = _dialect(editor)
    for table in outbox.metadata.sorted_tables:
        editor.execute(str(CreateTable(table).compile(dialect=dialect)), params=None)
        for index in table.indexes:
            editor.execute(str(CreateIndex(index).compile(dialect=dialect)), params=None)


def drop(_apps: Any, editor: Any) -> None:
    """Drop them."""
    for table in outbox.metadata.sorted_tables:
        editor.execute(str(DropTable(table).compile(dialect=_dialect(editor))), params=None)


class Migration(migrations.Migration):
    """Makes the tables."""

    initial = True
    operations: ClassVar[list[Any]] = [migrations.RunPython(create, drop)]
