from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest

import qflow_client.pika as pika
from qflow_client.broker import Broker
from tests.integration.producer.conftest import broker as broker
from tests.integration.producer.conftest import certificate as certificate
from tests.integration.producer.conftest import make_broker as make_broker
from tests.integration.producer.conftest import proxy as proxy
from tests.integration.producer.conftest import stack as stack
from tests.integration.producer.conftest import wire as wire


@pytest.fixture
def connect(broker: Broker, stack: ExitStack) -> Callable[..., pika.BlockingConnection]:
    """A function that connects to `broker` or to a URL, with given settings. The test need not close connections."""

    def connect(url: str | None = None, **settings: Any) -> pika.BlockingConnection:
        query = "&".join(f"{name}={value}" for name, value in settings.items())
        connection = pika.BlockingConnection(pika.URLParameters(f"{url or broker.url}?{query}"))

        def close() -> None:
            # The broker may have closed the connection before, without notice to the program.
            with suppress(pika.exceptions.AMQPConnectionError):
                connection.close()

        stack.callback(close)
        return connection

    return connect
