"""The data source of ``format("amqp")``. It creates the readers and writers of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pyspark
from pyspark.errors import PySparkException
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from qflow_client.errors import SettingsError
from qflow_client.spark.columns import Rows
from qflow_client.spark.creditqueue import prepare
from qflow_client.spark.deliveries import SCHEMA
from qflow_client.spark.offset_source import OffsetOptions, OffsetReader
from qflow_client.spark.options import SinkOptions
from qflow_client.spark.sink import StreamWriter, Writer, append
from qflow_client.spark.source import Reader, SourceOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["AmqpDataSource", "register"]


class AmqpDataSource(DataSource):
    """The data source for ``format("amqp")``. `register` registers it with a session."""

    #: Maximum number of tasks that the session runs at the same time; ``None`` if it is unknown.
    max_concurrent_tasks: ClassVar[int | None] = None

    #: Whether the tasks of the session run on the driver's machine.
    is_local: ClassVar[bool] = False

    @classmethod
    def name(cls) -> str:
        return "amqp"

    def schema(self) -> StructType:
        return SCHEMA

    def _source(self, streaming: bool) -> SourceOptions:
        return SourceOptions.load(
            self.options, streaming=streaming, slots=self.max_concurrent_tasks, local=self.is_local
        )

    def _offsets(self, streaming: bool) -> OffsetOptions | None:
        """Return the options of a job that reads a RabbitMQ stream; ``None`` for a job that reads a queue."""
        names = {name.lower() for name in self.options}
        if "stream" not in names:
            return None
        if "queue" in names:
            raise SettingsError("queue and stream both name what to read: set only one")
        return OffsetOptions.load(self.options, streaming=streaming, slots=self.max_concurrent_tasks)

    def reader(self, schema: StructType) -> DataSourceReader:
        offsets = self._offsets(streaming=False)
        return Reader(self._source(streaming=False), schema) if offsets is None else OffsetReader(offsets, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        try:
            from qflow_client.spark.stream_source import OffsetStreamReader, StreamReader
        except ImportError as error:
            raise SettingsError(
                f"readStream needs PySpark 4.2 or later, whose sources can limit a batch; this is {pyspark.__version__}"
            ) from error
        offsets = self._offsets(streaming=True)
        return (
            StreamReader(self._source(streaming=True), schema)
            if offsets is None
            else OffsetStreamReader(offsets, schema)
        )

    def _sink(self, schema: StructType, overwrite: bool) -> tuple[SinkOptions, Rows]:
        if overwrite:
            raise SettingsError(
                'mode overwrite: the messages in a queue cannot be replaced; use mode("append"), or in a stream '
                'outputMode("append")'
            )
        options = SinkOptions.load(self.options, self.max_concurrent_tasks)
        rows = Rows(schema, options.body_format, options.message_id)
        if options.summary_path is not None:
            try:
                append(options.summary_path, "")
            except OSError as error:
                raise SettingsError(
                    f"summaryPath={options.summary_path!r}: {error.strerror}; set the path of a file to which the "
                    "driver can append"
                ) from None
        if options.credit_queue is not None:
            prepare(options.producer, options.credit_queue)
        return options, rows

    def writer(self, schema: StructType, overwrite: bool) -> Writer:
        return Writer(*self._sink(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        return StreamWriter(*self._sink(schema, overwrite))


def register(spark: SparkSession, *, max_concurrent_tasks: int | None = None) -> None:
    """Register ``format("amqp")`` with a session.

    Args:
        max_concurrent_tasks: maximum number of tasks at the same time (default: from the session). A job's limits are
            divided by it (C6), except `capacity` with ``creditQueue`` or ``capacityPerTask``. Set it with Spark
            Connect, or if the cluster can grow without a limit. A job's option ``maxConcurrentTasks`` has priority.

    Raises:
        SettingsError: `max_concurrent_tasks` is below 1.
    """
    if max_concurrent_tasks is not None and max_concurrent_tasks < 1:
        raise SettingsError(f"max_concurrent_tasks={max_concurrent_tasks}: it must be at least 1")
    slots = _slots(spark) if max_concurrent_tasks is None else max_concurrent_tasks
    # Create a class for this session. Workers cannot import this class, so Spark sends it to them with its attributes.
    known = {"max_concurrent_tasks": slots, "is_local": str(spark.conf.get("spark.master", "")).startswith("local")}
    source: type[DataSource] = type("AmqpDataSource", (AmqpDataSource,), known)
    spark.dataSource.register(source)


def _slots(spark: Any) -> int | None:
    """Return how many tasks a session can run at the same time.

    The result is ``None`` with Spark Connect, if the cluster can grow without a limit, and before the cluster starts.
    """
    try:
        context = spark.sparkContext
        jvm = context._jsc.sc()
        slots = int(jvm.maxNumConcurrentTasks(jvm.resourceProfileManager().defaultResourceProfile()))
    except (AttributeError, PySparkException):
        return None
    conf = context.getConf()
    per_executor = int(conf.get("spark.executor.cores", "1")) // int(conf.get("spark.task.cpus", "1"))
    if conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        executors = conf.get("spark.dynamicAllocation.maxExecutors")
        if executors is None:
            return None
    else:
        executors = conf.get("spark.executor.instances", "0")
    # Executors start one by one, so `slots` may not include all of them yet.
    return max(slots, int(executors) * per_executor) or None
