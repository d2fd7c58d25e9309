"""The broker of this repository in a process of its own, with a message store, so that it can be killed.

It says its URL, then answers each line of its standard input, a JSON list of a method and its arguments, when that is
done. At the end of its input it stops in order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from qflow_client.broker import Broker

__all__ = ["COMMANDS", "main"]


def _flow(broker: Broker, active: bool, connection: str = "") -> None:
    if not connection:
        broker.flow(active)
    for channel in broker.channels() if connection else ():
        if channel.connection == connection:
            broker.flow(active, channel.name)


#: What it can be told.
COMMANDS: dict[str, Callable[..., Any]] = {
    "declare_queue": lambda broker, name: broker.declare_queue(name, durable=True) and None,
    "raise_alarm": Broker.raise_alarm,
    "clear_alarm": Broker.clear_alarm,
    "withhold_confirms": Broker.withhold_confirms,
    "release_confirms": Broker.release_confirms,
    "close_connections": Broker.close_connections,
    "flow": _flow,
}


def main(store: str, port: str) -> None:
    """Run it."""
    # What a process that is killed has written is there: only the death of the machine would take more.
    with Broker(store=store, store_synchronous="normal", port=int(port)) as broker:
        print(broker.url, flush=True)
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            COMMANDS[name](broker, *arguments)
            print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
