"""The check of the flights that were received through a broker."""

from __future__ import annotations

import pytest
from pika import BasicProperties

from qflow_client.message import REPUBLISHED
from tests.interop.flights.consumer import judge

ROWS = [b"%07d," % number + b"," * 12 + origin for number, origin in enumerate((b"EWR", b"JFK", b"EWR", b"EWR"))]


def came(*copies: str) -> dict[str, int]:
    """Judge messages; each is the number of a flight, and ``+`` if it has the mark of a second copy."""
    marks = {True: BasicProperties(headers={REPUBLISHED: True}), False: BasicProperties()}
    return judge(((marks["+" in each], ROWS[int(each.rstrip("+"))]) for each in copies), ROWS)


@pytest.mark.parametrize(
    ("copies", "twice"),
    [
        pytest.param("0 1 2 3", 0, id="once"),
        pytest.param("0 2 0+ 2+ 3 1", 2, id="the marked copy last"),
        pytest.param("0 0+ 2+ 3 2 1", 2, id="the rest of a cut connection last"),
        pytest.param("0+ 0 0+ 2+ 3+ 1+", 2, id="three copies"),
    ],
)
def test_several_copies_of_a_flight_are_allowed_if_at_most_one_is_not_marked_as_a_second_copy(
    copies: str, twice: int
) -> None:
    found = came(*copies.split())
    assert (found["flights"], found["out of order"], found["twice and not marked"]) == (4, 0, 0)
    assert (found["twice"], found["sent again"]) == (twice, copies.count("+"))


@pytest.mark.parametrize("copies", ["0 0", "0 0+ 0", "0+ 0 0"])
def test_the_check_counts_a_second_copy_of_a_flight_that_is_not_marked_as_one(copies: str) -> None:
    assert came(*copies.split())["twice and not marked"] == 1


def test_the_check_counts_first_copies_that_are_out_of_order_and_damaged_flights() -> None:
    found = came("2", "1", "0")
    assert (found["flights"], found["out of order"]) == (3, 1)
    assert judge(iter([(BasicProperties(), ROWS[3] + b"!")]), ROWS)["damaged"] == 1
