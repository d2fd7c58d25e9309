"""Compares the time of `import qflow_client` with that of `import pika`, each in a new interpreter."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from statistics import median

__all__ = ["main", "measure"]

#: The measured statements, with their names as keys.
IMPORTS = {
    "pika": "import pika",
    "qflow_client": "import qflow_client",
    "Producer": "from qflow_client import Producer",
    "aio_pika": "import aio_pika",
    "AsyncProducer": "from qflow_client import AsyncProducer",
}
# Maximum additional milliseconds compared with pika.
_BEYOND = 20.0
_TIMED = "import time\nbegan = time.perf_counter()\n{}\nprint(time.perf_counter() - began)"


def measure(repeat: int) -> dict[str, list[float]]:
    """Return the milliseconds of each import. Each round runs every import once."""
    found: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for _ in range(repeat):
        for name, code in IMPORTS.items():
            said = subprocess.run(
                [sys.executable, "-c", _TIMED.format(code)], check=True, capture_output=True, text=True
            )
            found[name].append(float(said.stdout) * 1e3)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if with ``--check`` `import qflow_client` takes too long."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.imports", description=__doc__)
    parser.add_argument("--repeat", type=int, default=15, help="rounds, of which the median counts (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    help_ = f"fail if import qflow_client takes longer than import pika and {_BEYOND:g} ms"
    parser.add_argument("--check", action="store_true", help=help_)
    options = parser.parse_args(arguments)
    # The first run compiles modules, which is not part of the measurement.
    measure(1)
    found = measure(options.repeat)
    medians = {name: median(times) for name, times in found.items()}
    beyond = median(ours - theirs for ours, theirs in zip(found["qflow_client"], found["pika"], strict=True))
    if options.json:
        print(json.dumps({"milliseconds": medians, "qflow_client beyond pika": beyond}, indent=2))
    else:
        for name, value in medians.items():
            print(f"{IMPORTS[name]}: {value:.1f} ms")
        print(f"import qflow_client beyond import pika, median of the rounds: {beyond:.1f} ms")
    return int(options.check and beyond > _BEYOND)


if __name__ == "__main__":
    sys.exit(main())
