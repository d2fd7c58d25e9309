"""`aio_pika.channel`, with flow control: `publish` waits for a limited time while the channel is blocked."""

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
    """aio-pika's `Channel`. While the channel is blocked (flowed), `publish` waits for a limited time.

    The channel answers ``Channel.Flow``. Causes of a block are ``Channel.Flow``, ``Connection.Blocked``, a full
    window, a rate limit, the `flow_manager` or a full socket. During the wait, all other I/O continues.
    """

    # Attributes of aio-pika's class.
    _connection: Any
    _channel: Any
    # Whether aio-pika repeats the declarations of a lost channel on a new channel.
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
                f"connection={shown(connection)}: it must be a connection of qflow_client.aio_pika; connect with "
                "qflow_client.aio_pika.connect(), or derive your connection_class from its Connection"
            )
        super().__init__(connection, channel_number, publisher_confirms, on_return_raises)
        self._make_flow()

    def _make_flow(self) -> None:
        connection = self._connection
        #: The flow control of the channel (internal).
        self.flow_control = ChannelFlow(
            connection.flow_settings,
            confirms=self.publisher_confirms,
            restores=self._restores,
            is_closing=lambda: bool(connection.close_called),
        )
        connection.flows.add(self.flow_control)

    def adopt(self) -> None:
        """Start flow control on an open channel (internal)."""
        self._make_flow()
        self._follow()

    def _follow(self) -> None:
        self.flow_control.opened(self._connection.carrier_of(self._channel.channel), self._channel)

    async def _on_open(self) -> None:
        # Start flow control here, before any message is published on the new channel.
        self._follow()
        await super()._on_open()
        # aio-pika does this only for the first channel of aiormq. So later returns would not reach `return_callbacks`.
        self._channel.channel.on_return_callbacks.add(self._on_return)
        if self._restores:
            self.flow_control.restored()

    async def close(self, exc: Any = None) -> None:
        """Close the channel like aio-pika. Blocked (flowed) calls of `publish` raise `ChannelInvalidStateError`.

        If the broker reads nothing now, this method waits for its answer for at most `max_producer_flow_control_wait`
        seconds, or 0.3 s if an exception has ended the channel's ``async with`` block.
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
        """Close the channel, and limit the wait for the broker's answer, because the broker does not read now."""
        flow = self.flow_control
        # If an exception has ended the channel's ``async with`` block, wait briefly.
        wait = BRIEF if exc is not None else flow.settings.max_producer_flow_control_wait
        closing = asyncio.ensure_future(super().close(exc))
        done, _ = await asyncio.wait((closing,), timeout=wait)
        if done:
            closing.result()
            return
        # Do not cancel the task `closing`, because the broker may still answer. The task ends with the connection.
        closing.add_done_callback(_look)
        log(
            logging.WARNING,
            "%s: the broker blocks the connection, or takes no bytes, and has not closed the channel within %.3g s",
            flow.name,
            wait,
        )

    def on_flow(self, callback: Callable[[FlowEvent], object]) -> Callable[[], None]:
        """Register a callback, which the event loop calls with each flow event. Return a function that removes it.

        Args:
            callback: the callback, which may call any method of the channel. An exception of the callback is logged.

        Raises:
            TypeError: the callback is a coroutine function, which would never be awaited.
        """
        return self.flow_control.on_flow(callback)

    @property
    def flow_state(self) -> FlowState:
        """The flow state of the channel: its holds, and how often and for how long it was blocked (flowed)."""
        return self.flow_control.look()

    async def wait_unflowed(self, timeout: float | None = None) -> bool:
        """Wait until there are no holds. Return False after the timeout.

        Args:
            timeout: the longest wait in seconds; ``None`` for no limit.

        Raises:
            ChannelInvalidStateError: the channel is closed. If the channel is closed during the call, the call raises
                the error that closed the channel.
            TypeError, ValueError: `timeout` is not a number.
        """
        return await self.flow_control.wait_unflowed(timeout)


def _look(closing: asyncio.Future[Any]) -> None:
    if not closing.cancelled():
        closing.exception()


def __getattr__(name: str) -> Any:
    return getattr(_aio_pika, name)
