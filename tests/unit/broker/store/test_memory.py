"""Above the memory limit, messages are dropped from queues whose policy allows it, and from no others (A1)."""

from __future__ import annotations

import random
from collections import deque

import pytest
from pamqp import commands

from qflow_client.broker.core.entries import DropReason, QueueEntry
from qflow_client.broker.core.snapshots import queue_snapshot
from qflow_client.broker.policies.policy import Policy, PolicyDefinition, QueuePolicy
from qflow_client.broker.store.journal import Journal
from qflow_client.broker.store.paging import Droppable
from tests.effort import rounds

from ..conftest import Disk, World
from ..core.test_flow import STOP_2, flows

PERSISTENT = commands.Basic.Properties(delivery_mode=2)
DROPS = {"x-qflow-drop-transient": True}


@pytest.fixture(name="world")
def _world():
    """Make a broker without a store, with a memory limit of 100 bytes."""
    return small_world()


def small_world(limit=100, *, has_store=False, **options):
    journal = Journal(float, has_store=has_store, limit=limit)
    journal.OVERHEAD, journal.ENTRY, journal.SMALL_HEADER = 0, 0, 1 << 17
    return World(journal=journal, **options)


def bodies(world, queue="q"):
    return [int(entry.message.body) for entry in world.queue(queue).contents.oldest_first()]


def publish(world, numbers, queue="q", *, exchange="", properties=None):
    for number in numbers:
        world.host.publish(exchange, queue, b"%010d" % number, properties)


def publish_and_relieve(world, numbers, queue="q", **options):
    """Publish messages, and let the broker relieve its memory once after all of them."""
    publish(world, numbers, queue, **options)
    world.host.relieve()


def test_A1_when_memory_is_full_the_oldest_messages_are_dropped_and_counted(world):
    world.host.declare_queue("q", arguments=DROPS)
    publish_and_relieve(world, range(10))
    assert bodies(world) == list(range(10)), "at the limit nothing is dropped"
    publish_and_relieve(world, range(10, 13))
    assert bodies(world) == list(range(3, 13))
    assert world.queue().contents.drops == {DropReason.MEMORY: 3}
    assert queue_snapshot(world.queue()).to_json()["drops"] == {"memory": 3}
    assert (world.host.journal.memory, world.queue().depth, world.queue().size) == (100, 10, 100)


@pytest.mark.parametrize("arguments", [{}, {"x-qflow-drop-transient": False}, {"x-qflow-policy": "flow"}])
def test_A1_no_message_is_dropped_for_lack_of_memory_unless_a_policy_allows_it(world, arguments):
    world.host.declare_queue("q", arguments=arguments)
    publish_and_relieve(world, range(20))
    assert (bodies(world), world.queue().contents.drops) == (list(range(20)), {})


def test_A1_persistent_and_unacked_messages_are_not_dropped_for_lack_of_memory(world):
    world.host.declare_queue("q", arguments=DROPS)
    client = world.client().channel()
    client.call(1, commands.Basic.Qos(prefetch_count=2), commands.Basic.QosOk)
    publish(world, range(3))
    client.consume()
    publish(world, range(3, 6), properties=PERSISTENT)
    publish_and_relieve(world, range(6, 15))
    # The consumer has messages 0 and 1. Messages 3 to 5 are persistent.
    assert bodies(world) == [0, 1, 3, 4, 5, 10, 11, 12, 13, 14]
    client.received()
    client.send(1, commands.Basic.Ack(2, multiple=True))
    assert [int(content) for _, content, _ in client.deliveries()] == [3, 4]
    publish_and_relieve(world, range(15, 40), properties=PERSISTENT)
    assert bodies(world) == [3, 4, 5, *range(15, 40)], "no more can be dropped"


def test_A1_when_memory_is_full_the_queue_that_uses_the_most_memory_drops_messages_first(world):
    for queue, count in (("small", 4), ("q", 9), ("large", 12)):
        world.host.declare_queue(queue, arguments=DROPS)
        publish(world, range(count), queue)
    world.host.relieve()
    assert [world.queue(name).depth for name in ("small", "q", "large")] == [3, 3, 4]


def test_A1_a_message_in_two_queues_is_not_dropped_if_the_policy_of_one_queue_does_not_allow_it(world):
    for queue, arguments in (("q", DROPS), ("r", DROPS), ("keeps", {})):
        world.host.declare_queue(queue, arguments=arguments)
        world.host.topology.bind(world.queue(queue), "amq.fanout", "", {})
    world.host.topology.unbind(world.queue("keeps"), "amq.fanout", "", {})
    publish(world, range(12), exchange="amq.fanout")
    world.host.topology.bind(world.queue("keeps"), "amq.fanout", "", {})
    publish_and_relieve(world, range(12, 15), exchange="amq.fanout")
    assert bodies(world, "q") == bodies(world, "r") == list(range(5, 15))
    assert world.queue("q").contents.drops == world.queue("r").contents.drops == {DropReason.MEMORY: 5}
    publish_and_relieve(world, range(15, 30), exchange="amq.fanout")
    assert bodies(world, "keeps") == bodies(world, "q") == list(range(12, 30))
    assert world.queue("keeps").contents.drops == {}


def test_A1_a_policy_can_allow_and_forbid_dropping_messages_while_the_broker_runs(world):
    world.host.declare_queue("q")
    publish(world, range(12))
    world.set_policy(Policy("p", PolicyDefinition(drop_transient=True), "^amq.fanout$", "exchanges"))  # type: ignore[arg-type]
    world.host.relieve()
    assert world.queue().depth == 12
    world.host.topology.bind(world.queue(), "amq.fanout", "", {})
    assert world.queue().limits.to_json()["drop_transient"] is True
    world.host.relieve()
    assert world.queue().depth == 10
    world.delete_policy("p")
    publish_and_relieve(world, range(5))
    assert world.queue().depth == 15


def test_A1_messages_of_queues_with_policy_flow_to_disk_are_not_dropped_while_the_disk_accepts_them():
    world = small_world(has_store=True)
    world.host.declare_queue("q", arguments=DROPS)
    world.host.declare_queue("spool", arguments={"x-qflow-policy": "flow_to_disk"})
    publish(world, range(8))
    publish_and_relieve(world, range(20), "spool")
    assert (world.queue().contents.drops, world.queue("spool").contents.drops) == ({}, {})
    assert world.host.journal.held <= 100


def test_A1_messages_whose_bodies_are_on_disk_are_not_dropped_when_another_queue_fills_memory():
    world = small_world(400, has_store=True)
    journal = world.host.journal
    disk = Disk(journal)
    world.host.declare_queue("spool", arguments=DROPS | {"x-qflow-policy": "flow_to_disk"})
    world.host.declare_queue("full")
    publish_and_relieve(world, range(1000), "spool")
    disk.write()
    assert sum(entry.message.body is not None for entry in world.queue("spool").contents.oldest_first()) == 30
    publish(world, range(100), "full")
    for _ in range(3):
        world.host.relieve()
        disk.write()
    assert (world.queue("spool").contents.drops, world.queue("spool").depth) == ({}, 1000)
    assert journal.held == 1000, "what fills memory keeps it"


@pytest.mark.parametrize("is_written", [True, False])
def test_A1_messages_whose_bodies_are_on_disk_are_not_dropped_after_their_queue_leaves_flow_to_disk(is_written):
    world = small_world(100, has_store=True)
    disk = Disk(world.host.journal)
    world.host.declare_queue("q", arguments=DROPS)
    world.set_policy(Policy("p", PolicyDefinition(policy=QueuePolicy.FLOW_TO_DISK), "^q$"))
    publish_and_relieve(world, range(20))
    if is_written:
        disk.write()
    world.delete_policy("p")
    assert world.queue().pager is None
    publish_and_relieve(world, range(20, 40))
    # Messages 0 to 6 were kept in memory. Messages 7 to 19 are the oldest now.
    assert world.queue().contents.drops == {DropReason.MEMORY: 7 + 10}
    assert world.host.journal.held == 100
    disk.write()
    world.host.journal.want((entry.message for entry in world.queue().contents.ready), lambda: True)
    disk.read()
    assert bodies(world) == [*range(7, 20), *range(30, 40)]
    world.host.relieve()
    assert bodies(world) == list(range(30, 40)), "what has been read can be dropped again"


class Looks:
    """Counts how many entries are checked in the search for droppable messages."""

    def __init__(self, monkeypatch):
        self._count = 0
        oldest_first = Droppable.oldest_first

        def look(droppable):
            for entry in oldest_first(droppable):
                self._count += 1
                yield entry

        monkeypatch.setattr(Droppable, "oldest_first", look)

    def count(self):
        """Return the number of entries that were checked since the last call."""
        count, self._count = self._count, 0
        return count


class Untouched(deque[QueueEntry]):
    """Entries over which no code may iterate."""

    def __iter__(self):
        raise AssertionError("all entries are looked through")


def test_A1_dropping_messages_for_memory_takes_no_time_for_persistent_messages(world):
    world.host.declare_queue("q", arguments=DROPS)
    publish(world, range(100), properties=PERSISTENT)
    world.queue().contents.ready = Untouched(world.queue().contents.ready)
    for _ in range(3):
        world.host.relieve()
    publish_and_relieve(world, [100])
    assert (world.queue().contents.drops, world.queue().depth) == ({DropReason.MEMORY: 1}, 100)


def test_A1_messages_that_cannot_be_dropped_are_checked_again_only_after_a_change(world, monkeypatch):
    looks = Looks(monkeypatch)
    world.host.declare_queue("q", arguments=DROPS)
    world.host.declare_queue("keeps")
    for name in ("q", "keeps"):
        world.host.topology.bind(world.queue(name), "amq.fanout", "", {})
    publish(world, range(20), exchange="amq.fanout")
    for number in range(20, 25):
        world.host.relieve()
        publish(world, [number], "keeps")
    assert (looks.count(), world.queue().contents.drops) == (20, {})
    world.queue("keeps").take(no_ack=True)
    world.host.relieve()
    assert (looks.count(), bodies(world)) == (1, list(range(1, 20)))
    publish_and_relieve(world, [25])
    assert (looks.count(), bodies(world)) == (1, list(range(1, 20)))
    # These are the first messages. A consumer has had them.
    taken = [world.queue().take(no_ack=False) for _ in range(3)]
    publish(world, [26, 27], "keeps")
    for _ in range(3):
        world.queue("keeps").take(no_ack=True)
    world.host.relieve()
    assert bodies(world) == list(range(1, 20))
    world.queue().dispatcher.requeue(taken)
    publish_and_relieve(world, [28])
    assert (looks.count(), bodies(world)) == (4, list(range(4, 20))), "all of these are in the other queue too"
    world.set_policy(Policy("p", PolicyDefinition(drop_transient=True), "^keeps$"))
    world.host.relieve()
    assert world.host.journal.held == 100


def test_A1_a_message_that_was_requeued_is_still_dropped_as_the_oldest_message(world):
    world.host.declare_queue("q", arguments=DROPS)
    publish(world, range(10))
    taken = [world.queue().take(no_ack=False) for _ in range(4)]
    world.queue().dispatcher.requeue(taken)
    publish_and_relieve(world, range(10, 12))
    assert bodies(world) == list(range(2, 12))


def test_A1_dropping_a_message_for_memory_unflows_publishers_and_the_message_is_not_dead_lettered(world):
    client = world.client().channel(confirms=True).with_queue("dead")
    letters = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    client.declare(arguments=STOP_2 | DROPS | letters)
    client.publish(b"x" * 50, times=3)
    assert flows(client) == [False]
    world.host.relieve()
    assert world.queue().depth == 2
    client.publish(b"x" * 100)
    world.host.relieve()
    assert (world.queue().depth, world.queue("dead").depth) == (1, 0)
    names = client.names()
    assert names.count("Channel.Flow") == 1
    assert "Basic.Ack" in names


@pytest.mark.parametrize("seed", range(rounds(10)))
def test_A1_after_any_sequence_of_changes_messages_are_dropped_until_memory_is_below_the_limit(seed):
    chance = random.Random(seed)
    world = small_world(300)
    names = ("a", "b", "keeps")
    for queue in names:
        world.host.declare_queue(queue, arguments={} if queue == "keeps" else DROPS)
        world.host.topology.bind(world.queue(queue), "amq.fanout" if queue != "keeps" else "amq.direct", "", {})
    came, taken = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for number in range(300):
        exchange = chance.choice(("", "amq.fanout", "amq.direct"))
        queue = chance.choice(names)
        properties = PERSISTENT if chance.random() < 0.1 else None
        publish(world, [number], queue if not exchange else "", exchange=exchange, properties=properties)
        for each in {"": (queue,), "amq.fanout": ("a", "b"), "amq.direct": ("keeps",)}[exchange]:
            came[each] += 1
        queue = chance.choice(names)
        if chance.random() < 0.4 and world.queue(queue).take(no_ack=True) is not None:
            taken[queue] += 1
        world.host.relieve()
        droppable = {
            entry.message
            for name in ("a", "b")
            for entry in world.queue(name).contents.oldest_first()
            if not entry.message.is_persistent
        }
        assert world.host.journal.held <= 300 or not droppable
        for name in names:
            assert came[name] == taken[name] + world.queue(name).contents.dropped + world.queue(name).depth
    assert world.queue("keeps").contents.drops == {}
    assert world.queue("a").contents.drops[DropReason.MEMORY] > 5


@pytest.mark.parametrize("has_store", [False, True])
@pytest.mark.parametrize("seed", range(rounds(10)))
def test_A1_every_droppable_message_is_found_after_requeues_copies_and_policy_changes(seed, has_store):
    chance = random.Random(seed)
    world = small_world(200, has_store=has_store)
    host, journal = world.host, world.host.journal
    disk = Disk(journal)
    names = ("a", "b", "keeps")
    for name in names:
        host.declare_queue(name, arguments={} if name == "keeps" else DROPS)
        host.topology.bind(world.queue(name), "amq.fanout", "", {})
    changes = [PolicyDefinition(drop_transient=True)]
    if has_store:
        changes.append(PolicyDefinition(policy=QueuePolicy.FLOW_TO_DISK))
    lent = []
    for number in range(400):
        match chance.choice(("publish", "publish", "publish", "take", "take", "get", "put back", "settle", "policy")):
            case "publish":
                exchange = chance.choice(("", "amq.fanout"))
                properties = PERSISTENT if chance.random() < 0.2 else None
                publish(
                    world, [number], "" if exchange else chance.choice(names), exchange=exchange, properties=properties
                )
            case "take" if (entry := world.queue(chance.choice(names)).take(no_ack=False)) is not None:
                lent.append(entry)
                if entry.message.body is None:
                    journal.leave(0, entry.message)
            case "get" if (entry := world.queue(chance.choice(names)).take(no_ack=True)) is not None:
                if entry.message.body is None:
                    journal.leave(0, entry.message)
            case "put back" if lent:
                entry = lent.pop(chance.randrange(len(lent)))
                entry.queue.dispatcher.requeue([entry])
            case "settle" if lent:
                entry = lent.pop(chance.randrange(len(lent)))
                entry.queue.dispatcher.settle(entry, acked=True)
            case "policy" if chance.random() < 0.3:
                policy = Policy("p", chance.choice(changes), f"^{chance.choice(names)}$")
                for _ in world.rules.replace_policies_in_steps((policy,) if chance.random() < 0.5 else (), host):
                    pass
        if has_store and chance.random() < 0.3:
            disk.write()
        if has_store and chance.random() < 0.1:
            journal.want(
                (entry.message for entry in world.queue("a").contents.ready if not entry.is_gone), lambda: True
            )
            disk.read()
        host.relieve()
        for queue in host.queues.values():
            if queue.droppable is not None:
                ready = [each for each in queue.contents.oldest_first() if not each.is_unacked]
                transient = [each for each in ready if not each.message.is_persistent]
                there = list(queue.droppable.oldest_first())
                assert there == [each for each in transient if each in there]
                assert set(there).isdisjoint(each for each in transient if each in each.message.record.aside)
                assert set(transient) == {*there, *(each for each in transient if each in each.message.record.aside)}
        if journal.held <= 200:
            continue
        kept = set()
        for queue in host.queues.values():
            for entry in queue.contents.oldest_first():
                message = entry.message
                if (
                    entry.is_unacked
                    or not queue.limits.drop_transient
                    or queue.pager is not None
                    or message.is_persistent
                    or message.body is None
                    or message.record.is_evicting
                ):
                    kept.add(message)
        messages = {entry.message for queue in host.queues.values() for entry in queue.contents.oldest_first()}
        assert messages == kept, "whatever is in memory is there because somebody keeps it"
