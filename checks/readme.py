"""Runs the programs of a README with the installed package, in a folder without the repository.

    python readme.py README.md

This program needs only the installed package, pytest and a README. No source code may be in the folder of the README.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import qflow_client
from qflow_client.broker import Broker

_URL: Final = "amqp://guest:guest@localhost:5672/%2F"
_BLOCK: Final = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LIMIT: Final = 120.0


def run(*command: str, cwd: Path) -> None:
    """Run a command, and raise if it fails or takes longer than the limit."""
    print("---", *command, flush=True)
    subprocess.run(command, cwd=cwd, check=True, timeout=_LIMIT)


def main(readme: str) -> None:
    """Run every Python block of a README, and the commands that README names."""
    package = Path(qflow_client.__file__).parent
    if "site-packages" not in package.parts:
        raise SystemExit(f"{package} is not an installed package; run this where the source is not on the path")
    blocks = _BLOCK.findall(Path(readme).read_text(encoding="utf-8"))
    if len(blocks) < 3:
        raise SystemExit(f"{readme} has {len(blocks)} Python blocks; there were at least three")
    print("qflow_client", qflow_client.__version__, "of", package)
    qflow = str(Path(sys.executable).with_name("qflow"))
    with tempfile.TemporaryDirectory() as name, Broker(http_port=0) as broker:
        folder = Path(name)
        broker.declare_queue("orders")
        for number, block in enumerate(blocks):
            is_test = "def test_" in block
            program = folder / (f"test_readme_{number}.py" if is_test else f"readme_{number}.py")
            program.write_text(block.replace(_URL, broker.url), encoding="utf-8")
            how = ["-m", "pytest", "-q", "-p", "no:cacheprovider"] if is_test else []
            run(sys.executable, *how, str(program), cwd=folder)
        flights = folder / "flights.csv"
        flights.write_text("carrier,flight\nUA,1545\nAA,1141\n", encoding="utf-8")
        run(qflow, "send", str(flights), "--url", broker.url, "--routing-key", "orders", cwd=folder)
        run(qflow, "admin", "--url", str(broker.http_url), "purge", "orders", cwd=folder)
        run(qflow, "demo", "--messages", "5000", "--json", cwd=folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
