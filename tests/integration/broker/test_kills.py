"""A broker is killed with SIGKILL at a random moment under load. The tests check the contents of its store."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pamqp import body, commands, frame, header

from qflow_client.broker import Broker
from tests.effort import rounds

#: How often the broker is killed.
KILLS = rounds(6, least=2)
ROOT = Path(__file__).parents[3]
PATIENCE = 20.0
WINDOW = 300
BROKER = """
import sys
from qflow_client.broker import Broker

with Broker(store=sys.argv[1]) as broker:
    print(broker.port, flush=True)
    sys.stdin.read()
"""
PERSISTENT = commands.Basic.Properties(delivery_mode=2)


class Load:
    """A client that publishes each message to two durable queues, consumes one of the queues, and acknowledges."""

    def __init__(self, client, first):
        self.client = client.open().channel(confirms=True)
        call = self.client.call
        call(1, commands.Exchange.Declare(exchange="all", exchange_type="fanout", durable=True),
             commands.Exchange.DeclareOk)  # fmt: skip
        for queue in ("consumed", "kept"):
            call(1, commands.Queue.Declare(queue=queue, durable=True), commands.Queue.DeclareOk)
            call(1, commands.Queue.Bind(queue=queue, exchange="all"), commands.Queue.BindOk)
        self.next = self.first = first
        self.confirmed = set()
        # Numbers of the acknowledged messages, and how many were acknowledged before each publish.
        self.acked = []
        self.acked_before = {}
        self.tags = {}
        self.acks_on_disk = 0
        self.rng = random.Random(first)

    def run(self):
        """Publish and consume until the connection ends."""
        try:
            # The broker may be killed before it has answered.
            self.client.send(1, commands.Basic.Consume(queue="consumed", consumer_tag="c"))
            self.client.expect(commands.Basic.ConsumeOk)
            while True:
                if len(self.tags) < WINDOW:
                    self._publish(self.rng.randrange(1, 60))
                self._read()
        except (OSError, EOFError):
            pass
        finally:
            self.client.socket.close()

    def _publish(self, count):
        frames: list[Any] = []
        for number in range(self.next, self.next + count):
            content = b"%d " % number + bytes(self.rng.choice((0, 10, 1000, 9000)))
            self.tags[number - self.first + 1] = number
            self.acked_before[number] = len(self.acked)
            frames += [
                commands.Basic.Publish(exchange="all"),
                header.ContentHeader(body_size=len(content), properties=PERSISTENT),
                body.ContentBody(content),
            ]
        self.next += count
        self.client.send_bytes(b"".join(frame.marshal(each, 1) for each in frames))

    def _read(self):
        _, received = self.client.read()
        if isinstance(received, commands.Basic.Ack):
            upto = received.delivery_tag or 0
            for tag in [tag for tag in self.tags if tag == upto or (received.multiple and tag < upto)]:
                number = self.tags.pop(tag)
                self.confirmed.add(number)
                self.acks_on_disk = max(self.acks_on_disk, self.acked_before[number])
        else:
            assert isinstance(received, commands.Basic.Deliver), received
            size, content = self.client.expect(header.ContentHeader).body_size, b""
            while len(content) < size:
                content += self.client.expect(body.ContentBody).value
            # Record the ack before sending it, because it may be on disk before `send` returns.
            self.acked.append(number_of(content))
            self.client.send(1, commands.Basic.Ack(received.delivery_tag or 0))


def number_of(content):
    return int(content.split(b" ")[0])


def killed_under_load(path, connect, first, seconds):
    """Start a broker with load, kill it after `seconds`, and return the load."""
    with subprocess.Popen(
        [sys.executable, "-c", BROKER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    ) as process:
        assert process.stdout is not None
        load = Load(connect(SimpleNamespace(port=int(process.stdout.readline()))), first)
        # The moment of the kill is random.
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        load.run()
        timer.join()
        assert process.wait(PATIENCE) == -signal.SIGKILL
    return load


@pytest.mark.program
@pytest.mark.timeout(600)
def test_after_a_kill_of_the_broker_each_confirmed_persistent_message_is_in_the_queue_exactly_once(tmp_path, connect):
    moments = random.Random(1)
    path = tmp_path / "store"
    expected, settled, acked = set[int](), set[int](), set[int]()
    published = seen = 0
    kills, at_most = 0, 0.4
    # On a slow machine, continue until enough messages were stored and acknowledged to prove something.
    while kills < KILLS or not (seen > 100 and settled):
        if kills >= KILLS:
            at_most *= 2
        assert at_most < 30, (seen, settled)
        kills += 1
        load = killed_under_load(path, connect, published, moments.uniform(0.0, at_most))
        published = load.next
        expected |= load.confirmed
        acked |= set(load.acked)
        settled |= set(load.acked[: load.acks_on_disk])
        with Broker(store=path) as broker:
            kept, consumed = (
                [number_of(each.body) for each in broker.messages(queue)] for queue in ("kept", "consumed")
            )
            assert kept == sorted(set(kept)), "twice, or out of order"
            assert consumed == sorted(set(consumed)), "twice, or out of order"
            assert expected <= set(kept)
            assert expected - acked <= set(consumed)
            assert not settled & set(consumed), "what was acked before something confirmed came is back"
            assert all(each.redelivered for each in broker.messages("kept"))
            assert {(each.source, each.destination) for each in broker.bindings()} == {
                ("all", "consumed"),
                ("all", "kept"),
            }
            seen += len(kept)
            if len(kept) > 5000:
                broker.purge("kept")
                expected.clear()
