from __future__ import annotations

from typing import Any

import pytest
from pamqp import body, commands, header
from pamqp.commands import Basic

from ..tools import PROPERTIES

CLOSE = commands.Connection.Close
CHANNEL_CLOSE = commands.Channel.Close


def bodies(queue):
    return [entry.message.body for entry in queue.contents.oldest_first()]


def test_the_broker_delivers_a_message_with_unchanged_properties_and_body(world):
    client = world.client().channel().with_queue()
    client.publish(b"hello", properties=PROPERTIES)
    client.send(1, Basic.Get(queue="q", no_ack=True))
    (_, get_ok), (_, content_header), (_, content) = client.received()
    assert (get_ok.delivery_tag, get_ok.exchange, get_ok.routing_key, get_ok.message_count) == (1, "", "q", 0)
    assert content_header.properties == PROPERTIES
    assert content.value == b"hello"


@pytest.mark.parametrize("size", [0, 1, 4087, 4088, 4089, 3 * 4088, 10_000])
def test_bodies_of_any_length_are_received_and_delivered_in_frames_of_any_length(world, size):
    publisher, consumer = world.client().channel().with_queue(), world.client(frame_max=4096).channel()
    content = bytes(at % 251 for at in range(size))
    publisher.publish(content)
    consumer.send(1, Basic.Consume(queue="q", consumer_tag="c", no_ack=True))
    ok, deliver, content_header, *frames = (each for _, each in consumer.received())
    assert (ok.name, deliver.name, content_header.body_size) == ("Basic.ConsumeOk", "Basic.Deliver", size)
    assert all(len(each.value) <= 4096 - 8 for each in frames)
    assert b"".join(each.value for each in frames) == content


def test_a_body_may_arrive_in_several_frames_of_which_some_are_empty(world):
    client = world.client().channel().with_queue()
    client.send(
        1,
        Basic.Publish(routing_key="q"),
        header.ContentHeader(body_size=5),
        body.ContentBody(b"he"),
        body.ContentBody(b""),
        body.ContentBody(b"ll"),
        body.ContentBody(b"o"),
    )
    assert bodies(world.queue()) == [b"hello"]


def test_messages_of_two_channels_may_be_interleaved(world):
    client = world.client().channel(1).channel(2).with_queue()
    for number in (1, 2):
        client.send(number, Basic.Publish(routing_key="q"))
    for number in (1, 2):
        client.send(number, header.ContentHeader(body_size=1))
    for number in (2, 1):
        client.send(number, body.ContentBody(b"%d" % number))
    assert bodies(world.queue()) == [b"2", b"1"]


def test_a_message_larger_than_the_broker_accepts_closes_the_channel_with_406(make_world):
    world = make_world(max_message_size=10)
    client = world.client().channel().with_queue()
    client.publish(b"x" * 10)
    assert world.queue().depth == 1
    client.publish(b"x" * 11)
    client.check_close(CHANNEL_CLOSE, 406, "11", "10")


def test_publishing_with_the_user_id_of_a_different_user_is_refused_with_406(world):
    client = world.client().channel().with_queue()
    client.publish(properties=Basic.Properties(user_id="someone"))
    assert client.only(CHANNEL_CLOSE).reply_code == 406


def test_confirms_that_are_due_together_are_sent_in_one_frame(world):
    client = world.client().channel(confirms=True).with_queue()
    client.publish(times=5)
    ack = client.only(Basic.Ack)
    assert (ack.delivery_tag, ack.multiple) == (5, True)
    client.publish()
    ack = client.only(Basic.Ack)
    assert (ack.delivery_tag, ack.multiple) == (6, False)


def test_confirms_that_a_full_queue_withholds_are_sent_when_the_queue_releases_them(world):
    client = world.client().channel(confirms=True).with_queue()
    world.controls.withhold_confirms = True
    client.publish(times=2)
    assert client.received() == []
    assert client.session.channels[1].unconfirmed == 2
    world.controls.withhold_confirms = False
    client.session.output.announce()
    assert client.only(Basic.Ack).delivery_tag == 2


def test_confirms_that_a_full_queue_withholds_are_not_sent_when_the_channel_closes(world):
    client = world.client().channel(confirms=True).with_queue()
    world.controls.withhold_confirms = True
    client.publish()
    client.send(1, CHANNEL_CLOSE(200, "", 0, 0))
    client.only(commands.Channel.CloseOk)
    world.controls.withhold_confirms = False
    client.session.output.announce()
    assert client.received() == []


def test_a_message_that_was_enqueued_is_confirmed_before_an_error_closes_the_channel(world):
    client = world.client().channel(confirms=True).with_queue()
    client.publish()
    client.publish(exchange="nowhere")
    assert client.names() == ["Basic.Ack", "Channel.Close"]


def test_messages_that_a_queue_refuses_are_nacked_and_not_enqueued(world):
    client = world.client().channel(confirms=True).with_queue()
    client.publish()
    world.controls.refuse_publishes(True)
    client.publish(times=2)
    world.controls.refuse_publishes(False)
    client.publish()
    assert client.names() == ["Basic.Nack", "Basic.Nack", "Basic.Ack"]
    assert world.queue().depth == 2


@pytest.mark.parametrize("confirms", [True, False])
def test_a_full_queue_nacks_the_message_or_closes_the_channel_with_506(world, confirms):
    client = world.client().channel(confirms=confirms)
    client.declare(arguments={"qpid.max_count": 1, "qpid.flow_stop_count": 0})
    client.publish(b"in")
    client.received()
    client.publish(b"out")
    if confirms:
        assert client.only(Basic.Nack).delivery_tag == 2
    else:
        client.check_close(CHANNEL_CLOSE, 506, "'q' is full")
    assert bodies(world.queue()) == [b"in"]


def test_a_message_that_one_of_its_queues_refuses_is_enqueued_in_none_of_them(world):
    client = world.client().channel(confirms=True).with_queue("a")
    client.declare("b", arguments={"qpid.max_count": 1, "qpid.flow_stop_count": 0})
    client.bind_to_fanout("a", "b")
    client.publish(exchange="amq.fanout", times=2)
    assert (world.queue("a").depth, world.queue("b").depth) == (1, 1)
    assert client.names() == ["Basic.Nack", "Basic.Ack"]


@pytest.mark.parametrize("confirms", [True, False])
def test_unroutable_mandatory_messages_are_returned_before_their_ack(world, confirms):
    client = world.client().channel(confirms=confirms)
    client.publish(b"back", "nowhere", mandatory=True)
    returned, content_header, content, *rest = (each for _, each in client.received())
    assert (returned.reply_code, returned.exchange, returned.routing_key) == (312, "", "nowhere")
    assert (content_header.body_size, content.value) == (4, b"back")
    assert [each.name for each in rest] == (["Basic.Ack"] if confirms else [])


def test_unroutable_messages_are_confirmed(world):
    client = world.client().channel(confirms=True)
    client.publish(routing_key="nowhere")
    assert client.only(Basic.Ack).delivery_tag == 1


def test_prefetch_limits_each_consumer(world):
    client = world.client().channel().with_queue()
    client.call(1, Basic.Qos(prefetch_count=2), Basic.QosOk)
    for tag in ("a", "b"):
        client.consume(tag=tag)
    client.received()
    for number in range(6):
        client.publish(b"%d" % number)
    assert [content for _, content, _ in client.deliveries()] == [b"0", b"1", b"2", b"3"]
    client.send(1, Basic.Ack(1))
    assert [content for _, content, _ in client.deliveries()] == [b"4"]
    client.send(1, Basic.Ack(4, multiple=True))
    assert [content for _, content, _ in client.deliveries()] == [b"5"]
    assert world.queue().depth == 2


def test_global_prefetch_limits_all_consumers_of_the_channel_together(world):
    client = world.client().channel().with_queue()
    client.call(1, Basic.Qos(prefetch_count=3, global_=True), Basic.QosOk)
    for tag in ("a", "b"):
        client.consume(tag=tag)
    client.received()
    client.publish(times=6)
    assert len(client.deliveries()) == 3
    client.call(1, Basic.Qos(prefetch_count=3, global_=True), Basic.QosOk)
    client.send(1, Basic.Qos(prefetch_count=5, global_=True))
    assert client.names().count("Basic.Deliver") == 2


def test_channel_flow_from_the_client_stops_deliveries_to_that_client(world):
    client = world.client().channel().with_queue().with_consumer()
    assert client.call(1, commands.Channel.Flow(active=False), commands.Channel.FlowOk).active is False
    client.publish()
    assert client.received() == []
    client.send(1, commands.Channel.Flow(active=True))
    assert client.names()[:2] == ["Channel.FlowOk", "Basic.Deliver"]


def test_a_consumer_whose_socket_accepts_no_bytes_gets_no_deliveries(world):
    client, other = world.client().channel().with_queue().with_consumer(no_ack=True), world.client().channel()
    client.session.output.pause()
    other.publish(times=3)
    assert client.received() == []
    assert world.queue().depth == 3
    client.session.output.resume()
    assert len(client.deliveries()) == 3


def test_the_deliveries_that_the_broker_writes_at_once_have_a_bounded_size(world):
    client, other = world.client().channel().with_queue(), world.client().channel()
    other.publish(b"x" * 1000, times=1000)
    client.consume(no_ack=True)
    limit = client.session.output.MAX_DELIVERY_BYTES
    sizes = []
    while world.queue().depth:
        sizes.append(len(client.raw_output()))
    assert len(sizes) >= 3
    assert max(sizes) < limit + 2000


def test_basic_ack_settles_one_several_or_all_deliveries(world):
    client = world.client().channel().with_queue()
    client.consume()
    client.publish(times=6)
    client.received()
    client.send(1, Basic.Ack(2))
    assert world.queue().depth == 5
    client.send(1, Basic.Ack(4, multiple=True))
    assert world.queue().depth == 2
    client.send(1, Basic.Ack(0, multiple=True))
    assert (world.queue().depth, world.queue().dispatcher.acked) == (0, 6)
    client.send(1, Basic.Ack(0, multiple=True))
    assert client.received() == []


@pytest.mark.parametrize(
    "settle", [Basic.Ack(2), Basic.Ack(1), Basic.Ack(0), Basic.Ack(2, multiple=True), Basic.Nack(2), Basic.Reject(2)]
)
def test_acking_an_unknown_delivery_tag_closes_the_channel_with_406(world, settle):
    client = world.client().channel().with_queue()
    client.publish()
    client.consume()
    client.send(1, Basic.Ack(1))
    client.received()
    client.send(1, settle)
    client.check_close(CHANNEL_CLOSE, 406, f"tag {settle.delivery_tag}")


@pytest.mark.parametrize("settle", [Basic.Nack(1, requeue=True), Basic.Reject(1, requeue=True)])
def test_a_requeued_message_returns_to_its_old_position_in_the_queue(world, settle):
    client = world.client().channel().with_queue()
    client.call(1, Basic.Qos(prefetch_count=1), Basic.QosOk)
    client.consume()
    client.publish_each(b"1", b"2")
    client.received()
    client.send(1, settle)
    assert client.deliveries() == [(2, b"1", True)]
    client.send(1, Basic.Ack(2))
    assert client.deliveries() == [(3, b"2", False)]


def test_recover_with_requeue_requeues_all_deliveries(world):
    client, other = world.client().channel().with_queue(), world.client().channel()
    client.publish_each(b"1", b"2")
    client.send(1, Basic.Get(queue="q"))
    client.received()
    client.call(1, Basic.Recover(requeue=True), Basic.RecoverOk)
    assert [entry.redelivered for entry in world.queue().contents.ready] == [True, False]
    other.consume()
    assert other.names().count("Basic.Deliver") == 2


@pytest.mark.filterwarnings("ignore:This command is deprecated")
@pytest.mark.parametrize("recover", [Basic.Recover, Basic.RecoverAsync])
def test_recover_without_requeue_delivers_to_the_same_consumer(world, recover):
    client, other = world.client().channel().with_queue(), world.client().channel()
    client.consume()
    other.consume()
    other.received()
    client.publish(b"1")
    client.received()
    client.send(1, recover(requeue=False))
    method = client.received()[0][1]
    assert (method.name, method.delivery_tag, method.redelivered) == ("Basic.Deliver", 2, True)
    assert other.received() == []
    assert world.queue().dispatcher.delivered == 2
    client.send(1, Basic.Ack(2))
    assert world.queue().depth == 0


def test_recover_without_requeue_delivers_nothing_while_the_client_has_stopped_the_flow(world):
    client, other = world.client().channel().with_queue(), world.client().channel()
    client.consume()
    client.publish()
    client.received()
    client.call(1, commands.Channel.Flow(active=False), commands.Channel.FlowOk)
    client.call(1, Basic.Recover(requeue=False), Basic.RecoverOk)
    other.consume()
    assert other.names() == ["Basic.ConsumeOk", "Basic.Deliver", "ContentHeader", "ContentBody"]


def test_a_cancelled_consumer_gets_no_more_deliveries_and_may_still_ack(world):
    client = world.client().channel().with_queue()
    client.consume()
    client.publish()
    client.received()
    assert client.call(1, Basic.Cancel("c"), Basic.CancelOk).consumer_tag == "c"
    client.publish()
    client.send(1, Basic.Ack(1))
    assert client.received() == []
    assert world.queue().depth == 1
    client.call(1, Basic.Cancel("unknown"), Basic.CancelOk)


def test_the_unacked_messages_of_a_channel_are_requeued_when_the_channel_ends(world):
    client, other = world.client().channel().with_queue(), world.client().channel()
    client.consume()
    client.publish(b"1")
    client.session.end()
    other.consume()
    other.received()
    assert world.queue().depth == 1
    other.send(1, Basic.Recover(requeue=True))
    deliver = other.received()[0][1]
    assert deliver.redelivered is True


@pytest.mark.parametrize("how", ["lost", "closed", "failed"])
def test_messages_requeued_at_the_end_of_a_connection_are_not_delivered_to_its_other_channels(world, how):
    client = world.client().channel(1).channel(2).with_queue()
    client.consume(channel=1)
    client.publish(b"1")
    client.consume(channel=2, no_ack=True)
    client.received()
    if how == "lost":
        client.session.end()
    elif how == "closed":
        client.send(0, CLOSE(200, "", 0, 0))
    else:
        client.send(1, commands.Channel.Open())
    assert "Basic.Deliver" not in client.names()
    assert (bodies(world.queue()), len(world.queue().contents.ready)) == ([b"1"], 1)


def test_consuming_with_a_consumer_tag_that_is_in_use_closes_the_connection_with_530(world):
    client = world.client().channel().with_queue().with_consumer()
    client.consume()
    assert client.only(CLOSE, 0).reply_code == 530


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)])
def test_a_queue_with_an_exclusive_consumer_refuses_other_consumers(world, first, second):
    client, other = world.client().channel().with_queue(), world.client().channel()
    client.consume(exclusive=first)
    other.consume(exclusive=second)
    assert other.only(CHANNEL_CLOSE).reply_code == 403
    client.send(1, Basic.Cancel("c"))
    other.send(1, commands.Channel.CloseOk())
    other.channel()
    other.consume(exclusive=True)
    other.only(Basic.ConsumeOk)


def test_consumers_of_a_deleted_queue_get_basic_cancel_if_the_client_supports_it(world):
    client, deaf = world.client().channel().with_queue(), world.client(capabilities={}).channel()
    for each in (client, deaf):
        each.consume()
        each.received()
    world.host.delete_queue(world.queue())
    cancel = client.only(Basic.Cancel)
    assert (cancel.consumer_tag, cancel.nowait) == ("c", True)
    assert deaf.received() == []
    client.declare()
    client.consume()
    client.only(Basic.ConsumeOk)


def test_a_consumer_without_a_tag_gets_a_generated_tag(world):
    client = world.client().channel().with_queue()
    client.consume(tag="")
    assert client.only(Basic.ConsumeOk).consumer_tag.startswith("ctag-1.")


class TestTransactions:
    @pytest.fixture
    def client(self, world):
        client = world.client().channel()
        client.call(1, commands.Tx.Select(), commands.Tx.SelectOk)
        client.declare()
        return client

    def test_messages_published_in_a_transaction_are_enqueued_at_commit(self, world, client):
        client.publish_each(b"1", b"2")
        assert world.queue().depth == 0
        client.call(1, commands.Tx.Commit(), commands.Tx.CommitOk)
        assert bodies(world.queue()) == [b"1", b"2"]

    def test_messages_published_in_a_transaction_are_discarded_at_rollback(self, world, client):
        client.publish()
        client.call(1, commands.Tx.Rollback(), commands.Tx.RollbackOk)
        client.call(1, commands.Tx.Commit(), commands.Tx.CommitOk)
        assert world.queue().depth == 0

    def test_acks_in_a_transaction_take_effect_at_commit_and_not_after_a_rollback(self, world, client):
        world.host.publish("", "q", b"1")
        world.host.publish("", "q", b"2")
        client.consume()
        client.received()
        client.send(1, Basic.Ack(2))
        assert world.queue().depth == 2
        client.call(1, commands.Tx.Rollback(), commands.Tx.RollbackOk)
        client.send(1, Basic.Ack(2, multiple=True))
        client.call(1, commands.Tx.Commit(), commands.Tx.CommitOk)
        assert world.queue().depth == 0

    def test_deliveries_whose_acks_are_rolled_back_count_for_the_prefetch_limit_again(self, world, client):
        client.call(1, Basic.Qos(prefetch_count=1), Basic.QosOk)
        client.consume()
        world.host.publish("", "q", b"1")
        client.send(1, Basic.Ack(1))
        client.received()
        client.call(1, commands.Tx.Rollback(), commands.Tx.RollbackOk)
        world.host.publish("", "q", b"2")
        assert client.received() == []
        client.send(1, Basic.Ack(1))
        client.send(1, commands.Tx.Commit())
        assert client.names() == ["Basic.Deliver", "ContentHeader", "ContentBody", "Tx.CommitOk"]

    def test_messages_rejected_in_a_transaction_are_requeued_only_at_commit(self, world, client):
        world.host.publish("", "q", b"1")
        client.send(1, Basic.Get(queue="q"))
        client.received()
        client.send(1, Basic.Nack(1, requeue=True))
        assert not world.queue().contents.ready
        client.call(1, commands.Tx.Commit(), commands.Tx.CommitOk)
        assert world.queue().contents.ready[0].redelivered

    def test_the_end_of_a_channel_rolls_back_its_transaction(self, world, client):
        world.host.publish("", "q", b"1")
        client.send(1, Basic.Get(queue="q"))
        client.send(1, Basic.Ack(1))
        client.publish(b"2")
        client.session.end()
        assert bodies(world.queue()) == [b"1"]
        assert len(world.queue().contents.ready) == 1

    def test_a_transaction_for_which_a_queue_has_too_little_room_is_refused_with_406_and_changes_nothing(
        self, world, client
    ):
        client.declare("small", arguments={"qpid.max_count": 2, "qpid.flow_stop_count": 0})
        for name in ("q", "small", "small", "small"):
            client.publish(routing_key=name)
        client.send(1, commands.Tx.Commit())
        client.check_close(CHANNEL_CLOSE, 406, "queue full")
        assert (world.queue().depth, world.queue("small").depth) == (0, 0)

    def test_acks_of_a_transaction_make_room_for_the_messages_that_it_publishes(self, world, client):
        client.declare("small", arguments={"qpid.max_count": 1, "qpid.flow_stop_count": 0})
        world.host.publish("", "small", b"old")
        client.send(1, Basic.Get(queue="small"))
        client.received()
        client.send(1, Basic.Ack(1))
        client.publish(b"new", "small")
        client.call(1, commands.Tx.Commit(), commands.Tx.CommitOk)
        assert bodies(world.queue("small")) == [b"new"]

    def test_a_message_larger_than_the_maximum_of_a_ring_queue_is_refused_in_any_transaction(self, world, client):
        client.declare("ring", arguments={"qpid.max_size": 10, "qpid.policy_type": "ring"})
        client.publish(b"x", "ring")
        client.publish(b"y" * 11, "ring")
        client.send(1, commands.Tx.Commit())
        client.check_close(CHANNEL_CLOSE, 406, "11 bytes")
        assert world.queue("ring").size == 0

    def test_a_transaction_whose_messages_each_fit_a_ring_queue_is_accepted_whatever_the_total_size(
        self, world, client
    ):
        client.declare("ring", arguments={"qpid.max_size": 10, "qpid.policy_type": "ring"})
        world.host.publish("", "ring", b"z")
        client.send(1, Basic.Get(queue="ring"))
        client.received()
        client.send(1, Basic.Ack(1))
        for content in (b"x" * 6, b"y" * 6):
            client.publish(content, "ring")
        client.call(1, commands.Tx.Commit(), commands.Tx.CommitOk)
        assert bodies(world.queue("ring")) == [b"y" * 6]

    def test_J3_a_commit_that_brings_the_queue_above_its_stop_threshold_flows_the_channel(self, world, client):
        client.declare("marked", arguments={"qpid.flow_stop_count": 1})
        client.publish(routing_key="marked", times=2)
        client.send(1, commands.Tx.Commit())
        assert client.names() == ["Channel.Flow", "Tx.CommitOk"]

    def test_unroutable_mandatory_messages_of_a_transaction_are_returned_at_commit(self, client):
        client.publish(routing_key="nowhere", mandatory=True)
        assert client.received() == []
        client.send(1, commands.Tx.Commit())
        assert client.names() == ["Basic.Return", "ContentHeader", "ContentBody", "Tx.CommitOk"]

    def test_confirm_select_is_refused_on_a_transactional_channel(self, client):
        client.send(1, commands.Confirm.Select())
        assert client.only(CHANNEL_CLOSE).reply_code == 406

    def test_tx_methods_are_refused_on_a_confirming_channel_and_before_tx_select(self, world):
        client = world.client().channel(confirms=True)
        client.send(1, commands.Tx.Select())
        assert client.only(CHANNEL_CLOSE).reply_code == 406
        client = world.client().channel()
        client.send(1, commands.Tx.Commit())
        assert client.only(CHANNEL_CLOSE).reply_code == 406


@pytest.mark.parametrize("queues", [("a", "b", "c"), ("a", "a", "a")], ids=["a queue each", "one queue"])
@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_consumers_that_share_the_prefetch_limit_of_their_channel_get_messages_in_turn(world, queues, prefetch):
    client = world.client().channel()
    client.channel(2)
    for queue in dict.fromkeys(queues):
        client.declare(queue)
        client.publish(routing_key=queue, channel=2, times=300 * queues.count(queue))
    client.call(1, commands.Basic.Qos(prefetch_count=prefetch, global_=True), commands.Basic.QosOk)
    for number, queue in enumerate(queues):
        client.consume(queue, tag=str(number))
    served = dict.fromkeys("012", 0)
    for _ in range(300):
        tags: list[Any] = [
            (each.delivery_tag, each.consumer_tag)
            for _, each in client.received()
            if isinstance(each, commands.Basic.Deliver)
        ]
        for _, consumer in tags:
            served[consumer] += 1
        client.send(1, commands.Basic.Ack(tags[-1][0], multiple=False))
    assert max(served.values()) - min(served.values()) <= 2 * prefetch, served
