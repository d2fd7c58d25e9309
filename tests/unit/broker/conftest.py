from __future__ import annotations

from typing import Any

import pytest
from pamqp import body, commands, frame, header

from qflow_client.amqp.frames import FrameSplitter
from qflow_client.broker.core.controls import Controls
from qflow_client.broker.core.session import PROTOCOL_HEADER, Session, State
from qflow_client.broker.core.virtualhost import VirtualHost
from qflow_client.broker.policies.discipline import Discipline
from qflow_client.broker.policies.rates import Rates
from qflow_client.broker.policies.rules import PolicyRules
from qflow_client.broker.settings import BrokerSettings

CAPABILITIES = {
    "publisher_confirms": True,
    "consumer_cancel_notify": True,
    "connection.blocked": True,
    "authentication_failure_close": True,
}


class Client:
    """A client of the broker without a socket, which sends and receives single frames."""

    def __init__(self, world, name):
        self.world = world
        self.announced = 0
        discipline = Discipline if world.settings.has_discipline else None
        self.session = Session(name, world.host, world.controls, world.now, self._on_output, discipline)
        self.unparsed = []

    def _on_output(self):
        self.announced += 1

    def feed(self, data):
        self.session.receive_data(data, self.world.now)

    def send(self, channel, *frames):
        self.feed(b"".join(frame.marshal(each, channel) for each in frames))

    def raw_output(self):
        data = self.session.take_output(self.world.now)
        self.session.output.taken()
        return data

    def received(self):
        """Return all frames that came since the last call, as (channel, frame)."""
        data = self.raw_output()
        return [
            (channel, frame.unmarshal(data[start - 7 : stop + 1])[2])
            for _, channel, start, stop in FrameSplitter().feed(data)
        ]

    def names(self):
        return [each.name for _, each in self.received()]

    def only(self, kind, channel=1):
        """Return the only frame that came. The frame must be of the given kind."""
        ((number, received),) = self.received()
        assert isinstance(received, kind), (received.name, dict(received))
        assert number == channel
        return received

    def check_close(self, kind, code, *texts):
        """Check the only frame that came. It must close channel 1 or the connection with this code and these texts."""
        close = self.only(kind, 1 if kind is commands.Channel.Close else 0)
        assert close.reply_code == code, close.reply_text
        for text in texts:
            assert text in close.reply_text

    def call(self, channel, method, reply):
        self.send(channel, method)
        return self.only(reply, channel)

    def start(self, *, user="guest", password="guest", mechanism="PLAIN", capabilities=CAPABILITIES):
        self.feed(PROTOCOL_HEADER)
        self.only(commands.Connection.Start, 0)
        properties: dict[str, Any] = {"capabilities": dict(capabilities)}
        self.send(0, commands.Connection.StartOk(properties, mechanism, f"\0{user}\0{password}", "en_US"))

    def open(self, *, channel_max=0, frame_max=0, heartbeat=0, virtual_host="/", capabilities=CAPABILITIES):
        self.start(capabilities=capabilities)
        self.only(commands.Connection.Tune, 0)
        self.send(0, commands.Connection.TuneOk(channel_max, frame_max, heartbeat))
        self.send(0, commands.Connection.Open(virtual_host))
        assert self.session.state is State.RUNNING
        return self

    def channel(self, number=1, *, confirms=False):
        self.call(number, commands.Channel.Open(), commands.Channel.OpenOk)
        if confirms:
            self.call(number, commands.Confirm.Select(), commands.Confirm.SelectOk)
        return self

    def declare(self, queue="q", *, channel=1, **options):
        return self.call(channel, commands.Queue.Declare(queue=queue, **options), commands.Queue.DeclareOk)

    def tick(self, at):
        """Set the time, and run the timer of the session."""
        self.world.now = at
        self.session.tick(at)

    def with_queue(self, queue="q", *, channel=1, **options):
        """Declare a queue on an open channel, and return the client."""
        self.declare(queue, channel=channel, **options)
        return self

    def publish(
        self, content=b"x", routing_key="q", *, exchange="", channel=1, properties=None, mandatory=False, times=1
    ):
        for _ in range(times):
            self.send(
                channel,
                commands.Basic.Publish(exchange=exchange, routing_key=routing_key, mandatory=mandatory),
                header.ContentHeader(body_size=len(content), properties=properties),
            )
            if content:
                self.send(channel, body.ContentBody(content))

    def publish_each(self, *contents):
        """Publish one message to `q` for each of the bodies."""
        for content in contents:
            self.publish(content)

    def bind_to_fanout(self, *queues):
        for queue in queues:
            self.call(1, commands.Queue.Bind(queue=queue, exchange="amq.fanout"), commands.Queue.BindOk)

    def consume(self, queue="q", *, channel=1, tag="c", **options):
        self.send(channel, commands.Basic.Consume(queue=queue, consumer_tag=tag, **options))

    def with_consumer(self, queue="q", *, channel=1, tag="c", **options):
        """Start a consumer on an open channel, and return the client. Nothing may be delivered to the consumer yet."""
        self.consume(queue, channel=channel, tag=tag, **options)
        self.only(commands.Basic.ConsumeOk, channel)
        return self

    def close_of(self, kind):
        """Return the last frame that came. The frame must be of the given kind: a close of a channel or connection."""
        _, received = self.received()[-1]
        assert isinstance(received, kind), received.name
        return received

    def deliveries(self):
        """Return (delivery tag, body, redelivered) of each delivery. No other frames may have come."""
        return self._deliveries([each for _, each in self.received()])

    def deliveries_after_ok(self):
        """Return the same as `deliveries`. Answers may also have come."""
        received = [each for _, each in self.received()]
        return self._deliveries([each for each in received if not getattr(each, "name", "").endswith("Ok")])

    @staticmethod
    def _deliveries(received):
        found = []
        while received:
            method = received.pop(0)
            assert isinstance(method, commands.Basic.Deliver), method.name
            size, content = received.pop(0).body_size, b""
            while len(content) < size:
                content += received.pop(0).value
            found.append((method.delivery_tag, content, method.redelivered))
        return found


class Disk:
    """A disk in memory, which a journal writes to and reads from."""

    def __init__(self, journal):
        self.journal = journal
        self.bodies: dict[int, bytes | None] = {}
        # Number of bodies in each read.
        self.reads: list[int] = []

    def write(self):
        """Write everything that the journal has noted."""
        batches = []
        while self.journal.is_dirty:
            batch = self.journal.take()
            self.bodies |= {put.number: put.body for put in batch.puts}
            for number in batch.removals:
                del self.bodies[number]
            self.journal.written_down()
            batches.append(batch)
        return batches

    def read(self):
        """Read the bodies that the journal wants."""
        while self.journal.wants:
            numbers = self.journal.take_wanted()
            self.reads.append(len(numbers))
            self.journal.came({number: self.bodies[number] for number in numbers})

    def check(self, queues):
        """Check that the counts of the journal are right, and that everything is written."""
        journal = self.journal
        messages = {entry.message for queue in queues for entry in queue.contents.oldest_first()}
        records = {message.record for message in messages}
        assert {record.number for record in records if record.number} == set(self.bodies)
        assert journal.memory == sum(
            journal.OVERHEAD
            + max(0, len(message.header) - journal.SMALL_HEADER)
            + (message.size if message.body is not None else 0)
            + journal.ENTRY * (message.record.holders - 1)
            for message in messages
        )
        assert (journal.evicting, journal.backlog, journal.backlog_size, journal.unfinished) == (0, 0, 0, 0)
        for message in messages:
            assert message.body is None or len(message.body) == message.size
        for queue in queues:
            if queue.pager is not None:
                # If a message is in several queues, another queue may have evicted its body, or read it.
                assert len(queue.pager) <= queue.depth
                assert 0 <= queue.pager.size <= queue.size


class World:
    """A virtual host, its clock and its clients."""

    def __init__(self, *, journal=None, **options):
        self.now = 0.0
        # Wall-clock time at which `now` is 0, in seconds since 1970.
        self.epoch = 0.0
        self.settings = BrokerSettings.of(options)
        has_store = journal is not None and journal.has_store
        self.rules = PolicyRules(self.settings, self.settings.policies, has_store=has_store)
        self.host = VirtualHost(self.settings, lambda: self.now, self.wall_clock, journal, self.rules)
        self.rates = self.host.meter = Rates(self.host.timers.wake_at)
        self.controls = Controls(watches_publishes=self.settings.watches_publishes)
        self.clients = 0

    def wall_clock(self):
        return self.epoch + self.now

    def tick(self, at):
        """Set the time, and run the timers that are due."""
        self.now = at
        self.host.timers.tick(at)

    def set_policy(self, policy):
        self.rules.set_policy(policy, self.host)

    def delete_policy(self, name):
        self.rules.delete_policy(name, self.host)

    def client(self, **options):
        client = self.stranger().open(**options)
        client.names_at_open = client.names()
        return client

    def stranger(self):
        self.clients += 1
        return Client(self, f"client-{self.clients}")

    def queue(self, name="q"):
        return self.host.queues[name]


@pytest.fixture(name="make_world")
def _make_world():
    return World


@pytest.fixture(name="world")
def _world():
    return World()
