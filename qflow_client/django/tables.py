"""Creates and drops the tables of `qflow_client.sqlalchemy` in migrations of Django."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db.utils import NotSupportedError
from sqlalchemy import Dialect, MetaData
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateIndex, CreateTable, DropTable

__all__ = ["create", "drop"]

_DIALECTS: dict[str, type[Dialect]] = {"postgresql": postgresql.dialect, "sqlite": sqlite.dialect}


def _dialect(editor: Any) -> Dialect:
    vendor = editor.connection.vendor
    if vendor not in _DIALECTS:
        raise NotSupportedError(
            f"the outbox does not support a database of {vendor}: route the application qflow_outbox to PostgreSQL or "
            "SQLite"
        )
    return _DIALECTS[vendor]()


def create(metadata: MetaData) -> Callable[[Any, Any], None]:
    """Return a function for Django's `RunPython`. The function creates the tables of `metadata`."""

    def make(_apps: Any, editor: Any) -> None:
        dialect = _dialect(editor)
        for table in metadata.sorted_tables:
            editor.execute(str(CreateTable(table).compile(dialect=dialect)), params=None)
            for index in table.indexes:
                editor.execute(str(CreateIndex(index).compile(dialect=dialect)), params=None)

    return make


def drop(metadata: MetaData) -> Callable[[Any, Any], None]:
    """Return a function for Django's `RunPython`. The function drops the tables of `metadata`."""

    def remove(_apps: Any, editor: Any) -> None:
        for table in metadata.sorted_tables:
            editor.execute(str(DropTable(table).compile(dialect=_dialect(editor))), params=None)

    return remove
