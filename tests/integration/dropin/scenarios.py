"""Scenarios for a `BlockingConnection`. Tests run each scenario with pika and with the drop-in, and compare.

The name of a scenario is the name of a public member of pika's `BlockingChannel`, or ``connection__`` and the name of a
public member of `BlockingConnection`. A second part may follow. A scenario gets the module (pika or the drop-in), a
channel with an empty queue ``q``, and a list for its observations. The tests also compare its result or exception.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pika as original
import pytest

from tests.integration.producer.tools import PATIENCE

Scenario = Callable[[Any, Any, list[Any]], Any]

SCENARIOS: dict[str, Scenario] = {}
#: Queues and exchanges that scenarios create.
QUEUES = ("q", "other", "dead")
EXCHANGES = ("x", "y")


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def members_of(kind: str) -> set[str]:
    """Return the members of a class that have scenarios."""
    of_connection = [name.split("__") for name in SCENARIOS if name.startswith("connection__")]
    if kind == "BlockingConnection":
        return {member for _, member, *_ in of_connection}
    return {name.split("__")[0] for name in SCENARIOS if not name.startswith("connection__")}


def normal(value: Any) -> Any:
    """Return a value in a form that can be compared between two connections."""
    if isinstance(value, original.frame.Method):
        return ["frame", value.channel_number, normal(value.method)]
    if isinstance(value, BaseException):
        return [type(value).__name__, normal(value.args), normal(getattr(value, "messages", None))]
    if isinstance(value, original.amqp_object.AMQPObject) or type(value).__name__ == "ReturnedMessage":
        slots = [name for each in type(value).__mro__ for name in getattr(each, "__slots__", ())]
        fields = dict.fromkeys(slots) | getattr(value, "__dict__", {})
        return [type(value).__name__, {name: normal(getattr(value, name)) for name in sorted(fields)}]
    if isinstance(value, (tuple, list, set)):
        return [normal(each) for each in value]
    if isinstance(value, dict):
        return {key: normal(each) for key, each in value.items()}
    if isinstance(value, str):
        return re.sub(r"[0-9a-f]{32}|amq\.gen\S+|port=\d+", "…", value)
    if isinstance(value, (bytes, int, float, type(None))):
        return value
    return type(value).__name__


def outcome(module: Any, url: str, name: str) -> Any:
    """Run a scenario, and then delete its queues and exchanges."""
    found = outcome_on_its_own(module, url, name)
    with original.BlockingConnection(original.URLParameters(url)) as again:
        cleaner = again.channel()
        for queue in QUEUES:
            cleaner.queue_delete(queue)
        for exchange in EXCHANGES:
            cleaner.exchange_delete(exchange)
    return found


def outcome_on_its_own(module: Any, url: str, name: str) -> Any:
    """Run a scenario on a broker without other users."""
    log: list[Any] = []
    connection = module.BlockingConnection(module.URLParameters(url))
    channel = connection.channel()
    channel.queue_declare("q")
    try:
        result = normal(SCENARIOS[name](module, channel, log))
    except Exception as error:
        result = ["raised", normal(error)]
    state = [channel.is_open, channel.is_closed, connection.is_open, connection.is_closed]
    if connection.is_open:
        connection.close()
    return [result, normal(log), state]


def until(channel: Any, condition: Callable[[], object]) -> None:
    """Let a connection do its I/O until a condition is true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it does not come"
        channel.connection.process_data_events(0.02)


def publish(channel: Any, *bodies: bytes) -> None:
    for body in bodies:
        channel.basic_publish("", "q", body)


def publish_all(channel: Any, *bodies: bytes) -> Any:
    """Publish messages to an empty queue, wait until the queue has them, and return the channel.

    The wait is needed, because RabbitMQ may answer before the messages are in the queue.
    """
    publish(channel, *bodies)
    until(channel, lambda: declared(channel).method.message_count == len(bodies))
    return channel


def get(channel: Any) -> Any:
    """Wait for a message in ``q``, and return it."""
    found: Any = None, None, None

    def got() -> bool:
        nonlocal found
        found = channel.basic_get("q", auto_ack=True)
        return found[0] is not None

    until(channel, got)
    return found


def recorder(log: list[Any], name: str) -> Callable[..., None]:
    return lambda *arguments: log.append([name, *map(normal, arguments)])


def of_expressions(**expressions: Callable[[Any], Any]) -> None:
    """Add scenarios. Each scenario is one expression of the channel."""
    for name, expression in expressions.items():
        SCENARIOS[name] = _scenario_of(expression)


def _scenario_of(expression: Callable[[Any], Any]) -> Scenario:
    return lambda _pika, channel, _log: expression(channel)


def declared(channel: Any) -> Any:
    """Return the broker's answer to a passive declaration of ``q``."""
    return channel.queue_declare("q", passive=True)


def tag_of_first(channel: Any, *bodies: bytes) -> Any:
    """Publish messages to the empty queue, get the first message, and return its delivery tag."""
    return publish_all(channel, *bodies).basic_get("q")[0].delivery_tag


of_expressions(
    basic_ack=lambda channel: (channel.basic_ack(tag_of_first(channel, b"one", b"two")), declared(channel)),
    basic_ack__of_an_unknown_tag=lambda channel: (channel.basic_ack(99), declared(channel)),
    basic_consume__of_no_queue=lambda channel: channel.basic_consume("missing", print),
    basic_consume__of_a_tag_twice=lambda channel: [
        channel.basic_consume("q", print, consumer_tag="tag") for _ in range(2)
    ],
    basic_consume__without_a_callback=lambda channel: channel.basic_consume("q", None),
    basic_nack=lambda channel: (channel.basic_nack(tag_of_first(channel, b"one"), requeue=True), get(channel)),
    basic_publish=lambda channel: (channel.basic_publish("", "q", b"body"), get(channel)),
    basic_publish__of_text=lambda channel: (
        channel.basic_publish(exchange="", routing_key="q", body="bödy"),
        get(channel),
    ),
    basic_publish__of_nothing=lambda channel: (channel.basic_publish("", "q", b""), get(channel)),
    basic_publish__of_much=lambda channel: (channel.basic_publish("", "q", bytes(range(256)) * 2000), get(channel)),
    basic_publish__of_other_bytes=lambda channel: (channel.basic_publish("", "q", bytearray(b"body")), get(channel)),
    basic_publish__with_names_as_bytes=lambda channel: (
        [channel.basic_publish(b"amq.direct", name, b"body", mandatory=True) for name in (b"k", "k")],
        channel.confirm_delivery(),
        channel.basic_publish(b"", b"q", b"body"),
        get(channel),
        channel.basic_publish(b"", "schl\xfcssel".encode(), b"body", mandatory=True),
    ),
    basic_publish__to_no_exchange_with_confirms=lambda channel: (
        channel.confirm_delivery(),
        channel.basic_publish("missing", "q", b"body"),
    ),
    basic_publish__on_a_closed_channel=lambda channel: (channel.close(), channel.basic_publish("", "q", b"body")),
    basic_publish__on_a_closed_connection=lambda channel: (
        channel.connection.close(),
        channel.basic_publish("", "q", b"body"),
    ),
    basic_recover=lambda channel: (tag_of_first(channel, b"one"), channel.basic_recover(requeue=True), get(channel)),
    basic_reject=lambda channel: (
        channel.basic_reject(tag_of_first(channel, b"one"), requeue=False),
        declared(channel),
    ),
    channel_number=lambda channel: (channel.channel_number, int(channel), channel.connection.channel(7).channel_number),
    close__twice=lambda channel: (channel.close(), channel.close()),
    confirm_delivery=lambda channel: (
        channel.confirm_delivery(),
        channel.confirm_delivery(),
        channel.basic_publish("", "q", b"body"),
    ),
    exchange_declare=lambda channel: (
        channel.exchange_declare("x", "topic"),
        channel.exchange_declare("x", passive=True),
    ),
    exchange_declare__otherwise=lambda channel: (
        channel.exchange_declare("x", "topic"),
        channel.exchange_declare("x", "fanout"),
    ),
    exchange_delete=lambda channel: (
        channel.exchange_declare("x", "topic"),
        channel.exchange_delete("x", if_unused=True),
    ),
    flow=lambda channel: channel.flow(True),
    is_open=lambda channel: (channel.is_open, channel.close(), channel.is_open),
    is_closed=lambda channel: (channel.is_closed, channel.close(), channel.is_closed),
    queue_declare=lambda channel: (publish_all(channel, b"one").queue_declare("q"), declared(channel)),
    queue_declare__of_none=lambda channel: channel.queue_declare("missing", passive=True),
    queue_delete=lambda channel: (publish_all(channel, b"one").queue_delete("q"), channel.queue_delete("q")),
    queue_purge=lambda channel: publish_all(channel, b"one", b"two").queue_purge("q"),
    tx_select=lambda channel: channel.tx_select(),
    tx_select__with_confirms=lambda channel: (channel.confirm_delivery(), channel.tx_select()),
)


@scenario
def add_on_cancel_callback(_pika: Any, channel: Any, log: list[Any]) -> Any:
    channel.add_on_cancel_callback(recorder(log, "cancelled"))
    channel.basic_consume("q", recorder(log, "message"), consumer_tag="tag")
    with original.BlockingConnection(channel.connection._impl.params) as other:
        other.channel().queue_delete("q")
    while not log:
        channel.connection.process_data_events(0.05)
    return channel.consumer_tags


@scenario
def add_on_return_callback(_pika: Any, channel: Any, log: list[Any]) -> Any:
    channel.add_on_return_callback(recorder(log, "returned"))
    channel.basic_publish("", "nowhere", b"body", original.BasicProperties(headers={"a": 1}), mandatory=True)
    while not log:
        channel.connection.process_data_events(0.05)


@scenario
def add_on_return_callback__with_confirms(pika: Any, channel: Any, log: list[Any]) -> Any:
    channel.add_on_return_callback(recorder(log, "returned"))
    channel.confirm_delivery()
    try:
        channel.basic_publish("", "nowhere", b"body", mandatory=True)
    except pika.exceptions.UnroutableError as error:
        log.append(normal(error))
    channel.connection.process_data_events(0.05)


@scenario
def basic_cancel(_pika: Any, channel: Any, log: list[Any]) -> Any:
    publish(channel, b"one", b"two")
    channel.basic_consume("q", recorder(log, "message"), auto_ack=True, consumer_tag="tag")
    until(channel, lambda: len(log) == 2)
    return channel.basic_cancel("tag"), channel.basic_cancel("unknown"), channel.consumer_tags


@scenario
def basic_consume(_pika: Any, channel: Any, log: list[Any]) -> Any:
    tag = channel.basic_consume("q", recorder(log, "message"), consumer_tag="tag", exclusive=True)
    publish(channel, b"one", b"two", b"three")
    while len(log) < 3:
        channel.connection.process_data_events(0.05)
    return tag


@scenario
def basic_get(_pika: Any, channel: Any, _log: list[Any]) -> Any:
    empty = channel.basic_get("q")
    channel.basic_publish(
        "",
        "q",
        b"body",
        original.BasicProperties(
            content_type="text/plain", delivery_mode=2, priority=3, message_id="m", headers={"x": [1, "two", None]}
        ),
    )
    return empty, get(channel)


@scenario
def basic_publish__with_confirms(_pika: Any, channel: Any, _log: list[Any]) -> Any:
    channel.confirm_delivery()
    return [channel.basic_publish("", "q", b"body", mandatory=True) for _ in range(3)], get(channel)


@scenario
def basic_publish__that_is_returned(_pika: Any, channel: Any, _log: list[Any]) -> Any:
    channel.confirm_delivery()
    channel.basic_publish("", "nowhere", b"body", original.BasicProperties(app_id="a"), mandatory=True)


@scenario
def basic_publish__after_one_that_was_returned(pika: Any, channel: Any, log: list[Any]) -> Any:
    channel.confirm_delivery()
    for key in "nowhere", "q", "nowhere":
        try:
            channel.basic_publish("", key, b"body", mandatory=True)
        except pika.exceptions.UnroutableError as error:
            log.append(normal(error))
    return get(channel)


@scenario
def basic_publish__that_is_nacked(_pika: Any, channel: Any, _log: list[Any]) -> Any:
    channel.queue_declare("other", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    channel.confirm_delivery()
    for _ in range(3):
        channel.basic_publish("", "other", b"body")


@scenario
def basic_publish__to_no_exchange(_pika: Any, channel: Any, _log: list[Any]) -> Any:
    channel.basic_publish("missing", "q", b"body")
    until(channel, lambda: channel.is_closed)
    channel.basic_publish("", "q", b"body")


@scenario
def basic_publish__of_what_cannot_be_encoded(_pika: Any, channel: Any, log: list[Any]) -> Any:
    unfit: Any = [object(), 5]
    calls: list[tuple[Any, ...]] = [
        (None, "q", b""),
        ("", None, b""),
        ("", 5, b""),
        ([], "q", b""),
        ("", "q", None),
        ("", "q", 5),
        ("", "q" * 256, b""),
        ("", "q", b"", original.BasicProperties(headers={"a": unfit[0]})),
        ("", "q", b"", original.BasicProperties(content_type=unfit[1])),
        ("", "q", b"", "no properties"),
    ]
    for arguments in calls:
        try:
            log.append(channel.basic_publish(*arguments))
        except Exception as error:
            log.append(normal(error))
    return channel.basic_publish("", "q", b"body"), get(channel)


@scenario
def basic_publish__in_a_callback(_pika: Any, channel: Any, log: list[Any]) -> Any:
    def again(channel: Any, method: Any, _properties: Any, body: bytes) -> None:
        log.append(body)
        channel.basic_ack(method.delivery_tag)
        if len(body) < 5:
            channel.basic_publish("", "q", body + b"!")
        else:
            channel.stop_consuming()
        log.append([b"end", body])

    channel.basic_consume("q", again)
    publish(channel, b"a", b"b")
    channel.start_consuming()


@scenario
def basic_qos(_pika: Any, channel: Any, log: list[Any]) -> Any:
    result = channel.basic_qos(prefetch_count=1)
    publish_all(channel, b"one", b"two")
    channel.basic_consume("q", recorder(log, "message"), consumer_tag="tag")
    until(channel, lambda: log)
    return result, declared(channel), channel.connection.process_data_events()


@scenario
def cancel(_pika: Any, channel: Any, _log: list[Any]) -> Any:
    publish(channel, b"one", b"two", b"three")
    for method, _, body in channel.consume("q"):
        channel.basic_ack(method.delivery_tag)
        if body == b"two":
            break
    return channel.cancel(), channel.cancel(), get(channel)[2]


@scenario
def close(_pika: Any, channel: Any, _log: list[Any]) -> Any:
    channel.basic_consume("q", print, consumer_tag="tag")
    return channel.close(), channel.is_closed, channel.consumer_tags


@scenario
def confirm_delivery__after_unconfirmed_messages(_pika: Any, channel: Any, _log: list[Any]) -> Any:
    publish(channel, b"one", b"two")
    channel.confirm_delivery()
    publish(channel, b"three", b"four")
    return [get(channel)[2] for _ in range(4)]


@scenario
def connection(pika: Any, channel: Any, _log: list[Any]) -> Any:
    return isinstance(channel.connection, pika.BlockingConnection), isinstance(
        channel, original.adapters.blocking_connection.BlockingChannel
    )


@scenario
def consume(_pika: Any, channel: Any, log: list[Any]) -> Any:
    publish_all(channel, b"one", b"two")
    for method, properties, body in channel.consume("q", auto_ack=True, inactivity_timeout=1.0):
        if method is None and len(log) < 2:
            # Not all messages have arrived yet.
            continue
        log.append(normal([method, properties, body]))
        if method is None:
            break
    return channel.cancel()


@scenario
def consume__and_publish(_pika: Any, channel: Any, log: list[Any]) -> Any:
    publish(channel, b"a")
    for method, _, body in channel.consume("q"):
        log.append(body)
        channel.basic_ack(method.delivery_tag)
        if len(body) == 5:
            break
        channel.basic_publish("", "q", body + b"!")
    return channel.cancel()


@scenario
def consumer_tags(_pika: Any, channel: Any, _log: list[Any]) -> Any:
    before = channel.consumer_tags
    channel.basic_consume("q", print, consumer_tag="tag")
    return before, channel.consumer_tags


@scenario
def exchange_bind(_pika: Any, channel: Any, _log: list[Any]) -> Any:
    channel.exchange_declare("x", "fanout")
    channel.exchange_declare("y", "fanout")
    bound = channel.exchange_bind("y", "x")
    channel.queue_bind("q", "y")
    channel.basic_publish("x", "", b"through both")
    return bound, get(channel)[2]


@scenario
def exchange_unbind(_pika: Any, channel: Any, _log: list[Any]) -> Any:
    channel.exchange_declare("x", "fanout")
    channel.exchange_declare("y", "fanout")
    channel.exchange_bind("y", "x")
    return channel.exchange_unbind("y", "x")


@scenario
def get_waiting_message_count(_pika: Any, channel: Any, _log: list[Any]) -> Any:
    publish(channel, b"one", b"two")
    messages = channel.consume("q")
    next(messages)
    until(channel, channel.get_waiting_message_count)
    return channel.get_waiting_message_count()


@scenario
def queue_bind(_pika: Any, channel: Any, _log: list[Any]) -> Any:
    channel.exchange_declare("x", "topic")
    bound = channel.queue_bind("q", "x", "a.*")
    channel.basic_publish("x", "a.b", b"body")
    return bound, get(channel)


@scenario
def queue_unbind(_pika: Any, channel: Any, _log: list[Any]) -> Any:
    channel.exchange_declare("x", "topic")
    channel.queue_bind("q", "x", "a.*")
    return channel.queue_unbind("q", "x", "a.*")


@scenario
def start_consuming(_pika: Any, channel: Any, log: list[Any]) -> Any:
    def stop(channel: Any, _method: Any, _properties: Any, body: bytes) -> None:
        log.append(body)
        if body == b"stop":
            channel.stop_consuming()

    channel.basic_consume("q", stop, auto_ack=True)
    publish(channel, b"go", b"stop")
    return channel.start_consuming(), channel.consumer_tags


@scenario
def start_consuming__with_an_error(_pika: Any, channel: Any, _log: list[Any]) -> Any:
    channel.basic_consume("q", lambda *_: 1 / 0, auto_ack=True)
    publish(channel, b"go")
    channel.start_consuming()


@scenario
def stop_consuming(_pika: Any, channel: Any, _log: list[Any]) -> Any:
    channel.basic_consume("q", print, consumer_tag="one")
    channel.basic_consume("q", print, consumer_tag="two")
    channel.stop_consuming("one")
    return channel.consumer_tags


@scenario
def tx_commit(_pika: Any, channel: Any, _log: list[Any]) -> Any:
    channel.tx_select()
    publish(channel, b"one", b"two")
    before = declared(channel)
    return before, channel.tx_commit(), declared(channel)


@scenario
def tx_rollback(_pika: Any, channel: Any, _log: list[Any]) -> Any:
    channel.tx_select()
    publish(channel, b"one", b"two")
    return channel.tx_rollback(), declared(channel)


# The connection.


def closes(channel: Any) -> list[Any]:
    connection = channel.connection
    return [connection.is_open, connection.is_closed, channel.is_open, channel.is_closed]


of_expressions(
    connection__accept_consumer_cancel_ok_supported=lambda channel: getattr(
        channel.connection, "accept_consumer_cancel_ok_supported", "not in this release"
    ),
    connection__add_callback_threadsafe__of_a_closed_one=lambda channel: (
        channel.connection.close(),
        channel.connection.add_callback_threadsafe(print),
    ),
    connection__add_on_connection_blocked_callback=lambda channel: (
        channel.connection.add_on_connection_blocked_callback(print)
    ),
    connection__add_on_connection_unblocked_callback=lambda channel: (
        channel.connection.add_on_connection_unblocked_callback(print)
    ),
    connection__basic_nack=lambda channel: channel.connection.basic_nack,
    connection__basic_nack_supported=lambda channel: channel.connection.basic_nack_supported,
    connection__consumer_cancel_notify=lambda channel: channel.connection.consumer_cancel_notify,
    connection__consumer_cancel_notify_supported=lambda channel: channel.connection.consumer_cancel_notify_supported,
    connection__exchange_exchange_bindings=lambda channel: channel.connection.exchange_exchange_bindings,
    connection__exchange_exchange_bindings_supported=lambda channel: (
        channel.connection.exchange_exchange_bindings_supported
    ),
    connection__publisher_confirms=lambda channel: channel.connection.publisher_confirms,
    connection__publisher_confirms_supported=lambda channel: channel.connection.publisher_confirms_supported,
    connection__call_later__into_the_past=lambda channel: channel.connection.call_later(-1, print),
    connection__channel__with_a_number_that_is_taken=lambda channel: channel.connection.channel(channel.channel_number),
    connection__channel__of_a_closed_one=lambda channel: (channel.connection.close(), channel.connection.channel()),
    connection__close__twice=lambda channel: (channel.connection.close(200, "good-bye"), channel.connection.close()),
    connection__close__before_its_channel=lambda channel: (channel.connection.close(), channel.close()),
    connection__is_closed=lambda channel: (
        channel.connection.is_closed,
        channel.connection.close(),
        channel.connection.is_closed,
    ),
    connection__is_open=lambda channel: (
        channel.connection.is_open,
        channel.connection.close(),
        channel.connection.is_open,
    ),
    connection__process_data_events__of_a_closed_one=lambda channel: (
        channel.connection.close(),
        channel.connection.process_data_events(),
    ),
    connection__sleep__less_than_nothing=lambda channel: channel.connection.sleep(-1),
    connection__update_secret=lambda channel: channel.connection.update_secret("guest", "time"),
)


@scenario
def connection__add_callback_threadsafe(_pika: Any, channel: Any, log: list[Any]) -> Any:
    connection = channel.connection
    result = connection.add_callback_threadsafe(recorder(log, "one"))
    thread = threading.Thread(target=connection.add_callback_threadsafe, args=[recorder(log, "two")])
    thread.start()
    thread.join()
    called_at_once = list(log)
    until(channel, lambda: len(log) == 2)
    return result, called_at_once


@scenario
def connection__call_later(_pika: Any, channel: Any, log: list[Any]) -> Any:
    connection = channel.connection
    # pika 1.5 has renamed this module.
    clock: Any = vars(original).get("compat") or vars(original)["_utils"]
    # Stop pika's clock, so that the deadlines have this order even if this thread is stopped between two calls.
    with patch.object(clock, "time_now", return_value=clock.time_now()):
        timers = [
            connection.call_later(0.2, recorder(log, "last")),
            connection.call_later(0.1, recorder(log, "second")),
            connection.call_later(0, recorder(log, "first")),
        ]
    until(channel, lambda: len(log) == 3)
    return timers


@scenario
def connection__call_later__that_publishes(_pika: Any, channel: Any, log: list[Any]) -> Any:
    def call() -> None:
        channel.confirm_delivery()
        log.append(normal(channel.basic_publish("", "q", b"later")))

    channel.connection.call_later(0, call)
    until(channel, lambda: log)
    return get(channel)


@scenario
def connection__channel(_pika: Any, channel: Any, _log: list[Any]) -> Any:
    connection = channel.connection
    numbers = [connection.channel().channel_number, connection.channel(9).channel_number]
    return numbers, connection.channel().channel_number, isinstance(connection.channel(), type(channel))


@scenario
def connection__channel__with_a_number_that_is_free_again(_pika: Any, channel: Any, _log: list[Any]) -> Any:
    other = channel.connection.channel(5)
    other.close()
    again = channel.connection.channel(5)
    return again.basic_publish("", "q", b"body"), again.channel_number, get(channel)


@scenario
def connection__close(_pika: Any, channel: Any, log: list[Any]) -> Any:
    channel.basic_consume("q", recorder(log, "message"), consumer_tag="tag")
    publish(channel, b"to nobody")
    return channel.connection.close(), closes(channel)


@scenario
def connection__close__in_a_callback(_pika: Any, channel: Any, log: list[Any]) -> Any:
    def close(channel: Any, *_message: Any) -> None:
        log.append(normal(channel.connection.close()))

    channel.basic_consume("q", close, auto_ack=True)
    publish(channel, b"enough")
    channel.start_consuming()
    return closes(channel)


@scenario
def connection__close__by_a_with_block(_pika: Any, channel: Any, _log: list[Any]) -> Any:
    with channel.connection as connection:
        inside = connection is channel.connection
    return inside, closes(channel)


@scenario
def connection__close__by_an_error_in_a_with_block(_pika: Any, channel: Any, log: list[Any]) -> Any:
    try:
        with channel.connection:
            raise LookupError("the program's own")
    except LookupError:
        log.append(closes(channel))


@scenario
def connection__process_data_events(_pika: Any, channel: Any, log: list[Any]) -> Any:
    connection = channel.connection
    connection.call_later(0, recorder(log, "timer"))
    channel.basic_consume("q", recorder(log, "message"), auto_ack=True, consumer_tag="tag")
    publish(channel, b"one")
    results = [connection.process_data_events(0)]
    until(channel, lambda: len(log) == 2)
    # The order of the two entries is random.
    log.sort(key=lambda each: each[0])
    return results


@scenario
def connection__process_data_events__in_a_callback(_pika: Any, channel: Any, log: list[Any]) -> Any:
    def call(channel: Any, _method: Any, _properties: Any, body: bytes) -> None:
        log.append(["begin", body])
        if len(log) == 1:
            # Wait until the second message has arrived. This call must not call the callback for the second message.
            channel.connection.process_data_events(0.2)
        log.append(["end", body])

    channel.basic_consume("q", call, auto_ack=True)
    publish(channel, b"one", b"two")
    until(channel, lambda: len(log) == 4)


@scenario
def connection__remove_timeout(_pika: Any, channel: Any, log: list[Any]) -> Any:
    connection = channel.connection
    timer = connection.call_later(0, recorder(log, "never"))
    result = connection.remove_timeout(timer)
    connection.call_later(0.05, recorder(log, "later"))
    until(channel, lambda: log)
    return result, connection.remove_timeout(timer)


@scenario
def connection__sleep(_pika: Any, channel: Any, log: list[Any]) -> Any:
    channel.basic_consume("q", recorder(log, "message"), auto_ack=True, consumer_tag="tag")
    publish(channel, b"one")
    results = []
    while not log:
        results.append(channel.connection.sleep(0.05))
    return set(map(normal, results))


all_scenarios = pytest.mark.parametrize("name", SCENARIOS)
