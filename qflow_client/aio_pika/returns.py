"""Returned messages on a channel of aio-pika, for the calls that published them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pamqp.frame
from aiormq import spec
from aiormq.abc import DeliveredMessage
from aiormq.exceptions import PublishError

from qflow_client.amqp.frames import HEADER_FRAME, frame
from qflow_client.logs import log

__all__ = ["Expected", "Returns"]

#: The future for the result of a mandatory message, its exchange and its routing key.
Expected = tuple[asyncio.Future[Any], str, str]


class Returns:
    """Gives each returned message to the call of `publish` that waits for it."""

    def __init__(self) -> None:
        # The unconfirmed mandatory messages with a message id, in the order of publishing. The application may give
        # several messages the same id.
        self._expected: dict[str, list[Expected]] = {}

    def expect(self, message_id: str, expected: Expected) -> None:
        """Add a mandatory message."""
        self._expected.setdefault(message_id, []).append(expected)

    def forget(self, message_id: str, expected: Expected) -> None:
        """Remove a mandatory message if it is there."""
        same_id = self._expected.get(message_id, [])
        if expected in same_id:
            same_id.remove(expected)
            if not same_id:
                del self._expected[message_id]

    def tell(self, method: spec.Basic.Return, header: bytes, body: bytes, channel: Any, name: str) -> None:
        """Set the result of the call that published a returned message. If no call waits for it, log a warning.

        Args:
            header: payload of the header frame.
            channel: aiormq's channel, which may have callbacks for returned messages.
            name: name of the channel in log entries.
        """
        content: Any = pamqp.frame.unmarshal(frame(HEADER_FRAME, channel.number, header))[2]
        message = DeliveredMessage(delivery=method, header=content, body=body, channel=channel)
        settled = self._take(content.properties.message_id, method.exchange, method.routing_key)
        if settled is None or settled.done():
            log(logging.WARNING, "%s: the broker returned a message that no call waits for: %r", name, message)
            return
        if channel.on_return_raises:
            settled.set_exception(PublishError(message, method))
            return
        for callback in tuple(channel.on_return_callbacks):
            try:
                callback(message)
            except Exception as error:
                log(logging.ERROR, "%s: a return callback failed: %r", name, callback, error=error)
        settled.set_result(message)

    def _take(self, message_id: str, exchange: str, routing_key: str | None) -> asyncio.Future[Any] | None:
        """Remove and return the future of the message that a return refers to; ``None`` if no call waits for it."""
        same_id = self._expected.get(message_id)
        if not same_id:
            return None
        # Prefer a message with the exchange and routing key of the return. Brokers return messages in order.
        found = next((each for each in same_id if each[1:] == (exchange, routing_key)), same_id[0])
        self.forget(message_id, found)
        return found[0]
