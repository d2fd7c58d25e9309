"""`aio_pika.robust_channel`, with flow control."""

from __future__ import annotations

import asyncio
from typing import Any

import aio_pika
import aio_pika.channel
import aio_pika.robust_channel as _aio_pika
from aio_pika.abc import AbstractMessage, TimeoutType
from aiormq.exceptions import AMQPConnectionError

from qflow_client.aio_pika.channel import Channel
from qflow_client.aio_pika.flow import ChannelFlow

__all__ = ["RobustChannel"]


class _Exchange(aio_pika.RobustExchange):
    """An exchange of a robust channel. Without a connection, `publish` waits for one, see `ChannelFlow`."""

    # Attributes of aio-pika's class.
    channel: Any

    async def publish(
        self,
        message: AbstractMessage,
        routing_key: str,
        *,
        mandatory: bool = True,
        immediate: bool = False,
        timeout: TimeoutType = None,
    ) -> Any:
        flow: ChannelFlow = self.channel.flow_control
        if self.internal or flow.channel is None or not flow.republishes:
            return await super().publish(
                message, routing_key, mandatory=mandatory, immediate=immediate, timeout=timeout
            )
        return await flow.basic_publish(
            flow.channel,
            message.body,
            exchange=self.name,
            routing_key=routing_key,
            properties=message.properties,
            mandatory=mandatory,
            immediate=immediate,
            timeout=timeout,
        )


class RobustChannel(Channel, _aio_pika.RobustChannel):
    """aio-pika's `RobustChannel`. While the channel is blocked (flowed), `publish` waits, see `ChannelFlow`.

    With ``on_disconnect="republish"``, `publish` waits after a lost connection until aio-pika has restored the channel.
    The loss lifts the holds of the lost channel. On the new channel, flow control starts before the first message.
    """

    _restores = True

    # Attributes of aio-pika's class.
    __restored: asyncio.Event

    def _make_flow(self) -> None:
        super()._make_flow()
        if self.flow_control.republishes:
            self.EXCHANGE_CLASS = _Exchange
            for exchange in self._exchanges.values():
                exchange.__class__ = _Exchange
            if hasattr(self, "default_exchange"):
                self.default_exchange.__class__ = _Exchange

    async def _on_close(self, closing: asyncio.Future[Any]) -> BaseException | None:
        if not closing.cancelled() and isinstance(closing.exception(), AMQPConnectionError):
            # The connection restores this channel. aio-pika's `_on_close` would restore the channel too, and could wait
            # for the connection while it holds a lock that the connection needs.
            self.__restored.clear()
            return await aio_pika.channel.Channel._on_close(self, closing)
        return await super()._on_close(closing)


def __getattr__(name: str) -> Any:
    return getattr(_aio_pika, name)
