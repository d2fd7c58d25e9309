"""The settings of producers: their names and allowed values, and the sources of a value.

A setting may be a keyword argument, or come from a `ProducerSettings`, the query of the URL, or the environment. The
first of these sources that has the setting is used. The environment variable of `capacity` is ``QFLOW_CAPACITY``.
"""

from __future__ import annotations

import math
import numbers
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from qflow_client.errors import SettingsError
from qflow_client.redaction import HARMLESS, hide_password, is_clear, is_url, printable, shown, shown_of_unknown

__all__ = [
    "HostOrder",
    "OnBlocked",
    "OnDisconnect",
    "OnOutboxFull",
    "OnRefused",
    "OutboxSynchronous",
    "ProducerSettings",
    "SettingsKeywords",
    "WhenFlowed",
    "check_argument",
    "check_setting",
    "check_timeout",
    "hide_password",
    "variable",
]


# A comma between two URLs.
_BETWEEN_URLS = re.compile(r"\s*,\s*(?=[A-Za-z][A-Za-z0-9+.-]*://)")

_PREFIX = "QFLOW_"
# A variable or parameter whose name is at least this similar to a setting's (0 to 1) is reported as misspelt.
_SIMILAR = 0.8

# The default burst of a rate limit: the number of messages in this number of seconds.
_CATCHES_UP = 0.05

_URL = "amqp://guest:guest@localhost:5672/%2F"


class WhenFlowed(StrEnum):
    """What `send` does while the producer is flowed (D1)."""

    #: Wait for at most `max_producer_flow_control_wait` seconds.
    BLOCK = "block"
    #: Raise `ProducerFlowed` immediately.
    RAISE = "raise"
    #: Put the message into the outbox, from which it is sent later.
    SPILL = "spill"


class OnDisconnect(StrEnum):
    """What happens to unsettled messages when the connection is lost and restored."""

    #: Send the messages again in order, before new ones. Possible second copies get the header ``x-qflow-republished``.
    REPUBLISH = "republish"
    #: Settle the messages: as *unknown* if they were written at least in part, and otherwise as *failed*.
    FAIL = "fail"


class HostOrder(StrEnum):
    """The order in which a producer tries its hosts, if `url` has several (E15)."""

    #: The order of `url`.
    GIVEN = "given"
    #: A random order for each producer, so that many producers are distributed over the hosts.
    SHUFFLED = "shuffled"


class OnBlocked(StrEnum):
    """What a producer with several hosts does while the broker blocks its connection (E15)."""

    #: Wait.
    WAIT = "wait"
    #: After `failover_delay` seconds, connect to the next host and send the unsettled messages to this host.
    FAILOVER = "failover"


class OnRefused(StrEnum):
    """What happens to a message for which the broker has no room now."""

    #: Send the message again after a pause, for at most `retry_for` seconds.
    RETRY = "retry"
    #: Settle the message as *nacked* or *rejected*.
    FAIL = "fail"


class OnOutboxFull(StrEnum):
    """What `send` does while the outbox has no room for the message."""

    #: Wait for at most `max_producer_flow_control_wait` seconds, as while the producer is flowed.
    BLOCK = "block"
    #: Raise `OutboxFull` immediately.
    RAISE = "raise"


class OutboxSynchronous(StrEnum):
    """The failures that messages in the outbox survive."""

    #: Messages survive only a crash or kill of the process.
    NORMAL = "normal"
    #: Messages also survive a crash of the machine. Each commit waits for the disk.
    FULL = "full"


def _optional(parse: Callable[[str], Any], *none: str) -> Callable[[str], Any]:
    """Return a parser that returns ``None`` for ``""``, ``"none"``, and the words in the argument `none`."""
    return lambda text: None if text.lower() in ("none", "", *none) else parse(text)


def _capacity(text: str) -> int | str:
    return "auto" if text.lower() == "auto" else int(text)


def _comma_list(text: str) -> str | tuple[str, ...]:
    urls = _BETWEEN_URLS.split(text)
    for url in urls:
        # A URL's password and query may contain commas. Any other comma that no URL follows is an error.
        parts = urlsplit(url)
        if "," in parts.netloc.rpartition("@")[2] + parts.path:
            raise ValueError("a comma that no URL follows")
    return urls[0] if len(urls) == 1 else tuple(urls)


def _boolean(text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    try:
        return known[text.lower()]
    except KeyError:
        raise ValueError("use true or false") from None


def _setting(default: Any, parse: Callable[[str], Any], allowed: str, check: Callable[[Any], bool]) -> Any:
    return field(default=default, metadata={"parse": parse, "allowed": allowed, "check": check})


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_path(value: Any) -> bool:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return value is None or (isinstance(value, str) and value != "" and "\0" not in value and not is_url(value))


def _is_name(value: Any) -> bool:
    try:
        return isinstance(value, str) and len(value.encode()) <= 255
    except UnicodeEncodeError:
        return False


# A function that parses a text, a description of the allowed values, and a function that checks a value.
_Rule = tuple[Callable[[str], Any], str, Callable[[Any], bool]]


def _whole(unit: str, none: str = "") -> _Rule:
    """Return the rule for a whole number of at least 1. If `none` is not empty, it describes the value ``None``."""

    def is_allowed(value: Any) -> bool:
        return (value is None and none != "") or (_is_int(value) and value >= 1)

    allowed = f"a whole number of {unit}, at least 1"
    return (_optional(int), f"{none} or {allowed}", is_allowed) if none else (int, allowed, is_allowed)


def _number(unit: str, none: str = "", *, or_0: bool = False) -> _Rule:
    """Return the rule for a number above 0 (with `or_0`, at least 0). `none` is as for `_whole`."""

    def is_allowed(value: Any) -> bool:
        return (value is None and none != "") or (_is_number(value) and (value > 0 or (or_0 and value == 0)))

    allowed = f"{unit}, {'at least' if or_0 else 'more than'} 0"
    return (_optional(float, "forever"), f"{none} or {allowed}", is_allowed) if none else (float, allowed, is_allowed)


def _member_of(kind: type[StrEnum]) -> _Rule:
    *others, last = (f"'{member}'" for member in kind)
    return str, f"{', '.join(others)} or {last}", lambda v: isinstance(v, str) and v in list(kind)


_BOOL: _Rule = (_boolean, "True or False", lambda v: isinstance(v, bool))
_NAME: _Rule = (str, "a str of at most 255 bytes", _is_name)


class SettingsKeywords(TypedDict, total=False):
    """The settings of `ProducerSettings` except ``url`` as keywords, for type checkers and editors."""

    exchange: str
    routing_key: str
    capacity: int | Literal["auto"]
    capacity_max: int
    capacity_bytes: int | None
    max_producer_flow_control_wait: float | None
    when_flowed: WhenFlowed | Literal["block", "raise", "spill"]
    confirms: bool
    mandatory: bool | None
    message_ids: bool
    rate: float | None
    rate_burst: int | None
    max_unwritten_bytes: int
    max_failed_bytes: int
    max_flow_events: int
    flow_control_wait_notify_period: float
    connect_timeout: float
    connect_in_background: bool
    close_timeout: float | None
    on_disconnect: OnDisconnect | Literal["republish", "fail"]
    reconnect_timeout: float | None
    reconnect_delay: float
    reconnect_delay_max: float
    reconnect_jitter: float
    host_order: HostOrder | Literal["given", "shuffled"]
    on_blocked: OnBlocked | Literal["wait", "failover"]
    failover_delay: float
    return_to_first: float | None
    liveness: float | None
    on_refused: OnRefused | Literal["retry", "fail"]
    retry_for: float
    delivery_timeout: float | None
    retry_delay: float
    retry_delay_max: float
    outbox: str | os.PathLike[str] | None
    outbox_max_bytes: int
    outbox_max_age: float | None
    outbox_full: OnOutboxFull | Literal["block", "raise"]
    outbox_synchronous: OutboxSynchronous | Literal["normal", "full"]
    outbox_keep_undelivered: bool
    tracing: bool
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    """All settings of a producer.

    Attributes:
        url: ``amqp://`` or ``amqps://`` URL of the broker. Several URLs are tried one after the other. Query parameters
            that are not settings, such as ``heartbeat``, are passed to pika or aio-pika.
        exchange: exchange of a message if `send` names no exchange. ``""`` is the default exchange of the broker.
        routing_key: routing key of a message if `send` names no routing key.
        capacity: maximum number of unsettled messages, without those that wait on disk (C6). With ``"auto"`` the
            producer measures the latency of confirms, and finds the smallest window with maximum throughput.
        capacity_max: maximum window of ``capacity="auto"`` (C6). This setting has no effect on a fixed capacity.
        capacity_bytes: maximum body bytes of unsettled messages. A message above this limit is admitted only while no
            other message is unsettled. ``None`` for no limit.
        max_producer_flow_control_wait: maximum seconds that a call of `send` waits while the producer is flowed (A4).
            ``None`` for no limit, 0 to raise an error immediately.
        when_flowed: what `send` does while the producer is flowed: ``"block"``, ``"raise"`` or ``"spill"`` (D1). With
            ``"spill"``, `send` puts the message into the `outbox`, from which it is sent later, in order.
        confirms: whether to use publisher confirms. Without confirms, a written message has the outcome ``sent``.
        mandatory: whether the broker returns messages that no queue receives, so that they are not lost silently.
            Returned messages are recognised by their message ids, so ``None`` means the value of `message_ids`.
        message_ids: whether to assign a message id to each message without an id.
        rate: maximum messages per second, on average; ``None`` for no limit (F2 F6).
        rate_burst: number of messages that may be sent without a pause after an idle time. The default is the number of
            messages that `rate` allows in 50 ms. So a sender that wakes up late can catch up.
        max_unwritten_bytes: maximum bytes of admitted, unwritten messages; above it there is the hold ``transport``.
        max_failed_bytes: maximum bytes of failed receipts that are kept for `flush` and `close`, because the
            application has not seen them. Each receipt counts as the size of its body plus 512 bytes. Above this limit
            the oldest receipts are dropped, and `UndeliveredMessages.dropped` has their number. But if messages fail
            together, or after the call of `close`, all of their receipts are kept.
        max_flow_events: maximum number of flow events that wait for a slow reader of ``flow_events()`` or a slow
            ``on_flow`` callback. Above this limit the oldest events are dropped, and a warning shows their number.
        flow_control_wait_notify_period: seconds between two notices that calls of `send` still wait.
        connect_timeout: maximum seconds to connect to a host, including TLS, authentication and opening the channel.
        connect_in_background: whether to create the producer without waiting for the broker (E12). The producer is
            ``disconnected`` at first, and tries all hosts repeatedly, as after a lost connection. With an outbox and
            ``when_flowed="spill"``, the producer accepts messages immediately.
        close_timeout: default timeout of `close` and of the end of a ``with`` block, in seconds; ``None`` for no limit.
            `max_producer_flow_control_wait` also limits this time (E12).
        on_disconnect: what happens to unsettled messages after a lost connection: ``"republish"`` or ``"fail"``.
        reconnect_timeout: seconds for which the producer tries to reconnect after a loss. Then the producer ends, after
            a last try of each host, which takes `connect_timeout` at most. ``None`` for no limit, 0 to end at the first
            loss.
        reconnect_delay: seconds before the first try to reconnect. After each round of all hosts, the pause is doubled.
        reconnect_delay_max: maximum pause in seconds between two tries. If a connection lasts less than this time, the
            pauses continue to grow. A message that may have caused losses waits for this time on each new channel.
        reconnect_jitter: maximum random extension of a pause (also after a refusal), as a fraction of the pause; 0 for
            none. The jitter prevents all clients from reconnecting at the same time. No pause exceeds its maximum.
        host_order: order in which the hosts are tried, if `url` has several: ``"given"`` or ``"shuffled"`` (E15).
        on_blocked: what a producer with several hosts does while the broker blocks its connection
            (``Connection.Blocked``): ``"wait"`` or ``"failover"`` (E15).
        failover_delay: if a connection is blocked for this number of seconds, the producer connects to the next host.
            If all hosts block the producer, the delay is doubled each time all other hosts were tried.
        return_to_first: if the first host answers for this number of seconds, a producer on another host returns to it
            (E15). The first host is probed four times in this period. If the connection to the first host is lost or
            blocked within this time, the next wait is twice as long. ``None`` to never return.
        liveness: if confirms are missing and the broker is silent for this number of seconds, the producer sends a
            probe (E15). If the broker is silent for another half of this time, the producer ends the connection and
            tries the next host first. A broker is not silent while it sends something or still reads a large message.
            ``None`` to use only heartbeats.
        on_refused: what happens to a message that the broker refuses because it has no room: ``"retry"`` or ``"fail"``.
        retry_for: seconds for which the producer sends a refused message again and again. Then the message is settled.
        delivery_timeout: maximum seconds from the admission of a message until it is settled; ``None`` for no limit.
        retry_delay: seconds before a refused message is sent again. Each further pause is twice as long.
        retry_delay_max: maximum pause in seconds before a refused message is sent again.
        outbox: path of a file that keeps admitted messages until they are settled, even if the process crashes;
            ``None`` for no outbox. Messages of an earlier producer are sent first. Only one producer at a time may use
            the file.
        outbox_max_bytes: maximum bytes of messages in the outbox.
        outbox_max_age: seconds after which a message that waits on disk is settled and not sent; ``None`` for no limit.
        outbox_full: what `send` does while the outbox has no room: ``"block"`` or ``"raise"``.
        outbox_synchronous: with ``"normal"``, messages in the outbox survive a crash or kill of the process. With
            ``"full"``, they also survive a crash of the machine, and each commit waits for the disk.
        outbox_keep_undelivered: whether to keep undelivered messages in the outbox, for example refused or too old
            ones. Their outcome is then ``stored``, with the reason. The next producer with this outbox sends them
            again, unless they are still too old. If the setting is off, undelivered messages are deleted.
        tracing: whether to create an OpenTelemetry span for each message, and to add the span's context to the
            message's headers. Metrics need no setting.
        name: name of the producer in flow events, in logs and in the broker's management.

    Raises:
        SettingsError: a value is not allowed.
    """

    url: str | Sequence[str] = _setting(
        _URL, _comma_list, "an amqp:// or amqps:// URL, or a non-empty sequence of them", lambda v: bool(_urls(v))
    )
    exchange: str = _setting("", *_NAME)
    routing_key: str = _setting("", *_NAME)
    capacity: int | Literal["auto"] = _setting(
        1000,
        _capacity,
        "a whole number of messages, at least 1, or 'auto'",
        lambda v: v == "auto" if isinstance(v, str) else _is_int(v) and v >= 1,
    )
    capacity_max: int = _setting(10_000, *_whole("messages"))
    capacity_bytes: int | None = _setting(None, *_whole("bytes", "None"))
    max_producer_flow_control_wait: float | None = _setting(60.0, *_number("seconds", "None (for ever)", or_0=True))
    when_flowed: WhenFlowed = _setting(WhenFlowed.BLOCK, *_member_of(WhenFlowed))
    confirms: bool = _setting(True, *_BOOL)
    mandatory: bool | None = _setting(
        None,
        _optional(_boolean),
        "None (as message_ids), True or False",
        lambda v: v is None or isinstance(v, bool),
    )
    message_ids: bool = _setting(True, *_BOOL)
    rate: float | None = _setting(None, *_number("messages per second", "None"))
    rate_burst: int | None = _setting(None, *_whole("messages", "None"))
    max_unwritten_bytes: int = _setting(1 << 20, *_whole("bytes"))
    max_failed_bytes: int = _setting(1 << 24, *_whole("bytes"))
    max_flow_events: int = _setting(10_000, *_whole("events"))
    flow_control_wait_notify_period: float = _setting(5.0, *_number("seconds"))
    connect_timeout: float = _setting(15.0, *_number("seconds"))
    connect_in_background: bool = _setting(False, *_BOOL)
    close_timeout: float | None = _setting(20.0, *_number("seconds", "None (for ever)", or_0=True))
    on_disconnect: OnDisconnect = _setting(OnDisconnect.REPUBLISH, *_member_of(OnDisconnect))
    reconnect_timeout: float | None = _setting(None, *_number("seconds", "None (for ever)", or_0=True))
    reconnect_delay: float = _setting(0.1, *_number("seconds"))
    reconnect_delay_max: float = _setting(5.0, *_number("seconds"))
    reconnect_jitter: float = _setting(0.5, *_number("a number", or_0=True))
    host_order: HostOrder = _setting(HostOrder.GIVEN, *_member_of(HostOrder))
    on_blocked: OnBlocked = _setting(OnBlocked.WAIT, *_member_of(OnBlocked))
    failover_delay: float = _setting(5.0, *_number("seconds"))
    return_to_first: float | None = _setting(None, *_number("seconds", "None (never)"))
    liveness: float | None = _setting(None, *_number("seconds", "None (never)"))
    on_refused: OnRefused = _setting(OnRefused.RETRY, *_member_of(OnRefused))
    retry_for: float = _setting(60.0, *_number("seconds", or_0=True))
    delivery_timeout: float | None = _setting(None, *_number("seconds", "None (for never)"))
    retry_delay: float = _setting(0.1, *_number("seconds"))
    retry_delay_max: float = _setting(5.0, *_number("seconds"))
    outbox: str | os.PathLike[str] | None = _setting(None, _optional(str), "None or the path of a file", _is_path)
    outbox_max_bytes: int = _setting(1 << 30, *_whole("bytes"))
    outbox_max_age: float | None = _setting(None, *_number("seconds", "None (for ever)"))
    outbox_full: OnOutboxFull = _setting(OnOutboxFull.BLOCK, *_member_of(OnOutboxFull))
    outbox_synchronous: OutboxSynchronous = _setting(OutboxSynchronous.NORMAL, *_member_of(OutboxSynchronous))
    outbox_keep_undelivered: bool = _setting(False, *_BOOL)
    tracing: bool = _setting(False, *_BOOL)
    name: str = _setting("producer", *_NAME)
    #: The absolute path of the outbox, computed when the settings are created; ``None`` without an outbox.
    outbox_path: str | None = field(init=False, repr=False, compare=False)
    # The names of the explicitly given settings, even if a value is the default.
    _given: frozenset[str] = field(init=False, repr=False, compare=False)

    if TYPE_CHECKING:
        # The members of enums may be given as text, as in the keywords of a producer.
        def __init__(self, *, url: str | Sequence[str] = ..., **settings: Unpack[SettingsKeywords]) -> None: ...

    def __new__(cls, **arguments: Any) -> ProducerSettings:
        """Record the explicitly given settings, because only these have precedence over the URL and the environment."""
        self = object.__new__(cls)
        object.__setattr__(self, "_given", frozenset(arguments))
        return self

    def __post_init__(self) -> None:
        check_setting("url", self.url)
        found = _query_settings(self.url)
        for name, setting in _SETTINGS.items():
            if name in self._given:
                check_setting(name, value := getattr(self, name))
            else:
                value = found.get(name, setting.default)
            if isinstance(setting.default, StrEnum):
                value = type(setting.default)(value)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "url", self.url if isinstance(self.url, str) else tuple(self.url))
        object.__setattr__(self, "outbox", None if self.outbox is None else os.fspath(self.outbox))
        # Compute the absolute path now, because the process may change its working directory. `outbox` stays unchanged.
        path = None if self.outbox is None else os.path.abspath(self.outbox)  # noqa: PTH100  # does not follow links
        object.__setattr__(self, "outbox_path", path)
        if self.capacity == "auto" and not self.confirms:
            raise SettingsError(
                "capacity='auto' with confirms=False: the window is computed from the latency of confirms, and there "
                "are none; give a number, or leave confirms on"
            )
        moves = "on_blocked='failover'" if self.on_blocked is OnBlocked.FAILOVER else ""
        moves = moves or (f"return_to_first={self.return_to_first!r}" if self.return_to_first is not None else "")
        if moves and self.reconnect_timeout == 0:
            raise SettingsError(
                f"{moves} with reconnect_timeout=0: a producer that never reconnects cannot move to another host; set "
                f"a longer reconnect_timeout, or leave {moves.partition('=')[0]} out"
            )
        if self.liveness is not None and not self.confirms:
            raise SettingsError(
                f"liveness={self.liveness!r} with confirms=False: without confirms a healthy broker may send nothing; "
                "leave liveness out, or leave confirms on"
            )
        if self.mandatory and not self.message_ids:
            raise SettingsError(
                "mandatory=True with message_ids=False: a returned message is recognized by its message id; leave "
                "mandatory out or set it to False, or leave message_ids on"
            )

        if self.when_flowed is WhenFlowed.SPILL and self.outbox is None:
            raise SettingsError(
                "when_flowed='spill' with outbox=None: there is no outbox to put messages into; set outbox"
            )
        if self.outbox is not None and not (self.confirms and self.message_ids):
            lacking = "message_ids" if self.confirms else "confirms"
            why = (
                "second copies are recognized by their ids"
                if self.confirms
                else "a message stays in it until it is confirmed"
            )
            raise SettingsError(f"outbox={self.outbox!r} with {lacking}=False: {why}; leave {lacking} on")

    def replace(self, **changes: Any) -> Self:
        """Return a copy with changed settings.

        In the copy, a setting counts as explicitly given if it is changed, or was explicitly given in the original.
        `dataclasses.replace` passes all settings. So in its copy, all settings count as explicitly given.

        Args:
            changes: name and new value of each changed setting.

        Raises:
            SettingsError: a value is not allowed.
            TypeError: a name is not a setting.
        """
        return type(self)(**({name: getattr(self, name) for name in self._given} | changes))

    # For `copy.replace` of Python 3.13.
    __replace__ = replace

    @property
    def is_mandatory(self) -> bool:
        """Whether the broker returns messages that no queue receives."""
        return self.message_ids if self.mandatory is None else self.mandatory

    @property
    def burst(self) -> int:
        """Number of messages that may be sent without a pause after an idle time, if there is a `rate`."""
        return self.rate_burst or max(1, int((self.rate or 0) * _CATCHES_UP))

    @property
    def keeps_undelivered(self) -> bool:
        """Whether undelivered messages stay in the outbox: there is one, and `outbox_keep_undelivered` is on."""
        return self.outbox is not None and self.outbox_keep_undelivered

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of the hosts, without query parameters that are settings."""
        return tuple(_split_url(url)[0] for url in _urls(self.url))

    def __repr__(self) -> str:
        others = "".join(
            f", {setting.name}={shown(value)}"
            for setting in _SETTINGS.values()
            if (value := getattr(self, setting.name)) != setting.default and setting.name != "url"
        )
        url = shown(self.url if isinstance(self.url, str) else list(self.url))
        return f"ProducerSettings(url={url}{others})"

    @classmethod
    def load(
        cls,
        url: str | Sequence[str] | None = None,
        settings: ProducerSettings | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        **keywords: Any,
    ) -> ProducerSettings:
        """Collect the settings from all sources. The order of the sources is in the docstring of the module.

        Args:
            url: value of the setting ``url``; ``None`` if it is not given.
            settings: a source of settings. Its explicitly given settings are used unless `keywords` contains them.
            environ: environment variables. The default is the environment of the process.
            keywords: name and value of each setting, except ``url``.

        Raises:
            SettingsError: a value is not allowed, or a name is not a setting.
            TypeError: `settings` is neither a `ProducerSettings` nor ``None``.
        """
        check_argument(
            "settings", settings, settings is None or isinstance(settings, cls), "a ProducerSettings or None"
        )
        known = _SETTINGS
        for name in keywords:
            if name not in known:
                near = get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise SettingsError(
                    f"{name}={shown_of_unknown(keywords[name])}: there is no such setting; the settings are "
                    f"{', '.join(known)}{hint}"
                )
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for name, setting in known.items():
            # Ignore an empty variable, because deployments often cannot remove a variable, and set it to "" instead.
            if text := environ.get(variable(name)):
                values[name] = _parse(variable(name), text, setting.metadata)
        explicit = {} if settings is None else {name: getattr(settings, name) for name in settings._given}
        url = url if url is not None else explicit.get("url", values.get("url", _URL))
        check_setting("url", url)
        _warn_of_misspelt(environ, url)
        # The query of the URL has precedence over the environment.
        query = _query_settings(url)
        values = {name: value for name, value in values.items() if name not in query}
        found = cls(**(values | explicit | keywords | {"url": url}))
        if settings is not None and "outbox" not in keywords and found.outbox == settings.outbox:
            object.__setattr__(found, "outbox_path", settings.outbox_path)
        return found


_SETTINGS = {setting.name: setting for setting in fields(ProducerSettings) if setting.metadata}
HARMLESS.update(_SETTINGS.keys() - {"url"})

# Variables and parameters that are not settings, and whose names were already checked.
_examined: set[str] = set()


def variable(name: str) -> str:
    """Return the name of the environment variable of a setting."""
    return _PREFIX + name.upper()


def _warn_of_misspelt(environ: Mapping[str, str], url: str | Sequence[str]) -> None:
    """Warn once about each variable, and each parameter of a URL, whose name is similar to a setting's.

    Other variables may belong to other programs. Other parameters may belong to the connecting library.
    """
    known = {variable(name) for name in _SETTINGS}
    names: dict[str, tuple[str, Callable[[str], str]]] = {
        f"the environment variable {name}": (name.upper().removeprefix(_PREFIX), variable)
        for name in environ
        if name.upper().startswith(_PREFIX) and name not in known
    }
    for each in _urls(url):
        for name, _ in parse_qsl(urlsplit(each).query):
            if name not in _SETTINGS and name not in HARMLESS:
                names[f"the URL's parameter {printable(name)}"] = (name, str)
    for what in names.keys() - _examined:
        name, written = names[what]
        _examined.add(what)
        near = get_close_matches(name.lower(), _SETTINGS, 1, _SIMILAR)
        if near:
            words = f"{what} is not a setting of qflow_client and is ignored; did you mean {written(near[0])}?"
            warnings.warn(words, stacklevel=4)


def check_setting(name: str, value: Any) -> None:
    """Raise a `SettingsError` if the value of a setting is not allowed."""
    metadata = _SETTINGS[name].metadata
    if not metadata["check"](value):
        raise _refused(name, value, metadata["allowed"])


def check_argument(name: str, value: object, is_allowed: bool, allowed: str) -> None:
    """Raise a `TypeError` if the value of an argument is not allowed. `check_setting` checks the value of a setting."""
    if not is_allowed:
        raise TypeError(f"{name}={shown(value)}: it must be {allowed}")


def check_timeout(timeout: object) -> None:
    """Raise an error if a timeout is neither a number nor ``None``. A negative timeout has already expired."""
    if timeout is None:
        return
    allowed = "None (for ever) or seconds"
    check_argument("timeout", timeout, isinstance(timeout, numbers.Real), allowed)
    if timeout != timeout:
        raise ValueError(f"timeout={timeout!r}: it must be {allowed}")


def _query_settings(url: str | Sequence[str]) -> dict[str, Any]:
    """Return the settings in the queries of URLs, each from the first URL that has it. Check all values."""
    values: dict[str, Any] = {}
    for each in reversed(_urls(url)):
        for name, text in _split_url(each)[1]:
            values[name] = _parse(f"the URL's {name}", text, _SETTINGS[name].metadata)
    return values


def _parse(place: str, text: str, metadata: Mapping[str, Any]) -> Any:
    # Raise the error outside the handler, so that it has no context. The text of the context would show the value.
    with suppress(ValueError):
        value = metadata["parse"](text)
        if metadata["check"](value):
            return value
    raise _refused(place, text, metadata["allowed"])


def _refused(name: str, value: Any, allowed: str) -> SettingsError:
    hint = ""
    if allowed is _SETTINGS["url"].metadata["allowed"]:
        if "#" in repr(value):
            hint = "; a # is written %23"
        elif isinstance(value, str) and (lacking := _lacking(value)):
            hint = lacking
        elif isinstance(value, str) and "@" in value and not is_clear(value):
            hint = "; the : before a password is not encoded; in a password, a / is written %2F, a ? %3F, and an @ %40"
    return SettingsError(f"{name}={shown(value)}: it must be {allowed}{hint}")


def _lacking(url: str) -> str:
    """Return an error text about the host or the virtual host of a URL; empty if there is no error."""
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme.lower() in ("amqp", "amqps") and not parts.hostname:
            return "; it names no host, such as amqp://localhost"
        if parts.path == "//":
            return "; the virtual host / is written /%2F, or left out"
    return ""


def _urls(value: Any) -> tuple[str, ...]:
    urls = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else ()
    return urls if all(isinstance(url, str) and _is_url(url) for url in urls) else ()


def _is_url(url: str) -> bool:
    try:
        # Read the port, because urlsplit checks it only on access. A # would begin a fragment, which has no meaning
        # here. So it is probably a part of a password. An @ in the path probably ends a password that contains a /.
        is_amqp = url.lower().startswith(("amqp://", "amqps://"))
        return is_amqp and urlsplit(url).port != 0 and "#" not in url and is_clear(url) and not _lacking(url)
    except ValueError:
        return False


def _split_url(url: str) -> tuple[str, list[tuple[str, str]]]:
    """Split a URL into the URL without the settings in its query, and these settings."""
    parts = urlsplit(url)
    names = _SETTINGS.keys() - {"url"}
    ours: list[tuple[str, str]] = []
    theirs: list[tuple[str, str]] = []
    for parameter in parse_qsl(parts.query, keep_blank_values=True):
        (ours if parameter[0] in names else theirs).append(parameter)
    return urlunsplit(parts._replace(query=urlencode(theirs))), ours
