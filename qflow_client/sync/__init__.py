"""`Producer`, the producer for threads. It uses connections of pika."""

from __future__ import annotations

from qflow_client.sync.connection import connect
from qflow_client.sync.producer import Producer
from qflow_client.sync.receipt import SyncReceipt

__all__ = ["Producer", "SyncReceipt", "connect"]
