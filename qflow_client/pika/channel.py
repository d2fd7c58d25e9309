"""`pika.channel`, with flow control for the `Channel` of the asynchronous adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from struct import Struct
from threading import local
from typing import TYPE_CHECKING, Any

import pika.channel
from pika import frame, spec

from qflow_client.amqp.frames import PublishEncoder
from qflow_client.events import FlowEvent, FlowState
from qflow_client.pika.flow import ChannelFlow, Publish
from qflow_client.pika.mirror import mirror, passed_on

__all__ = ["Channel"]

# A content header frame without properties (AMQP 0-9-1, section 4.2).
_EMPTY_HEADER = Struct(">BHIHHQHB")
# The bytes of a body frame before its payload.
_BODY_HEAD = Struct(">BHI")


class _Encoded(local):
    """Passes an encoded message from `Channel._send_method`, which pika's `basic_publish` calls, to `Channel.encode`.

    Each thread has its own list. The list is a stack, because a finalizer may publish during the encoding of a message.
    """

    def __init__(self) -> None:
        self.publishes: list[Publish] = []


_encoded = _Encoded()


def _as_text(name: str | bytes) -> str:
    """Decode the name of an exchange or a routing key, because pika also accepts ``bytes``."""
    return name.decode() if isinstance(name, bytes) else name


class Channel(pika.channel.Channel):
    """pika's `Channel`. While the channel is blocked (flowed), `basic_publish` raises an error and sends nothing.

    The channel answers ``Channel.Flow``. Causes of a block are ``Channel.Flow``, ``Connection.Blocked``, a full
    window, a rate limit, the `flow_manager`, or more than `max_unwritten_bytes` in pika's transport.
    """

    # Set by pika's class.
    connection: Any

    if TYPE_CHECKING:
        # The callbacks get a channel of this class, and may name it in their annotations.
        def add_on_close_callback(self, callback: Callable[[Channel, Exception], object]) -> None: ...
        def add_on_return_callback(
            self, callback: Callable[[Channel, spec.Basic.Return, spec.BasicProperties, bytes], object]
        ) -> None: ...
        def basic_get(
            self,
            queue: str,
            callback: Callable[[Channel, spec.Basic.GetOk, spec.BasicProperties, bytes], object],
            auto_ack: bool = False,
        ) -> None: ...
        def basic_consume(
            self,
            queue: str,
            on_message_callback: Callable[[Channel, spec.Basic.Deliver, spec.BasicProperties, bytes], object],
            auto_ack: bool = False,
            exclusive: bool = False,
            consumer_tag: str | None = None,
            arguments: Mapping[str, Any] | None = None,
            callback: Callable[[Any], object] | None = None,
        ) -> str: ...

    def __init__(self, connection: Any, channel_number: int, on_open_callback: Any) -> None:
        super().__init__(connection, channel_number, on_open_callback)
        self.adopt()

    def adopt(self) -> None:
        """Start flow control (internal)."""
        # Encoded ``Basic.Publish`` frames. A key contains exchange, routing key and mandatory.
        self._methods: dict[tuple[str, str, bool], bytes] = {}
        # Maximum size of a frame's payload in bytes. The connection is open, so `frame_max` is negotiated.
        self._max_body = self.connection.params.frame_max - spec.FRAME_HEADER_SIZE - spec.FRAME_END_SIZE
        #: The flow control of the channel (internal).
        self.flow_control = ChannelFlow(self)

    def encode(
        self, exchange: str, routing_key: str, body: Any, properties: spec.BasicProperties | None, mandatory: bool
    ) -> Publish:
        """Encode a message like pika's `basic_publish`, without sending it (internal)."""
        if (
            type(body) is bytes
            and 0 < (size := len(body)) <= self._max_body
            and (properties is None or isinstance(properties, spec.BasicProperties))
        ):
            # Use the method frame of an earlier message with the same arguments.
            arguments = (exchange, routing_key, mandatory)
            try:
                method = self._methods[arguments]
            except (KeyError, TypeError):
                pass
            else:
                if self.is_open:
                    number = self.channel_number
                    header = (
                        _EMPTY_HEADER.pack(2, number, 14, 60, 0, size, 0, 0xCE)
                        if properties is None
                        else frame.Header(number, size, properties).marshal()
                    )
                    frames = b"".join((method, header, _BODY_HEAD.pack(3, number, size), body, b"\xce"))
                    return Publish(frames, arguments, properties, body)
        super().basic_publish(exchange, routing_key, body, properties, mandatory)
        return _encoded.publishes.pop()

    def _send_method(self, method: Any, content: Any = None) -> None:
        if content is not None:
            _encoded.publishes.append(self._encode(method, *content))
            return
        # Detect a forked child here too, because pika does not call `_raise_if_not_open` before every method.
        self.connection.flow_control.check_process()
        send = partial(super()._send_method, method)  # type: ignore[misc]  # private
        if isinstance(method, spec.Confirm.Select):
            self.flow_control.begin_confirms(send)
        else:
            send()

    def _raise_if_not_open(self) -> None:
        self.connection.flow_control.check_process()
        error, self.flow_control.unraised = self.flow_control.unraised, None
        if error is not None:
            raise error
        super()._raise_if_not_open()  # type: ignore[misc]  # private

    def _encode(self, method: spec.Basic.Publish, properties: spec.BasicProperties, body: bytes) -> Publish:
        number, size = self.channel_number, len(body)
        begin = frame.Method(number, method).marshal()
        header = frame.Header(number, size, properties).marshal()
        step = self._max_body
        bodies = [frame.Body(number, body[at : at + step]).marshal() for at in range(0, size, step)]
        arguments = (_as_text(method.exchange), _as_text(method.routing_key), method.mandatory)
        if len(self._methods) >= PublishEncoder.MAX_ROUTES:
            self._methods.clear()
        self._methods[arguments] = begin
        return Publish(b"".join((begin, header, *bodies)), arguments, properties, body)

    def basic_publish(
        self,
        exchange: str,
        routing_key: str,
        body: str | bytes,
        properties: spec.BasicProperties | None = None,
        mandatory: bool = False,
    ) -> None:
        """Publish a message like pika, if the channel is not flowed.

        Raises:
            ProducerFlowed: the channel is flowed. The message was not sent and never will be. When the channel can
                publish again, the callbacks of `on_flow` are called.
        """
        self.flow_control.send_nowait(self.encode(exchange, routing_key, body, properties, mandatory))

    def confirm_delivery(
        self, ack_nack_callback: Callable[[Any], object], callback: Callable[[Any], object] | None = None
    ) -> None:
        """Start confirm mode like pika. Then the channel is flowed while `capacity` messages are unconfirmed."""
        told = ack_nack_callback
        if callable(ack_nack_callback):
            # Update the flow control before the callback, so that the callback can publish if there is room.
            def told(answer: Any) -> None:
                self.flow_control.on_confirm(answer)
                ack_nack_callback(answer)

        super().confirm_delivery(told, callback)

    def close(self, reply_code: int = 0, reply_text: str = "Normal shutdown") -> None:
        """Close the channel like pika. Waiting calls of `basic_publish` (of thread-safe connections) raise an error."""
        super().close(reply_code, reply_text)
        self.flow_control.give_up_all()

    def on_flow(self, callback: Callable[[FlowEvent], object]) -> Callable[[], None]:
        """Call a callback with each flow event, in order, in the connection's I/O loop. Return a function to remove it.

        Args:
            callback: the callback, which may call any method of the channel. An exception of the callback is logged.
        """
        return self.flow_control.listen(callback)

    @property
    def flow_state(self) -> FlowState:
        """The flow state of the channel: its holds, and how often and for how long it was blocked (flowed)."""
        return self.flow_control.look()


def __getattr__(name: str) -> Any:
    return passed_on(pika.channel, name)


mirror(__name__, pika.channel)
