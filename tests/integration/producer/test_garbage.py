"""A broker that sends bytes that are not AMQP."""

from __future__ import annotations

from collections.abc import Callable

import pamqp.commands
import pamqp.frame
import pytest

from qflow_client import Producer, ProducerClosed
from qflow_client.broker import Broker

from .tools import Proxy, eventually

GARBAGE = b"HTTP/1.1 502 Bad Gateway\r\n\r\n"
CLOSE = pamqp.frame.marshal(pamqp.commands.Connection.Close(320, "CONNECTION_FORCED - node goes down", 0, 0), 0)
# More than pika takes at once before it waits for the socket again.
MUCH = pamqp.frame.marshal(pamqp.commands.Connection.Unblocked(), 0) * 10_000


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (GARBAGE, "frame type 72 does not exist in AMQP"),
        (CLOSE + GARBAGE, "320 CONNECTION_FORCED - node goes down"),
        (MUCH + GARBAGE, "frame type 72 does not exist in AMQP"),
        (b"\3\0\1\x7f\xff\xff\xff", "larger than frame-max"),
    ],
    ids=["immediately", "after a close by the broker", "after many valid frames", "a frame of 2 GB"],
)
@pytest.mark.usefixtures("one_connection")
def test_invalid_bytes_end_the_producer_with_the_reason_of_an_earlier_close_if_there_was_one(
    broker: Broker, proxy: Proxy, make_producer: Callable[..., Producer], data: bytes, reason: str
) -> None:
    producer = make_producer(proxy.url(broker))
    receipt = producer.send(b"x")
    receipt.result(timeout=20)
    proxy.inject(data + b"x")
    eventually(lambda: producer.closed, "the end")
    with pytest.raises(ProducerClosed, match=reason):
        producer.send(b"y")
