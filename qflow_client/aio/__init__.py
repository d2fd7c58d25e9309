"""`AsyncProducer`, the producer for asyncio. It uses connections of aio-pika."""

from __future__ import annotations

from qflow_client.aio.connection import connect_async
from qflow_client.aio.producer import AsyncProducer
from qflow_client.aio.receipt import AsyncReceipt

__all__ = ["AsyncProducer", "AsyncReceipt", "connect_async"]
