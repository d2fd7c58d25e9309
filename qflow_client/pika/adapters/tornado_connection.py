"""`pika.adapters.tornado_connection`, with flow control."""

from __future__ import annotations

from typing import Any

import pika.adapters.tornado_connection as _pika

from qflow_client.pika.connection import FlowedConnection
from qflow_client.pika.mirror import mirror, passed_on

__all__ = ["TornadoConnection"]


class TornadoConnection(FlowedConnection, _pika.TornadoConnection):
    """pika's `TornadoConnection`, with flow control in its channels."""


def __getattr__(name: str) -> Any:
    return passed_on(_pika, name)


mirror(__name__, _pika)
