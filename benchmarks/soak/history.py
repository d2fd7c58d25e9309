"""The history of a soak test in a file: the calls of each sender, the outcome of each message, and the faults.

    python -m benchmarks.soak --broker cluster --minutes 10 --history history.jsonl
    python -m benchmarks.soak.history history.jsonl     # checks only the file

Each line is a JSON object, whose key `what` contains the kind of the line. Times are seconds of the machine's monotonic
clock, which all processes share. The lines are in the order of `end`. The lines of the queue come last, in its order.

| `what` | further keys |
|---|---|
| `send` | `sender`, `first`: the number of the first message; `count`: how many messages; `timeout`; `begin`, `end`; `admitted`: how many of them, from the first one on; `error`: the type of the error, or null |
| `flush`, `wait_unflowed`, `result`, `close` | `sender`, `timeout`, `begin`, `end`, `error` |
| `settled` | `sender`, `number`, `outcome`, `end` |
| `nacked` | `sender`, `number`, `end`: a later message of the sender was in flight on the same channel |
| `fault` | `name`, `begin`, `end`, `error`: null, or the connection was gone already |
| `in queue` | `sender`, `number`, `marked`, `intact` |

A `close` has the number of the first sender of its process. A fault such as a stall continues after its `end`.
"""  # noqa: E501  # a table

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak.audit import ACCEPTED, REFUSED, Journal, Soak, audit_messages, describe
from benchmarks.soak.messages import Copy
from qflow_client import Outcome

__all__ = ["Call", "History", "main", "merge", "read"]

_monotonic = time.monotonic


@dataclass(slots=True)
class Call:
    """One call. Its time begins when the object is created.

    Args:
        about: further keys of the line. More keys can be added until the call ends.
    """

    what: str
    about: dict[str, Any]
    begin: float = field(default_factory=_monotonic)


class History:
    """Writes lines to a file, from any thread. Without a path it writes nothing."""

    def __init__(self, path: str | None) -> None:
        self._file = None if path is None else Path(path).open("w", encoding="utf-8")  # noqa: SIM115  # `close` does
        self._lock = threading.Lock()

    def write(self, what: str, **about: Any) -> None:
        if self._file is not None:
            with self._lock:
                self._file.write(json.dumps({"what": what, **about}) + "\n")

    @contextlib.contextmanager
    def calling(self, what: str, **about: Any) -> Iterator[Call]:
        """Write a line when a call has ended. An error of the call is raised again."""
        call, name = Call(what, about), None
        try:
            yield call
        except BaseException as error:
            name = type(error).__name__
            raise
        finally:
            self.write(what, **call.about, begin=call.begin, end=_monotonic(), error=name)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def merge(parts: Sequence[str], queue: Iterable[Copy], path: str) -> None:
    """Merge the histories of several processes, and delete their files.

    Args:
        queue: messages in the queue at the end.
    """
    lines = []
    for part in parts:
        lines += [json.loads(line) for line in Path(part).read_text(encoding="utf-8").splitlines()]
        Path(part).unlink()
    lines.sort(key=lambda line: float(line["end"]))
    lines += [{"what": "in queue", **copy._asdict()} for copy in queue]
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def read(lines: Iterable[str]) -> Soak:
    """Return the run that a history describes.

    Raises:
        ValueError: a line has an unknown kind, or contradicts another line.
    """
    journals: dict[int, Journal] = {}
    queue: list[Copy] = []
    settled: list[tuple[int, int, Outcome]] = []
    overtaken: list[tuple[int, int]] = []
    for number, line in enumerate(lines, 1):
        entry = json.loads(line)
        what = entry.pop("what")
        if what == "send":
            _add_send(journals.setdefault(entry["sender"], Journal(entry["sender"])), **entry)
        elif what == "settled":
            # The outcome may come before the end of the call that sent the message.
            settled.append((entry["sender"], entry["number"], Outcome(entry["outcome"])))
        elif what == "nacked":
            overtaken.append((entry["sender"], entry["number"]))
        elif what == "in queue":
            queue.append(Copy(**entry))
        elif what not in ("flush", "wait_unflowed", "result", "close", "fault"):
            raise ValueError(f"line {number}: unknown kind of line {what!r}")
    for sender, message, outcome in settled:
        if sender not in journals or message >= len(journals[sender].calls):
            raise ValueError(f"message {message} of sender {sender} is settled but was never sent")
        journals[sender].told(message, outcome)
    for sender, message in overtaken:
        journals[sender].overtaken.add(message)
    return Soak(sorted(journals.values(), key=lambda journal: journal.sender), queue)


def _add_send(journal: Journal, *, first: int, count: int, admitted: int, **_: Any) -> None:
    if first != journal.begin(count):
        raise ValueError(f"sender {journal.sender}: message {first} is not the next message")
    for at in range(count):
        journal.called(first + at, ACCEPTED if at < admitted else REFUSED)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak.history", description="Judge a history.")
    parser.add_argument("path")
    options = parser.parse_args(arguments)
    with Path(options.path).open(encoding="utf-8") as file:
        lines = audit_messages(read(file))
    for line in lines:
        print(describe(line))
    return 0 if all(line.passed for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
