"""All settings of a broker: of the core, the policies, the store and the HTTP API."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TypedDict

from qflow_client.broker.core.profiles import Profile
from qflow_client.broker.core.settings import Authenticate, Enforcement, FlowScope, Settings, Trace, is_loopback
from qflow_client.broker.policies.policy import Policy, QueuePolicy
from qflow_client.flowlog import FlowLog
from qflow_client.redaction import shown

__all__ = ["BrokerOptions", "BrokerSettings", "Synchronous"]

#: Maximum body bytes of a message in a store. SQLite limits a row to 10**9 bytes, and the row also has the header.
MAX_STORED = 900_000_000


class Synchronous(StrEnum):
    """The failures that confirmed messages in the store survive."""

    #: Messages survive a crash or kill of the broker's process. A crash of the machine can lose messages.
    NORMAL = "normal"
    #: Messages survive a crash of the process or of the machine, because each commit waits for the disk.
    FULL = "full"


class BrokerOptions(TypedDict, total=False):
    """The keyword arguments of `Broker`. `BrokerSettings` and `Settings` document each setting."""

    host: str
    port: int
    users: Mapping[str, str]
    authenticate: Authenticate | None
    loopback_users: Iterable[str]
    max_failed_logins: int
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
    max_unauthenticated: int
    max_queues: int
    max_bindings: int
    max_consumers: int
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


@dataclass(frozen=True, kw_only=True)
class BrokerSettings(Settings):
    """All settings of a broker. `Settings` describes the inherited attributes.

    Attributes:
        http_host: address on which the HTTP API listens.
        http_port: port of the HTTP API; 0 for a free port; ``None`` for no HTTP API.
        http_token: token that HTTP clients have to send; ``None`` for no token. Without a token, the API must use a
            loopback address. The `repr` of the settings does not show the token.
        policies: policies that the broker has at the start (D3). The names of the policies must be different.
        store: file of the message store; ``None`` for no store. The file is created if it does not exist. With a store,
            durable queues, exchanges and bindings survive a restart of the broker. Persistent messages in durable
            queues survive too.
        store_synchronous: the failures that confirmed messages survive: ``"normal"`` or ``"full"``, see `Synchronous`.
        disk_free_limit: minimum free bytes on the disk of the store; 0 for no limit. If fewer bytes are free, the
            broker raises an alarm, as `Broker.block` does. The alarm ends when 9/8 of the limit is free.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is not allowed. The error has the setting, the allowed values, and the value, but no token.
    """

    http_host: str = "127.0.0.1"
    http_port: int | None = None
    http_token: str | None = field(default=None, repr=False)
    policies: tuple[Policy, ...] = ()
    store: Path | None = None
    store_synchronous: Synchronous = Synchronous.FULL
    disk_free_limit: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._choose("store_synchronous", Synchronous)
        if self.store is not None:
            if not isinstance(self.store, (str, os.PathLike)) or not os.fspath(self.store):
                raise TypeError(f"store must be the path of a file or None, not {shown(self.store)}")
            object.__setattr__(self, "store", Path(os.fspath(self.store)))
        if self.store is not None and self.max_message_size > MAX_STORED:
            raise ValueError(
                f"max_message_size must be at most {MAX_STORED} with a store, which holds no larger messages, not "
                f"{shown(self.max_message_size)}"
            )
        self._whole("disk_free_limit", 0, 2**63 - 1)
        if self.disk_free_limit and self.store is None:
            raise ValueError(
                f"disk_free_limit={shown(self.disk_free_limit)} limits the folder of the store: set store too"
            )
        self._check_http()
        object.__setattr__(self, "policies", tuple(self.policies))
        names = [policy.name if isinstance(policy, Policy) else None for policy in self.policies]
        if None in names:
            raise TypeError(f"policies must be Policy objects, not {shown(self.policies)}")
        if len(set(names)) < len(names):
            raise ValueError(f"policies must have different names, not {', '.join(map(str, names))}")
        if self.store is None:
            for policy in self.policies:
                if policy.definition.policy is QueuePolicy.FLOW_TO_DISK:
                    raise ValueError(f"policies: {policy.name!r} has policy=flow_to_disk: set store too")

    def _check_http(self) -> None:
        if not isinstance(self.http_host, str):
            raise TypeError(f"http_host must be a str, not {type(self.http_host).__name__}")
        if self.http_token is not None:
            if not isinstance(self.http_token, str):
                raise TypeError(f"http_token must be a str or None, not {type(self.http_token).__name__}")
            # The error must not contain the token, because the token is a secret.
            if not re.fullmatch(r"[!-~]{8,}", self.http_token):
                raise ValueError("http_token must be at least 8 visible ASCII characters without spaces")
        if self.http_port is None:
            return
        self._whole("http_port", 0, 65535)
        if self.http_token is None and not is_loopback(self.http_host):
            raise ValueError(
                f"http_host={shown(self.http_host)} is not a loopback address: set an http_token, which clients "
                "must send"
            )
        missing = [name for name in ("aiohttp", "pydantic") if find_spec(name) is None]
        if missing:
            raise ValueError(
                f"http_port={self.http_port}: HTTP needs {', '.join(missing)}: pip install 'qflow-client[broker]'"
            )
