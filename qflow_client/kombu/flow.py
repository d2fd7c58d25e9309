"""The flow control of a channel of py-amqp."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from struct import Struct
from typing import Any

from amqp import spec
from amqp.basic_message import Message
from amqp.serialization import dumps

from qflow_client.amqp.frames import PublishEncoder, properties
from qflow_client.core.step import step
from qflow_client.dropin import ADDRESSING, RECONNECTING, RETRYING, DropIn, DropInFlow, EncodedMessage, EncodedProtocol
from qflow_client.events import HoldKind
from qflow_client.kombu.wire import Wire
from qflow_client.manager import flow_manager
from qflow_client.receipt import Outcome
from qflow_client.settings import ProducerSettings

__all__ = ["KOMBU", "ChannelFlow"]

#: The settings that a connection of kombu accepts as transport options.
KOMBU = DropIn(
    "kombu",
    frozenset({"connect_timeout", "on_blocked"}),
    dict.fromkeys(ADDRESSING, "pass it to publish()")
    | {
        "confirms": "set confirm_publish instead",
        "connect_timeout": "set kombu's connect_timeout, which is Celery's broker_connection_timeout",
        "message_ids": "messages are sent as they are; a task has its own id",
        **dict.fromkeys(
            RECONNECTING,
            "kombu itself reconnects",
        ),
        **dict.fromkeys(RETRYING, "kombu itself publishes again, by its retry_policy"),
        "tracing": "instrument Celery itself: opentelemetry-instrumentation-celery",
        "url": "set broker_url instead",
    },
)
_UNLIMITED = 1 << 62

_monotonic = time.monotonic

# The names of the basic properties in py-amqp and in this package, in the order in which they are encoded.
_NAMES = [(name, "headers" if name == "application_headers" else name) for name, _ in Message.PROPERTIES]
_FLAGS = Struct(">H")
_ALIKE = frozenset((str, bool, float, type(None)))

_FRAME = Struct(">BHI")
_CONTENT = Struct(">HHQ")
_PUBLISH = b"\0\x3c\0\x28"
# Bytes of a frame without its payload.
_OVERHEAD = 8


class _Protocol(EncodedProtocol):
    # `ChannelFlow` sets this field immediately after it creates the object.
    flow: ChannelFlow
    #: Number of messages that were written before confirm mode; ``None`` while the channel is not in confirm mode.
    before: int | None

    def on_ack(self, tag: int, multiple: bool, now: float) -> None:
        if self.flow.tells_confirms:
            self.flow.pass_frame(spec.Basic.Ack, "Lb", (tag, multiple))
        super().on_ack(tag and tag + (self.before or 0), multiple, now)

    def on_acks(self, acks: list[tuple[int, int]], now: float) -> None:
        if self.flow.tells_confirms:
            for first, count in acks:
                for tag in range(first, first + (count or 1)):
                    self.flow.pass_frame(spec.Basic.Ack, "Lb", (tag, count == 0))
        before = self.before or 0
        # Tag 0 stands for all messages, so it is not changed.
        super().on_acks([(tag and tag + before, count) for tag, count in acks], now)

    def on_nack(self, tag: int, multiple: bool, now: float) -> None:
        if self.flow.tells_confirms:
            self.flow.pass_frame(spec.Basic.Nack, "Lb", (tag, multiple))
        super().on_nack(tag and tag + (self.before or 0), multiple, now)

    def on_return(self, code: int, text: str, exchange: str, routing_key: str, header: bytes, body: bytes) -> None:
        # The message needs no channel, because py-amqp does not use the channel of a returned message.
        content = Message(frame_method=spec.Basic.Return)
        content.inbound_header(header)
        if body:
            content.inbound_body(body)
        self.flow.pass_frame(spec.Basic.Return, "Bsss", (code, text, exchange, routing_key), content)

    @step
    def advance(self, count: int, now: float) -> bool:
        # No message may be admitted while earlier bytes wait. So lift the hold `transport` only when no bytes wait.
        outbound = self.parts.unconfirmed.outbound
        outbound.advance(count)
        self.admission.unwritten -= count
        if self.before is None:
            # The broker sends no confirms, so settle the messages that are written.
            self.parts.settling.answer(0, True, Outcome.CONFIRMED, now)
            self.consequences.update(now)
        if not self.gate.is_open and not self.unwritten:
            self.consequences.lift(HoldKind.TRANSPORT, now)
        return not outbound.mid_frame

    def on_flow(self, active: bool, now: float) -> None:
        self.flow.channel.active = active
        super().on_flow(active, now)

    def channel_closed(self, code: int, text: str, method: tuple[int, int], now: float) -> None:
        # This object is not used again: if py-amqp opens the channel again, the channel gets a new `ChannelFlow`.
        self.end(f"the channel is closed: {code} {text}", now)

    def end(self, reason: str, now: float) -> None:
        if self.closed is None:
            self.close(reason, now)
            self.connection_lost(reason, now)


class ChannelFlow(DropInFlow):
    """The flow control of one channel, until the channel is closed."""

    protocol: _Protocol

    def __init__(self, channel: Any, settings: ProducerSettings, wire: Wire) -> None:
        number = channel.channel_id
        # Unwritten bytes need no limit, because no message is admitted while the socket accepts no bytes.
        super().__init__(settings, f"kombu channel {number}", protocol=_Protocol, max_unwritten_bytes=_UNLIMITED)
        self.channel = channel
        #: Whether the last publish that had to wait has failed, for example because of a timeout.
        self.has_given_up = False
        self._number = number
        self._wire = wire
        self._calls: deque[Callable[[], None]] = deque()
        # Encoded ``Basic.Publish`` frames. A key contains exchange, routing key, (mandatory, immediate) and `argsig`.
        self._heads: dict[tuple[Any, ...], bytes] = {}
        now = _monotonic()
        self.protocol.flow = self
        self.protocol.before = None
        self.protocol.channel_opened(number, 0, now)
        wire.tap.attach(number, self.protocol, now)
        flow_manager.register(self)

    def end(self, reason: str) -> None:
        self._wire.tap.detach(self._number)
        flow_manager.unregister(self)
        self.protocol.end(reason, _monotonic())
        self.after()

    def disown(self, reason: str) -> None:
        flow_manager.unregister(self)
        super().disown(reason)
        self.protocol.flow = self
        self.protocol.before = None

    def confirms_begin(self) -> None:
        """Call this before ``Confirm.Select`` is sent. After the first call, the next message has delivery tag 1."""
        if self.protocol.before is None:
            # Complete a partly written message first, so that `written` counts it.
            self._wire.finish()
            self.protocol.before = self.protocol.written

    @property
    def tells_confirms(self) -> bool:
        """Whether py-amqp needs the confirms, for a call that waits for a confirm or for a registered callback."""
        pending, events = self.channel._pending, self.channel.events
        return bool(
            (pending and (spec.Basic.Ack in pending or spec.Basic.Nack in pending))
            or (events and (events.get("basic_ack") or events.get("basic_nack")))
        )

    def pass_frame(self, method: Any, format: str, arguments: tuple[Any, ...], content: Any = None) -> None:
        """Pass a method to py-amqp, as if py-amqp had read its frame. The `Tap` has kept the frame from py-amqp."""
        payload = bytes(4) + dumps(format, arguments)
        self._wire.later.append(lambda: self.channel.dispatch_method(method, payload, content))

    def _call(self, function: Callable[[], None]) -> None:
        # The `flow_manager` calls this method on any thread. The thread that uses the connection calls the function.
        self._calls.append(function)
        self._wire.wake()

    def look(self) -> None:
        """Make the calls that other threads have requested, and report events."""
        while self._calls:
            self._calls.popleft()()
        protocol = self.protocol
        if not protocol.reports.is_empty:
            self.after()

    def encode(
        self, message: Any, exchange: str, routing_key: str, bits: tuple[Any, Any], argsig: str, frame_max: int
    ) -> EncodedMessage:
        """Return the frames of a message as py-amqp encodes them."""
        body = message.body
        if isinstance(body, str):
            body = body.encode(message.properties.setdefault("content_encoding", "utf-8"))
        elif type(body) is not bytes:
            # `bytes(body)` alone would also accept other values, such as a number.
            body = bytes(memoryview(body)) if len(body) else b""
        number = self._number
        key = (exchange, routing_key, bits, argsig)
        head = self._heads.get(key)
        if head is None:
            if len(self._heads) >= PublishEncoder.MAX_ROUTES:
                self._heads.clear()
            method = _PUBLISH + dumps(argsig, (0, exchange, routing_key, *bits))
            head = self._heads[key] = b"%b%b\xce" % (_FRAME.pack(1, number, len(method)), method)
        encoded = encode_properties(message)
        size = len(body)
        content = _CONTENT.size + len(encoded)
        pieces = [head, _FRAME.pack(2, number, content), _CONTENT.pack(60, 0, size), encoded, b"\xce"]
        step = frame_max - _OVERHEAD
        for at in range(0, size, step):
            chunk = body if size <= step else body[at : at + step]
            pieces += (_FRAME.pack(3, number, len(chunk)), chunk, b"\xce")
        return EncodedMessage(b"".join(pieces), body)

    def write(self) -> None:
        self._wire.flush()


def encode_properties(message: Any) -> bytes:
    """Return the property flags and values of a message, encoded like py-amqp.

    The encoder of this package needs a third of py-amqp's time. If this package cannot encode a value, or would encode
    it in another way, py-amqp encodes the properties.
    """
    given = message.properties
    if "timestamp" not in given and _is_alike(given.get("application_headers")):
        try:
            flags, values = properties({ours: given[theirs] for theirs, ours in _NAMES if theirs in given})
        except (TypeError, ValueError):
            pass
        else:
            return _FLAGS.pack(flags) + values
    encoded: bytes = message._serialize_properties()
    return encoded


def _is_alike(value: Any) -> bool:
    """Return True if py-amqp and this package encode the value of a header in the same way."""
    kind = type(value)
    if kind is dict:
        return all(map(_is_alike, value.values()))
    if kind is list or kind is tuple:
        return all(map(_is_alike, value))
    if kind is int:
        return bool(-0x8000_0000 < value < 0x8000_0000)
    return kind in _ALIKE
