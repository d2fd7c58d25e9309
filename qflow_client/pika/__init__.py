"""pika with flow control: ``import qflow_client.pika as pika``.

The package has all names of pika, and `wrap`. Its connections, channels and connection parameters are subclasses of
pika's classes, with flow control. All other objects are pika's own.
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

# Only pika 1.5 and later have `Connection`.
with suppress(ImportError):
    from qflow_client.pika.adapters import Connection

    __all__ += ["Connection"]

# Make "import qflow_client.pika.exceptions" possible.
alias(__name__, _pika)


def __getattr__(name: str) -> Any:
    return passed_on(_pika, name)


mirror(__name__, _pika)
