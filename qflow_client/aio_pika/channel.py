"""`aio_pika.channel`, under flow control: who publishes waits, at most for a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import aio_pika.channel as _aio_pika

from qflow_client.aio_pika.flow import ChannelFlow
from qflow_client.events import FlowEvent, FlowState
from qflow_client.logs import log
from qflow_client.redaction import shown
from qflow_client.skin import BRIEF

__all__ = ["Channel"]


class Channel(_aio_pika.Channel):
    """aio-pika's `Channel`, whose exchanges wait to publish while the broker has stopped it, at most for a time.

    ``Channel.Flow`` is answered, and stops publishing, as ``Connection.Blocked``, a full window of unconfirmed
    messages, a rate limit and a socket that takes no bytes do. Everything else goes on meanwhile.
    """

    # aio-pika's.
    _connection: Any
    _channel: Any
    # Whether aio-pika declares again on a new channel what was declared on the last.
    _restores = False

    def __init__(
        self,
        connection: Any,
        channel_number: int | None = None,
        publisher_confirms: bool = True,
        on_return_raises: bool = False,
    ) -> None:
        if not hasattr(connection, "flow_settings"):
            raise TypeError(
                f"connection={shown(connection)}: it must be one of qflow_client.aio_pika's; connect with its "
                "connect(), or derive your connection_class from its Connection"
            )
        super().__init__(connection, channel_number, publisher_confirms, on_return_raises)
        self._make_flow()

    def _make_flow(self) -> None:
        connection = self._connection
        #: The channel's flow; for the package.
        self.flow_control = ChannelFlow(
            connection.flow_settings,
            confirms=self.publisher_confirms,
            restores=self._restores,
            is_closing=lambda: bool(connection.close_called),
        )
        connection.flows.add(self.flow_control)

    def adopt(self) -> None:
        """Begin to follow the flow on a channel that is open; for the package."""
        self._make_flow()
        self._follow()

    def _follow(self) -> None:
        self.flow_control.opened(self._connection.carrier_of(self._channel.channel), self._channel)

    async def _on_open(self) -> None:
        # Here it is open, and nothing can have been published on it.
        self._follow()
        await super()._on_open()
        if self._restores:
            self.flow_control.restored()

    async def close(self, exc: Any = None) -> None:
        """As aio-pika's. Who waits to publish gets the error that ends the channel.

        A broker that does not read, as one that blocks the connection, has `max_producer_flow_control_wait` seconds to
        answer, or next to none if the channel is left by an exception.
        """
        flow = self.flow_control
        flow.left = True
        try:
            if flow.is_stuck:
                await self._close_stuck(exc)
            else:
                await super().close(exc)
        finally:
            flow.ended()

    async def _close_stuck(self, exc: Any) -> None:
        """Close it on a connection of which the broker reads nothing, and so no good-bye."""
        flow = self.flow_control
        # Whoever leaves by an exception does not wait for holds.
        wait = BRIEF if exc is not None else flow.settings.max_producer_flow_control_wait
        closing = asyncio.ensure_future(super().close(exc))
        done, _ = await asyncio.wait((closing,), timeout=wait)
        if done:
            closing.result()
            return
        # The broker may hear of it later; at the latest the end of the connection ends this.
        closing.add_done_callback(_look)
        log(
            logging.WARNING,
            "%s: the broker blocks the connection, or takes no bytes, and has not closed the channel within %.3g s",
            flow.name,
            wait,
        )

    def on_flow(self, callback: Callable[[FlowEvent], object]) -> Callable[[], None]:
        """Have a callback called with every flow event, in order, as a call scheduled on the loop.

        Args:
            callback: may call any method of the channel. If it raises, that is logged.

        Returns:
            What to call to have it called no more.

        Raises:
            TypeError: it is a coroutine function, which nobody would await.
        """
        return self.flow_control.on_flow(callback)

    @property
    def flow_state(self) -> FlowState:
        """Whether the channel is flowed, by what, since when and how often."""
        return self.flow_control.look()

    async def wait_unflowed(self, timeout: float | None = None) -> bool:
        """Wait until no hold is left.

        Args:
            timeout: seconds; ``None`` for ever.

        Returns:
            Whether none is.

        Raises:
            ChannelInvalidStateError: the channel is closed, so none ever will be; or what closed it meanwhile.
            TypeError, ValueError: `timeout` is no number.
        """
        return await self.flow_control.wait_unflowed(timeout)


def _look(closing: asyncio.Future[Any]) -> None:
    if not closing.cancelled():
        closing.exception()


def __getattr__(name: str) -> Any:
    return getattr(_aio_pika, name)
