"""Writes rows with one producer for each task. A task is complete when all its messages are confirmed."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from qflow_client.errors import ConfirmTimeout, SettingsError
from qflow_client.message import REPUBLISHED, Message
from qflow_client.receipt import Receipt
from qflow_client.settings import ProducerSettings
from qflow_client.spark.columns import RowError, Rows
from qflow_client.spark.creditqueue import CreditLine
from qflow_client.spark.options import SinkOptions
from qflow_client.sync import Producer

__all__ = ["StreamWriter", "Summary", "TaskReport", "Writer", "append"]

logger = logging.getLogger(__name__)

# Names of the local properties in which Spark stores the id of a streaming query and the id of the current batch.
_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The identity of a task.

    Attributes:
        job: the option ``jobId``, or the id of the streaming query, or a random id. A restarted query keeps its id.
        batch: id of the batch; ``None`` outside of streaming queries.
        attempt: number of the attempt; 0 for the first attempt.
    """

    job: str
    batch: int | None = None
    partition: int = 0
    attempt: int = 0

    def __str__(self) -> str:
        """Return the prefix of the task's message ids (``messageId=position``). All attempts have the same prefix."""
        batch = "" if self.batch is None else f"{self.batch}-"
        return f"{self.job}-{batch}{self.partition}"


@dataclass(frozen=True, slots=True)
class TaskReport(WriterCommitMessage):
    """The totals of one task whose messages are all confirmed.

    Attributes:
        rows: number of sent messages.
        bytes: total body bytes of the sent messages.
        seconds: seconds from the start of the task to the end of its producer.
        times_flowed: how often the task's producer was blocked (flowed).
        seconds_flowed: seconds for which each kind of hold held the task's producer.
    """

    task: Task
    rows: int
    bytes: int
    seconds: float
    times_flowed: int
    seconds_flowed: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The totals of a job, or of one batch of a streaming query, whose messages are all confirmed.

    Attributes:
        job, batch: see `Task`.
        tasks: number of tasks, including those without rows.
        retried: number of tasks that did not succeed at the first attempt.
        seconds: seconds of the slowest task.
        rows, bytes, times_flowed, seconds_flowed: sums over all tasks, see `TaskReport`.
    """

    job: str
    batch: int | None = None
    tasks: int = 0
    retried: int = 0
    rows: int = 0
    bytes: int = 0
    seconds: float = 0.0
    times_flowed: int = 0
    seconds_flowed: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, job: str, batch: int | None, reports: Iterable[TaskReport]) -> Summary:
        reports = list(reports)
        held: Counter[str] = Counter()
        for report in reports:
            held.update(report.seconds_flowed)
        return cls(
            job=reports[0].task.job if reports else job,
            batch=batch,
            tasks=len(reports),
            retried=sum(report.task.attempt > 0 for report in reports),
            rows=sum(report.rows for report in reports),
            bytes=sum(report.bytes for report in reports),
            seconds=max((report.seconds for report in reports), default=0.0),
            times_flowed=sum(report.times_flowed for report in reports),
            seconds_flowed=dict(held),
        )

    def __str__(self) -> str:
        batch = "" if self.batch is None else f", batch {self.batch}"
        held = ", ".join(f"{seconds:.3g} s by {kind}" for kind, seconds in self.seconds_flowed.items()) or "not at all"
        return (
            f"job {self.job}{batch}: {self.rows} messages of {self.bytes} bytes confirmed, by {self.tasks} tasks "
            f"({self.retried} of them not at the first attempt) within {self.seconds:.3g} s; held {held}"
        )


class _Sink:
    """A writer. The driver creates the writer, and Spark sends it to the tasks."""

    def __init__(self, options: SinkOptions, rows: Rows) -> None:
        self._options = options
        self._rows = rows
        self._job = options.job_id or uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskReport:
        context = TaskContext.get()
        assert context is not None, "Spark runs this in a task"
        query, batch = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
        ids_repeat = self._options.message_id == "position" and self._options.job_id is None
        if query is not None and isinstance(self, Writer) and ids_repeat:
            raise SettingsError(
                "messageId=position in a function of foreachBatch: set jobId to a name of the write and the number of "
                'the batch, such as f"orders-{batch_id}"; without it, two writes of a batch would give their messages '
                "the same ids"
            )
        task = Task(
            job=self._job if query is None else self._options.job_id or query,
            batch=None if query is None else int(batch or 0),
            partition=context.partitionId(),
            attempt=context.attemptNumber(),
        )
        return write_task(self._options, self._rows, iterator, task)

    def _summarize(self, batch: int | None, messages: Sequence[WriterCommitMessage | None]) -> None:
        reports = [message for message in messages if isinstance(message, TaskReport)]
        summary = Summary.of(self._job, batch, reports)
        long = self._options.producer.flow_control_wait_notify_period
        level = logging.WARNING if any(held >= long for held in summary.seconds_flowed.values()) else logging.INFO
        logger.log(level, "%s", summary)
        if self._options.summary_path is not None:
            try:
                append(self._options.summary_path, json.dumps(asdict(summary)) + "\n")
            except OSError as error:
                # Do not fail the job. All messages are confirmed, so a second run would send all of them again.
                path = self._options.summary_path
                logger.error("the summary of job %s is not in %s: %s", summary.job, path, error.strerror)

    def _aborted(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        reports = [message for message in messages if isinstance(message, TaskReport)]
        logger.error(
            "job %s failed: %d of its tasks had sent %d messages, which stay in the broker; messages of other tasks "
            "may be there too",
            self._job,
            len(reports),
            sum(report.rows for report in reports),
        )


class Writer(_Sink, DataSourceArrowWriter):
    """Writes a DataFrame."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._summarize(None, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._aborted(messages)


class StreamWriter(_Sink, DataSourceStreamArrowWriter):
    """Writes the batches of a streaming query."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._summarize(batchId, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._aborted(messages)


def append(path: str, text: str) -> None:
    """Append a text to a file, which is created if it does not exist."""
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(text)


def write_task(options: SinkOptions, rows: Rows, batches: Iterable[pa.RecordBatch], task: Task) -> TaskReport:
    """Send the rows of one task, and wait until all of them are confirmed.

    Args:
        task: identity of the task. In a second or later attempt each message gets the header `REPUBLISHED`, because it
            may be a second copy.

    Raises:
        FlowControlTimeout: a row waited `max_producer_flow_control_wait` seconds. This and all later rows are not sent.
        ConfirmTimeout: rows are unconfirmed, and no confirm came within `max_producer_flow_control_wait` seconds.
        CreditError: the credit queue was deleted, is for another capacity, or has messages that are not credits.
        DeliveryError, UndeliveredMessages: messages were returned, nacked or rejected, or the connection was lost.
        RowError: AMQP cannot represent a row.
    """
    name = f"{options.producer.name} task {task}.{task.attempt}"[:255]
    settings = options.producer.replace(name=name)
    mark = REPUBLISHED if task.attempt else None
    id_prefix = f"{task}-" if options.message_id == "position" else None
    count = size = 0
    begin = time.monotonic()
    with ExitStack() as stack:
        line: CreditLine | None = None
        if options.credit_queue is None:
            producer = stack.enter_context(Producer(settings=settings))
        else:
            line = stack.enter_context(CreditLine(settings, options.credit_queue))
            producer = stack.enter_context(line.producer)
        send = producer.send
        for batch in batches:
            first: Receipt | None = None
            messages = rows.messages(batch, count, id_prefix, mark)
            if line is not None:
                messages = line.use(messages, batch.num_rows)
            try:
                for payload, exchange, routing_key in messages:
                    receipt = send(payload, exchange=exchange, routing_key=routing_key)
                    first = first or receipt
                    count += 1
                    size += len(payload.body if isinstance(payload, Message) else payload)
            except (OverflowError, TypeError, ValueError) as error:
                raise RowError(f"partition {task.partition}, row {count}: {error}") from error
            # If the first message of this batch was not delivered, fail now, because the others usually fail too.
            if first is not None and (refused := first.error()) is not None:
                raise refused
        flush(producer, settings)
        state = producer.flow_state
    return TaskReport(task, count, size, time.monotonic() - begin, state.times_flowed, dict(state.seconds_flowed))


def flush(producer: Producer, settings: ProducerSettings) -> None:
    """Wait until all messages are confirmed. There is no time limit while confirms continue to arrive.

    Raises:
        ConfirmTimeout: no confirm came within `max_producer_flow_control_wait` seconds.
        UndeliveredMessages: some messages were not delivered.
    """
    unsettled = producer.unsettled
    while True:
        try:
            producer.flush(settings.max_producer_flow_control_wait)
            return
        except ConfirmTimeout as error:
            if error.unsettled >= unsettled:
                raise
            unsettled = error.unsettled
