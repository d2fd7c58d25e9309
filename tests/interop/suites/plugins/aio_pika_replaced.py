"""A plugin of pytest: what imports aio-pika gets the drop-in."""

from __future__ import annotations

import sys

import aio_pika.robust_connection  # noqa: F401  # with all that it needs

import qflow_client.aio_pika

for _name in ("channel", "connection", "robust_channel", "robust_connection"):
    sys.modules[f"aio_pika.{_name}"] = sys.modules[f"qflow_client.aio_pika.{_name}"]
sys.modules["aio_pika"] = qflow_client.aio_pika
