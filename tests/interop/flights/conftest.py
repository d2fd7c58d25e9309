from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.interop.contract.conftest import providers as providers


@pytest.fixture(scope="session")
def own_url() -> Iterator[str]:
    """The URL of the broker of this repository, which runs in a separate process."""
    command = [sys.executable, "-m", "qflow_client.cli", "broker", "--port", "0", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url, "it did not start"
            yield url
        finally:
            process.terminate()
            process.wait(30)
