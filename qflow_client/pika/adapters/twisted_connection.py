"""`pika.adapters.twisted_connection`, with flow control."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pika.adapters.twisted_connection as _pika
from twisted.internet import defer

from qflow_client.errors import ProducerFlowed
from qflow_client.events import FlowEvent, FlowState
from qflow_client.pika.connection import follow
from qflow_client.pika.flow import ConnectionFlow
from qflow_client.pika.mirror import mirror, passed_on

__all__ = ["TwistedChannel", "TwistedProtocolConnection"]


class TwistedChannel(_pika.TwistedChannel):
    """pika's `TwistedChannel`. While the channel is blocked (flowed), `basic_publish` fails and sends nothing."""

    # Attributes of pika's class.
    _channel: Any

    def basic_publish(
        self, exchange: str, routing_key: str, body: Any, properties: Any = None, mandatory: bool = False
    ) -> Any:
        """Publish a message like pika. While the channel is flowed, the `Deferred` fails with `ProducerFlowed`."""
        try:
            return super().basic_publish(exchange, routing_key, body, properties, mandatory)
        except ProducerFlowed:
            return defer.fail()

    def on_flow(self, callback: Callable[[FlowEvent], object]) -> Callable[[], None]:
        """Call a callback with each flow event; see `Channel.on_flow`."""
        stop: Callable[[], None] = self._channel.on_flow(callback)
        return stop

    @property
    def flow_state(self) -> FlowState:
        """The flow state; see `Channel.flow_state`."""
        state: FlowState = self._channel.flow_state
        return state


class TwistedProtocolConnection(_pika.TwistedProtocolConnection):
    """pika's `TwistedProtocolConnection`, with flow control in its channels."""

    # Attributes of pika's class.
    _impl: Any

    def __init__(self, parameters: Any = None, custom_reactor: Any = None) -> None:
        super().__init__(parameters, custom_reactor)
        # pika creates `_impl` itself, as a connection without flow control. `follow` adds flow control.
        follow(self._impl)

    def channel(self, channel_number: int | None = None) -> Any:
        """Open a channel like pika, with flow control."""
        ConnectionFlow.of(self._impl).check_process()
        return super().channel(channel_number).addCallback(_adopt)


def _adopt(channel: Any) -> TwistedChannel:
    channel.__class__ = TwistedChannel
    adopted: TwistedChannel = channel
    return adopted


def __getattr__(name: str) -> Any:
    return passed_on(_pika, name)


mirror(__name__, _pika)
