"""Fairness among the publishers of a queue (F4), and rate limits (F2 F6)."""

from __future__ import annotations

import random

import pytest
from pamqp import commands

from qflow_client.broker.core.queueflow import CountedSource, QueueFlow
from qflow_client.broker.core.snapshots import channel_snapshot, queue_snapshot
from qflow_client.broker.policies.rates import RateLimit, Rates, RateScope
from qflow_client.broker.settings import BrokerSettings
from qflow_client.flow import StopResume
from tests.effort import rounds

from ..core.test_flow import STOP_2, flows
from ..tools import run_all

# Publishers that are unflowed one after the other.


def three_flowed(world):
    clients = [world.client().channel() for _ in range(3)]
    clients[0].declare(arguments=STOP_2)
    world.host.publish("", "q", b"")
    world.host.publish("", "q", b"")
    for client in clients:
        client.publish()
    assert [flows(client) for client in clients] == [[False]] * 3
    return clients


def test_F4_without_a_resume_interval_a_drained_queue_unflows_all_publishers_together(world):
    clients = three_flowed(world)
    world.queue().purge()
    assert [flows(client) for client in clients] == [[True]] * 3


class Source(CountedSource):
    """A publisher that records when it is unflowed."""

    def __init__(self, name, published, let_go):
        super().__init__(name)
        self.published = published
        self.let_go = let_go

    def on_unblocked(self):
        self.let_go.append(self.name)


def test_F4_a_queue_that_unflows_all_publishers_together_begins_with_the_publisher_of_fewest_messages():
    let_go: list[str] = []
    flow = QueueFlow(StopResume(stop_count=2, resume_count=2), "q", count=2, size=2, run=run_all)
    for name, published in (("first", 9), ("second", 3), ("third", 9), ("fourth", 0)):
        flow.offer(Source(name, published, let_go), 1, 0.0)
    for _ in range(4):
        flow.release(1)
        assert not let_go
    flow.release(1)
    assert let_go == ["fourth", "second", "first", "third"]


@pytest.mark.parametrize(("now", "back"), [(0.0, 1), (0.0999, 1), (0.1, 2), (0.1999, 2), (0.2, 3)])
def test_F4_with_a_resume_interval_publishers_are_unflowed_one_by_one_beginning_with_the_longest_flowed(
    make_world, now, back
):
    world = make_world(resume_interval=0.1)
    clients = three_flowed(world)
    world.queue().purge()
    for at in (0.0, 0.0999, 0.1, 0.1999, 0.2):
        if at <= now:
            world.tick(at)
    assert [flows(client) for client in clients] == [[True]] * back + [[]] * (3 - back)
    assert len(queue_snapshot(world.queue()).blocked) == 3 - back


def test_F4_a_publisher_that_was_not_unflowed_before_the_queue_filled_again_is_the_first_next_time(make_world):
    world = make_world(resume_interval=0.1)
    first, *_ = clients = three_flowed(world)
    world.queue().purge()
    first.publish(times=3)
    assert flows(first) == [True, False]
    world.tick(0.5)
    assert [client.received() for client in clients] == [[], [], []]
    world.queue().purge()
    assert [flows(client) for client in clients] == [[], [True], []]
    world.tick(0.6)
    assert [flows(client) for client in clients] == [[], [], [True]]
    world.tick(0.7)
    assert [flows(client) for client in clients] == [[True], [], []]


def test_F4_deleting_a_queue_with_a_resume_interval_unflows_all_its_publishers_together(make_world):
    world = make_world(resume_interval=10)
    clients = three_flowed(world)
    world.host.delete_queue(world.queue())
    assert [flows(client) for client in clients] == [[True]] * 3


def test_F4_a_publisher_that_ends_is_skipped_when_publishers_are_unflowed_one_by_one(make_world):
    world = make_world(resume_interval=0.1)
    first, second, third = three_flowed(world)
    second.send(1, commands.Channel.Close(200, "", 0, 0))
    world.queue().purge()
    world.tick(0.1)
    assert [flows(client) for client in (first, third)] == [[True], [True]]


def flap(make_world, interval, rounds, publishers=10, burst=20):
    """Simulate equal publishers that send bursts while they are not flowed, and a consumer of 30 messages a round.

    Returns:
        The number of messages that each publisher sent, and the highest depth.
    """
    world = make_world(resume_interval=interval)
    clients = [world.client().channel(confirms=True) for _ in range(publishers)]
    clients[0].declare(arguments={"qpid.flow_stop_count": 100, "qpid.flow_resume_count": 50})
    served = [0] * publishers
    may = [True] * publishers
    network = random.Random(1)
    for round_number in range(rounds):
        # The order of the publishers changes, so that none is always the first.
        for number in network.sample(range(publishers), publishers):
            client = clients[number]
            # A flow that is read stops the next burst. A burst that has begun still arrives.
            told = [each.active for _, each in client.received() if each.name == "Channel.Flow"]
            may[number] = told[-1] if told else may[number]
            if may[number]:
                client.publish(times=burst)
                served[number] += burst
        for _ in range(30):
            world.queue().take(no_ack=True)
        world.tick(float(round_number))
        if round_number == 20:
            # In the beginning no publisher is flowed, whatever the interval.
            world.queue().contents.peak_depth = 0
    return served, world.queue().contents.peak_depth


@pytest.mark.parametrize(("interval", "highest", "times"), [(0.0, 270, rounds(500, least=150)), (1.0, 150, 500)])
def test_F4_publishers_that_are_unflowed_in_turn_publish_equal_shares_and_overfill_the_queue_less(
    make_world, interval, highest, times
):
    served, peak = flap(make_world, interval, times)
    assert max(served) - min(served) <= 0.2 * max(served), served
    assert peak == highest


# Rate limits.


@pytest.fixture(name="client")
def _client(world):
    client = world.client().channel().with_queue()
    client.bind_to_fanout("q")
    return client


def limit(world, *args, **options):
    world.rates.set(RateLimit(*args, **options), world.now)
    world.controls.limit_rates(True)


@pytest.mark.parametrize(
    ("scope", "name", "exchange", "is_limited"),
    [
        ("exchange", "amq.fanout", "amq.fanout", True),
        ("exchange", "amq.fanout", "", False),
        ("exchange", "", "", True),
        ("queue", "q", "", True),
        ("queue", "q", "amq.fanout", True),
        ("queue", "other", "", False),
        ("user", "guest", "", True),
        ("user", "ann", "", False),
    ],
)
def test_F6_a_publisher_that_exceeds_the_rate_limit_is_flowed_until_the_average_is_within_the_limit(
    world, client, scope, name, exchange, is_limited
):
    limit(world, scope, name, messages=10)
    client.publish(exchange=exchange)
    assert flows(client) == []
    client.publish(exchange=exchange)
    if not is_limited:
        assert flows(client) == []
        return
    assert flows(client) == [False]
    assert channel_snapshot(client.session.channels[1]).blocked_by == (f"rate of {scope} '{name}'",)
    assert world.queue().depth == 2
    world.tick(0.0999)
    assert flows(client) == []
    world.tick(0.1)
    assert flows(client) == [True]


def test_F6_a_channel_that_exceeds_a_rate_limit_in_bytes_is_flowed(world, client):
    limit(world, "queue", "q", bytes=1000, burst=1)
    client.publish(b"x" * 1000)
    assert flows(client) == []
    client.publish(b"x" * 500)
    assert flows(client) == [False]
    world.tick(0.499)
    assert flows(client) == []
    world.tick(0.5)
    assert flows(client) == [True]


def test_F6_a_publisher_may_send_a_burst_after_idle_time_without_exceeding_the_rate_limit(world, client):
    limit(world, "queue", "q", messages=10, burst=0.5)
    client.publish(times=5)
    assert flows(client) == []
    client.publish()
    assert flows(client) == [False]


def test_F6_the_rate_limit_of_a_user_applies_to_all_connections_of_the_user_together(world, client):
    other = world.client().channel()
    limit(world, "user", "guest", messages=10)
    client.publish()
    other.publish()
    assert (flows(client), flows(other)) == ([], [False])


def test_F6_a_rate_limit_can_be_changed_while_the_broker_runs_and_still_counts_earlier_messages(world, client):
    limit(world, "queue", "q", messages=1)
    client.publish(times=3)
    assert flows(client) == [False]
    # Two messages exceeded the limit.
    limit(world, "queue", "q", messages=10)
    world.tick(0.1999)
    assert flows(client) == []
    world.tick(0.2)
    assert flows(client) == [True]


@pytest.mark.parametrize("way", ["delete", "only bytes"])
def test_F6_removing_a_rate_limit_unflows_the_publishers_that_exceeded_it(world, client, way):
    limit(world, "queue", "q", messages=1, bytes=1e9)
    client.publish(times=2)
    assert flows(client) == [False]
    if way == "delete":
        world.rates.delete(RateScope.QUEUE, "q")
    else:
        limit(world, "queue", "q", bytes=1e9)
    assert flows(client) == [True]
    assert bool(world.rates) is (way != "delete")


def test_F6_messages_of_a_transaction_count_for_the_rate_limit_when_it_commits(world, client):
    limit(world, "queue", "q", messages=1)
    client.call(1, commands.Tx.Select(), commands.Tx.SelectOk)
    client.publish(times=3)
    assert client.received() == []
    client.send(1, commands.Tx.Commit())
    assert sorted(client.names()) == ["Channel.Flow", "Tx.CommitOk"]


def test_F6_a_message_that_the_queue_refuses_does_not_count_for_the_rate_limit(world, client):
    client.declare("small", arguments={"x-max-length": 0, "x-overflow": "reject-publish"})
    limit(world, "exchange", "", messages=1)
    client.publish(routing_key="small", times=3)
    assert client.received() == []


def test_J4_a_channel_flowed_by_a_rate_limit_and_a_full_queue_resumes_when_both_release_it(world, client):
    limit(world, "exchange", "", messages=1)
    client.declare("narrow", arguments=STOP_2)
    client.publish(routing_key="narrow", times=3)
    assert flows(client) == [False]
    world.tick(100.0)
    assert flows(client) == []
    world.queue("narrow").purge()
    assert flows(client) == [True]


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({}, ValueError, "limits nothing"),
        ({"messages": 0}, ValueError, "messages=0"),
        ({"messages": "1"}, TypeError, "messages='1'"),
        ({"bytes": float("inf")}, ValueError, "bytes=inf"),
        ({"messages": 1, "burst": -1}, ValueError, "burst=-1"),
        ({"messages": 1, "apply_to": "channel"}, ValueError, "exchange, queue, user"),
        ({"messages": 1, "name": None}, TypeError, "name=None"),
    ],
)
def test_F6_an_invalid_rate_limit_raises_an_error(options, error, word):
    with pytest.raises(error, match=word):
        RateLimit(**{"apply_to": "queue", "name": "q", **options})


def test_F6_deleting_a_rate_limit_that_does_not_exist_raises_lookup_error(world):
    with pytest.raises(LookupError, match="rate limit of queue 'q'"):
        world.rates.delete(RateScope.QUEUE, "q")
    assert list(Rates(lambda *_: None)) == []


@pytest.mark.parametrize("interval", [-1, "1"])
def test_F4_an_invalid_resume_interval_raises_an_error(interval):
    with pytest.raises((TypeError, ValueError), match="resume_interval"):
        BrokerSettings(resume_interval=interval)
