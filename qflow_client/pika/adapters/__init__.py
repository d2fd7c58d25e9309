"""pika's adapters, with flow control."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pika.adapters
from pika.adapters import BaseConnection, IOLoop

from qflow_client.pika.adapters.asyncio_connection import AsyncioConnection
from qflow_client.pika.adapters.blocking_connection import BlockingConnection
from qflow_client.pika.adapters.select_connection import SelectConnection
from qflow_client.pika.mirror import mirror, passed_on

__all__ = ["AsyncioConnection", "BaseConnection", "BlockingConnection", "IOLoop", "SelectConnection"]

# Only pika 1.5 and later have `Connection`.
with suppress(ModuleNotFoundError):
    from qflow_client.pika.adapters.thread_safe_connection import Connection

    __all__ += ["Connection"]


def __getattr__(name: str) -> Any:
    return passed_on(pika.adapters, name)


mirror(__name__, pika.adapters)
