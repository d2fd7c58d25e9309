"""A pytest plugin. Modules that import aio-pika get the drop-in."""

from __future__ import annotations

import sys

import aio_pika.robust_connection  # noqa: F401  # also imports its dependencies

import qflow_client.aio_pika

for _name in ("channel", "connection", "robust_channel", "robust_connection"):
    sys.modules[f"aio_pika.{_name}"] = sys.modules[f"qflow_client.aio_pika.{_name}"]
sys.modules["aio_pika"] = qflow_client.aio_pika
