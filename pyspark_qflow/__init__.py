"""Lets Spark find ``format("amqp")``: Spark loads all packages whose names begin with ``pyspark_``."""

from __future__ import annotations

from contextlib import suppress

__all__ = ["DefaultSource"]

# If the extra ``spark`` is not installed, this format does not exist. The import error is ignored, because it would
# also disable all other formats of the session.
with suppress(ImportError):
    from qflow_client.spark.datasource import AmqpDataSource as DefaultSource
