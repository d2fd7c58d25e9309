"""A producer without a socket, and the broker's view of its output."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pamqp.commands
import pamqp.frame
import pamqp.header

from qflow_client import HoldKind, Message, ProducerSettings, Receipt
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.refusals import Pauses
from qflow_client.core.tickets import SendTicket
from qflow_client.flow import Line

FRAME_MAX = 4096
PREFIX = "p-"
#: Largest number of bytes in one body frame.
MAX_BODY = FRAME_MAX - 8
CHANNEL = 1


def make(
    *,
    now: float = 0.0,
    opened: bool = True,
    wall_offset: float = 0.0,
    line: Line | None = None,
    retries: Pauses | None = None,
    **settings: Any,
) -> ProducerProtocol:
    """Return a producer, by default with an open channel."""
    settings.setdefault("routing_key", "q")
    protocol = ProducerProtocol(
        ProducerSettings(**settings), id_prefix=PREFIX, now=now, wall_offset=wall_offset, line=line, retries=retries
    )
    if opened:
        protocol.channel_opened(CHANNEL, FRAME_MAX, now)
    return protocol


def send(protocol: ProducerProtocol, payload: bytes | Message = b"x", now: float = 0.0, key: str = "q") -> Receipt:
    """Send a message that must be admitted immediately, and return its receipt."""
    receipt = protocol.admission.send(payload, "", key, now)
    assert receipt is not None
    return receipt


def wait(protocol: ProducerProtocol, payload: bytes | Message = b"x", now: float = 0.0, **more: Any) -> SendTicket:
    """Send a message that must not be admitted immediately, and let it wait."""
    assert protocol.admission.send(payload, "", "q", now) is None
    return place(protocol, payload, now, **more)


def place(protocol: ProducerProtocol, payload: bytes | Message, now: float, **more: Any) -> SendTicket:
    """Let a message wait. After an interrupt, withdraw the message, as all drivers do."""
    ticket = protocol.line.make_ticket(payload, "", "q", now, **more)
    try:
        protocol.line.stand_in_line(ticket, now)
    except BaseException:
        protocol.line.give_up(ticket, now)
        raise
    return ticket


def drain(protocol: ProducerProtocol, now: float = 0.0) -> bytes:
    """Write all bytes that may be written, and return them."""
    written = b""
    while data := protocol.data_to_write(1 << 20):
        protocol.advance(len(data), now)
        written += data
    return written


def write(protocol: ProducerProtocol, count: int, now: float = 0.0) -> bytes:
    """Write `count` bytes, and return them."""
    written = b""
    while len(written) < count:
        data = protocol.data_to_write(1 << 20)[: count - len(written)]
        assert data
        protocol.advance(len(data), now)
        written += data
    return written


def publish(protocol: ProducerProtocol, payload: bytes | Message = b"x", now: float = 0.0, key: str = "q") -> Receipt:
    """Send a message that must be admitted immediately, write all bytes, and return the receipt."""
    receipt = send(protocol, payload, now, key)
    drain(protocol, now)
    return receipt


def publish_many(protocol: ProducerProtocol, count: int) -> list[Receipt]:
    """Send messages that must be admitted immediately, write them together, and return their receipts."""
    receipts = [send(protocol) for _ in range(count)]
    drain(protocol)
    return receipts


def write_and_ack(protocol: ProducerProtocol, tag: int, now: float, *, multiple: bool = False) -> None:
    """Write all bytes, and then let the broker acknowledge a message, or all messages up to it."""
    drain(protocol, now)
    protocol.on_ack(tag, multiple, now)


def reconnect(protocol: ProducerProtocol, lost: float = 0.0, opened: float = 0.0) -> None:
    """Lose the connection at one time, and open a channel on a new connection at another time."""
    protocol.connection_lost("cut", lost, reconnects=True)
    protocol.channel_opened(CHANNEL, FRAME_MAX, opened)


def check_order(protocol: ProducerProtocol) -> None:
    """Check the order of messages: by admission for those not on the wire, and by tag for those on the wire."""
    numbers = [receipt._number for receipt in (*protocol.parts.resending.again, *protocol.admission.unsent)]
    assert numbers == sorted(set(numbers))
    unconfirmed = protocol.parts.unconfirmed
    assert unconfirmed.oldest == min(unconfirmed.flight, default=unconfirmed.outbound.given + 1)
    assert list(unconfirmed.flight) == sorted(unconfirmed.flight)
    on_the_wire = [receipt._number for receipt in unconfirmed.flight.values()]
    assert unconfirmed.oldest_number() == min(on_the_wire, default=0)
    assert protocol.unsettled == len(protocol.unsettled_receipts) == len(numbers) + len(on_the_wire)


def holds(protocol: ProducerProtocol) -> list[str]:
    """Return the kinds of the holds on a producer, the oldest first."""
    return [hold.kind for hold in protocol.gate.holds]


def logged(protocol: ProducerProtocol) -> list[str]:
    """Return the log entries of a producer: levels and texts."""
    return [f"{logging.getLevelName(level)} {text % arguments}" for level, text, arguments, *_ in protocol.reports.logs]


def returned(
    protocol: ProducerProtocol,
    message_id: str | None,
    *,
    body: bytes = b"x",
    exchange: str = "",
    key: str = "q",
    code: int = 312,
) -> None:
    """Let the broker return a message."""
    properties = pamqp.commands.Basic.Properties(delivery_mode=2, message_id=message_id)
    header = pamqp.header.ContentHeader(body_size=len(body), properties=properties).marshal()
    protocol.on_return(code, "NO_ROUTE", exchange, key, header, body)


@dataclass
class Published:
    """One message as the broker reads it."""

    exchange: str
    routing_key: str
    mandatory: bool
    properties: pamqp.commands.Basic.Properties
    body_size: int
    body: bytes = b""
    frames: int = 0


@dataclass
class Wire:
    """The bytes that the broker reads, as a list of messages and answers to `Channel.Flow`."""

    seen: list[Published | bool] = field(default_factory=list)
    #: The received part of an incomplete frame.
    rest: bytes = b""
    #: Whether content of the last message is still missing.
    in_message: bool = False
    _method: pamqp.commands.Basic.Publish | None = None

    def read(self, data: bytes, channel: int = CHANNEL) -> Wire:
        """Read more bytes, which must be valid AMQP."""
        data = self.rest + data
        while len(data) >= 7 and len(data) >= (size := int.from_bytes(data[3:7], "big") + 8):
            used, number, frame = pamqp.frame.unmarshal(data[:size])
            assert used == size
            assert number == channel
            data = data[size:]
            self._take(frame)
        self.rest = data
        return self

    def _take(self, frame: Any) -> None:
        if isinstance(frame, pamqp.commands.Basic.Publish):
            assert not self.in_message
            self._method, self.in_message = frame, True
        elif isinstance(frame, pamqp.commands.Channel.FlowOk):
            assert not self.in_message, "an answer between the frames of a message"
            self.seen.append(bool(frame.active))
        elif isinstance(frame, pamqp.header.ContentHeader):
            assert self._method is not None
            method, self._method = self._method, None
            self.seen.append(
                Published(method.exchange, method.routing_key, method.mandatory, frame.properties, frame.body_size)
            )
            self.in_message = frame.body_size > 0
        else:
            last = self.seen[-1]
            assert isinstance(last, Published)
            last.body += frame.value
            last.frames += 1
            self.in_message = len(last.body) < last.body_size

    @property
    def short(self) -> list[bytes | bool]:
        """Return the bodies of the messages, and the answers to `Channel.Flow`."""
        return [each.body if isinstance(each, Published) else each for each in self.seen]

    @property
    def messages(self) -> list[Published]:
        """Return the messages alone."""
        return [each for each in self.seen if isinstance(each, Published)]


def wire(data: bytes) -> Wire:
    """Return the content of bytes as the broker reads it. The bytes must be complete messages and answers."""
    read = Wire().read(data)
    assert not read.rest
    assert not read.in_message
    return read


CAPACITY = HoldKind.CAPACITY
