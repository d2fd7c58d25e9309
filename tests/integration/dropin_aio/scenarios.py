"""Scenarios for aio-pika. Tests run each scenario with aio-pika and with the drop-in, and compare.

The name of a scenario consists of a class and one of its public members. A second part may follow. A scenario gets the
module (aio-pika or the drop-in), a connection, a channel with an empty queue ``q``, and a list for its observations.
The tests also compare its result or exception.
"""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import aio_pika as original
import aiormq
import pytest

from tests.effort import rounds

Scenario = Callable[[Any, Any, Any, list[Any]], Awaitable[Any]]

SCENARIOS: dict[str, Scenario] = {}
QUEUES = ("q", "other", "dead")
# Number of messages that are published at the same time; a multiple of 5.
MANY = rounds(200, least=50)
EXCHANGES = ("x", "y")
PATIENCE = 20.0


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def of(name: str) -> str:
    """Return the class and the member in the name of a scenario."""
    return ".".join(name.split("__")[:2])


def normal(value: Any) -> Any:
    """Return a value in a form that can be compared between two connections."""
    if isinstance(value, BaseException):
        return [type(value).__name__, normal(value.args)]
    if isinstance(value, original.abc.AbstractMessage):
        info = dict(value.info()) | {"message_id": "…"}
        return [type(value).__name__, value.body, normal(info)]
    if type(value).__name__ == "DeliveredMessage":
        return ["DeliveredMessage", value.body, normal(value.delivery), normal(value.header.properties)]
    if isinstance(value, aiormq.spec.Basic.Nack):
        # The number of messages that it answers is random, and its requeue flag has no meaning for a publisher.
        return [value.name, value.delivery_tag]
    if type(value).__module__.startswith("pamqp"):
        fields = {name: getattr(value, name) for name in type(value).__slots__ if hasattr(value, name)}
        if "message_id" in fields:
            fields["message_id"] = "…"
        return [value.name, normal(fields)]
    if isinstance(value, (tuple, list)):
        return [normal(each) for each in value]
    if isinstance(value, dict):
        return {key: normal(each) for key, each in value.items()}
    if isinstance(value, str):
        return re.sub(r"[0-9a-f]{32}|amq[._]gen\S+|0x[0-9a-f]+|qflow_client\.|:\d{4,5}/", "…", value).replace(
            "…aio", "aio"
        )
    if isinstance(value, (bytes, int, float, datetime, type(None))):
        return value
    if isinstance(value, type):
        return value.__name__
    return type(value).__name__


async def outcome(module: Any, url: str, name: str, *, robust: bool) -> Any:
    """Run a scenario, and then delete its queues and exchanges."""
    found = await outcome_on_its_own(module, url, name, robust=robust)
    again = await original.connect(url)
    async with again:
        channel = await again.channel()
        deletes = [("queue_delete", name) for name in QUEUES] + [("exchange_delete", name) for name in EXCHANGES]
        for delete, each in deletes:
            try:
                await getattr(channel, delete)(each)
            except original.exceptions.ChannelClosed:
                channel = await again.channel()
    return found


async def outcome_on_its_own(module: Any, url: str, name: str, *, robust: bool) -> Any:
    """Run a scenario on a broker without other users."""
    log: list[Any] = []
    connection = await (module.connect_robust if robust else module.connect)(url)
    channel = await connection.channel()
    await channel.declare_queue("q")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            result = normal(await asyncio.wait_for(SCENARIOS[name](module, connection, channel, log), PATIENCE))
    except TimeoutError as error:
        # The errors of the drop-in have longer texts, so compare only the type.
        result = ["raised", "TimeoutError", isinstance(error, TimeoutError)]
    except asyncio.CancelledError:
        result = ["cancelled"]
    except Exception as error:
        result = ["raised", normal(error)]
    noted = normal(log)
    state = [channel.is_initialized, channel.is_closed, connection.is_closed, connection.close_called]
    if not connection.is_closed:
        await connection.close()
    return [result, noted, state]


async def soon(condition: Callable[[], object]) -> None:
    end = asyncio.get_running_loop().time() + PATIENCE
    while not condition():
        assert asyncio.get_running_loop().time() < end, "it does not come"
        await asyncio.sleep(0.005)


def recorder(log: list[Any], name: str) -> Callable[..., None]:
    def record(*arguments: Any) -> None:
        log.append([name, *map(normal, arguments)])

    return record


async def publish(module: Any, channel: Any, *bodies: bytes, key: str = "q") -> None:
    for body in bodies:
        await channel.default_exchange.publish(module.Message(body), key)


async def depth(channel: Any, name: str = "q") -> Any:
    # A robust channel remembers the first answer, so use the channel below it.
    underlay = await channel.get_underlay_channel()
    return (await underlay.queue_declare(name, passive=True)).message_count


async def tried(log: list[Any], what: Awaitable[Any]) -> None:
    """Append the result or the exception of an awaitable to the log."""
    try:
        log.append(["returned", normal(await what)])
    except TimeoutError:
        log.append(["raised", "TimeoutError"])
    except asyncio.CancelledError:
        log.append(["cancelled"])
    except Exception as error:
        log.append(["raised", normal(error)])


# Exchange.


@scenario
async def Exchange__publish(m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    for number in range(3):
        log.append(normal(await channel.default_exchange.publish(m.Message(b"%d" % number), "q")))
    queue = await channel.get_queue("q")
    return [await queue.get(no_ack=True) for _ in range(3)]


@scenario
async def Exchange__publish__properties(m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    messages = [
        m.Message(b""),
        m.Message(b"x" * 300_000, delivery_mode=m.DeliveryMode.PERSISTENT),
        m.Message(
            b"all",
            headers={"a": [1, {"b": None}], "c": "d", "e": 1.5, "f": True},
            content_type="text/plain",
            content_encoding="utf-8",
            priority=5,
            correlation_id="c",
            reply_to="r",
            expiration=100,
            message_id="mine",
            timestamp=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
            type="t",
            app_id="a",
        ),
    ]
    queue = await channel.get_queue("q")
    for message in messages:
        log.append(normal(await channel.default_exchange.publish(message, "q")))
        got = await queue.get(no_ack=True)
        log.append([normal(got), got.message_id if got.message_id == "mine" else len(got.message_id)])


@scenario
async def Exchange__publish__of_what_cannot_be_encoded(m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    exchange = channel.default_exchange
    await tried(log, exchange.publish(m.Message(b"", headers={"a": object()}), "q"))
    await tried(log, exchange.publish(m.Message(b"", correlation_id="x" * 300), "q"))
    await tried(log, exchange.publish(m.Message(b""), "x" * 300))
    await tried(log, exchange.publish(m.Message(b""), None))
    await tried(log, (await channel.get_exchange("not a name!" * 30, ensure=False)).publish(m.Message(b""), "q"))


@scenario
async def Exchange__publish__unroutable(m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    channel.return_callbacks.add(recorder(log, "returned"))
    log.append(normal(await channel.default_exchange.publish(m.Message(b"back", headers={"a": 1}), "nowhere")))
    log.append(normal(await channel.default_exchange.publish(m.Message(b"x" * 300_000), "nowhere")))
    log.append(normal(await channel.default_exchange.publish(m.Message(b"dropped"), "nowhere", mandatory=False)))
    log.append(normal(await channel.default_exchange.publish(m.Message(b"arrives"), "q")))


@scenario
async def Exchange__publish__unroutable_that_raises(m: Any, connection: Any, _channel: Any, log: list[Any]) -> Any:
    channel = await connection.channel(on_return_raises=True)
    channel.return_callbacks.add(recorder(log, "returned"))
    await tried(log, channel.default_exchange.publish(m.Message(b"back"), "nowhere"))
    await tried(log, channel.default_exchange.publish(m.Message(b"arrives"), "q"))


@scenario
async def Exchange__publish__many_at_once(m: Any, _connection: Any, channel: Any, _log: list[Any]) -> Any:
    results = await asyncio.gather(
        *(channel.default_exchange.publish(m.Message(b"%d" % n), "q" if n % 5 else "nowhere") for n in range(MANY))
    )
    queue = await channel.get_queue("q")
    bodies = [(await queue.get(no_ack=True)).body for _ in range(MANY * 4 // 5)]
    return [[type(each).__name__ for each in results], bodies]


@scenario
async def Exchange__publish__without_confirms(m: Any, connection: Any, _channel: Any, log: list[Any]) -> Any:
    channel = await connection.channel(publisher_confirms=False)
    channel.return_callbacks.add(recorder(log, "returned"))
    for number in range(50):
        log.append(await channel.default_exchange.publish(m.Message(b"%d" % number), "q"))
    log.append(await channel.default_exchange.publish(m.Message(b"back"), "nowhere"))
    found: Any = None
    # Wait, because RabbitMQ may answer before the messages are in the queue.
    for _ in range(500):
        if (found := await depth(channel)) == 50:
            break
        await asyncio.sleep(0.01)
    return found


@scenario
async def Exchange__publish__to_an_exchange_that_is_not_there(m: Any, _c: Any, channel: Any, log: list[Any]) -> Any:
    channel.close_callbacks.add(recorder(log, "closed"))
    exchange = await channel.get_exchange("nothing", ensure=False)
    await tried(log, exchange.publish(m.Message(b""), "q"))
    await soon(lambda: len(log) == 2)
    if isinstance(channel, m.abc.AbstractRobustChannel):
        # `ready` may return before aio-pika has noticed the close.
        await soon(lambda: not channel.is_closed)
        await channel.ready()
        log.append(normal(await channel.default_exchange.publish(m.Message(b""), "q")))


@scenario
async def Exchange__publish__on_a_closed_channel(m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    exchange = channel.default_exchange
    await channel.close()
    await tried(log, exchange.publish(m.Message(b""), "q"))


@scenario
async def Exchange__publish__to_an_internal_exchange(m: Any, _connection: Any, channel: Any, _log: list[Any]) -> Any:
    exchange = await channel.declare_exchange("x", internal=True)
    return await exchange.publish(m.Message(b""), "q")


@scenario
async def Exchange__publish__with_a_timeout(m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    await tried(log, channel.default_exchange.publish(m.Message(b"in time"), "q", timeout=PATIENCE))
    await tried(log, channel.default_exchange.publish(m.Message(b"no time"), "q", timeout=0))
    await tried(log, channel.default_exchange.publish(m.Message(b"again"), "q"))
    queue = await channel.get_queue("q")
    return [(await queue.get(no_ack=True)).body for _ in range(2)]


@scenario
async def Exchange__publish__refused(m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    await channel.declare_queue("other", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    for _ in range(3):
        await tried(log, channel.default_exchange.publish(m.Message(b""), "other"))


@scenario
async def Exchange__publish__while_it_is_closed(m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    publishing = asyncio.ensure_future(channel.default_exchange.publish(m.Message(b"last"), "q"))
    await asyncio.sleep(0)
    await channel.close()
    await tried(log, publishing)
    # The publish returns if the confirm came first, and raises otherwise. The order is random.
    assert log.pop()[0] in ("returned", "raised")


@scenario
async def Exchange__publish__in_a_callback(m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    other = await channel.declare_queue("other")

    async def forward(message: Any) -> None:
        async with message.process():
            log.append(normal(await channel.default_exchange.publish(m.Message(message.body + b"!"), "other")))

    await (await channel.get_queue("q")).consume(forward)
    await publish(m, channel, b"a", b"b", b"c")
    await soon(lambda: len(log) == 3)
    # The order of the delivery tags of messages from two connections is random.
    log[:] = [each[0] for each in log]
    return sorted([(await other.get(no_ack=True)).body for _ in range(3)])


@scenario
async def Exchange__declare(_m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    exchange = await channel.declare_exchange("x", "topic", auto_delete=False)
    log.append(normal(await exchange.declare()))
    return repr(exchange)


@scenario
async def Exchange__bind(m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    x = await channel.declare_exchange("x", m.ExchangeType.FANOUT)
    y = await channel.declare_exchange("y", m.ExchangeType.TOPIC)
    log.append(normal(await y.bind(x, "key")))
    log.append(normal(await (await channel.get_queue("q")).bind("y", "#")))
    log.append(normal(await x.publish(m.Message(b"through"), "key")))
    return await depth(channel)


@scenario
async def Exchange__unbind(m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    x = await channel.declare_exchange("x", m.ExchangeType.FANOUT)
    y = await channel.declare_exchange("y", m.ExchangeType.FANOUT)
    await y.bind(x)
    log.append(normal(await y.unbind(x)))
    return await x.publish(m.Message(b"nowhere"), "key")


@scenario
async def Exchange__delete(_m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    x = await channel.declare_exchange("x")
    log.append(normal(await x.delete()))
    return hasattr(x, "channel")


# Channel.


@scenario
async def Channel__channel(_m: Any, _connection: Any, channel: Any, _log: list[Any]) -> Any:
    return type(channel.channel).__name__


@scenario
async def Channel__get_underlay_channel(_m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    underlay = await channel.get_underlay_channel()
    log.append([type(underlay).__name__, underlay.number, underlay.publisher_confirms])
    log.append(normal(await underlay.basic_publish(b"below", routing_key="q")))
    log.append(normal(await underlay.basic_publish(b"back", routing_key="nowhere", mandatory=True)))
    await tried(log, underlay.basic_publish(b"", exchange="", routing_key="x" * 256))
    return await underlay.basic_get("q", no_ack=True)


@scenario
async def Channel__close(_m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    channel.close_callbacks.add(recorder(log, "closed"))
    log.append(await channel.close())
    log.append(await channel.close())
    await soon(lambda: any(each and each[0] == "closed" for each in log if each))
    return [channel.is_closed, await channel.closed()]


@scenario
async def Channel__closed(_m: Any, connection: Any, _channel: Any, log: list[Any]) -> Any:
    async with connection.channel() as channel:
        waiting = asyncio.ensure_future(channel.closed())
        await asyncio.sleep(0)
        log.append(waiting.done())
    return await waiting


@scenario
async def Channel__is_closed(_m: Any, connection: Any, channel: Any, log: list[Any]) -> Any:
    log.append(connection.channel().is_closed)
    return channel.is_closed


@scenario
async def Channel__is_initialized(_m: Any, connection: Any, channel: Any, log: list[Any]) -> Any:
    log.append(connection.channel().is_initialized)
    return channel.is_initialized


@scenario
async def Channel__initialize(_m: Any, connection: Any, channel: Any, log: list[Any]) -> Any:
    fresh = connection.channel()
    await tried(log, fresh.get_underlay_channel())
    log.append(await fresh.initialize())
    await tried(log, channel.initialize())
    return fresh.number


@scenario
async def Channel__number(_m: Any, connection: Any, channel: Any, log: list[Any]) -> Any:
    seven = await connection.channel(7)
    eight = await connection.channel()
    log.append([str(channel), str(connection.channel(9))])
    await eight.close()
    return [channel.number, seven.number, eight.number, (await connection.channel()).number]


@scenario
async def Channel__number__taken(_m: Any, connection: Any, _channel: Any, _log: list[Any]) -> Any:
    return await connection.channel(1)


@scenario
async def Channel__reopen(m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    exchange = channel.default_exchange
    await channel.close()
    log.append(await channel.reopen())
    log.append(channel.is_closed)
    return await exchange.publish(m.Message(b"again"), "q")


@scenario
async def Channel__set_qos(m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    log.append(normal(await channel.set_qos(prefetch_count=1)))
    await publish(m, channel, b"one", b"two")
    got: list[Any] = []
    await (await channel.get_queue("q")).consume(lambda message: collect(got, message))
    await soon(lambda: got)
    log.append(len(got))
    await got[0].ack()
    await soon(lambda: len(got) == 2)
    return [each.body for each in got]


async def collect(got: list[Any], message: Any) -> None:
    got.append(message)


@scenario
async def Channel__flow(_m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    log.append(normal(await channel.flow(True)))
    return channel.is_closed


@scenario
async def Channel__transaction(m: Any, connection: Any, channel: Any, log: list[Any]) -> Any:
    quiet = await connection.channel(publisher_confirms=False)
    async with quiet.transaction():
        await publish(m, quiet, b"kept")
        log.append(await depth(channel))
    log.append(await depth(channel))
    transaction = quiet.transaction()
    await transaction.select()
    await publish(m, quiet, b"lost")
    log.append(normal(await transaction.rollback()))
    log.append(str(transaction))
    return await depth(channel)


@scenario
async def Channel__transaction__with_confirms(_m: Any, _connection: Any, channel: Any, _log: list[Any]) -> Any:
    return channel.transaction()


@scenario
async def Channel__declare_exchange(_m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    log.append(repr(await channel.declare_exchange("x", durable=True, arguments={"a": "b"})))
    return await channel.declare_exchange("x", "fanout")


@scenario
async def Channel__get_exchange(m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    log.append(repr(await channel.get_exchange("nothing", ensure=False)))
    log.append(normal(await (await channel.get_exchange("amq.fanout")).publish(m.Message(b""), "")))
    return await channel.get_exchange("nothing")


@scenario
async def Channel__exchange_delete(_m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    await channel.declare_exchange("x")
    log.append(normal(await channel.exchange_delete("x")))
    return await channel.exchange_delete("x", nowait=True)


@scenario
async def Channel__declare_queue(_m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    queue = await channel.declare_queue("other", arguments={"x-max-length": 5})
    log.append([repr(queue), normal(queue.declaration_result)])
    log.append((await channel.declare_queue(exclusive=True)).name)
    return await channel.declare_queue("other", arguments={"x-max-length": 6})


@scenario
async def Channel__get_queue(_m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    log.append(repr(await channel.get_queue("q")))
    log.append(repr(await channel.get_queue("nothing", ensure=False)))
    return await channel.get_queue("nothing")


@scenario
async def Channel__queue_delete(m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    await publish(m, channel, b"")
    log.append(normal(await channel.queue_delete("q")))
    return await channel.queue_delete("q", if_empty=True)


@scenario
async def Channel__EXCHANGE_CLASS(_m: Any, _connection: Any, channel: Any, _log: list[Any]) -> Any:
    return [channel.EXCHANGE_CLASS, type(channel.default_exchange)]


@scenario
async def Channel__QUEUE_CLASS(_m: Any, _connection: Any, channel: Any, _log: list[Any]) -> Any:
    return [channel.QUEUE_CLASS, type(await channel.get_queue("q"))]


# Queue.


@scenario
async def Queue__consume(m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    queue = await channel.get_queue("q")
    tag = await queue.consume(lambda message: collect(log, message), no_ack=True, consumer_tag="tag")
    await publish(m, channel, b"a", b"b", b"c")
    await soon(lambda: len(log) == 3)
    log.append(normal(await queue.cancel(tag)))
    return tag


@scenario
async def Queue__cancel(_m: Any, connection: Any, channel: Any, log: list[Any]) -> Any:
    queue = await channel.get_queue("q")
    tag = await queue.consume(lambda message: collect(log, message))
    log.append(normal(await queue.cancel(tag)))
    # Now the broker cancels the consumer.
    await queue.consume(lambda message: collect(log, message))
    await (await connection.channel()).queue_delete("q")
    return channel.is_closed


@scenario
async def Queue__iterator(m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    await publish(m, channel, b"a", b"b", b"c")
    async with (await channel.get_queue("q")).iterator() as iterator:
        async for message in iterator:
            async with message.process():
                log.append(message.body)
            # Publish on the channel that consumes.
            await publish(m, channel, message.body, key="nowhere")
            if len(log) == 3:
                break
    return await depth(channel)


@scenario
async def Queue__get(m: Any, _connection: Any, channel: Any, log: list[Any]) -> Any:
    queue = await channel.get_queue("q")
    await publish(m, channel, b"a")
    message = await queue.get()
    log.append(normal(await message.reject(requeue=True)))
    log.append(normal(await queue.get(no_ack=True)))
    log.append(await queue.get(fail=False))
    return await queue.get()


@scenario
async def Queue__bind(m: Any, _connection: Any, channel: Any, _log: list[Any]) -> Any:
    queue = await channel.get_queue("q")
    x = await channel.declare_exchange("x", m.ExchangeType.HEADERS)
    return [await queue.bind(x, arguments={"x-match": "all", "a": 1}), await queue.bind("amq.topic", "a.#")]


@scenario
async def Queue__unbind(_m: Any, _connection: Any, channel: Any, _log: list[Any]) -> Any:
    queue = await channel.get_queue("q")
    await queue.bind("amq.topic", "a.#")
    return await queue.unbind("amq.topic", "a.#")


@scenario
async def Queue__declare(_m: Any, _connection: Any, channel: Any, _log: list[Any]) -> Any:
    return await (await channel.get_queue("q")).declare()


@scenario
async def Queue__delete(m: Any, _connection: Any, channel: Any, _log: list[Any]) -> Any:
    await publish(m, channel, b"")
    return await (await channel.get_queue("q")).delete(if_empty=False)


@scenario
async def Queue__purge(m: Any, _connection: Any, channel: Any, _log: list[Any]) -> Any:
    await publish(m, channel, b"", b"")
    return await (await channel.get_queue("q")).purge()


# Connection.


@scenario
async def Connection__channel(_m: Any, connection: Any, _channel: Any, log: list[Any]) -> Any:
    async with connection.channel(publisher_confirms=False) as channel:
        log.append([channel.publisher_confirms, channel.on_return_raises])
    return connection.channel(publisher_confirms=False, on_return_raises=True)


@scenario
async def Connection__close(_m: Any, connection: Any, channel: Any, log: list[Any]) -> Any:
    connection.close_callbacks.add(recorder(log, "connection closed"))
    channel.close_callbacks.add(recorder(log, "channel closed"))
    log.append(await connection.close())
    await soon(lambda: len(log) == 3)
    # The type of the error is random in aiormq, because its reader may end before it gets the reason.
    log[:] = sorted(each[0] if each else "returned" for each in log)
    return [connection.is_closed, await connection.closed()]


@scenario
async def Connection__close__while_publishing(m: Any, connection: Any, channel: Any, log: list[Any]) -> Any:
    publishing = asyncio.ensure_future(channel.default_exchange.publish(m.Message(b""), "q"))
    await asyncio.sleep(0)
    await connection.close()
    await tried(log, publishing)
    # The publish returns if the confirm came first, and raises otherwise. The order is random.
    log.clear()
    await tried(log, channel.default_exchange.publish(m.Message(b""), "q"))


@scenario
async def Connection__closed(_m: Any, connection: Any, _channel: Any, log: list[Any]) -> Any:
    waiting = asyncio.ensure_future(connection.closed())
    await asyncio.sleep(0)
    log.append(waiting.done())
    await connection.close()
    return await waiting


@scenario
async def Connection__is_closed(_m: Any, connection: Any, _channel: Any, log: list[Any]) -> Any:
    log.append(connection.is_closed)
    await connection.close()
    return connection.is_closed


@scenario
async def Connection__close_called(_m: Any, connection: Any, _channel: Any, log: list[Any]) -> Any:
    log.append(connection.close_called)
    await connection.close()
    return connection.close_called


@scenario
async def Connection__connect(m: Any, connection: Any, _channel: Any, _log: list[Any]) -> Any:
    again = type(connection)(connection.url)
    await again.connect()
    async with again:
        return await (await again.channel()).declare_queue("q", passive=True)


@scenario
async def Connection__ready(_m: Any, connection: Any, _channel: Any, log: list[Any]) -> Any:
    log.append([str(connection.url.scheme), connection.connected.is_set()])
    return await connection.ready()


@scenario
async def Connection__CHANNEL_CLASS(_m: Any, connection: Any, channel: Any, _log: list[Any]) -> Any:
    return [connection.CHANNEL_CLASS, type(channel)]


@scenario
async def Connection__PARAMETERS(_m: Any, connection: Any, _channel: Any, _log: list[Any]) -> Any:
    return [each.name for each in connection.PARAMETERS]


@scenario
async def Connection__update_secret(_m: Any, connection: Any, _channel: Any, _log: list[Any]) -> Any:
    return type(await connection.update_secret("guest")).__name__


all_scenarios = pytest.mark.parametrize("name", SCENARIOS)
