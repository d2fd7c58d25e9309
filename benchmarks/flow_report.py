"""Measures reports on flow logs of several sizes: seconds, CPU time and memory, with one process and with Spark.

The lines come from simulations (tests/unit/simulation). They are written once, in files of 500,000 lines, at about
20,000 lines per second. ``python -m benchmarks.flow_report --lines 20000000 --folder /var/tmp/flow`` uses as many files
as it needs. It measures with a fortieth, a tenth and all of the lines, each in its own process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.spark import largest_of_tasks, processor_seconds, session
from tests.unit.simulation.telemetry import lines_of

__all__ = ["CHUNK", "generate", "main"]

#: Number of lines in a file. The lines come from `_LIVES` simulations.
CHUNK = 500_000
_LIVES = 16


def generate(folder: Path, number: int, chunk: int = CHUNK) -> None:
    """Write the file with this number, unless the file exists."""
    path = folder / f"flow-{number:03}.jsonl"
    if path.exists():
        return
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    unfinished = folder / f"_{path.name}"
    with unfinished.open("w", encoding="utf-8") as file:
        for line in lines_of(range(_LIVES * number, _LIVES * (number + 1)), chunk):
            file.write(encode(line) + "\n")
    unfinished.rename(path)


def _measure(engine: str, files: Sequence[str], slots: int) -> None:
    of_tasks: list[int] | None = None
    of_spark = 0.0
    if engine == "plain":
        from qflow_client.report import flow_report

        began = time.perf_counter()
        report = flow_report(files)
        seconds = time.perf_counter() - began
    else:
        from qflow_client.spark import flow_report as spark_report

        with session(slots) as spark:
            # Run a first job, which starts processes that all jobs use.
            spark.range(10).count()
            before = processor_seconds()
            began = time.perf_counter()
            report = spark_report(spark, files)
            seconds = time.perf_counter() - began
            of_tasks, of_spark = largest_of_tasks(), processor_seconds() - before
    used = resource.getrusage(resource.RUSAGE_SELF)
    told = {
        "engine": engine,
        "lines": sum(report.lines.values()),
        "seconds": round(seconds, 1),
        "processor_seconds": round(used.ru_utime + used.ru_stime + of_spark, 1),
        "largest_memory_mib": used.ru_maxrss // 1024,
        "largest_memory_of_tasks_mib": of_tasks,
        "producers": len(report.tables["producers"]),
    }
    print(json.dumps(told), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.flow_report", description=__doc__)
    parser.add_argument("--lines", type=int, default=4 * CHUNK)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp/qflow-flow-log"))
    parser.add_argument("--engine", choices=("plain", "spark", "both"), default="both")
    parser.add_argument("--slots", type=int, default=2, help="processes that generate, and slots of Spark")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.measure:
        _measure(given.engine, given.measure, given.slots)
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    count = max(1, given.lines // CHUNK)
    with multiprocessing.Pool(given.slots) as pool:
        pool.starmap(generate, [(given.folder, number) for number in range(count)], chunksize=1)
    for engine in ("plain", "spark") if given.engine == "both" else (given.engine,):
        for size in sorted({max(1, count // 40), max(1, count // 10), count}):
            files = [str(given.folder / f"flow-{number:03}.jsonl") for number in range(size)]
            command = [sys.executable, "-m", "benchmarks.flow_report", "--engine", engine]
            command += ["--slots", str(given.slots), "--measure", *files]
            subprocess.run(command, check=True, env=os.environ)


if __name__ == "__main__":
    main()
