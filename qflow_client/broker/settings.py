"""What can be set on a broker, checked when it is made."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypedDict

from qflow_client.amqp.frames import FRAME_MIN_SIZE
from qflow_client.broker.policies import Enforcement, Policy, QueuePolicy
from qflow_client.broker.profiles import DIALECTS, Dialect, OnAlarm, Profile
from qflow_client.flow import Capacity, StopResume
from qflow_client.flowlog import FlowLog
from qflow_client.redaction import shown

__all__ = ["BrokerOptions", "BrokerSettings", "Enforcement", "FlowScope", "Synchronous", "Trace", "is_loopback"]

#: Called with the direction (``"in"`` or ``"out"``), the connection's name, the channel number and the method's name,
#: such as ``"Basic.Publish"``.
Trace = Callable[[str, str, int, str], object]


class FlowScope(StrEnum):
    """Whom a queue that is ON flows."""

    #: Only who publishes past the mark.
    OFFENDER = "offender"
    #: Everyone who published to the queue recently (D12).
    PUBLISHERS = "publishers"


class Synchronous(StrEnum):
    """What a message on disk survives."""

    #: The death of the process, however it comes.
    NORMAL = "normal"
    #: That of the machine, too; each commit waits for the disk.
    FULL = "full"


class BrokerOptions(TypedDict, total=False):
    """The settings as keyword arguments; what each means is said at `BrokerSettings`."""

    host: str
    port: int
    users: Mapping[str, str]
    ssl_context: ssl.SSLContext | None
    virtual_host: str
    profile: Profile | str
    enforcement: Enforcement | str
    flow_scope: FlowScope | str
    recent: float
    default_flow_stop_threshold: int
    default_flow_resume_threshold: int
    capacity: int
    flow_resume_capacity: int | None
    heartbeat: int
    frame_max: int
    channel_max: int
    max_connections: int
    max_message_size: int
    unauthenticated_timeout: float
    close_timeout: float
    trace: Trace | None
    http_host: str
    http_port: int | None
    http_token: str | None
    policies: Iterable[Policy]
    max_producer_flow_control_wait: float
    resume_interval: float
    backlog_count: int
    backlog_size: int
    flow_grace: float
    tarpit_after: int
    tarpit_time: float
    close_channel_after: int
    close_connection_after: int
    flow_log: FlowLog | None
    store: str | os.PathLike[str] | None
    store_synchronous: Synchronous | str
    memory_limit: int
    disk_free_limit: int


#: The users of a broker that is not told any.
DEFAULT_USERS: Mapping[str, str] = MappingProxyType({"guest": "guest"})


#: The least that a limit of memory may be, in bytes.
MIN_MEMORY = 1 << 20

#: The most body bytes of a message that a store takes, so that its header has room in the 10**9 bytes of a row.
MAX_STORED = 900_000_000


def is_loopback(host: str) -> bool:
    """Whether an address, or the name ``localhost``, is reached from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class BrokerSettings:
    """The settings of a broker.

    Attributes:
        host: the address to listen on.
        port: the port to listen on; 0 for a free one.
        users: passwords by user name; not shown by its `repr`.
        ssl_context: a server-side context; ``None`` for plain TCP.
        virtual_host: the name of the one virtual host.
        profile: whose dialect it speaks; a profile has its own defaults for `heartbeat`, `frame_max` and `channel_max`.
        enforcement: how a queue holds its producers, unless its ``x-qflow-enforcement`` says otherwise (C5 J3).
        flow_scope: whom a queue flows (D12).
        recent: seconds for which who published to a queue counts as one of its publishers (D12).
        default_flow_stop_threshold: percent of a queue's maximum at which its flow state turns ON by default (C4).
        default_flow_resume_threshold: percent below which it turns OFF; both 0 for no default thresholds (C4).
        capacity: body bytes; the virtual host's default for ``x-qpid-capacity`` (J2); 0 for no maximum.
        flow_resume_capacity: body bytes; the default for ``x-qpid-flow-resume-capacity``; ``None`` takes the capacity.
        heartbeat: seconds, as proposed to clients; 0 proposes none.
        frame_max: bytes of the largest frame, as proposed to clients.
        channel_max: channels of a connection.
        max_connections: connections at once; more are closed as soon as they are accepted.
        max_message_size: body bytes; a larger message closes its channel with 406; with a store at most 900,000,000.
        unauthenticated_timeout: seconds that a connection may take to be opened.
        close_timeout: seconds that a peer may take to answer ``Connection.Close``.
        trace: called for every frame in and out, in the order of the wire, on the broker's thread; must not raise.
        http_host: the address on which the HTTP API listens.
        http_port: its port; 0 for a free one; ``None`` for no HTTP API, and then nothing of it is imported.
        http_token: what its clients have to show; ``None`` for nothing, which only a loopback address may have;
            not shown by its `repr`.
        policies: to begin with (D3); no two of the same name.
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
        flow_log: where it writes who is held by which queue, and how deep queues are, every `period` of the log;
            whoever made it closes it. ``None`` for nowhere.
        store: the file of the message store, made if there is none: durable queues, exchanges and bindings, and
            persistent messages in such queues survive the broker; ``None`` keeps everything in memory.
        store_synchronous: what a confirmed message survives: ``"full"`` also the death of the machine, ``"normal"``
            that of the process.
        memory_limit: bytes of messages in memory, with about 512 more for each; above three quarters of it bodies are
            evicted from queues whose policy is ``flow_to_disk`` (A2), and above all of it clients get
            ``Connection.Blocked``; 0 for any number.
        disk_free_limit: bytes that have to be free in the folder of the store; with less, clients get
            ``Connection.Blocked`` until there is an eighth more; 0 for any number.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value that is not allowed; the text names the setting, the value and what is allowed.
    """

    host: str = "127.0.0.1"
    port: int = 0
    users: Mapping[str, str] = field(default_factory=lambda: DEFAULT_USERS, repr=False)
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
    max_message_size: int = 128 * 1024 * 1024
    unauthenticated_timeout: float = 10.0
    close_timeout: float = 5.0
    trace: Trace | None = None
    http_host: str = "127.0.0.1"
    http_port: int | None = None
    http_token: str | None = field(default=None, repr=False)
    policies: tuple[Policy, ...] = ()
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
    store: Path | None = None
    store_synchronous: Synchronous = Synchronous.FULL
    memory_limit: int = 0
    disk_free_limit: int = 0

    def __post_init__(self) -> None:
        self._choose("profile", Profile)
        self._choose("enforcement", Enforcement)
        self._choose("flow_scope", FlowScope)
        self._choose("store_synchronous", Synchronous)
        if self.store is not None:
            if not isinstance(self.store, (str, os.PathLike)) or not os.fspath(self.store):
                raise TypeError(f"store must be the path of a file or None, not {shown(self.store)}")
            object.__setattr__(self, "store", Path(os.fspath(self.store)))
        self._whole("port", 0, 65535)
        self._whole("heartbeat", 0, 65535)
        self._whole("frame_max", FRAME_MIN_SIZE, 2**31 - 1)
        self._whole("channel_max", 1, 65535)
        self._whole("max_connections", 1, 2**31 - 1)
        self._whole("max_message_size", 1, 2**63 - 1)
        if self.store is not None and self.max_message_size > MAX_STORED:
            raise ValueError(
                f"max_message_size must be at most {MAX_STORED} with a store, which takes no more in one piece, not "
                f"{shown(self.max_message_size)}"
            )
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
        self._whole("disk_free_limit", 0, 2**63 - 1)
        if self.disk_free_limit and self.store is None:
            raise ValueError(
                f"disk_free_limit={shown(self.disk_free_limit)} is about the folder of the store: set a store too"
            )
        if self.flow_resume_capacity is not None:
            self._whole("flow_resume_capacity", 0, 2**63 - 1)
        if not isinstance(self.host, str):
            raise TypeError(f"host must be a str, not {type(self.host).__name__}")
        self._check_http()
        if not isinstance(self.virtual_host, str) or not self.virtual_host:
            raise ValueError(f"virtual_host must be a name, not {shown(self.virtual_host)}")
        if self.ssl_context is not None and not isinstance(self.ssl_context, ssl.SSLContext):
            raise TypeError(f"ssl_context must be an ssl.SSLContext or None, not {type(self.ssl_context).__name__}")
        if self.trace is not None and not callable(self.trace):
            raise TypeError(f"trace must be callable or None, not {type(self.trace).__name__}")
        if self.flow_log is not None and not isinstance(self.flow_log, FlowLog):
            raise TypeError(f"flow_log must be a FlowLog or None, not {type(self.flow_log).__name__}")
        if not isinstance(self.users, Mapping) or not self.users:
            raise ValueError("users must map at least one user name to its password")
        for user, password in self.users.items():
            if not isinstance(user, str) or not isinstance(password, str):
                raise TypeError(f"users must map user names to passwords, both str; one of user {shown(user)} is not")
        object.__setattr__(self, "policies", tuple(self.policies))
        names = [policy.name if isinstance(policy, Policy) else None for policy in self.policies]
        if None in names:
            raise TypeError(f"policies must be Policy objects, not {shown(self.policies)}")
        if len(set(names)) < len(names):
            raise ValueError(f"policies must have different names, not {', '.join(map(str, names))}")
        if self.store is None:
            for policy in self.policies:
                if policy.definition.policy is QueuePolicy.FLOW_TO_DISK:
                    raise ValueError(f"policies: {policy.name!r} has policy=flow_to_disk: set a store too")
        object.__setattr__(self, "users", MappingProxyType(dict(self.users)))
        # Refuses a stop below its resume, with both values in the text.
        StopResume.from_limits(
            stop_percent=self.default_flow_stop_threshold, resume_percent=self.default_flow_resume_threshold
        )
        Capacity(self.capacity, self.flow_resume_capacity)

    def _check_http(self) -> None:
        if not isinstance(self.http_host, str):
            raise TypeError(f"http_host must be a str, not {type(self.http_host).__name__}")
        if self.http_token is not None:
            if not isinstance(self.http_token, str):
                raise TypeError(f"http_token must be a str or None, not {type(self.http_token).__name__}")
            # The value is a secret: it is not repeated.
            if not re.fullmatch(r"[!-~]{8,}", self.http_token):
                raise ValueError("http_token must be at least 8 visible ASCII characters without spaces")
        if self.http_port is None:
            return
        self._whole("http_port", 0, 65535)
        if self.http_token is None and not is_loopback(self.http_host):
            raise ValueError(
                f"http_host={shown(self.http_host)} is not a loopback address: set an http_token, which clients "
                "have to show"
            )
        missing = [name for name in ("aiohttp", "prometheus_client", "pydantic") if find_spec(name) is None]
        if missing:
            raise ValueError(
                f"http_port={self.http_port}: HTTP needs {', '.join(missing)}: pip install 'qflow-client[broker]'"
            )

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
