from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from pamqp import commands, header

from qflow_client.broker.core.entries import DropReason
from qflow_client.broker.core.properties import decode_properties

from ..tools import make_queue, message
from .test_queue import Taker

DLX = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}


def bodies(queue):
    return [entry.message.body for entry in queue.contents.oldest_first()]


def headers(queue):
    (entry,) = queue.contents.oldest_first()
    return decode_properties(entry.message.header).headers


@pytest.fixture(name="client")
def _client(world):
    world.epoch = 1_000_000.9
    return world.client().channel().with_queue("dead")


def test_a_rejected_message_is_dead_lettered_with_all_its_properties(world, client):
    client.declare(arguments=DLX)
    properties = commands.Basic.Properties(
        content_type="text/plain",
        headers={"mine": [1, {"a": None}], "x": 1.5},
        delivery_mode=2,
        expiration="60000",
        message_id="id",
        timestamp=datetime(2020, 1, 1, tzinfo=UTC),
        app_id="app",
    )
    client.publish(b"1", properties=properties)
    client.send(1, commands.Basic.Get(queue="q"), commands.Basic.Reject(1, requeue=False))
    assert (world.queue().depth, world.queue().contents.drops) == (0, {DropReason.REJECTED: 1})
    assert bodies(world.queue("dead")) == [b"1"]
    (entry,) = world.queue("dead").contents.oldest_first()
    found = decode_properties(entry.message.header)
    death = {
        "count": 1,
        "reason": "rejected",
        "queue": "q",
        "time": datetime.fromtimestamp(1_000_000, UTC),
        "exchange": "",
        "routing-keys": ["q"],
        "original-expiration": "60000",
    }
    first = {f"x-first-death-{what}": value for what, value in (("reason", "rejected"), ("queue", "q"))}
    assert found.headers == {
        "mine": [1, {"a": None}],
        "x": 1.5,
        "x-death": [death],
        **first,
        "x-first-death-exchange": "",
    }
    assert found.expiration is None
    for name in ("content_type", "delivery_mode", "message_id", "timestamp", "app_id"):
        assert getattr(found, name) == getattr(properties, name)
    assert entry.message.ttl is None
    assert (entry.message.target.exchange, entry.message.target.routing_key) == ("", "dead")


def test_a_channel_that_ends_requeues_all_unacked_messages_before_expired_messages_are_dead_lettered(world, client):
    client.declare(arguments={**DLX, "x-message-ttl": 1000})
    client.publish(b"expires")
    client.publish(b"stays", "dead")
    gone, heir = world.client().channel(), world.client().channel()
    for queue in ("q", "dead"):
        gone.send(1, commands.Basic.Get(queue=queue))
    heir.consume("dead")
    heir.received()
    world.now = 2.0
    gone.send(1, commands.Channel.Close(200, "", 0, 0))
    assert [body for _, body, _ in heir.deliveries()] == [b"stays", b"expires"]


def test_without_a_dead_letter_exchange_a_rejected_message_is_removed_and_counted(world, client):
    client.declare()
    client.publish()
    client.send(1, commands.Basic.Get(queue="q"), commands.Basic.Reject(1, requeue=False))
    assert (world.queue().contents.drops, world.queue("dead").depth) == ({DropReason.REJECTED: 1}, 0)


def test_purged_messages_and_messages_of_a_deleted_queue_are_not_dead_lettered(world, client):
    client.declare(arguments=DLX)
    client.publish()
    world.queue().purge()
    client.publish()
    world.host.delete_queue(world.queue())
    assert world.queue("dead").depth == 0


def test_an_acked_message_is_not_dead_lettered(world, client):
    client.declare(arguments=DLX)
    client.publish()
    client.send(1, commands.Basic.Get(queue="q"))
    client.send(1, commands.Basic.Ack(1))
    assert (world.queue("dead").depth, world.queue().contents.dropped) == (0, 0)


@pytest.mark.parametrize("policy", [{"x-max-length": 1}, {"qpid.max_count": 1, "qpid.policy_type": "ring"}])
def test_a_message_that_a_full_queue_drops_to_make_room_is_dead_lettered(world, client, policy):
    client.declare(arguments={**DLX, **policy})
    client.publish_each(b"1", b"2")
    assert (bodies(world.queue()), bodies(world.queue("dead"))) == ([b"2"], [b"1"])
    assert headers(world.queue("dead"))["x-first-death-reason"] == "maxlen"


def test_a_dead_letter_that_overfills_a_queue_is_enqueued_and_flows_no_channel(world, client):
    client.declare("small", arguments={"qpid.flow_stop_count": 1, "qpid.flow_resume_count": 1})
    client.declare(arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "small", "x-max-length": 1})
    client.publish(times=3)
    assert client.received() == []
    assert (world.queue("small").depth, world.queue("small").flows.is_on) == (2, True)
    client.consume("small")
    assert client.names()[1:] == ["Basic.Deliver", "ContentHeader", "ContentBody"] * 2


def test_a_full_queue_drops_and_counts_the_dead_letters_for_which_it_has_no_room(world, client):
    client.declare("small", arguments={"qpid.max_count": 1, "qpid.flow_stop_count": 0})
    client.bind_to_fanout("small", "dead")
    client.declare(arguments={"x-dead-letter-exchange": "amq.fanout", "x-max-length": 1})
    client.publish_each(b"1", b"2", b"3")
    assert (bodies(world.queue("small")), world.queue("small").contents.drops) == ([b"1"], {DropReason.REFUSED: 1})
    assert bodies(world.queue("dead")) == [b"1", b"2"]


def test_an_internal_exchange_accepts_dead_letters(world, client):
    declare = commands.Exchange.Declare(exchange="inner", exchange_type="fanout", internal=True)
    client.call(1, declare, commands.Exchange.DeclareOk)
    client.call(1, commands.Queue.Bind(queue="dead", exchange="inner"), commands.Queue.BindOk)
    client.declare(arguments={"x-dead-letter-exchange": "inner", "x-max-length": 0})
    client.publish()
    assert world.queue("dead").depth == 1


def test_dead_letters_can_be_routed_by_a_headers_exchange(world, client):
    bind = commands.Queue.Bind(queue="dead", exchange="amq.headers", arguments={"x-first-death-reason": "maxlen"})
    bind.arguments["x-match"] = "all-with-x"
    client.call(1, bind, commands.Queue.BindOk)
    client.declare(arguments={"x-dead-letter-exchange": "amq.headers", "x-max-length": 0})
    client.publish()
    assert world.queue("dead").depth == 1


def test_a_message_passes_a_chain_of_300_dead_letter_queues_without_recursion(world, client):
    for number in range(300):
        to = f"q{number + 1}" if number < 299 else "dead"
        arguments = {"x-max-length": 0, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": to}
        world.host.declare_queue(f"q{number}", arguments=arguments)
    client.publish(routing_key="q0")
    assert bodies(world.queue("dead")) == [b"x"]
    assert len(headers(world.queue("dead"))["x-death"]) == 300


def test_a_message_passes_a_dead_letter_cycle_as_often_as_consumers_reject_it(world, client):
    client.declare("a", arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "b"})
    client.declare("b", arguments={"x-message-ttl": 10, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "a"})
    client.publish(routing_key="a")
    for number in range(1, 4):
        client.send(1, commands.Basic.Get(queue="a"), commands.Basic.Reject(number, requeue=False))
        world.tick(world.now + 0.01)
    assert [(death["reason"], death["count"]) for death in headers(world.queue("a"))["x-death"]] == [
        ("expired", 3),
        ("rejected", 3),
    ]


def test_a_dead_letter_cycle_in_which_no_consumer_rejects_the_message_ends(world, client):
    client.declare("a", arguments={"x-message-ttl": 10, "x-dead-letter-exchange": ""})
    client.publish(routing_key="a")
    world.tick(0.01)
    drops = {DropReason.EXPIRED: 1, DropReason.CYCLE: 1}
    assert (world.queue("a").depth, world.queue("a").contents.drops) == (0, drops)


def make_web(world, client, count, **arguments):
    """Declare queues, each of which dead-letters to all of them."""
    names = [f"q{number}" for number in range(count)]
    for name in names:
        client.declare(name, arguments={"x-dead-letter-exchange": "amq.fanout", **arguments})
        client.call(1, commands.Queue.Bind(queue=name, exchange="amq.fanout"), commands.Queue.BindOk)
    return [world.queue(name) for name in names]


@pytest.mark.parametrize("count", [3, 8, 40])
def test_E7_the_number_of_dead_letters_among_queues_that_dead_letter_to_each_other_is_bounded(world, client, count):
    queues = make_web(world, client, count, **{"x-max-length": 0})
    client.publish(routing_key="q0")
    world.tick(world.now)
    assert [queue.depth for queue in queues] == [0] * count
    assert sum(queue.contents.published for queue in queues) <= count * count
    assert all(queue.contents.drops[DropReason.MAXLEN] == queue.contents.published for queue in queues)
    # Each queue sent one dead letter to each queue. The letter was enqueued, or dropped and counted.
    assert (
        sum(queue.contents.published + queue.contents.drops[DropReason.CYCLE] for queue in queues) == 1 + count * count
    )


def test_E7_the_dead_letters_of_one_message_in_several_queues_are_bounded_together(world, client):
    count = 20
    queues = make_web(world, client, count, **{"x-max-length": 0})
    client.publish(exchange="amq.fanout")
    assert sum(queue.contents.published for queue in queues) <= count + count * count


def test_E7_a_message_that_expires_in_queues_that_dead_letter_to_each_other_has_a_bounded_number_of_copies(
    world, client
):
    count = 12
    queues = make_web(world, client, count, **{"x-message-ttl": 1})
    client.publish(routing_key="q0")
    while any(queue.depth for queue in queues):
        world.tick(world.now + 0.001)
    assert sum(queue.contents.published for queue in queues) <= count * count


def test_E7_a_message_rejected_by_a_consumer_may_pass_again_through_queues_that_dead_letter_to_each_other(
    world, client
):
    queues = make_web(world, client, 3, **{"x-max-length": 0})
    client.declare("work", arguments={"x-dead-letter-exchange": "amq.fanout"})
    client.bind_to_fanout("work")
    client.publish(routing_key="q0")
    before = sum(queue.contents.published for queue in queues)
    copies = world.queue("work").depth
    client.send(1, commands.Basic.Get(queue="work"), commands.Basic.Reject(1, requeue=False))
    assert sum(queue.contents.published for queue in queues) > before
    assert world.queue("work").depth > copies


def test_copies_of_a_message_with_different_routing_keys_all_pass_through_a_shared_queue(world, client):
    """Two services share a queue that delays messages which they could not handle. Each has its own archive."""
    for name in ("billing", "shipping"):
        client.declare(
            name,
            arguments={
                "x-message-ttl": 1,
                "x-dead-letter-exchange": "amq.direct",
                "x-dead-letter-routing-key": f"{name}.late",
            },
        )
        client.call(1, commands.Queue.Bind(queue=name, exchange="amq.fanout"), commands.Queue.BindOk)
    client.declare("delay", arguments={"x-message-ttl": 1, "x-dead-letter-exchange": "amq.topic"})
    for name in ("billing", "shipping"):
        bind = commands.Queue.Bind(queue="delay", exchange="amq.direct", routing_key=f"{name}.late")
        client.call(1, bind, commands.Queue.BindOk)
        client.declare(f"{name}-archive")
        bind = commands.Queue.Bind(queue=f"{name}-archive", exchange="amq.topic", routing_key=f"{name}.#")
        client.call(1, bind, commands.Queue.BindOk)
    client.publish(exchange="amq.fanout")
    for _ in range(10):
        world.tick(world.now + 0.001)
    assert [bodies(world.queue(f"{name}-archive")) for name in ("billing", "shipping")] == [[b"x"]] * 2


def test_equal_copies_of_a_message_that_expire_in_one_queue_are_dead_lettered_only_once(world, client, caplog):
    """Two services share an archive, and a queue that delays messages which they could not handle."""
    late = {"x-message-ttl": 1, "x-dead-letter-exchange": ""}
    for name in ("billing", "shipping"):
        client.declare(name, arguments=late | {"x-dead-letter-routing-key": "delay"})
        client.call(1, commands.Queue.Bind(queue=name, exchange="amq.fanout"), commands.Queue.BindOk)
    client.declare("delay", arguments=late | {"x-dead-letter-routing-key": "archive"})
    client.declare("archive")
    for published in (1, 2):
        client.publish(exchange="amq.fanout")
        for _ in range(10):
            world.tick(world.now + 0.001)
        delay = world.queue("delay")
        assert len(bodies(world.queue("archive"))) == published
        assert delay.contents.drops == {DropReason.EXPIRED: 2 * published, DropReason.COPY: published}
        assert delay.contents.dropped == 2 * published
    assert [record.args for record in caplog.records] == [("delay",)]


def test_a_message_that_is_dead_lettered_on_two_paths_to_a_queue_arrives_there_twice(world, client):
    for name, to in (("a", "amq.fanout"), ("b", ""), ("c", "")):
        arguments = {"x-max-length": 0, "x-dead-letter-exchange": to}
        client.declare(name, arguments=arguments | ({} if to else {"x-dead-letter-routing-key": "dead"}))
    client.bind_to_fanout("b", "c")
    client.publish(routing_key="a")
    assert bodies(world.queue("dead")) == [b"x"] * 2


def test_a_cycle_of_dead_letters_is_logged_once_for_each_queue(world, client, caplog):
    make_web(world, client, 2, **{"x-max-length": 0})
    client.publish(routing_key="q0", times=3)
    assert [record.args[0] for record in caplog.records] == ["q0", "q1"]
    assert "its message died here before" in caplog.text


@pytest.mark.parametrize(
    "forged",
    [1, "x", [], [1], [{"queue": "q", "reason": "rejected", "count": 2**63 - 1}], [{"count": float("nan")}]],
    ids=repr,
)
def test_a_malformed_x_death_header_from_a_client_does_not_prevent_dead_lettering(world, client, forged):
    client.declare(arguments=DLX)
    client.publish(properties=commands.Basic.Properties(headers={"x-death": forged}))
    client.send(1, commands.Basic.Get(queue="q"), commands.Basic.Reject(1, requeue=False))
    deaths = headers(world.queue("dead"))["x-death"]
    assert deaths[0]["queue"] == "q"
    assert deaths[0]["count"] == 1


FULL = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "b", "x-max-length": 1}
PUBLISHES = {
    "publish": [commands.Basic.Publish(exchange="amq.fanout"), header.ContentHeader(body_size=0)],
    "commit": [
        commands.Tx.Select(),
        commands.Basic.Publish(exchange="amq.fanout"),
        header.ContentHeader(body_size=0),
        commands.Tx.Commit(),
    ],
}


@pytest.mark.parametrize("publish", [*PUBLISHES, "from inside", "after a wait"])
def test_a_dead_letter_does_not_use_room_that_was_reserved_for_a_published_message(world, client, publish):
    # "a" is full and drops its message to make room. "b" has room for one message and accepts the new one.
    client.declare("a", arguments=FULL)
    client.declare("b", arguments={"qpid.max_count": 1, "x-qflow-policy": "wait"})
    client.publish(b"1", routing_key="a")
    if publish == "after a wait":
        client.publish(b"2", routing_key="b")
    client.bind_to_fanout("a", "b")
    if publish == "from inside":
        world.host.publish("amq.fanout", "", b"")
    else:
        client.send(1, *PUBLISHES.get(publish, PUBLISHES["publish"]))
    if publish == "after a wait":
        world.queue("b").take(no_ack=True)
        world.host.timers.tick(world.now)
    assert (bodies(world.queue("a")), bodies(world.queue("b"))) == ([b""], [b""])
    assert world.queue("b").contents.drops == {DropReason.REFUSED: 1}


def test_a_full_queue_enqueues_the_new_message_before_it_dead_letters_the_message_that_it_drops(world, client):
    client.declare("b", arguments={"x-max-length": 1})
    client.declare("a", arguments=FULL)
    client.bind_to_fanout("a", "b")
    for body in (b"1", b"2"):
        client.publish(body, exchange="amq.fanout")
    assert (bodies(world.queue("a")), bodies(world.queue("b"))) == ([b"2"], [b"1"])


def test_a_full_queue_with_reject_publish_dlx_dead_letters_the_messages_that_it_refuses(world, client):
    client.declare(arguments={**DLX, "x-max-length": 1, "x-overflow": "reject-publish-dlx"})
    client.call(1, commands.Confirm.Select(), commands.Confirm.SelectOk)
    client.publish_each(b"1", b"2")
    assert sorted(client.names()) == ["Basic.Ack", "Basic.Nack"]
    assert (bodies(world.queue()), bodies(world.queue("dead"))) == ([b"1"], [b"2"])


def test_a_full_queue_with_reject_publish_counts_the_messages_that_it_refuses_even_without_confirms(world, client):
    client.declare(arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    client.publish_each(b"1", b"2")
    assert client.received() == []
    assert (bodies(world.queue()), world.queue().contents.drops) == ([b"1"], {DropReason.REFUSED: 1})


@pytest.mark.parametrize(("maximum", "left"), [(0, []), (1, [3]), (2, [2, 3]), (3, [1, 2, 3]), (4, [1, 2, 3])])
def test_x_max_length_limits_the_number_of_ready_messages(maximum, left):
    queue = make_queue({"x-max-length": maximum})
    for size in (1, 2, 3):
        queue.enqueue(message(size))
        queue.after_publish()
    assert [entry.message.size for entry in queue.contents.oldest_first()] == left


@pytest.mark.parametrize(("maximum", "left"), [(2, []), (3, [3]), (4, [3]), (5, [2, 3]), (6, [1, 2, 3])])
def test_x_max_length_bytes_limits_the_bytes_of_ready_messages(maximum, left):
    queue = make_queue({"x-max-length-bytes": maximum})
    for size in (1, 2, 3):
        queue.enqueue(message(size))
        queue.after_publish()
    assert [entry.message.size for entry in queue.contents.oldest_first()] == left


def test_x_max_length_never_drops_an_unacked_message():
    queue = make_queue({"x-max-length": 1, "x-max-length-bytes": 3})
    taker = Taker()
    queue.dispatcher.add(taker, exclusive=False)
    for _ in range(3):
        queue.enqueue(message(3))
        queue.after_publish()
    assert (queue.depth, queue.contents.dropped, queue.contents.ready_size) == (3, 0, 0)
    taker.can_take = False
    for _ in range(2):
        queue.enqueue(message(2))
        queue.after_publish()
    assert (queue.depth, queue.contents.dropped, queue.contents.ready_size) == (4, 1, 2)
    queue.dispatcher.requeue(taker.entries)
    assert (queue.contents.ready_count, queue.contents.ready_size) == (4, 11)
    queue.enqueue(message(1))
    queue.after_publish()
    assert [entry.message.size for entry in queue.contents.oldest_first()] == [1]


def test_the_single_active_consumer_is_the_oldest_remaining_consumer():
    queue = make_queue({"x-single-active-consumer": True})
    first, second, third = (Taker() for _ in range(3))
    for taker in (first, second, third):
        queue.dispatcher.add(taker, exclusive=False)

    def publish():
        queue.enqueue(message())
        queue.after_publish()

    publish()
    first.can_take = False
    publish()
    queue.remove_consumer(second)
    queue.dispatcher.dispatch()
    assert [len(taker.entries) for taker in (first, second, third)] == [1, 0, 0]
    queue.remove_consumer(first)
    queue.dispatcher.dispatch()
    assert [len(taker.entries) for taker in (first, second, third)] == [1, 0, 1]


def raw_counts(queue):
    """Return the bytes of each count in the header, beginning with the type of the value."""
    (entry,) = queue.contents.oldest_first()
    return [piece[:9] for piece in entry.message.header.split(b"\x05count")[1:]]


def test_x_death_counts_are_64_bit_integers_as_on_rabbitmq(world, client):
    client.declare(arguments=DLX)
    client.declare("back", arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "q"})
    client.publish(b"1", routing_key="back")
    for round_ in (1, 2, 3):
        client.send(1, commands.Basic.Get(queue="back"), commands.Basic.Reject(2 * round_ - 1, requeue=False))
        client.send(1, commands.Basic.Get(queue="q"))
        world.queue("q").options = world.queue("back").options
        client.send(1, commands.Basic.Reject(2 * round_, requeue=False))
        if round_ < 3:
            (entry,) = world.queue("q").contents.oldest_first()
            client.publish(b"1", routing_key="back", properties=decode_properties(entry.message.header))
            client.send(1, commands.Queue.Purge(queue="q"))
    counts = raw_counts(world.queue("q"))
    assert counts == [b"l" + (3).to_bytes(8, "big"), b"l" + (3).to_bytes(8, "big")]
    assert [death["count"] for death in headers(world.queue("q"))["x-death"]] == [3, 3]


@pytest.mark.parametrize("count", [2**63 - 1, -(2**63), -1, 0, True, "1", None])
def test_an_invalid_count_in_an_x_death_header_from_a_client_restarts_at_1(world, client, count):
    client.declare(arguments=DLX)
    forged: Any = [{"count": count, "queue": "q", "reason": "rejected"}]
    client.publish(b"1", properties=commands.Basic.Properties(headers={"x-death": forged}))
    client.send(1, commands.Basic.Get(queue="q"), commands.Basic.Reject(1, requeue=False))
    assert raw_counts(world.queue("dead")) == [b"l" + (1).to_bytes(8, "big")]


@pytest.mark.parametrize("how", ["nack", "recover", "close"])
def test_a_requeue_into_a_queue_at_x_max_length_drops_the_oldest_messages(world, client, how):
    client.declare(arguments=DLX | {"x-max-length": 2})
    for number in b"1234":
        client.publish(bytes([number]))
        client.send(1, commands.Basic.Get(queue="q"))
    client.publish(b"5")
    assert world.queue().depth == 5
    if how == "nack":
        client.send(1, commands.Basic.Nack(0, multiple=True, requeue=True))
    elif how == "recover":
        client.send(1, commands.Basic.Recover(requeue=True))
    else:
        client.send(1, commands.Channel.Close(200, "", 0, 0))
    assert bodies(world.queue()) == [b"4", b"5"]
    assert bodies(world.queue("dead")) == [b"1", b"2", b"3"]
    assert world.queue().contents.drops == {DropReason.MAXLEN: 3}


def test_requeued_messages_beyond_x_max_length_are_dropped_before_any_is_delivered_as_on_rabbitmq(world, client):
    client.declare(arguments={"x-max-length": 1})
    for body in (b"1", b"2", b"3"):
        client.publish(body)
        client.send(1, commands.Basic.Get(queue="q"))
    other = world.client().channel()
    other.consume()
    client.send(1, commands.Basic.Nack(0, multiple=True, requeue=True))
    assert [body for _, body, _ in other.deliveries_after_ok()] == [b"3"]


def test_a_requeue_may_exceed_the_maximum_of_a_reject_publish_queue_as_on_rabbitmq(world, client):
    client.declare(arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    for body in (b"1", b"2"):
        client.publish(body)
        client.send(1, commands.Basic.Get(queue="q"))
    client.publish(b"3")
    client.send(1, commands.Basic.Nack(0, multiple=True, requeue=True))
    assert bodies(world.queue()) == [b"1", b"2", b"3"]
