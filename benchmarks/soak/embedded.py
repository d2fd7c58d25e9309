"""This repository's broker in its own process, with a message store, so that it can be killed.

The program prints the broker's URL, and reads lines. Each line is a JSON list of a method and its arguments. The
program answers when the call is done. At the end of its input, it stops the broker cleanly.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

from qflow_client.broker import Broker
from qflow_client.cli.broker import seldom_collected

__all__ = ["COMMANDS", "main"]


def _flow_one(broker: Broker, active: bool, connection: str) -> None:
    for channel in broker.channels():
        if channel.connection == connection:
            # The connection may be closed at any time.
            with contextlib.suppress(LookupError):
                broker.flow(active, channel.name)


#: The allowed methods.
COMMANDS: dict[str, Callable[..., Any]] = {
    "raise_alarm": Broker.raise_alarm,
    "clear_alarm": Broker.clear_alarm,
    "withhold_confirms": Broker.withhold_confirms,
    "release_confirms": Broker.release_confirms,
    "close_connections": Broker.close_connections,
    "flow": lambda broker, active: broker.flow(active),
    "flow_one": _flow_one,
}


def main(store: str, port: str) -> None:
    # Written data survive the kill of a process; only a crash of the machine would lose the data.
    with seldom_collected(), Broker(store=store, store_synchronous="normal", port=int(port)) as broker:
        print(broker.url, flush=True)
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            COMMANDS[name](broker, *arguments)
            print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
