"""On a system that is not POSIX, such as Windows, functions without files work. The others raise a clear error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# The functions of Python that only POSIX systems have, as far as the library uses them.
PROGRAM = """
import importlib, os, sys
for module in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[module] = None
for name in ("fchmod", "fork", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "pipe2", "pread", "pwrite", "register_at_fork"):
    delattr(os, name)
import qflow_client
for name in qflow_client.__all__:
    getattr(qflow_client, name)
for module in ("aio_pika", "broker", "cli.app", "django", "flow", "kombu", "pika", "sqlalchemy"):
    importlib.import_module(f"qflow_client.{module}")
from qflow_client import Deduplicator, FlowLog, Outbox, Producer
from qflow_client.broker import Broker
path = sys.argv[1]
with Broker() as broker:
    with Producer(broker.url, declare="q", routing_key="q") as producer:
        print(producer.send(b"").result(20))
    for make in (
        lambda: Producer(broker.url, outbox=path), lambda: Outbox(path), lambda: Deduplicator(path),
        lambda: FlowLog(path).__enter__(), lambda: Broker(store=path).__enter__(),
    ):
        try:
            make()
        except Exception as error:
            print(type(error).__name__, error)
"""


@pytest.mark.program
def test_on_a_system_that_is_not_posix_only_features_that_keep_files_raise_an_error(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "file")], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    confirmed, *refused = ran.stdout.splitlines()
    assert confirmed == "confirmed"
    assert [line.split()[0] for line in refused] == [
        "OutboxError",
        "OutboxError",
        "DeduplicationError",
        "OSError",
        "StoreError",
    ]
    assert all("qflow_client keeps files on POSIX systems only, such as Linux and macOS" in line for line in refused)
