"""pika with flow control: ``import qflow_client.pika as pika``.

It has everything that pika has. `BlockingConnection` and the asynchronous adapters, their channels, and the connection
parameters are pika's own with flow control added. Everything else is pika's own, unchanged.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pika as _pika
from pika import (
    AMQPConnectionWorkflow,
    BaseConnection,
    BasicProperties,
    DeliveryMode,
    PlainCredentials,
    SSLOptions,
)

from qflow_client.pika import adapters, channel, connection
from qflow_client.pika.adapters import AsyncioConnection, BlockingConnection, SelectConnection
from qflow_client.pika.adapters.blocking_connection import BlockingChannel
from qflow_client.pika.channel import Channel
from qflow_client.pika.connection import ConnectionParameters, URLParameters
from qflow_client.pika.mirror import alias, mirror, passed_on
from qflow_client.pika.wrapping import wrap

__all__ = [
    "AMQPConnectionWorkflow",
    "AsyncioConnection",
    "BaseConnection",
    "BasicProperties",
    "BlockingChannel",
    "BlockingConnection",
    "Channel",
    "ConnectionParameters",
    "DeliveryMode",
    "PlainCredentials",
    "SSLOptions",
    "SelectConnection",
    "URLParameters",
    "adapters",
    "channel",
    "connection",
    "wrap",
]

# pika has it from 1.5 on.
with suppress(ImportError):
    from qflow_client.pika.adapters import Connection

    __all__ += ["Connection"]

# So that "import pika.exceptions" can become "import qflow_client.pika.exceptions".
alias(__name__, _pika)


def __getattr__(name: str) -> Any:
    return passed_on(_pika, name)


mirror(__name__, _pika)
