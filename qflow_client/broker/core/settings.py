"""The settings of a broker's core. The values are checked when a `Settings` object is created.

`qflow_client.broker.BrokerSettings` adds the settings of policies, the store and HTTP. Some settings of the core have
an effect only with the plug-ins that `qflow_client.broker.Broker` adds to `qflow_client.broker.core.Broker`. These are
`memory_limit`, `flow_log`, `flow_grace`, `close_channel_after`, `close_connection_after`,
`max_producer_flow_control_wait`, and all settings that begin with ``backlog_``, ``tarpit_`` or ``default_flow_``.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any, Self

from qflow_client.amqp.frames import FRAME_MIN_SIZE
from qflow_client.broker.core.passwords import check_hash, is_hash
from qflow_client.broker.core.profiles import DIALECTS, Dialect, OnAlarm, Profile
from qflow_client.flow import Capacity
from qflow_client.flow.thresholds import check_order
from qflow_client.flowlog import FlowLog
from qflow_client.redaction import shown

__all__ = ["DEFAULT_USERS", "Authenticate", "Enforcement", "FlowScope", "Settings", "Trace", "is_loopback"]

#: Called with the direction (``"in"`` or ``"out"``), the connection's name, the channel number and the name of the
#: method, such as ``"Basic.Publish"``.
Trace = Callable[[str, str, int, str], object]
#: Called with a user and a password; returns the seconds for which the login is valid, or 0 to refuse it.
Authenticate = Callable[[str, str], float]


class Enforcement(StrEnum):
    """How a queue that is ON holds back its producers."""

    #: As in Qpid Java: ``Channel.Flow(active=False)`` (J3).
    CHANNEL_FLOW = "channel_flow"
    #: As in Qpid C++: the confirm is delayed until the queue is OFF, or until the message leaves the queue (C5).
    COMPLETION = "completion"
    #: Both: the channel gets ``Channel.Flow``, and confirms are delayed.
    BOTH = "both"

    @property
    def flows_channels(self) -> bool:
        """Whether a queue that is ON blocks (flows) publishing channels."""
        return self is not Enforcement.COMPLETION

    @property
    def delays_completion(self) -> bool:
        """Whether a queue that is ON delays confirms."""
        return self is not Enforcement.CHANNEL_FLOW


class FlowScope(StrEnum):
    """Which channels a queue blocks (flows) while it is ON."""

    #: Only channels that publish while the queue is ON. With a capacity (J1), only those that publish above it.
    OFFENDER = "offender"
    #: All channels that have published to the queue recently (D12).
    PUBLISHERS = "publishers"


#: The users of a broker without the setting `users`.
DEFAULT_USERS: Mapping[str, str] = MappingProxyType({"guest": "guest"})


#: Minimum of a memory limit, in bytes.
MIN_MEMORY = 1 << 20


def is_loopback(host: str) -> bool:
    """Whether a host is the name ``localhost``, or an address that only this machine can reach."""
    if host.lower() == "localhost":
        return True
    try:
        ip = ipaddress.ip_address(host)
        mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
        return (mapped or ip).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a broker's core.

    Attributes:
        host: the address to listen on.
        port: the port to listen on; 0 for a free port.
        users: for each user name, the password or its hash, see `hash_password`. The `repr` does not show `users`.
        authenticate: called with user and password at each login and ``Connection.UpdateSecret``, instead of using
            `users`. Returns the seconds for which the login is valid: `math.inf` for no limit, 0 to refuse it. After
            this time the connection is closed with 320. Runs on the broker's thread, and must neither block nor raise.
        loopback_users: users that may log in only from this machine; empty for none.
        max_failed_logins: maximum number of failed logins of an address in quick succession; 0 for no limit. If there
            are more, logins from this address are checked only about once a second.
        ssl_context: a server-side context; ``None`` for plain TCP.
        virtual_host: the name of the only virtual host.
        profile: the broker to imitate. A profile can change the defaults of `heartbeat`, `frame_max` and `channel_max`.
            In profiles other than ``qflow``, alarms use ``Channel.Flow`` or ``Channel.Close`` instead of
            ``Connection.Blocked``.
        enforcement: how a queue holds back its producers (C5 J3). ``x-qflow-enforcement`` overrides this setting.
        flow_scope: which channels a queue blocks (D12).
        recent: seconds for which a channel counts as a publisher of a queue after each of its messages (D12).
        default_flow_stop_threshold: default stop threshold (C4), in percent of a queue's maximum. Above it, the queue
            turns ON.
        default_flow_resume_threshold: default resume threshold (C4), in percent. Below it, the queue turns OFF. If both
            defaults are 0, there are no default thresholds.
        capacity: default of ``x-qpid-capacity``, in body bytes (J1); 0 for no capacity.
        flow_resume_capacity: default of ``x-qpid-flow-resume-capacity``, in body bytes (J2); ``None`` means `capacity`.
        heartbeat: interval in seconds that is proposed to clients; 0 for no heartbeats.
        frame_max: maximum frame size in bytes that is proposed to clients.
        channel_max: maximum number of channels of a connection.
        max_connections: maximum number of open connections. A further ``Connection.Open`` is refused with 530.
        max_unauthenticated: maximum number of connections that are not open yet. A further one closes the oldest.
        max_queues: maximum number of queues. A declaration of another queue is refused with 406.
        max_bindings: maximum number of bindings, without the default exchange's. Another binding is refused with 406.
        max_consumers: maximum number of consumers of all queues together. Another consumer is refused with 406.
        max_message_size: maximum body bytes of a message; a larger message closes its channel with 406.
        unauthenticated_timeout: maximum seconds for opening a connection.
        close_timeout: maximum seconds for the answer to ``Connection.Close``, and for the client to close the socket.
        trace: called on the broker's thread for every received and every sent frame, in order; must not raise.
        max_producer_flow_control_wait: maximum seconds that a message waits for room (policy ``wait``, A4).
        resume_interval: seconds between two channels that a queue unblocks (F4); 0 unblocks all channels together.
        backlog_count: maximum number of messages in the backlog of one connection (D7); 0 for no limit. The backlog has
            messages that wait for room, have held confirms, or came on a channel blocked by more than the backlog.
            Above the maximum, the publishing channels are blocked (flowed) until fewer than 7/8 of the maximum remain.
        backlog_size: maximum body bytes in the backlog of one connection, see `backlog_count`; 0 for no limit.
        flow_grace: grace time: seconds after ``Channel.Flow`` in which further messages have no consequences.
        tarpit_after: each time a blocked (flowed) channel has sent this number of messages after the grace time, the
            broker does not read its connection for `tarpit_time` seconds (D8); 0 for no tarpits.
        tarpit_time: seconds for which the broker does not read from a connection in a tarpit (D8).
        close_channel_after: maximum number of messages that a blocked (flowed) channel may send after the grace time; 0
            for no limit. If there are more, the channel is closed with 311.
        close_connection_after: maximum total of the messages that blocked (flowed) channels of one connection may send
            after the grace time; 0 for no limit. If there are more, the connection is closed with 506.
        flow_log: log of blocked (flowed) channels, held confirms and flow states. Queue depths are added once in each
            `period` of the log. The broker does not close the log. ``None`` for no log.
        memory_limit: maximum bytes of messages in memory; 0 for no limit. Each message uses about 512 bytes more than
            its body and header. Above 3/4 of this limit, bodies are evicted from queues with the policy
            ``flow_to_disk`` (A2). Above the limit, the broker raises an alarm, and reads nothing from publishers.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is not allowed; the text contains the setting, the value and the allowed values.
    """

    host: str = "127.0.0.1"
    port: int = 0
    users: Mapping[str, str] = field(default_factory=lambda: DEFAULT_USERS, repr=False)
    authenticate: Authenticate | None = None
    loopback_users: frozenset[str] = frozenset({"guest"})
    max_failed_logins: int = 10
    ssl_context: ssl.SSLContext | None = None
    virtual_host: str = "/"
    profile: Profile = Profile.QFLOW
    enforcement: Enforcement = Enforcement.BOTH
    flow_scope: FlowScope = FlowScope.OFFENDER
    recent: float = 10.0
    default_flow_stop_threshold: int = 80
    default_flow_resume_threshold: int = 70
    capacity: int = 0
    flow_resume_capacity: int | None = None
    heartbeat: int = 60
    frame_max: int = 131072
    channel_max: int = 2047
    max_connections: int = 10_000
    max_unauthenticated: int = 1000
    max_queues: int = 50_000
    max_bindings: int = 200_000
    max_consumers: int = 100_000
    max_message_size: int = 128 * 1024 * 1024
    unauthenticated_timeout: float = 10.0
    close_timeout: float = 5.0
    trace: Trace | None = None
    max_producer_flow_control_wait: float = 60.0
    resume_interval: float = 0.0
    backlog_count: int = 0
    backlog_size: int = 0
    flow_grace: float = 5.0
    tarpit_after: int = 0
    tarpit_time: float = 1.0
    close_channel_after: int = 0
    close_connection_after: int = 0
    flow_log: FlowLog | None = None
    memory_limit: int = 0

    def __post_init__(self) -> None:
        self._choose("profile", Profile)
        self._choose("enforcement", Enforcement)
        self._choose("flow_scope", FlowScope)
        self._whole("port", 0, 65535)
        self._whole("heartbeat", 0, 65535)
        self._whole("frame_max", FRAME_MIN_SIZE, 2**31 - 1)
        self._whole("channel_max", 1, 65535)
        for name in ("max_connections", "max_unauthenticated", "max_queues", "max_bindings", "max_consumers"):
            self._whole(name, 1, 2**31 - 1)
        self._whole("max_failed_logins", 0, 2**31 - 1)
        self._whole("max_message_size", 1, 2**63 - 1)
        for name in (
            "recent",
            "unauthenticated_timeout",
            "close_timeout",
            "max_producer_flow_control_wait",
            "tarpit_time",
        ):
            self._seconds(name)
        for name in ("flow_grace", "resume_interval"):
            if getattr(self, name) != 0:
                self._seconds(name)
        for name in ("backlog_count", "backlog_size", "tarpit_after", "close_channel_after", "close_connection_after"):
            self._whole(name, 0, 2**63 - 1)
        for name in ("default_flow_stop_threshold", "default_flow_resume_threshold"):
            self._whole(name, 0, 100)
        self._whole("capacity", 0, 2**63 - 1)
        self._whole("memory_limit", 0, 2**63 - 1)
        if 0 < self.memory_limit < MIN_MEMORY:
            raise ValueError(f"memory_limit must be 0 or at least {MIN_MEMORY} bytes, not {shown(self.memory_limit)}")
        if self.flow_resume_capacity is not None:
            self._whole("flow_resume_capacity", 0, 2**63 - 1)
        if not isinstance(self.host, str):
            raise TypeError(f"host must be a str, not {type(self.host).__name__}")
        if not isinstance(self.virtual_host, str) or not self.virtual_host:
            raise ValueError(f"virtual_host must be a name, not {shown(self.virtual_host)}")
        if self.ssl_context is not None and not isinstance(self.ssl_context, ssl.SSLContext):
            raise TypeError(f"ssl_context must be an ssl.SSLContext or None, not {type(self.ssl_context).__name__}")
        for name in ("trace", "authenticate"):
            if (function := getattr(self, name)) is not None and not callable(function):
                raise TypeError(f"{name} must be callable or None, not {type(function).__name__}")
        if self.flow_log is not None and not isinstance(self.flow_log, FlowLog):
            raise TypeError(f"flow_log must be a FlowLog or None, not {type(self.flow_log).__name__}")
        if not isinstance(self.users, Mapping) or not self.users:
            raise ValueError("users must map at least one user name to its password")
        for user, password in self.users.items():
            if not isinstance(user, str) or not isinstance(password, str):
                raise TypeError(
                    f"users must map user names to passwords, both str; user {shown(user)} or its password is not"
                )
            if is_hash(password):
                try:
                    check_hash(password)
                except ValueError as error:
                    raise ValueError(f"users: the password of user {shown(user)}: {error}") from None
            if not password:
                raise ValueError(f"users: the password of user {shown(user)} is blank; set one")
        names = self.loopback_users
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"loopback_users must be names of users, not {shown(names)}")
        object.__setattr__(self, "loopback_users", frozenset(names))
        object.__setattr__(self, "users", MappingProxyType(dict(self.users)))
        check_order(
            "default_flow_stop_threshold",
            self.default_flow_stop_threshold,
            "default_flow_resume_threshold",
            self.default_flow_resume_threshold,
        )
        Capacity(self.capacity, self.flow_resume_capacity)

    def __reduce__(self) -> tuple[Any, ...]:
        # A `mappingproxy` can be neither pickled nor copied.
        given = {each.name: getattr(self, each.name) for each in fields(self)} | {"users": dict(self.users)}
        return partial(type(self), **given), ()

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Return the settings with these options, and with the defaults of their profile."""
        try:
            defaults = DIALECTS[Profile(options.get("profile", Profile.QFLOW))].settings
        except ValueError:
            # The constructor refuses an unknown profile, with a list of the profiles.
            defaults = {}
        return cls(**{**defaults, **options})

    @property
    def dialect(self) -> Dialect:
        """The properties and the behaviour of the imitated broker."""
        return DIALECTS[self.profile]

    @property
    def watches_publishes(self) -> bool:
        """Whether channels check every message: for a backlog limit, a sanction, or an alarm that closes channels."""
        return self.has_discipline or self.dialect.on_alarm is OnAlarm.CHANNEL_CLOSE

    @property
    def has_discipline(self) -> bool:
        """Whether there is a backlog limit, or a sanction for clients that ignore ``Channel.Flow``."""
        return any(
            (
                self.backlog_count,
                self.backlog_size,
                self.tarpit_after,
                self.close_channel_after,
                self.close_connection_after,
            )
        )

    def _choose(self, name: str, kind: type[Enum]) -> None:
        value = getattr(self, name)
        with suppress(ValueError):
            object.__setattr__(self, name, kind(value))
            return
        # The error of `Enum` is not chained, because it repeats the value, which can contain a password.
        allowed = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"{name} must be one of {allowed}, not {shown(value)}")

    def _whole(self, name: str, lowest: int, highest: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, not {type(value).__name__}: {shown(value)}")
        if not lowest <= value <= highest:
            raise ValueError(f"{name} must be from {lowest} to {highest}, not {shown(value)}")

    def _seconds(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}: {shown(value)}")
        if not value > 0:
            raise ValueError(f"{name} must be more than 0 seconds, not {shown(value)}")
