from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine

from benchmarks.postgresql import NotInstalled, PostgresqlServer, server
from qflow_client.broker import Broker
from qflow_client.sqlalchemy import Outbox


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    try:
        context = server("fsync=off", "max_connections=50")
        found = context.__enter__()
    except NotInstalled as error:
        if os.environ.get("QFLOW_REQUIRE_POSTGRES"):
            raise
        pytest.skip(str(error))
    try:
        yield found
    finally:
        context.__exit__(None, None, None)


@pytest.fixture
def engine(postgresql: PostgresqlServer) -> Iterator[Engine]:
    engine = create_engine(postgresql.url)
    yield engine
    engine.dispose()


@pytest.fixture
def outbox(engine: Engine) -> Iterator[Outbox]:
    outbox = Outbox()
    outbox.metadata.create_all(engine)
    yield outbox
    outbox.metadata.drop_all(engine)


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker() as broker:
        broker.declare_queue("q")
        yield broker
