"""Client libraries of other projects."""

from __future__ import annotations

import asyncio
import threading

import aio_pika
import amqp
import pika
import pika.exceptions
import pytest
from amqpstorm.connection import Connection
from amqpstorm.exception import AMQPMessageError

from qflow_client.broker import Broker


@pytest.fixture(name="channel")
def _channel(broker):
    connection = pika.BlockingConnection(pika.URLParameters(broker.url))
    yield connection.channel()
    if connection.is_open:
        connection.close()


class TestPika:
    def test_pika_publishes_with_confirms_and_consumes(self, channel):
        channel.confirm_delivery()
        channel.queue_declare("q")
        for number in range(20):
            properties = pika.BasicProperties(message_id=str(number), headers={"n": number}, delivery_mode=2)
            channel.basic_publish("", "q", b"x" * number, properties)
        channel.basic_qos(prefetch_count=3)
        seen = []
        for method, properties, body in channel.consume("q", inactivity_timeout=20):
            seen.append((properties.message_id, properties.headers["n"], len(body)))
            channel.basic_ack(method.delivery_tag)
            if len(seen) == 20:
                break
        assert seen == [(str(number), number, number) for number in range(20)]
        assert channel.cancel() == 0

    def test_message_bodies_larger_than_a_frame_arrive(self, channel):
        channel.confirm_delivery()
        channel.queue_declare("q")
        body = bytes(range(256)) * 4096
        channel.basic_publish("", "q", body)
        assert channel.basic_get("q", auto_ack=True)[2] == body

    def test_pika_raises_errors_for_unroutable_and_nacked_messages(self, channel):
        channel.confirm_delivery()
        with pytest.raises(pika.exceptions.UnroutableError):
            channel.basic_publish("", "nowhere", b"x", mandatory=True)
        channel.queue_declare("q", arguments={"qpid.max_count": 1, "qpid.flow_stop_count": 0})
        channel.basic_publish("", "q", b"x")
        with pytest.raises(pika.exceptions.NackError):
            channel.basic_publish("", "q", b"x")

    def test_C2_the_error_for_contradictory_queue_arguments_shows_both_values(self, channel):
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
            channel.queue_declare("q", arguments={"qpid.flow_stop_size": 5, "qpid.flow_resume_size": 6})
        assert caught.value.reply_code == 406
        assert "qpid.flow_stop_size=5" in caught.value.reply_text
        assert "qpid.flow_resume_size=6" in caught.value.reply_text

    def test_pika_can_use_exchanges_bindings_transactions_get_nack_and_recover(self, channel):
        channel.exchange_declare("e", "topic")
        channel.exchange_declare("f", "fanout")
        channel.exchange_bind("f", "e", "a.#")
        name = channel.queue_declare("", exclusive=True).method.queue
        channel.queue_bind(name, "f")
        channel.tx_select()
        channel.basic_publish("e", "a.b", b"1")
        assert channel.basic_get(name)[0] is None
        channel.tx_commit()
        method, _, _ = channel.basic_get(name)
        channel.basic_nack(method.delivery_tag)
        channel.tx_commit()
        assert channel.basic_get(name)[0].redelivered
        channel.basic_recover(requeue=True)
        assert channel.queue_purge(name).method.message_count == 1
        channel.queue_unbind(name, "f")
        channel.exchange_unbind("f", "e", "a.#")
        channel.queue_delete(name)
        channel.exchange_delete("e")

    def test_consumers_are_notified_of_a_deleted_queue(self, broker, channel):
        channel.queue_declare("q")
        cancelled: list[object] = []
        channel.add_on_cancel_callback(cancelled.append)
        channel.basic_consume("q", lambda *_: None)
        broker.delete_queue("q")
        while not cancelled:
            channel.connection.process_data_events(time_limit=5)

    def test_pika_is_notified_when_its_connection_is_blocked_and_unblocked(self, broker):
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        reasons: list[str | None] = []
        connection.add_on_connection_blocked_callback(lambda _, frame: reasons.append(frame.method.reason))
        connection.add_on_connection_unblocked_callback(lambda *_: reasons.append(None))
        broker.block("memory")
        broker.unblock()
        while len(reasons) < 2:
            connection.process_data_events(time_limit=5)
        assert reasons == ["memory", None]
        connection.close()

    def test_pika_raises_an_authentication_error_for_a_wrong_password(self, broker):
        parameters = pika.ConnectionParameters(
            "127.0.0.1", broker.port, credentials=pika.PlainCredentials("guest", "wrong")
        )
        with pytest.raises(pika.exceptions.ProbableAuthenticationError):
            pika.BlockingConnection(parameters)

    def test_pika_raises_an_access_error_for_a_wrong_virtual_host(self, broker):
        with pytest.raises((pika.exceptions.ProbableAccessDeniedError, pika.exceptions.ConnectionClosedByBroker)):
            pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", broker.port, "elsewhere"))


def test_aio_pika_publishes_and_consumes():
    async def main():
        async with Broker() as broker, await aio_pika.connect(broker.url) as connection:
            channel = await connection.channel()
            await channel.set_qos(prefetch_count=5)
            queue = await channel.declare_queue("q", durable=True)
            exchange = await channel.declare_exchange("e", aio_pika.ExchangeType.HEADERS)
            await queue.bind(exchange, arguments={"kind": "good"})
            await asyncio.gather(
                *(
                    exchange.publish(aio_pika.Message(b"%d" % number, headers={"kind": "good"}), "")
                    for number in range(50)
                )
            )
            assert broker.queue("q").depth == 50
            seen = []
            async with queue.iterator() as messages:
                async for message in messages:
                    async with message.process():
                        seen.append(int(message.body))
                    if len(seen) == 50:
                        break
            assert seen == list(range(50))

    asyncio.run(main())


def test_aio_pika_reconnects_after_its_connection_was_dropped():
    async def main():
        async with Broker() as broker:
            connection = await aio_pika.connect_robust(broker.url, reconnect_interval=0.01)
            async with connection:
                channel = await connection.channel()
                queue = await channel.declare_queue("q")
                reconnected = asyncio.Event()
                connection.reconnect_callbacks.add(lambda *_: reconnected.set())
                broker.drop_connections()
                await reconnected.wait()
                await channel.ready()
                await channel.default_exchange.publish(aio_pika.Message(b"x"), queue.name)
                assert broker.queue("q").depth == 1

    asyncio.run(main())


def test_py_amqp_publishes_and_consumes(broker):
    with amqp.Connection(f"127.0.0.1:{broker.port}", confirm_publish=True) as connection:
        channel = connection.channel()
        channel.queue_declare("q", auto_delete=False)
        for number in range(10):
            channel.basic_publish(amqp.Message(str(number), message_id=str(number)), routing_key="q")
        assert broker.queue("q").depth == 10
        seen = []

        def on_message(message):
            seen.append((message.body, message.properties["message_id"]))
            channel.basic_ack(message.delivery_tag)

        channel.basic_consume("q", callback=on_message)
        while len(seen) < 10:
            connection.drain_events(timeout=20)
        assert seen == [(str(number), str(number)) for number in range(10)]
        channel.close()


def test_amqpstorm_publishes_and_consumes(broker):
    with Connection("127.0.0.1", "guest", "guest", port=broker.port) as connection:
        channel = connection.channel()
        channel.confirm_deliveries()
        channel.queue.declare("q")
        for number in range(5):
            assert channel.basic.publish(str(number), "q", mandatory=True)
        with pytest.raises(AMQPMessageError):
            channel.basic.publish("x", "nowhere", mandatory=True)
        seen = []

        def on_message(message):
            seen.append(message.body)
            message.ack()
            if len(seen) == 5:
                message.channel.stop_consuming()

        channel.basic.consume(on_message, "q")
        channel.start_consuming()
        assert seen == [str(number) for number in range(5)]


def test_a_client_that_ignores_flow_gets_its_confirms_if_the_enforcement_is_channel_flow(broker, channel):
    broker.declare_queue("q", arguments={"qpid.flow_stop_count": 5, "x-qflow-enforcement": "channel_flow"})
    channel.confirm_delivery()
    for _ in range(10):
        channel.basic_publish("", "q", b"x")
    assert broker.queue("q").depth == 10
    assert broker.queue("q").flow_stopped


def test_C5_withheld_confirms_alone_stop_a_client_that_waits_for_each_confirm(broker, channel):
    broker.declare_queue("q", arguments={"qpid.flow_stop_count": 5, "x-qflow-enforcement": "completion"})
    channel.confirm_delivery()

    def publish():
        for _ in range(18):
            channel.basic_publish("", "q", b"x")

    thread = threading.Thread(target=publish)
    thread.start()
    for _ in range(3):
        broker.wait_until(lambda b: b.queue("q").depth == 6)
        assert broker.queue("q").held_confirms == 1
        broker.purge("q")
    thread.join()
    assert broker.queue("q").peak_depth == 6
