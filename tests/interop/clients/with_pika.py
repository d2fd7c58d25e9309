from __future__ import annotations

import pika

from tests.interop.clients.script import GO, ORDERS, TOLD, Client, url


class Pika(Client):
    def __init__(self, url: str) -> None:
        super().__init__("pika")
        self.connection = pika.BlockingConnection(pika.URLParameters(url))
        blocked = self.report.blocked = []
        self.connection.add_on_connection_blocked_callback(lambda *_: blocked.append(True))
        self.connection.add_on_connection_unblocked_callback(lambda *_: blocked.append(False))
        self.first, self.other = self.connection.channel(), self.connection.channel()
        self.first.confirm_delivery()
        self.first.queue_declare(ORDERS)

    def publish(self, message: bytes, message_id: str) -> None:
        self.first.basic_publish("", ORDERS, message, pika.BasicProperties(message_id=message_id), mandatory=True)

    def consume(self, count: int) -> None:
        messages = self.other.consume(ORDERS)
        for _ in range(count):
            method, properties, body = next(messages)
            assert method is not None
            assert method.delivery_tag is not None
            assert properties is not None
            assert body is not None
            self.report.received.append((body.decode(), str(properties.message_id)))
            self.other.basic_ack(method.delivery_tag)
        self.other.cancel()

    def get(self) -> bool:
        return self.other.basic_get(GO, auto_ack=True)[0] is not None

    def tell(self, words: str) -> None:
        self.other.basic_publish("", TOLD, words.encode())

    def look(self) -> None:
        # pika calls the callbacks only in this call.
        self.connection.process_data_events(0)

    def ask(self) -> None:
        self.first.queue_declare(ORDERS, passive=True)

    def close(self) -> None:
        self.connection.close()


Pika(url()).run()
