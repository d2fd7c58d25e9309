from __future__ import annotations

from typing import Any

import kombu

from tests.interop.clients.script import GO, ORDERS, TOLD, Client, url


class Kombu(Client):
    def __init__(self, url: str) -> None:
        super().__init__("kombu")
        blocked = self.report.blocked = []
        self.connection = kombu.Connection(
            url,
            transport_options={
                "confirm_publish": True,
                "on_blocked": lambda _reason: blocked.append(True),
                "on_unblocked": lambda: blocked.append(False),
            },
        )
        first, other = self.connection.channel(), self.connection.channel()
        self.producer, self.teller = kombu.Producer(first), kombu.Producer(other)
        self.orders = kombu.Queue(ORDERS, durable=False)
        self.mine = self.orders(first)
        self.mine.queue_declare()
        self.theirs = self.orders(other)
        self.go = kombu.Queue(GO)(other)

    def publish(self, message: bytes, message_id: str) -> None:
        self.producer.publish(message, routing_key=ORDERS, message_id=message_id, mandatory=True)

    def consume(self, count: int) -> None:
        stop = len(self.report.received) + count

        def take(message: Any) -> None:
            self.report.received.append((bytes(message.body).decode(), message.properties["message_id"]))
            message.ack()

        with kombu.Consumer(self.teller.channel, self.theirs, on_message=take, auto_declare=False):
            while len(self.report.received) < stop:
                self.connection.drain_events()

    def get(self) -> bool:
        return self.go.get(no_ack=True) is not None

    def tell(self, words: str) -> None:
        self.teller.publish(words, routing_key=TOLD)

    def ask(self) -> None:
        self.mine.queue_declare(passive=True)

    def close(self) -> None:
        self.connection.close()


Kombu(url()).run()
