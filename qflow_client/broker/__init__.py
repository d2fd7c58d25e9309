"""An AMQP 0-9-1 broker with complete flow control, to embed into programs and tests."""

from __future__ import annotations

from qflow_client.broker.broker import Broker
from qflow_client.broker.core.errors import AmqpError, ChannelException, ConnectionException, ReplyCode
from qflow_client.broker.core.passwords import hash_password
from qflow_client.broker.core.profiles import Profile
from qflow_client.broker.core.settings import Enforcement, FlowScope, Trace
from qflow_client.broker.core.snapshots import (
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
from qflow_client.broker.policies.definitions import (
    BindingDefinition,
    DefinitionError,
    Definitions,
    ExchangeDefinition,
    QueueDefinition,
)
from qflow_client.broker.policies.policy import ApplyTo, Policy, PolicyDefinition, QueuePolicy
from qflow_client.broker.policies.rates import RateLimit, RateScope
from qflow_client.broker.settings import BrokerSettings, Synchronous
from qflow_client.broker.store.errors import StoreError

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
    "hash_password",
]
