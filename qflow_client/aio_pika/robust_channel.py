"""`aio_pika.robust_channel`, under flow control."""

from __future__ import annotations

from typing import Any

import aio_pika.robust_channel as _aio_pika

from qflow_client.aio_pika.channel import FlowedChannel

__all__ = ["RobustChannel"]


class RobustChannel(FlowedChannel, _aio_pika.RobustChannel):
    """aio-pika's `RobustChannel`, whose exchanges wait to publish while the broker has stopped it.

    Who waits when the connection is lost waits on, until aio-pika has restored the channel or the time is up. What the
    broker said of the flow of the last channel is forgotten; what it says of the new one is heard from its first byte.
    """

    _restores = True


def __getattr__(name: str) -> Any:
    return getattr(_aio_pika, name)
