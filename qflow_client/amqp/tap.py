"""Between the socket and the library that owns the connection, sans-I/O.

pika or aio-pika keeps the connection: connecting, TLS, authentication, heartbeats, topology, consuming. The tap stands
between it and the socket. Inwards it takes out the frames that belong to publishing channels (confirms, returns, flow),
copies what both sides must know (close, blocked), and passes everything else on unchanged; only a broker that confirms
publishes, and does not say so in the words that libraries know, is put into those words. Outwards it merges the
channels' bytes with the library's at frame borders. It knows frames, and nothing of producers.
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

# A whole Basic.Ack frame: what all of one channel have in common, the delivery tag, and which of two ends it has.
_ACK_FRAME = Struct(">11sQ2s")
_ACK_SIZE = _ACK_FRAME.size
# Up to here they are told one by one, as `on_ack`.
_FEW_ACKS = 2 * _ACK_SIZE
_ENDS_SINGLE = b"\0\xce"
_ENDS_MULTIPLE = b"\1\xce"

# Why a secret is replaced, as a short string for the broker's log.
_REASON = b"\x13the old one expires"

# No frame may be larger before the peers have agreed on a size. The standard says 4,096 bytes; this is what they agree
# on as a rule.
_FIRST_FRAME_MAX = 1 << 17


# What Apache Qpid Broker-J can do of that which libraries look for in a table that it does not send. It takes and sends
# Basic.Nack. It sends no Connection.Blocked and no Basic.Cancel, and binds no exchange to an exchange.
_QPID_CONFIRMS = "qpid.confirmed_publish_supported"
_QPID_CAPABILITIES = encode_table({"capabilities": {"publisher_confirms": True, "basic.nack": True}}, "capabilities")[
    4:
]
# What a broker can do that lists nothing, such as WSO2's: aiormq fails where there is no table.
_NO_CAPABILITIES = encode_table({"capabilities": {}}, "capabilities")[4:]


def _announce_capabilities(start: bytes) -> bytes:
    """A ``Connection.Start`` with the capabilities of a broker that lists none: none, or those it tells in its own way.

    Returns:
        It unchanged, if there is nothing to add, or the library is to say what is wrong with it.
    """
    try:
        # After the ids and the version.
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
    """What the tap tells, and asks, a publishing channel. `ProducerProtocol` is one.

    If an exception such as KeyboardInterrupt leaves a call that tells what the broker says, answers may be lost. Then
    the tap takes nothing more, and the connection has to end.
    """

    @property
    def unfinished(self) -> bytes:
        """What is still to be written of frames that have begun; empty at a frame border."""

    def data_to_write(self, limit: int) -> bytes:
        """The channel's next bytes."""

    def advance(self, count: int, now: float) -> bool:
        """So many of them are written; True if that ends at a frame border."""

    def on_ack(self, tag: int, multiple: bool, now: float) -> None:
        """``Basic.Ack``."""

    def on_acks(self, acks: list[tuple[int, int]], now: float) -> None:
        """The ``Basic.Ack`` of one read, in order.

        Args:
            acks: a delivery tag and a count each: so many acks of one message each, whose tags follow one another; with
                count 0, one ack of all messages up to the tag (``multiple``).
            now: seconds.
        """

    def on_nack(self, tag: int, multiple: bool, now: float) -> None:
        """``Basic.Nack``."""

    def on_return(self, code: int, text: str, exchange: str, routing_key: str, header: bytes, body: bytes) -> None:
        """``Basic.Return`` with its content: the payload of the header frame, and the body."""

    def on_flow(self, active: bool, now: float) -> None:
        """``Channel.Flow``."""

    def on_blocked(self, reason: str, now: float) -> None:
        """``Connection.Blocked``."""

    def on_unblocked(self, now: float) -> None:
        """``Connection.Unblocked``."""

    def channel_closed(self, code: int, text: str, method: tuple[int, int], now: float) -> None:
        """``Channel.Close`` from the broker; the library answers it."""


class _Returned:
    """A returned message whose content is still coming."""

    __slots__ = ("body", "channel", "header", "left", "method")

    def __init__(self, channel: TapChannel | None, method: tuple[int, str, str, str]) -> None:
        # Who is told; None once it is detached, and what still comes is for nobody.
        self.channel = channel
        self.method = method
        # Empty until it has come.
        self.header = b""
        # Chunks of the body, and how many bytes are still to come.
        self.body: list[bytes] = []
        self.left = 0


def _short(data: bytes, at: int) -> tuple[str, int]:
    stop = at + 1 + data[at]
    if stop > len(data):
        raise IndexError("a short string runs past the end of the frame")
    return data[at + 1 : stop].decode("utf-8", "replace"), stop


class Tap:
    """The state between one socket and one library connection."""

    def __init__(self) -> None:
        self._splitter = FrameSplitter(_FIRST_FRAME_MAX)
        self._channels: dict[int, TapChannel] = {}
        # The same, by what every Basic.Ack frame of the channel begins with.
        self._acked: dict[bytes, TapChannel] = {}
        # Those of them whose messages may begin.
        self._writers: dict[int, TapChannel] = {}
        # By channel that is still being opened, what the broker has said of its flow.
        self._expected: dict[int, list[bool]] = {}
        #: Whether that is any channel, because the library chooses the numbers; to be set before the first is opened.
        self.expects_all = False
        # Channels that were detached and that the broker may still take for open.
        self._left: set[int] = set()
        # Channels that the library does not know, with who is told of their methods.
        self._own: dict[int, Callable[[bytes], None]] = {}
        # By channel, the return whose content is still coming.
        self._returns: dict[int, _Returned] = {}
        # Why the broker blocks the connection; None while it does not.
        self._blocked: str | None = None
        # What the broker sent that is no AMQP, after which nothing can be received any more; None if it did not.
        self.error: FrameError | None = None
        # Why the broker closes the connection, in its words; None while it does not.
        self.closed: str | None = None
        #: When the broker last sent anything.
        self.heard_at = 0.0
        # Channels on which the answer to a probe is due.
        self._probed: set[int] = set()
        # What is called for each answer to `update_secret` that is due, the first one first.
        self._updates: deque[Callable[[], object]] = deque()
        # The negotiated heartbeat interval in seconds; 0 for none.
        self.heartbeat = 0.0
        # Whether an exception has left `received`, so that a part of its data may be lost.
        self._is_torn = False
        # When the library last was given anything.
        self._fed_at = 0.0
        # The channel that has a frame on the wire which has not ended.
        self._writer: TapChannel | None = None
        # Whether that is all that it may write.
        self._writes_last = False
        # The end of such a frame whose channel is gone.
        self._remains = b""
        # The channel number that writes next, so that each gets its turn.
        self._turn = 0

    # Channels.

    def expect(self, number: int) -> None:
        """Keep what the broker says of the flow of a channel that the library opens, until it is attached.

        A broker may stop a channel in the same breath in which it opens it, before anybody has heard of that.
        """
        self._expected[number] = []

    def attach(self, number: int, channel: TapChannel, now: float) -> None:
        """Take the frames of a channel out from now on. The channel is open, and in confirm mode if it is to be."""
        self._left.discard(number)
        self._channels[number] = self._writers[number] = channel
        self._acked[_ack_head(number)] = channel
        for active in self._expected.pop(number, ()):
            channel.on_flow(active, now)
        if self._blocked is not None:
            channel.on_blocked(self._blocked, now)

    def detach(self, number: int) -> None:
        """Tell a channel nothing more. A frame of it that has begun is still brought to its end.

        Until the channel is closed, what only concerns who publishes is for nobody, the library included.
        """
        if number in self._channels:
            self._left.add(number)
        self._drop(number)

    def closes(self, number: int) -> None:
        """The library is about to send a channel's ``Channel.Close``, behind which no message of it may come.

        What the broker still says of the messages that are written is told.
        """
        channel = self._writers.pop(number, None)
        # The channel has to know that its last message is written, or it would not take the answer.
        if channel is not None and channel is self._writer:
            self._writes_last = True

    def own(self, number: int, on_method: Callable[[bytes], None]) -> None:
        """Keep a channel that the library has not opened from it, until `disown`.

        Args:
            number: the channel's.
            on_method: called with the payload of every method frame that is not for who publishes.
        """
        self._own[number] = on_method

    def disown(self, number: int) -> None:
        """The channel is closed; the library may open one of that number."""
        self._own.pop(number, None)

    def probe(self, number: int) -> bytes:
        """Make a frame for a channel that confirms, whose answer only shows that the broker is there.

        It is a second ``Confirm.Select``, which changes nothing. The library does not see the answer.
        """
        self._probed.add(number)
        return frame(METHOD_FRAME, number, CONFIRM_SELECT + b"\0")

    def is_probed(self, number: int) -> bool:
        """Whether the answer to a probe on a channel is due."""
        return number in self._probed

    def update_secret(self, secret: str, on_updated: Callable[[], object]) -> bytes:
        """Make the frame that gives the broker a new secret (``Connection.UpdateSecret``, an extension of RabbitMQ's).

        Any channel may write it. The library does not see the answer.

        Args:
            secret: the password or token.
            on_updated: called when the broker has answered.
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
            # The library must not get the end of a content whose beginning it has not seen.
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
        """The largest frame that the broker may send, in bytes; 0 for no limit. To be set to what is negotiated."""
        return self._splitter.frame_max

    @frame_max.setter
    def frame_max(self, frame_max: int) -> None:
        self._splitter.frame_max = frame_max

    # Inwards.

    def received(self, data: bytes, now: float) -> bytes:
        """Take what the socket received.

        Args:
            data: the bytes, cut anywhere.
            now: seconds.

        Returns:
            What the library is to see of them, whole frames only; may be empty. If `error` is set now, it is the last,
            and the next call raises, also one with no data.

        Raises:
            FrameError: they are not AMQP frames, or a method frame that is ours cannot be decoded. Or an exception has
                left an earlier call, so a part of what it was given may be lost.
        """
        if self._is_torn:
            self.error = FrameError("an interrupt has lost a part of the bytes that came")
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
            # What came before it, such as the Connection.Close that explains it, still counts.
            if not passed:
                raise
        self._is_torn = False
        if passed:
            self._fed_at = now
            return b"".join(passed)
        # A library that hears nothing for long takes the broker for dead, also while a frame of its own is on its way.
        if data and self.heartbeat and now - self._fed_at >= self.heartbeat / 2:
            self._fed_at = now
            return HEARTBEAT
        return b""

    def _take_acks(self, data: bytes, passed: list[bytes], now: float) -> bytes:
        """Take the acks that the data begins with: many brokers send one for every message, and little else.

        Returns:
            The data that comes after them.
        """
        acked = self._acked
        pending = self._splitter.pending
        # The stream is cut anywhere: where the next ack begins if what has begun is one, too.
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
            # The run of single acks that is not in the list yet.
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
        """Take frames of any kind, and append those that the library is to see."""
        splitter = self._splitter
        channels = self._channels
        # Where the run of frames that are passed on begins and ends.
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
                        # It is the first thing that a broker says: a run would have to come before it.
                        taken = run < 0 and payload.startswith(CONNECTION_START)
                        if taken:
                            passed.append(frame(METHOD_FRAME, 0, _announce_capabilities(payload)))
                        else:
                            taken = self._take_connection(payload, now)
                    else:
                        # A method ends content that was broken off.
                        self._returns.pop(number, None)
                        if number in self._expected or (self.expects_all and number not in self._left):
                            taken = self._keep_flow(number, splitter.data[start:stop])
                        else:
                            taken = number in self._left and self._take_late(number, splitter.data[start : start + 4])
                except (struct_error, IndexError) as error:
                    raise FrameError(f"a frame on channel {number} that cannot be decoded: {error}") from error
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
        """Deal with one frame of a publishing channel.

        Returns:
            True if the library is not to see it.
        """
        data = self._splitter.data
        if kind != METHOD_FRAME:
            if number not in self._returns:
                return False
            self._take_content(number, kind, start, stop)
            return True
        # A copy, so that nothing is read past the end of the frame.
        payload = data[start:stop]
        method = payload[:4]
        if number in self._returns and method != CHANNEL_CLOSE:
            raise FrameError(f"a method on channel {number} before the end of a returned message")
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
            raise FrameError(f"a frame of type {kind} on channel {number} that is no part of a returned message")
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
        """Take what is for whoever published on a channel that was left."""
        if method in (CHANNEL_CLOSE, CHANNEL_CLOSE_OK):
            self._left.discard(number)
        elif method == RETURN:
            self._returns[number] = _Returned(None, (0, "", "", ""))
        return method in (ACK, NACK, CHANNEL_FLOW, RETURN)

    def _take_connection(self, payload: bytes, now: float) -> bool:
        """Note what the broker says of the connection; True if the library is not to see it."""
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

    # Outwards.

    @property
    def at_border(self) -> bool:
        """Whether the library may write: no frame of ours has begun and not ended."""
        return self._writer is None and not self._remains

    @property
    def unfinished(self) -> bytes:
        """What is still to be written until the library may; empty at a frame border. As with `data_to_write`."""
        return self._remains or (self._writer.unfinished if self._writer is not None else b"")

    def data_to_write(self, limit: int) -> bytes:
        """The channels' next bytes, about `limit` of them at the most; empty if there are none.

        Whoever calls must write them, or a beginning of them, and then `advance` before anything else happens.
        """
        if self._remains:
            return self._remains
        channels = self._writers
        if self._writer is not None:
            # To the next border and no further, or one whose every write ends in mid-frame would never let go.
            rest = self._writer.unfinished if self._writes_last or len(channels) > 1 else b""
            return rest or self._writer.data_to_write(limit)
        # From the channel after the one that wrote last.
        turns = channels if len(channels) == 1 else sorted(channels, key=lambda each: (each <= self._turn, each))
        for number in turns:
            data = channels[number].data_to_write(limit)
            if data:
                self._writer = channels[number]
                self._turn = number
                return data
        return b""

    def advance(self, count: int, now: float) -> None:
        """Take note that so many bytes of what `data_to_write` returned are written; 0 if the socket took none."""
        if self._remains:
            self._remains = self._remains[count:]
            return
        assert self._writer is not None
        if self._writer.advance(count, now):
            self._writer = None
            self._writes_last = False
