"""`pika.adapters.select_connection`, under flow control."""

from __future__ import annotations

from typing import Any

import pika.adapters.select_connection as _pika

from qflow_client.pika.connection import FlowedConnection

__all__ = ["SelectConnection"]


class SelectConnection(FlowedConnection, _pika.SelectConnection):
    """pika's `SelectConnection`, whose channels follow the flow."""


def __getattr__(name: str) -> Any:
    return getattr(_pika, name)
