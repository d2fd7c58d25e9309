"""The number of tasks that share the capacity of a job."""

from __future__ import annotations

import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from qflow_client.broker import Broker
from qflow_client.errors import SettingsError
from qflow_client.spark import register
from qflow_client.spark.datasource import AmqpDataSource


class Session:
    """A Spark session with a given number of slots and given settings. It records the registered data source."""

    def __init__(self, slots: int | None, **conf: str) -> None:
        names = {name.replace("_", "."): value for name, value in conf.items()}
        self.conf = SimpleNamespace(get=lambda name, default=None: names.get(name, default))
        self.dataSource = self
        self.registered: Any = None
        if slots is not None:
            profiles = SimpleNamespace(defaultResourceProfile=lambda: None)
            jvm = SimpleNamespace(resourceProfileManager=lambda: profiles, maxNumConcurrentTasks=lambda profile: slots)
            self.sparkContext = SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: jvm), getConf=lambda: self.conf)

    def register(self, source: type[AmqpDataSource]) -> None:
        self.registered = source


@pytest.mark.parametrize(
    ("slots", "conf", "known"),
    [
        (2, {"spark_master": "local[2]"}, 2),
        (0, {}, None),
        (None, {}, None),
        (3, {"spark_executor_instances": "5", "spark_executor_cores": "4", "spark_task_cpus": "2"}, 10),
        (12, {"spark_executor_instances": "5"}, 12),
        (4, {"spark_dynamicAllocation_enabled": "true"}, None),
        (4, {"spark_dynamicAllocation_enabled": "true", "spark_dynamicAllocation_maxExecutors": "9"}, 9),
    ],
)
def test_register_finds_the_number_of_tasks_that_a_session_can_run_at_the_same_time(
    slots: int | None, conf: Any, known: int | None
) -> None:
    session = Session(slots, **conf)
    register(session)
    assert session.registered.max_concurrent_tasks == known
    assert session.registered.is_local == ("spark_master" in conf)
    register(session, max_concurrent_tasks=7)
    assert session.registered.max_concurrent_tasks == 7


def test_register_rejects_a_number_of_tasks_below_1(spark: SparkSession) -> None:
    with pytest.raises(SettingsError, match="max_concurrent_tasks=0: it must be at least 1"):
        register(spark, max_concurrent_tasks=0)


def test_a_job_with_an_unknown_number_of_tasks_fails_and_the_error_names_maxConcurrentTasks() -> None:
    session = Session(None)
    register(session)
    source = session.registered({})
    with pytest.raises(SettingsError, match=r"capacity is for the whole job, and .* set maxConcurrentTasks"):
        source.writer("body string", False)


def test_Spark_finds_the_format_amqp_without_a_call_of_register(spark: SparkSession) -> None:
    session = spark.newSession()
    frame = session.range(100).selectExpr("cast(id as string) as body", "'q' as routing_key")
    with Broker() as broker:
        broker.declare_queue("q")
        write = frame.write.format("amqp").option("url", broker.url).mode("append")
        with pytest.raises(AnalysisException, match=r"set maxConcurrentTasks, or call qflow_client.spark.register"):
            write.save()
        write.option("maxConcurrentTasks", 2).save()
        assert broker.queue("q").depth == 100
        register(session)
        frame.write.format("amqp").option("url", broker.url).mode("append").save()
        assert broker.queue("q").depth == 200


def test_without_the_spark_extra_pyspark_qflow_can_be_imported_and_defines_no_data_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "qflow_client.spark.datasource", None)
    monkeypatch.delitem(sys.modules, "pyspark_qflow", raising=False)
    assert not hasattr(import_module("pyspark_qflow"), "DefaultSource")


def test_the_option_maxConcurrentTasks_sets_the_number_of_tasks(spark: SparkSession) -> None:
    frame = spark.range(1).selectExpr("cast(id as string) as body")
    with pytest.raises(AnalysisException, match="capacity=1000: it is for the whole job, and 1001 tasks run at once"):
        frame.write.format("amqp").options(capacity=1000, maxConcurrentTasks=1001).mode("append").save()
