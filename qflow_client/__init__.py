"""AMQP 0-9-1 producers that obey the broker: they do not overrun it, hang for ever, or lose messages in silence."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qflow_client.errors import (
    ConfirmTimeout,
    ConnectionFailed,
    DeliveryError,
    FlowControlTimeout,
    MessageFailed,
    MessageNacked,
    MessageRejected,
    MessageReturned,
    OutcomeUnknown,
    ProducerClosed,
    ProducerFlowed,
    QflowError,
    SettingsError,
    UndeliveredMessages,
)
from qflow_client.events import FlowEvent, FlowEventKind, FlowState, HoldKind
from qflow_client.flow import FlowManager
from qflow_client.manager import flow_manager
from qflow_client.message import DeliveryMode, Message
from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import ProducerSettings, WhenFlowed

if TYPE_CHECKING:
    from qflow_client.sync import Producer, SyncReceipt

__version__ = "0.1.0.dev0"

__all__ = [
    "ConfirmTimeout",
    "ConnectionFailed",
    "DeliveryError",
    "DeliveryMode",
    "FlowControlTimeout",
    "FlowEvent",
    "FlowEventKind",
    "FlowManager",
    "FlowState",
    "HoldKind",
    "Message",
    "MessageFailed",
    "MessageNacked",
    "MessageRejected",
    "MessageReturned",
    "Outcome",
    "OutcomeUnknown",
    "Producer",
    "ProducerClosed",
    "ProducerFlowed",
    "ProducerSettings",
    "QflowError",
    "Receipt",
    "SettingsError",
    "SyncReceipt",
    "UndeliveredMessages",
    "WhenFlowed",
    "flow_manager",
]

# A skin brings its library with it, so it is imported when it is used.
_SKINS = {"Producer": "qflow_client.sync", "SyncReceipt": "qflow_client.sync"}


def __getattr__(name: str) -> Any:
    if name in _SKINS:
        value = globals()[name] = getattr(import_module(_SKINS[name]), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
