"""Publishes numbered persistent messages through a proxy while connections and the broker fail, and audits the queue.

Progress goes to standard error, the audit to standard output. The exit code is 1 if any message was lost, copied
without a mark, out of order, without an outcome, or late.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.proof import print_proof
from benchmarks.soak.audit import ACCEPTED, Overruns, Soak, audit, describe, to_json
from benchmarks.soak.brokers import BROKERS, QUEUE, SoakBroker
from benchmarks.soak.faults import Faults
from benchmarks.soak.history import History, merge
from benchmarks.soak.lag import LagWatch
from benchmarks.soak.senders import Found, Job, run_tasks, run_threads
from qflow_client.testing.proxy import FaultProxy

__all__ = ["main"]

_THREADS, _TASKS = 8, 200
# Number of producers that the threads share. The tasks share the same number of other producers.
_PRODUCERS = 4

# Maximum seconds until all messages of a producer are settled after the last fault. Slow machines need many seconds.
_PATIENCE = 120.0
# Seconds after which a process counts as hanging.
_HANGS = _PRODUCERS * _PATIENCE
# Seconds between two lines of progress.
_PROGRESS = 5.0
# A run with too few faults ends after this number times the requested time.
_LONGEST = 3.0


class _Worker:
    def __init__(self, run: Callable[[Connection, Job], None], job: Job) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=run, args=(theirs, job), name=run.__name__, daemon=True)
        self.process.start()
        theirs.close()
        self.confirmed = self.unsettled = 0
        # The results of the process; None until it has ended.
        self.found: Found | None = None
        self.trouble = ""

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def hear(self) -> None:
        """Read the reports of the process."""
        try:
            while not self.trouble and self.pipe.poll():
                said = self.pipe.recv()
                if isinstance(said, Found):
                    self.found = said
                elif said is not None:
                    self.confirmed, self.unsettled = said
        except (EOFError, OSError):
            if self.found is None:
                self.process.join(10.0)
                self.trouble = f"the process {self.process.name} ended with exit code {self.process.exitcode}"

    def await_end(self, until: float) -> None:
        """Read the reports until the worker has sent its results, or hangs."""
        while self.found is None and not self.trouble:
            wait([self.pipe], max(0.0, min(1.0, until - time.monotonic())))
            self.hear()
            if time.monotonic() >= until and self.found is None:
                self.trouble = f"the process {self.process.name} hangs; where it does is on standard error"
                os.kill(self.pid, signal.SIGUSR1)
                self.process.join(2.0)

    def end(self) -> None:
        if self.process.is_alive():
            self.process.join(5.0 if self.found is not None else 0.0)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


@contextlib.contextmanager
def _working(workers: Sequence[_Worker]) -> Iterator[None]:
    try:
        yield
    finally:
        for worker in workers:
            worker.end()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def soak(broker: SoakBroker, options: argparse.Namespace) -> tuple[Soak, dict[str, Any]]:
    """Publish for the requested time, end all faults, and read the queue."""
    seconds = 60.0 * options.minutes
    least_faults, least_kills = math.floor(10 * options.minutes), math.floor(options.minutes)
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(FaultProxy(url, seed=options.seed)) for url in broker.urls]

        # Each process writes its own file.
        parts = [f"{options.history}.{part}" for part in range(3)] if options.history else []

        def job(part: int, first: int, senders: int) -> Job:
            # Half-open connections are detected within about 15 seconds, because both libraries wait for several
            # heartbeats.
            urls = tuple(f"{proxy.url}?heartbeat=3" for proxy in proxies)
            return Job(
                urls,
                QUEUE,
                first,
                senders,
                _PRODUCERS,
                options.rate / 2,
                options.seed,
                _PATIENCE,
                broker.settings,
                parts[part] if parts else None,
                options.many,
            )

        workers = [_Worker(run_threads, job(0, 0, _THREADS)), _Worker(run_tasks, job(1, _THREADS, _TASKS))]
        history = History(parts[2] if parts else None)
        faults = Faults(broker, proxies, options.seed, history)
        with _working(workers):
            for worker in workers:
                # Wait for the first report of the worker.
                wait([worker.pipe], _HANGS)
            with LagWatch([worker.pid for worker in workers]) as lag:
                began = time.monotonic()
                faults.start()
                try:
                    _watch(workers, faults, began, seconds, least_faults, least_kills)
                finally:
                    _say("all faults end")
                    faults.stop()
                for worker in workers:
                    with contextlib.suppress(OSError):
                        worker.pipe.send(None)
                for worker in workers:
                    worker.await_end(time.monotonic() + _HANGS)
                took = time.monotonic() - began
        accepted = sum(proxy.accepted for proxy in proxies)
    _say("all is settled; the broker is killed and started once more before the queue is read")
    faults.kills += 1
    broker.kill()
    _say("reading the queue")
    queue = broker.read()
    history.close()
    if parts:
        merge(parts, queue, options.history)
    result = Soak(
        journals=[journal for worker in workers if worker.found is not None for journal in worker.found.journals],
        queue=queue,
        overruns=[(overruns, lag.within(worker.pid)) for worker in workers for overruns in _overruns(worker.found)],
        troubles=[
            *faults.troubles,
            *(worker.trouble for worker in workers if worker.trouble),
            *(trouble for worker in workers if worker.found is not None for trouble in worker.found.troubles),
        ],
        connection_faults=faults.connection_faults,
        least_connection_faults=least_faults,
        broker_kills=faults.kills,
        least_broker_kills=least_kills,
    )
    about = {
        "broker": broker.name,
        "seed": options.seed,
        "minutes": options.minutes,
        "rate": options.rate,
        "seconds": round(took, 1),
        "threads": _THREADS,
        "tasks": _TASKS,
        "connections": accepted,
        "faults": dict(sorted(faults.counts.items())),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "lag": {
            worker.process.name: {
                "seconds": round(lag.of(worker.pid).total, 1),
                "longest": round(lag.of(worker.pid).longest, 3),
            }
            for worker in workers
        },
    }
    return result, about


def _overruns(found: Found | None) -> list[Overruns]:
    return [] if found is None else [found.overruns, *(journal.overruns for journal in found.journals)]


def _watch(
    workers: Sequence[_Worker], faults: Faults, began: float, seconds: float, least_faults: int, least_kills: int
) -> None:
    """Show the progress until the time is over and enough faults have happened, or until a forbidden event."""
    shown = began
    while True:
        wait([worker.pipe for worker in workers], 0.5)
        for worker in workers:
            worker.hear()
        now = time.monotonic()
        passed = now - began
        enough = faults.connection_faults >= least_faults and faults.kills >= least_kills
        broken = bool(faults.troubles) or any(worker.trouble for worker in workers)
        done = broken or passed >= (seconds if enough else _LONGEST * seconds)
        if done or now - shown >= _PROGRESS:
            shown = now
            confirmed, unsettled = (sum(getattr(each, name) for each in workers) for name in ("confirmed", "unsettled"))
            _say(
                f"{_clock(passed)} of {_clock(seconds)}: {confirmed:,} confirmed, {unsettled:,} unsettled, "
                f"{faults.connection_faults:,} connection faults, {faults.kills} broker kills"
                + (f"; the broker: {faults.now}" if faults.now else "")
            )
        if done:
            return


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="longer if too little has gone wrong by then")
    parser.add_argument(
        "--broker",
        choices=sorted(BROKERS),
        default="rabbitmq",
        help="embedded: ours, with a message store; cluster: three nodes of RabbitMQ",
    )
    parser.add_argument("--rate", type=float, default=400.0, help="messages a second while nothing holds them")
    parser.add_argument("--many", type=int, default=5, help="messages of one call of send_many")
    parser.add_argument("--seed", type=int, default=0, help="of faults and senders")
    parser.add_argument(
        "--messages",
        type=float,
        default=1,
        help="repeat with the next seed and an empty broker until this number of messages has been accepted",
    )
    parser.add_argument("--history", metavar="FILE", help="write what happened, for benchmarks.soak.history and others")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    accepted = 0
    while accepted < options.messages:
        with BROKERS[options.broker]() as broker:
            result, about = soak(broker, options)
        lines = audit(result)
        if options.json:
            print(json.dumps(about | to_json(result, lines), indent=2))
        for line in lines:
            print(describe(line), file=sys.stderr if options.json else sys.stdout)
        if not all(line.passed for line in lines):
            return 1
        accepted += sum(journal.calls.count(ACCEPTED) for journal in result.journals)
        _say(f"{accepted:,} messages accepted with the seeds up to {options.seed}")
        options.seed += 1
    print_proof(accepted, "messages through faults")
    return 0


if __name__ == "__main__":
    sys.exit(main())
