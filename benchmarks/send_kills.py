"""Kills `qflow send --outbox` (kill -9) at random times and restarts it: which rows are lost, or not marked (E13).

Every run is the same command with the same file. It continues where the previous run was killed. At the end one run may
finish, and the queue is read.

With refusals, the queue is unbound at some time of every second run, so the broker returns all later messages. The run
is killed soon afterwards: before it has noticed, while it ends, or after it has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pika

from benchmarks.embedded import EMBEDDED, broker_url
from benchmarks.kills import print_verdict, read_queue
from benchmarks.proof import print_proof
from qflow_client import Outbox

__all__ = ["FORMATS", "Verdict", "audit", "run"]

_QUEUE = _EXCHANGE = "qflow.send-kills"
# Maximum seconds from the start of a run to its kill.
_LONGEST = 0.6
# Maximum seconds from the unbind to the kill of a run.
_LONGEST_REFUSED = 0.15
#: The formats of rows in the file.
FORMATS = ("lines", "csv", "jsonl")

# This program forks for each run, so that no run has to import everything and create all commands.
_RUNS = """
import os, signal, sys
from functools import cache
import typer.main
import encodings.idna, pydantic, qflow_client.sync.outbox, qflow_client.telemetry
from qflow_client.cli import main
from qflow_client.cli.app import app

typer.main.get_command = cache(typer.main.get_command)
typer.main.get_command(app)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os._exit(main(sys.argv[1:] + line.split()))
    os.write(1, b"begun\\n")
    if sys.stdin.readline().strip() == "kill":
        # One that has ended by itself is still there until it is waited for.
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The results for the rows.

    Attributes:
        rows: number of rows in the file.
        kills: number of killed runs.
        refused: number of runs, killed or not, that left refused rows in the outbox.
        resumed: number of runs that found some of the rows already sent.
        in_queue: number of messages in the queue.
        lost: number of rows that are not in the queue.
        out_of_order: number of rows whose first copy came after the first copy of a later row. Rows that were in the
            outbox after a run with refusals do not count.
        copies: number of further copies of rows.
        unmarked: number of rows with more than one copy without a mark.
        left: number of messages in the outbox at the end.
    """

    rows: int
    kills: int
    refused: int
    resumed: int
    in_queue: int
    lost: int
    out_of_order: int
    copies: int
    unmarked: int
    left: int
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether no row is lost, out of order, unmarked, or still in the outbox."""
        return not (self.lost or self.unmarked or self.left or self.out_of_order)


def audit(rows: int, queue: Iterable[tuple[int, bool]], refused: Container[int] = ()) -> dict[str, int]:
    """Compare the file with the queue.

    Args:
        rows: number of rows, numbered from 1.
        queue: row number of each copy in order, and whether the copy is marked.
        refused: numbers of rows that may come in any order.

    Returns:
        The counts of a `Verdict`.
    """
    copies: Counter[int] = Counter()
    # The broker may handle the last bytes of a killed run after the marked copies of the next run.
    unmarked: Counter[int] = Counter()
    highest = out_of_order = 0
    for number, is_marked in queue:
        copies[number] += 1
        unmarked[number] += not is_marked
        if copies[number] > 1 or number in refused:
            continue
        out_of_order += number < highest
        highest = max(highest, number)
    return {
        "in_queue": copies.total(),
        "lost": len(set(range(1, rows + 1)) - copies.keys()),
        "out_of_order": out_of_order,
        "copies": copies.total() - len(copies),
        "unmarked": sum(count > 1 for count in unmarked.values()),
    }


def run(
    folder: Path,
    *,
    kills: int = 200,
    rows: int = 100_000,
    url: str = EMBEDDED,
    seed: int = 1,
    longest: float = _LONGEST,
    format: str = "lines",
    refusals: bool = False,
) -> Verdict:
    """Kill runs, one after the other.

    Args:
        folder: folder of the file and the outbox.
        kills: number of kills; there are fewer if the whole file is sent earlier.
        url: URL of the broker; `EMBEDDED` for this repository's broker.
        seed: seed of the random times.
        longest: maximum seconds from the start of a run to its kill; it grows if no rows are sent in this time.
        refusals: whether the broker refuses rows during every second run.
    """
    began = time.monotonic()
    chance = random.Random(seed)
    killed = refused = resumed = 0
    # Rows that were in the outbox after a run with refusals.
    may_be_late: set[int] = set()
    with ExitStack() as stack:
        url = stack.enter_context(broker_url(url))
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        file, outbox = place / f"rows.{format}", place / "outbox"
        _write(file, rows, format)
        connection = stack.enter_context(pika.BlockingConnection(pika.URLParameters(url)))
        channel = connection.channel()
        channel.queue_declare(_QUEUE, durable=True)
        channel.queue_purge(_QUEUE)
        stack.callback(channel.queue_delete, _QUEUE)
        channel.exchange_declare(_EXCHANGE, "fanout")
        stack.callback(channel.exchange_delete, _EXCHANGE)
        channel.queue_bind(_QUEUE, _EXCHANGE)
        command = ["send", str(file), "-e", _EXCHANGE, "--outbox", str(outbox), "-f", format, "-q"]
        runs = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", _RUNS, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # The runs report refused rows on standard error.
                stderr=subprocess.DEVNULL if refusals else None,
                text=True,
                env=os.environ | {"QFLOW_URL": url},
            )
        )
        stack.callback(runs.kill)
        while killed < kills:
            sent = _sent(outbox, file)
            resumed += sent > 0
            if killed and not sent:
                # On a slow machine, it takes longer until a run has sent rows.
                longest *= 1.5
            # The rate is so slow that the file lasts for all kills.
            rate = max(1.0, 2 * (rows - sent) / ((kills - killed) * longest))
            moment = chance.uniform(0, longest)
            if refusals and killed % 2:

                def refuse(moment: float = moment) -> None:
                    time.sleep(moment)
                    channel.queue_unbind(_QUEUE, _EXCHANGE)
                    time.sleep(chance.uniform(0, _LONGEST_REFUSED))

                code = _one_run(runs, f"--rate {rate}", refuse)
                channel.queue_bind(_QUEUE, _EXCHANGE)
                left_now = _left(outbox)
                refused += bool(left_now)
                may_be_late.update(left_now)
            else:
                code = _one_run(runs, f"--rate {rate}", partial(time.sleep, moment))
            # Keep the connection alive.
            connection.process_data_events(0)
            killed += code == -signal.SIGKILL
            if code == 0:
                break
            if code not in (-signal.SIGKILL, int(refusals)):
                raise RuntimeError(f"qflow send ended with exit code {code}")
        code = _one_run(runs)
        if code:
            raise RuntimeError(f"the last run of qflow send ended with exit code {code}")
        left = _left(outbox)
        found = ((_number(body), marked) for body, marked in read_queue(channel, _QUEUE))
        counts = audit(rows, found, may_be_late)
    return Verdict(rows, killed, refused, resumed, left=len(left), seconds=time.monotonic() - began, **counts)


def _write(file: Path, rows: int, format: str) -> None:
    with file.open("w", encoding="utf-8") as out:
        if format == "csv":
            print("number,name", file=out)
        for number in range(1, rows + 1):
            match format:
                case "csv":
                    # Some rows contain a line end.
                    print(f'{number},"a\n{number}"' if number % 7 == 0 else f"{number},a", file=out)
                case "jsonl":
                    print(json.dumps({"number": number}), file=out)
                case _:
                    print(number, file=out)


def _number(body: bytes) -> int:
    found = json.loads(body)
    return int(found["number"] if isinstance(found, dict) else found)


def _is_made(outbox: Path) -> bool:
    # If a run was killed before it created its tables, it has stored nothing.
    return outbox.exists() and outbox.stat().st_size > 0


def _left(outbox: Path) -> list[int]:
    return [_number(stored.message.body) for stored in Outbox.look(outbox)] if _is_made(outbox) else []


def _sent(outbox: Path, file: Path) -> int:
    """Return the number of the last row that is stored as sent."""
    if not _is_made(outbox):
        return 0
    with Outbox(outbox) as stored:
        position = stored.position(f"{file.resolve()} to '{_EXCHANGE}'/''")
    found = re.search(r"record=(\d+)", str(position))
    return int(found[1]) if found else 0


def _one_run(runs: subprocess.Popen[str], options: str = "", wait: Callable[[], None] | None = None) -> int:
    """Start a run, and kill it after a wait or let it finish. Return its exit code."""
    assert runs.stdin is not None
    assert runs.stdout is not None
    print(options, file=runs.stdin, flush=True)
    runs.stdout.readline()
    if wait is not None:
        # Wait for a random time, and not for an event.
        wait()
    print("wait" if wait is None else "kill", file=runs.stdin, flush=True)
    return int(runs.stdout.readline())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.send_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="%(default)s unless given")
    parser.add_argument("--rows", type=int, default=100_000, help="in the file (%(default)s)")
    parser.add_argument("--format", choices=FORMATS, default="lines", help="of the file (%(default)s)")
    parser.add_argument("--url", default=EMBEDDED, help=f"amqp:// URL of the broker, or {EMBEDDED}: ours (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="whose file system has file and outbox")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (%(default)s)")
    parser.add_argument("--longest", type=float, default=_LONGEST, help="seconds until a kill (%(default)s)")
    parser.add_argument("--refusals", action="store_true", help="the broker refuses rows during every other run")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    verdict = run(
        arguments.folder,
        kills=arguments.kills,
        rows=arguments.rows,
        url=arguments.url,
        seed=arguments.seed,
        longest=arguments.longest,
        format=arguments.format,
        refusals=arguments.refusals,
    )
    print_verdict(verdict, as_json=arguments.json)
    if verdict.is_good:
        print_proof(verdict.kills, "kills of qflow send with an outbox")
    return 0 if verdict.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
