"""All producers that promise the contract, with the same interface: `Producer`, `AsyncProducer`, and the drop-ins."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from urllib.parse import urlencode

import qflow_client.aio_pika
import qflow_client.pika
from qflow_client import ConfirmTimeout, Message, Outcome, Producer
from tests.integration.producer.bridge import Bridged
from tests.interop.contract.providers import PATIENCE


def as_message(message: Message | bytes) -> Message:
    return message if isinstance(message, Message) else Message(message)


class Settled:
    """The receipt of a publish that has returned."""

    def __init__(self, outcome: Outcome | None, flush: Callable[[float], None]) -> None:
        self.outcome = outcome
        self._flush = flush

    def wait(self, timeout: float) -> bool:
        return self.outcome is not None

    def result(self, timeout: float) -> Outcome:
        if self.outcome is None:
            self._flush(timeout)
            self.outcome = Outcome.CONFIRMED
        return self.outcome


class DropIn(ABC):
    """Base class of both drop-ins. Each publish returns when the message is confirmed."""

    routing_key: str

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    def flush(self, timeout: float) -> None:  # noqa: B027 - nothing is left to flush
        """Do nothing, because each publish waits for its confirm."""

    @abstractmethod
    def publish(self, message: Message, routing_key: str, timeout: float | None) -> Outcome:
        """Publish a message, and return its outcome."""

    def send(
        self, message: Message | bytes, *, routing_key: str | None = None, timeout: float | None = None
    ) -> Settled:
        try:
            outcome = self.publish(
                as_message(message), self.routing_key if routing_key is None else routing_key, timeout
            )
        except ConfirmTimeout:
            return Settled(None, self.flush)
        return Settled(outcome, self.flush)


class PikaDropIn(DropIn):
    """The drop-in for pika.

    Args:
        url: URL of the broker.
        routing_key: default routing key of the messages.
        max_producer_flow_control_wait: maximum seconds of a flow-control wait, because a publish has no timeout.
    """

    def __init__(self, url: str, *, routing_key: str = "", max_producer_flow_control_wait: float = PATIENCE) -> None:
        self.routing_key = routing_key
        query = urlencode({"max_producer_flow_control_wait": max_producer_flow_control_wait})
        self._connection = qflow_client.pika.BlockingConnection(
            qflow_client.pika.URLParameters(f"{url}{'&' if '?' in url else '?'}{query}")
        )
        self._channel = self._connection.channel()
        self._confirms = True
        try:
            self._channel.confirm_delivery()
        except qflow_client.pika.exceptions.MethodNotImplemented:
            # The broker does not announce confirms, so pika does not select them.
            self._confirms = False

    def publish(self, message: Message, routing_key: str, timeout: float | None) -> Outcome:
        properties = asdict(message)
        body = properties.pop("body")
        exceptions = qflow_client.pika.exceptions
        try:
            self._channel.basic_publish(
                "", routing_key, body, qflow_client.pika.BasicProperties(**properties), mandatory=True
            )
        except exceptions.NackError:
            return Outcome.NACKED
        except exceptions.UnroutableError:
            return Outcome.RETURNED
        return Outcome.CONFIRMED if self._confirms else Outcome.SENT

    def flush(self, timeout: float) -> None:
        self._channel.wait_for_confirms(timeout)

    def wait_unflowed(self, timeout: float) -> bool:
        return bool(self._channel.wait_unflowed(timeout))

    def close(self) -> None:
        self._connection.close()


class AioPikaDropIn(DropIn):
    """The drop-in for aio-pika. The drop-in's event loop runs only during calls."""

    def __init__(self, url: str, *, routing_key: str = "", max_producer_flow_control_wait: float = PATIENCE) -> None:
        self.routing_key = routing_key
        self._wait = max_producer_flow_control_wait
        self._runner = asyncio.Runner()
        self._runner.run(self._connect(url))

    async def _connect(self, url: str) -> None:
        self._connection = await qflow_client.aio_pika.connect(url)
        self._channel = await self._connection.channel(on_return_raises=True)

    def publish(self, message: Message, routing_key: str, timeout: float | None) -> Outcome:
        properties = asdict(message)
        body = properties.pop("body")
        properties.pop("cluster_id")
        if properties["expiration"] is not None:
            properties["expiration"] = int(properties["expiration"]) / 1_000
        theirs = qflow_client.aio_pika.Message(body, **properties)
        exceptions = qflow_client.aio_pika.exceptions
        wait = self._wait if timeout is None else timeout
        try:
            self._runner.run(self._channel.default_exchange.publish(theirs, routing_key, mandatory=True, timeout=wait))
        except exceptions.PublishError:
            return Outcome.RETURNED
        except exceptions.DeliveryError:
            return Outcome.NACKED
        return Outcome.CONFIRMED

    def wait_unflowed(self, timeout: float) -> bool:
        return bool(self._runner.run(self._channel.wait_unflowed(timeout)))

    def close(self) -> None:
        self._runner.run(self._connection.close())
        self._runner.close()


def asynchronous(url: str, **settings: Any) -> Bridged:
    return Bridged(url, new_loop=asyncio.new_event_loop, **settings)


PRODUCERS: dict[str, Callable[..., Any]] = {
    "Producer": Producer,
    "AsyncProducer": asynchronous,
    "pika drop-in": PikaDropIn,
    "aio-pika drop-in": AioPikaDropIn,
}
