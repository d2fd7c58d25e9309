"""Credits in a queue limit the capacity of a job. The tests use the broker here and a real RabbitMQ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from qflow_client.broker import Broker
from qflow_client.errors import FlowControlTimeout, QflowError, SettingsError
from qflow_client.spark import creditqueue
from qflow_client.spark.columns import Rows
from qflow_client.spark.creditqueue import prepare
from qflow_client.spark.credits import CreditError
from qflow_client.spark.options import SinkOptions
from qflow_client.spark.sink import Task, write_task
from qflow_client.testing.rabbitmq import RabbitMQNode
from tests.effort import rounds
from tests.spark.support import PATIENCE, SlowConsumer, eventually, in_background, when_stopped, write

SCHEMA = StructType().add("body", "string")
CREDITS = "credits"
#: Options for tasks that wait as long as the test. The broker and the other tasks may be slow.
WAITS = {name: str(PATIENCE) for name in ("connectTimeout", "maxProducerFlowControlWait", "retryFor")}


@pytest.fixture(params=["embedded", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a broker that has an empty queue ``rows`` and no credits."""
    if request.param == "embedded":
        with Broker() as broker:
            broker.declare_queue("rows")
            yield broker.url
        return
    url = request.getfixturevalue("node").url
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        for queue in (CREDITS, f"{CREDITS}.tasks", "rows"):
            channel.queue_delete(queue)
        channel.queue_declare("rows", durable=True)
    yield url


def ready(url: str, queue: str) -> int:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        return int(connection.channel().queue_declare(queue, passive=True, durable=True).method.message_count)


def do(url: str, method: str, *arguments: Any, **keywords: Any) -> Any:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        return getattr(connection.channel(), method)(*arguments, **keywords)


def options(url: str, **more: object) -> SinkOptions:
    given = {"url": url, "routingKey": "rows", "creditQueue": CREDITS} | WAITS | more
    return SinkOptions.load({name: str(value) for name, value in given.items()}, None)


def prepared(url: str, **more: object) -> SinkOptions:
    """Return the options of a job whose driver has published the credits."""
    of = options(url, **more)
    prepare(of.producer, CREDITS)
    return of


def task(of: SinkOptions, partition: int, begin: int, end: int, *, step: int = 500) -> Any:
    """Run on a thread what Spark runs in a task."""
    batches = [
        pa.RecordBatch.from_pydict({"body": [str(row) for row in range(at, min(at + step, end))]})
        for at in range(begin, end, step)
    ]
    rows = Rows(SCHEMA, of.body_format, of.message_id)
    return in_background(write_task, of, rows, batches, Task(job="job", partition=partition))


def tasks(of: SinkOptions, count: int, rows: int) -> list[Any]:
    return [task(of, at, at * rows, (at + 1) * rows) for at in range(count)]


@pytest.mark.parametrize(
    ("url", "capacity"),
    [("embedded", capacity) for capacity in (1, 5, 200, 3000)]
    + [pytest.param("rabbitmq", capacity, marks=pytest.mark.rabbitmq) for capacity in (5, 3000)],
    indirect=["url"],
)
def test_C6_each_row_is_sent_once_with_any_number_of_credits_and_all_credits_are_returned(
    url: str, capacity: int
) -> None:
    of = prepared(url, capacity=capacity)
    assert ready(url, CREDITS) == min(capacity, 256)
    # With fewer credits than tasks, tasks wait for each other, so send fewer rows.
    rows = 50 if capacity < 8 else 1000
    for running in tasks(of, 8, rows):
        assert running.result(PATIENCE).rows == rows
    assert ready(url, "rows") == 8 * rows
    # All credits are returned.
    eventually(lambda: ready(url, CREDITS) == min(capacity, 256))
    prepare(of.producer, CREDITS)


def test_C6_with_eight_tasks_the_depth_never_exceeds_the_stop_threshold_plus_the_capacity() -> None:
    rows, stop, capacity = rounds(2000, least=1000), 1000, 300
    with Broker() as broker:
        broker.declare_queue("rows", arguments={"qpid.flow_stop_count": stop, "qpid.flow_resume_count": 700})
        of = prepared(broker.url, capacity=capacity)
        with SlowConsumer(broker.url, "rows", when_stopped(broker, "rows")) as consumer:
            running = tasks(of, 8, rows)
            consumer.wait_for(8 * rows)
            assert sum(each.result(PATIENCE).rows for each in running) == 8 * rows
        queue = broker.queue("rows")
        assert stop < queue.peak_depth <= stop + capacity
        assert queue.flow_stopped_count > 1
        assert sorted(map(int, consumer.bodies)) == list(range(8 * rows))


@pytest.mark.rabbitmq
def test_C6_on_RabbitMQ_the_depth_of_a_queue_never_exceeds_x_max_length_plus_the_capacity(node: RabbitMQNode) -> None:
    maximum, capacity, rows = 1000, 300, 500
    queues = {
        "rows": {"x-max-length": maximum, "x-overflow": "reject-publish"},
        CREDITS: None,
        f"{CREDITS}.tasks": None,
    }
    for queue, arguments in queues.items():
        do(node.url, "queue_delete", queue)
        if arguments is not None:
            do(node.url, "queue_declare", queue, durable=True, arguments=arguments)
    of = prepared(node.url, capacity=capacity)
    peak = 0
    # The consumer consumes nothing until the queue is full.
    with SlowConsumer(node.url, "rows", lambda: peak >= maximum) as consumer:
        running = tasks(of, 8, rows)
        with pika.BlockingConnection(pika.URLParameters(node.url)) as connection:
            channel = connection.channel()
            while len(consumer.bodies) < 8 * rows:
                peak = max(peak, channel.queue_declare("rows", passive=True).method.message_count)
                for each in running:
                    if each.done():
                        each.result()
        assert sum(each.result(PATIENCE).rows for each in running) == 8 * rows
    assert maximum <= peak <= maximum + capacity
    assert sorted(map(int, consumer.bodies)) == list(range(8 * rows))


def test_C6_while_confirms_are_withheld_all_tasks_together_send_exactly_the_capacity(broker: Broker) -> None:
    broker.withhold_confirms()
    of = prepared(broker.url, capacity=100)
    running = tasks(of, 8, 1000)
    broker.wait_until(lambda b: b.queue("rows").depth == 100, timeout=PATIENCE)
    # A waiting task also consumes the second queue, and so is counted.
    broker.wait_until(lambda b: b.queue(f"{CREDITS}.tasks").consumers == 8, timeout=PATIENCE)
    assert broker.queue("rows").peak_depth == 100
    assert broker.queue(CREDITS).depth == 100
    broker.release_confirms()
    for each in running:
        report = each.result(PATIENCE)
        assert report.rows == 1000
        assert report.seconds_flowed["capacity"] > 0
    assert broker.queue("rows").depth == 8000


def test_a_task_that_waits_for_rows_from_Spark_returns_its_credits_to_other_tasks(broker: Broker) -> None:
    of = prepared(broker.url, capacity=1)
    first: Any = in_background(
        write_task,
        of,
        Rows(SCHEMA, "column", "column"),
        batches_until(broker, 21),
        Task(job="job", partition=0),
    )
    # The second task gets the only credit while the first task waits for its next batch from Spark.
    assert task(of, 1, 0, 10).result(PATIENCE).rows == 10
    assert first.result(PATIENCE).rows == 12


def batches_until(broker: Broker, depth: int) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict({"body": [str(row) for row in range(11)]})
    broker.wait_until(lambda b: b.queue("rows").depth == depth, timeout=PATIENCE)
    yield pa.RecordBatch.from_pydict({"body": ["last"]})


def test_the_error_for_an_option_that_creditQueue_excludes_names_the_option() -> None:
    url = "amqp://127.0.0.1:1/"
    with pytest.raises(SettingsError, match=r"capacityPerTask=3 and creditQueue='credits': .*; leave capacityPerTask"):
        options(url, capacityPerTask=3)
    with pytest.raises(SettingsError, match="capacity='auto': with creditQueue it must be a number"):
        options(url, capacity="auto")
    with pytest.raises(SettingsError, match="rate is for the whole job"):
        options(url, rate=10)
    # With credits, the number of tasks need not be known, and may be higher than the capacity.
    assert options(url, capacity=1).producer.capacity == 1


def test_a_capacity_that_differs_from_the_sum_of_the_credits_raises_CreditError(url: str) -> None:
    prepared(url, capacity=100)
    with pytest.raises(CreditError, match="capacity=99: the credits in queue 'credits' are for a capacity of 100; set"):
        prepared(url, capacity=99)
    # A task also reports this, if the credits were replaced after the driver's check.
    with pytest.raises(CreditError, match="capacity=99: the credits in queue 'credits' are for a capacity of 100"):
        task(options(url, capacity=99), 0, 0, 10).result(PATIENCE)
    assert ready(url, "rows") == 0
    eventually(lambda: ready(url, CREDITS) == 100)


def test_a_purge_of_the_queue_of_credits_makes_jobs_and_tasks_fail_with_CreditError(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = prepared(url, capacity=100)
    do(url, "queue_purge", CREDITS)
    words = "has 0 credits, no task has any, and a capacity of 100 needs 100: the que"
    with monkeypatch.context() as patch:
        # A driver waits for credits for as long as a connect may take. Shorten this wait.
        look = creditqueue._look_through
        patch.setattr(creditqueue, "_look_through", lambda connection, *more: look(connection, more[0], more[1], 0.5))
        with pytest.raises(CreditError, match=words):
            prepare(of.producer, CREDITS)
        patch.setattr(creditqueue, "_PATIENCE", 0.1)
        with pytest.raises(CreditError, match=words):
            task(of, 0, 0, 10).result(PATIENCE)
    # This is the solution that the error names.
    do(url, "queue_delete", CREDITS)
    do(url, "queue_delete", f"{CREDITS}.tasks")
    prepare(of.producer, CREDITS)
    assert task(of, 0, 0, 10).result(PATIENCE).rows == 10


def test_a_task_that_gets_no_credit_in_time_fails_with_FlowControlTimeout(url: str) -> None:
    of = prepared(url, capacity=2, maxProducerFlowControlWait=0.5)
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        for _ in range(2):
            assert channel.basic_get(CREDITS)[0] is not None
        with pytest.raises(
            FlowControlTimeout, match=r"not sent within \S+ s, .* blocked \(flowed\): capacity.*no credit from queue"
        ):
            task(of, 0, 0, 10).result(PATIENCE)


def test_a_queue_with_other_messages_cannot_be_used_as_the_queue_of_credits(url: str) -> None:
    do(url, "basic_publish", "", "rows", b"an order")
    eventually(lambda: ready(url, "rows") == 1)
    with pytest.raises(
        CreditError, match=r"queue 'rows' contains a message that is not a credit \(b'an order'\): name a q"
    ):
        prepare(options(url, creditQueue="rows").producer, "rows")
    eventually(lambda: ready(url, "rows") == 1)


def test_a_task_fails_with_CreditError_if_the_queue_of_credits_is_deleted(broker: Broker) -> None:
    of = prepared(broker.url, capacity=10)
    broker.withhold_confirms()
    running = task(of, 0, 0, 100)
    broker.wait_until(lambda b: b.queue("rows").depth == 10, timeout=PATIENCE)
    do(broker.url, "queue_delete", f"{CREDITS}.tasks")
    with pytest.raises(CreditError, match=r"the queue of credits 'credits', or 'credits\.tasks', was deleted"):
        running.result(PATIENCE)
    with pytest.raises(CreditError, match=r"queue 'credits\.tasks' cannot be consumed: 404 .*the job was planned"):
        task(of, 0, 0, 100).result(PATIENCE)


def test_a_duplicate_credit_in_the_queue_of_credits_makes_jobs_and_tasks_fail_with_CreditError(broker: Broker) -> None:
    of = prepared(broker.url, capacity=10)
    (credit, *_) = broker.messages(CREDITS)
    do(broker.url, "basic_publish", "", CREDITS, credit.body)
    with pytest.raises(CreditError, match="has 11 credits, no task has any, and a capacity of 10 needs 10"):
        prepare(of.producer, CREDITS)
    with pytest.raises(CreditError, match="has more credits than a capacity of 10 needs: some were issued twice"):
        task(of, 0, 0, 100).result(PATIENCE)


def test_several_drivers_that_start_at_the_same_time_publish_the_credits_only_once(url: str) -> None:
    of = options(url, capacity=20)
    for each in [in_background(prepare, of.producer, CREDITS) for _ in range(4)]:
        each.result(PATIENCE)
    assert ready(url, CREDITS) == 20


def test_a_driver_publishes_the_credits_if_an_earlier_driver_only_declared_the_queue_of_credits(url: str) -> None:
    # The earlier driver has left an empty queue.
    do(url, "queue_declare", CREDITS, durable=True, arguments={"x-queue-type": "classic"})
    prepared(url, capacity=20)
    assert ready(url, CREDITS) == 20


def test_C6_a_killed_task_has_sent_at_most_its_credits_and_the_broker_requeues_the_credits(broker: Broker) -> None:
    of = prepared(broker.url, capacity=40)
    # Without confirms, the queue contains all messages that the task could send with its credits.
    broker.withhold_confirms()
    dead = task(of, 0, 0, 1000)
    broker.wait_until(lambda b: b.queue("rows").depth == 40, timeout=PATIENCE)
    broker.drop_connections()
    with pytest.raises(QflowError, match="the connection is lost"):
        dead.result(PATIENCE)
    running = tasks(of, 3, 500)
    broker.wait_until(lambda b: b.queue("rows").depth == 80, timeout=PATIENCE)
    broker.wait_until(lambda b: b.queue(f"{CREDITS}.tasks").consumers == 3, timeout=PATIENCE)
    assert broker.queue("rows").peak_depth == 80
    broker.release_confirms()
    assert [each.result(PATIENCE).rows for each in running] == [500] * 3
    assert len({message.body for message in broker.messages("rows")}) == 1500


def test_a_job_of_Spark_can_use_credits_from_a_queue(spark: SparkSession, url: str, tmp_path: Path) -> None:
    frame = spark.range(2000, numPartitions=4).selectExpr("cast(id as string) as body")
    write(frame, url, routingKey="rows", capacity=50, creditQueue=CREDITS)
    assert ready(url, "rows") == 2000
    with pytest.raises(AnalysisException, match="capacity=60: the credits in queue 'credits' are for a capacity of 50"):
        write(frame, url, routingKey="rows", capacity=60, creditQueue=CREDITS)
