"""Bodies that are on disk and not in memory. There is no real disk."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands

from qflow_client.broker.core.errors import ChannelException
from qflow_client.broker.policies.policy import Policy, PolicyDefinition
from qflow_client.broker.settings import BrokerSettings
from qflow_client.broker.store.journal import Journal
from qflow_client.broker.store.paging import level
from tests.effort import rounds

from ..conftest import Disk, World
from ..tools import limits_of

TO_DISK = {"x-qflow-policy": "flow_to_disk"}


class Evicting:
    """A world with a disk, and a limit for bodies only."""

    def __init__(self, limit=0, *queues, **options):
        self.journal = Journal(float, limit=limit)
        self.journal.OVERHEAD = self.journal.ENTRY = 0
        self.disk = Disk(self.journal)
        self.world = World(journal=self.journal, **options)
        self.client = self.world.client().channel(confirms=True)
        self.declare(*queues)

    def declare(self, *queues, **arguments):
        for queue in queues:
            self.client.declare(queue, arguments=TO_DISK | arguments)

    def turn(self):
        """End a turn of the event loop, and let the disk do all its work."""
        self.world.host.relieve()
        self.disk.write()
        self.disk.read()
        self.disk.write()
        self.disk.check(self.world.host.queues.values())

    def resident(self, queue="q"):
        return [entry.message.body is not None for entry in self.world.queue(queue).contents.oldest_first()]


def body(number, size=10):
    return b"%0*d" % (size, number)


@given(st.lists(st.integers(0, 100)), st.integers(0, 1000))
def test_A3_queues_share_memory_fairly_and_small_queues_keep_their_messages_in_memory(sizes, total):
    share = level(sizes, total)
    taken = [min(size, share) for size in sizes]
    assert sum(taken) <= total or not sizes
    if sum(sizes) > total:
        # Only a remainder of the limit is unused. No queue has more memory than one whose bodies were evicted.
        assert total - sum(taken) < len(sizes)
        assert all(each == share for each, size in zip(taken, sizes, strict=True) if each < size)


def test_A2_above_three_quarters_of_the_memory_limit_the_newest_bodies_are_evicted_to_disk():
    it = Evicting(100, "q")
    it.client.publish_each(*map(body, range(20)))
    it.turn()
    assert it.resident() == [True] * 7 + [False] * 13
    assert it.journal.memory == 70
    assert (it.world.queue().depth, it.world.queue().size) == (20, 200), "they count as before"
    assert it.client.only(commands.Basic.Ack).delivery_tag == 20, "nobody waits for the disk who need not"


def test_A2_a_flow_to_disk_queue_with_a_maximum_accepts_all_messages_and_keeps_that_many_in_memory():
    it = Evicting()
    it.declare("size", **{"qpid.max_size": 30})
    it.declare("count", **{"qpid.max_count": 2})
    for number in range(10):
        for queue in ("size", "count"):
            it.client.publish(body(number), queue)
    it.turn()
    assert it.resident("size") == [True] * 3 + [False] * 7
    assert it.resident("count") == [True] * 2 + [False] * 8
    assert it.world.queue("count").contents.dropped == 0


def test_A2_bodies_on_disk_are_read_ahead_in_batches_and_delivered_in_order():
    it = Evicting(800, "q")
    it.client.publish_each(*map(body, range(500)))
    it.turn()
    it.client.received()
    it.client.consume(no_ack=True)
    it.client.received()
    found = []
    while it.world.queue().depth:
        it.turn()
        found += [content for _, content, _ in it.client.deliveries()]
    assert found[-1] == body(499)
    assert max(it.disk.reads) <= 10, "an eighth of the limit"
    assert len(it.disk.reads) < 120, "not one by one"
    assert it.journal.peak_memory <= 5000
    it.turn()
    assert it.disk.bodies == {}


def test_A3_the_memory_for_reading_ahead_from_disk_is_shared_equally_by_all_consumers():
    it = Evicting(8000, "a", "b", "c")
    assert it.world.host.window == 1000
    for queue in ("a", "b"):
        it.client.consume(queue, tag=queue)
    assert it.world.host.window == 500


def test_A3_the_queue_that_uses_the_most_memory_evicts_the_most_bodies():
    it = Evicting(100, "small", "large", "other")
    for queue, count in (("small", 1), ("large", 8), ("other", 4)):
        for number in range(count):
            it.client.publish(body(number), queue)
    it.turn()
    assert [it.world.queue(name).pager.size for name in ("small", "large", "other")] == [10, 30, 30]


def test_A2_a_message_delivered_before_its_body_is_written_to_disk_is_never_written():
    it = Evicting(20, "q")
    it.client.publish_each(*map(body, range(5)))
    it.world.host.relieve()
    it.client.received()
    it.client.consume(no_ack=True)
    assert len(it.client.received()) > 5
    assert it.disk.write() == []
    assert it.journal.evicted == 0
    assert it.journal.memory == 0


@pytest.mark.parametrize(
    "again", [commands.Basic.Nack(0, multiple=True, requeue=True), commands.Basic.Recover(requeue=False)]
)
def test_A2_bodies_of_unacked_messages_are_evicted_first_and_read_again_for_the_next_delivery(again):
    it = Evicting(40, "q")
    it.client.declare("elsewhere")
    it.client.publish_each(*map(body, range(3)))
    it.client.received()
    it.client.consume()
    it.client.received()
    for number in range(3):
        it.client.publish(body(number), "elsewhere")
    it.turn()
    assert it.journal.memory <= 30
    assert not any(it.resident())
    it.client.received()
    it.client.send(1, again)
    it.turn()
    it.turn()
    assert [(content, is_again) for _, content, is_again in it.client.deliveries_after_ok()] == [
        (body(number), True) for number in range(3)
    ]


@pytest.mark.parametrize("no_ack", [True, False])
def test_A2_basic_get_of_a_body_on_disk_waits_for_the_disk_and_so_do_later_answers_on_the_channel(no_ack):
    it = Evicting(1, "q")
    it.client.publish(body(1))
    it.world.host.relieve()
    it.disk.write()
    it.client.received()
    it.client.send(1, commands.Basic.Get(queue="q", no_ack=no_ack), commands.Basic.Qos(prefetch_count=1))
    assert it.client.received() == []
    it.disk.write()
    it.disk.read()
    assert it.disk.reads == [1]
    received = [each for _, each in it.client.received()]
    assert received[0].name == "Basic.GetOk"
    assert received[2].value == body(1)
    assert received[3].name == "Basic.QosOk"
    it.turn()
    assert len(it.disk.bodies) == (0 if no_ack else 1)


@pytest.mark.parametrize("how", ["reject", "expire"])
def test_A2_the_body_of_a_dead_letter_is_read_before_the_original_message_is_removed_from_disk(how):
    it = Evicting(1)
    it.client.declare("dead")
    it.declare("q", **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead", "x-message-ttl": 1000})
    it.client.publish_each(*map(body, range(3)))
    it.turn()
    if how == "expire":
        it.world.now = 2.0
        it.world.host.timers.tick(it.world.now)
    else:
        for _ in range(3):
            it.client.send(1, commands.Basic.Get(queue="q"))
        it.client.send(1, commands.Basic.Nack(0, multiple=True, requeue=False))
    assert it.world.queue().depth == 0
    for _ in range(2):
        it.world.host.relieve()
        it.disk.write()
        it.disk.read()
        it.world.host.timers.tick(it.world.now)
    it.turn()
    letters = [entry.message for entry in it.world.queue("dead").contents.oldest_first()]
    assert [letter.body for letter in letters] == [body(number) for number in range(3)]
    assert it.disk.bodies == {}


def test_A5_a_message_to_many_non_durable_subscribers_is_written_to_disk_once():
    it = Evicting(100)
    spool = Policy("spool", PolicyDefinition.from_mapping({"policy": "flow_to_disk"}), "^amq.fanout$", "exchanges")  # type: ignore[arg-type]
    it.world.set_policy(spool)
    subscribers = [it.world.client().channel() for _ in range(5)]
    for number, subscriber in enumerate(subscribers):
        subscriber.declare(f"s{number}", exclusive=True)
        subscriber.call(1, commands.Queue.Bind(queue=f"s{number}", exchange="amq.fanout"), commands.Queue.BindOk)
    for number in range(50):
        it.client.publish(body(number), exchange="amq.fanout")
    it.turn()
    assert 43 <= len(it.disk.bodies) <= 50
    assert it.journal.memory <= 75, "what all of them have is in memory once"
    for number, subscriber in enumerate(subscribers):
        subscriber.consume(f"s{number}", no_ack=True)
    found: list[list[bytes]] = [[] for _ in subscribers]
    while any(queue.depth for queue in it.world.host.queues.values()):
        it.turn()
        for got, subscriber in zip(found, subscribers, strict=True):
            got += [content for _, content, _ in subscriber.deliveries_after_ok()]
    it.turn()
    assert found == [[body(number) for number in range(50)]] * 5
    assert it.disk.bodies == {}


def test_A2_flow_to_disk_can_be_switched_on_and_off_for_a_queue():
    it = Evicting(100)
    it.client.declare("q")
    it.client.publish_each(*map(body, range(20)))
    it.turn()
    assert all(it.resident())
    it.world.set_policy(Policy("p", PolicyDefinition.from_mapping({"policy": "flow_to_disk"})))
    it.turn()
    assert it.resident() == [True] * 7 + [False] * 13
    it.world.delete_policy("p")
    it.client.received()
    it.client.consume(no_ack=True)
    found = []
    while it.world.queue().depth:
        it.turn()
        found += [content for _, content, _ in it.client.deliveries_after_ok()]
    assert found == [body(number) for number in range(20)]


def test_A2_without_a_store_no_body_is_written_to_disk(world):
    words = "flow_to_disk: this broker has no message store"
    with pytest.raises(ChannelException, match=words):
        world.host.declare_queue("q", arguments=TO_DISK)
    with pytest.raises(ValueError, match=words):
        world.set_policy(Policy("p", PolicyDefinition.from_mapping({"policy": "flow_to_disk"})))
    with pytest.raises(ValueError, match="'p' has policy=flow_to_disk: set store too"):
        BrokerSettings(policies=(Policy("p", PolicyDefinition.from_mapping({"policy": "flow_to_disk"})),))
    assert world.host.queues == {}
    assert limits_of(TO_DISK).policy == "flow_to_disk"


@pytest.mark.parametrize("seed", range(rounds(30)))
def test_A2_bodies_evicted_to_disk_are_delivered_whole_and_in_order_at_any_speed_of_the_disk(seed):
    chance = random.Random(seed)
    it = Evicting(chance.choice((30, 200, 2000)), "q", "r")
    bind = commands.Queue.Bind(queue="q", exchange="amq.fanout")
    it.client.call(1, bind, commands.Queue.BindOk)
    bind = commands.Queue.Bind(queue="r", exchange="amq.fanout")
    it.client.call(1, bind, commands.Queue.BindOk)
    readers = {}
    for queue in ("q", "r"):
        reader = readers[queue] = it.world.client().channel()
        reader.call(1, commands.Basic.Qos(prefetch_count=chance.choice((0, 1, 7))), commands.Basic.QosOk)
    found: dict[str, list[bytes]] = {"q": [], "r": []}
    sent = 0
    is_consuming = False

    def read():
        for queue, reader in readers.items():
            for tag, content, again in reader.deliveries_after_ok():
                if chance.random() < 0.1 and not again:
                    reader.send(1, commands.Basic.Reject(tag, requeue=True))
                    continue
                found[queue].append(content)
                reader.send(1, commands.Basic.Ack(tag))

    for _ in range(300):
        if sent < 200 and chance.random() < 0.6:
            it.client.publish(body(sent, chance.choice((10, 30))), exchange="amq.fanout")
            sent += 1
        if sent > 100 and not is_consuming:
            is_consuming = True
            for queue, reader in readers.items():
                reader.consume(queue)
        it.world.host.relieve()
        if chance.random() < 0.5:
            it.disk.write()
        if chance.random() < 0.5:
            it.disk.read()
        if chance.random() < 0.5:
            read()
        it.client.received()
    while any(it.world.queue(queue).depth for queue in readers):
        it.turn()
        read()
    it.turn()
    assert it.disk.bodies == {}
    assert it.journal.memory == 0
    for got in found.values():
        assert sorted(map(int, got)) == list(range(sent))
