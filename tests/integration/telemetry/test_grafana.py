"""Dashboards and alerts use only existing metrics and labels."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from qflow_client import MessageReturned, Producer, telemetry
from qflow_client.broker import Broker

FOLDER = Path(__file__).parents[3] / "docs" / "grafana"
# Name, expression and summary of each.
ALERTS = re.findall(
    r'- alert: (\w+)\n +expr: (.+)\n(?: +(?:for|labels): .+\n)+ +annotations:\n +summary: "(.+)"',
    (FOLDER / "qflow-alerts.yml").read_text(encoding="utf-8"),
)


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """The labels of each metric of a producer and of the broker, as Prometheus sees them."""
    patch = pytest.MonkeyPatch()
    provider = MeterProvider(metric_readers=[PrometheusMetricReader()])
    patch.setattr(metrics, "get_meter_provider", lambda: provider)
    patch.setattr(metrics, "get_meter", lambda *args, **more: provider.get_meter(*args, **more))
    patch.setattr(telemetry, "_metrics", None)
    found: dict[str, set[str]] = {}
    with Broker(http_port=0) as broker, Producer(broker.url, routing_key="q", declare="q") as producer:
        producer.send(b"x").result(20)
        with pytest.raises(MessageReturned):
            producer.send(b"x", routing_key="nowhere").result(20)
        with urllib.request.urlopen(f"{broker.http_url}/metrics") as answer:
            of_broker = text_string_to_metric_families(answer.read().decode())
        for family in (*REGISTRY.collect(), *of_broker):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    provider.shutdown()
    patch.undo()
    return found


def check(expression: str, said: str, labels: dict[str, set[str]]) -> set[str]:
    """Check an expression of PromQL, and what is said of its result. Return the names of the metrics in it."""
    found = re.findall(r"\b((?:messaging|qflow)_\w+)\{([^}]*)\}", expression)
    assert found, expression
    for name, matchers in found:
        assert name in labels, expression
        by = re.search(r"by \(([^)]*)\)", expression)
        results = set(re.findall(r"\w+", by[1])) if by else labels[name]
        assert results | set(re.findall(r"(\w+)[!=]", matchers)) <= labels[name], expression
        assert set(re.findall(r"(?:\$labels\.|\{\{)(\w+) ?\}\}", said)) <= results, said
    return {name for name, _ in found}


@pytest.mark.parametrize(("name", "expression", "summary"), ALERTS, ids=[name for name, *_ in ALERTS])
def test_every_prometheus_alert_uses_existing_metrics(
    name: str, expression: str, summary: str, labels: dict[str, set[str]]
) -> None:
    check(expression, summary, labels)
    assert expression.count("(") == expression.count(")"), name


def test_this_test_file_checks_every_alert_of_the_alert_file() -> None:
    text = (FOLDER / "qflow-alerts.yml").read_text(encoding="utf-8")
    assert len(ALERTS) == text.count("- alert:") == 8


@pytest.mark.parametrize(("of", "count"), [("broker", 8), ("producer", 9)])
def test_a_grafana_dashboard_uses_existing_metrics_and_all_metrics_of_the_producer(
    of: str, count: int, labels: dict[str, set[str]]
) -> None:
    panels = json.loads((FOLDER / f"qflow-{of}.json").read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == count
    used = set()
    for panel in panels:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            used |= check(target["expr"], target["legendFormat"], labels)
    if of == "producer":
        ours = {name for name in labels if name.startswith(("messaging_", "qflow_producer_"))}
        # A histogram is read by its buckets.
        assert used == {name for name in ours if not name.endswith(("_count", "_sum", "_created"))}
