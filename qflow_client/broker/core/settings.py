"""What can be set on a broker's core, checked when it is made.

`Settings` is all that the core needs. `qflow_client.broker.BrokerSettings` adds what the other rooms need: policies,
the store and HTTP.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Any, Self

from qflow_client.amqp.frames import FRAME_MIN_SIZE
from qflow_client.broker.core.passwords import check_hash, is_hash
from qflow_client.broker.core.profiles import DIALECTS, Dialect, OnAlarm, Profile
from qflow_client.flow import Capacity, StopResume
from qflow_client.flowlog import FlowLog
from qflow_client.redaction import shown

__all__ = ["DEFAULT_USERS", "Authenticate", "Enforcement", "FlowScope", "Settings", "Trace", "is_loopback"]

#: Called with the direction (``"in"`` or ``"out"``), the connection's name, the channel number and the method's name,
#: such as ``"Basic.Publish"``.
Trace = Callable[[str, str, int, str], object]
#: Called with a user and a password, returns for how many seconds they are valid.
Authenticate = Callable[[str, str], float]


class Enforcement(StrEnum):
    """How a queue that is ON holds its producers."""

    #: Qpid Java's way: ``Channel.Flow(active=False)`` (J3).
    CHANNEL_FLOW = "channel_flow"
    #: Qpid C++'s way: the confirm is delayed until the queue is OFF (C5).
    COMPLETION = "completion"
    #: Both: the channel is told, and confirms are delayed.
    BOTH = "both"

    @property
    def flows_channels(self) -> bool:
        """Whether publishing channels are flowed."""
        return self is not Enforcement.COMPLETION

    @property
    def delays_completion(self) -> bool:
        """Whether confirms are held back."""
        return self is not Enforcement.CHANNEL_FLOW


class FlowScope(StrEnum):
    """Which channels a queue that is ON flows."""

    #: Only channels that publish past the mark.
    OFFENDER = "offender"
    #: All channels that published to the queue recently (D12).
    PUBLISHERS = "publishers"


#: The users of a broker that is given none.
DEFAULT_USERS: Mapping[str, str] = MappingProxyType({"guest": "guest"})


#: The least that a limit of memory may be, in bytes.
MIN_MEMORY = 1 << 20


def is_loopback(host: str) -> bool:
    """Whether an address, or the name ``localhost``, is reached from this machine only."""
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
        port: the port to listen on; 0 for a free one.
        users: passwords by user name, or their hashes, see `hash_password`; not shown by its `repr`.
        authenticate: called with user and password at each login and ``Connection.UpdateSecret``, in the place of
            `users`, returns for how many seconds they are valid; then the connection is closed with 320. `math.inf` for
            no end, 0 to refuse them. It runs on the broker's thread, and must neither block nor raise.
        loopback_users: the users that may log in from this machine only; empty for none.
        max_failed_logins: failed logins that an address may have in quick succession; further logins from it are
            checked once a second; 0 for any number.
        ssl_context: a server-side context; ``None`` for plain TCP.
        virtual_host: the name of the one virtual host.
        profile: whose dialect it speaks; a profile has its own defaults for `heartbeat`, `frame_max` and `channel_max`.
        enforcement: how a queue holds its producers, unless its ``x-qflow-enforcement`` says otherwise (C5 J3).
        flow_scope: which channels a queue flows (D12).
        recent: seconds for which a channel that published to a queue counts as one of its publishers (D12).
        default_flow_stop_threshold: percent of a queue's maximum at which its flow state turns ON by default (C4).
        default_flow_resume_threshold: percent below which it turns OFF; both 0 for no default thresholds (C4).
        capacity: body bytes; the virtual host's default for ``x-qpid-capacity`` (J2); 0 for no maximum.
        flow_resume_capacity: body bytes; the default for ``x-qpid-flow-resume-capacity``; ``None`` takes the capacity.
        heartbeat: seconds, as proposed to clients; 0 proposes none.
        frame_max: bytes of the largest frame, as proposed to clients.
        channel_max: channels of a connection.
        max_connections: connections that may be open at once; more are refused with 530 as they open.
        max_unauthenticated: connections that may be there at once and are not open yet; with more the oldest is cut.
        max_queues: queues; more are refused with 406.
        max_bindings: bindings, but for those of the default exchange; more are refused with 406.
        max_consumers: consumers of all queues; more are refused with 406.
        max_message_size: body bytes; a larger message closes its channel with 406.
        unauthenticated_timeout: seconds that a connection may take to be opened.
        close_timeout: seconds that a peer may take to answer ``Connection.Close``.
        trace: called for every frame in and out, in the order of the wire, on the broker's thread; must not raise.
        max_producer_flow_control_wait: seconds that a publish waits for room in a queue whose policy is ``wait`` (A4).
        resume_interval: seconds between two of the channels that a queue unflows, oldest first (F4); 0 for none.
        backlog_count: messages of one connection that wait, are not confirmed, or came on flowed channels; with more
            all its channels are flowed (D7) until there are fewer than 7/8 of it; 0 for any number.
        backlog_size: body bytes; as `backlog_count`.
        flow_grace: seconds after ``Channel.Flow`` for which publishing on is not held against a client.
        tarpit_after: messages past that on one channel, of each so many the last stops the broker from reading the
            connection for a time (D8); 0 for never.
        tarpit_time: seconds for which.
        close_channel_after: messages past that on one channel, with more of which it is closed with 311; 0 for never.
        close_connection_after: messages past that on all channels of a connection, from its beginning, with more of
            which it is closed with 506; 0 for never.
        flow_log: where it writes which channels are held by which queue, and how deep queues are, every `period` of
            the log. The broker does not close it. ``None`` for nowhere.
        memory_limit: bytes of messages in memory, with about 512 more for each; above three quarters of it bodies are
            evicted from queues whose policy is ``flow_to_disk`` (A2), and above all of it clients get
            ``Connection.Blocked``, and those that publish are not read; 0 for any number.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value that is not allowed; the text names the setting, the value and what is allowed.
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
                raise TypeError(f"users must map user names to passwords, both str; one of user {shown(user)} is not")
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
        # Refuses a stop below its resume, with both values in the text.
        StopResume.from_limits(
            stop_percent=self.default_flow_stop_threshold, resume_percent=self.default_flow_resume_threshold
        )
        Capacity(self.capacity, self.flow_resume_capacity)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """The settings with these options, and with the defaults of the profile that is among them."""
        try:
            defaults = DIALECTS[Profile(options.get("profile", Profile.QFLOW))].settings
        except ValueError:
            # Refused below, with the profiles that there are.
            defaults = {}
        return cls(**{**defaults, **options})

    @property
    def dialect(self) -> Dialect:
        """What the profile stands for."""
        return DIALECTS[self.profile]

    @property
    def watches_publishes(self) -> bool:
        """Whether more is to be done about every publish than its queues ask for."""
        return self.has_discipline or self.dialect.on_alarm is OnAlarm.CHANNEL_CLOSE

    @property
    def has_discipline(self) -> bool:
        """Whether anything is done about connections that do not listen."""
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
        # Without a context: that of `Enum` repeats the value.
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
