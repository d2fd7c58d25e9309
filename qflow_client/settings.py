"""A producer's settings: their names, their allowed values, and the places where a value may come from.

The order of precedence: a keyword argument, a `ProducerSettings`, a query parameter of the URL, an environment variable
(``QFLOW_`` and the name in capitals), the default.
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
from typing import Any, Literal, Self, TypedDict
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from qflow_client.errors import SettingsError
from qflow_client.redaction import HARMLESS, hide_password, is_clear, is_url, shown, shown_of_unknown

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


# A comma that separates two URLs.
_BETWEEN_URLS = re.compile(r"\s*,\s*(?=[A-Za-z][A-Za-z0-9+.-]*://)")

# The prefix of environment variables that are settings.
_PREFIX = "QFLOW_"
# How similar a variable's name must be to that of a setting to be reported as misspelt, from 0 to 1.
_SIMILAR = 0.8

# Seconds of lateness that a sender with a rate may catch up.
_CATCHES_UP = 0.05

_URL = "amqp://guest:guest@localhost:5672/%2F"


class WhenFlowed(StrEnum):
    """What `send` does while the producer is flowed (D1)."""

    #: Wait, at most for `max_producer_flow_control_wait`.
    BLOCK = "block"
    #: Raise `ProducerFlowed` immediately.
    RAISE = "raise"
    #: Put the message into the outbox, to be sent later.
    SPILL = "spill"


class OnDisconnect(StrEnum):
    """What happens to unsettled messages when the connection is lost and restored."""

    #: They are sent again, in order and before new messages. Messages that may have arrived have the header
    #: ``x-qflow-republished``.
    REPUBLISH = "republish"
    #: They are settled: *unknown* if they were written, otherwise *failed*.
    FAIL = "fail"


class HostOrder(StrEnum):
    """The order in which a producer tries its hosts, if `url` names several (E15)."""

    #: The order of `url`.
    GIVEN = "given"
    #: A random order for each producer, so that many producers are spread over the hosts.
    SHUFFLED = "shuffled"


class OnBlocked(StrEnum):
    """What a producer with several hosts does while the broker blocks its connection (E15)."""

    #: It waits.
    WAIT = "wait"
    #: After `failover_delay` it connects to the next host, and sends the unsettled messages there.
    FAILOVER = "failover"


class OnRefused(StrEnum):
    """What happens to a message for which the broker has no room now."""

    #: It is sent again after a pause, for at most `retry_for`.
    RETRY = "retry"
    #: It is settled as *nacked* or *rejected*.
    FAIL = "fail"


class OnOutboxFull(StrEnum):
    """What `send` does while the outbox has no room for the message."""

    #: Wait, at most for `max_producer_flow_control_wait`, as while the producer is flowed.
    BLOCK = "block"
    #: Raise `OutboxFull` immediately.
    RAISE = "raise"


class OutboxSynchronous(StrEnum):
    """What the outbox survives."""

    #: The death of the process, whatever its cause.
    NORMAL = "normal"
    #: Also the death of the machine; every commit waits for the disk.
    FULL = "full"


def _seconds(text: str) -> float | None:
    return None if text.lower() in ("none", "forever", "") else float(text)


def _capacity(text: str) -> int | str:
    return "auto" if text.lower() == "auto" else int(text)


def _comma_list(text: str) -> str | tuple[str, ...]:
    urls = _BETWEEN_URLS.split(text)
    for url in urls:
        # A URL's password and query may contain commas. Any other comma separates list elements, and the element after
        # it is not a URL.
        parts = urlsplit(url)
        if "," in parts.netloc.rpartition("@")[2] + parts.path:
            raise ValueError("a comma that no URL follows")
    return urls[0] if len(urls) == 1 else tuple(urls)


def _optional_path(text: str) -> str | None:
    return None if text.lower() in ("none", "") else text


def _optional_int(text: str) -> int | None:
    return None if text.lower() in ("none", "") else int(text)


def _boolean(text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    try:
        return known[text.lower()]
    except KeyError:
        raise ValueError("use true or false") from None


def _optional_boolean(text: str) -> bool | None:
    return None if text.lower() in ("none", "") else _boolean(text)


def _setting(default: Any, parse: Callable[[str], Any], allowed: str, check: Callable[[Any], bool]) -> Any:
    return field(default=default, metadata={"parse": parse, "allowed": allowed, "check": check})


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_path(value: Any) -> bool:
    try:
        return value is None or (bool(os.fspath(value)) and not is_url(value))
    except TypeError:
        return False


def _is_name(value: Any) -> bool:
    try:
        return isinstance(value, str) and len(value.encode()) <= 255
    except UnicodeEncodeError:
        return False


# How a text is parsed, what is allowed in words, and whether a value is.
_Rule = tuple[Callable[[str], Any], str, Callable[[Any], bool]]


def _whole(unit: str, none: str = "") -> _Rule:
    """A whole number from 1 on, or ``None`` if there are words for it."""

    def is_allowed(value: Any) -> bool:
        return (value is None and none != "") or (_is_int(value) and value >= 1)

    allowed = f"a whole number of {unit}, at least 1"
    return (_optional_int, f"{none} or {allowed}", is_allowed) if none else (int, allowed, is_allowed)


def _number(unit: str, none: str = "", *, or_0: bool = False) -> _Rule:
    """A number above 0, or from 0 on, or ``None`` if there are words for it."""

    def is_allowed(value: Any) -> bool:
        return (value is None and none != "") or (_is_number(value) and (value > 0 or (or_0 and value == 0)))

    allowed = f"{unit}, {'at least' if or_0 else 'more than'} 0"
    return (_seconds, f"{none} or {allowed}", is_allowed) if none else (float, allowed, is_allowed)


def _member_of(kind: type[StrEnum]) -> _Rule:
    *others, last = (f"'{member}'" for member in kind)
    return str, f"{', '.join(others)} or {last}", lambda v: isinstance(v, str) and v in list(kind)


_BOOL: _Rule = (_boolean, "True or False", lambda v: isinstance(v, bool))
_NAME: _Rule = (str, "a str of at most 255 bytes", _is_name)


class SettingsKeywords(TypedDict, total=False):
    """The settings of `ProducerSettings` except ``url``, as keywords of a producer; for type checkers and editors."""

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
        url: ``amqp://`` or ``amqps://`` URL of the broker, or several, which are tried in turn. Query parameters that
            are not settings are passed to pika (``heartbeat``, ``socket_timeout``, ``ssl_options``, …).
        exchange: the default exchange of `send`; ``""`` is the broker's default exchange.
        routing_key: the default routing key of `send`.
        capacity: the limit of unsettled messages (C6). With ``"auto"`` the producer finds the smallest window that
            keeps its throughput, from the latency of the confirms.
        capacity_max: the upper limit of ``"auto"`` (C6); without effect on a number.
        capacity_bytes: the most body bytes of unsettled messages. A larger message is admitted alone. ``None`` for no
            limit.
        max_producer_flow_control_wait: seconds that a `send` may stay blocked; ``None`` for no limit, 0 to raise
            immediately (A4).
        when_flowed: what `send` does while the producer is flowed: ``"block"``, ``"raise"`` or ``"spill"`` (D1). To
            spill means to put the message into the `outbox`, from which it is sent later, in order.
        confirms: ask the broker for publisher confirms. Without confirms, a receipt has the outcome ``sent`` when the
            message is written.
        mandatory: let the broker return messages that no queue takes, so that they are not silently lost. Returned
            messages are recognised by their message ids, so ``None`` means the value of `message_ids`. `is_mandatory`
            is the resulting value.
        message_ids: assign a message id to every message without one.
        rate: the most messages per second, on average; ``None`` for no limit (F2 F6).
        rate_burst: how many messages may pass without a pause after an idle time. ``None`` allows as many as the rate
            gives in 50 ms, so that a sender that wakes up late catches up.
        max_unwritten_bytes: the most bytes that may be admitted and not yet written. Above it the producer is held by
            ``transport``.
        max_failed_bytes: the most bytes of failed receipts that are kept for `flush` and `close`, because the
            application has not looked at them. Each uses the size of its body and 512 bytes. Above the limit the oldest
            are dropped, and `UndeliveredMessages.dropped` has their number. Messages that fail together are all kept,
            and so are failures after `close` was called.
        max_flow_events: the most flow events that wait for one slow reader of ``flow_events()``, or for one slow
            ``on_flow`` callback. Above it the oldest are dropped, and a warning gives their number.
        flow_control_wait_notify_period: seconds between two notices that calls of `send` still wait.
        connect_timeout: seconds that connecting to one host may take, including TLS, authentication and opening the
            channel.
        connect_in_background: make the producer without waiting for the broker (E12). It is ``disconnected`` at first,
            and tries all hosts repeatedly, as after a lost connection. With an outbox and ``when_flowed="spill"`` it
            accepts messages immediately.
        close_timeout: the default timeout of `close`, and of the end of a ``with`` block, in seconds. It is limited by
            `max_producer_flow_control_wait` (E12). ``None`` for that limit only.
        on_disconnect: ``"republish"`` or ``"fail"``: what happens to unsettled messages when the connection is lost and
            restored.
        reconnect_timeout: seconds after a loss during which the producer tries to reconnect before it ends; ``None``
            for no limit, 0 to end when its first connection is lost.
        reconnect_delay: seconds before the first try to reconnect. Each further pause, after all hosts were tried, is
            twice as long.
        reconnect_delay_max: the longest pause in seconds. If a connection stays open for less than this time, the
            pauses continue to grow, and no message is suspected as the cause of the loss.
        reconnect_jitter: the largest random extension of a pause, as a part of it; 0 for none. So the clients of a
            broker do not all reconnect at the same time. It applies to the pauses after refusals, too.
        host_order: ``"given"`` or ``"shuffled"``: the order in which the hosts are tried, if `url` names several (E15).
        on_blocked: ``"wait"`` or ``"failover"``: what happens while the broker blocks the connection
            (``Connection.Blocked``), if `url` names several hosts (E15).
        failover_delay: seconds that a connection may stay blocked before the producer connects to the next host. If
            that host blocks, too, each further round over the hosts takes twice as long.
        return_to_first: seconds for which the first host has to answer before a producer that is connected to another
            host returns to it (E15). The first host is probed four times in this period. If it then loses the producer
            within this time, the next wait is twice as long. ``None`` for no return.
        liveness: seconds that the broker may send nothing while it owes confirms (E15). After that the producer sends a
            probe. If nothing comes for another half of this time, it ends the connection and tries the next host first.
            ``None`` to rely on heartbeats.
        on_refused: ``"retry"`` or ``"fail"``: what happens to a message that the broker refuses because it has no room.
        retry_for: seconds after its first refusal during which such a message is sent again; after that it is settled.
        delivery_timeout: seconds after its admission when a message is settled if it is still unsettled. It is not sent
            any more then. ``None`` for never.
        retry_delay: seconds before the first probe; each further pause is twice as long.
        retry_delay_max: the longest pause in seconds.
        outbox: path of a file in which admitted messages are kept until they are settled, so that the death of the
            process loses none; ``None`` for no outbox. Messages of an earlier producer are sent first. Only one
            producer at a time may use it.
        outbox_max_bytes: the most bytes of messages in the outbox.
        outbox_max_age: seconds after which a message that waits on disk is settled instead of sent; ``None`` for no
            limit.
        outbox_full: ``"block"`` or ``"raise"``: what `send` does while the outbox has no room.
        outbox_synchronous: what the messages in the outbox survive. ``"normal"``: the death of the process, whatever
            its cause. ``"full"``: also the death of the machine; every commit waits for the disk.
        outbox_keep_undelivered: keep a message in the outbox if the broker refuses it, or if it is too old. Its receipt
            has the outcome ``stored`` and the reason. The next producer on that outbox sends it again, unless it is
            still too old. Without this setting its receipt has the failure, and the message is deleted from the outbox.
        tracing: make an OpenTelemetry span of every message, and put its context into the message's headers. Metrics
            need no setting.
        name: the name in flow events, in logs and in the broker's management.

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
        _optional_boolean,
        "None (as message_ids), True or False",
        lambda v: v is None or isinstance(v, bool),
    )
    message_ids: bool = _setting(True, *_BOOL)
    rate: float | None = _setting(None, *_number("messages per second", "None"))
    rate_burst: int | None = _setting(
        None, int, "a whole number of messages, at least 1", lambda v: v is None or (_is_int(v) and v >= 1)
    )
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
    outbox: str | os.PathLike[str] | None = _setting(None, _optional_path, "None or the path of a file", _is_path)
    outbox_max_bytes: int = _setting(1 << 30, *_whole("bytes"))
    outbox_max_age: float | None = _setting(None, *_number("seconds", "None (for ever)"))
    outbox_full: OnOutboxFull = _setting(OnOutboxFull.BLOCK, *_member_of(OnOutboxFull))
    outbox_synchronous: OutboxSynchronous = _setting(OutboxSynchronous.NORMAL, *_member_of(OutboxSynchronous))
    outbox_keep_undelivered: bool = _setting(False, *_BOOL)
    tracing: bool = _setting(False, *_BOOL)
    name: str = _setting("producer", *_NAME)
    #: The absolute path of the outbox, resolved when the settings are made; ``None`` without an outbox.
    outbox_path: str | None = field(init=False, repr=False, compare=False)
    # The names of the settings that were given explicitly, whatever their values.
    _given: frozenset[str] = field(init=False, repr=False, compare=False)

    def __new__(cls, **arguments: Any) -> ProducerSettings:
        """Record which settings are given explicitly. Only those take precedence over the URL and the environment."""
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
        # Resolved once, here, because the process may change its working directory. `outbox` stays as it was given.
        path = None if self.outbox is None else os.path.abspath(self.outbox)  # noqa: PTH100  # keeps links
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
        """Return a copy with some settings changed.

        Only settings that were given, here or before, are explicit in the copy.

        `dataclasses.replace` passes every setting, so all are explicit in its copy.

        Args:
            changes: settings by name.

        Raises:
            SettingsError: a value is not allowed.
            TypeError: a name is not a setting.
        """
        return type(self)(**({name: getattr(self, name) for name in self._given} | changes))

    # For `copy.replace` of Python 3.13.
    __replace__ = replace

    @property
    def is_mandatory(self) -> bool:
        """Whether the broker has to return messages that no queue takes."""
        return self.message_ids if self.mandatory is None else self.mandatory

    @property
    def burst(self) -> int:
        """How many messages may pass without a pause after an idle time, if there is a `rate`."""
        return self.rate_burst or max(1, int((self.rate or 0) * _CATCHES_UP))

    @property
    def keeps_undelivered(self) -> bool:
        """Whether there is an outbox that keeps messages that are not delivered."""
        return self.outbox is not None and self.outbox_keep_undelivered

    @property
    def urls(self) -> tuple[str, ...]:
        """The hosts to try, each as a URL without the query parameters that are settings."""
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
        """Collect the settings from all places, each from the first place that has it.

        Args:
            url: the URL, as in the setting; ``None`` if not given.
            settings: settings for all that the keywords do not give.
            environ: the environment; by default that of the process.
            keywords: settings by name.

        Raises:
            SettingsError: a value is not allowed, or a name is not a setting.
            TypeError: `settings` is of another type.
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
        _warn_of_misspelt(environ)
        values: dict[str, Any] = {}
        for name, setting in known.items():
            # An empty variable is treated as not set, because deployments clear variables that way.
            if text := environ.get(variable(name)):
                values[name] = _parse(variable(name), text, setting.metadata)
        explicit = {} if settings is None else {name: getattr(settings, name) for name in settings._given}
        url = url if url is not None else explicit.get("url", values.get("url", _URL))
        check_setting("url", url)
        # The query of the URL has precedence over the environment.
        query = _query_settings(url)
        values = {name: value for name, value in values.items() if name not in query}
        found = cls(**(values | explicit | keywords | {"url": url}))
        if settings is not None and "outbox" not in keywords and found.outbox == settings.outbox:
            object.__setattr__(found, "outbox_path", settings.outbox_path)
        return found


_SETTINGS = {setting.name: setting for setting in fields(ProducerSettings) if setting.metadata}
HARMLESS.update(_SETTINGS.keys() - {"url"})

# Variables that are not settings and were checked for a misspelt name.
_examined: set[str] = set()


def variable(name: str) -> str:
    """Return the name of the environment variable of a setting."""
    return _PREFIX + name.upper()


def _warn_of_misspelt(environ: Mapping[str, str]) -> None:
    """Warn once of each variable whose name is similar to a setting. Other programs may use ``QFLOW_``, too."""
    known = {variable(name) for name in _SETTINGS}
    for name in environ:
        if name.upper().startswith(_PREFIX) and name not in known and name not in _examined:
            _examined.add(name)
            near = get_close_matches(name.upper().removeprefix(_PREFIX), map(str.upper, _SETTINGS), 1, _SIMILAR)
            if near:
                warnings.warn(
                    f"the environment variable {name} is not a setting of qflow_client and is ignored; did you mean "
                    f"{variable(near[0])}?",
                    stacklevel=4,
                )


def check_setting(name: str, value: Any) -> None:
    """Reject a value that a setting cannot have.

    Raises:
        SettingsError: the text contains the setting, the value and the allowed values.
    """
    metadata = _SETTINGS[name].metadata
    if not metadata["check"](value):
        raise _refused(name, value, metadata["allowed"])


def check_argument(name: str, value: object, is_allowed: bool, allowed: str) -> None:
    """Reject an argument that is not a setting.

    Raises:
        TypeError: the text contains the argument, the value and the allowed values.
    """
    if not is_allowed:
        raise TypeError(f"{name}={shown(value)}: it must be {allowed}")


def check_timeout(timeout: object) -> None:
    """Reject a timeout that is not a number. A negative timeout has already expired.

    Raises:
        TypeError: it has another type than a number, and is not ``None``.
        ValueError: it is NaN.
    """
    if timeout is None:
        return
    allowed = "None (for ever) or seconds"
    check_argument("timeout", timeout, isinstance(timeout, numbers.Real), allowed)
    if timeout != timeout:
        raise ValueError(f"timeout={timeout!r}: it must be {allowed}")


def _query_settings(url: str | Sequence[str]) -> dict[str, Any]:
    """Return the settings in the queries of the URLs, each from the first URL that has it. All of them are checked."""
    values: dict[str, Any] = {}
    for each in reversed(_urls(url)):
        for name, text in _split_url(each)[1]:
            values[name] = _parse(f"the URL's {name}", text, _SETTINGS[name].metadata)
    return values


def _parse(place: str, text: str, metadata: Mapping[str, Any]) -> Any:
    # The error must have no context, because the texts of `int` and `urlsplit` repeat the value.
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
    """Return what is wrong with the host or the virtual host of a URL; empty if they are valid."""
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
        # The port is read because it is parsed only then. A # begins a fragment, which has no meaning here and is
        # usually a part of the password. An @ in the path is usually the end of a password that contains a /.
        is_amqp = url.lower().startswith(("amqp://", "amqps://"))
        return is_amqp and urlsplit(url).port != 0 and "#" not in url and is_clear(url) and not _lacking(url)
    except ValueError:
        return False


def _split_url(url: str) -> tuple[str, list[tuple[str, str]]]:
    """Return a URL without the query parameters that are settings, and these parameters."""
    parts = urlsplit(url)
    names = _SETTINGS.keys() - {"url"}
    ours: list[tuple[str, str]] = []
    theirs: list[tuple[str, str]] = []
    for parameter in parse_qsl(parts.query, keep_blank_values=True):
        (ours if parameter[0] in names else theirs).append(parameter)
    return urlunsplit(parts._replace(query=urlencode(theirs))), ours
