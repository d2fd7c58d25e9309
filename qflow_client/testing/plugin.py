"""The pytest plugin: a broker for every test that asks for one.

A test takes the fixture `qflow_broker`, publishes to its `url` with the program under test, and has the broker do what
brokers do: ``flow(False)``, ``block()``, ``withhold_confirms()``, ``nack_publishes()``, ``close_channels()``,
``close_connections()``, ``drop_connections()``; see `qflow_client.broker.Broker`. The ``url`` of `qflow_proxy` leads to
the same broker by way of a proxy that does what networks do; see `qflow_client.testing.proxy.FaultProxy`.
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
    """Make the marker known."""
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(**settings): settings of the broker that the fixture qflow_broker gives, by the names of "
        "qflow_client.broker.BrokerSettings; the nearest marker goes first",
    )


@pytest.fixture
def qflow_broker_settings() -> Mapping[str, Any]:
    """Settings for every `qflow_broker`, to be overridden in a conftest or a module; a marker goes before them."""
    return {}


@pytest.fixture
def qflow_broker(request: pytest.FixtureRequest, qflow_broker_settings: Mapping[str, Any]) -> Iterator[Broker]:
    """A fresh broker on a free loopback port, which ends with the test."""
    # pytest loads this module in every run; the broker is for those that use it.
    from qflow_client.broker import Broker

    settings = dict(qflow_broker_settings)
    # The nearest comes first, and has the last word.
    for marker in reversed(list(request.node.iter_markers(_MARKER))):
        if marker.args:
            raise pytest.UsageError(f"@pytest.mark.{_MARKER} takes settings by name, not {marker.args[0]!r}")
        settings |= marker.kwargs
    with Broker(**settings) as broker:
        yield broker


@pytest.fixture(scope="session")
def qflow_broker_factory() -> Iterator[Callable[..., Broker]]:
    """Makes brokers that end with the session: call it with settings, such as in a fixture of a wider scope."""
    from qflow_client.broker import Broker

    with ExitStack() as brokers:

        def make(**settings: Any) -> Broker:
            return brokers.enter_context(Broker(**settings))

        yield make


@pytest.fixture
def qflow_proxy(qflow_broker: Broker) -> Iterator[FaultProxy]:
    """A proxy before the `qflow_broker` of the test, which passes everything on until it is told otherwise."""
    from qflow_client.testing.proxy import FaultProxy

    with FaultProxy(qflow_broker.url) as proxy:
        yield proxy
