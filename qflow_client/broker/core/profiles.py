"""The brokers that this broker can imitate, as data (docs/dialects.md)."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from functools import cached_property
from importlib import import_module
from types import MappingProxyType
from typing import Any

import pamqp.base
from pamqp import commands

from qflow_client.broker.core.errors import ReplyCode

__all__ = ["DIALECTS", "PROTOCOL_HEADER", "Dialect", "OnAlarm", "Profile"]


class Profile(StrEnum):
    """The broker that this broker imitates."""

    #: No other broker is imitated.
    QFLOW = "qflow"
    #: LavinMQ: during an alarm, each publish and each declaration of a new queue closes the channel with 406.
    LAVINMQ = "lavinmq"
    #: WSO2 Message Broker: it announces no capabilities, it sends no confirms, and channel errors close the connection.
    WSO2 = "wso2"
    #: The standard without extensions.
    AMQP_0_9_1 = "amqp-0-9-1"
    #: A broker older than AMQP 0-9-1. The answer to an AMQP 0-9-1 client is the protocol header of AMQP 0-9.
    AMQP_0_9 = "amqp-0-9"


class OnAlarm(Enum):
    """How clients are informed of an alarm."""

    #: By ``Connection.Blocked``, if the client announced the capability. Other clients are not informed.
    BLOCKED = auto()
    #: By ``Channel.Flow`` on every channel that is a producer. The standard has no ``Connection.Blocked``.
    CHANNEL_FLOW = auto()
    #: By closing the channel with 406 at each publish, and at each declaration of a new queue.
    CHANNEL_CLOSE = auto()


PROTOCOL_HEADER = b"AMQP\0\0\x09\x01"
_HEADER_0_9 = b"AMQP\1\1\0\x09"
_HEADER_0_10 = b"AMQP\1\1\0\x0a"

# Methods that are not in the standard, by the name of the capability that announces them.
_METHODS: Mapping[str, tuple[type[pamqp.base.Frame], ...]] = {
    "publisher_confirms": (commands.Confirm.Select,),
    "basic.nack": (commands.Basic.Nack,),
    "exchange_exchange_bindings": (commands.Exchange.Bind, commands.Exchange.Unbind),
}
_EXTENSIONS = frozenset(
    (
        *_METHODS,
        "authentication_failure_close",
        "connection.blocked",
        "consumer_cancel_notify",
        "direct_reply_to",
        "per_consumer_qos",
    )
)


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The properties and the behaviour of an imitated broker.

    Attributes:
        properties: server properties in ``Connection.Start``, without the capabilities.
        extensions: names of the supported extensions of the standard, as in the capabilities table. ``None`` for no
            extensions and no capabilities table.
        headers: the accepted protocol headers.
        answer: the protocol header that the broker sends if the client's header is not accepted.
        on_alarm: how clients are informed of an alarm.
        alarm_text: reply text of a channel that is closed because of an alarm.
        channel_errors_close: reply code for closing the connection after an error that should close only the channel.
            ``None`` if the error closes only the channel.
        settings: defaults for the settings that the broker proposes to clients.
    """

    properties: Mapping[str, str]
    extensions: frozenset[str] | None = _EXTENSIONS
    headers: tuple[bytes, ...] = (PROTOCOL_HEADER,)
    answer: bytes = PROTOCOL_HEADER
    on_alarm: OnAlarm = OnAlarm.BLOCKED
    alarm_text: str = ""
    channel_errors_close: ReplyCode | None = None
    settings: Mapping[str, int] = field(default_factory=dict)

    def has(self, extension: str) -> bool:
        """Whether the broker supports an extension of the standard."""
        return self.extensions is not None and extension in self.extensions

    @cached_property
    def missing(self) -> frozenset[type[pamqp.base.Frame]]:
        """The methods of the extensions that the broker does not support."""
        return frozenset(method for name, methods in _METHODS.items() if not self.has(name) for method in methods)

    @property
    def server_properties(self) -> dict[str, Any]:
        """The server properties in ``Connection.Start``."""
        if self.extensions is None:
            return dict(self.properties)
        return {**self.properties, "capabilities": dict.fromkeys(sorted(self.extensions), True)}


_PLAYED = "played by the broker of qflow_client"

DIALECTS: Mapping[Profile, Dialect] = MappingProxyType(
    {
        Profile.QFLOW: Dialect(
            properties={
                "product": "qflow broker",
                # import-linter would count an import statement as a dependency of the broker on the whole package.
                "version": str(import_module("qflow_client").__version__),
                "platform": f"{platform.python_implementation()} {platform.python_version()}",
                "copyright": "Copyright the authors of qflow_client",
                "information": "an AMQP 0-9-1 broker for producer flow control; licensed under the Apache License 2.0",
            }
        ),
        Profile.LAVINMQ: Dialect(
            properties={"product": "LavinMQ", "information": _PLAYED},
            headers=(PROTOCOL_HEADER, _HEADER_0_9),
            on_alarm=OnAlarm.CHANNEL_CLOSE,
            alarm_text="Server low on disk space",
            settings={"channel_max": 2048, "frame_max": 131_072, "heartbeat": 300},
        ),
        Profile.WSO2: Dialect(
            properties={},
            extensions=None,
            headers=(PROTOCOL_HEADER, _HEADER_0_9),
            answer=_HEADER_0_10,
            on_alarm=OnAlarm.CHANNEL_FLOW,
            channel_errors_close=ReplyCode.ACCESS_REFUSED,
            settings={"channel_max": 256, "frame_max": 65_536, "heartbeat": 5},
        ),
        Profile.AMQP_0_9_1: Dialect(
            properties={"product": "AMQP 0-9-1 without extensions", "information": _PLAYED},
            extensions=frozenset(),
            on_alarm=OnAlarm.CHANNEL_FLOW,
            settings={"channel_max": 1, "frame_max": 4_096, "heartbeat": 0},
        ),
        Profile.AMQP_0_9: Dialect(
            properties={"product": "AMQP 0-9", "information": _PLAYED},
            extensions=None,
            headers=(_HEADER_0_9,),
            answer=_HEADER_0_9,
            on_alarm=OnAlarm.CHANNEL_FLOW,
        ),
    }
)
