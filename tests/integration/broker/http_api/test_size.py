from __future__ import annotations

import http.client
import json
import time
from typing import Any

import pytest
from pamqp import commands
from prometheus_client.parser import text_string_to_metric_families

from qflow_client.broker import Broker
from tests.effort import rounds

from .tools import Client

QUEUES = rounds(500, least=200)
CONNECTIONS = rounds(20, least=4)
CHANNELS = 100


@pytest.mark.slow
def test_a_broker_with_hundreds_of_queues_and_producers_answers_all_requests(
    broker: Broker, ask: Client, connect: Any
) -> None:
    for number in range(QUEUES):
        broker.declare_queue(f"queue {number}", arguments={"qpid.flow_stop_count": 10})
    clients = [connect(broker).open() for _ in range(CONNECTIONS)]
    for client in clients:
        for number in range(1, CHANNELS + 1):
            client.send(number, commands.Channel.Open(), commands.Confirm.Select())
        for _ in range(2 * CHANNELS):
            client.expect((commands.Channel.OpenOk, commands.Confirm.SelectOk))
    broker.wait_until(lambda broker: len(broker.producers()) == CONNECTIONS * CHANNELS, 60)
    for path, count in (
        ("queues", QUEUES),
        ("producers", CONNECTIONS * CHANNELS),
        ("channels", CONNECTIONS * CHANNELS),
        ("connections", CONNECTIONS),
    ):
        assert len(ask("GET", f"/api/{path}").json) == count
    families = text_string_to_metric_families(ask("GET", "/metrics").text)
    assert {family.name: len(family.samples) for family in families}["qflow_queue_messages"] == QUEUES
    connection = http.client.HTTPConnection(broker.http_url.partition("//")[2], timeout=60)
    connection.request("GET", "/api/events?period=0.1")
    response = connection.getresponse()
    state = _next_event(response)
    assert (len(state["queues"]), len(state["channels"])) == (QUEUES, CONNECTIONS * CHANNELS)
    began = time.monotonic()
    assert ask("POST", "/api/producers/stop").status == 204
    assert all(producer.flowed for producer in broker.producers())
    # Every channel gets the stop.
    for client in clients:
        assert all(not client.expect(commands.Channel.Flow).active for _ in range(CHANNELS))
    assert time.monotonic() - began < 10
    changed = _next_event(response)
    while "producersStopped" not in changed:
        changed = _next_event(response)
    assert changed["producersStopped"] is True
    assert len(changed["channels"]) == CONNECTIONS * CHANNELS
    connection.close()


def _next_event(response: http.client.HTTPResponse) -> dict[str, Any]:
    while not (line := response.readline()).startswith(b"data: "):
        assert line
    told: dict[str, Any] = json.loads(line[6:])
    return told
