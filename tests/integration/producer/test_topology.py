"""A producer declares its topology when it connects, and after every reconnect."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pika
import pytest

from qflow_client import (
    Binding,
    ConnectionFailed,
    Exchange,
    MessageRejected,
    Producer,
    ProducerClosed,
    Queue,
    SettingsError,
    Topology,
    connect,
)
from qflow_client.broker import Broker
from qflow_client.testing.proxy import FaultProxy
from qflow_client.topology import Declaration

from .tools import PATIENCE, bodies, wait_closed

TOPOLOGY = Topology(
    queues=["q", Queue("rare", durable=False, arguments={"x-max-length": 10})],
    exchanges=[Exchange("in", "topic"), Exchange("out", "fanout", auto_delete=True)],
    bindings=[Binding("in", to_exchange="out", routing_key="a.*"), Binding("out", "q"), Binding("in", "rare", "b")],
)


@pytest.fixture
def empty() -> Iterator[Broker]:
    with Broker() as broker:
        yield broker


def test_with_a_topology_the_first_send_of_a_producer_works_on_an_empty_broker(
    make_producer: Callable[..., Producer], empty: Broker
) -> None:
    producer = make_producer(empty.url, declare="q")
    producer.send(b"1").result(PATIENCE)
    assert bodies(empty) == [b"1"]
    assert empty.queue("q").durable


def test_a_producer_declares_the_queues_exchanges_and_bindings_of_its_topology(
    make_producer: Callable[..., Producer], empty: Broker
) -> None:
    producer = make_producer(empty.url, declare=TOPOLOGY)
    producer.send(b"1", exchange="in", routing_key="a.b").result(PATIENCE)
    producer.send(b"2", exchange="in", routing_key="b").result(PATIENCE)
    assert bodies(empty) == [b"1"]
    assert [message.body for message in empty.messages("rare")] == [b"2"]
    connection = pika.BlockingConnection(pika.URLParameters(empty.url))
    channel = connection.channel()
    # The arguments are there.
    channel.queue_declare("rare", arguments={"x-max-length": 10})
    connection.close()


def test_the_error_names_an_existing_object_that_differs_from_the_topology_and_no_retry_is_made(
    make_producer: Callable[..., Producer], empty: Broker
) -> None:
    empty.declare_queue("q", durable=False)
    with pytest.raises(ConnectionFailed, match=r"queue 'q' cannot be declared: 406 .*; change the declaration, or"):
        make_producer(empty.url, declare=Queue("q"))


def test_a_queue_that_the_topology_gives_only_by_name_may_exist_with_any_properties(
    make_producer: Callable[..., Producer], empty: Broker
) -> None:
    empty.declare_queue("q", arguments={"qpid.flow_stop_count": 5})
    topology = Topology(queues=["q", "other"], bindings=[Binding("amq.topic", "other", "k")])
    producer = make_producer(empty.url, declare=topology)
    producer.send(b"1").result(PATIENCE)
    producer.send(b"2", exchange="amq.topic", routing_key="k").result(PATIENCE)
    assert (empty.queue("q").depth, empty.queue("other").depth) == (1, 1)


def test_one_channel_is_enough_to_declare_a_topology_and_publish(
    make_broker: Callable[..., Broker], make_producer: Callable[..., Producer]
) -> None:
    # The producer needs three channels, because the broker closes the first one for the difference.
    broker = make_broker(channel_max=1, arguments={"qpid.flow_stop_count": 5})
    make_producer(broker.url, declare="q").send(b"1").result(PATIENCE)
    assert bodies(broker) == [b"1"]


def test_the_error_names_a_binding_of_the_topology_to_a_missing_object(
    make_producer: Callable[..., Producer], empty: Broker
) -> None:
    topology = Topology(bindings=[Binding("missing", "q")])
    with pytest.raises(ConnectionFailed, match=r"binding of queue 'q' to exchange 'missing' cannot be declared: 404 "):
        make_producer(empty.url, declare=topology)


def test_a_producer_whose_queue_was_replaced_by_a_queue_with_other_arguments_ends_without_retrying(
    make_producer: Callable[..., Producer], empty: Broker
) -> None:
    producer = make_producer(empty.url, declare=Queue("q"), reconnect_delay=0.02)
    empty.delete_queue("q")
    empty.declare_queue("q", durable=False)
    empty.drop_connections()
    wait_closed(producer)
    with pytest.raises(ProducerClosed, match="queue 'q' cannot be declared: 406"):
        producer.send(b"1")


def test_the_error_names_an_exchange_of_an_unknown_type_and_no_retry_is_made(
    make_producer: Callable[..., Producer], empty: Broker
) -> None:
    topology = Topology(exchanges=[Exchange("e", "topik")])
    words = "exchange 'e' cannot be declared: 503 .*topik"
    with pytest.raises(ConnectionFailed, match=words):
        make_producer(empty.url, declare=topology)
    producer = make_producer(empty.url, declare=topology, connect_in_background=True, reconnect_delay=0.02)
    wait_closed(producer)
    with pytest.raises(ProducerClosed, match=words):
        producer.send(b"1")


def test_after_a_lost_connection_the_topology_is_declared_again_before_any_message_is_published(
    make_producer: Callable[..., Producer], empty: Broker
) -> None:
    topology = Topology([Queue("q", arguments={"x-max-length": 2})], [Exchange("in")], [Binding("in", "q", "k")])
    producer = make_producer(empty.url, declare=topology, exchange="in", routing_key="k", reconnect_delay=0.02)
    empty.delete_queue("q")
    empty.delete_exchange("in")
    empty.drop_connections()
    for body in (b"1", b"2", b"3"):
        producer.send(body, timeout=PATIENCE).result(PATIENCE)
    assert bodies(empty) == [b"2", b"3"]


@pytest.fixture
def cut_while_declaring(monkeypatch: pytest.MonkeyPatch) -> Callable[[FaultProxy], threading.Event]:
    """Makes what, once it is set, cuts the connection in the middle of the next declaration."""

    def make(proxy: FaultProxy) -> threading.Event:
        armed, declarations = threading.Event(), Topology.declarations

        def cut(topology: Topology) -> Iterator[Declaration]:
            if armed.is_set():
                armed.clear()
                # What is declared now gets no answer, and then the end.
                proxy.cut()
            yield from declarations(topology)

        monkeypatch.setattr(Topology, "declarations", cut)
        return armed

    return make


@pytest.mark.parametrize("lost", ["connection", "channel"])
def test_a_producer_reconnects_if_the_connection_is_lost_while_the_topology_is_redeclared(
    make_producer: Callable[..., Producer],
    empty: Broker,
    cut_while_declaring: Callable[[FaultProxy], threading.Event],
    lost: str,
) -> None:
    with FaultProxy(empty.url) as proxy:
        armed = cut_while_declaring(proxy)
        producer = make_producer(proxy.url, declare="q", reconnect_delay=0.02)
        armed.set()
        if lost == "connection":
            empty.drop_connections()
        else:
            with pytest.raises(MessageRejected):
                producer.send(b"0", exchange="missing").result(PATIENCE)
        producer.send(b"1", timeout=PATIENCE).result(PATIENCE)
        assert not armed.is_set()
        assert bodies(empty) == [b"1"]
        producer.close(timeout=PATIENCE)


def test_losing_the_connection_while_the_topology_is_first_declared_counts_as_a_failed_attempt(
    make_producer: Callable[..., Producer],
    empty: Broker,
    cut_while_declaring: Callable[[FaultProxy], threading.Event],
) -> None:
    with FaultProxy(empty.url) as proxy:
        cut_while_declaring(proxy).set()
        # The next host is tried.
        producer = make_producer([proxy.url, empty.url], declare="q")
        producer.send(b"1").result(PATIENCE)
        cut_while_declaring(proxy).set()
        with pytest.raises(ConnectionFailed):
            make_producer(proxy.url, declare="q")


def test_a_producer_on_a_shared_connection_declares_no_topology(broker: Broker) -> None:
    words = "declare and connection: declare with a channel of that"
    with connect(broker.url) as connection, pytest.raises(SettingsError, match=words):
        Producer(connection=connection, routing_key="q", declare="q")
