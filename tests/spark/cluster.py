"""A standalone Spark cluster on this machine, and programs that are submitted to it."""

from __future__ import annotations

import compileall
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from py_compile import PycInvalidationMode
from types import TracebackType
from typing import Self

import pyspark

ROOT = Path(__file__).parents[2]
_SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"
_SUBMIT = "org.apache.spark.deploy.SparkSubmit"

# Maximum seconds that the start of the cluster may take on a busy machine.
_PATIENCE = 300.0


def bare_python(folder: Path) -> Path:
    """Create a Python environment with the installed packages of this one, but without an editable `qflow_client`."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(pyspark.__file__).parents[1]
    # Python ignores the *.pth files in `site`, such as the file of an editable installation.
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "others.pth").write_text(f"{site}\n")
    return python


def zipped(folder: Path) -> Path:
    """Return a zip file of the package for ``--py-files``. The modules are compiled, to save time in each process."""
    parts = folder / "parts"
    shutil.copytree(ROOT / "qflow_client", parts / "qflow_client", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(parts, quiet=1, legacy=True, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    return Path(shutil.make_archive(str(folder / "qflow_client"), "zip", parts))


class Cluster:
    """A context manager that runs a master and workers on free ports of the loopback interface.

    Args:
        folder: folder for all files of the cluster.
        python: Python interpreter of the drivers and the executors.
        workers: number of workers.
        cores: number of cores of each worker.
    """

    def __init__(self, folder: Path, python: Path, *, workers: int, cores: int) -> None:
        self.url = ""
        self._folder = folder
        self._workers, self._cores = workers, cores
        self._processes: list[subprocess.Popen[bytes]] = []
        own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_HOME")}
        self._environment = own | {
            "PYSPARK_PYTHON": str(python),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            # If this variable is set, `spark-class` does not search for Spark.
            "SPARK_HOME": str(_SPARK_CLASS.parents[1]),
        }

    def __enter__(self) -> Self:
        try:
            master = self._start("master", _MASTER, "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
            self.url = self._find(*master, r"Starting Spark master at (spark://\S+)")
            workers = []
            for at in range(self._workers):
                folder = self._folder / f"worker-{at}"
                options = f"--host 127.0.0.1 --webui-port 0 --memory 1g --cores {self._cores} --work-dir {folder}"
                workers.append(self._start(f"worker-{at}", _WORKER, *options.split(), self.url))
            for worker in workers:
                self._find(*worker, "Successfully registered")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()
        if exc is not None:
            exc.add_note(self.logs())

    def _start(self, name: str, *command: str, **environment: str) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a process with additional environment variables, and return it and its log."""
        log = self._folder / f"{name}.log"
        with log.open("wb") as file:
            # Start a process group, which also contains all processes that this process starts.
            process = subprocess.Popen(
                [_SPARK_CLASS, *command],
                env=self._environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self._folder,
            )
        self._processes.append(process)
        return process, log

    def _find(self, process: subprocess.Popen[bytes], log: Path, pattern: str) -> str:
        """Wait until a process writes the pattern, and return its last group."""

        def look() -> re.Match[str] | None:
            return re.search(pattern, log.read_text(errors="replace"))

        deadline = time.monotonic() + _PATIENCE
        while (found := look()) is None:
            assert process.poll() is None, f"{log.stem} has ended with {process.returncode}\n{self.logs()}"
            assert time.monotonic() < deadline, f"{log.stem} did not say {pattern!r} in time\n{self.logs()}"
            time.sleep(0.1)
        return found[found.re.groups]

    def _stop(self) -> None:
        for process in reversed(self._processes):
            try:
                # Kill the whole group, including executors and their Python processes.
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        self._processes.clear()

    def submit(self, program: str, *arguments: str, py_files: Path, cores: int = 1, **environment: str) -> Program:
        """Run a program with ``spark-submit``.

        Args:
            program: source text of the program.
            arguments: arguments of the program.
            py_files: zip file with modules for the executors.
            cores: number of cores of all executors together.
            environment: additional environment variables of the driver. The executors do not get them.
        """
        file = self._folder / "program.py"
        file.write_text(program)
        settings = {
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.executor.memory": "512m",
            "spark.cores.max": str(cores),
            "spark.local.dir": str(self._folder / "local"),
            "spark.sql.warehouse.dir": str(self._folder / "warehouse"),
        }
        options = [text for name, value in settings.items() for text in ("--conf", f"{name}={value}")]
        command = ["--master", self.url, *options, "--py-files", str(py_files), str(file), *arguments]
        return Program(*self._start("driver", _SUBMIT, *command, **environment), self.logs)

    def executors(self, worker: int) -> Sequence[int]:
        """Return the process ids of the executors of a worker."""
        parent = self._processes[1 + worker].pid
        # The option -ww prints complete lines, whatever width the environment sets.
        answer = subprocess.run(["ps", "-Aww", "-o", "ppid=,pid=,args="], capture_output=True, text=True, check=True)
        lines = [line.split(None, 2) for line in answer.stdout.splitlines()]
        return [int(pid) for ppid, pid, what in lines if int(ppid) == parent and "CoarseGrainedExecutorBackend" in what]

    def logs(self) -> str:
        """Return the ends of the logs of all processes."""
        files = [*self._folder.glob("*.log"), *self._folder.glob("worker-*/*/*/stderr")]
        return "\n".join(
            f"--- {file.relative_to(self._folder)}\n{file.read_text(errors='replace')[-6000:]}"
            for file in sorted(files)
        )


class Program:
    """A program that was submitted."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, logs: Callable[[], str]) -> None:
        self._process = process
        self._log = log
        self._logs = logs

    @property
    def runs(self) -> bool:
        """Whether the program still runs."""
        return self._process.poll() is None

    def wait(self, timeout: float) -> str:
        """Wait until the program has ended with exit code 0, and return its output."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end in {timeout} s\n{self._logs()}") from None
        assert code == 0, f"it ended with {code}\n{self._logs()}"
        return self._log.read_text(errors="replace")


def run_python(program: str, *arguments: str, timeout: float) -> str:
    """Run a program with this Python and this package, and return its output."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    answer = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout
