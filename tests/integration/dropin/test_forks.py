"""A forked child has a copy of its parent's connection and must not use it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pika as original
import pytest

import qflow_client.pika as pika
from qflow_client import flow_manager
from tests.integration.producer.processes import in_child
from tests.integration.producer.tools import bodies

from .tools import refused


def open_files() -> list[int]:
    return [os.fstat(int(each.name)).st_ino for each in tuple(Path("/proc/self/fd").iterdir()) if each.exists()]


@pytest.mark.parametrize("pipelined", [False, True])
def test_calls_in_a_forked_child_raise_an_error_and_the_parent_can_continue(
    broker: Any, connect: Any, pipelined: bool
) -> None:
    connection = connect()
    channel = connection.channel()
    channel.confirm_delivery(pipelined=pipelined)
    channel.basic_publish("", "q", b"1")
    unconfirmed = connect().channel()
    unconfirmed.confirm_delivery(pipelined=True)
    broker.withhold_confirms()
    unconfirmed.basic_publish("", "q", b"2")
    inode = os.fstat(connection._impl._transport._sock.fileno()).st_ino

    def child() -> None:
        assert not connection.is_open
        assert not channel.is_open
        assert channel.flow_state.flowed
        assert unconfirmed.unconfirmed == ()
        if Path("/proc/self/fd").is_dir():
            assert inode not in open_files()
        flow_manager.stop_all()
        refused(
            lambda: channel.basic_publish("", "q", b"child"),
            lambda: channel.queue_declare("child"),
            lambda: channel.basic_get("q"),
            lambda: channel.basic_ack(1),
            lambda: next(channel.consume("q")),
            lambda: channel.wait_unflowed(),
            lambda: channel.wait_for_confirms(),
            lambda: channel.close(),
            lambda: connection.channel(),
            lambda: connection.process_data_events(None),
            lambda: connection.sleep(0),
            lambda: connection.close(),
        )
        with connection, channel:
            pass
        own = connect()
        with pytest.raises(ValueError, match="nothing to publish"):
            own.channel().confirm_delivery(pipelined=True, republish=unconfirmed)
        own.close()

    in_child(child)
    broker.release_confirms()
    unconfirmed.wait_for_confirms()
    channel.basic_publish("", "q", b"3")
    connection.close()
    assert bodies(broker) == [b"1", b"2", b"3"]


def test_calls_of_a_wrapped_channel_in_a_forked_child_raise_an_error(broker: Any, stack: Any) -> None:
    connection = original.BlockingConnection(original.URLParameters(broker.url))
    stack.callback(connection.close)
    channel = pika.wrap(connection.channel())
    in_child(lambda: refused(lambda: channel.basic_publish("", "q", b"child"), lambda: channel.queue_declare("child")))
    channel.basic_publish("", "q", b"parent")
    channel.queue_declare("q", passive=True)
    assert bodies(broker) == [b"parent"]
