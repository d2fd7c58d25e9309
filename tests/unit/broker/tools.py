"""What the tests of the queue share."""

from __future__ import annotations

from qflow_client.broker.arguments import QueueLimits
from qflow_client.broker.message import StoredMessage, Target
from qflow_client.broker.queue import Queue
from qflow_client.broker.settings import BrokerSettings
from qflow_client.broker.wire import encode_header
from qflow_client.flow import FlowSource

TARGET = Target("", "q")


def message(size=1):
    return StoredMessage(TARGET, encode_header(size, None), b"x" * size)


def make_queue(arguments=None, **settings):
    limits = QueueLimits.from_arguments("q", arguments or {}, BrokerSettings(**settings))
    return Queue("q", limits, clock=lambda: 0.0)


class Publisher(FlowSource):
    def __init__(self, name="publisher"):
        super().__init__(name)
        self.told = []

    def on_blocked(self):
        self.told.append(False)

    def on_unblocked(self):
        self.told.append(True)
