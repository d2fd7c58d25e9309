"""The page about compatibility shows the results of the tests with other brokers and clients."""

from __future__ import annotations

from typing import Any

from qflow_client.testing.brokerj import VERSIONS
from tests.interop import matrix
from tests.interop.clients.test_clients import EXPECTED
from tests.interop.contract import test_contract
from tests.interop.contract.test_contract import BROKERJ
from tests.interop.flights.data import FLIGHTS
from tests.interop.flights.senders import SENDERS


def pairs() -> set[tuple[str, str, str]]:
    """Return broker, producer and capability of every test of the contract."""
    found = set()
    for name in dir(test_contract):
        marks = {mark.name: mark for mark in getattr(getattr(test_contract, name), "pytestmark", ())}
        if "capability" in marks:
            (title,) = marks["capability"].args
            found |= {(*each.values, title) for each in marks["parametrize"].args[1]}
    return found


def test_the_compatibility_page_matches_the_recorded_test_results() -> None:
    assert matrix.PAGE.read_text(encoding="utf-8") == matrix.render(matrix.load()), (
        "it was changed by hand, or not made again: python -m tests.interop.matrix"
    )


def test_the_recorded_compatibility_results_belong_to_exactly_the_existing_tests() -> None:
    kept = matrix.load()
    shown = {(result["broker"], result["producer"], result["capability"]) for result in kept["results"]}
    assert shown == pairs(), "run tox -e nightly -- interop"
    assert {f"Broker-J {version}" for version in VERSIONS} < {broker for broker, _, _ in shown}
    assert [client["client"] for client in kept["clients"]] == [each.name for each in EXPECTED]


def test_the_compatibility_page_has_a_complete_run_of_every_producer_for_each_broker_that_it_names() -> None:
    flights = matrix.load()["flights"]
    for broker in {each["broker"] for each in flights}:
        assert [each["producer"] for each in flights if each["broker"] == broker] == list(SENDERS)
    assert {each["broker"] for each in flights} >= {"qflow", "RabbitMQ", *BROKERJ}
    assert {each["count"] for each in flights} == {FLIGHTS}, "run tox -e nightly -- interop"


def test_the_compatibility_results_keep_only_the_last_message_run_of_each_broker_and_producer() -> None:
    def sent(broker: str, count: int) -> dict[str, Any]:
        found = {"sent again": 0, "twice": 0}
        return {"broker": broker, "producer": "P", "version": "1", "count": count, "seconds": 2.0, "found": found}

    first = matrix.with_flights(matrix.document((), ()), [sent("A", 10), sent("B", 20)])
    kept = matrix.with_flights(first, [sent("A", 3_000)])
    assert [(each["broker"], each["count"]) for each in kept["flights"]] == [("A", 3_000), ("B", 20)]
    page = matrix.render({**kept, "libraries": {"pika": "1", "aio-pika": "2"}})
    assert f"| A 1 | {kept['flights'][0]['date']} | 3,000 at 1,500/s |\n" in page


def test_the_compatibility_page_lists_failed_and_untested_combinations() -> None:
    def result(producer: str, outcome: str) -> dict[str, Any]:
        of = {"broker": "RabbitMQ", "version": "4.0", "producer": producer, "capability": "all of it"}
        return {**of, "outcome": outcome, "numbers": {"s": 0.5}}

    page = matrix.render(
        {
            "date": "2026-11-01",
            "python": "3.11.1",
            "libraries": {"pika": "1", "aio-pika": "2"},
            "results": [result("A", "passed"), result("B", "failed"), result("C", "skipped")],
            "clients": [],
            "flights": [],
        }
    )
    assert "### RabbitMQ 4.0\n\n| | A | B | C |\n" in page
    assert "| all of it | yes: 0.5 s | **no** | not tried |\n" in page
