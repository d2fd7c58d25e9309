from __future__ import annotations

import http.client
import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pika
import pytest

from qflow_client.broker import Broker
from tests.integration.producer.tools import Stopwatch

from .tools import Client


@contextmanager
def listening(broker: Broker) -> Iterator[Iterator[tuple[str, Any]]]:
    """Yield an iterator over the broker's events. Each event is a pair of its kind and its data."""
    connection = http.client.HTTPConnection(broker.http_url.partition("//")[2], timeout=20)
    try:
        connection.request("GET", "/api/events?period=0.1")
        response = connection.getresponse()
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream"

        def events() -> Iterator[tuple[str, Any]]:
            kind = ""
            for line in response:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name == "event":
                    kind = value
                elif name == "data":
                    yield kind, json.loads(value)

        yield events()
    finally:
        connection.close()


def test_the_first_event_of_a_stream_contains_the_complete_state_of_the_broker(broker: Broker, ask: Client) -> None:
    broker.declare_queue("orders")
    with listening(broker) as events:
        kind, told = next(events)
        assert kind == "state"
        assert told["queues"] == ask("GET", "/api/queues").json
        assert told["exchanges"] == ask("GET", "/api/exchanges").json
        assert (told["channels"], told["connections"], told["bindings"]) == ([], [], [])
        assert told["producersStopped"] is False


def test_C7_events_report_that_a_queue_turns_ON_and_OFF(broker: Broker) -> None:
    broker.declare_queue("orders", arguments={"qpid.flow_stop_count": 1})
    broker.declare_queue("other")
    with listening(broker) as events:
        next(events)
        for _ in range(2):
            broker.publish(b"x", "orders")
        told = _until(events, lambda told: told["queues"][0]["flowStopped"])
        assert [queue["name"] for queue in told["queues"]] == ["orders"]
        assert "exchanges" not in told
        broker.purge("orders")
        told = _until(events, lambda told: not told["queues"][0]["flowStopped"])
        assert told["queues"][0]["flowStoppedCount"] == 1


def test_events_report_created_and_deleted_objects(broker: Broker) -> None:
    with listening(broker) as events:
        next(events)
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channel = connection.channel()
        (name,) = (channel.name for channel in broker.channels())
        _until(events, lambda told: told.get("channels") and told["channels"][0]["name"] == name)
        channel.queue_declare("mine", exclusive=True)
        channel.queue_bind("mine", "amq.topic", "a.b")
        _until(events, lambda told: told.get("bindings") and told["bindings"][0]["routingKey"] == "a.b")
        broker.flow(active=False)
        _until(events, lambda told: told.get("producersStopped"))
        connection.close()
        gone: dict[str, list[str]] = {}

        def all_gone(told: dict[str, Any]) -> bool:
            for kind, names in told.get("gone", {}).items():
                gone.setdefault(kind, []).extend(names)
            return len(gone) == 3

        _until(events, all_gone)
        assert gone == {"queues": ["mine"], "channels": [name], "connections": [name.partition(" ")[0]]}


def test_an_event_omits_a_channel_if_only_the_flowed_time_of_the_channel_has_changed(broker: Broker) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(broker.url))
    channel = connection.channel()
    channel.confirm_delivery()
    broker.flow(active=False)
    broker.wait_until(lambda broker: broker.producers()[0].flowed)
    with listening(broker) as events:
        _, told = next(events)
        # The broker compares all objects again after this change. The channel's flowed time has grown meanwhile.
        broker.declare_queue("orders")
        told = _until(events, lambda told: "queues" in told)
        assert "channels" not in told
    connection.close()


def test_a_broker_that_stops_ends_its_event_streams(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), ExitStack() as stack:
        broker = stack.enter_context(Broker(http_port=0))
        events = stack.enter_context(listening(broker))
        next(events)
        with Stopwatch() as watch:
            broker.__exit__(None, None, None)
        assert watch.within(5)
        with pytest.raises((StopIteration, http.client.IncompleteRead)):
            next(events)
        stack.pop_all()
    assert caplog.records == []


def test_the_event_stream_of_a_disconnected_http_client_is_removed(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    assert broker._http is not None
    streams = broker._http._streams
    with caplog.at_level(logging.WARNING):
        with listening(broker) as events:
            next(events)
            assert len(streams) == 1
        end = time.monotonic() + 10
        while streams:
            broker.declare_queue("")
            assert time.monotonic() < end
            time.sleep(0.01)
    assert caplog.records == []


def _until(events: Iterator[tuple[str, Any]], predicate: Any) -> Any:
    for kind, told in events:
        assert kind == "change"
        if predicate(told):
            return told
    raise AssertionError("the events have ended")
