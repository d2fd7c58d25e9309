"""pika with flow control: ``import qflow_client.pika as pika``.

It has all that pika has. `BlockingConnection` and the asynchronous adapters, their channels, and the connection
parameters are pika's own with flow control added; everything else is pika's own.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
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

# Some releases of pika have more.
__all__ += [_name for _name in getattr(_pika, "__all__", ()) if _name not in __all__]

# So that "import pika.exceptions" can become "import qflow_client.pika.exceptions".
for _name in (
    "callback",
    "credentials",
    "data",
    "delivery_mode",
    "exceptions",
    "exchange_type",
    "frame",
    "spec",
    "validators",
):
    sys.modules[f"{__name__}.{_name}"] = import_module(f"pika.{_name}")


def __getattr__(name: str) -> Any:
    return getattr(_pika, name)
