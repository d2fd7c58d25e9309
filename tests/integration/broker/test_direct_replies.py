from __future__ import annotations

from typing import Any

import pika

from qflow_client.broker import Broker


def test_pika_can_use_direct_reply_to_for_requests_and_answers() -> None:
    with Broker() as broker:
        broker.declare_queue("requests")
        got: list[tuple[str | None, bytes]] = []
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        client, server = connection.channel(), connection.channel()

        def answer(channel: Any, method: Any, properties: Any, body: bytes) -> None:
            channel.basic_publish(
                "", properties.reply_to, body.upper(), pika.BasicProperties(correlation_id=properties.correlation_id)
            )

        server.basic_consume("requests", answer, auto_ack=True)
        client.basic_consume(
            "amq.rabbitmq.reply-to",
            lambda _, __, properties, body: got.append((properties.correlation_id, body)),
            auto_ack=True,
        )
        for number in range(3):
            properties = pika.BasicProperties(reply_to="amq.rabbitmq.reply-to", correlation_id=str(number))
            client.basic_publish("", "requests", b"question", properties)
        connection.call_later(20, connection.close)
        while len(got) < 3:
            connection.process_data_events(0.1)
        connection.close()
    assert got == [(str(number), b"QUESTION") for number in range(3)]
