from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, insert, select

from qflow_client.broker import Broker
from qflow_client.message import REPUBLISHED
from qflow_client.sqlalchemy import Outbox
from qflow_client.sqlalchemy.tables import PARTITIONS

PATIENCE = 30.0
ROOT = Path(__file__).parents[3]
#: Settings of relays that reconnect almost immediately.
FAST: dict[str, Any] = {"reconnect_delay": 0.02}


@pytest.fixture(params=["sqlite", "postgresql"])
def engine_of_each_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """The fixture ``engine`` of modules whose tests run on SQLite and on PostgreSQL."""
    is_sqlite = request.param == "sqlite"
    url = f"sqlite:///{tmp_path}/application.db" if is_sqlite else request.getfixturevalue("postgresql").url
    engine = create_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def sqlite_engine(tmp_path: Path) -> Iterator[Engine]:
    """The fixture ``engine`` of modules whose tests run on SQLite."""
    engine = create_engine(f"sqlite:///{tmp_path}/application.db")
    yield engine
    engine.dispose()


def environment() -> dict[str, str]:
    """Return the environment of a process that imports the package under test."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def eventually(condition: Callable[[], object], what: str = "it") -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, f"{what} has not happened for {PATIENCE:g} s"
        threading.Event().wait(0.01)


def bodies(broker: Broker, queue: str = "q") -> list[bytes]:
    return [message.body for message in broker.messages(queue)]


def marks(broker: Broker, queue: str = "q") -> list[bool]:
    return [bool((message.properties.headers or {}).get(REPUBLISHED)) for message in broker.messages(queue)]


def add(engine: Engine, outbox: Outbox, *messages: Any, key: str | None = None, to: str = "q") -> None:
    with engine.begin() as connection:
        outbox.add_many(connection, messages, routing_key=to, ordering_key=key)


def depth(engine: Engine, outbox: Outbox) -> int:
    with engine.begin() as connection:
        return outbox.status(connection).depth


def set_aside(engine: Engine, outbox: Outbox) -> int:
    with engine.begin() as connection:
        return outbox.status(connection).failed


def permitted(engine: Engine, outbox: Outbox) -> int:
    """Return the id of the last row that a relay was permitted to send."""
    with engine.begin() as connection:
        return max(int(each) for each in connection.execute(select(outbox.tables.relay.c.permitted)).scalars())


def permit(engine: Engine, outbox: Outbox, up_to: int) -> None:
    """Write the state of a relay that was killed after it had permitted rows up to `up_to`."""
    with engine.begin() as connection:
        values = [{"partition": partition, "permitted": up_to, "relayed": 0} for partition in range(PARTITIONS)]
        connection.execute(insert(outbox.tables.relay), values)
