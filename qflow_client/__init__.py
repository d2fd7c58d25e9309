"""AMQP 0-9-1 producers that obey the broker's flow control. No call hangs, and no message is lost silently."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qflow_client.credentials import Credentials
from qflow_client.errors import (
    ConfirmTimeout,
    ConnectionFailed,
    DeliveryError,
    FlowControlTimeout,
    MessageFailed,
    MessageNacked,
    MessageRejected,
    MessageReturned,
    MessageStored,
    NestedCall,
    OutcomeUnknown,
    ProducerClosed,
    ProducerFlowed,
    QflowError,
    SettingsError,
    UndeliveredMessages,
    WrongLoop,
)
from qflow_client.events import FlowEvent, FlowEventKind, FlowState, HoldKind
from qflow_client.flow import FlowManager
from qflow_client.manager import flow_manager
from qflow_client.message import DeliveryMode, Message, RoutedMessage
from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import (
    HostOrder,
    OnBlocked,
    OnDisconnect,
    OnOutboxFull,
    OnRefused,
    OutboxSynchronous,
    ProducerSettings,
    WhenFlowed,
)

if TYPE_CHECKING:
    from qflow_client.aio import AsyncProducer, AsyncReceipt, connect_async
    from qflow_client.dedup import DeduplicationError, Deduplicator, may_be_second_copy
    from qflow_client.flowlog import FlowLog
    from qflow_client.outbox import NotDurable, Outbox, OutboxError, OutboxFull, OutboxInUse, StoredMessage
    from qflow_client.position import Position
    from qflow_client.sync import Producer, SyncReceipt, connect
    from qflow_client.topology import Binding, Exchange, Queue, Topology

__version__ = "1.0.0rc1"

__all__ = [
    "AsyncProducer",
    "AsyncReceipt",
    "Binding",
    "ConfirmTimeout",
    "ConnectionFailed",
    "Credentials",
    "DeduplicationError",
    "Deduplicator",
    "DeliveryError",
    "DeliveryMode",
    "Exchange",
    "FlowControlTimeout",
    "FlowEvent",
    "FlowEventKind",
    "FlowLog",
    "FlowManager",
    "FlowState",
    "HoldKind",
    "HostOrder",
    "Message",
    "MessageFailed",
    "MessageNacked",
    "MessageRejected",
    "MessageReturned",
    "MessageStored",
    "NestedCall",
    "NotDurable",
    "OnBlocked",
    "OnDisconnect",
    "OnOutboxFull",
    "OnRefused",
    "Outbox",
    "OutboxError",
    "OutboxFull",
    "OutboxInUse",
    "OutboxSynchronous",
    "Outcome",
    "OutcomeUnknown",
    "Position",
    "Producer",
    "ProducerClosed",
    "ProducerFlowed",
    "ProducerSettings",
    "QflowError",
    "Queue",
    "Receipt",
    "RoutedMessage",
    "SettingsError",
    "StoredMessage",
    "SyncReceipt",
    "Topology",
    "UndeliveredMessages",
    "WhenFlowed",
    "WrongLoop",
    "connect",
    "connect_async",
    "flow_manager",
    "may_be_second_copy",
]

# These names are imported on first use, because some of their modules import pika or aio-pika.
_LATER = {
    "aio": ("AsyncProducer", "AsyncReceipt", "connect_async"),
    "dedup": ("DeduplicationError", "Deduplicator", "may_be_second_copy"),
    "flowlog": ("FlowLog",),
    "outbox": ("NotDurable", "Outbox", "OutboxError", "OutboxFull", "OutboxInUse", "StoredMessage"),
    "position": ("Position",),
    "sync": ("Producer", "SyncReceipt", "connect"),
    "topology": ("Binding", "Exchange", "Queue", "Topology"),
}


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
