from __future__ import annotations

import asyncio
import logging

import aio_pika

from tests.interop.clients.script import FIRST, GO, ORDERS, PATIENCE, SECOND, TOLD, Report, body, url


class Listener(logging.Handler):
    """Records whether the connection is blocked. aio-pika reports this only in its log."""

    def __init__(self, blocked: list[bool]) -> None:
        super().__init__()
        self.blocked = blocked

    def emit(self, record: logging.LogRecord) -> None:
        for words, blocked in ("was blocked", True), ("was unblocked", False):
            if words in record.msg:
                self.blocked.append(blocked)


async def main(url: str) -> None:
    report = Report("aio-pika")
    report.blocked = []
    logging.getLogger("aiormq.connection").addHandler(Listener(report.blocked))
    async with await aio_pika.connect(url) as connection:
        first, other = await connection.channel(), await connection.channel(publisher_confirms=False)
        await first.declare_queue(ORDERS)
        orders, go = await other.get_queue(ORDERS), await other.get_queue(GO)

        async def publish(start: int, stop: int) -> None:
            for number in range(start, stop):
                message = aio_pika.Message(body(number), message_id=str(number))
                await first.default_exchange.publish(message, ORDERS)
                report.confirmed += 1

        async def consume(count: int) -> None:
            stop = len(report.received) + count
            async with orders.iterator() as messages:
                async for message in messages:
                    report.received.append((message.body.decode(), str(message.message_id)))
                    await message.ack()
                    if len(report.received) == stop:
                        break

        async def tell(words: str) -> None:
            await other.default_exchange.publish(aio_pika.Message(words.encode()), TOLD)

        async def await_go() -> None:
            async with asyncio.timeout(PATIENCE), go.iterator(no_ack=True) as words:
                await anext(words)

        await publish(0, FIRST)
        await consume(FIRST)
        for words in "published", "blocked":
            await tell(words)
            await await_go()
        await tell("unblocked")
        try:
            await await_go()
            await publish(FIRST, FIRST + SECOND)
            await tell("went on")
            await await_go()
            await consume(SECOND)
        except Exception as error:
            report.lost = f"{type(error).__name__}: {error}"
        else:
            try:
                await first.get_queue(ORDERS, ensure=True)
                report.request = "ok"
            except Exception as error:
                report.request = type(error).__name__
    report.print()


asyncio.run(main(url()))
