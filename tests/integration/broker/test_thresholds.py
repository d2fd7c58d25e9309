from __future__ import annotations

import pytest
from pamqp import commands

from qflow_client.broker import Broker, ChannelException, ThresholdsSnapshot


def test_D4_raising_the_stop_threshold_turns_a_queue_OFF_and_unflows_its_publishers(broker, connect):
    broker.declare_queue("q", arguments={"qpid.flow_stop_count": 1, "qpid.flow_resume_count": 1})
    client = connect(broker).open().channel(confirms=True)
    client.publish()
    assert client.expect(commands.Basic.Ack).delivery_tag == 1
    client.publish()
    assert client.expect(commands.Channel.Flow).active is False
    assert broker.queue("q").held_confirms == 1
    queue = broker.set_thresholds("q", flow_stop_count=10, flow_resume_count=5)
    assert (queue.flow_stopped, queue.flow_stopped_count, queue.held_confirms, queue.blocked) == (False, 1, 0, ())
    assert {type(client.read()[1]) for _ in range(2)} == {commands.Channel.Flow, commands.Basic.Ack}
    assert not broker.channels()[0].flowed


@pytest.mark.parametrize("scope", ["offender", "publishers"])
def test_D4_thresholds_can_be_added_to_a_queue_with_messages_and_removed_again(connect, scope):
    with Broker(flow_scope=scope) as broker:
        broker.declare_queue("q")
        client = connect(broker).open().channel(confirms=True)
        client.publish(b"12345")
        assert client.expect(commands.Basic.Ack)
        broker.set_thresholds("q", capacity=7)
        assert broker.queue("q").thresholds == ThresholdsSnapshot(capacity=7, flow_resume_capacity=7)
        client.publish(b"12345")
        assert client.expect(commands.Channel.Flow).active is False
        # Messages that were in the queue before the threshold was set also count.
        assert broker.get("q") is not None
        assert client.expect(commands.Channel.Flow).active is True
        assert client.expect(commands.Basic.Ack)
        client.publish(b"12345")
        assert client.expect(commands.Channel.Flow).active is False
        queue = broker.set_thresholds("q", capacity=0)
        assert (queue.flow_stopped, queue.flow_stopped_count, queue.thresholds) == (False, 2, ThresholdsSnapshot())
        client.expect((commands.Channel.Flow, commands.Basic.Ack))
        client.expect((commands.Channel.Flow, commands.Basic.Ack))
        for _ in range(5):
            client.publish(b"12345")
            assert client.expect(commands.Basic.Ack)


def test_D4_setting_one_threshold_changes_neither_the_other_thresholds_nor_the_declared_arguments(broker):
    arguments = {"qpid.flow_stop_count": 100, "qpid.flow_resume_count": 70, "x-qpid-capacity": 1000}
    broker.declare_queue("q", arguments=arguments)
    broker.set_thresholds("q", flow_stop_size=500)
    assert broker.queue("q").thresholds == ThresholdsSnapshot(100, 70, 500, 437, 1000, 1000)
    broker.set_thresholds("q", flow_resume_count=None)
    assert broker.queue("q").thresholds == ThresholdsSnapshot(100, 87, 500, 437, 1000, 1000)
    broker.set_thresholds("q", flow_stop_count=0, flow_resume_capacity=10)
    assert broker.queue("q").thresholds == ThresholdsSnapshot(0, 0, 500, 437, 1000, 10)
    assert broker.declare_queue("q", arguments=arguments).arguments == arguments


@pytest.mark.parametrize(
    ("marks", "words"),
    [
        ({"flow_stop_count": 5}, "flow_stop_count=5 and flow_resume_count=70"),
        ({"flow_stop_count": 201}, "flow_stop_count=201 and max_count=200"),
        ({"flow_resume_count": 0}, "flow_stop_count=100 and flow_resume_count=0"),
        ({"flow_resume_capacity": 1}, "capacity=0 and flow_resume_capacity=1"),
        ({"capacity": -1}, "capacity=-1: it must be at least 0"),
        ({"capacity": "5"}, "capacity='5': it must be an integer"),
    ],
)
def test_C3_setting_contradictory_thresholds_raises_an_error_and_changes_nothing(broker, marks, words):
    broker.declare_queue(
        "q", arguments={"qpid.flow_stop_count": 100, "qpid.flow_resume_count": 70, "qpid.max_count": 200}
    )
    before = broker.queue("q")
    with pytest.raises(ChannelException, match=words) as caught:
        broker.set_thresholds("q", **marks)
    assert caught.value.code == 406
    assert broker.queue("q") == before


def test_setting_an_unknown_threshold_raises_an_error(broker):
    broker.declare_queue("q")
    with pytest.raises(TypeError, match="flow_stop is not a mark; the marks are flow_stop_count"):
        broker.set_thresholds("q", flow_stop=1)
    with pytest.raises(ChannelException, match="no queue 'none'"):
        broker.set_thresholds("none", capacity=1)
