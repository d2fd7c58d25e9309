"""Damages a broker's message store at many places, one at a time, and starts a broker on each copy (E10).

    python -m benchmarks.damage --flips 1000 --cuts 100 --seed 1

A start must end in one of three ways:

- Every message is there with the published body.
- Messages are missing, and the broker reports at least as many damaged rows.
- The broker does not start, and its error says what to do.

A changed body, a message that is missing without a report, and any other error are failures.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pamqp import commands

from qflow_client.broker import Broker, StoreError

__all__ = ["Verdict", "damage", "main"]

_MESSAGES = 300
_LOGGER = "qflow_client"


@dataclass
class Verdict:
    """The results of the starts.

    Attributes:
        places: number of damaged copies.
        whole: number of starts that found every message.
        reported: number of starts that reported the missing messages.
        refused: number of starts that were refused with an instruction.
        failures: a description of every other result, with the place of the damage.
    """

    places: int = 0
    whole: int = 0
    reported: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)


class _Reports(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        numbers = record.args[-1] if isinstance(record.args, tuple) and record.args else None
        self.count += len(numbers) if isinstance(numbers, list) else 0


@contextmanager
def _reports() -> Iterator[_Reports]:
    logger, handler = logging.getLogger(_LOGGER), _Reports()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def _fill(path: Path, chance: random.Random) -> dict[str, bytes]:
    """Fill a new store with messages. Return their bodies, with the message ids as keys."""
    bodies = {}
    with Broker(store=path) as broker:
        broker.declare_exchange("shop", "topic", durable=True)
        for name, arguments in (("orders", {}), ("paged", {"x-qflow-policy": "flow_to_disk", "qpid.max_count": 5})):
            broker.declare_queue(name, durable=True, arguments=arguments)
            broker.bind("shop", name, f"{name}.#")
        for number in range(_MESSAGES):
            size = chance.choice((0, 10, 100, 5000, 20_000))
            bodies[str(number)] = chance.randbytes(size)
            properties = commands.Basic.Properties(delivery_mode=2, message_id=str(number), headers={"n": number})
            key = f"{'paged' if number % 3 else 'orders'}.{number}"
            broker.publish(bodies[str(number)], key, exchange="shop", properties=properties)
    return bodies


def _outcome(path: Path, bodies: dict[str, bytes]) -> str:
    """Return the result of a start on a damaged store: ``whole``, ``reported``, ``refused``, or what is wrong."""
    try:
        with _reports() as reports, Broker(store=path) as broker:
            found = [each for queue in broker.queues() for each in broker.messages(queue.name)]
            reported = broker.memory.damaged + reports.count
    except StoreError as error:
        return "refused" if "restore" in str(error) else f"no way out: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    wrong = [each for each in found if bodies.get(each.properties.message_id or "") != each.body]
    if wrong:
        return f"{len(wrong)} bodies are wrong, such as that of {wrong[0].properties.message_id}"
    missing = len(bodies) - len({each.properties.message_id for each in found})
    if missing > reported:
        return f"{missing} messages are missing, and {reported} rows are reported"
    return "reported" if missing or reported else "whole"


def damage(folder: Path, *, flips: int, cuts: int, seed: int) -> Verdict:
    """Flip one bit of a store or truncate the store, each time on a new copy. Start a broker on each copy.

    Args:
        folder: folder for the copies, which must be empty.
    """
    chance = random.Random(seed)
    path = folder / "store"
    bodies = _fill(path, chance)
    content = path.read_bytes()
    verdict = Verdict()
    for _ in range(flips):
        at, bit = chance.randrange(len(content)), chance.randrange(8)
        flipped = content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
        _count(verdict, f"bit {bit} of byte {at} flipped", path, flipped, bodies)
    for _ in range(cuts):
        size = chance.randrange(1, len(content))
        _count(verdict, f"cut to {size} of {len(content)} bytes", path, content[:size], bodies)
    return verdict


def _count(verdict: Verdict, place: str, path: Path, content: bytes, bodies: dict[str, bytes]) -> None:
    for other in path.parent.iterdir():
        other.unlink()
    path.write_bytes(content)
    outcome = _outcome(path, bodies)
    verdict.places += 1
    if outcome in ("whole", "reported", "refused"):
        setattr(verdict, outcome, getattr(verdict, outcome) + 1)
    else:
        verdict.failures.append(f"{place}: {outcome}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.damage", description=__doc__.partition("\n")[0])
    parser.add_argument("--flips", type=int, default=1000, help="single bits to flip; 1000")
    parser.add_argument("--cuts", type=int, default=100, help="truncations; 100")
    parser.add_argument("--seed", type=int, default=None, help="of the places; one of the clock unless given")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else time.time_ns() % 1_000_000
    with tempfile.TemporaryDirectory(prefix="qflow-damage-") as folder:
        verdict = damage(Path(folder), flips=options.flips, cuts=options.cuts, seed=seed)
    print(json.dumps({"seed": seed} | asdict(verdict), indent=1))
    print(
        f"{verdict.places} damaged stores: {verdict.whole} whole, {verdict.reported} reported, {verdict.refused} "
        f"refused with a way out, {len(verdict.failures)} failures"
    )
    return 1 if verdict.failures or not verdict.places else 0


if __name__ == "__main__":
    sys.exit(main())
