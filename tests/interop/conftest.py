from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from qflow_client.testing.brokerj import VERSIONS, BrokerJ, BrokerJNode, BrokerJNotInstalled
from qflow_client.testing.rabbitmq import RabbitMQNode, RabbitMQNotInstalled
from tests.interop.toolchains import ToolchainNotInstalled

Made = TypeVar("Made")


def _make(make: Callable[[], Made]) -> Made:
    try:
        return make()
    except (BrokerJNotInstalled, RabbitMQNotInstalled, ToolchainNotInstalled) as missing:
        if os.environ.get("QFLOW_REQUIRE_BROKERS") == "1":
            pytest.fail(f"{missing} (QFLOW_REQUIRE_BROKERS=1 forbids to skip)", pytrace=False)
        pytest.skip(str(missing))


@pytest.fixture
def installed() -> Callable[[Callable[[], Made]], Made]:
    """Makes something, or skips the test, or is an error, where the machine lacks what it takes."""
    return _make


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQNode]:
    """A running RabbitMQ node for all tests: leave it running, without alarms, and use queues of your own."""
    with _make(RabbitMQNode) as node:
        yield node


@pytest.fixture
def own_rabbitmq() -> Iterator[RabbitMQNode]:
    """A running RabbitMQ node for one test, to crash and stop as it likes."""
    with _make(RabbitMQNode) as node:
        yield node


@pytest.fixture(scope="session", params=VERSIONS)
def brokerj(request: pytest.FixtureRequest) -> Iterator[BrokerJ]:
    """A running Broker-J for all tests of each release, or the one that the environment names: use queues of your own.

    It closes channels that go on publishing after one second instead of five, where it is started here.
    """
    url, management_url = (os.environ.get(f"QFLOW_BROKERJ_{name}") for name in ("URL", "MANAGEMENT_URL"))
    if url and management_url:
        if request.param != VERSIONS[-1]:
            pytest.skip("QFLOW_BROKERJ_URL names one broker, which is tested once")
        yield BrokerJ(url, management_url)
        return
    with _make(lambda: BrokerJNode(request.param, flow_enforcement_timeout=1.0)) as node:
        yield node


@pytest.fixture
def own_brokerj() -> Iterator[BrokerJNode]:
    """A running Broker-J for one test, to stop as it likes."""
    with _make(BrokerJNode) as node:
        yield node
