"""A broker that sends bytes that are not AMQP."""

from __future__ import annotations

from collections.abc import Callable

import pamqp.commands
import pamqp.frame
import pytest

from qflow_client import Outcome, Producer, ProducerClosed, UndeliveredMessages
from qflow_client.broker import Broker

from .tools import Proxy, eventually, send_unconfirmed, start_send

GARBAGE = b"HTTP/1.1 502 Bad Gateway\r\n\r\n"
NO_FRAME = "the data from the broker cannot be read: frame type 72 does not exist in AMQP"
CLOSE = pamqp.frame.marshal(pamqp.commands.Connection.Close(320, "CONNECTION_FORCED - node goes down", 0, 0), 0)
# More than pika takes at once before it waits for the socket again.
MUCH = pamqp.frame.marshal(pamqp.commands.Connection.Unblocked(), 0) * 10_000


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(GARBAGE, NO_FRAME, id="immediately"),
        pytest.param(CLOSE + GARBAGE, "320 CONNECTION_FORCED - node goes down", id="after a close by the broker"),
        pytest.param(MUCH + GARBAGE, NO_FRAME, id="after many valid frames"),
        pytest.param(b"\3\0\1\x7f\xff\xff\xff", "larger than frame-max", id="a frame of 2 GB"),
    ],
)
@pytest.mark.usefixtures("one_connection")
def test_invalid_bytes_end_the_producer_and_every_wait_with_the_reason_of_an_earlier_close_if_there_was_one(
    broker: Broker, proxy: Proxy, make_producer: Callable[..., Producer], data: bytes, reason: str
) -> None:
    producer = make_producer(proxy.url(broker))
    producer.send(b"x").result(timeout=20)
    (receipt,) = send_unconfirmed(producer, broker, b"unconfirmed")
    producer.pause()
    waiting = start_send(producer, b"waits")
    # Nothing after the invalid bytes is read.
    proxy.inject(data + b"x")
    with pytest.raises(ProducerClosed, match=reason):
        waiting.result()
    eventually(lambda: producer.closed, "the end")
    with pytest.raises(ProducerClosed, match=reason):
        producer.send(b"y")
    with pytest.raises(UndeliveredMessages):
        producer.close()
    assert receipt.outcome is Outcome.UNKNOWN
