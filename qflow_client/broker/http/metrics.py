"""What Prometheus is told: of queues by name; connections and channels, whose names never come back, are counted."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from qflow_client.broker.broker import Broker

__all__ = ["MEDIA_TYPE", "metrics_text"]

MEDIA_TYPE = CONTENT_TYPE_LATEST

_QUEUE_GAUGES = (
    ("depth", "qflow_queue_messages", "Messages in a queue, ready and unacked"),
    ("ready", "qflow_queue_ready_messages", "Messages to be delivered"),
    ("unacked", "qflow_queue_unacked_messages", "Messages that consumers have not settled"),
    ("bytes", "qflow_queue_bytes", "Body bytes in a queue"),
    ("memory", "qflow_queue_memory_bytes", "Body bytes of a queue that are in memory"),
    ("flow_stopped", "qflow_queue_flow_stopped", "Whether a queue's flow state is ON"),
    ("held_confirms", "qflow_queue_held_confirms", "Messages whose confirms wait for OFF"),
    ("consumers", "qflow_queue_consumers", "Consumers of a queue"),
)
_QUEUE_COUNTERS = (
    ("flow_stopped_count", "qflow_queue_flow_stops", "How often a queue's flow state went from OFF to ON"),
    ("published", "qflow_queue_published_messages", "Messages enqueued"),
    ("delivered", "qflow_queue_delivered_messages", "Deliveries, repeated ones included"),
    ("acked", "qflow_queue_acked_messages", "Messages acked"),
    ("dropped", "qflow_queue_dropped_messages", "Messages rejected for good or dropped for want of room"),
)
_MEMORY_GAUGES = (
    ("limit", "qflow_memory_limit_bytes", "Bytes of messages that may be in memory; 0 for any number"),
    ("bytes", "qflow_memory_bytes", "Bytes of messages in memory; 0 if they are not counted"),
    ("backlog_bytes", "qflow_store_backlog_bytes", "Body bytes on their way to disk"),
    ("damaged", "qflow_store_damaged_rows", "Rows of the message store that are damaged and set aside"),
)
_MEMORY_COUNTERS = (
    ("evicted", "qflow_memory_evicted_messages", "Bodies that left memory for the disk"),
    ("loaded", "qflow_memory_loaded_messages", "Bodies that were read back from disk"),
    ("written", "qflow_store_written_messages", "Messages that went to disk"),
    ("commits", "qflow_store_commits", "Transactions of the message store"),
)
_THRESHOLDS = (
    "flow_stop_count",
    "flow_resume_count",
    "flow_stop_size",
    "flow_resume_size",
    "capacity",
    "flow_resume_capacity",
)


class _BrokerCollector(Collector):
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def collect(self) -> Iterator[Metric]:
        queues, channels = self._broker.queues(), self._broker.channels()
        for attribute, name, text in _QUEUE_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["queue"])
            for queue in queues:
                gauge.add_metric([queue.name], getattr(queue, attribute))
            yield gauge
        for attribute, name, text in _QUEUE_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["queue"])
            for queue in queues:
                counter.add_metric([queue.name], getattr(queue, attribute))
            yield counter
        marks = GaugeMetricFamily("qflow_queue_threshold", "A mark in force; 0 for none", labels=["queue", "mark"])
        for queue in queues:
            for mark in _THRESHOLDS:
                marks.add_metric([queue.name, mark], getattr(queue.thresholds, mark))
        yield marks
        memory = self._broker.memory
        for attribute, name, text in _MEMORY_GAUGES:
            yield GaugeMetricFamily(name, text, value=getattr(memory, attribute))
        for attribute, name, text in _MEMORY_COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(memory, attribute))
        producers = [channel for channel in channels if channel.is_producer]
        for name, text, value in (
            ("qflow_connections", "Connections", len(self._broker.connections())),
            ("qflow_channels", "Open channels", len(channels)),
            ("qflow_producers", "Channels that publish", len(producers)),
            ("qflow_producers_flowed", "Producers that are flowed (blocked)", sum(each.flowed for each in producers)),
            ("qflow_producers_stopped", "Whether an operator has stopped all", self._broker.producers_stopped),
        ):
            yield GaugeMetricFamily(name, text, value=value)


def metrics_text(broker: Broker) -> bytes:
    """The metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_BrokerCollector(broker))
    return generate_latest(registry)
