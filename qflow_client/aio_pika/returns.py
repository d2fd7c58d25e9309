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
from qflow_client.core.tickets import SendTicket
from qflow_client.logs import log

__all__ = ["Expected", "Returns"]


class Expected:
    """A mandatory message that the broker may return. `settled` is the future that wakes its call of `publish`."""

    __slots__ = ("answer", "exchange", "routing_key", "settled", "ticket")

    def __init__(self, settled: asyncio.Future[Any], exchange: str, routing_key: str) -> None:
        self.settled = settled
        self.exchange = exchange
        self.routing_key = routing_key
        #: The ticket of a message that waits in line, or has waited; ``None`` if it was admitted at once.
        self.ticket: SendTicket | None = None
        #: The returned message, or the error to raise instead; ``None`` while the message is not returned. `settled`
        #: may be done earlier, at the deadline of `publish`.
        self.answer: DeliveredMessage | PublishError | None = None


class Returns:
    """Gives each returned message to the call of `publish` that waits for it."""

    def __init__(self) -> None:
        # The messages whose calls of `publish` wait, in the order of publishing, by message id. The application may
        # give several messages the same id.
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
        expected = self._take(content.properties.message_id, method.exchange, method.routing_key)
        if expected is None or expected.settled.cancelled():
            log(logging.WARNING, "%s: the broker returned a message that no call waits for: %r", name, message)
            return
        if channel.on_return_raises:
            expected.answer = PublishError(message, method)
        else:
            for callback in tuple(channel.on_return_callbacks):
                try:
                    callback(message)
                except Exception as error:
                    log(logging.ERROR, "%s: a return callback failed: %r", name, callback, error=error)
            expected.answer = message
        if not expected.settled.done():
            expected.settled.set_result(None)

    def _take(self, message_id: str, exchange: str, routing_key: str | None) -> Expected | None:
        """Remove and return the message that a return refers to; ``None`` if no call waits for it."""
        # A message with the same id is another message if it has another exchange or routing key, or waits in line: the
        # call that published the returned message may have ended. Brokers return messages in order.
        for each in self._expected.get(message_id, ()):
            is_admitted = each.ticket is None or each.ticket.is_admitted
            if is_admitted and (each.exchange, each.routing_key) == (exchange, routing_key):
                self.forget(message_id, each)
                return each
        return None
