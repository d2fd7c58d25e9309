from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands
from pamqp.commands import Basic, Exchange, Queue

from qflow_client.broker.core import exchange
from qflow_client.broker.core.errors import ChannelException, ReplyCode
from qflow_client.broker.core.exchange import Binding, TopicExchange
from qflow_client.broker.core.routing import needs_headers

CLOSE = commands.Connection.Close
CHANNEL_CLOSE = commands.Channel.Close


@pytest.mark.parametrize(
    ("pattern", "key", "matches"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("*", "", False),
        ("#", "", True),
        ("#", "a.b.c", True),
        ("a.#", "a", True),
        ("a.#", "a.b.c", True),
        ("#.c", "a.b.c", True),
        ("#.c", "c", True),
        ("a.#.c", "a.c", True),
        ("a.#.c", "a.b.b.c", True),
        ("a.#.c", "a.b", False),
        ("*.#", "", False),
        ("#.*.#", "a", True),
        ("", "", True),
        ("", "a", False),
        ("a..b", "a..b", True),
        ("a.*.b", "a..b", True),
    ],
)
def test_a_topic_exchange_routes_messages_by_their_patterns(world, pattern, key, matches):
    client = world.client().channel().with_queue()
    client.call(1, Queue.Bind(queue="q", exchange="amq.topic", routing_key=pattern or "x"), Queue.BindOk)
    if not pattern:
        world.host.topology.unbind(world.queue(), "amq.topic", "x", {})
        world.host.topology.bind(world.queue(), "amq.topic", "", {})
    client.publish(routing_key=key, exchange="amq.topic")
    assert world.queue().depth == matches


def slowly(pattern, words):
    if not pattern:
        return not words
    if pattern[0] == "#":
        return slowly(pattern[1:], words) or (bool(words) and slowly(pattern, words[1:]))
    return bool(words) and pattern[0] in ("*", words[0]) and slowly(pattern[1:], words[1:])


def split(key):
    return key.split(".") if key else []


def branches(branch):
    return 1 + sum(map(branches, branch.next.values()))


# Destinations of bindings.
END = TopicExchange("end")
PATTERNS = st.lists(st.sampled_from(["a", "b", "*", "#"]), max_size=6).map(".".join)


@given(
    st.lists(PATTERNS, min_size=1, max_size=8, unique=True),
    st.lists(st.lists(st.sampled_from(["a", "b"]), max_size=6).map(".".join), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_a_topic_exchange_finds_the_same_bindings_in_the_same_order_as_a_simple_reference(patterns, keys, random):
    topics = TopicExchange("topics")
    bound = [Binding(topics, END, pattern, {}) for pattern in patterns]
    for binding in bound:
        topics.bind(binding)
    leaving = random.sample(bound, len(bound))
    while bound:
        for key in keys:
            expected = [
                each
                for each in bound
                if slowly(tuple(filter(None, each.routing_key.split("."))), key.split(".") if key else ())
            ]
            assert topics.matching(key, {}) == expected
        # The tree has a branch for each difference between keys, and the root.
        assert branches(topics._root) <= 2 * len(bound) + 1
        gone = leaving.pop()
        topics.unbind(gone)
        bound.remove(gone)
    assert topics._root.next == {}
    assert topics.matching(keys[0], {}) == []


def test_E7_a_topic_exchange_does_not_look_at_bindings_that_cannot_match(monkeypatch):
    topics = TopicExchange("topics")
    for number in range(20_000):
        topics.bind(Binding(topics, END, f"a.{number}.*", {}))
    places = []
    reach = exchange._reach

    def count(*place):
        places.append(place)
        reach(*place)

    monkeypatch.setattr(exchange, "_reach", count)
    assert topics.matching("b.1.c", {}) == []
    assert [each.routing_key for each in topics.matching("a.777.c", {})] == ["a.777.*"]
    assert len(places) < 10
    # Routing by headers is found out from bound exchanges alone, without a look at these bindings.
    del topics.bindings
    assert not needs_headers(topics, {})


@pytest.mark.parametrize(
    ("arguments", "headers", "matches"),
    [
        ({"x-match": "all", "a": 1, "b": "x"}, {"a": 1, "b": "x", "c": 2}, True),
        ({"x-match": "all", "a": 1, "b": "x"}, {"a": 1}, False),
        ({"x-match": "any", "a": 1, "b": "x"}, {"a": 1}, True),
        ({"x-match": "any", "a": 1, "b": "x"}, {"a": 2, "b": "y"}, False),
        ({"x-match": "any", "a": 1}, None, False),
        ({"a": 1}, {"a": 1.0}, False),
        ({"a": 1.0}, {"a": 1.0}, True),
        ({"a": 1}, {"a": Decimal(1)}, False),
        ({"a": 1}, {"a": True}, False),
        ({"a": False}, {"a": 0}, False),
        ({"a": False}, {"a": False}, True),
        ({"a": {"b": [1]}}, {"a": {"b": [True]}}, False),
        ({"a": {"b": [True]}}, {"a": {"b": [True]}}, True),
        ({"a": 1}, {"a": 1}, True),
        ({"a": None}, {"a": "whatever"}, True),
        ({"a": None}, {"b": 1}, False),
        ({}, None, True),
        ({"x-a": 1}, None, True),
        ({"x-match": "all-with-x", "x-a": 1}, None, False),
        ({"x-match": "any-with-x", "x-a": 1}, {"x-a": 1}, True),
    ],
)
@pytest.mark.parametrize("exchange", ["amq.headers", "amq.match"])
def test_a_headers_exchange_routes_messages_by_their_headers(world, exchange, arguments, headers, matches):
    client = world.client().channel().with_queue()
    client.call(1, Queue.Bind(queue="q", exchange=exchange, arguments=arguments), Queue.BindOk)
    client.publish(exchange=exchange, properties=Basic.Properties(headers=headers))
    assert world.queue().depth == matches


def test_binding_with_an_invalid_x_match_is_refused_with_406(world):
    client = world.client().channel().with_queue()
    client.send(1, Queue.Bind(queue="q", exchange="amq.headers", arguments={"x-match": "some"}))
    assert client.only(CHANNEL_CLOSE).reply_code == 406


def test_a_queue_gets_one_copy_of_a_message_even_if_several_bindings_match(world):
    client = world.client().channel().with_queue()
    for key in ("#", "a", "*"):
        client.call(1, Queue.Bind(queue="q", exchange="amq.topic", routing_key=key), Queue.BindOk)
    client.publish(routing_key="a", exchange="amq.topic")
    assert world.queue().depth == 1


def test_exchanges_can_be_bound_to_exchanges_even_in_a_cycle(world):
    client = world.client().channel().with_queue()
    for name in ("one", "two"):
        client.call(1, Exchange.Declare(exchange=name, exchange_type="fanout"), Exchange.DeclareOk)
    client.call(1, Exchange.Bind(destination="two", source="one"), Exchange.BindOk)
    client.call(1, Exchange.Bind(destination="one", source="two"), Exchange.BindOk)
    client.call(1, Queue.Bind(queue="q", exchange="two"), Queue.BindOk)
    client.publish(exchange="one")
    assert world.queue().depth == 1
    client.call(1, Exchange.Unbind(destination="two", source="one"), Exchange.UnbindOk)
    client.publish(exchange="one")
    assert world.queue().depth == 1


def test_a_headers_exchange_that_is_bound_to_another_exchange_routes_by_the_headers_of_the_message(world):
    client = world.client().channel().with_queue()
    client.call(1, Exchange.Bind(destination="amq.headers", source="amq.fanout"), Exchange.BindOk)
    client.call(1, Queue.Bind(queue="q", exchange="amq.headers", arguments={"a": 1}), Queue.BindOk)
    for value in (1, 2):
        client.publish(exchange="amq.fanout", properties=Basic.Properties(headers={"a": value}))
    assert world.queue().depth == 1


def test_declaring_or_deleting_a_queue_applies_to_the_next_published_message(world):
    client, other = world.client().channel(), world.client().channel()
    client.publish(mandatory=True)
    assert client.names() == ["Basic.Return", "ContentHeader", "ContentBody"]
    client.declare()
    client.publish(mandatory=True)
    assert world.queue().depth == 1
    other.call(1, Queue.Delete(queue="q"), Queue.DeleteOk)
    client.publish(mandatory=True)
    assert client.names() == ["Basic.Return", "ContentHeader", "ContentBody"]
    client.declare(arguments={"qpid.flow_stop_count": 1})
    client.publish(times=2)
    assert client.only(commands.Channel.Flow).active is False


def test_declare_ok_contains_the_depth_and_the_number_of_consumers(world):
    client = world.client().channel().with_queue()
    client.publish()
    assert (client.declare().message_count, client.declare(passive=True).consumer_count) == (1, 0)
    client.consume()
    client.received()
    ok = client.declare()
    assert (ok.queue, ok.message_count, ok.consumer_count) == ("q", 0, 1)


def test_a_queue_declared_without_a_name_gets_a_generated_name_and_becomes_the_last_queue_of_the_channel(world):
    client = world.client().channel()
    name = client.declare("").queue
    assert name.startswith("amq.gen-")
    client.call(1, Queue.Bind(queue="", exchange="amq.direct", routing_key=""), Queue.BindOk)
    client.publish(exchange="amq.direct", routing_key=name)
    client.consume("")
    assert "Basic.Deliver" in client.names()
    client.call(1, Queue.Unbind(queue="", exchange="amq.direct", routing_key=""), Queue.UnbindOk)
    client.publish(exchange="amq.direct", routing_key=name)
    assert client.received() == []
    assert client.declare(name, passive=True).queue == name


@pytest.mark.parametrize(
    ("method", "code"),
    [
        (Queue.Declare(queue="nowhere", passive=True), 404),
        (Queue.Bind(queue="nowhere", exchange="amq.direct"), 404),
        (Queue.Bind(queue="q", exchange="nowhere"), 404),
        (Queue.Unbind(queue="", exchange="amq.direct"), 404),
        (Queue.Unbind(queue="nowhere", exchange=""), 403),
        (Queue.Purge(queue="nowhere"), 404),
        (Basic.Get(queue="nowhere"), 404),
        (Basic.Consume(queue="nowhere"), 404),
        (Exchange.Declare(exchange="nowhere", passive=True), 404),
        (Exchange.Bind(destination="nowhere", source="amq.direct"), 404),
        (Exchange.Bind(destination="amq.direct", source="nowhere"), 404),
        (Exchange.Bind(destination="", source="amq.direct"), 403),
        (Exchange.Unbind(destination="", source="amq.direct"), 403),
        (Queue.Declare(queue="amq.mine"), 403),
        (Queue.Bind(queue="q", exchange=""), 403),
        (Exchange.Declare(exchange="amq.mine"), 403),
        (Exchange.Declare(exchange=""), 403),
        (Exchange.Delete(exchange="amq.direct"), 403),
        (Exchange.Delete(exchange=""), 403),
        (Queue.Declare(queue="q", durable=True), 406),
        (Queue.Declare(queue="q", exclusive=True), 406),
        (Queue.Declare(queue="q", auto_delete=True), 406),
        (Queue.Declare(queue="q", arguments={"a": 1}), 406),
        (Queue.Declare(queue="r", arguments={"qpid.flow_stop_count": "many"}), 406),
        (Exchange.Declare(exchange="amq.direct", exchange_type="topic", durable=True), 406),
        (Exchange.Declare(exchange="amq.direct", exchange_type="direct"), 406),
        (Queue.Delete(queue="q", if_unused=True), 406),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else value,
)
def test_an_invalid_declaration_closes_the_channel_with_the_reply_code_of_the_standard(world, method, code):
    other, client = world.client().channel().with_queue(), world.client().channel()
    other.publish()
    other.consume()
    client.send(1, method)
    close = client.only(CHANNEL_CLOSE)
    assert close.reply_code == code, close.reply_text
    assert (close.class_id, close.method_id) == divmod(method.index, 1 << 16)


def test_C2_a_stop_threshold_below_the_resume_threshold_is_refused_with_406_and_the_error_shows_both(world):
    client = world.client().channel()
    client.send(1, Queue.Declare(queue="q", arguments={"qpid.flow_stop_count": 5, "qpid.flow_resume_count": 6}))
    client.check_close(CHANNEL_CLOSE, 406, "qpid.flow_stop_count=5", "qpid.flow_resume_count=6")


def test_an_unknown_exchange_type_closes_the_connection_with_503(world):
    client = world.client().channel()
    client.send(1, Exchange.Declare(exchange="e", exchange_type="x-random"))
    assert client.only(CLOSE, 0).reply_code == 503


def test_an_internal_exchange_accepts_messages_only_from_exchanges(world):
    client = world.client().channel().with_queue()
    declare = Exchange.Declare(exchange="e", exchange_type="fanout", internal=True)
    client.call(1, declare, Exchange.DeclareOk)
    client.call(1, Exchange.Bind(destination="e", source="amq.fanout"), Exchange.BindOk)
    client.call(1, Queue.Bind(queue="q", exchange="e"), Queue.BindOk)
    client.publish(exchange="amq.fanout")
    assert world.queue().depth == 1
    client.publish(exchange="e")
    assert client.only(CHANNEL_CLOSE).reply_code == 403


def test_an_exclusive_queue_belongs_to_its_connection_and_ends_with_it(world):
    client, other = world.client().channel().with_queue(exclusive=True), world.client().channel()
    client.declare(exclusive=True)
    for method in (Queue.Declare(queue="q", exclusive=True), Basic.Consume(queue="q"), Queue.Purge(queue="q")):
        other.send(1, method)
        assert other.only(CHANNEL_CLOSE).reply_code == 405
        other.send(1, commands.Channel.CloseOk())
        other.channel()
    other.publish()
    assert world.queue().depth == 1
    client.session.end()
    assert "q" not in world.host.queues


def test_an_auto_delete_queue_is_deleted_with_its_last_consumer(world):
    client, other = world.client().channel().with_queue(auto_delete=True), world.client().channel()
    client.consume()
    other.consume()
    client.send(1, Basic.Cancel("c"))
    assert "q" in world.host.queues
    other.session.end()
    assert "q" not in world.host.queues


def test_an_auto_delete_exchange_is_deleted_with_its_last_binding(world):
    client = world.client().channel()
    declare = Exchange.Declare(exchange="e", exchange_type="fanout", auto_delete=True)
    client.call(1, declare, Exchange.DeclareOk)
    client.declare()
    client.call(1, Queue.Bind(queue="q", exchange="e"), Queue.BindOk)
    client.call(1, Queue.Delete(queue="q"), Queue.DeleteOk)
    assert "e" not in world.host.topology.exchanges


def test_exchange_delete_with_if_unused_does_not_delete_an_exchange_that_has_bindings(world):
    client = world.client().channel()
    client.call(1, Exchange.Declare(exchange="e", exchange_type="fanout"), Exchange.DeclareOk)
    client.declare()
    client.call(1, Queue.Bind(queue="q", exchange="e"), Queue.BindOk)
    client.send(1, Exchange.Delete(exchange="e", if_unused=True))
    assert client.only(CHANNEL_CLOSE).reply_code == 406
    client.send(1, commands.Channel.CloseOk())
    client.channel()
    client.call(1, Exchange.Delete(exchange="e"), Exchange.DeleteOk)
    client.publish(exchange="e")
    assert client.only(CHANNEL_CLOSE).reply_code == 404


def test_deleting_a_queue_or_exchange_that_does_not_exist_is_not_an_error(world):
    client = world.client().channel()
    assert client.call(1, Queue.Delete(queue="nowhere"), Queue.DeleteOk).message_count == 0
    client.call(1, Exchange.Delete(exchange="nowhere"), Exchange.DeleteOk)


@pytest.mark.parametrize("queue", ["q", "nowhere"])
@pytest.mark.parametrize("exchange", ["amq.direct", "nowhere"])
def test_E11_removing_a_binding_that_a_queue_does_not_have_succeeds_as_on_rabbitmq(world, queue, exchange):
    client = world.client().channel().with_queue()
    client.call(1, Queue.Unbind(queue=queue, exchange=exchange, routing_key="k"), Queue.UnbindOk)


@pytest.mark.parametrize("source", ["amq.fanout", "nowhere"])
@pytest.mark.parametrize("destination", ["amq.direct", "nowhere"])
def test_E11_removing_a_binding_that_an_exchange_does_not_have_succeeds_as_on_rabbitmq(world, source, destination):
    client = world.client().channel()
    client.call(1, Exchange.Unbind(source=source, destination=destination, routing_key="k"), Exchange.UnbindOk)


def test_E11_only_the_owner_of_an_exclusive_queue_can_unbind_it(world):
    client, other = world.client().channel().with_queue(exclusive=True), world.client().channel()
    unbind = Queue.Unbind(queue="q", exchange="amq.direct", routing_key="k")
    other.call(1, unbind, Queue.UnbindOk)
    client.call(1, Queue.Bind(queue="q", exchange="amq.direct", routing_key="k"), Queue.BindOk)
    other.send(1, unbind)
    assert other.only(CHANNEL_CLOSE).reply_code == 405
    client.call(1, unbind, Queue.UnbindOk)


def test_E11_queue_delete_with_if_empty_checks_only_ready_messages_as_on_rabbitmq(world):
    client = world.client().channel().with_queue()
    client.publish(times=2)
    client.send(1, Basic.Get(queue="q"))
    client.received()
    delete = Queue.Delete(queue="q", if_empty=True)
    client.send(1, delete)
    assert "has 1 ready messages" in client.only(CHANNEL_CLOSE).reply_text
    client.send(1, commands.Channel.CloseOk())
    client.channel()
    # Both messages of the closed channel were requeued.
    for _ in range(2):
        client.send(1, Basic.Get(queue="q"))
    client.received()
    client.call(1, delete, Queue.DeleteOk)


@pytest.mark.parametrize("nowait", [False, True])
def test_E11_delete_ok_comes_before_the_cancel_of_the_consumers_as_on_rabbitmq(world, nowait):
    client = world.client().channel().with_queue()
    client.publish(times=2)
    client.send(1, Basic.Qos(prefetch_count=1))
    for tag in ("a", "b"):
        client.consume(tag=tag)
    client.received()
    client.publish()
    client.send(1, Queue.Delete(queue="q", nowait=nowait))
    received = [frame for _, frame in client.received()]
    if not nowait:
        assert received.pop(0).message_count == 1
    assert [(frame.name, frame.consumer_tag) for frame in received] == [("Basic.Cancel", "a"), ("Basic.Cancel", "b")]


def test_a_method_with_nowait_is_not_answered(world):
    client = world.client().channel()
    client.send(
        1,
        Exchange.Declare(exchange="e", exchange_type="fanout", nowait=True),
        Queue.Declare(queue="q", nowait=True),
        Queue.Bind(queue="q", exchange="e", nowait=True),
        Basic.Consume(queue="q", consumer_tag="c", nowait=True),
        Basic.Cancel(consumer_tag="c", nowait=True),
        Queue.Purge(queue="q", nowait=True),
        Queue.Delete(queue="q", nowait=True),
        Exchange.Delete(exchange="e", nowait=True),
        commands.Confirm.Select(nowait=True),
    )
    assert client.received() == []


def test_purge_ok_and_delete_ok_contain_the_number_of_ready_messages(world):
    client = world.client().channel().with_queue()
    client.publish(times=3)
    client.send(1, Basic.Get(queue="q"))
    client.received()
    assert client.call(1, Queue.Purge(queue="q"), Queue.PurgeOk).message_count == 2
    assert world.queue().depth == 1
    client.publish()
    assert client.call(1, Queue.Delete(queue="q"), Queue.DeleteOk).message_count == 1


def test_declare_and_bind_arguments_nested_more_than_100_deep_are_refused_with_406(world):
    def nested(depth):
        value: object = 1
        for number in range(depth):
            value = {"k": value} if number % 2 else [value]
        return {"x": value}

    host = world.host
    declares = (
        lambda arguments: host.declare_queue("q", arguments=arguments),
        lambda arguments: host.topology.declare_exchange("e", "direct", arguments=arguments),
        lambda arguments: host.topology.bind(host.queue("q"), "e", "", arguments),
    )
    for declare in declares:
        with pytest.raises(ChannelException, match="tables and arrays are nested more than 100 deep") as caught:
            declare(nested(100))
        assert caught.value.code == ReplyCode.PRECONDITION_FAILED
        endless: dict[str, object] = {}
        endless["x"] = [endless]
        with pytest.raises(ChannelException, match="are nested more than"):
            declare(endless)
        declare(nested(99))
