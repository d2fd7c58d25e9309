"""An AMQP 0-9-1 broker to embed: minimal as a message broker, complete as a flow controller."""

from __future__ import annotations

from qflow_client.broker.broker import Broker
from qflow_client.broker.errors import AmqpError, ChannelException, ConnectionException, ReplyCode
from qflow_client.broker.settings import BrokerSettings, Enforcement, FlowScope, Trace
from qflow_client.broker.snapshots import BrokerMessage, ChannelSnapshot, ConnectionSnapshot, QueueSnapshot

__all__ = [
    "AmqpError",
    "Broker",
    "BrokerMessage",
    "BrokerSettings",
    "ChannelException",
    "ChannelSnapshot",
    "ConnectionException",
    "ConnectionSnapshot",
    "Enforcement",
    "FlowScope",
    "QueueSnapshot",
    "ReplyCode",
    "Trace",
]
