"""Measures the confirmed messages per second of each publisher, all in one run.

Only ratios within one run are meaningful, because each value also depends on the machine and the broker.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from benchmarks import peers as known
from benchmarks.embedded import DEFAULT_URL, EMBEDDED, broker_url
from benchmarks.report import Bar, broker_name, document, missed, print_table, show_progress, summarize
from benchmarks.runner import Lost, Plan, measure
from benchmarks.wire import Wire

__all__ = ["BARS", "FLOOR", "VARYING_BARS", "main"]

#: Requirements of ``--check floor``, with confirms, relative to other peers of the same run. No change of the code may
#: miss them.
FLOOR = (
    Bar("qflow", 100, "to_plain", 0.65),
    Bar("qflow", 100, "to_pika_select", 1.5),
    Bar("qflow", 1024, "to_plain", 0.65),
    Bar("qflow", 1024, "to_pika_select", 1.5),
)
#: Requirements of ``--check`` for the peers that run.
BARS = (
    Bar("qflow", 100, "to_plain", 0.85),
    Bar("qflow", 100, "to_pika_select", 2.0),
    Bar("qflow", 1024, "to_plain", 0.65),
    Bar("qflow", 1024, "to_pika_select", 1.5),
    Bar("qflow_8", 100, "to_plain", 0.72),
    Bar("qflow_64", 100, "to_plain", 0.60),
    Bar("qflow_64", 100, "fairness", 0.5),
    Bar("qflow_async", 100, "to_plain", 0.90),
    Bar("qflow_tasks", 100, "to_plain", 0.85),
    Bar("qflow_tasks", 100, "to_aiopika", 12.0),
)
#: Requirements of ``--check`` with ``--varying``, where the plain socket sends the same bytes.
VARYING_BARS = (
    Bar("qflow", 100, "to_plain", 0.60),
    Bar("qflow_async", 100, "to_plain", 0.60),
)


# RabbitMQ gets slower as a queue without consumers fills, and then limits all peers. In runs of 2,000 messages a plain
# socket had 76,000 confirms per second, in runs of 50,000 it had 46,000. Up to about 5,000 messages, the rates depend
# more on the clients. The rates of such short runs vary, so there are many runs.
_MESSAGES_HELP = "per run, of which a queue of its own is filled; slow peers get fewer (%(default)s)"

# Interval of timed messages. This is a prime, so that timed messages are not always the first of a batch.
_SAMPLE = 97


def _whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(","))
    if min(sizes) < 0:
        raise argparse.ArgumentTypeError(f"a size must be at least 0 bytes, not {min(sizes)}")
    return tuple(dict.fromkeys(sizes))


def _names(text: str) -> tuple[str, ...]:
    names = tuple(known.PEERS) if text == "all" else tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known.PEERS:
            raise argparse.ArgumentTypeError(f"unknown peer {name!r}; the peers are {', '.join(known.PEERS)}, or all")
    return names


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.publish", description=__doc__)
    made.add_argument("--url", default=DEFAULT_URL, help=f"amqp:// URL of the broker, or {EMBEDDED}: ours")
    made.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    made.add_argument("--messages", type=_whole, default=5_000, help=_MESSAGES_HELP)
    made.add_argument("--sizes", type=_sizes, default=(100, 1024), help="of bodies, in bytes (100,1024)")
    made.add_argument("--window", type=_whole, default=1000, help="the most unconfirmed messages (%(default)s)")
    made.add_argument(
        "--peers",
        type=_names,
        default=known.DEFAULT,
        help=f"separated by commas, or all; there are {', '.join(known.PEERS)} ({','.join(known.DEFAULT)})",
    )
    made.add_argument("--repeat", type=_whole, default=31, help="rounds, of which the median counts (%(default)s)")
    made.add_argument("--unconfirmed", action="store_true", help="without publisher confirms")
    made.add_argument(
        "--varying", action="store_true", help="give every message headers and a timestamp of its own (fewer peers)"
    )
    made.add_argument("--latency", action="store_true", help="time the confirms too, which costs some of the rate")
    made.add_argument(
        "--check",
        nargs="?",
        const="all",
        choices=("all", "floor"),
        help=f"fail unless {'; '.join(map(str, BARS))}; with --varying {'; '.join(map(str, VARYING_BARS))}; "
        f"floor: unless {'; '.join(map(str, FLOOR))}",
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Returns:
        The exit code: 1 if messages were lost, or if with ``--check`` a requirement is missed.
    """
    options = parser().parse_args(arguments)
    if options.varying and options.check == "floor":
        parser().error("--check floor is of messages that do not vary; with --varying give --check alone")
    with broker_url(options.url) as url:
        return _publish(options, url)


def _publish(options: argparse.Namespace, url: str) -> int:
    plan = Plan(
        url,
        options.messages,
        options.sizes,
        options.window,
        options.repeat,
        confirmed=not options.unconfirmed,
        varying=options.varying,
        sample=_SAMPLE if options.latency else 0,
    )
    found = {name: peer for name in options.peers if (peer := known.load(name)) is not None}
    if plan.varying:
        # Remove these peers from the names, so that they are not reported as not installed.
        options.peers = tuple(name for name in options.peers if name not in found or found[name].varies)
        found = {name: peer for name, peer in found.items() if peer.varies}
    with Wire(plan.url) as wire:
        server_properties = wire.server_properties
    try:
        measurements = measure(plan, found, show_progress)
    except Lost as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        show_progress("")
    rows = summarize(options.peers, found, measurements)
    bars = FLOOR if options.check == "floor" else VARYING_BARS if plan.varying else BARS
    asked = [bar for bar in bars if bar.peer in options.peers and bar.size in options.sizes]
    failed = missed(asked, rows) if options.check else []
    if options.json:
        made = document(plan, found, rows, measurements, server_properties)
        print(json.dumps(made | ({"missed": failed} if options.check else {}), indent=2))
    else:
        broker = " ".join(broker_name(server_properties).values()) or "a broker that does not say its name"
        how = "confirmed" if plan.confirmed else "unconfirmed"
        print_table(f"{how}, window {plan.window}, median of {plan.repeat}; {broker}", rows)
    for words in failed:
        print(f"missed: {words}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
