from __future__ import annotations

import platform

from prometheus_client.parser import text_string_to_metric_families

from qflow_client import Producer, __version__
from qflow_client.broker import Broker

from .tools import Client


def test_prometheus_is_told_what_queues_are_at(broker: Broker, ask: Client) -> None:
    broker.declare_queue('a "quoted"\nname', arguments={"qpid.flow_stop_count": 2, "qpid.flow_resume_count": 1})
    broker.declare_queue("orders", arguments={"qpid.flow_stop_count": 1})
    with Producer(broker.url, routing_key="orders") as producer:
        for _ in range(2):
            producer.send(b"12345")
        broker.wait_until(lambda broker: broker.producers()[0].flowed)
        answer = ask("GET", "/metrics")
        broker.purge("orders")
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert samples["qflow_build_info", platform.python_version(), __version__] == 1
    assert samples["qflow_queue_messages", "orders"] == 2
    assert samples["qflow_queue_bytes", "orders"] == 10
    assert samples["qflow_queue_flow_stopped", "orders"] == 1
    assert samples["qflow_queue_flow_stops_total", "orders"] == 1
    assert samples["qflow_queue_published_messages_total", "orders"] == 2
    assert samples["qflow_queue_held_confirms", "orders"] == 1
    assert samples["qflow_queue_flow_stopped", 'a "quoted"\nname'] == 0
    assert samples["qflow_queue_threshold", "flow_resume_count", 'a "quoted"\nname'] == 1
    assert (samples[("qflow_producers",)], samples[("qflow_producers_flowed",)]) == (1, 1)
    assert samples[("qflow_producers_stopped",)] == 0
