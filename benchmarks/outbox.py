"""What the outbox costs: messages that are put, made durable and settled, each second.

``python -m benchmarks.outbox`` runs it in the current folder's file system; see ``--help``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from qflow_client import Outbox

__all__ = ["run"]

# Messages between two settlings, as acks come.
_SETTLED_TOGETHER = 100


def run(
    folder: Path,
    *,
    messages: int = 50_000,
    size: int = 100,
    batch: int = 1,
    threads: int = 1,
    synchronous: str = "normal",
) -> float:
    """Put messages, wait until each is durable, and settle them.

    Args:
        folder: where the outbox is.
        messages: how many.
        size: bytes of a body.
        batch: how many are put before anybody waits.
        threads: that put and wait.
        synchronous: of the outbox.

    Returns:
        Messages a second.
    """
    body = bytes(size)
    with (
        tempfile.TemporaryDirectory(dir=folder) as place,
        Outbox(Path(place) / "outbox", synchronous=synchronous) as box,
    ):

        def send(share: int) -> None:
            unsettled: list[int] = []
            for number in range(share):
                unsettled.append(box.put(body, "", "orders", f"0123456789abcdef-{number:012x}"))
                if (number + 1) % batch == 0:
                    box.wait_durable(unsettled[-1])
                if len(unsettled) >= _SETTLED_TOGETHER:
                    for sequence in unsettled:
                        box.settle(sequence)
                    unsettled.clear()
            for sequence in unsettled:
                box.settle(sequence)

        workers = [threading.Thread(target=send, args=(messages // threads,)) for _ in range(threads)]
        began = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        box.commit()
        took = time.perf_counter() - began
        assert len(box) == 0
    return messages // threads * threads / took


def _runs(messages: int) -> Iterator[dict[str, int | str]]:
    for synchronous, share in (("normal", 1), ("full", 25)):
        for batch, threads in ((1, 1), (500, 1), (1, 8)):
            yield {
                "synchronous": synchronous,
                "batch": batch,
                "threads": threads,
                "messages": messages if batch > 1 else messages // share,
            }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outbox", description=__doc__)
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--size", type=int, default=100, help="bytes of a body")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="whose file system is measured")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = []
    for options in _runs(arguments.messages):
        rate = run(arguments.folder, size=arguments.size, **options)  # type: ignore[arg-type]  # of one table
        results.append(options | {"size": arguments.size, "messages_per_second": round(rate)})
        if not arguments.json:
            print("  ".join(f"{name}={value}" for name, value in results[-1].items()))
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
