"""AMQP 0-9-1 for Apache Spark: ``format("amqp")``. The tasks of a job share the job's limits (C6)."""

from __future__ import annotations

try:
    import pyarrow  # noqa: F401  # the Arrow writers need it, and PySpark does not install it
    import pyspark.sql.datasource  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"qflow_client.spark needs PySpark and PyArrow: pip install 'qflow-client[spark]' ({error})"
    ) from error

from qflow_client.spark.credits import CreditError
from qflow_client.spark.datasource import register
from qflow_client.spark.flow_report import flow_events, flow_report, flow_report_of_stream, flow_report_stream
from qflow_client.spark.java import JavaMissing, check_java

__all__ = [
    "CreditError",
    "JavaMissing",
    "check_java",
    "flow_events",
    "flow_report",
    "flow_report_of_stream",
    "flow_report_stream",
    "register",
]
