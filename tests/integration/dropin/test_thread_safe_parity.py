"""Scenarios for the thread-safe `Connection` of pika 1.5, run with pika and with the drop-in, and compared.

A publish on a closed channel of an open connection is not compared: pika drops the message, and the drop-in raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pika as original
import pytest

import qflow_client.pika as drop_in
from qflow_client.broker import Broker
from tests.integration.producer.tools import PATIENCE, bodies, eventually

from .scenarios import normal, recorder
from .tools import end_thread_safe

pytest.importorskip("pika.adapters.thread_safe_connection", reason="pika has it from 1.5 on")

# A scenario gets the module (pika or the drop-in), a channel with an empty queue ``q``, the broker, and a list for its
# observations. The tests also compare its result or exception.
Scenario = Callable[[Any, Any, Broker, list[Any]], Any]

SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def outcome(module: Any, name: str) -> Any:
    """Run a scenario on a separate broker."""
    log: list[Any] = []
    with Broker() as broker:
        connection = module.Connection(module.URLParameters(broker.url))
        try:
            channel = connection.channel()
            channel.connection_of_test = connection
            channel.queue_declare("q")
            try:
                result = normal(SCENARIOS[name](module, channel, broker, log))
            except Exception as error:
                result = ["raised", normal(error)]
            state = [channel.is_open, channel.is_closed, connection.is_open, connection.is_closed]
        finally:
            end_thread_safe(connection)
    return [result, normal(log), state]


def raised(function: Callable[..., object], *arguments: Any, **keywords: Any) -> list[Any]:
    """Return the result of a call, or the exception that it raises."""
    try:
        return ["returned", normal(function(*arguments, **keywords))]
    except Exception as error:
        return normal(error)  # type: ignore[no-any-return]  # a list


@scenario
def topology(_pika: Any, channel: Any, _broker: Broker, log: list[Any]) -> Any:
    log.append(channel.exchange_declare("x", "topic"))
    log.append(channel.exchange_declare("y", "fanout"))
    log.append(channel.exchange_bind("y", "x", "#"))
    log.append(channel.queue_declare("other", durable=True, arguments={"x-max-length": 5}))
    log.append(channel.queue_bind("other", "y"))
    channel.basic_publish("x", "key", b"body")
    # The broker answers after it has stored the message.
    log.append(channel.queue_purge("other"))
    log.append(channel.queue_unbind("other", "y"))
    log.append(channel.exchange_unbind("y", "x", "#"))
    return channel.queue_delete("other"), channel.exchange_delete("x"), channel.exchange_delete("y")


@scenario
def publish_and_get(pika: Any, channel: Any, _broker: Broker, log: list[Any]) -> Any:
    log.append(channel.basic_get("q"))
    properties = pika.BasicProperties(headers={"a": [1, None]}, delivery_mode=2, message_id="one")
    log.append(channel.basic_publish("", "q", b"x" * 300_000, properties))
    log.append(channel.basic_publish("", "q", "text"))
    method, found, body = channel.basic_get("q")
    return method, found, body, channel.basic_ack(method.delivery_tag), channel.basic_get("q", auto_ack=True)


@scenario
def confirms(_pika: Any, channel: Any, broker: Broker, log: list[Any]) -> Any:
    answers: list[Any] = []
    log.append(channel.next_publish_seq_no)
    log.append(channel.confirm_delivery(answers.append))
    log.append(channel.confirm_delivery(print))
    log.append(channel.next_publish_seq_no)
    for number in range(20):
        channel.basic_publish("", "q", b"%d" % number, on_publish=log.append)
    # The number of messages that one answer confirms is random.
    eventually(lambda: answers and answers[-1].method.delivery_tag == 20)
    log.append({type(answer.method).__name__ for answer in answers})
    return channel.next_publish_seq_no, bodies(broker)


@scenario
def on_publish_without_confirms(_pika: Any, channel: Any, broker: Broker, log: list[Any]) -> Any:
    channel.basic_publish("", "q", b"", on_publish=log.append)
    return channel.queue_declare("q", passive=True), channel.next_publish_seq_no


@scenario
def a_failing_on_publish(_pika: Any, channel: Any, broker: Broker, log: list[Any]) -> Any:
    channel.confirm_delivery(lambda answer: None)

    def fail(tag: int) -> None:
        log.append(tag)
        raise ZeroDivisionError

    channel.basic_publish("", "q", b"1", on_publish=fail)
    channel.basic_publish("", "q", b"2", on_publish=fail)
    return channel.queue_declare("q", passive=True)


@scenario
def returned_messages(pika: Any, channel: Any, _broker: Broker, log: list[Any]) -> Any:
    channel.add_on_return_callback(recorder(log, "returned"))
    channel.confirm_delivery(recorder(log, "confirmed"))
    channel.basic_publish("", "nowhere", b"body", pika.BasicProperties(headers={"a": 1}), mandatory=True)
    eventually(lambda: len(log) == 2)


@scenario
def consume_and_answer(_pika: Any, channel: Any, broker: Broker, log: list[Any]) -> Any:
    def take(channel: Any, method: Any, properties: Any, body: bytes) -> None:
        log.append([method, properties, body])
        if body == b"rejected":
            channel.basic_reject(method.delivery_tag, requeue=False)
        elif method.redelivered or body == b"taken":
            channel.basic_ack(method.delivery_tag)
            # Publish also in a callback.
            channel.basic_publish("", "other", body)
        else:
            channel.basic_nack(method.delivery_tag)

    channel.queue_declare("other")
    log.append(channel.basic_qos(prefetch_count=1))
    log.append(channel.basic_consume("q", take, consumer_tag="tag"))
    for body in b"taken", b"rejected", b"put back":
        channel.basic_publish("", "q", body)
    broker.wait_until(lambda broker: bodies(broker, "other") == [b"taken", b"put back"])
    return channel.basic_cancel("tag"), channel.queue_declare("q", passive=True)


@scenario
def a_failing_consumer(_pika: Any, channel: Any, broker: Broker, log: list[Any]) -> Any:
    def fail(_channel: Any, method: Any, _properties: Any, body: bytes) -> None:
        log.append([method.delivery_tag, body])
        raise ZeroDivisionError

    channel.basic_consume("q", fail, auto_ack=True, consumer_tag="tag")
    channel.basic_publish("", "q", b"1")
    channel.basic_publish("", "q", b"2")
    eventually(lambda: len(log) == 2)
    return channel.queue_declare("q", passive=True)


@scenario
def a_cancelled_consumer(_pika: Any, channel: Any, broker: Broker, log: list[Any]) -> Any:
    channel.add_on_cancel_callback(recorder(log, "cancelled"))
    channel.basic_consume("q", recorder(log, "message"), consumer_tag="tag")
    broker.delete_queue("q")
    eventually(lambda: log)


@scenario
def an_error_closes_the_channel(_pika: Any, channel: Any, _broker: Broker, log: list[Any]) -> Any:
    log.append(raised(channel.queue_declare, "missing", passive=True))
    log.append(raised(channel.queue_declare, "q"))
    log.append(raised(channel.close))
    other = channel.connection_of_test.channel()
    return other.channel_number, other.queue_declare("q", passive=True)


@scenario
def refused_arguments(_pika: Any, channel: Any, _broker: Broker, log: list[Any]) -> Any:
    log.append(raised(channel.confirm_delivery, None))
    log.append(raised(channel.basic_publish, "", "q", b"", on_publish=1))
    log.append(raised(channel.basic_consume, "q", None))
    log.append(raised(channel.add_on_return_callback, None))
    log.append(raised(channel.add_on_cancel_callback, None))
    return channel.queue_declare("q", passive=True)


@scenario
def a_closed_channel(_pika: Any, channel: Any, _broker: Broker, log: list[Any]) -> Any:
    log.append(channel.close(200, "enough"))
    log.append(raised(channel.close))
    log.append(raised(channel.abort))
    return channel.channel_number


@scenario
def channels_have_numbers(_pika: Any, channel: Any, _broker: Broker, log: list[Any]) -> Any:
    connection = channel.connection_of_test
    channels = [connection.channel() for _ in range(3)]
    log.append([each.channel_number for each in channels])
    channels[0].close()
    log.append(connection.channel().channel_number)


@scenario
def blocked_and_unblocked(_pika: Any, channel: Any, broker: Broker, log: list[Any]) -> Any:
    connection = channel.connection_of_test
    connection.add_on_connection_blocked_callback(recorder(log, "one"))
    connection.add_on_connection_blocked_callback(recorder(log, "two"))
    connection.add_on_connection_unblocked_callback(recorder(log, "three"))
    # pika registers these callbacks on its own thread, before this call.
    channel.queue_declare("q")
    broker.block("no memory")
    eventually(lambda: len(log) == 2)
    broker.unblock()
    eventually(lambda: len(log) == 3)


@scenario
def calls_on_the_loop(_pika: Any, channel: Any, broker: Broker, log: list[Any]) -> Any:
    connection = channel.connection_of_test
    called = threading.Event()

    def call() -> None:
        log.append(raised(channel.basic_publish, "", "q", b"from the loop"))
        called.set()

    result = connection.add_callback_threadsafe(call)
    assert called.wait(PATIENCE)
    broker.wait_until(lambda broker: bodies(broker) == [b"from the loop"])
    return result


@scenario
def a_closed_connection(_pika: Any, channel: Any, _broker: Broker, log: list[Any]) -> Any:
    connection = channel.connection_of_test
    log.append(connection.close())
    log.append(raised(connection.close))
    log.append(raised(connection.channel))
    log.append(raised(channel.basic_publish, "", "q", b""))
    log.append(raised(connection.add_callback_threadsafe, print))
    log.append(raised(connection.abort))


@scenario
def a_left_block(pika: Any, channel: Any, broker: Broker, log: list[Any]) -> Any:
    with pika.Connection(pika.URLParameters(broker.url)) as connection:
        inner = connection.channel()
        inner.basic_publish("", "q", b"")
    log.append([inner.is_open, connection.is_open, connection.is_closed])
    end_thread_safe(connection)
    return bodies(broker)


@scenario
def a_lost_connection(_pika: Any, channel: Any, broker: Broker, log: list[Any]) -> Any:
    broker.drop_connections()
    channel.connection_of_test._ioloop_thread.join(PATIENCE)
    log.append(raised(channel.queue_declare, "q"))
    log.append(raised(channel.basic_publish, "", "q", b""))
    log.append(raised(channel.connection_of_test.channel))


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_drop_in_has_the_results_exceptions_and_order_of_callbacks_of_pika(name: str) -> None:
    assert outcome(drop_in, name) == outcome(original, name)
