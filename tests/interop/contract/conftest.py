from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from qflow_client.testing.brokerj import BrokerJ
from qflow_client.testing.rabbitmq import RabbitMQ, RabbitMQNode
from tests.interop import matrix
from tests.interop.contract.producers import PRODUCERS
from tests.interop.contract.providers import Inbox, Provider, Providers


@pytest.fixture(scope="session")
def providers(
    session_rabbitmq: Callable[[], RabbitMQNode],
    session_container: Callable[[str], RabbitMQ],
    session_brokerj: Callable[[str], BrokerJ],
) -> Iterator[Providers]:
    made = Providers(session_rabbitmq, session_container, session_brokerj)
    yield made
    made.close()


@pytest.fixture
def provider(request: pytest.FixtureRequest, providers: Providers) -> Provider:
    """The broker of the test."""
    return providers[request.param]


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A function that creates the producer of the test."""
    return PRODUCERS[request.param]


@pytest.fixture(autouse=True)
def numbers(
    request: pytest.FixtureRequest, provider: Provider, record_property: Callable[[str, object], None]
) -> dict[str, Any]:
    """A mapping for named numbers that the test has found. The numbers appear in the compatibility matrix."""
    found: dict[str, Any] = {}
    of = request.node.callspec.params
    (capability,) = request.node.get_closest_marker("capability").args
    shown = {"broker": of["provider"], "version": provider.version, "producer": of["make"], "capability": capability}
    record_property(matrix.CONTRACT, {**shown, "numbers": found})
    return found


@pytest.fixture
def inbox(provider: Provider) -> Iterator[Inbox]:
    """Declares queues for the test, and deletes them at its end."""
    made = Inbox(provider.url)
    yield made
    made.close()
