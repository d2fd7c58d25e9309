"""Tools that the tests of the broker share."""

from __future__ import annotations

from collections import deque

from pamqp.commands import Basic

from qflow_client.broker.core.entries import StoredMessage
from qflow_client.broker.core.exchange import Target
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.wire import encode_header
from qflow_client.broker.policies.arguments import QueueArguments, read_options, resolve_limits
from qflow_client.broker.settings import BrokerSettings
from qflow_client.flow import FlowSource

TARGET = Target("", "q")
#: Properties of a message, each with a value except the timestamp and the cluster id.
PROPERTIES = Basic.Properties(
    content_type="text/plain",
    content_encoding="utf-8",
    headers={"k": [1, "two", {"three": None, "ä": "ä"}]},
    delivery_mode=2,
    priority=9,
    correlation_id="c",
    reply_to="r",
    expiration="1000",
    message_id="m",
    message_type="t",
    user_id="guest",
    app_id="a",
)


def message(size=1):
    return StoredMessage(TARGET, encode_header(size, None), b"x" * size)


def limits_of(arguments, **settings):
    """Return the limits that the arguments of a queue `q` have without policies."""
    found = QueueArguments.read("q", arguments)
    return resolve_limits("q", found.definition, BrokerSettings(**settings), overflow=found.overflow)


def make_queue(arguments=None, **settings):
    return Queue("q", limits_of(arguments or {}, **settings), Alone(), options=read_options("q", arguments or {}))


def run_all(work):
    """Do all steps of the work immediately."""
    deque(work, maxlen=0)


class Alone:
    """Replaces the virtual host for a queue that has none."""

    def __init__(self):
        self.now = 0.0
        self.alarms = []
        self.dead = []
        self.is_unused = False

    window = 1000

    def clock(self):
        return self.now

    def wake_at(self, queue, at):
        self.alarms.append(at)

    run = staticmethod(run_all)

    def died(self, queue, message, reason):
        self.dead.append((message.size, reason.value))

    def note_surplus(self, queue, on):
        pass

    def admit_waiting(self, queue, now):
        pass

    def unused(self, queue):
        self.is_unused = True


class Publisher(FlowSource):
    def __init__(self, name="publisher"):
        super().__init__(name)
        self.told = []

    def on_blocked(self):
        self.told.append(False)

    def on_unblocked(self):
        self.told.append(True)
