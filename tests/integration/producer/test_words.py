"""The errors for common mistakes of beginners say what to do."""

from __future__ import annotations

import asyncio
import copy
import pickle
import warnings
from collections.abc import Callable

import pytest

from qflow_client import AsyncProducer, FlowControlTimeout, MessageRejected, Producer, QflowError
from qflow_client.broker import Broker

from .tools import PATIENCE


def test_the_error_for_a_missing_exchange_says_to_declare_it(producer: Producer) -> None:
    with pytest.raises(MessageRejected, match=r"404 .*'orders'.*; declare the exchange first"):
        producer.send(b"x", exchange="orders").result(PATIENCE)


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy])
def test_a_producer_cannot_be_pickled_or_copied_and_the_error_says_to_create_one_in_each_process(
    broker: Broker, take: Callable[[object], object]
) -> None:
    with Producer(broker.url, routing_key="q") as producer:
        for each in producer, AsyncProducer(broker.url, routing_key="q"):
            with pytest.raises(TypeError, match="has a connection, and cannot be pickled or copied; make one in each"):
                take(each)


def test_a_threaded_producer_warns_if_an_event_loop_is_running(broker: Broker) -> None:
    async def run() -> None:
        with pytest.warns(RuntimeWarning, match="blocks the event loop of this thread; use AsyncProducer"):
            producer = Producer(broker.url, routing_key="q")
        producer.close()

    asyncio.run(run())


def test_each_threaded_producer_warns_once_if_its_send_calls_wait_in_an_event_loop(broker: Broker) -> None:
    def wait(producer: Producer) -> None:
        with pytest.raises(FlowControlTimeout):
            producer.send(b"x", timeout=0.001)

    async def wait_twice(producer: Producer) -> None:
        wait(producer)
        wait(producer)

    async def make_and_wait() -> None:
        with Producer(broker.url, routing_key="q") as producer:
            producer.pause()
            await wait_twice(producer)

    def warned() -> list[str]:
        # There may be a `ResourceWarning` about the garbage of earlier tests.
        return [each.filename for each in caught if each.category is RuntimeWarning]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with Producer(broker.url, routing_key="q") as producer:
                producer.send(b"x").result(PATIENCE)
                producer.pause()
                wait(producer)
                asyncio.run(wait_twice(producer))
        assert warned() == [__file__] * 2
        # This one warns when it is made.
        asyncio.run(make_and_wait())
        assert len(warned()) == 3


def test_the_error_of_an_asyncio_producer_without_a_loop_says_that_it_needs_asyncio(broker: Broker) -> None:
    connecting = AsyncProducer(broker.url, routing_key="q").connect()
    with pytest.raises(QflowError, match="needs a running event loop of asyncio, and none runs here"):
        connecting.send(None)
