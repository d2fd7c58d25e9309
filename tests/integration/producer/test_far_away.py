"""A distant broker, simulated by the proxy of `benchmarks.delay`."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

from benchmarks.delay import delayed
from qflow_client import ConnectionFailed, Producer
from qflow_client.broker import Broker
from tests.effort import rounds

from .tools import unused_port


@pytest.mark.parametrize("capacity", ["auto", 100])
def test_the_simulated_distant_broker_delays_every_byte_in_both_directions_and_keeps_the_order(
    broker: Broker, stack: ExitStack, capacity: int | str
) -> None:
    url = stack.enter_context(delayed(broker.url, 0.05))
    bodies = [b"%d" % n * 100 for n in range(rounds(1500, least=500))]
    with Producer(url, routing_key="q", capacity=capacity) as producer:  # type: ignore[arg-type]
        began = time.monotonic()
        producer.send(bodies[0]).wait()
        assert time.monotonic() - began >= 0.1
        for body in bodies[1:]:
            producer.send(body)
    assert [message.body for message in broker.messages("q")] == bodies


def test_the_simulated_distant_broker_ends_a_connection_if_its_broker_is_unreachable(stack: ExitStack) -> None:
    url = f"amqp://guest:guest@127.0.0.1:{unused_port()}/%2F"
    with pytest.raises(ConnectionFailed):
        Producer(stack.enter_context(delayed(url, 0.001)), connect_timeout=5)
