"""The tap between the socket and the library that owns the connection, without I/O.

The library (pika, aio-pika or py-amqp) manages the connection: connecting, TLS, authentication, heartbeats, topology
and consuming. The tap removes the confirms, returned messages and flow frames of publishing channels from the received
bytes. The other frames go to the library. The tap handles close and blocked frames too, before it passes them on. The
tap adds capabilities to ``Connection.Start``, because some brokers confirm messages but do not announce confirms in the
form that libraries expect. In the other direction, the tap returns the channels' bytes, and allows the library to write
at frame boundaries (`at_border`). The tap knows publishing channels only by the interface `TapChannel`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from struct import Struct
from struct import error as struct_error
from typing import Protocol

from qflow_client.amqp.fields import decode_table, encode_table
from qflow_client.amqp.frames import (
    ACK,
    BODY_FRAME,
    CHANNEL_CLOSE,
    CHANNEL_CLOSE_OK,
    CHANNEL_FLOW,
    CONFIRM_SELECT,
    CONFIRM_SELECT_OK,
    CONNECTION_BLOCKED,
    CONNECTION_CLOSE,
    CONNECTION_START,
    CONNECTION_UNBLOCKED,
    CONNECTION_UPDATE_SECRET,
    CONNECTION_UPDATE_SECRET_OK,
    HEADER_FRAME,
    HEARTBEAT,
    METHOD_FRAME,
    NACK,
    RETURN,
    FrameError,
    FrameSplitter,
    body_size,
    frame,
)

__all__ = ["Tap", "TapChannel"]

_TAG_AND_BITS = Struct(">QB")
_CLOSE_IDS = Struct(">HH")

# A Basic.Ack frame: a head, which is the same for all acks of a channel, the delivery tag, and an end (see below).
_ACK_FRAME = Struct(">11sQ2s")
_ACK_SIZE = _ACK_FRAME.size
# If a read has at most this size, the tap reports its acks one by one with `on_ack`.
_FEW_ACKS = 2 * _ACK_SIZE
_ENDS_SINGLE = b"\0\xce"
_ENDS_MULTIPLE = b"\1\xce"

# The reason for a new secret, as a short string, for the broker's log.
_REASON = b"\x13the old one expires"

# Maximum size of a frame before the peers have negotiated the size. The standard requires only 4,096 bytes. 128 KiB is
# the size that peers usually negotiate.
_FIRST_FRAME_MAX = 1 << 17


# The property with which Apache Qpid Broker-J announces confirms, and the capabilities that Broker-J has. Libraries
# read capabilities from a table that Broker-J does not send. Broker-J accepts and sends Basic.Nack. Broker-J does not
# send Connection.Blocked or Basic.Cancel, and cannot bind an exchange to an exchange.
_QPID_CONFIRMS = "qpid.confirmed_publish_supported"
_QPID_CAPABILITIES = encode_table({"capabilities": {"publisher_confirms": True, "basic.nack": True}}, "capabilities")[
    4:
]
# The capabilities of a broker that announces none, such as WSO2. aiormq fails without a table.
_NO_CAPABILITIES = encode_table({"capabilities": {}}, "capabilities")[4:]


def _announce_capabilities(start: bytes) -> bytes:
    """Add a table of capabilities to a ``Connection.Start`` that has none. The added table can be empty.

    An invalid payload is returned unchanged, because the library reports the error.
    """
    try:
        # The table of the broker's properties follows the method ids and the version.
        properties, stop = decode_table(start, 6)
    except (struct_error, IndexError, ValueError):
        return start
    if "capabilities" in properties:
        return start
    added = _QPID_CAPABILITIES if properties.get(_QPID_CONFIRMS) == "true" else _NO_CAPABILITIES
    size = stop - 10 + len(added)
    return start[:6] + size.to_bytes(4, "big") + start[10:stop] + added + start[stop:]


def _ack_head(number: int) -> bytes:
    return frame(METHOD_FRAME, number, ACK + bytes(9))[:11]


class TapChannel(Protocol):
    """The methods of a publishing channel that the tap calls. `ProducerProtocol` implements this interface.

    If an exception such as KeyboardInterrupt interrupts a call that reports an answer of the broker, answers may be
    lost. Then the tap accepts no more data, and the connection has to end.
    """

    @property
    def unfinished(self) -> bytes:
        """The unwritten bytes of a partly written frame. Empty at a frame boundary."""

    def data_to_write(self, limit: int) -> bytes:
        """Return the channel's next bytes, approximately up to `limit`."""

    def advance(self, count: int, now: float) -> bool:
        """Record that the first `count` bytes are written. Return True if these bytes end at a frame boundary."""

    def on_ack(self, tag: int, multiple: bool, now: float) -> None:
        """Handle ``Basic.Ack``."""

    def on_acks(self, acks: list[tuple[int, int]], now: float) -> None:
        """Handle the ``Basic.Ack`` frames of one read, in order.

        Args:
            acks: pairs of a delivery tag and a count. ``(tag, n)`` stands for single acks of the `n` messages from
                `tag` to ``tag + n - 1``. ``(tag, 0)`` stands for one ack of all messages up to `tag` (``multiple``).
        """

    def on_nack(self, tag: int, multiple: bool, now: float) -> None:
        """Handle ``Basic.Nack``."""

    def on_return(self, code: int, text: str, exchange: str, routing_key: str, header: bytes, body: bytes) -> None:
        """Handle ``Basic.Return`` with its content: the payload of the header frame, and the body."""

    def on_flow(self, active: bool, now: float) -> None:
        """Handle ``Channel.Flow``."""

    def on_blocked(self, reason: str, now: float) -> None:
        """Handle ``Connection.Blocked``."""

    def on_unblocked(self, now: float) -> None:
        """Handle ``Connection.Unblocked``."""

    def channel_closed(self, code: int, text: str, method: tuple[int, int], now: float) -> None:
        """Handle ``Channel.Close`` from the broker. The library, or the owner of the channel (`Tap.own`), replies."""


class _Returned:
    """A returned message whose content is not complete yet."""

    __slots__ = ("body", "channel", "header", "left", "method")

    def __init__(self, channel: TapChannel | None, method: tuple[int, str, str, str]) -> None:
        # The channel that published the message; ``None`` if it is detached. Then the content is dropped.
        self.channel = channel
        self.method = method
        # The header; empty until it is received.
        self.header = b""
        self.body: list[bytes] = []
        # The number of missing bytes of the body.
        self.left = 0


def _short(data: bytes, at: int) -> tuple[str, int]:
    stop = at + 1 + data[at]
    if stop > len(data):
        raise IndexError("a short string runs past the end of the frame")
    return data[at + 1 : stop].decode("utf-8", "replace"), stop


class Tap:
    """The tap of one connection, between its socket and the library."""

    def __init__(self) -> None:
        self._splitter = FrameSplitter(_FIRST_FRAME_MAX)
        self._channels: dict[int, TapChannel] = {}
        # The attached channels, by the first bytes of their Basic.Ack frames.
        self._acked: dict[bytes, TapChannel] = {}
        # The attached channels that may begin messages: those for which `closes` was not called.
        self._writers: dict[int, TapChannel] = {}
        # The states from ``Channel.Flow`` frames, for each channel that is being opened. `attach` reports them.
        self._expected: dict[int, list[bool]] = {}
        #: Whether to keep the flow frames of all new channels, as `expect` does. Set before a channel is opened.
        self.expects_all = False
        # Detached channels that may still be open in the broker.
        self._left: set[int] = set()
        # For each channel hidden by `own`, the function that receives its methods.
        self._own: dict[int, Callable[[bytes], None]] = {}
        # For each channel, the returned message whose content is incomplete.
        self._returns: dict[int, _Returned] = {}
        # The broker's reason for blocking the connection; ``None`` while it is not blocked.
        self._blocked: str | None = None
        # The error in the broker's data, after which `received` takes no more data; ``None`` without an error.
        self.error: FrameError | None = None
        # The broker's reply code and text in ``Connection.Close``; ``None`` before this frame is received.
        self.closed: str | None = None
        #: When the broker last sent data.
        self.heard_at = 0.0
        # When the socket last accepted bytes of a publishing channel.
        self._wrote_at = 0.0
        # Channels with an unanswered frame of `probe`.
        self._probed: set[int] = set()
        # Callbacks for the expected answers to `update_secret`, oldest first.
        self._updates: deque[Callable[[], object]] = deque()
        # The negotiated heartbeat interval in seconds; 0 for none.
        self.heartbeat = 0.0
        # True while `received` runs. It stays True if an exception interrupts `received`, because data may be lost.
        self._is_torn = False
        # When the library last received data.
        self._fed_at = 0.0
        # The channel whose bytes are being written; ``None`` at a frame boundary.
        self._writer: TapChannel | None = None
        # If True, `_writer` may write the rest of its present frame, but no further frame.
        self._writes_last = False
        # The rest of a partly written frame whose channel is detached.
        self._remains = b""
        # The number of the channel that wrote last. The channel with the next higher number writes next.
        self._last_writer = 0

    # Channels.

    def expect(self, number: int) -> None:
        """Keep the ``Channel.Flow`` frames for a channel that is being opened, until `attach` is called.

        The broker may stop the channel as soon as the channel is open, before this package can call `attach`.
        """
        self._expected[number] = []

    def attach(self, number: int, channel: TapChannel, now: float) -> None:
        """Report frames of the open channel `number` to `channel`. A channel with confirms must be in confirm mode."""
        self._left.discard(number)
        self._channels[number] = self._writers[number] = channel
        self._acked[_ack_head(number)] = channel
        for active in self._expected.pop(number, ()):
            channel.on_flow(active, now)
        if self._blocked is not None:
            channel.on_blocked(self._blocked, now)

    def detach(self, number: int) -> None:
        """Report no more frames to a channel. A partly written frame is still completed.

        Until the channel is closed, the tap drops its frames about publishing, so the library does not see them.
        """
        if number in self._channels:
            self._left.add(number)
        self._drop(number)

    def closes(self, number: int) -> None:
        """Stop a channel after its present frame, because the library will now send ``Channel.Close``.

        The broker's answers to written messages are still reported. A broker ends the connection if ``Channel.Close``
        comes in the middle of a message. So a channel that writes the frames of a message separately must complete the
        message before the library closes the channel.
        """
        channel = self._writers.pop(number, None)
        # Let the channel record that its frame is written. Otherwise the channel would ignore the broker's answer.
        if channel is not None and channel is self._writer:
            self._writes_last = True

    def own(self, number: int, on_method: Callable[[bytes], None]) -> None:
        """Hide from the library a channel that this package has opened, until `disown` is called.

        `on_method` gets the payload of each method frame that is not about publishing.
        """
        self._own[number] = on_method

    def disown(self, number: int) -> None:
        """Stop hiding a channel, because it is closed. The library can use the number again."""
        self._own.pop(number, None)

    def probe(self, number: int) -> bytes:
        """Return a frame that the broker answers if it is alive. The channel must be in confirm mode.

        The frame is a second ``Confirm.Select``, which changes nothing. The library does not see the answer.
        """
        self._probed.add(number)
        return frame(METHOD_FRAME, number, CONFIRM_SELECT + b"\0")

    def is_probed(self, number: int) -> bool:
        """Whether a probe on this channel is still unanswered."""
        return number in self._probed

    def update_secret(self, secret: str, on_updated: Callable[[], object]) -> bytes:
        """Return the frame that sends a new secret (``Connection.UpdateSecret``, an extension of RabbitMQ).

        Any channel can write this frame. When the broker answers, the tap calls `on_updated`, and hides the answer.
        """
        self._updates.append(on_updated)
        raw = secret.encode()
        return frame(METHOD_FRAME, 0, CONNECTION_UPDATE_SECRET + len(raw).to_bytes(4, "big") + raw + _REASON)

    def _drop(self, number: int) -> None:
        channel = self._channels.pop(number, None)
        self._writers.pop(number, None)
        self._acked.pop(_ack_head(number), None)
        self._expected.pop(number, None)
        self._probed.discard(number)
        if number in self._returns:
            # The library must not see only a part of the returned message, so drop the rest too.
            self._returns[number].channel = None
        if channel is not None and channel is self._writer:
            self._remains = channel.unfinished
            self._writer = None
            self._writes_last = False

    @property
    def is_blocked(self) -> bool:
        """Whether the broker blocks the connection (``Connection.Blocked``)."""
        return self._blocked is not None

    @property
    def frame_max(self) -> int:
        """Maximum size of the broker's frames in bytes; 0 for no limit. The caller sets the negotiated size."""
        return self._splitter.frame_max

    @frame_max.setter
    def frame_max(self, frame_max: int) -> None:
        self._splitter.frame_max = frame_max

    # Reading.

    def received(self, data: bytes, now: float) -> bytes:
        """Handle data from the socket.

        Args:
            data: the next bytes of the stream, which can end anywhere in a frame.

        Returns:
            The complete frames for the library, or empty bytes. If this call sets `error`, the next call raises it.

        Raises:
            FrameError: a frame is invalid, or an exception has interrupted an earlier call, so data may be lost.
        """
        if self._is_torn:
            self.error = FrameError("an exception interrupted the reading, and some received bytes are lost")
        if self.error is not None:
            raise self.error
        self._is_torn = True
        self.heard_at = now
        passed: list[bytes] = []
        try:
            rest = self._take_acks(data, passed, now) if len(data) > _FEW_ACKS else data
            if rest:
                self._take_frames(rest, passed, now)
        except FrameError as error:
            self.error, self._is_torn = error, False
            # Pass on the frames before the error, such as a Connection.Close that explains the error.
            if not passed:
                raise
        self._is_torn = False
        if passed:
            self._fed_at = now
            return b"".join(passed)
        # A library that receives nothing for a long time assumes that the broker is dead. While a long frame arrives,
        # give the library heartbeats.
        if data and self.heartbeat and now - self._fed_at >= self.heartbeat / 2:
            self._fed_at = now
            return HEARTBEAT
        return b""

    def _take_acks(self, data: bytes, passed: list[bytes], now: float) -> bytes:
        """Handle the acks at the beginning of the data, and return the data after them."""
        acked = self._acked
        pending = self._splitter.pending
        # The offset of the next frame, if the data begins in the middle of an ack; otherwise 0.
        at = _ACK_SIZE - pending if 0 < pending < _ACK_SIZE else 0
        if data[at : at + 11] not in acked:
            return data
        if at:
            self._take_frames(data[:at], passed, now)
        if self._splitter.pending or self._returns:
            return data[at:]
        view = memoryview(data)
        while (channel := acked.get(head := data[at : at + 11])) is not None:
            acks: list[tuple[int, int]] = []
            # The first tag and the length of the current run of single acks, which is not in the list yet.
            first = count = 0
            for each, tag, end in _ACK_FRAME.iter_unpack(view[at : len(data) - (len(data) - at) % _ACK_SIZE]):
                if each != head:
                    break
                if end == _ENDS_SINGLE:
                    if tag != first + count:
                        if count:
                            acks.append((first, count))
                        first, count = tag, 0
                    count += 1
                elif end == _ENDS_MULTIPLE:
                    if count:
                        acks.append((first, count))
                        count = 0
                    acks.append((tag, 0))
                else:
                    break
                at += _ACK_SIZE
            if count:
                acks.append((first, count))
            if not acks:
                break
            channel.on_acks(acks, now)
        return data[at:]

    def _take_frames(self, data: bytes, passed: list[bytes], now: float) -> None:
        """Handle the frames in the data. Append the library's frames to `passed`."""
        splitter = self._splitter
        channels = self._channels
        # Start and end of the current run of adjacent frames for the library; `run` is -1 without a run.
        run = end = -1
        try:
            for kind, number, start, stop in splitter.feed(data):
                try:
                    if number in channels:
                        taken = self._take(channels[number], number, kind, start, stop, now)
                    elif kind != METHOD_FRAME:
                        taken = number in self._returns
                        if taken:
                            self._take_content(number, kind, start, stop)
                    elif number == 0:
                        payload = splitter.data[start:stop]
                        # Connection.Start is the first frame of a broker, so it is not inside a run.
                        taken = run < 0 and payload.startswith(CONNECTION_START)
                        if taken:
                            passed.append(frame(METHOD_FRAME, 0, _announce_capabilities(payload)))
                        else:
                            taken = self._take_connection(payload, now)
                    else:
                        # A method frame shows that incomplete content was aborted.
                        self._returns.pop(number, None)
                        if number in self._expected or (self.expects_all and number not in self._left):
                            taken = self._keep_flow(number, splitter.data[start:stop])
                        else:
                            taken = number in self._left and self._take_late(number, splitter.data[start : start + 4])
                except (struct_error, IndexError) as error:
                    raise FrameError(f"a frame on channel {number} cannot be decoded: {error}") from error
                if not taken and number in self._own:
                    taken = True
                    if kind == METHOD_FRAME:
                        self._own[number](splitter.data[start:stop])
                if not taken:
                    if run < 0:
                        run = start - 7
                    end = stop + 1
                elif run >= 0:
                    passed.append(splitter.data[run:end])
                    run = -1
        finally:
            if run >= 0:
                passed.append(splitter.data[run:end])

    def _take(self, channel: TapChannel, number: int, kind: int, start: int, stop: int, now: float) -> bool:
        """Handle a frame of a publishing channel. Return True if the library must not see the frame."""
        data = self._splitter.data
        if kind != METHOD_FRAME:
            if number not in self._returns:
                return False
            self._take_content(number, kind, start, stop)
            return True
        # Copy the payload, so that nothing is read after the end of the frame.
        payload = data[start:stop]
        method = payload[:4]
        if number in self._returns and method != CHANNEL_CLOSE:
            raise FrameError(f"a method came on channel {number} before the end of a returned message")
        if method == ACK:
            tag, bits = _TAG_AND_BITS.unpack_from(payload, 4)
            channel.on_ack(tag, bits & 1 != 0, now)
        elif method == NACK:
            tag, bits = _TAG_AND_BITS.unpack_from(payload, 4)
            channel.on_nack(tag, bits & 1 != 0, now)
        elif method == CHANNEL_FLOW:
            channel.on_flow(payload[4] & 1 != 0, now)
        elif method == RETURN:
            text, at = _short(payload, 6)
            exchange, at = _short(payload, at)
            reply = int.from_bytes(payload[4:6], "big"), text, exchange, _short(payload, at)[0]
            self._returns[number] = _Returned(channel, reply)
        elif method == CONFIRM_SELECT_OK and number in self._probed:
            self._probed.discard(number)
        else:
            if method == CHANNEL_CLOSE:
                code = int.from_bytes(payload[4:6], "big")
                text, at = _short(payload, 6)
                ids = _CLOSE_IDS.unpack_from(payload, at)
                self._returns.pop(number, None)
                self._drop(number)
                channel.channel_closed(code, text, ids, now)
            return False
        return True

    def _take_content(self, number: int, kind: int, start: int, stop: int) -> None:
        data = self._splitter.data
        returned = self._returns[number]
        if kind == HEADER_FRAME and not returned.header:
            returned.header = data[start:stop]
            returned.left = body_size(returned.header)
        elif kind == BODY_FRAME and returned.header and stop - start <= returned.left:
            returned.body.append(data[start:stop])
            returned.left -= stop - start
        else:
            raise FrameError(f"a frame of type {kind} on channel {number} is not part of a returned message")
        if not returned.left:
            del self._returns[number]
            if returned.channel is not None:
                returned.channel.on_return(*returned.method, returned.header, b"".join(returned.body))

    def _keep_flow(self, number: int, payload: bytes) -> bool:
        method = payload[:4]
        if method == CHANNEL_FLOW:
            self._expected.setdefault(number, []).append(payload[4] & 1 != 0)
        elif self.expects_all and method in (CHANNEL_CLOSE, CHANNEL_CLOSE_OK):
            self._expected.pop(number, None)
        return method == CHANNEL_FLOW

    def _take_late(self, number: int, method: bytes) -> bool:
        """Handle a frame of a detached channel. Return True if the library must not see the frame."""
        if method in (CHANNEL_CLOSE, CHANNEL_CLOSE_OK):
            self._left.discard(number)
        elif method == RETURN:
            self._returns[number] = _Returned(None, (0, "", "", ""))
        return method in (ACK, NACK, CHANNEL_FLOW, RETURN)

    def _take_connection(self, payload: bytes, now: float) -> bool:
        """Handle a method of the connection. Return True if the library must not see the method."""
        method = payload[:4]
        if method == CONNECTION_BLOCKED:
            self._blocked = _short(payload, 4)[0] if len(payload) > 4 else ""
            for channel in tuple(self._channels.values()):
                channel.on_blocked(self._blocked, now)
        elif method == CONNECTION_UNBLOCKED:
            self._blocked = None
            for channel in tuple(self._channels.values()):
                channel.on_unblocked(now)
        elif method == CONNECTION_CLOSE:
            self.closed = f"{int.from_bytes(payload[4:6], 'big')} {_short(payload, 6)[0]}"
        elif method == CONNECTION_UPDATE_SECRET_OK and self._updates:
            self._updates.popleft()()
            return True
        return False

    @property
    def alive_at(self) -> float:
        """When the broker last sent data, or last read a part of a frame for which the socket had no room."""
        return self.heard_at if self.at_border else max(self.heard_at, self._wrote_at)

    # Writing.

    @property
    def at_border(self) -> bool:
        """Whether the library can write, because no frame of a publishing channel is partly written."""
        return self._writer is None and not self._remains

    @property
    def unfinished(self) -> bytes:
        """The rest of a partly written frame; empty at a frame boundary. After a write the caller calls `advance`."""
        return self._remains or (self._writer.unfinished if self._writer is not None else b"")

    def data_to_write(self, limit: int) -> bytes:
        """Return the channels' next bytes, approximately up to `limit`; empty if there are none.

        The caller writes these bytes, or only the first of them, and then calls `advance` before any other method.
        """
        if self._remains:
            return self._remains
        channels = self._writers
        if self._writer is not None:
            # If each write of this channel ended in the middle of a frame, no other channel could ever write. So, if
            # there are other channels, write only up to the next frame boundary.
            rest = self._writer.unfinished if self._writes_last or len(channels) > 1 else b""
            return rest or self._writer.data_to_write(limit)
        turns = channels if len(channels) == 1 else sorted(channels, key=lambda each: (each <= self._last_writer, each))
        for number in turns:
            data = channels[number].data_to_write(limit)
            if data:
                self._writer = channels[number]
                self._last_writer = number
                return data
        return b""

    def advance(self, count: int, now: float) -> None:
        """Record that the first `count` bytes of `data_to_write` are written. `count` can be 0."""
        if count:
            self._wrote_at = now
        if self._remains:
            # An empty `memoryview` would keep the whole message in memory.
            self._remains = self._remains[count:] or b""
            return
        assert self._writer is not None
        if self._writer.advance(count, now):
            self._writer = None
            self._writes_last = False
