from __future__ import annotations

import threading

import pytest
from pamqp import commands

from qflow_client.broker import Broker
from tests.effort import rounds

COUNT = rounds(1000, least=200)


class WindowedProducer(threading.Thread):
    """Publishes while it has capacity and is not flowed, as the sources ask of a producer."""

    def __init__(self, client, capacity, count):
        super().__init__(daemon=True)
        self.client = client
        self.capacity = capacity
        self.count = count
        self.published = 0
        self.unsettled = set()
        self.is_flowed = False
        self.most_unsettled = 0
        self.times_flowed = 0

    def run(self):
        while self.published < self.count or self.unsettled:
            while not self.is_flowed and len(self.unsettled) < self.capacity and self.published < self.count:
                self.client.publish(b"%06d" % self.published)
                self.published += 1
                self.unsettled.add(self.published)
                self.most_unsettled = max(self.most_unsettled, len(self.unsettled))
            _, received = self.client.read()
            if isinstance(received, commands.Channel.Flow):
                self.is_flowed = not received.active
                self.times_flowed += self.is_flowed
                self.client.send(1, commands.Channel.FlowOk(active=received.active))
            else:
                assert isinstance(received, commands.Basic.Ack)
                tag = received.delivery_tag
                if received.multiple:
                    self.unsettled = {each for each in self.unsettled if each > tag}
                else:
                    self.unsettled.remove(tag)


def start_two(broker, connect, count=COUNT):
    broker.declare_queue("q", arguments={"qpid.flow_stop_count": 100, "qpid.flow_resume_count": 50})
    producers = [
        WindowedProducer(connect(broker).open().channel(confirms=True), capacity, count) for capacity in (50, 15)
    ]
    for producer in producers:
        producer.start()
    return producers


def drain(broker, producers):
    """Take everything, a message at a time, and look at the depth before each."""
    total = sum(producer.count for producer in producers)
    for _ in range(total):
        broker.wait_until(lambda b: b.queue("q").ready)
        assert broker.queue("q").depth <= 165
        broker.get("q")
    for producer in producers:
        producer.join(20)
        assert not producer.is_alive()
    queue = broker.queue("q")
    assert (queue.published, queue.depth, queue.flow_stopped, queue.blocked) == (total, 0, False, ())
    return queue


def test_C6_with_completion_two_producers_overshoot_by_exactly_the_sum_of_their_capacities(connect):
    with Broker(enforcement="completion") as broker:
        producers = start_two(broker, connect)
        broker.wait_until(lambda b: b.queue("q").depth == 165)
        # Nothing more can come: all that both may have unsettled is held.
        assert [channel.unconfirmed for channel in broker.producers()] == [50, 15]
        assert broker.queue("q").held_confirms == 65
        assert drain(broker, producers).peak_depth == 165
        assert [producer.most_unsettled for producer in producers] == [50, 15]
        assert [producer.times_flowed for producer in producers] == [0, 0]


@pytest.mark.parametrize("enforcement", ["both", "channel_flow"])
def test_C6_two_producers_never_exceed_the_stop_threshold_by_more_than_the_sum_of_their_capacities(
    connect, enforcement
):
    with Broker(enforcement=enforcement) as broker:
        producers = start_two(broker, connect)
        broker.wait_until(lambda b: [channel.flowed for channel in b.producers()] == [True, True])
        queue = drain(broker, producers)
        assert 100 < queue.peak_depth <= 165
        assert all(producer.times_flowed for producer in producers)


def test_J7_a_producer_that_obeys_flow_publishes_nothing_after_flow_ok(connect):
    lines = []
    with Broker(trace=lambda *line: lines.append(line)) as broker:
        producers = start_two(broker, connect)
        broker.wait_until(lambda b: [channel.flowed for channel in b.producers()] == [True, True])
        drain(broker, producers)
    flowed: dict[str, bool] = {}
    seen = 0
    for direction, connection, _, name in lines:
        if direction == "in" and name == "Channel.FlowOk":
            flowed[connection] = not flowed.get(connection, False)
            seen += 1
        elif name == "Basic.Publish":
            assert not flowed.get(connection, False)
    assert seen >= 4
