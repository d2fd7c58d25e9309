from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from qflow_client.testing.rabbitmq import RabbitMQNode, RabbitMQNotInstalled


def _make_node() -> RabbitMQNode:
    try:
        return RabbitMQNode()
    except RabbitMQNotInstalled as missing:
        if os.environ.get("QFLOW_REQUIRE_BROKERS") == "1":
            pytest.fail(f"{missing} (QFLOW_REQUIRE_BROKERS=1 forbids to skip)", pytrace=False)
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQNode]:
    """A running RabbitMQ node for all tests: leave it running, without alarms, and use queues of your own."""
    with _make_node() as node:
        yield node


@pytest.fixture
def own_rabbitmq() -> Iterator[RabbitMQNode]:
    """A running RabbitMQ node for one test, to crash and stop as it likes."""
    with _make_node() as node:
        yield node
