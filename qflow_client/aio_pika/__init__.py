"""aio-pika with flow control: ``import qflow_client.aio_pika as aio_pika``.

The package has all names of aio-pika, and `wrap`. Its connections and channels are subclasses of aio-pika's, with flow
control. `Exchange`, `Queue` and most other names stand for aio-pika's own objects.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import aio_pika as _aio_pika
from aio_pika import (
    AMQPException,
    DeliveryMode,
    Exchange,
    ExchangeType,
    IncomingMessage,
    Message,
    MessageProcessError,
    Queue,
    RobustExchange,
    RobustQueue,
    __version__,
    abc,
    logger,
    patterns,
    pool,
)

from qflow_client.aio_pika import channel, connection, robust_channel, robust_connection
from qflow_client.aio_pika.channel import Channel
from qflow_client.aio_pika.connection import Connection, connect
from qflow_client.aio_pika.robust_channel import RobustChannel
from qflow_client.aio_pika.robust_connection import RobustConnection, connect_robust
from qflow_client.aio_pika.wrapping import wrap

__all__ = [
    "AMQPException",
    "Channel",
    "Connection",
    "DeliveryMode",
    "Exchange",
    "ExchangeType",
    "IncomingMessage",
    "Message",
    "MessageProcessError",
    "Queue",
    "RobustChannel",
    "RobustConnection",
    "RobustExchange",
    "RobustQueue",
    "__version__",
    "abc",
    "channel",
    "connect",
    "connect_robust",
    "connection",
    "logger",
    "patterns",
    "pool",
    "robust_channel",
    "robust_connection",
    "wrap",
]

# Add the names that only some versions of aio-pika have.
__all__ += [_name for _name in getattr(_aio_pika, "__all__", ()) if _name not in __all__]

# Make "import qflow_client.aio_pika.exceptions" possible.
for _name in (
    "abc",
    "exceptions",
    "exchange",
    "log",
    "message",
    "patterns",
    "patterns.base",
    "patterns.master",
    "patterns.rpc",
    "pool",
    "queue",
    "robust_exchange",
    "robust_queue",
    "tools",
    "transaction",
):
    sys.modules[f"{__name__}.{_name}"] = import_module(f"aio_pika.{_name}")


def __getattr__(name: str) -> Any:
    return getattr(_aio_pika, name)
