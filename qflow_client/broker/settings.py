"""What can be set on a broker, checked when it is made."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import TypedDict

from qflow_client.flow import Capacity, StopResume
from qflow_client.frames import FRAME_MIN_SIZE

__all__ = ["BrokerOptions", "BrokerSettings", "Enforcement", "FlowScope", "Trace"]

#: Called with the direction (``"in"`` or ``"out"``), the connection's name, the channel number and the method's name,
#: such as ``"Basic.Publish"``.
Trace = Callable[[str, str, int, str], object]


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
        """Whether publishing channels are told to stop."""
        return self is not Enforcement.COMPLETION

    @property
    def delays_completion(self) -> bool:
        """Whether confirms are held back."""
        return self is not Enforcement.CHANNEL_FLOW


class FlowScope(StrEnum):
    """Whom a queue that is ON flows."""

    #: Only who publishes past the mark.
    OFFENDER = "offender"
    #: Everyone who published to the queue recently (D12).
    PUBLISHERS = "publishers"


class BrokerOptions(TypedDict, total=False):
    """The settings as keyword arguments; what each means is said at `BrokerSettings`."""

    host: str
    port: int
    users: Mapping[str, str]
    ssl_context: ssl.SSLContext | None
    virtual_host: str
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


def _default_users() -> Mapping[str, str]:
    return {"guest": "guest"}


@dataclass(frozen=True, kw_only=True)
class BrokerSettings:
    """The settings of a broker.

    Attributes:
        host: the address to listen on.
        port: the port to listen on; 0 for a free one.
        users: passwords by user name.
        ssl_context: a server-side context; ``None`` for plain TCP.
        virtual_host: the name of the one virtual host.
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
        max_message_size: body bytes; a larger message closes its channel with 406.
        unauthenticated_timeout: seconds that a connection may take to be opened.
        close_timeout: seconds that a peer may take to answer ``Connection.Close``.
        trace: called for every frame in and out, in the order of the wire, on the broker's thread; must not raise.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value that is not allowed; the text names the setting, the value and what is allowed.
    """

    host: str = "127.0.0.1"
    port: int = 0
    users: Mapping[str, str] = field(default_factory=_default_users)
    ssl_context: ssl.SSLContext | None = None
    virtual_host: str = "/"
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

    def __post_init__(self) -> None:
        self._choose("enforcement", Enforcement)
        self._choose("flow_scope", FlowScope)
        self._whole("port", 0, 65535)
        self._whole("heartbeat", 0, 65535)
        self._whole("frame_max", FRAME_MIN_SIZE, 2**31 - 1)
        self._whole("channel_max", 1, 65535)
        self._whole("max_connections", 1, 2**31 - 1)
        self._whole("max_message_size", 1, 2**63 - 1)
        for name in ("recent", "unauthenticated_timeout", "close_timeout"):
            self._seconds(name)
        for name in ("default_flow_stop_threshold", "default_flow_resume_threshold"):
            self._whole(name, 0, 100)
        self._whole("capacity", 0, 2**63 - 1)
        if self.flow_resume_capacity is not None:
            self._whole("flow_resume_capacity", 0, 2**63 - 1)
        if not isinstance(self.host, str):
            raise TypeError(f"host must be a str, not {type(self.host).__name__}")
        if not isinstance(self.virtual_host, str) or not self.virtual_host:
            raise ValueError(f"virtual_host must be a name, not {self.virtual_host!r}")
        if self.ssl_context is not None and not isinstance(self.ssl_context, ssl.SSLContext):
            raise TypeError(f"ssl_context must be an ssl.SSLContext or None, not {type(self.ssl_context).__name__}")
        if self.trace is not None and not callable(self.trace):
            raise TypeError(f"trace must be callable or None, not {type(self.trace).__name__}")
        if not isinstance(self.users, Mapping) or not self.users:
            raise ValueError("users must map at least one user name to its password")
        for user, password in self.users.items():
            if not isinstance(user, str) or not isinstance(password, str):
                raise TypeError(f"users must map user names to passwords, both str; one of user {user!r} is not")
        object.__setattr__(self, "users", MappingProxyType(dict(self.users)))
        # Refuses a stop below its resume, with both values in the text.
        StopResume.from_limits(
            stop_percent=self.default_flow_stop_threshold, resume_percent=self.default_flow_resume_threshold
        )
        Capacity(self.capacity, self.flow_resume_capacity)

    def _choose(self, name: str, kind: type[Enum]) -> None:
        value = getattr(self, name)
        try:
            object.__setattr__(self, name, kind(value))
        except ValueError:
            allowed = ", ".join(repr(member.value) for member in kind)
            raise ValueError(f"{name} must be one of {allowed}, not {value!r}") from None

    def _whole(self, name: str, lowest: int, highest: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, not {type(value).__name__}: {value!r}")
        if not lowest <= value <= highest:
            raise ValueError(f"{name} must be from {lowest} to {highest}, not {value!r}")

    def _seconds(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}: {value!r}")
        if not value > 0:
            raise ValueError(f"{name} must be more than 0 seconds, not {value!r}")
