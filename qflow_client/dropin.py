"""The common code of the drop-ins for client libraries: settings of connections, and flow control of channels.

A drop-in adds flow control to a client library (pika, aio-pika, kombu), which programs use as before. The library still
manages connections, topology, consumers and the encoding of messages. A `ProducerProtocol` decides when messages are
sent, as in every producer. This module does no I/O, because each library has its own.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from qflow_client.amqp.frames import (
    BODY_FRAME,
    HEADER_FRAME,
    METHOD_FRAME,
    Content,
    PublishEncoder,
    Route,
    add_header,
    frame,
)
from qflow_client.core.calls import Call, resume
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.step import step
from qflow_client.errors import ProducerFlowed
from qflow_client.events import FlowEvent
from qflow_client.logs import log, write_log
from qflow_client.message import REPUBLISHED, Message
from qflow_client.receipt import Receipt
from qflow_client.settings import OnDisconnect, ProducerSettings, WhenFlowed, check_argument, variable

__all__ = [
    "ADDRESSING",
    "RECONNECTING",
    "RETRYING",
    "DropIn",
    "DropInFlow",
    "EncodedMessage",
    "EncodedProtocol",
    "Flag",
    "RepeatableMessage",
]

#: Settings that drop-ins leave to the library or program. Only aio-pika's `connect_robust` accepts `on_disconnect`.
ADDRESSING = ("exchange", "routing_key", "mandatory")
RECONNECTING = ("on_disconnect", "reconnect_timeout", "reconnect_delay", "reconnect_delay_max", "reconnect_jitter")
RETRYING = ("on_refused", "retry_for", "retry_delay", "retry_delay_max")

# Settings that no drop-in accepts, each with the reason.
_PRODUCERS_ONLY = {
    **dict.fromkeys(
        ("host_order", "on_blocked", "failover_delay", "return_to_first", "liveness"),
        "only Producer and AsyncProducer choose among hosts; the program itself must connect, as with the library",
    ),
    "connect_in_background": "the program itself must connect, as with the library",
    "close_timeout": "the program itself must close, as with the library",
    "delivery_timeout": "the library's own timeout ends the wait for a confirm",
    **dict.fromkeys(
        (
            "outbox",
            "outbox_max_bytes",
            "outbox_max_age",
            "outbox_full",
            "outbox_synchronous",
            "outbox_keep_undelivered",
        ),
        "only Producer and AsyncProducer have an outbox",
    ),
}
# Settings with a fixed value. Most of them are arguments of the library's methods instead.
_FIXED: dict[str, Any] = {
    "exchange": "",
    "routing_key": "",
    "confirms": True,
    "mandatory": None,
    "message_ids": False,
}
_URL = "amqp://localhost"
_NAME = ProducerSettings.__dataclass_fields__["name"].default

_Value = TypeVar("_Value")
_T = TypeVar("_T")


@dataclass(frozen=True)
class DropIn:
    """The settings that a library's connections accept.

    Attributes:
        library: name of the library, for errors.
        theirs: settings whose names the library uses for its own parameters. Users put ``qflow_`` before these names.
        not_taken: settings, in addition to `_PRODUCERS_ONLY`, that are not accepted, each with the reason.
    """

    library: str
    theirs: frozenset[str]
    not_taken: Mapping[str, str]

    #: The names of all settings.
    SETTINGS = frozenset(name for name in ProducerSettings.__dataclass_fields__ if not name.startswith("_"))

    @cached_property
    def names(self) -> dict[str, str]:
        """Maps the names that users write in keywords and URLs (see `theirs`) to the names of settings."""
        return {f"qflow_{name}" if name in self.theirs else name: name for name in self.SETTINGS}

    def split(self, given: Iterable[tuple[str, _Value]]) -> tuple[dict[str, _Value], list[tuple[str, _Value]]]:
        """Separate the settings from the library's parameters, and return both."""
        ours: dict[str, _Value] = {}
        theirs: list[tuple[str, _Value]] = []
        for name, value in given:
            setting = self.names.get(name)
            if setting is None:
                theirs.append((name, value))
            elif setting in self.not_taken or setting in _PRODUCERS_ONLY:
                why = self.not_taken.get(setting) or _PRODUCERS_ONLY[setting]
                raise TypeError(f"{setting} is not a setting of a connection of {self.library}: {why}")
            else:
                # If a URL contains a setting twice, use the first value.
                ours.setdefault(setting, value)
        return ours, theirs

    def _environ(self) -> dict[str, str]:
        ignored = {variable(name) for name in _PRODUCERS_ONLY.keys() | self.not_taken.keys()}
        environ = {name: text for name, text in os.environ.items() if name not in ignored}
        on_disconnect = variable("on_disconnect")
        # By default, settle messages when the connection is lost, because the library does not send them again.
        environ[on_disconnect] = environ.get(on_disconnect) or OnDisconnect.FAIL
        when_flowed = variable("when_flowed")
        if environ.get(when_flowed) == WhenFlowed.SPILL:
            # A connection has no outbox, so messages cannot be spilled.
            del environ[when_flowed]
        return environ

    def settings(self, query: Mapping[str, str] | None = None, **keywords: Any) -> ProducerSettings:
        """Collect the settings of a connection from keywords, a URL's query and the environment."""
        return ProducerSettings.load(f"{_URL}?{urlencode(query or {})}", environ=self._environ(), **(keywords | _FIXED))

    def of_url(self, url: str) -> tuple[ProducerSettings, str]:
        """Return the settings in a URL, and the URL without these settings."""
        parts = urlsplit(url)
        ours: list[tuple[str, str]] = []
        theirs: list[str] = []
        for piece in parts.query.split("&"):
            named = [each for each in parse_qsl(piece, keep_blank_values=True) if each[0] in self.names]
            if named:
                ours += named
            else:
                # Leave the parameter unchanged, because the library may parse it in its own way.
                theirs.append(piece)
        if ours:
            url = urlunsplit(parts._replace(query="&".join(theirs)))
        return self.settings(self.split(ours)[0]), url


class EncodedMessage(Message):
    """A message that a library has encoded."""

    frames: bytes

    def __init__(self, frames: bytes, body: bytes) -> None:
        # Write into `__dict__`, like `Message`, because the frozen dataclass rejects assignments.
        given = self.__dict__
        given["frames"] = frames
        given["body"] = body

    def frames_on(self, channel: int, max_body: int) -> bytes:
        """Return the frames that the library has encoded for its channel. The arguments have no effect."""
        return self.frames


class RepeatableMessage(EncodedMessage):
    """An `EncodedMessage` that can be sent again, even on another channel."""

    def _parts(self) -> tuple[bytes, bytes, int]:
        """Return the payloads of the method frame and the header frame, and the offset of the first body frame."""
        frames = self.frames
        header = 7 + int.from_bytes(frames[3:7], "big") + 1
        stop = header + 7 + int.from_bytes(frames[header + 3 : header + 7], "big")
        return frames[7 : header - 1], frames[header + 7 : stop], stop + 1

    def frames_on(self, channel: int, max_body: int) -> bytes:
        """Return the frames for a channel. `max_body` is the maximum payload of a frame in bytes."""
        frames, body = self.frames, self.body
        is_for_channel = frames[1] << 8 | frames[2] == channel
        if is_for_channel and len(body) <= max_body:
            return frames
        method, header, at = self._parts()
        if is_for_channel and int.from_bytes(frames[at + 3 : at + 7], "big") <= max_body:
            return frames
        if len(header) > max_body:
            raise ValueError(f"the properties have {len(header)} bytes, and the broker accepts {max_body} in a frame")
        bodies = [frame(BODY_FRAME, channel, body[at : at + max_body]) for at in range(0, len(body), max_body)]
        return b"".join((frame(METHOD_FRAME, channel, method), frame(HEADER_FRAME, channel, header), *bodies))

    def _second_copy(self) -> RepeatableMessage:
        method, header, at = self._parts()
        # No message is sent on channel 0. So `frames_on` always creates new frames, for the channel that it gets.
        head = frame(METHOD_FRAME, 0, method) + frame(HEADER_FRAME, 0, add_header(header, REPUBLISHED, True))
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, frames=head + self.frames[at:])
        return copy


class _ReadyFrames(PublishEncoder):
    """Uses the frames that a library has encoded."""

    __slots__ = ()

    def prepare(self, message: Content, *, has_id: bool) -> Any:
        assert isinstance(message, EncodedMessage)
        return message.frames_on(self.channel, self.max_body)

    def cost(self, _route: Route, _length: int, prepared: Any) -> int:
        return len(prepared)

    def frames(self, _route: Route, _body: bytes, prepared: Any, _number: int) -> list[bytes]:
        # Return all frames of the message as one element. Between two elements, the library may write a method on the
        # same channel. The broker would then close the connection, because no method may come there.
        return [prepared]


class EncodedProtocol(ProducerProtocol):
    """The `ProducerProtocol` of a channel whose messages are `EncodedMessage` objects."""

    def __init__(self, settings: ProducerSettings, **options: Any) -> None:
        super().__init__(settings, id_prefix="", encoder=_ReadyFrames, **options)

    def send(self, message: EncodedMessage, exchange: str, routing_key: str, now: float) -> Receipt | None:
        admission = self.admission
        # `send_at_once` takes half as long as `send`, and usually succeeds.
        receipt = admission.send_at_once(message, exchange, routing_key)
        return receipt if receipt is not None else admission.send(message, exchange, routing_key, now)

    @step
    def abandon(self, receipts: Sequence[Receipt], reason: str, now: float) -> None:
        """Settle messages whose callers have stopped waiting. Otherwise the next channel might send the messages."""
        self.consequences.abandon(receipts, reason, now)

    @step
    def channel_ended(self, reason: str, now: float) -> None:
        """Settle every message, because the channel has ended.

        This object can be used again: `channel_opened` starts the next channel.
        """
        self.channel.disconnect(reason, now)
        self.channel.settle_all(reason, now)
        self.consequences.update(now)

    @property
    def is_idle(self) -> bool:
        """Whether all messages are settled and no call waits in line. If so, the channel's end affects no message."""
        return not self.unsettled and not self.line.tickets

    def forget_past(self) -> None:
        """Let the next channel count as the first one. So the time until it opens does not count as flow control.

        The drop-ins call this method if the program has closed the channel, or if its end affects no message.
        """
        self.channel.was_open = False


class Flag:
    """The waiter of a blocking call. The caller's own thread processes I/O until `is_set` is True."""

    __slots__ = ("is_set",)

    def __init__(self) -> None:
        #: Whether the call can continue.
        self.is_set = False

    def set(self) -> None:
        self.is_set = True


class DropInFlow:
    """The flow control of one channel of a library: its `ProducerProtocol`, and the listeners for flow events.

    Args:
        name: name in flow events and logs, if the setting `name` has its default value.
        protocol: the class of the channel's protocol.
        changes: settings of this channel that differ from those of the connection.
    """

    def __init__(
        self,
        settings: ProducerSettings,
        name: str,
        *,
        protocol: type[EncodedProtocol] = EncodedProtocol,
        **changes: Any,
    ) -> None:
        #: The connection's settings.
        self.settings = settings
        if settings.name == _NAME:
            changes["name"] = name
        now = time.monotonic()
        #: Decides when messages are sent.
        self.protocol = protocol(settings.replace(**changes), now=now, wall_offset=time.time() - now)
        self._listeners: list[Callable[[FlowEvent], object]] = []
        self._is_telling = False

    # `FlowManager` uses these methods. Any thread may call them.

    @property
    def name(self) -> str:
        return self.protocol.settings.name

    def hold(self, kind: str, *, source: str, detail: str) -> None:
        """Request a hold. The connection's thread or loop raises it, and may send a few messages before that."""
        self._call(lambda: self.protocol.hold(kind, time.monotonic(), source=source, detail=detail))

    def lift(self, kind: str, *, source: str) -> None:
        self._call(lambda: self.protocol.lift(kind, time.monotonic(), source=source))

    def _call(self, function: Callable[[], None]) -> None:
        """Call a function on the thread or loop of the connection. Then write the messages that may be sent now."""
        raise NotImplementedError

    def disown(self, reason: str) -> None:
        """In a forked child, replace the protocol, which belongs to the parent, by a closed one."""
        now = time.monotonic()
        self.protocol = type(self.protocol)(self.protocol.settings, now=now, wall_offset=time.time() - now)
        self.protocol.close(reason, now)
        self._listeners = []

    # Calls that wait.

    def drive(self, call: Call[_T], flag: Flag, turn: Callable[[float], None]) -> _T:
        """Run a call that waits; see `core.calls`.

        Args:
            flag: the waiter that `call` registers with the protocol.
            turn: processes I/O until an event comes, or until the given time of `time.monotonic`.
        """
        try:
            until, result = resume(call, None)
            while until is not None:
                self.after()
                while not flag.is_set and time.monotonic() < until:
                    turn(until)
                    self._set_flags()
                until, result = resume(call, time.monotonic())
        finally:
            self.protocol.waiters.forget(flag)
        return result  # type: ignore[return-value]  # the call has ended

    def _set_flags(self) -> None:
        reports = self.protocol.reports
        wake, reports.wake = reports.wake, []
        for flag in wake:
            flag.set()

    def after(self) -> None:
        """After a change of the protocol's state, wake waiters, write log entries, and call flow callbacks."""
        self._set_flags()
        protocol = self.protocol
        logs, protocol.reports.logs = protocol.reports.logs, []
        write_log(logs)
        if self._is_telling:
            # A listener has caused this call. The outer call of `after` continues the loop below with the new events.
            return
        self._is_telling = True
        try:
            while protocol.reports.events:
                events, protocol.reports.events = protocol.reports.events, []
                for event in events:
                    for listener in tuple(self._listeners):
                        self._tell(listener, event)
        finally:
            self._is_telling = False

    def _tell(self, listener: Callable[[FlowEvent], object], event: FlowEvent) -> None:
        try:
            listener(event)
        except Exception as error:
            log(logging.ERROR, "%s: a flow callback failed: %r", event.producer, listener, error=error)

    def listen(self, listener: Callable[[FlowEvent], object]) -> Callable[[], None]:
        """Call a listener with each flow event from now on. Return a function that unregisters the listener."""
        check_argument("callback", listener, callable(listener), "callable")
        if self.protocol.reports.events is None:
            self.protocol.reports.events = []
        self._listeners.append(listener)

        def stop() -> None:
            with suppress(ValueError):
                self._listeners.remove(listener)

        return stop

    @property
    def held(self) -> str:
        """A text about the present holds, which is appended to errors about missing confirms; empty without holds."""
        holds = self.protocol.reports.holds
        return f"; held by {', '.join(map(str, holds))}" if holds else ""

    def flowed(self, message: EncodedMessage, exchange: str, routing_key: str) -> ProducerFlowed:
        """Count and return the error for a message that is rejected because the channel is blocked (flowed)."""
        error = ProducerFlowed(
            self.protocol.line.count_flowed_error(),
            0.0,
            message.body,
            "use a flow callback or flow_state to learn when to continue",
            exchange=exchange,
            routing_key=routing_key,
        )
        self.after()
        return error
