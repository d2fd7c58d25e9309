"""Other relays for the comparison, each with its own table, with the same PostgreSQL and broker. All are optional.

Each relay is set up as in its documentation, with durable messages and confirms. The sizes of batches and the numbers
of workers are chosen for speed. A relay claims hundreds of rows at once.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aio_pika
import asyncpg
from sqlalchemy import URL, MetaData
from sqlalchemy.ext.asyncio import create_async_engine

__all__ = ["Peers"]

_ROOT = Path(__file__).parents[1]
_BATCH = 500
# Workers of faststream-outbox and django-reliable-outbox. More workers are not faster on two cores.
_WORKERS = 8

# Django's settings are global for a process, so this is a separate program. It ends when the table is empty.
_DJANGO = """
import json, sys, threading, time
from urllib.parse import urlsplit
import django
import pika
from django.conf import settings
from django.core.management import call_command

database, url, queue, rows, keys, workers = sys.argv[1], *sys.argv[2:4], *map(int, sys.argv[4:])
parts = urlsplit(database)
local = threading.local()


class RabbitMQ:
    def deliver(self, envelope):
        if not hasattr(local, "channel"):
            local.channel = pika.BlockingConnection(pika.URLParameters(url)).channel()
            local.channel.confirm_delivery()
        properties = pika.BasicProperties(delivery_mode=2, message_id=str(envelope.message_id))
        local.channel.basic_publish("", queue, json.dumps(envelope.payload).encode(), properties, mandatory=True)


settings.configure(
    USE_TZ=True,
    INSTALLED_APPS=["reliable_outbox"],
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "HOST": parts.hostname,
            "PORT": parts.port,
            "NAME": parts.path.strip("/"),
            "USER": parts.username,
        }
    },
    RELIABLE_OUTBOX={"DESTINATIONS": {"default": {"BACKEND": "__main__.RabbitMQ"}}, "BATCH_SIZE": 100},
)
django.setup()

from django.db import connection, transaction
from reliable_outbox import publish

call_command("migrate", verbosity=0)
with transaction.atomic():
    for number in range(rows):
        publish("order", "x" * 100, key=str(number % keys))
with connection.cursor() as cursor:
    cursor.execute("VACUUM ANALYZE reliable_outbox_outboxmessage")
began = time.perf_counter()
call_command("outbox_worker", burst=True, concurrency=workers)
taken = time.perf_counter() - began
with connection.cursor() as cursor:
    cursor.execute("SELECT count(*) FROM reliable_outbox_outboxmessage WHERE status = 'delivered'")
    assert cursor.fetchone() == (rows,)
print(rows / taken)
"""


@dataclass(frozen=True, slots=True)
class Peers:
    """The environment of the other relays.

    Attributes:
        database: URL of a PostgreSQL database.
        queue: queue for all messages, which must exist.
        keys: number of ordering keys, for relays that support ordering keys.
    """

    database: URL
    url: str
    queue: str
    keys: int

    def txoutbox(self, rows: int) -> float | None:
        """Return rows per second of txoutbox, which deletes sent rows, with aio-pika; ``None`` if not installed."""
        if importlib.util.find_spec("txoutbox") is None:
            return None
        return asyncio.run(self._txoutbox(rows))

    async def _txoutbox(self, rows: int) -> float:
        from txoutbox import Relay, RelayConfig
        from txoutbox.adapters.postgres import PostgresStorage

        dsn = self.database.set(drivername="postgresql").render_as_string(hide_password=False)
        pool = await asyncpg.create_pool(dsn)
        connection = await aio_pika.connect(self.url)
        async with pool, connection:
            storage = PostgresStorage(pool, table="txoutbox", delete_on_ack=True)
            await pool.execute(storage.schema_sql())
            await pool.execute(
                "INSERT INTO txoutbox (topic, key, payload)"
                f" SELECT $1, (number % {self.keys})::text, $2 FROM generate_series(1, $3::int) number",
                *(self.queue, b"x" * 100, rows),
            )
            await pool.execute("VACUUM ANALYZE txoutbox")
            channel = await connection.channel()

            async def publish(message: Any) -> None:
                body = aio_pika.Message(message.payload, delivery_mode=2)
                await channel.default_exchange.publish(body, message.topic)

            config = RelayConfig(batch_size=_BATCH, concurrency=100, publish_timeout=10.0)
            relay = Relay(storage, publish, config=config)
            began = time.perf_counter()
            task = asyncio.create_task(relay.run())
            await _until_empty(pool, "SELECT count(*) FROM txoutbox WHERE status = 'pending'")
            taken = time.perf_counter() - began
            relay.stop()
            await task
            return rows / taken

    def faststream_outbox(self, rows: int) -> float | None:
        """Return rows per second of faststream-outbox with FastStream's broker; ``None`` if not installed.

        faststream-outbox has no ordering keys, and several workers keep no order.
        """
        if importlib.util.find_spec("faststream_outbox") is None:
            return None
        return asyncio.run(self._faststream_outbox(rows))

    async def _faststream_outbox(self, rows: int) -> float:
        from faststream.rabbit import RabbitBroker, RabbitQueue
        from faststream_outbox import OutboxBroker, make_outbox_table

        engine = create_async_engine(self.database.set(drivername="postgresql+asyncpg"), pool_size=_WORKERS + 2)
        metadata = MetaData()
        table = make_outbox_table(metadata, "faststream_outbox")
        outbox, rabbit = OutboxBroker(engine, outbox_table=table, logger=None), RabbitBroker(self.url, logger=None)

        @rabbit.publisher(RabbitQueue(self.queue, durable=True), persist=True)
        @outbox.subscriber(
            "orders",
            max_workers=_WORKERS,
            fetch_batch_size=_BATCH,
            terminal_flush_batch_size=100,
            min_fetch_interval=0.01,
        )
        async def relay(body: bytes) -> bytes:
            return body

        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
        dsn = self.database.set(drivername="postgresql").render_as_string(hide_password=False)
        async with asyncpg.create_pool(dsn, min_size=1) as pool:
            await pool.execute(
                "INSERT INTO faststream_outbox (queue, payload) SELECT 'orders', $1 FROM generate_series(1, $2::int)",
                *(b"x" * 100, rows),
            )
            await pool.execute("VACUUM ANALYZE faststream_outbox")
            await rabbit.connect()
            began = time.perf_counter()
            await outbox.start()
            await _until_empty(pool, "SELECT count(*) FROM faststream_outbox")
            taken = time.perf_counter() - began
            await outbox.stop()
            await rabbit.stop()
        await engine.dispose()
        return rows / taken

    def django_reliable_outbox(self, rows: int) -> float | None:
        """Return rows per second of django-reliable-outbox with pika, in order for each key; ``None`` if not installed.

        This library has no destination for RabbitMQ. The destination in `_DJANGO` publishes and waits for the confirm,
        like the library's destination for Kafka.
        """
        if importlib.util.find_spec("reliable_outbox") is None:
            return None
        database = self.database.set(drivername="postgresql").render_as_string(hide_password=False)
        arguments = [database, self.url, self.queue, str(rows), str(self.keys), str(_WORKERS)]
        done = subprocess.run(
            [sys.executable, "-c", _DJANGO, *arguments],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return float(done.stdout)


async def _until_empty(pool: Any, query: str) -> None:
    while await pool.fetchval(query):  # noqa: ASYNC110  # other processes' rows have no event
        await asyncio.sleep(0.02)
