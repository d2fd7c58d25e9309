"""Runs the programs of the documentation's page on production, and sends requests to its service."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.producer.tools import PATIENCE

__all__ = ["PAGE", "Service", "running", "write_programs"]

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "production.md").read_text(encoding="utf-8")
_FILE = re.compile(r'^```python title="(?P<name>[\w.]+\.py)"\n(?P<code>.*?)^```$', re.DOTALL | re.MULTILINE)


def write_programs(folder: Path) -> None:
    for name, code in _FILE.findall(PAGE):
        (folder / name).write_text(code, encoding="utf-8")


@contextmanager
def running(folder: Path, port: int, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program of the page with a broker on this port."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ
        | {
            "AMQP_URL": f"amqp://guest:guest@127.0.0.1:{port}/%2F",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "QFLOW_RECONNECT_DELAY_MAX": "0.1",
        }
        | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


class Service:
    """A client of the web service that accepts orders.

    Args:
        port: HTTP port of the service.
    """

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self.accepted: list[str] = []

    def ask(self, path: str, body: bytes | None = None) -> tuple[int, str | None, bytes]:
        """Send a request, and return the status, the header Retry-After and the body of the answer."""
        try:
            with urllib.request.urlopen(self._url + path, body, PATIENCE) as answer:
                return answer.status, None, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers["Retry-After"], error.read()

    def is_there(self) -> bool:
        try:
            self.ask("/ready/")
        except OSError:
            return False
        return True

    def order(self) -> tuple[int, str | None]:
        status, after, body = self.ask("/orders", b"an order")
        if status == 202:
            # The body is the message id, as JSON or as plain text.
            found = re.search(rb"[\w-]+[-+]\w{12}", body)
            assert found
            self.accepted.append(found[0].decode())
        return status, after
