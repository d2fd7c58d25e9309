"""`aio_pika.robust_channel`, under flow control."""

from __future__ import annotations

import asyncio
from typing import Any

import aio_pika.channel
import aio_pika.robust_channel as _aio_pika
from aiormq.exceptions import AMQPConnectionError

from qflow_client.aio_pika.channel import Channel

__all__ = ["RobustChannel"]


class RobustChannel(Channel, _aio_pika.RobustChannel):
    """aio-pika's `RobustChannel`, whose exchanges wait to publish while the broker has stopped it.

    Who waits when the connection is lost waits on, until aio-pika has restored the channel or the time is up. What the
    broker said of the flow of the last channel is forgotten; what it says of the new one is heard from its first byte.
    """

    _restores = True

    # aio-pika's.
    __restored: asyncio.Event

    async def _on_close(self, closing: asyncio.Future[Any]) -> BaseException | None:
        if not closing.cancelled() and isinstance(closing.exception(), AMQPConnectionError):
            # The connection restores its channels. aio-pika's channel begins that, too, and may wait for the connection
            # with the lock in hand that the connection waits for: neither would ever go on.
            self.__restored.clear()
            return await aio_pika.channel.Channel._on_close(self, closing)
        return await super()._on_close(closing)


def __getattr__(name: str) -> Any:
    return getattr(_aio_pika, name)
