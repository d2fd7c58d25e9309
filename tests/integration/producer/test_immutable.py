"""A published message does not change if the caller changes its objects later (E3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from qflow_client import FlowControlTimeout, Message, Outcome, Producer
from qflow_client.broker import Broker
from qflow_client.message import REPUBLISHED

from .tools import Proxy, start_send, wait_held


def orders(broker: Broker) -> list[Any]:
    """The orders that arrived, without the marks of second copies."""
    headers = [dict(message.properties.headers or {}) for message in broker.messages("q")]
    for each in headers:
        each.pop(REPUBLISHED, None)
    return headers


def expected(count: int) -> list[Any]:
    return [{"order": n, "parts": [n, {"n": n}]} for n in range(count)]


class Reused:
    """One dict for the headers of several messages, as programs reuse it."""

    def __init__(self) -> None:
        self._headers: dict[str, Any] = {"order": -1, "parts": [-1, {"n": -1}]}

    def message(self, number: int) -> Message:
        self._headers["order"] = self._headers["parts"][0] = self._headers["parts"][1]["n"] = number
        return Message(b"", headers=self._headers)


def test_E3_headers_can_be_reused_after_a_send_raised_an_error(
    broker: Broker, make_producer: Callable[..., Producer], proxy: Proxy
) -> None:
    producer = make_producer(proxy.url(broker), on_refused="retry", retry_delay=0.01)
    broker.nack_publishes()
    reused = Reused()
    # All are sent before the first is refused.
    proxy.stop_reading()
    receipts = [producer.send(reused.message(number)) for number in range(6)]
    proxy.go_on_reading()
    wait_held(producer, "refused")
    broker.nack_publishes(False)
    producer.flush(timeout=20)
    # Their order may change: each was refused while younger ones were in flight (E1).
    assert sorted(orders(broker), key=lambda headers: headers["order"]) == expected(6)
    assert [receipt.message.headers for receipt in receipts] == expected(6)


def test_E3_headers_can_be_reused_after_a_lost_connection(
    broker: Broker, make_producer: Callable[..., Producer], proxy: Proxy
) -> None:
    producer = make_producer(proxy.url(broker), reconnect_delay=0.01)
    broker.withhold_confirms()
    reused = Reused()
    receipts = [producer.send(reused.message(number)) for number in range(6)]
    broker.wait_until(lambda b: b.queue("q").depth == 6)
    # Nor can the message that the receipt gives be changed.
    headers: Any = receipts[0].message.headers
    with pytest.raises(TypeError, match="headers cannot be changed"):
        headers["parts"][1]["n"] = "changed"
    proxy.cut()
    broker.wait_until(lambda b: b.queue("q").depth == 12)
    broker.release_confirms()
    producer.flush(timeout=20)
    assert orders(broker) == expected(6) * 2


def test_E3_headers_can_be_reused_while_earlier_messages_wait(
    broker: Broker, make_producer: Callable[..., Producer]
) -> None:
    producer = make_producer()
    producer.pause()
    reused = Reused()
    jobs = [start_send(producer, reused.message(number)) for number in range(4)]
    reused.message(99)
    producer.resume()
    assert {job.result().result(20) for job in jobs} == {Outcome.CONFIRMED}
    assert orders(broker) == expected(4)


@pytest.mark.parametrize("tracing", [False, True])
def test_E3_an_error_of_send_contains_the_unchanged_message(
    make_producer: Callable[..., Producer], tracing: bool
) -> None:
    producer = make_producer(tracing=tracing)
    producer.pause()
    reused = Reused()
    with pytest.raises(FlowControlTimeout) as caught:
        producer.send(reused.message(1), timeout=0)
    reused.message(2)
    assert caught.value.message == Message(b"", headers={"order": 1, "parts": [1, {"n": 1}]})
