"""`Session` is one AMQP connection, sans-I/O. `Session` gets input from the server, and returns output.

A connection passes through the states of `State`; every change of state is in this file. `Session.receive_data` splits
bytes into frames. Method and content frames of an open channel go to the `Channel`. The session handles all other
frames. If the handling of a frame raises an `AmqpError`, the session closes the channel or the connection. Later frames
of a closed channel are ignored until the client has answered the close.

Held input is input that the session keeps and handles later. `receive_data` holds the rest of its input in four cases:

- More than `Session.MAX_OUTPUT` bytes wait to be sent. So the output for a client that does not read is limited.
- A frame caused dead letters that are not sent yet, or made a queue exceed its maximum, see `DeadLetters`.
- The time `until` has passed, or `Session.has_done_much` is set. So slow frames cannot block the event loop.
- The handling of a frame raises `FrameWaitsError`. The session handles the frame again later.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum

import pamqp.base
from pamqp import commands

from qflow_client.amqp.frames import (
    BODY_FRAME,
    CHANNEL_CLOSE,
    CHANNEL_CLOSE_OK,
    CONNECTION_CLOSE,
    FRAME_MIN_SIZE,
    FRAME_OVERHEAD,
    HEADER_FRAME,
    HEARTBEAT_FRAME,
    METHOD_FRAME,
    PUBLISH,
    FrameError,
    FrameSplitter,
)
from qflow_client.broker.core import wire
from qflow_client.broker.core.channel import Channel
from qflow_client.broker.core.channelflow import Discipline
from qflow_client.broker.core.channels import Blocks, Channels
from qflow_client.broker.core.controls import Controls
from qflow_client.broker.core.deadlines import Deadlines
from qflow_client.broker.core.errors import ChannelException, ConnectionException, FrameWaitsError, ReplyCode
from qflow_client.broker.core.handshake import Handshake
from qflow_client.broker.core.logs import get_logger
from qflow_client.broker.core.output import Output
from qflow_client.broker.core.profiles import PROTOCOL_HEADER
from qflow_client.broker.core.settings import Settings
from qflow_client.broker.core.virtualhost import VirtualHost

__all__ = ["PROTOCOL_HEADER", "Session", "State"]

_log = get_logger(__name__)

_CHANNEL_OPEN = bytes((0, 20, 0, 10))
_CONNECTION_CLOSE_OK = bytes((0, 10, 0, 51))
_FRAME_KINDS = {1: "method", 2: "ContentHeader", 3: "ContentBody", 8: "Heartbeat"}


class State(Enum):
    """The states of a session. The value of a state is the name of the expected input, for error texts."""

    HEADER = "protocol header"
    START_OK = "Connection.Start-Ok"
    #: The login is delayed after failed logins from its address, or its password is being checked.
    LOGIN = "the end of the login"
    TUNE_OK = "Connection.Tune-Ok"
    OPEN = "Connection.Open"
    RUNNING = "Connection.Close, or a method on another channel"
    #: Connection.Close was sent.
    CLOSE_OK = "Connection.Close-Ok"
    #: Input is ignored; the socket has to be closed.
    ENDED = "nothing"


class Session:
    """The broker's side of one AMQP connection.

    Args:
        name: name of the connection: the address and port of the peer.
        now: monotonic seconds.
        on_output: called when there is output, see `Output`.
        discipline: creates the `Discipline` of the connection; ``None`` for no backlog limit and no sanctions.
    """

    #: Maximum bytes that wait to be sent. If more bytes wait, the session holds its input.
    MAX_OUTPUT = 1024 * 1024
    #: The clock is read after every `STRIDE` bytes, or after each frame if they took `LONG_STRIDE` seconds or more.
    STRIDE = 1024
    LONG_STRIDE = 0.0005

    def __init__(
        self,
        name: str,
        host: VirtualHost,
        controls: Controls,
        now: float,
        on_output: Callable[[], None],
        discipline: Callable[[Session], Discipline] | None = None,
    ) -> None:
        self.name = name
        self.host = host
        self.controls = controls
        self.settings: Settings = host.settings
        self.dialect = self.settings.dialect
        self.state = State.HEADER
        self.channels = Channels()
        self.output = Output(self.channels, controls, host.journal, now, on_output)
        self.handshake = Handshake(host, self.output)
        self.deadlines = Deadlines(self.settings, self.handshake, self.output, now)
        self.blocks = Blocks(self.channels, self.output, self.handshake, self.dialect, controls.alarm)
        self.is_held = False
        self._held = b""
        # Number of input bytes after which the clock is read again, at the end of a frame.
        self._stride = 0
        # Set by a slow frame, too much unsent output, unsent dead letters or a tarpit (D8). Further input is then held.
        self.has_done_much = False
        self._beginning = b""
        self._splitter = FrameSplitter(FRAME_MIN_SIZE)
        # Whether further input is ignored: after bytes that are not AMQP, or after an internal error.
        self._is_deaf = False
        # Whether the input is held until `DeadLetters` calls `_letters_sent`, see `DeadLetters.when_done`.
        self._waits_for_letters = False
        # Address of the client; empty if it has none.
        self.address = ""
        # Whether Connection.Open was accepted. If so, `VirtualHost.open_connections` counts this session until it ends.
        self.was_opened = False
        # The backlog limit (D7) and the sanctions (D8) for this client; None if the settings have neither.
        self.discipline = discipline(self) if discipline is not None else None
        # Whether the socket is not read, because memory is full or too many bytes wait for the disk.
        self.is_paused = False
        # Set when the first message of a channel has to wait (`VirtualHost.takes_no_publisher`). Never reset.
        self.waits_to_publish = False
        # Set when the client has missed a deadline. Then the server does not wait for the client to close the socket.
        self.is_unresponsive = False
        self.bytes_received = 0

    # Input.

    def receive_data(self, data: bytes, now: float, until: float = math.inf) -> None:
        """Handle input. If necessary, hold the rest until a later call, see the four cases at the top of this file.

        Args:
            data: input of any size; empty to continue with held input.
            now: monotonic seconds.
            until: time after which the rest is held, by the clock of the virtual host. At least one frame is handled.
        """
        if data:
            self.deadlines.last_received = now
            self.bytes_received += len(data)
        if self.is_held:
            self._held += data
            if not self.can_resume:
                return
            data, self._held, self.is_held = self._held, b"", False
        if self.state is State.HEADER:
            data = self._receive_header(data)
        if self._is_deaf or not data or self.state is State.ENDED:
            return
        trace = self.settings.trace
        max_output, output = self.MAX_OUTPUT, self.output
        splitter = self._splitter
        channels = self.channels
        clock, began = self.host.clock, now
        # Offset in the input at which the clock is read next.
        look_at = self._stride
        self.has_done_much = False
        try:
            for kind, number, start, stop in splitter.feed(data):
                payload = splitter.data[start:stop]
                if trace is not None:
                    trace("in", self.name, number, _frame_name(kind, payload))
                channel = channels.get(number)
                try:
                    if channel is None or channel.is_closing or self.state is not State.RUNNING:
                        self._receive_elsewhere(kind, number, payload, now)
                    elif kind == METHOD_FRAME:
                        channel.on_method(payload)
                        # Only methods need this check. Content frames can only add a Basic.Return of about the size of
                        # the message, and deliveries, which `Output.takes_deliveries` limits.
                        if output.unsent > max_output:
                            self.has_done_much = True
                    elif kind == HEADER_FRAME:
                        channel.on_header(payload)
                    elif kind == BODY_FRAME:
                        channel.on_body(payload)
                    else:
                        self._receive_elsewhere(kind, number, payload, now)
                except ChannelException as error:
                    cause = payload[:4] if kind == METHOD_FRAME else PUBLISH
                    if self.dialect.channel_errors_close is None:
                        _log.info("%s: channel %d is closed: %s", self.name, number, error.reply_text)
                        causes = self.host.dead_letters.causes
                        channels[number].fail(error.code, error.reply_text, cause)
                        self.wait_for_letters(causes)
                    else:
                        self.fail(self.dialect.channel_errors_close, error.text, now, cause)
                except ConnectionException as error:
                    cause = payload[:4] if kind == METHOD_FRAME else b"\0\0\0\0"
                    self.fail(error.code, error.reply_text, now, cause)
                except FrameWaitsError:
                    self._hold_rest(start - 7)
                    break
                if self.has_done_much:
                    self._hold_rest(stop + 1)
                    break
                if stop > look_at:
                    time = clock()
                    if time >= until:
                        self._hold_rest(stop + 1)
                        break
                    self._stride = self.STRIDE if time - began < self.LONG_STRIDE else 0
                    began = time
                    look_at = stop + self._stride
        except FrameError as error:
            self._is_deaf = True
            self.fail(ReplyCode.FRAME_ERROR, f"{ReplyCode.FRAME_ERROR.title} - {error}", now)
        # Free the handled bytes, so that an idle connection does not keep them.
        splitter.data = b""

    def _hold_rest(self, start: int) -> None:
        """Hold the current input from the offset `start` on."""
        rest = self._splitter.data[start:]
        if rest and self.state is not State.ENDED:
            self._held, self.is_held = rest, True

    def hold(self, data: bytes, now: float) -> None:
        """Hold input until a later call of `receive_data`."""
        self.deadlines.last_received = now
        self.bytes_received += len(data)
        self._held += data
        self.is_held = True

    @property
    def can_resume(self) -> bool:
        """Whether held input can be handled: no tarpit, no unsent dead letters, at most `MAX_OUTPUT` unsent bytes."""
        waits = self._waits_for_letters or self.deadlines.tarpit_until is not None
        return self.is_held and not waits and self.output.unsent <= self.MAX_OUTPUT

    def wait_for_letters(self, causes: int) -> None:
        """If `DeadLetters.causes` is greater than `causes`, handle no more input until `_letters_sent` is called."""
        letters = self.host.dead_letters
        if letters.causes > causes and not letters.is_done(letters.causes) and self.state is State.RUNNING:
            # Set `is_held` even if no input remains, so that the session holds the input that arrives later.
            self.has_done_much = self._waits_for_letters = self.is_held = True
            letters.when_done(self._letters_sent)

    def _letters_sent(self) -> None:
        self._waits_for_letters = False
        # The server then takes the output, and afterwards continues with the held input.
        self.output.announce()

    def _receive_header(self, data: bytes) -> bytes:
        self._beginning += data
        header, rest = self._beginning[:8], self._beginning[8:]
        dialect = self.dialect
        if not any(known.startswith(header) for known in dialect.headers):
            # As AMQP 0-9-1 requires, answer with a protocol header, and close the socket.
            _log.info("%s: the client does not speak AMQP 0-9-1: %r", self.name, header)
            self._is_deaf = True
            self.output.write(dialect.answer)
            self.end()
            return b""
        if len(header) < len(PROTOCOL_HEADER):
            return b""
        self._beginning = b""
        self.state = State.START_OK
        self.handshake.start()
        return rest

    def _receive_elsewhere(self, kind: int, number: int, payload: bytes, now: float) -> None:
        """Handle a frame that no open channel handles: for example a heartbeat, or a method on channel 0."""
        if self.state is State.ENDED:
            return
        if kind == HEARTBEAT_FRAME:
            if number:
                raise ConnectionException(
                    ReplyCode.FRAME_ERROR, f"a heartbeat came on channel {number}; it must be on channel 0"
                )
        elif self.state is State.CLOSE_OK:
            if kind == METHOD_FRAME and number == 0 and payload[:4] in (CONNECTION_CLOSE, _CONNECTION_CLOSE_OK):
                if payload[:4] == CONNECTION_CLOSE:
                    self._send(commands.Connection.CloseOk())
                self.end()
        elif number == 0:
            if kind != METHOD_FRAME:
                raise ConnectionException(
                    ReplyCode.CHANNEL_ERROR, "a content frame came on channel 0, which carries only methods"
                )
            self._receive_method(wire.decode_method(payload), now)
        elif self.state is not State.RUNNING:
            raise ConnectionException(
                ReplyCode.CHANNEL_ERROR, f"a frame came on channel {number} before the connection was open"
            )
        elif number in self.channels:
            # The channel is closing.
            if kind == METHOD_FRAME and payload[:4] == CHANNEL_CLOSE_OK:
                self.channel_closed(self.channels[number])
            elif kind == METHOD_FRAME and payload[:4] == CHANNEL_CLOSE:
                self.output.write(wire.method(number, commands.Channel.CloseOk()))
        elif kind == METHOD_FRAME and payload[:4] == _CHANNEL_OPEN:
            self._open_channel(number, payload)
        else:
            raise ConnectionException(
                ReplyCode.CHANNEL_ERROR, f"channel {number} is not open; open it with Channel.Open"
            )

    # Channel 0.

    def _receive_method(self, method: pamqp.base.Frame, now: float) -> None:
        if isinstance(method, commands.Connection.Close):
            _log.debug("%s: closed by its client: %s %s", self.name, method.reply_code, method.reply_text)
            self._end_channels()
            self._send(commands.Connection.CloseOk())
            self.end()
        elif self.state is State.START_OK and isinstance(method, commands.Connection.StartOk):
            self.state = State.LOGIN
            self.handshake.start_ok(method, self.address, now, self._login_checked)
            self.deadlines.by(self.handshake.login_at)
        elif self.state is State.TUNE_OK and isinstance(method, commands.Connection.TuneOk):
            self.handshake.tune_ok(method)
            # As in RabbitMQ, the payload alone may have frame_max bytes, because AMQPStorm sends such frames.
            self._splitter.frame_max = self.handshake.frame_max + FRAME_OVERHEAD
            self.state = State.OPEN
            if self.handshake.heartbeat:
                self.deadlines.by(now + self.handshake.heartbeat / 2)
        elif self.state is State.OPEN and isinstance(method, commands.Connection.Open):
            self._open(method)
        elif (
            self.state is State.RUNNING
            and isinstance(method, commands.Connection.UpdateSecret)
            and self.dialect.extensions
        ):
            self.handshake.update_secret(method, now)
            self.deadlines.by(self.handshake.expires_at)
        else:
            raise ConnectionException(
                ReplyCode.COMMAND_INVALID,
                f"{method.name} came on channel 0, but the broker waits for {self.state.value}",
            )

    def _login_checked(self, refusal: str | None) -> None:
        """Accept the login if `refusal` is ``None``; otherwise `refusal` is the reason why the login is refused."""
        if self.state is not State.LOGIN:
            # The connection has ended during the password check.
            return
        if refusal is None:
            self.deadlines.by(self.handshake.expires_at)
            self.state = State.TUNE_OK
            self.handshake.tune()
            return
        _log.warning("%s: %s", self.name, refusal)
        if self.handshake.understands("authentication_failure_close"):
            code, cause = ReplyCode.ACCESS_REFUSED, commands.Connection.StartOk.index.to_bytes(4, "big")
            self.fail(code, f"{code.title} - {refusal}", self.host.clock(), cause)
        else:
            self.end()

    def _open(self, method: commands.Connection.Open) -> None:
        self.handshake.check_open(method, self.name)
        self.host.open_connections += 1
        self.was_opened = True
        self.state = State.RUNNING
        self.deadlines.open_by = math.inf
        self._send(commands.Connection.OpenOk())
        for source, reason in self.controls.alarms.items():
            self.block(source, reason)

    def _open_channel(self, number: int, payload: bytes) -> None:
        wire.decode_method(payload)
        if number > self.handshake.channel_max:
            raise ConnectionException(
                ReplyCode.NOT_ALLOWED,
                f"channel {number} is above the negotiated channel_max {self.handshake.channel_max}; close others",
            )
        self.channels[number] = Channel(self, number)
        self.output.write(wire.method(number, commands.Channel.OpenOk()))

    def channel_closed(self, channel: Channel) -> None:
        self.channels.forget(channel)
        self.output.forget(channel)

    def block(self, source: str, reason: str | None) -> None:
        """Add the alarm `source` for this client, or remove it if the reason is ``None``. See `Blocks`."""
        if self.state is State.RUNNING:
            self.blocks.change(source, reason)

    def take_output(self, now: float) -> bytes:
        """Return the bytes to send now, see `Output.take`."""
        data = self.output.take(now)
        trace = self.settings.trace
        if trace is not None and data and not data.startswith(b"AMQP"):
            for kind, number, start, stop in FrameSplitter().feed(data):
                trace("out", self.name, number, _frame_name(kind, data[start:stop]))
        return data

    def _send(self, method: pamqp.base.Frame) -> None:
        self.output.write(wire.method(0, method))

    def tick(self, now: float) -> None:
        """At `Deadlines.at`, send a heartbeat, check a delayed login, or end an unresponsive or expired connection."""
        handshake, deadlines = self.handshake, self.deadlines
        if self.state is State.ENDED or now < deadlines.at:
            return
        missed = deadlines.missed(now, is_closing=self.state is State.CLOSE_OK)
        if missed is None and now >= handshake.expires_at:
            code = ReplyCode.CONNECTION_FORCED
            self.fail(code, f"{code.title} - the credentials of user {handshake.user!r} have expired", now)
            return
        if missed is None:
            if self.state is State.LOGIN and now >= handshake.login_at:
                handshake.check_login(self.address, now, self._login_checked)
                if self.state not in (State.LOGIN, State.TUNE_OK):
                    return
            is_silenced = self.is_paused or (self.is_held and (bool(self.output.promises) or self._waits_for_letters))
            missed = deadlines.beat(now, is_silenced=is_silenced, login_at=handshake.login_at)
        if missed is not None:
            _log.info("%s: the connection is cut: %s", self.name, missed)
            self.is_unresponsive = True
            self.end()

    def tarpit(self, now: float) -> None:
        """Stop handling input for `tarpit_time` seconds (D8), including the rest of the current input."""
        self.deadlines.tarpit(now)
        self.has_done_much = True

    # Closing.

    def fail(self, code: int, text: str, now: float, cause: bytes = b"\0\0\0\0") -> None:
        """Close the connection with an error. `cause` has the class id and method id of the method at fault."""
        if self.state in (State.CLOSE_OK, State.ENDED):
            return
        if self.state is State.HEADER:
            self.end()
            return
        # The frame is encoded first, so that nothing has changed if the code cannot be encoded.
        close = wire.close(0, code, text, cause)
        self._waits_for_letters = False
        _log.info("%s: the connection is closed: %s", self.name, text)
        self.state = State.CLOSE_OK
        self.deadlines.closing(now)
        # From now on only Connection.Close and Close-Ok are handled. They need no memory, so the socket is read.
        self.is_paused = False
        self._end_channels()
        self.output.write(close)

    def fail_internally(self, now: float) -> None:
        """Close the connection with 541 after an internal error. Further input is ignored."""
        self._is_deaf = True
        self.fail(ReplyCode.INTERNAL_ERROR, f"{ReplyCode.INTERNAL_ERROR.title} - see the broker's log", now)

    def end(self) -> None:
        """End the connection and free its resources. `take_output` can still return the remaining output."""
        if self.state is State.ENDED:
            return
        if self.was_opened:
            self.host.open_connections -= 1
        self.state = State.ENDED
        self._held, self.is_held = b"", False
        self.deadlines.at = math.inf
        self._end_channels()
        self.output.announce()

    def lost(self) -> None:
        """The socket is closed: drop references to other objects, so that no reference cycle keeps them in memory."""
        self.end()
        self.output.lost()
        for channel in self.channels.values():
            channel.confirms = None
        self.channels.clear()
        self.discipline = None

    def _end_channels(self) -> None:
        # A channel requeues its unacked messages. The queues must not deliver them to this connection again.
        self.output.takes_deliveries = False
        with self.host.slices.together():
            self.channels.end()
            self.host.owner_gone(self)

    @property
    def held_size(self) -> int:
        """Bytes of held input and of an incomplete frame."""
        return len(self._held) + self._splitter.pending

    @property
    def memory(self) -> int:
        """Bytes in memory: incomplete messages, held input, and output that waits for `take_output`."""
        return self.output.memory + len(self._held) + sum(channel.incoming for channel in self.channels.values())

    @property
    def is_publishing(self) -> bool:
        """Whether the connection has published or started to publish, and is not closing."""
        has_published = self.waits_to_publish or self.channels.published
        return self.state is not State.CLOSE_OK and (
            bool(has_published) or any(channel.is_publishing for channel in self.channels.values())
        )


def _frame_name(kind: int, payload: bytes) -> str:
    return wire.method_name(payload) if kind == METHOD_FRAME else _FRAME_KINDS[kind]
