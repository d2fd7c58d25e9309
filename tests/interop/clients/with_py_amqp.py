from __future__ import annotations

from urllib.parse import urlsplit

import amqp

from tests.interop.clients.script import GO, ORDERS, TOLD, Client, url


class PyAmqp(Client):
    def __init__(self, url: str) -> None:
        super().__init__("amqp")
        blocked = self.report.blocked = []
        self.connection = amqp.Connection(
            urlsplit(url).netloc.rpartition("@")[2],
            confirm_publish=True,
            on_blocked=lambda _reason: blocked.append(True),
            on_unblocked=lambda: blocked.append(False),
        )
        self.connection.connect()
        self.first, self.other = self.connection.channel(), self.connection.channel()
        self.first.queue_declare(ORDERS, auto_delete=False)

    def publish(self, message: bytes, message_id: str) -> None:
        self.first.basic_publish(amqp.Message(message, message_id=message_id), routing_key=ORDERS, mandatory=True)

    def consume(self, count: int) -> None:
        stop = len(self.report.received) + count

        def take(message: amqp.Message) -> None:
            body = message.body if isinstance(message.body, str) else message.body.decode()
            self.report.received.append((body, message.properties["message_id"]))
            self.other.basic_ack(message.delivery_tag)

        tag = self.other.basic_consume(ORDERS, callback=take)
        while len(self.report.received) < stop:
            self.connection.drain_events()
        self.other.basic_cancel(tag)

    def get(self) -> bool:
        return self.other.basic_get(GO, no_ack=True) is not None

    def tell(self, words: str) -> None:
        self.other.basic_publish(amqp.Message(words), routing_key=TOLD)

    def ask(self) -> None:
        self.first.queue_declare(ORDERS, passive=True)

    def close(self) -> None:
        # py-amqp keeps the last flow state of the channel, but sends no notification.
        self.report.flow = [self.first.active]
        self.connection.close()


PyAmqp(url()).run()
