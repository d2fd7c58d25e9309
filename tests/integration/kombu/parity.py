"""Scenarios for a channel of kombu. Tests run each scenario with kombu's transport and with ours, and compare.

The name of a scenario is the name of a public member of the channel. A second part may follow. A scenario gets a
connection, its channel with an empty queue ``q``, and a list for its observations. The tests also compare its result or
exception.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

import amqp
import kombu
import pytest
from amqp import spec
from kombu.transport import base

from tests.integration.producer.tools import PATIENCE, eventually

Scenario = Callable[[Any, Any, list[Any]], Any]

SCENARIOS: dict[str, Scenario] = {}
QUEUES = ("q", "other", "dead")
EXCHANGES = ("x", "y")


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def normal(value: Any) -> Any:
    """Return a value in a form that can be compared between two connections."""
    if isinstance(value, BaseException):
        # Do not compare the modules of exceptions, or their causes.
        return [type(value).__name__, normal(value.args)]
    if isinstance(value, base.Message):
        return [
            "Message",
            normal(value.body),
            value.delivery_tag,
            normal(value.delivery_info),
            normal(value.properties),
        ]
    if isinstance(value, amqp.Message):
        return ["amqp", normal(value.body), normal(value.delivery_info), normal(value.properties)]
    if isinstance(value, (tuple, list)):
        return [normal(each) for each in value]
    if isinstance(value, dict):
        return {key: normal(each) for key, each in sorted(value.items())}
    if isinstance(value, str):
        # Replace numbers that kombu counts over all consumers, and the names of the two transports.
        value = re.sub(r"^(tag|None)\d+$|qflow_client\.kombu\.channel|kombu\.transport\.pyamqp", "…", value)
        return re.sub(r"[0-9a-f-]{32,36}|amq\.\S+|0x[0-9a-f]+", "…", value)
    if isinstance(value, (bytes, int, float, type(None))):
        return value
    return type(value).__name__


def outcome(url: str, scheme: str, name: str, *, confirms: bool) -> Any:
    """Run a scenario, and then delete its queues and exchanges."""
    found = outcome_on_its_own(url, scheme, name, confirms=confirms)
    with kombu.Connection(url.replace("amqp", "pyamqp", 1)) as again:
        cleaner = again.channel()
        for queue in QUEUES:
            cleaner.queue_delete(queue)
        for exchange in EXCHANGES:
            cleaner.exchange_delete(exchange)
    return found


def outcome_on_its_own(url: str, scheme: str, name: str, *, confirms: bool) -> Any:
    """Run a scenario on a broker without other users."""
    log: list[Any] = []
    connection = kombu.Connection(url.replace("amqp", scheme, 1), transport_options={"confirm_publish": confirms})
    channel = connection.connect().channel()
    channel.queue_declare("q", auto_delete=False)
    try:
        result = normal(SCENARIOS[name](connection, channel, log))
    except Exception as error:
        result = ["raised", normal(error)]
    state = [channel.is_open, connection.connected]
    connection.release()
    return [result, normal(log), state]


def publish(channel: Any, *bodies: Any, **keywords: Any) -> None:
    for body in bodies:
        message = channel.prepare_message(body, content_encoding="utf-8" if isinstance(body, str) else None)
        channel.basic_publish(message, exchange="", routing_key="q", **keywords)


def publish_all(channel: Any, *bodies: Any) -> Any:
    """Publish messages to an empty queue, wait until the queue has them, and return the channel.

    The wait is needed, because RabbitMQ may answer before the messages are in the queue.
    """
    publish(channel, *bodies)
    eventually(lambda: declared(channel).message_count == len(bodies))
    return channel


def until(connection: Any, condition: Callable[[], object]) -> None:
    """Let a connection do its I/O until a condition is true."""
    while not condition():
        connection.drain_events(timeout=PATIENCE)


def get(channel: Any, **keywords: Any) -> Any:
    """Wait for a message in ``q``, and return it."""
    found: Any = None

    def got() -> bool:
        nonlocal found
        found = channel.basic_get("q", **keywords)
        return found is not None

    eventually(got)
    return found


def recorder(log: list[Any], name: str) -> Callable[..., None]:
    return lambda *arguments: log.append([name, *map(normal, arguments)])


def tried(log: list[Any], call: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
    """Append the result or the exception of a call to the log."""
    try:
        log.append(["returned", normal(call(*arguments, **keywords))])
    except Exception as error:
        log.append(["raised", normal(error)])


def of_expressions(**expressions: Callable[[Any, Any], Any]) -> None:
    """Add scenarios. Each scenario is one expression of the connection and its channel."""
    for name, expression in expressions.items():
        SCENARIOS[name] = _scenario_of(expression)


def _scenario_of(expression: Callable[[Any, Any], Any]) -> Scenario:
    return lambda connection, channel, _log: expression(connection, channel)


def declared(channel: Any) -> Any:
    """Return the broker's answer to a passive declaration of ``q``."""
    return channel.queue_declare("q", passive=True)


def tag_of_first(channel: Any, *bodies: Any) -> Any:
    """Publish messages to the empty queue, get the first message, and return its delivery tag."""
    return publish_all(channel, *bodies).basic_get("q").delivery_tag


def over(connection: Any, channel: Any) -> str:
    """Publish on a closed connection, and return the type of the error. In py-amqp the error's text differs by case."""
    with pytest.raises(connection.recoverable_connection_errors) as caught:
        publish(channel, b"never")
    return type(caught.value).__name__


of_expressions(
    Message=lambda connection, channel: (channel.Message.__name__, issubclass(channel.Message, base.Message)),
    after_reply_message_received=lambda connection, channel: channel.after_reply_message_received("q"),
    get_bindings=lambda connection, channel: channel.get_bindings(),
    prepare_message=lambda connection, channel: channel.prepare_message(
        "body", 5, "text/plain", "utf-8", {"a": 1}, {"app_id": "a"}
    ),
    prepare_queue_arguments=lambda connection, channel: channel.prepare_queue_arguments(
        {"x-a": 1}, max_length=3, expires=1.5
    ),
    auto_decode=lambda connection, channel: channel.auto_decode,
    basic_ack=lambda connection, channel: (channel.basic_ack(tag_of_first(channel, b"one", b"two")), declared(channel)),
    basic_ack__of_an_unknown_tag=lambda connection, channel: (channel.basic_ack(99), declared(channel)),
    basic_publish__on_a_closed_channel=lambda connection, channel: (channel.close(), over(connection, channel)),
    basic_publish__on_a_closed_connection=lambda connection, channel: (connection.release(), over(connection, channel)),
    basic_recover=lambda connection, channel: (
        tag_of_first(channel, b"one"),
        channel.basic_recover(requeue=True),
        get(channel),
    ),
    basic_recover_async=lambda connection, channel: (
        tag_of_first(channel, b"one"),
        channel.basic_recover_async(requeue=True),
        get(channel),
    ),
    basic_reject=lambda connection, channel: (
        channel.basic_reject(tag_of_first(channel, b"one"), requeue=True),
        get(channel),
    ),
    close__twice=lambda connection, channel: (channel.close(), channel.close()),
    collect=lambda connection, channel: (channel.collect(), channel.connection, sorted(connection.connection.channels)),
    connection=lambda connection, channel: (channel.connection.connected, sorted(channel.connection.channels)),
    exchange_declare=lambda connection, channel: (
        channel.exchange_declare("x", "topic", auto_delete=False),
        channel.exchange_declare("x", "topic", passive=True),
    ),
    exchange_delete=lambda connection, channel: (
        channel.exchange_declare("x", "topic", auto_delete=False),
        channel.exchange_delete("x", if_unused=True),
    ),
    flow=lambda connection, channel: (channel.flow(True), channel.active),
    is_closing=lambda connection, channel: (channel.is_closing, channel.close(), channel.is_closing),
    method_queue=lambda connection, channel: channel.method_queue,
    open=lambda connection, channel: (channel.open(), channel.is_open),
    queue_declare=lambda connection, channel: (
        publish_all(channel, b"one").queue_declare("q", auto_delete=False),
        declared(channel),
    ),
    queue_declare__of_none=lambda connection, channel: channel.queue_declare("missing", passive=True),
    queue_delete=lambda connection, channel: (
        publish_all(channel, b"one").queue_delete("q"),
        channel.queue_delete("q"),
    ),
    queue_purge=lambda connection, channel: publish_all(channel, b"one", b"two").queue_purge("q"),
    send_method=lambda connection, channel: channel.send_method(
        spec.Basic.Qos, "lBb", (0, 5, False), wait=spec.Basic.QosOk
    ),
    tx_select=lambda connection, channel: channel.tx_select(),
)


# Members of kombu's channels.


@scenario
def Consumer(connection: Any, channel: Any, log: list[Any]) -> Any:
    def hear(body: Any, message: Any) -> None:
        log.append([body, normal(message)])
        message.ack()

    publish(channel, b"one", b"two")
    with channel.Consumer([kombu.Queue("q", durable=False)], callbacks=[hear], tag_prefix="tag"):
        until(connection, lambda: len(log) == 2)
    return declared(channel)


@scenario
def Consumer__that_refuses(connection: Any, channel: Any, log: list[Any]) -> Any:
    def hear(message: Any) -> None:
        log.append(normal(message))
        if message.delivery_info["redelivered"]:
            message.reject()
        else:
            message.requeue()

    publish(channel, b"one")
    with channel.Consumer([kombu.Queue("q", durable=False)], on_message=hear):
        until(connection, lambda: len(log) == 2)


@scenario
def Producer(_connection: Any, channel: Any, log: list[Any]) -> Any:
    producer = channel.Producer(routing_key="q", on_return=recorder(log, "returned"))
    results = [
        producer.publish({"a": [1, None]}, headers={"b": 2}, expiration=60, priority=3, delivery_mode=1),
        producer.publish("text", serializer="raw", content_type="text/plain", content_encoding="utf-8", retry=True),
        producer.publish("x" * 300, compression="zlib", correlation_id="c", reply_to="r"),
    ]
    return results, [get(channel, no_ack=True) for _ in range(3)]


@scenario
def Producer__declares(_connection: Any, channel: Any, _log: list[Any]) -> Any:
    exchange = kombu.Exchange("x", "topic", durable=False)
    queue = kombu.Queue("other", exchange, "a.*", durable=False)
    channel.Producer(exchange).publish("declared", routing_key="a.b", declare=[queue])
    eventually(lambda: channel.queue_declare("other", passive=True).message_count)
    return channel.basic_get("other", no_ack=True)


@scenario
def Producer__to_no_exchange(_connection: Any, channel: Any, log: list[Any]) -> Any:
    producer = channel.Producer(kombu.Exchange("missing"), auto_declare=False)
    tried(log, producer.publish, "lost", routing_key="q")
    if not channel.connection.confirm_publish:
        # Without confirms, only a later call reads the broker's error.
        del log[:]
        tried(log, channel.queue_declare, "q", passive=True)


@scenario
def message_to_python(_connection: Any, channel: Any, _log: list[Any]) -> Any:
    message = channel.prepare_message(b"body", headers={"a": 1}, properties={"message_id": "m"})
    message.delivery_info = {"delivery_tag": 7}
    return channel.message_to_python(message)


@scenario
def no_ack_consumers(_connection: Any, channel: Any, _log: list[Any]) -> Any:
    channel.basic_consume("q", no_ack=True, callback=print, consumer_tag="tag")
    return sorted(channel.no_ack_consumers)


# Members of py-amqp's channels.


@scenario
def basic_cancel(connection: Any, channel: Any, log: list[Any]) -> Any:
    publish(channel, b"one", b"two")
    channel.basic_consume("q", no_ack=True, callback=recorder(log, "message"), consumer_tag="tag")
    until(connection, lambda: len(log) == 2)
    return channel.basic_cancel("tag"), sorted(channel.callbacks)


@scenario
def basic_cancel__by_the_broker(connection: Any, channel: Any, log: list[Any]) -> Any:
    channel.basic_consume("q", callback=print, on_cancel=recorder(log, "cancelled"), consumer_tag="tag")
    with connection.clone() as other:
        other.channel().queue_delete("q")
    until(connection, lambda: log)


@scenario
def basic_consume(connection: Any, channel: Any, log: list[Any]) -> Any:
    tag = channel.basic_consume("q", callback=recorder(log, "message"), exclusive=True, consumer_tag="tag")
    publish(channel, b"one", "two", bytes(300_000))
    until(connection, lambda: len(log) == 3)
    return tag


@scenario
def basic_consume__of_no_queue(_connection: Any, channel: Any, log: list[Any]) -> Any:
    tried(log, channel.basic_consume, "missing", callback=print)
    return channel.is_open, declared(channel)


@scenario
def basic_get(_connection: Any, channel: Any, _log: list[Any]) -> Any:
    empty = channel.basic_get("q")
    message = channel.prepare_message(b"body", 3, "text/plain", "utf-8", {"x": [1, "two", None]}, {"message_id": "m"})
    channel.basic_publish(message, routing_key="q")
    return empty, get(channel)


@scenario
def basic_publish(_connection: Any, channel: Any, _log: list[Any]) -> Any:
    results = [channel.basic_publish(channel.prepare_message(b"%d" % number), "", "q") for number in range(3)]
    return [normal(each) for each in results], [get(channel, no_ack=True) for _ in range(3)]


@scenario
def basic_publish__of_many_kinds(_connection: Any, channel: Any, _log: list[Any]) -> Any:
    bodies = [b"", "bödy", bytearray(b"bytes"), bytes(range(256)) * 2000]
    publish(channel, *bodies)
    return [get(channel, no_ack=True) for _ in bodies]


@scenario
def basic_publish__that_is_returned(connection: Any, channel: Any, log: list[Any]) -> Any:
    channel.events["basic_return"].add(recorder(log, "returned"))
    message = channel.prepare_message(b"back", headers={"a": 1})
    results = normal(channel.basic_publish(message, "", "nowhere", mandatory=True))
    until(connection, lambda: log)
    publish(channel, b"arrives")
    return results, get(channel)


@scenario
def basic_publish__that_is_nacked(_connection: Any, channel: Any, log: list[Any]) -> Any:
    channel.queue_declare("other", arguments={"x-max-length": 1, "x-overflow": "reject-publish"}, auto_delete=False)
    for _ in range(3):
        tried(log, channel.basic_publish_confirm, channel.prepare_message(b""), "", "other")


@scenario
def basic_publish__of_what_cannot_be_encoded(_connection: Any, channel: Any, log: list[Any]) -> Any:
    for body in None, 5, ["text"]:
        with pytest.raises((TypeError, struct.error)):
            publish(channel, body)
    tried(log, channel.basic_publish, channel.prepare_message("no encoding"), "", "q")
    tried(log, channel.basic_publish, channel.prepare_message(b""), "", 5)
    tried(log, channel.basic_publish, channel.prepare_message(b""), "", "q" * 256)
    tried(log, channel.basic_publish, channel.prepare_message(b"", headers={"a": object()}), "", "q")
    tried(log, channel.basic_publish, channel.prepare_message(b"", 256), "", "q")
    publish(channel, b"arrives")
    return get(channel)


@scenario
def basic_publish__in_a_callback(connection: Any, channel: Any, log: list[Any]) -> Any:
    def again(message: Any) -> None:
        body = bytes(message.body)
        log.append(body)
        message.channel.basic_ack(message.delivery_tag)
        if len(body) < 5:
            publish(channel, body + b"!")
        ended.append(body)

    # While py-amqp waits for a confirm in a callback, it calls the next callback. Our transport calls no callback then.
    ended: list[bytes] = []
    channel.basic_consume("q", callback=again)
    publish(channel, b"a")
    until(connection, lambda: len(ended) == 5)


@scenario
def basic_publish_confirm(_connection: Any, channel: Any, _log: list[Any]) -> Any:
    results = [channel.basic_publish_confirm(channel.prepare_message(b"x"), "", "q") for _ in range(3)]
    return normal(results), declared(channel)


@scenario
def basic_publish_confirm__to_no_exchange(_connection: Any, channel: Any, log: list[Any]) -> Any:
    tried(log, channel.basic_publish_confirm, channel.prepare_message(b"x"), "missing", "q")
    return channel.is_open


@scenario
def basic_qos(connection: Any, channel: Any, log: list[Any]) -> Any:
    result = channel.basic_qos(0, 1, False)
    publish_all(channel, b"one", b"two")
    channel.basic_consume("q", callback=recorder(log, "message"), consumer_tag="tag")
    until(connection, lambda: log)
    return result, declared(channel)


@scenario
def channel_id(connection: Any, channel: Any, _log: list[Any]) -> Any:
    other = connection.connection.channel(7)
    return channel.channel_id, other.channel_id, connection.connection.channel(7) is other


@scenario
def close(connection: Any, channel: Any, _log: list[Any]) -> Any:
    channel.basic_consume("q", callback=print, consumer_tag="tag")
    return (
        channel.close(),
        channel.is_open,
        channel.connection,
        channel.channel_id,
        sorted(connection.connection.channels),
    )


@scenario
def confirm_select(_connection: Any, channel: Any, log: list[Any]) -> Any:
    publish(channel, b"before")
    channel.events["basic_ack"].add(recorder(log, "ack"))
    results = [channel.confirm_select(), channel.confirm_select(nowait=True)]
    publish(channel, b"after")
    # The library decides whether a publish or the next read raises the error.
    eventually(lambda: declared(channel).message_count == 2 and log)
    return results


@scenario
def dispatch_method(_connection: Any, channel: Any, log: list[Any]) -> Any:
    message = channel.prepare_message(b"said again")
    channel.basic_consume("q", callback=recorder(log, "message"), consumer_tag="tag", no_ack=True)
    payload = bytes(4) + b"\3tag" + bytes(7) + b"\1" + b"\0" + b"\0" + b"\1q"
    return channel.dispatch_method(spec.Basic.Deliver, payload, message)


@scenario
def exchange_bind(_connection: Any, channel: Any, _log: list[Any]) -> Any:
    for name in EXCHANGES:
        channel.exchange_declare(name, "fanout", auto_delete=False)
    bound = channel.exchange_bind("y", "x", "key")
    channel.queue_bind("q", "y")
    channel.basic_publish(channel.prepare_message(b"through both"), "x", "key")
    return bound, get(channel)


@scenario
def exchange_declare__otherwise(_connection: Any, channel: Any, log: list[Any]) -> Any:
    channel.exchange_declare("x", "topic", auto_delete=False)
    tried(log, channel.exchange_declare, "x", "fanout", auto_delete=False)
    return channel.is_open


@scenario
def exchange_unbind(_connection: Any, channel: Any, _log: list[Any]) -> Any:
    for name in EXCHANGES:
        channel.exchange_declare(name, "fanout", auto_delete=False)
    channel.exchange_bind("y", "x")
    return channel.exchange_unbind("y", "x")


@scenario
def open__again(_connection: Any, channel: Any, log: list[Any]) -> Any:
    tried(log, channel.queue_declare, "missing", passive=True)
    publish(channel, b"on the same number")
    return channel.is_open, channel.channel_id, get(channel)


@scenario
def queue_bind(_connection: Any, channel: Any, _log: list[Any]) -> Any:
    channel.exchange_declare("x", "topic", auto_delete=False)
    bound = channel.queue_bind("q", "x", "a.*")
    channel.basic_publish(channel.prepare_message(b"body"), "x", "a.b")
    return bound, get(channel)


@scenario
def queue_unbind(_connection: Any, channel: Any, _log: list[Any]) -> Any:
    channel.exchange_declare("x", "topic", auto_delete=False)
    channel.queue_bind("q", "x", "a.*")
    return channel.queue_unbind("q", "x", "a.*")


@scenario
def then(_connection: Any, channel: Any, log: list[Any]) -> Any:
    channel.then(lambda opened: log.append(opened is channel))


@scenario
def tx_commit(_connection: Any, channel: Any, _log: list[Any]) -> Any:
    channel.tx_select()
    channel.basic_publish(channel.prepare_message(b"one"), "", "q")
    before = declared(channel)
    return before, channel.tx_commit(), declared(channel)


@scenario
def tx_rollback(_connection: Any, channel: Any, _log: list[Any]) -> Any:
    channel.tx_select()
    channel.basic_publish(channel.prepare_message(b"one"), "", "q")
    return channel.tx_rollback(), declared(channel)


@scenario
def wait(_connection: Any, channel: Any, log: list[Any]) -> Any:
    channel.send_method(spec.Basic.Qos, "lBb", (0, 5, False))
    log.append(channel.wait(spec.Basic.QosOk, timeout=PATIENCE))
    # There is no request, so no answer comes.
    tried(log, channel.wait, spec.Basic.QosOk, timeout=0.05)


all_scenarios = pytest.mark.parametrize("name", SCENARIOS)
