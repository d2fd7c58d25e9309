from __future__ import annotations

from typing import Any

from amqpstorm.uri_connection import UriConnection

from tests.interop.clients.script import GO, ORDERS, TOLD, Client, url


class AmqpStorm(Client):
    def __init__(self, url: str) -> None:
        super().__init__("AMQPStorm")
        self.report.blocked = []
        self.connection = UriConnection(url)
        self.first, self.other = self.connection.channel(), self.connection.channel()
        self.first.confirm_deliveries()
        self.first.queue.declare(ORDERS)

    def publish(self, message: bytes, message_id: str) -> None:
        assert self.first.basic.publish(message, ORDERS, properties={"message_id": message_id}, mandatory=True)

    def consume(self, count: int) -> None:
        stop = len(self.report.received) + count

        def take(message: Any) -> None:
            self.report.received.append((message.body, message.message_id))
            message.ack()

        tag = self.other.basic.consume(take, ORDERS)
        while len(self.report.received) < stop:
            self.other.process_data_events()
        self.other.basic.cancel(tag)

    def get(self) -> bool:
        return self.other.basic.get(GO, no_ack=True) is not None

    def tell(self, words: str) -> None:
        self.other.basic.publish(words, TOLD)

    def look(self) -> None:
        assert self.report.blocked is not None
        self.report.blocked.append(self.connection.is_blocked)

    def ask(self) -> None:
        self.first.queue.declare(ORDERS, passive=True)

    def close(self) -> None:
        self.connection.close()


AmqpStorm(url()).run()
