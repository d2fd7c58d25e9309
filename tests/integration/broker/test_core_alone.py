"""The broker's core works without the other parts of the broker and without the packages that they need."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("aiohttp", "prometheus_client", "pydantic", "pydantic_core", "sqlite3"):
            raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, Absent())

import pika
from qflow_client.broker.core import Broker, Settings

with Broker(Settings(capacity=1000)) as broker:
    broker.declare_queue("q")
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        channel = connection.channel()
        for _ in range(11):
            channel.basic_publish("", "q", b"x" * 100)
        broker.wait_until(lambda broker: broker.queue("q").depth == 11)
        (flowed,) = broker.channels()
        assert flowed.blocked_by == ("q",) and broker.queue("q").flow_stopped, flowed
        broker.purge("q")
        assert not broker.channels()[0].flowed
print("done")
"""


def test_the_core_of_the_broker_applies_flow_control_without_the_packages_for_http_and_sqlite() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
