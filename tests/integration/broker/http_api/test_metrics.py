from __future__ import annotations

import platform

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from qflow_client import Producer, __version__
from qflow_client.broker import Broker

from .tools import Client

OPEN = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PLAIN = "text/plain; version=0.0.4; charset=utf-8"


@pytest.mark.parametrize(
    ("accept", "answered"),
    [
        # The headers of Prometheus 2 and 3, browsers and curl, and some unusual headers.
        (
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,*/*;q=0.1",
            OPEN,
        ),
        ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3", OPEN),
        ("text/plain;version=0.0.4,application/openmetrics-text;q=0.5", PLAIN),
        ("application/openmetrics-text", OPEN),
        ("application/openmetrics-text; version=0.0.1", PLAIN),
        ("application/openmetrics-text; q=0", PLAIN),
        ("application/openmetrics-text; q=much", PLAIN),
        ("text/html,*/*;q=0.8", PLAIN),
        ("*/*", PLAIN),
        (",;=," * 100, PLAIN),
        ("application/openmetrics-text;q=0.1, */*;q=0.9", PLAIN),
        ("application/openmetrics-text;q=0.1, text/*", PLAIN),
        ("application/*;q=0.6, text/*;q=0.5", OPEN),
        ("text/plain;q=0, */*", OPEN),
        ("application/openmetrics-text, */*", OPEN),
        ('application/openmetrics-text; version="1.0.0"', OPEN),
        ("application/openmetrics-text;q=0.5, text/plain;version=0.0.4;q=0.5", PLAIN),
        ("application/openmetrics-text; q=nan", PLAIN),
    ],
)
def test_the_client_chooses_the_metrics_format_with_its_accept_header(ask: Client, accept: str, answered: str) -> None:
    answer = ask("GET", "/metrics", headers={"Accept": accept})
    assert (answer.status, answer.headers["Content-Type"], answer.headers["Vary"]) == (200, answered, "Accept")
    assert answer.text.endswith("\n# EOF\n") is (answered == OPEN)


def test_the_Prometheus_format_and_the_OpenMetrics_format_contain_the_same_metrics(broker: Broker, ask: Client) -> None:
    broker.declare_queue('a "quoted"\nname', arguments={"qpid.flow_stop_count": 2, "qpid.flow_resume_count": 1})
    plain = text_string_to_metric_families(ask("GET", "/metrics", headers={"Accept": PLAIN}).text)
    # This parser checks the rules of the format, such as the end marker and the names.
    strict = openmetrics_families(ask("GET", "/metrics", headers={"Accept": OPEN}).text)
    said = [
        {(sample.name, *sorted(sample.labels.items())): sample.value for family in found for sample in family.samples}
        for found in (plain, strict)
    ]
    assert said[0] == said[1]
    assert len(said[0]) > 20


def test_prometheus_metrics_contain_the_current_state_of_queues(broker: Broker, ask: Client) -> None:
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
