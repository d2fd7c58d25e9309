from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qflow_client.broker import Broker
from qflow_client.testing.node import free_port
from qflow_client.testing.rabbitmq import RabbitMQNode, RabbitMQNotInstalled

try:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql import functions as sf

    from qflow_client.spark import check_java, register
    from tests.spark.support import FILES, ROWS
except ImportError:
    # Without the extra there is nothing to test. That is an error if these tests are required.
    if os.environ.get("QFLOW_REQUIRE_SPARK") == "1":
        raise
    collect_ignore_glob = ["test_*.py"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # On a busy machine, the start of the session or of a RabbitMQ node, and the first job or batch, take minutes.
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One Spark session for the whole run, which runs two tasks at the same time, and tries each task at most twice."""
    check_java()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    # The Python workers must import the package under test.
    folders = [str(HERE.parents[1]), str(HERE / "preloaded"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    session = (
        SparkSession.builder.master("local[2,2]")
        .config("spark.driver.memory", "2g")
        .config("spark.sql.shuffle.partitions", 2)
        # With so few rows, compiling a query takes longer than running it.
        .config("spark.sql.codegen.wholeStage", False)
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .config("spark.ui.enabled", False)
        # The server of Spark Connect runs in this JVM, so that no second JVM is needed.
        .config("spark.plugins", "org.apache.spark.sql.connect.SparkConnectPlugin")
        .config("spark.connect.grpc.binding.address", "127.0.0.1")
        .config("spark.connect.grpc.binding.port", free_port(set()))
        .config("spark.ui.showConsoleProgress", False)
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    register(session)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def _node() -> Iterator[RabbitMQNode]:
    try:
        node = RabbitMQNode()
    except RabbitMQNotInstalled as missing:
        if os.environ.get("QFLOW_REQUIRE_BROKERS") == "1":
            pytest.fail(f"{missing} (QFLOW_REQUIRE_BROKERS=1 forbids to skip)", pytrace=False)
        pytest.skip(str(missing))
    with node:
        yield node


@pytest.fixture
def node(_node: RabbitMQNode) -> RabbitMQNode:
    """A RabbitMQ node that all tests share. Each test has its own queues."""
    if not _node.running:
        # An earlier test has killed the node, and failed before restarting it.
        _node.start()
    return _node


@pytest.fixture
def broker() -> Iterator[Broker]:
    """A broker with an empty queue ``rows``."""
    with Broker() as broker:
        broker.declare_queue("rows")
        yield broker


@pytest.fixture
def lines(spark: SparkSession, tmp_path: Path) -> DataFrame:
    """A stream with one file in each batch. The rows come in the same order each time."""
    folder = tmp_path / "lines"
    folder.mkdir()
    for file in range(FILES):
        text = "".join(f"{file * ROWS + row}\n" for row in range(ROWS))
        path = folder / f"{file}.txt"
        path.write_text(text)
        # Spark reads the oldest file first.
        os.utime(path, (1_700_000_000 + file,) * 2)
    stream = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(folder))
    # Use long rows, because short rows wait in Spark's buffers.
    return stream.select(sf.rpad("value", 2000, " ").alias("body"))
