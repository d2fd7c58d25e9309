"""Ranges of a RabbitMQ stream, and errors for queues that are not streams. The tests need no RabbitMQ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qflow_client import ConnectionFailed, Producer
from qflow_client.broker import Broker
from qflow_client.spark.source import ranges
from qflow_client.spark.stream_consumer import Cursor, StreamConsumer, StreamError

offsets = st.integers(0, 60)


@given(offsets, offsets, st.sets(offsets), offsets)
def test_the_cursor_of_a_range_accepts_each_message_once_and_reports_missing_offsets(
    start: int, length: int, messages: set[int], before: int
) -> None:
    end = start + length
    cursor = Cursor(start, end)
    # The chunk begins before the range, and the stream continues after the range.
    given = sorted(offset for offset in messages if offset >= max(0, start - before))
    taken = [offset for offset in given if cursor.take(offset)]
    assert taken == [offset for offset in given if start <= offset < end]
    assert cursor.done == (length == 0 or any(offset >= end - 1 for offset in given))
    missing = {offset for first, last in cursor.gaps for offset in range(first, last)}
    assert missing == {offset for offset in range(start, min(cursor.at, end)) if offset not in given}
    # The cursor does not accept a message for the second time.
    assert not any(cursor.take(offset) for offset in given if offset < cursor.at)


def test_missing_offsets_are_reported_only_up_to_the_end_of_the_requested_offsets() -> None:
    cursor = Cursor(10, 20)
    assert cursor.take(12)
    assert not cursor.take(99)
    assert cursor.done
    assert cursor.gaps == [(10, 12), (13, 20)]


@given(offsets, offsets, st.integers(1, 9))
def test_a_batch_is_split_into_the_requested_number_of_ranges_without_omitting_an_offset(
    start: int, length: int, count: int
) -> None:
    found = list(ranges(start, start + length, count))
    assert [offset for first, last in found for offset in range(first, last)] == [*range(start, start + length)]
    assert len(found) == min(count, length)
    sizes = {last - first for first, last in found}
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_the_error_for_a_queue_that_is_no_stream_names_the_queue_and_the_connection_is_closed(broker: Broker) -> None:
    with Producer(broker.url, routing_key="rows") as producer:
        producer.send("1")
    with (
        pytest.raises(StreamError, match=r"messages of 'rows' have no x-stream-offset.* with the option queue"),
        StreamConsumer([broker.url], 60, "rows") as consumer,
    ):
        consumer.end()
    with (
        pytest.raises(ConnectionFailed, match=r"reading stream 'nobody' ended: .*404"),
        StreamConsumer([broker.url], 60, "nobody") as consumer,
    ):
        consumer.begin()
    broker.wait_until(lambda b: not b.connections(), timeout=100)
    # The queue still has its message, which was not acknowledged.
    assert broker.queue("rows").depth == 1


def test_the_error_for_unreachable_brokers_names_the_brokers_without_passwords() -> None:
    with pytest.raises(ConnectionFailed, match=r"127\.0\.0\.1:1/") as caught:
        StreamConsumer(["amqp://guest:secret@127.0.0.1:1/"], 5, "events")
    assert "secret" not in str(caught.value)
    with Broker() as broker:
        StreamConsumer(["amqp://127.0.0.1:1/", broker.url], 60, "events").close()
