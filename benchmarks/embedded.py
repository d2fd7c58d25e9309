"""Runs this repository's broker in its own process, so that it can be measured like any other broker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["DEFAULT_URL", "EMBEDDED", "broker_url"]

DEFAULT_URL = "amqp://guest:guest@localhost:5672/%2F"
#: Value to give instead of a URL.
EMBEDDED = "embedded"


@contextmanager
def broker_url(url: str) -> Iterator[str]:
    """Yield the URL itself; for `EMBEDDED` run a broker during the block, and yield its URL."""
    if url != EMBEDDED:
        yield url
        return
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.embedded"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            # The process runs until the end of its input.
            process.stdin.close()
            process.wait(10)


def _main() -> None:
    from qflow_client.broker import Broker

    with Broker() as broker:
        print(broker.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _main()
