"""`qflow_client.django` in a separate process, because the settings of Django are global to a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from benchmarks.postgresql import PostgresqlServer
from qflow_client.broker import Broker
from qflow_client.sqlalchemy import Outbox, OutboxRelay

from .support import FAST, PATIENCE, bodies, depth, environment, eventually

PROGRAM = """
import sys
import django
from django.conf import settings
from django.core.management import call_command
from django.db import connection, transaction

if sys.argv[1] == "sqlite":
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[2]}
else:
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": "127.0.0.1",
        "PORT": sys.argv[2],
        "NAME": "postgres",
        "USER": "postgres",
    }
settings.configure(INSTALLED_APPS=["qflow_client.django"], DATABASES={"default": database})
django.setup()

from qflow_client import Message
from qflow_client.django import add, add_many, first_time, forget

def raises(error, call):
    try:
        call()
    except error:
        return True

call_command("migrate", verbosity=0)
call_command("makemigrations", check=True, verbosity=0)
try:
    with transaction.atomic():
        add(b"rolled back", routing_key="q")
        raise RuntimeError
except RuntimeError:
    pass
with transaction.atomic():
    assert add(Message(b"0", message_id="mine"), routing_key="q", ordering_key="k") == "mine"
    add_many(["%d" % number for number in range(1, 250)], routing_key="q", ordering_key="k")
    assert raises(ValueError, lambda: add_many([b"good", b"bad"], routing_key="k" * 256))
assert add_many([]) == []
assert raises(transaction.TransactionManagementError, lambda: first_time("1"))
try:
    with transaction.atomic():
        assert first_time("1")
        raise RuntimeError
except RuntimeError:
    pass
with transaction.atomic():
    assert first_time("1")
    assert not first_time("1")
    assert first_time("1", consumer="another")
    assert raises(ValueError, lambda: first_time(""))
assert forget(3600) == 0
assert forget(-3600) == 2
with transaction.atomic():
    assert first_time("1")
print("added", flush=True)
sys.stdin.read()
call_command("migrate", "qflow_outbox", "zero", verbosity=0)
assert not [name for name in connection.introspection.table_names() if name.startswith("qflow_")]
"""


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_E14_a_django_application_adds_messages_in_its_transactions(
    database: str, request: pytest.FixtureRequest, tmp_path: Path, broker: Broker
) -> None:
    where, url = str(tmp_path / "application.db"), f"sqlite:///{tmp_path}/application.db"
    if database == "postgresql":
        server: PostgresqlServer = request.getfixturevalue("postgresql")
        where, url = str(server.port), server.url
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, database, where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"added\n"
        engine, outbox = create_engine(url), Outbox()
        assert depth(engine, outbox) == 250
        with OutboxRelay(engine, broker.url, outbox=outbox, **FAST) as relay:
            eventually(lambda: relay.counts.confirmed == 250)
        assert bodies(broker) == [b"%d" % number for number in range(250)]
        assert broker.messages("q")[0].properties.message_id == "mine"
        engine.dispose()
        # Drops the tables.
        process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
