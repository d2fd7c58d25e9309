"""A closed producer leaves no thread, no file descriptor and no memory behind."""

from __future__ import annotations

import gc
import logging
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from qflow_client import ConnectionFailed, Producer, UndeliveredMessages
from qflow_client.broker import Broker
from tests.effort import rounds

from .tools import PATIENCE, Flows, eventually, wait_closed, wait_held


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _close_in_order(broker: Broker) -> None:
    with Producer(broker.url, routing_key="q") as producer:
        producer.on_flow(Flows())
        producer.send(b"")


def _close_by_an_exception(broker: Broker) -> None:
    producer = Producer(broker.url, routing_key="q")
    producer.send(b"")
    with pytest.raises(KeyError), producer:
        raise KeyError


def _close_with_something_left(broker: Broker) -> None:
    broker.withhold_confirms()
    producer = Producer(broker.url, routing_key="q", on_delivery=lambda _receipt: None)
    producer.send(b"")
    with pytest.raises(UndeliveredMessages):
        producer.close(timeout=0.01)
    broker.release_confirms()


def _lose_the_connection(broker: Broker) -> None:
    producer = Producer(broker.url, routing_key="q", reconnect_timeout=0)
    producer.on_flow(Flows())
    broker.drop_connections()
    wait_closed(producer)
    producer.close()


def _lose_the_connection_and_forget(broker: Broker) -> None:
    producer = Producer(broker.url, routing_key="q", reconnect_timeout=0)
    producer.on_flow(Flows())
    broker.drop_connections()
    wait_closed(producer)
    link: Any = producer._engine.link
    link._thread.join(PATIENCE)
    del link
    held = [producer]
    del producer
    with pytest.warns(ResourceWarning, match="dropped without close"):
        held.clear()


def _reconnect(broker: Broker) -> None:
    with Producer(broker.url, routing_key="q", reconnect_delay=0.01) as producer:
        for _ in range(3):
            broker.drop_connections()
            producer.send(b"").result(timeout=PATIENCE)


def _close_between_two_connections(broker: Broker) -> None:
    producer = Producer(broker.url, routing_key="q", reconnect_delay=100)
    broker.drop_connections()
    wait_held(producer, "disconnected")
    producer.close()


def _fail_to_log_in(broker: Broker) -> None:
    with pytest.raises(ConnectionFailed):
        Producer(broker.url.replace("guest:guest", "guest:wrong"))


def _fail_to_be_accepted(broker: Broker) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listener.getsockname()
        # Whoever comes after these is not even refused.
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(address)
        with pytest.raises(ConnectionFailed, match=str(address[1])):
            Producer(f"amqp://guest:guest@127.0.0.1:{address[1]}/%2F", connect_timeout=0.1)


def _find_no_virtual_host(broker: Broker) -> None:
    with pytest.raises(ConnectionFailed):
        Producer(f"amqp://guest:guest@127.0.0.1:{broker.port}/nosuch")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors by way of /proc")
@pytest.mark.parametrize(
    "way",
    [
        _close_in_order,
        _close_by_an_exception,
        _close_with_something_left,
        _lose_the_connection,
        _lose_the_connection_and_forget,
        _reconnect,
        _close_between_two_connections,
        _fail_to_log_in,
        _fail_to_be_accepted,
        _find_no_virtual_host,
    ],
)
def test_a_closed_producer_leaves_no_thread_socket_or_file(
    broker: Broker, way: Callable[[Broker], None], caplog: pytest.LogCaptureFixture
) -> None:
    # pika logs its socket itself, and pytest keeps that.
    caplog.set_level(logging.CRITICAL, "pika")

    def settled() -> tuple[int, int]:
        broker.wait_until(lambda b: not b.connections())
        for thread in threading.enumerate():
            if thread.name.startswith(("qflow-io", "qflow-callbacks")):
                thread.join(PATIENCE)
        return threading.active_count(), _descriptors()

    # The first of its kind imports and caches.
    way(broker)
    before = settled()
    # What is there by now is nothing of what follows, and much to look through.
    gc.freeze()
    try:
        for _ in range(rounds(10, least=4)):
            way(broker)
        # A socket is closed a moment after its broker's connection has ended, and only the system knows; so there may
        # have been one more before, too.
        eventually(
            lambda: all(now <= then for now, then in zip(settled(), before, strict=True)),
            f"{settled()} is no more than {before}",
        )
    finally:
        gc.unfreeze()


def test_a_closed_producer_is_garbage_collected(broker: Broker) -> None:
    producer = Producer(broker.url, routing_key="q")
    producer.on_flow(Flows())
    receipt = producer.send(bytes(1000))
    producer.close()
    alive = weakref.ref(producer)
    del producer
    # Its threads let go of it when they end.
    eventually(lambda: gc.collect() >= 0 and alive() is None, "the end of the producer")
    assert receipt.delivered


def test_a_producer_keeps_no_settled_messages_in_memory(broker: Broker) -> None:
    """A long-running producer keeps no settled message in memory, even if its receipt was never read."""
    with Producer(broker.url, routing_key="q") as producer:
        for _ in range(rounds(3000)):
            producer.send(b"")
        producer.flush(timeout=20)
        protocol = producer._protocol
        assert protocol.unsettled_receipts == ()
        assert not protocol.parts.unconfirmed.flight
        assert not protocol.parts.resending.written_before
        assert not protocol.parts.returns.by_id
        assert not protocol.reports.failures
        assert protocol.unwritten == 0
