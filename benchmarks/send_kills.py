"""`qflow send --outbox` that is killed with -9 at random moments and started again: what is lost, or not marked (E13).

Every run is the same command over the same file. It goes on by itself where the one before was killed. In the end one
run is left to finish, and the queue is read back.
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
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import pika

from benchmarks.embedded import EMBEDDED, broker_url
from benchmarks.kills import read_queue
from qflow_client import Outbox

__all__ = ["FORMATS", "Verdict", "audit", "run"]

_QUEUE = "qflow.send-kills"
# Seconds after its start before which a run is killed.
_LONGEST = 0.6
#: How the rows stand in the file.
FORMATS = ("lines", "csv", "jsonl")

# Forks once for each run, so that none has to import everything and make all commands.
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
    """What became of the rows.

    Attributes:
        rows: in the file.
        kills: runs that were killed.
        resumed: runs that found some of the rows sent.
        in_queue: messages in the queue.
        lost: rows that are not there.
        out_of_order: rows whose first copies came after that of a later row.
        copies: messages of rows that came before.
        unmarked: how many of these do not say so.
        left: messages in the outbox at the end.
        seconds: what it took.
    """

    rows: int
    kills: int
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
        """Whether each row is there, in order, and copies are marked."""
        return not (self.lost or self.out_of_order or self.unmarked or self.left)


def audit(rows: int, queue: Iterable[tuple[int, bool]]) -> dict[str, int]:
    """Compare the file with the queue.

    Args:
        rows: how many there are, numbered from 1.
        queue: the numbers in their order, and whether each is marked.

    Returns:
        The counts of a `Verdict`.
    """
    seen: set[int] = set()
    highest = total = out_of_order = copies = unmarked = 0
    for number, is_marked in queue:
        total += 1
        if number in seen:
            copies += 1
            unmarked += not is_marked
            continue
        seen.add(number)
        out_of_order += number < highest
        highest = max(highest, number)
    return {
        "in_queue": total,
        "lost": len(set(range(1, rows + 1)) - seen),
        "out_of_order": out_of_order,
        "copies": copies,
        "unmarked": unmarked,
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
) -> Verdict:
    """Kill runs, one after the other.

    Args:
        folder: where file and outbox are.
        kills: how many; fewer if the file is all sent before.
        rows: in the file.
        url: of the broker; `EMBEDDED` for ours.
        seed: of the moments.
        longest: seconds after its start before which each is killed; more if nothing has been sent by then.
        format: how the rows stand in the file.
    """
    began = time.monotonic()
    chance = random.Random(seed)
    killed = resumed = 0
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
        command = ["send", str(file), "-k", _QUEUE, "--outbox", str(outbox), "-f", format, "-q"]
        runs = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", _RUNS, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"QFLOW_URL": url},
            )
        )
        stack.callback(runs.kill)
        while killed < kills:
            sent = _sent(outbox, file)
            resumed += sent > 0
            if killed and not sent:
                # A slow machine takes longer until there is something to lose.
                longest *= 1.5
            # So slow that the file lasts for all the kills.
            rate = max(1.0, 2 * (rows - sent) / ((kills - killed) * longest))
            code = _one_run(runs, f"--rate {rate}", chance.uniform(0, longest))
            # Keeps the connection alive.
            connection.process_data_events(0)
            if code != -signal.SIGKILL:
                break
            killed += 1
        code = _one_run(runs)
        if code:
            raise RuntimeError(f"the last run ended with {code}")
        left = len(Outbox.look(outbox))
        counts = audit(rows, ((_number(body), marked) for body, marked in read_queue(channel, _QUEUE)))
    return Verdict(rows, killed, resumed, left=left, seconds=time.monotonic() - began, **counts)


def _write(file: Path, rows: int, format: str) -> None:
    with file.open("w", encoding="utf-8") as out:
        if format == "csv":
            print("number,name", file=out)
        for number in range(1, rows + 1):
            match format:
                case "csv":
                    # Some have a line end in them.
                    print(f'{number},"a\n{number}"' if number % 7 == 0 else f"{number},a", file=out)
                case "jsonl":
                    print(json.dumps({"number": number}), file=out)
                case _:
                    print(number, file=out)


def _number(body: bytes) -> int:
    found = json.loads(body)
    return int(found["number"] if isinstance(found, dict) else found)


def _sent(outbox: Path, file: Path) -> int:
    """Return the number of the last row that is stored as sent."""
    # Killed before its tables were made, it has stored nothing.
    if not outbox.exists() or not outbox.stat().st_size:
        return 0
    with Outbox(outbox) as stored:
        position = stored.position(f"{file.resolve()} to ''/'{_QUEUE}'")
    found = re.search(r"record=(\d+)", str(position))
    return int(found[1]) if found else 0


def _one_run(runs: subprocess.Popen[str], options: str = "", seconds: float | None = None) -> int:
    """Kill a run with more options after so many seconds, or let it finish; return how it ended."""
    assert runs.stdin is not None
    assert runs.stdout is not None
    print(options, file=runs.stdin, flush=True)
    runs.stdout.readline()
    if seconds is not None:
        # The moment is drawn by lot; nothing waits for it.
        time.sleep(seconds)
    print("wait" if seconds is None else "kill", file=runs.stdin, flush=True)
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
    )
    if arguments.json:
        print(json.dumps(asdict(verdict)))
    else:
        print("\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in asdict(verdict).items()))
    return 0 if verdict.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
