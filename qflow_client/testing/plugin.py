"""The pytest plugin, which starts a broker for each test that requests the fixture `qflow_broker`.

The program under test publishes to the ``url`` of the broker. The test controls the broker with methods of
`qflow_client.broker.Broker`: ``flow(False)``, ``block()``, ``withhold_confirms()``, ``nack_publishes()``,
``close_channels()``, ``close_connections()``, ``drop_connections()``. The fixture `qflow_proxy` is a proxy between the
program and this broker. The proxy simulates network faults, see `qflow_client.testing.proxy.FaultProxy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from qflow_client.broker import Broker
    from qflow_client.testing.proxy import FaultProxy

__all__ = ["qflow_broker", "qflow_broker_factory", "qflow_broker_settings", "qflow_proxy"]

_MARKER = "qflow_broker"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker ``qflow_broker``, so that pytest does not report it as unknown."""
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(**settings): settings for the broker of the fixture qflow_broker, named as in "
        "qflow_client.broker.BrokerSettings; the nearest marker has priority",
    )


@pytest.fixture
def qflow_broker_settings() -> Mapping[str, Any]:
    """Settings of each `qflow_broker`, to override in a conftest or module. The marker `qflow_broker` has priority."""
    return {}


@pytest.fixture
def qflow_broker(request: pytest.FixtureRequest, qflow_broker_settings: Mapping[str, Any]) -> Iterator[Broker]:
    """A new broker on a free port of the loopback interface. The broker is closed at the end of the test."""
    # Import `Broker` here, because pytest loads this module in every run, even if no test needs a broker.
    from qflow_client.broker import Broker

    settings = dict(qflow_broker_settings)
    # `iter_markers` yields the closest marker first. Apply the closest marker last, so that it has priority.
    for marker in reversed(list(request.node.iter_markers(_MARKER))):
        if marker.args:
            raise pytest.UsageError(f"@pytest.mark.{_MARKER} accepts only keyword arguments, not {marker.args[0]!r}")
        settings |= marker.kwargs
    with Broker(**settings) as broker:
        yield broker


@pytest.fixture(scope="session")
def qflow_broker_factory() -> Iterator[Callable[..., Broker]]:
    """A function that creates a broker with the given settings. All brokers are closed at the end of the session."""
    from qflow_client.broker import Broker

    with ExitStack() as brokers:

        def make(**settings: Any) -> Broker:
            return brokers.enter_context(Broker(**settings))

        yield make


@pytest.fixture
def qflow_proxy(qflow_broker: Broker) -> Iterator[FaultProxy]:
    """A proxy in front of the test's `qflow_broker`. The proxy passes all bytes on until the test sets a fault."""
    from qflow_client.testing.proxy import FaultProxy

    with FaultProxy(qflow_broker.url) as proxy:
        yield proxy
