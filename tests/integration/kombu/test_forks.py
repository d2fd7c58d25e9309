"""A forked child has a copy of its parent's connection and must not use it."""

from __future__ import annotations

from typing import Any

import pytest
from amqp.exceptions import RecoverableConnectionError
from kombu import Producer

from qflow_client import flow_manager
from tests.integration.producer.processes import in_child
from tests.integration.producer.tools import bodies


@pytest.mark.parametrize("confirms", [False, True, "pipelined"])
def test_calls_in_a_forked_child_raise_an_error_or_reconnect_and_all_connections_of_the_parent_can_continue(
    broker: Any, connect: Any, confirms: Any
) -> None:
    connection, other, closed = (connect(confirm_publish=confirms) for _ in range(3))
    channel, doomed, released = connection.channel(), other.channel(), closed.channel()
    producer = Producer(channel)
    producer.publish(b"1", routing_key="q")
    # The lock below is held as if another thread of the parent were writing at the moment of the fork.
    raw = connection.connection
    broker.declare_queue("own")

    def child() -> None:
        assert not connection.connected
        flow_manager.stop_all()
        flow_manager.start_all()
        for call in (
            lambda: producer.publish(b"child", routing_key="q"),
            lambda: channel.queue_declare("child"),
            lambda: channel.basic_get("q"),
            lambda: channel.basic_ack(1),
            lambda: channel.wait_unflowed(),
            lambda: channel.flow_state,
            lambda: raw.drain_events(timeout=1),
        ):
            with pytest.raises(RecoverableConnectionError, match=r"made in process \d+, .* connection in the child"):
                call()
        # With `retry=True`, kombu connects again.
        producer.publish(b"child", routing_key="own", retry=True)
        channel.close()
        closed.release()
        other.collect()
        doomed.collect()

    with raw.transport._writing:
        in_child(child)
    for each in channel, doomed, released:
        Producer(each).publish(b"parent", routing_key="q")
        each.queue_declare("q", passive=True)
    assert bodies(broker) == [b"1", b"parent", b"parent", b"parent"]
    assert bodies(broker, "own") == [b"child"]
