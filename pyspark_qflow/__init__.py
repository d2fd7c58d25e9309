"""By this package Spark finds ``format("amqp")``: it looks into all packages whose names begin with ``pyspark_``."""

from __future__ import annotations

from contextlib import suppress

__all__ = ["DefaultSource"]

# Without the extra spark there is no such format. An error here would take all other formats of the session away.
with suppress(ImportError):
    from qflow_client.spark.datasource import AmqpDataSource as DefaultSource
