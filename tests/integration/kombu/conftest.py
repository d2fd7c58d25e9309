from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from kombu import Connection, pools

from qflow_client import flow_manager
from qflow_client.broker import Broker
from qflow_client.kombu.flow import ChannelFlow
from qflow_client.kombu.transport import kept
from tests.integration.producer.conftest import broker as broker
from tests.integration.producer.conftest import certificate as certificate
from tests.integration.producer.conftest import make_broker as make_broker
from tests.integration.producer.conftest import proxy as proxy
from tests.integration.producer.conftest import stack as stack
from tests.integration.producer.conftest import wire as wire
from tests.integration.producer.tools import PATIENCE


@pytest.fixture(autouse=True, scope="module")
def _no_connection_is_left() -> Iterator[None]:
    yield
    pools.reset()
    for flow in flow_manager.resources:
        # Celery leaves the connections of its result backend and of its pools open.
        assert isinstance(flow, ChannelFlow)
        if flow.channel.connection is not None:
            flow.channel.connection.collect()
    assert flow_manager.resources == ()


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    yield
    kept.cut()


@pytest.fixture
def connect(broker: Broker, stack: ExitStack) -> Callable[..., Connection]:
    """A function that connects to `broker` or to a URL, with given options. The test need not close connections."""

    def connect(url: str | None = None, **options: Any) -> Connection:
        parameters = {name: options.pop(name) for name in ("ssl", "heartbeat") if name in options}
        address = (url or broker.url).replace("amqp", "qflow")
        connection = Connection(address, connect_timeout=PATIENCE, transport_options=options, **parameters)
        stack.callback(connection.release)
        return connection.connect() and connection

    return connect
