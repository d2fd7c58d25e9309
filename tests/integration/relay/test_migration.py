"""Alembic generates the migration of the tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import alembic.command
import alembic.config
import pytest
from sqlalchemy import MetaData, create_engine

from benchmarks.postgresql import PostgresqlServer
from qflow_client.broker import Broker
from qflow_client.sqlalchemy import Outbox, OutboxRelay

from .support import FAST, add, bodies, eventually

_ENV = """
from alembic import context
from sqlalchemy import MetaData, create_engine
from qflow_client.sqlalchemy import Inbox, Outbox

metadata = MetaData()
Outbox(metadata, name="migrated")
Inbox(metadata, name="migrated_inbox")
engine = create_engine(context.config.get_main_option("sqlalchemy.url"))
with engine.connect() as connection:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        compare_server_default=True,
        include_name=lambda name, kind, _: kind != "table" or name.startswith(("migrated", "alembic")),
    )
    with context.begin_transaction():
        context.run_migrations()
engine.dispose()
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning:alembic")
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_E14_alembic_generates_the_migration_for_the_outbox_tables(
    database: str, request: pytest.FixtureRequest, tmp_path: Path, broker: Broker
) -> None:
    url = f"sqlite:///{tmp_path}/application.db"
    if database == "postgresql":
        server: PostgresqlServer = request.getfixturevalue("postgresql")
        url = server.url
    config: Any = alembic.config.Config()
    config.set_main_option("script_location", str(tmp_path / "migrations"))
    config.set_main_option("sqlalchemy.url", url)
    config.config_file_name = str(tmp_path / "alembic.ini")
    config.output_buffer = config.stdout = (tmp_path / "output").open("w")
    try:
        alembic.command.init(config, str(tmp_path / "migrations"))
        (tmp_path / "migrations" / "env.py").write_text(_ENV)
        alembic.command.revision(config, "outbox", autogenerate=True)
        alembic.command.upgrade(config, "head")
        # There is nothing left to migrate.
        alembic.command.check(config)
    finally:
        config.output_buffer.close()
    engine = create_engine(url)
    outbox = Outbox(name="migrated")
    with OutboxRelay(engine, broker.url, outbox=outbox, **FAST):
        add(engine, outbox, b"1", key="k")
        eventually(lambda: bodies(broker) == [b"1"])
    everything = MetaData()
    everything.reflect(engine)
    everything.drop_all(engine)
    engine.dispose()
