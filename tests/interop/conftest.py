from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
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
def nodes() -> Iterator[ExitStack]:
    """What is stopped after all tests."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def session_rabbitmq(nodes: ExitStack) -> Callable[[], RabbitMQNode]:
    """Starts a RabbitMQ node for all tests when it is first asked for."""
    return cache(lambda: nodes.enter_context(_make(RabbitMQNode)))


@pytest.fixture(scope="session")
def session_brokerj(nodes: ExitStack) -> Callable[[str], BrokerJ]:
    """Starts a Broker-J of a release for all tests when it is first asked for, or takes that of the environment.

    It closes channels that go on publishing after one second instead of five, where it is started here.
    """

    @cache
    def brokerj(version: str) -> BrokerJ:
        url, management_url = (os.environ.get(f"QFLOW_BROKERJ_{name}") for name in ("URL", "MANAGEMENT_URL"))
        if url and management_url:
            if version != VERSIONS[-1]:
                pytest.skip("QFLOW_BROKERJ_URL names one broker, which is tested once")
            return BrokerJ(url, management_url)
        return nodes.enter_context(_make(lambda: BrokerJNode(version, flow_enforcement_timeout=1.0)))

    return brokerj


@pytest.fixture(scope="session")
def rabbitmq(session_rabbitmq: Callable[[], RabbitMQNode]) -> RabbitMQNode:
    """A running RabbitMQ node for all tests: leave it running, without alarms, and use queues of your own."""
    return session_rabbitmq()


@pytest.fixture
def own_rabbitmq() -> Iterator[RabbitMQNode]:
    """A running RabbitMQ node for one test, to crash and stop as it likes."""
    with _make(RabbitMQNode) as node:
        yield node


@pytest.fixture(scope="session", params=VERSIONS)
def brokerj(request: pytest.FixtureRequest, session_brokerj: Callable[[str], BrokerJ]) -> BrokerJ:
    """A running Broker-J of each release for all tests: use queues of your own."""
    return session_brokerj(request.param)


@pytest.fixture
def own_brokerj() -> Iterator[BrokerJNode]:
    """A running Broker-J for one test, to stop as it likes."""
    with _make(BrokerJNode) as node:
        yield node
