"""The applications, consumers and relays of the how-to pages run unchanged with PostgreSQL."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import URL, Engine, create_engine, text

from benchmarks.postgresql import PostgresqlServer
from qflow_client.broker import Broker
from qflow_client.sqlalchemy import Outbox

from .support import PATIENCE, ROOT, depth, eventually

_FILE = re.compile(r'^```python title="(?P<name>[\w/]+\.py)"\n(?P<code>.*?)^```$', re.DOTALL | re.MULTILINE)

FASTAPI = """
import asyncio
import importlib
import os
from fastapi.testclient import TestClient
from shop import Base, app, engine, outbox, relay

async def make_tables():
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    await engine.dispose()

asyncio.run(make_tables())
print("made", flush=True)
assert input() == "order"
with TestClient(app) as client:
    assert client.post("/orders", params={"item": "a book"}).json() == {"id": 1}
    assert client.post("/orders", params={"item": "a lamp"}).status_code == 409
    assert client.post("/orders", params={"item": "a chair"}).status_code == 201
    print("ordered", flush=True)
    assert input() == "check"
    assert client.get("/ready/").status_code == 200
    import parcels
    from sqlalchemy import select
    from sqlalchemy.orm import Session
    from shop import Parcel
    from unittest.mock import Mock
    channel = Mock()
    for _ in range(2):
        parcels.handle(channel, Mock(delivery_tag=1), Mock(message_id="1"), b"one more")
    assert channel.basic_ack.call_count == 2
    with Session(parcels.engine) as session:
        assert session.scalars(select(Parcel.item)).all() == ["a book", "a chair", "one more"]
    parcels.engine.dispose()
assert not relay.health().is_ready
assert importlib.import_module("env").target_metadata is Base.metadata
"""

DJANGO = """
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
import django
django.setup()
from django.core.management import call_command
from django.test import Client
from unittest.mock import Mock
call_command("makemigrations", "shop", verbosity=0)
call_command("migrate", verbosity=0)
print("made", flush=True)
assert input() == "order"
client = Client()
for item, status in (("a book", 201), ("a lamp", 409), ("a chair", 201)):
    assert client.post("/orders", {"item": item}).status_code == status
print("ordered", flush=True)
assert input() == "check"
from shop.management.commands.parcels import handle
from shop.models import Parcel
channel = Mock()
for _ in range(2):
    handle(channel, Mock(delivery_tag=1), Mock(message_id="1"), b"one more")
assert channel.basic_ack.call_count == 2
assert [parcel.item for parcel in Parcel.objects.all()] == ["a book", "a chair", "one more"]
"""


def write(page: str, folder: Path) -> None:
    found = _FILE.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert found
    for name, code in found:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code, encoding="utf-8")
        for parent in path.relative_to(folder).parents[:-1]:
            (folder / parent / "__init__.py").touch()


@contextmanager
def run(arguments: list[str], folder: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process of Python, ended with the block."""
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    with subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def order(application: subprocess.Popen[str], broker: Broker) -> None:
    """Have the application commit its orders once the consumer has declared its queue."""
    eventually(lambda: any(queue.name == "parcels" for queue in broker.queues()), "the consumer's queue")
    assert application.stdin is not None
    assert application.stdout is not None
    application.stdin.write("order\n")
    application.stdin.flush()
    assert application.stdout.readline() == "ordered\n"


def items(engine: Engine, table: str) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(text(f"SELECT item FROM {table} ORDER BY id")).scalars())


@pytest.fixture
def database(postgresql: PostgresqlServer) -> Iterator[URL]:
    """A database of one's own."""
    engine = create_engine(postgresql.url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("CREATE DATABASE shop"))
        yield engine.url.set(database="shop")
        connection.execute(text("DROP DATABASE shop WITH (FORCE)"))
    engine.dispose()


def test_E14_the_example_application_with_fastapi_runs(database: URL, broker: Broker, tmp_path: Path) -> None:
    if importlib.util.find_spec("fastapi") is None and not os.environ.get("QFLOW_REQUIRE_POSTGRES"):
        pytest.skip("FastAPI is not installed")
    write("outbox-fastapi.md", tmp_path)
    urls = {"DATABASE_URL": database.render_as_string(), "AMQP_URL": broker.url}
    engine = create_engine(database)
    with run(["-c", FASTAPI], tmp_path, **urls) as application:
        assert application.stdout is not None
        assert application.stdout.readline() == "made\n"
        with run(["parcels.py"], tmp_path, **urls):
            order(application, broker)
            # The relay of the application itself publishes.
            eventually(lambda: items(engine, "parcels") == ["a book", "a chair"])
        application.communicate("check\n", timeout=PATIENCE)
        assert application.returncode == 0
    engine.dispose()


def test_E14_the_example_application_with_django_runs(database: URL, broker: Broker, tmp_path: Path) -> None:
    write("outbox-django.md", tmp_path)
    where = {"PGHOST": "127.0.0.1", "PGPORT": str(database.port), "PGDATABASE": "shop", "PGUSER": "postgres"}
    where |= {"AMQP_URL": broker.url, "DJANGO_SETTINGS_MODULE": "shop.settings"}
    engine, outbox = create_engine(database), Outbox()
    url = f"postgresql://postgres@127.0.0.1:{database.port}/shop"
    with run(["-c", DJANGO], tmp_path, **where) as application:
        assert application.stdout is not None
        assert application.stdout.readline() == "made\n"
        with run(["-m", "django", "parcels"], tmp_path, **where):
            order(application, broker)
            assert depth(engine, outbox) == 2
            with run(["-m", "qflow_client.cli", "relay", broker.url, "--database", url], tmp_path):
                eventually(lambda: items(engine, "shop_parcel") == ["a book", "a chair"])
        application.communicate("check\n", timeout=PATIENCE)
        assert application.returncode == 0
    engine.dispose()
