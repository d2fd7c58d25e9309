"""Feeds bytes that atheris chooses by coverage to the client or to the broker, and checks what must always hold.

    python -m benchmarks.fuzz client --bytes 1e9
    python -m benchmarks.fuzz broker --bytes 1e9

The checks are those of `tests/unit/fuzz`. The fuzzing starts from its recorded sessions. An input that fails is written
to `build/fuzz/`; ``--input FILE`` repeats it. The exit code is then not 0.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import atheris

from benchmarks.proof import print_proof

__all__ = ["main"]

_ROOT = Path(__file__).parents[1]
_LONGEST = 4096
# Seconds, MiB and bytes of one input.
_LIMITS = ["-timeout=20", "-rss_limit_mb=2048", f"-max_len={_LONGEST}", "-len_control=0"]
# The last byte of an input chooses the cuts; in addition, this bit chooses whether a login comes before the input.
_LOGS_IN = 1


def _pieces(data: bytes) -> list[bytes]:
    """Cut an input into one to seven pieces."""
    chance = random.Random(data[-1])
    places = sorted(chance.randrange(len(data)) for _ in range(chance.randint(0, 6)))
    return [data[start:stop] for start, stop in zip([0, *places], [*places, len(data) - 1], strict=True)]


def _frames(data: bytes) -> list[bytes]:
    """Split bytes into frames. Bytes that are no frame come first (a protocol header) or last."""
    at = 8 if data.startswith(b"AMQP") else 0
    frames = [data[:at]]
    while at < len(data):
        end = at + 8 + int.from_bytes(data[at + 3 : at + 7])
        frames.append(data[at:end])
        at = end
    return frames


def _mutate(data: bytes, most: int, seed: int) -> bytes:
    """Change one frame and correct its size, or change any bytes. Otherwise few inputs would reach what reads methods.

    Args:
        most: maximum size of the result in bytes.
    """
    chance = random.Random(seed)
    frames = _frames(data[:-1])
    at = chance.randrange(len(frames))
    frame = frames[at]
    if len(frame) < 8 or chance.random() < 0.3:
        changed: bytes = atheris.Mutate(data, most)
        return changed
    payload = frame[7:-1]
    match chance.randrange(6):
        case 0:
            del frames[at]
        case 1:
            frames.insert(chance.randrange(len(frames) + 1), frame)
        case 2:
            payload = payload[: chance.randrange(len(payload) + 1)]
            frames[at] = frame[:3] + len(payload).to_bytes(4) + payload + frame[-1:]
        case _:
            payload = atheris.Mutate(payload, len(payload) + 64)
            frames[at] = frame[:3] + len(payload).to_bytes(4) + payload + frame[-1:]
    return (b"".join(frames) + data[-1:])[-most:]


def _login(session: bytes) -> bytes:
    """Return the beginning of a recorded session: the protocol header, and the frames up to Channel.Open."""
    end = 8
    for _ in range(4):
        end += 8 + int.from_bytes(session[end + 3 : end + 7])
    return session[:end]


def _client() -> tuple[Callable[[bytes], int], list[bytes]]:
    from tests.unit.fuzz.client import CORPUS, run

    return lambda data: run(_pieces(data)).fed, [path.read_bytes() + b"\0" for path in CORPUS]


def _broker() -> tuple[Callable[[bytes], int], list[bytes]]:
    from tests.unit.fuzz.server import CORPUS, run

    sessions = [path.read_bytes() for path in CORPUS]
    login = _login(sessions[0])

    def feed(data: bytes) -> int:
        if data[-1] & _LOGS_IN:
            return run([login, *_pieces(data)]).fed - len(login)
        return run(_pieces(data)).fed

    tails = [session[len(_login(session)) :] + bytes([_LOGS_IN]) for session in sessions]
    return feed, [*(session + b"\0" for session in sessions), *tails]


_TARGETS = {"client": _client, "broker": _broker}


class _Count:
    """Counts inputs and the bytes that were fed, and ends the process when there are enough, or when the time is over.

    Args:
        until: monotonic time in seconds.
    """

    def __init__(
        self, feed: Callable[[bytes], int], enough: float, until: float, end: Callable[[_Count], None]
    ) -> None:
        self._feed = feed
        self._enough = enough
        self._until = until
        self._end = end
        self.inputs = self.bytes = 0

    def __call__(self, data: bytes) -> None:
        if not data:
            return
        self.bytes += self._feed(data)
        self.inputs += 1
        if self.bytes >= self._enough or time.monotonic() >= self._until:
            self._end(self)


def _end(target: str, seed: int, folder: Path, began: float, as_json: bool, count: _Count) -> None:
    """Print the counts, and end the process. `atheris.Fuzz` does not return."""
    found = {
        "target": target,
        "seed": seed,
        "inputs": count.inputs,
        "bytes": count.bytes,
        "corpus": len(list(folder.iterdir())),
        "seconds": round(time.monotonic() - began),
    }
    shutil.rmtree(folder)
    if as_json:
        print(json.dumps(found))
    else:
        print(", ".join(f"{name}: {value}" for name, value in found.items()))
    print_proof(count.bytes, f"fuzzed bytes to the {target}")
    sys.stdout.flush()
    os._exit(0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", choices=sorted(_TARGETS))
    parser.add_argument("--bytes", type=float, default=1e6, help="fuzzed bytes after which it ends (1e6)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after this time at the latest")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--input", type=Path, metavar="FILE", help="only feed this file, without fuzzing")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    logging.disable()
    with atheris.instrument_imports(include=["qflow_client"]):
        feed, seeds = _TARGETS[options.target]()
    if options.input is not None:
        if data := options.input.read_bytes():
            feed(data)
        return
    failures = _ROOT / "build" / "fuzz"
    failures.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="qflow-fuzz-"))
    for number, data in enumerate(seeds):
        (folder / f"seed-{number}").write_bytes(data)
        long = data[:-1] * (_LONGEST // len(data)) + data[-1:]
        (folder / f"long-{number}").write_bytes(long)
    began = time.monotonic()
    end = partial(_end, options.target, options.seed, folder, began, options.json)
    atheris.Setup(
        [sys.argv[0], *_LIMITS, f"-seed={options.seed}", f"-artifact_prefix={failures}/{options.target}-", str(folder)],
        _Count(feed, options.bytes, began + 60.0 * options.minutes, end),
        custom_mutator=_mutate,
        internal_libfuzzer=True,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
