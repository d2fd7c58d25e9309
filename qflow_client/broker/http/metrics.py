"""Writes metrics for Prometheus.

Each queue has its own time series. Connections and channels have only totals, because they are often opened and closed,
and each of them would need new time series.

This module writes the text itself, in slices (see `Turns`). With 20,000 queues, `prometheus_client` would block the
event loop for seconds.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import chain

from qflow_client.broker.broker import Broker
from qflow_client.broker.core.snapshots import MemorySnapshot, QueueSnapshot
from qflow_client.broker.http.turns import Turns
from qflow_client.broker.policies.policy import MARKS

__all__ = ["OPEN_METRICS", "PROMETHEUS", "metrics_text"]

#: Media types of the text format of Prometheus and of OpenMetrics.
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

# For each metric type, the suffix of sample names. In the Prometheus format, family names have this suffix too.
_SUFFIXES = {"counter": "_total", "info": "_info"}

_QUEUE_GAUGES = (
    ("depth", "qflow_queue_messages", "Messages in a queue, ready and unacked"),
    ("ready", "qflow_queue_ready_messages", "Messages of a queue to deliver"),
    ("unacked", "qflow_queue_unacked_messages", "Messages of a queue that consumers have not settled"),
    ("bytes", "qflow_queue_bytes", "Body bytes in a queue"),
    ("memory", "qflow_queue_memory_bytes", "Body bytes of a queue that are in memory"),
    ("flow_stopped", "qflow_queue_flow_stopped", "Whether a queue is ON: 1 for ON, 0 for OFF"),
    ("held_confirms", "qflow_queue_held_confirms", "Messages whose confirms wait until their queue is OFF"),
    ("consumers", "qflow_queue_consumers", "Consumers of a queue"),
)
_QUEUE_COUNTERS = (
    ("flow_stopped_count", "qflow_queue_flow_stops", "How often a queue turned from OFF to ON"),
    ("published", "qflow_queue_published_messages", "Messages that a queue has received"),
    ("delivered", "qflow_queue_delivered_messages", "Deliveries from a queue, including redeliveries"),
    ("acked", "qflow_queue_acked_messages", "Messages of a queue that were acked"),
    (
        "dropped",
        "qflow_queue_dropped_messages",
        "Messages that a queue dropped or silently refused, without purged ones",
    ),
)
_MEMORY_GAUGES = (
    ("limit", "qflow_memory_limit_bytes", "Maximum bytes of messages in memory; 0 for no limit"),
    ("bytes", "qflow_memory_bytes", "Bytes of messages in memory; 0 if they are not counted"),
    ("backlog_bytes", "qflow_store_backlog_bytes", "Body bytes that wait to be written to disk"),
    ("damaged", "qflow_store_damaged_rows", "Rows of the message store that are damaged and set aside"),
)
_MEMORY_COUNTERS = (
    ("evicted", "qflow_memory_evicted_messages", "Bodies that were removed from memory because they are on disk"),
    ("loaded", "qflow_memory_loaded_messages", "Bodies that were read back from disk"),
    ("written", "qflow_store_written_messages", "Messages that were written to disk"),
    ("commits", "qflow_store_commits", "Commits of the message store"),
)


class _Head:
    """Writes the ``# HELP`` and ``# TYPE`` lines of a metric family, in the Prometheus or OpenMetrics format."""

    def __init__(self, *, is_open: bool) -> None:
        self._is_open = is_open

    def __call__(self, kind: str, name: str, text: str) -> str:
        if not self._is_open:
            name += _SUFFIXES.get(kind, "")
            kind = "gauge" if kind == "info" else kind
        return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


def _quoted(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    return f'"{escaped}"'


# Type, snapshot attribute, name and help text of each metric family that has one sample for each queue.
_QUEUE_FAMILIES = (
    *(("gauge", attribute, name, text) for attribute, name, text in _QUEUE_GAUGES),
    *(("counter", attribute, name, text) for attribute, name, text in _QUEUE_COUNTERS),
)


def _add_queue(families: Sequence[bytearray], queue: QueueSnapshot) -> None:
    """Append the samples of one queue to the texts of the metric families. The last family has the thresholds."""
    label = _quoted(queue.name)
    for family, (kind, attribute, name, _) in zip(families, _QUEUE_FAMILIES, strict=False):
        line = f"{name}{_SUFFIXES.get(kind, '')}{{queue={label}}} {getattr(queue, attribute):d}\n"
        family += line.encode(errors="replace")
    for mark in MARKS:
        value = getattr(queue.thresholds, mark)
        line = f'qflow_queue_threshold{{mark="{mark}",queue={label}}} {value:d}\n'
        families[-1] += line.encode(errors="replace")


def _memory_lines(head: _Head, memory: MemorySnapshot) -> Iterator[str]:
    for attribute, name, text in _MEMORY_GAUGES:
        yield _gauge(head, name, text, getattr(memory, attribute))
    for attribute, name, text in _MEMORY_COUNTERS:
        yield f"{head('counter', name, text)}{name}_total {getattr(memory, attribute):d}\n"


def _gauge(head: _Head, name: str, text: str, value: int) -> str:
    return f"{head('gauge', name, text)}{name} {value:d}\n"


def _build(head: _Head) -> str:
    version = _quoted(str(import_module("qflow_client").__version__))
    python = _quoted(platform.python_version())
    about = head("info", "qflow_build", "Versions of the library and of Python; always 1")
    return f"{about}qflow_build_info{{python={python},version={version}}} 1\n"


async def metrics_text(broker: Broker, turns: Turns, media_type: str = PROMETHEUS) -> bytearray:
    """Return the metrics as text of the media type `PROMETHEUS` or `OPEN_METRICS`."""
    head = _Head(is_open=media_type == OPEN_METRICS)
    families = [bytearray(head(kind, name, text).encode()) for kind, _, name, text in _QUEUE_FAMILIES]
    families.append(
        bytearray(head("gauge", "qflow_queue_threshold", "Current threshold of a queue; 0 for no threshold").encode())
    )
    # Convert each snapshot to text immediately. A list of all snapshots would need far more memory than the text.
    async for queue in turns.each(broker.each_queue()):
        _add_queue(families, queue)
    channels = producers = flowed = 0
    async for channel in turns.each(broker.each_channel()):
        channels += 1
        producers += channel.is_producer
        flowed += channel.is_producer and channel.flowed
    sums = (
        ("qflow_connections", "Connections", broker.connection_count),
        ("qflow_channels", "Open channels", channels),
        ("qflow_producers", "Channels that have published, or are in confirm or transaction mode", producers),
        ("qflow_producers_flowed", "Producers that are flowed (blocked)", flowed),
        (
            "qflow_producers_stopped",
            "Whether an operator has stopped all producers: 1 for yes, 0 for no",
            broker.producers_stopped,
        ),
    )
    # Append one family at a time. A join of all lines would block the event loop.
    text = bytearray(_build(head).encode())
    async for family in turns.each(families):
        text += family
        family.clear()
    for line in chain(_memory_lines(head, broker.memory), (_gauge(head, *each) for each in sums)):
        text += line.encode()
    if media_type == OPEN_METRICS:
        text += b"# EOF\n"
    return text
