"""Compares the publish rate with another checkout, such as the previous commit. Both run alternately in one run.

    git worktree add ../before HEAD~1
    python -m benchmarks.against ../before

Each peer runs in a process with the modules of one checkout, including its benchmarks. Each ratio compares two
consecutive runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Final, Self

from benchmarks.embedded import DEFAULT_URL, EMBEDDED, broker_url
from benchmarks.peers import Job, Peer, Timing
from benchmarks.report import aligned, latency_percentile
from benchmarks.runner import Lost, Measurement, Plan, measure

__all__ = ["main"]

_ROOT: Final = Path(__file__).parents[1]
_PEERS: Final = ("qflow", "qflow_8", "qflow_64", "qflow_async", "qflow_tasks")

# Source of the child process. The source is the same for both checkouts.
_SERVE: Final = """
import json, os, sys
from dataclasses import asdict
sys.path.insert(0, sys.argv[1])
import benchmarks, qflow_client
for module in benchmarks, qflow_client:
    if not module.__file__.startswith(sys.argv[1] + os.sep):
        sys.exit(f"{sys.argv[1]} has no {module.__name__}")
from benchmarks.peers import Job, load
answers = sys.stdout
sys.stdout = sys.stderr
peers = {}
for line in sys.stdin:
    asked = json.loads(line)
    name, size = asked.pop("peer"), asked.pop("size")
    if name not in peers:
        peers[name] = load(name)
    timing = peers[name].run(Job(body=b"x" * size, **asked))
    print(json.dumps(asdict(timing)), file=answers, flush=True)
"""


class _Checkout:
    """The processes of one checkout. The process of a peer starts when the peer first runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.communicate()

    def run(self, peer: str, job: Job) -> Timing:
        """Run a peer. Raise RuntimeError if its process has ended; stderr shows the reason."""
        if peer not in self._processes:
            self._processes[peer] = subprocess.Popen(
                [sys.executable, "-c", _SERVE, self._folder],
                cwd=self._folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        process = self._processes[peer]
        assert process.stdin is not None
        assert process.stdout is not None
        asked = asdict(replace(job, body=b""))
        del asked["body"]
        print(json.dumps({**asked, "peer": peer, "size": len(job.body)}), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(
                f"peer {peer!r} of {self._folder} ended with exit code {process.wait()}; see its output above"
            )
        timing = json.loads(answer)
        return Timing(**{**timing, "latencies": tuple(timing["latencies"])})


class _Peer:
    distribution = ""
    varies = True

    def __init__(self, name: str, checkout: _Checkout) -> None:
        self.title = name
        self._checkout = checkout

    def run(self, job: Job) -> Timing:
        return self._checkout.run(self.title, job)


def _row(measurements: Sequence[Measurement], name: str, size: int) -> tuple[str, ...]:
    before, after = (
        [each for each in measurements if each.size == size and each.peer == f"{name} {which}"]
        for which in ("before", "after")
    )
    pairs = list(zip(before, after, strict=True))
    rate = median(new.rate / old.rate for old, new in pairs)
    processor = median(new.cpu_seconds / old.cpu_seconds for old, new in pairs)
    row = [name, f"{size:,}", f"{median(each.rate for each in before):,.0f}", f"{rate:.3f}", f"{processor:.3f}"]
    old, new = latency_percentile(before, 0.99), latency_percentile(after, 0.99)
    if old is not None and new is not None:
        row.append(f"{new / old:.3f}")
    return tuple(row)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison.

    Returns:
        The exit code: 1 if messages were lost, or a rate is below ``--floor``.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the other checkout")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"of the broker, or {EMBEDDED}")
    parser.add_argument("--peers", default=",".join(_PEERS), help="separated by commas (%(default)s)")
    parser.add_argument("--sizes", default="100,1024", help="of bodies, in bytes (%(default)s)")
    parser.add_argument("--messages", type=int, default=5000, help="per run (%(default)s)")
    parser.add_argument("--window", type=int, default=1000, help="the most unconfirmed messages (%(default)s)")
    parser.add_argument("--repeat", type=int, default=32, help="rounds, rounded up to an even number (%(default)s)")
    parser.add_argument("--varying", action="store_true", help="every message has headers and a timestamp of its own")
    parser.add_argument("--latency", action="store_true", help="time the confirms too, which costs some of the rate")
    parser.add_argument("--floor", type=float, default=0.0, help="fail if a rate is below so much of the other's")
    options = parser.parse_args(arguments)
    names, sizes = options.peers.split(","), tuple(map(int, options.sizes.split(",")))
    with ExitStack() as stack:
        url = stack.enter_context(broker_url(options.url))
        peers: dict[str, Peer] = {}
        for which, folder in ("before", options.folder.resolve()), ("after", _ROOT):
            checkout = stack.enter_context(_Checkout(folder))
            peers |= {f"{name} {which}": _Peer(name, checkout) for name in names}
        plan = Plan(
            url,
            options.messages,
            sizes,
            options.window,
            -(-options.repeat // 2),
            confirmed=True,
            varying=options.varying,
            sample=97 if options.latency else 0,
        )
        measurements = []
        # Compared runs are consecutive. The second of them has a small disadvantage, so the order alternates.
        for order in ("before", "after"), ("after", "before"):
            pairs = {f"{name} {which}": peers[f"{name} {which}"] for name in names for which in order}
            try:
                measurements += measure(plan, pairs, lambda text: None)
            except Lost as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
    rows = [_row(measurements, name, size) for size in sizes for name in names]
    head = ("peer", "bytes", "before, 1/s", "rate", "processor time", "p99")[: len(rows[0])]
    print(aligned(f"after / before, median of {2 * plan.repeat} rounds", [head, *rows]))
    slow = [row for row in rows if float(row[3]) < options.floor]
    for row in slow:
        print(f"below {options.floor}: {row[0]} with {row[1]} bytes", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
