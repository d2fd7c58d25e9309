"""An AMQP 0-9-1 broker to embed: minimal as a message broker, complete as a flow controller."""

from __future__ import annotations

from qflow_client.broker.broker import Broker
from qflow_client.broker.definitions import (
    BindingDefinition,
    DefinitionError,
    Definitions,
    ExchangeDefinition,
    QueueDefinition,
)
from qflow_client.broker.errors import AmqpError, ChannelException, ConnectionException, ReplyCode
from qflow_client.broker.policies import ApplyTo, Enforcement, Policy, PolicyDefinition, QueuePolicy
from qflow_client.broker.profiles import Profile
from qflow_client.broker.rates import RateLimit, RateScope
from qflow_client.broker.settings import BrokerSettings, FlowScope, Synchronous, Trace
from qflow_client.broker.snapshots import (
    BindingSnapshot,
    BrokerMessage,
    ChannelSnapshot,
    ConnectionSnapshot,
    ExchangeSnapshot,
    MemorySnapshot,
    QueueSnapshot,
    TargetSnapshot,
    ThresholdsSnapshot,
)
from qflow_client.broker.store import StoreError

__all__ = [
    "AmqpError",
    "ApplyTo",
    "BindingDefinition",
    "BindingSnapshot",
    "Broker",
    "BrokerMessage",
    "BrokerSettings",
    "ChannelException",
    "ChannelSnapshot",
    "ConnectionException",
    "ConnectionSnapshot",
    "DefinitionError",
    "Definitions",
    "Enforcement",
    "ExchangeDefinition",
    "ExchangeSnapshot",
    "FlowScope",
    "MemorySnapshot",
    "Policy",
    "PolicyDefinition",
    "Profile",
    "QueueDefinition",
    "QueuePolicy",
    "QueueSnapshot",
    "RateLimit",
    "RateScope",
    "ReplyCode",
    "StoreError",
    "Synchronous",
    "TargetSnapshot",
    "ThresholdsSnapshot",
    "Trace",
]
