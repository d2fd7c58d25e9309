"""The broker of this repository, in a process of its own, to be measured like any other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["DEFAULT_URL", "EMBEDDED", "broker_url"]

DEFAULT_URL = "amqp://guest:guest@localhost:5672/%2F"
#: Given instead of a URL.
EMBEDDED = "embedded"


@contextmanager
def broker_url(url: str) -> Iterator[str]:
    """The URL itself; for `EMBEDDED` that of a broker which runs until the block is left."""
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
            # It runs until it has read to the end.
            process.stdin.close()
            process.wait(10)


def _main() -> None:
    from qflow_client.broker import Broker

    with Broker() as broker:
        print(broker.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _main()
