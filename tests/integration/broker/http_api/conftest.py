from __future__ import annotations

from collections.abc import Iterator

import pytest

from qflow_client.broker import Broker

from .tools import Client


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker(http_port=0) as broker:
        yield broker


@pytest.fixture
def ask(broker: Broker) -> Client:
    return Client(broker)
