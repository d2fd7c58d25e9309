"""The order of tickets (F4): first come, first served, and fair shares by weight."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qflow_client.flow import FifoLine, Line, Ticket, WeightedLine


class WatchedTicket(Ticket):
    """A ticket that supports weak references, to check whether it is still referred to."""


def push(line: Line, sources: Iterable[str]) -> None:
    """Add a ticket of each source to the line."""
    for source in sources:
        line.push(Ticket(1, source))


def serve(line: Line) -> Ticket | None:
    ticket = line.head()
    if ticket is not None:
        line.pop()
    return ticket


def served_sources(line: Line, count: int) -> str:
    """Return the sources of the next tickets, as letters."""
    return "".join(ticket.source for _ in range(count) if (ticket := serve(line)) is not None)


@pytest.fixture(params=["fifo", "fair", "weighted"])
def line(request: pytest.FixtureRequest) -> Line:
    lines: dict[str, Line] = {"fifo": FifoLine(), "fair": WeightedLine(), "weighted": WeightedLine({"a": 3})}
    return lines[request.param]


def test_cancelled_tickets_behind_a_waiting_ticket_do_not_pile_up(line: Line) -> None:
    patient = Ticket(1, "a")
    line.push(patient)
    alive: weakref.WeakSet[Ticket] = weakref.WeakSet()
    most = 0
    for _ in range(2000):
        ticket = WatchedTicket(1, "a")
        alive.add(ticket)
        line.push(ticket)
        ticket.cancelled = True
        del ticket
        most = max(most, len(alive))
    assert most <= 128
    assert serve(line) is patient
    assert serve(line) is None


def test_F4_removing_cancelled_tickets_keeps_the_order_of_the_waiting_line() -> None:
    line = FifoLine()
    tickets = [Ticket(1) for _ in range(300)]
    for at, ticket in enumerate(tickets):
        line.push(ticket)
        # Two of three are given up at once, so that the line is swept several times.
        ticket.cancelled = at % 3 != 0
    assert [serve(line) for _ in range(100)] == tickets[::3]


# Weights.


def test_F4_two_sources_of_equal_weight_are_served_alternately_however_many_tickets_each_has() -> None:
    line = WeightedLine()
    push(line, "aaaaaabbc")
    assert served_sources(line, 9) == "abcabaaaa"


def test_F4_a_source_that_arrives_late_gets_no_extra_turns_for_the_time_before() -> None:
    line = WeightedLine()
    push(line, "a" * 10)
    served_sources(line, 5)
    push(line, "b" * 5)
    assert served_sources(line, 6) in ("bababa", "ababab")


def test_F4_a_source_that_was_just_served_is_not_served_again_before_a_waiting_source() -> None:
    line = WeightedLine()
    push(line, "ab")
    turns = ""
    for _ in range(6):
        turn = served_sources(line, 1)
        turns += turn
        push(line, [turn])
    assert turns == "ababab"


def test_F4_a_source_that_adds_one_ticket_at_a_time_gets_no_more_than_its_share() -> None:
    line = WeightedLine({"light": 0.5})
    push(line, [*["heavy"] * 30, "light"])
    turns: Counter[str] = Counter()
    for _ in range(30):
        ticket = serve(line)
        assert ticket is not None
        turns[ticket.source] += 1
        if ticket.source == "light":
            push(line, ["light"])
    assert turns == {"heavy": 20, "light": 10}


def test_F4_withdrawing_many_tickets_does_not_delay_the_next_turn_of_a_source() -> None:
    line = WeightedLine()
    push(line, ["patient"] * 10)
    for _ in range(100):
        gone = Ticket(1, "hasty")
        line.push(gone)
        gone.cancelled = True
    last = Ticket(1, "hasty")
    line.push(last)
    assert last in [serve(line) for _ in range(2)], "it has had no turn yet"


def test_F4_withdrawing_the_only_ticket_in_the_line_does_not_change_the_order_of_later_tickets() -> None:
    line = WeightedLine()
    gone = Ticket(1, "a")
    line.push(gone)
    gone.cancelled = True
    assert line.head() is None
    push(line, "ba")
    assert served_sources(line, 2) == "ba", "the order of arrival"


@pytest.mark.parametrize("weight", [0, -1.0, math.nan, math.inf])
def test_a_weighted_line_rejects_invalid_weights_at_construction_and_on_assignment(weight: float) -> None:
    with pytest.raises(ValueError, match=f"the weight of 'a' must be more than 0 and finite, not {weight}"):
        WeightedLine({"a": weight})
    line = WeightedLine({"a": 2})
    with pytest.raises(ValueError, match=f"the weight of 'a' must be more than 0 and finite, not {weight}"):
        line.weights = {"b": 1, "a": weight}
    assert line.weights == {"a": 2}
    with pytest.raises(TypeError):
        line.weights["a"] = weight  # type: ignore[index]


def test_F4_changed_weights_of_a_line_apply_to_all_later_turns() -> None:
    given = {"a": 1.0}
    line = WeightedLine(given)
    push(line, "ab" * 24)
    assert Counter(served_sources(line, 8)) == {"a": 4, "b": 4}
    given["a"] = 3
    assert Counter(served_sources(line, 8)) == {"a": 4, "b": 4}, "it is not the line's own"
    line.weights = given
    assert line.weights == {"a": 3}
    served_sources(line, 4)
    assert Counter(served_sources(line, 16)) == {"a": 12, "b": 4}


class Name(str):
    """The name of a source, which supports weak references to check whether it is still referred to."""


def test_F4_a_weighted_line_forgets_sources_without_tickets_even_if_it_is_never_empty() -> None:
    line = WeightedLine()
    push(line, ["patient"] * 2000)
    names: weakref.WeakSet[Name] = weakref.WeakSet()
    most = 0
    for number in range(1000):
        name = Name(f"passing {number}")
        names.add(name)
        push(line, [name])
        del name
        assert len([serve(line) for _ in range(2)]) == 2
        most = max(most, len(names))
    assert line.head() is not None
    assert most <= 128


def test_F4_a_source_of_small_weight_has_its_next_turn_only_after_all_turns_due_to_other_sources() -> None:
    line = WeightedLine({"light": 1 / 128})
    push(line, ["light", *["patient"] * 200])
    assert served_sources(line, 2) == "lightpatient"
    # Enough turns for the line to sweep its remembered sources.
    turns = 1
    for number in range(100):
        push(line, [f"passing {number}"])
        turns += served_sources(line, 2).count("patient")
    push(line, ["light"])
    while True:
        source = served_sources(line, 1)
        if source == "light":
            break
        turns += 1
    assert turns >= 128


# Powers of two, so that virtual times and bounds are exact.
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 8.0}
SOURCES = ["a", "b", "c", "d", "e"]


def weight(source: str) -> float:
    return WEIGHTS.get(source, 1.0)


class FifoMachine(RuleBasedStateMachine):
    """A first-come-first-served line, and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.line = FifoLine()
        self.waiting: list[Ticket] = []

    @rule(count=st.sampled_from([1, 1, 1, 50]))
    def push(self, count: int) -> None:
        for _ in range(count):
            ticket = Ticket(1)
            self.line.push(ticket)
            self.waiting.append(ticket)

    @rule()
    def serve(self) -> None:
        expected = self.waiting.pop(0) if self.waiting else None
        assert serve(self.line) is expected

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        # A run of tickets, so that most of a long line can leave.
        start = data.draw(st.integers(0, len(self.waiting) - 1))
        for ticket in self.waiting[start : start + 40]:
            ticket.cancelled = True
        del self.waiting[start : start + 40]

    @invariant()
    def the_head_is_who_came_first(self) -> None:
        assert self.line.head() is (self.waiting[0] if self.waiting else None)


TestFifoMachine = FifoMachine.TestCase


class FairMachine(RuleBasedStateMachine):
    """A weighted line, and for every waiting source the number of turns that others have had meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.line = WeightedLine(WEIGHTS)
        self.waiting: dict[str, list[Ticket]] = {}
        # By waiting source, the turns of others since its last turn, or since it began to wait.
        self.passed_by: dict[str, Counter[str]] = {}

    @rule(source=st.sampled_from(SOURCES), count=st.integers(1, 10))
    def push(self, source: str, count: int) -> None:
        for _ in range(count):
            ticket = Ticket(1, source)
            self.line.push(ticket)
            self.waiting.setdefault(source, []).append(ticket)
        self.passed_by.setdefault(source, Counter())

    @rule(count=st.integers(1, 10))
    def serve(self, count: int) -> None:
        for _ in range(count):
            ticket = serve(self.line)
            if ticket is None:
                assert not self.waiting
                return
            source = ticket.source
            assert self.waiting[source][0] is ticket, "of one source, first come first served"
            self.left(source, 0)
            for other, turns in self.passed_by.items():
                if other == source:
                    turns.clear()
                else:
                    turns[source] += 1

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(sorted(self.waiting)))
        at = data.draw(st.integers(0, len(self.waiting[source]) - 1))
        self.waiting[source][at].cancelled = True
        self.left(source, at)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel_all_of_a_source(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(sorted(self.waiting)))
        for ticket in self.waiting[source]:
            ticket.cancelled = True
        del self.waiting[source], self.passed_by[source]

    def left(self, source: str, at: int) -> None:
        del self.waiting[source][at]
        if not self.waiting[source]:
            del self.waiting[source], self.passed_by[source]

    @invariant()
    def nobody_starves(self) -> None:
        # A source of weight w has a turn every 1/w of virtual time. In that time a source of weight v starts at most
        # v/w + 1 turns.
        for source, turns in self.passed_by.items():
            for other, count in turns.items():
                assert count <= math.floor(weight(other) / weight(source)) + 1

    @invariant()
    def somebody_is_next_while_somebody_waits(self) -> None:
        assert (self.line.head() is None) is (not self.waiting)

    def teardown(self) -> None:
        self.serve(sum(map(len, self.waiting.values())))
        assert not self.waiting
        assert self.line.head() is None


TestFairMachine = FairMachine.TestCase


@given(
    st.lists(st.sampled_from(SOURCES), min_size=2, max_size=5, unique=True),
    st.integers(1, 200),
    st.randoms(use_true_random=False),
)
def test_F4_the_turns_of_the_sources_in_a_weighted_line_are_proportional_to_their_weights_at_every_moment(
    sources: list[str], turns: int, random: Random
) -> None:
    line = WeightedLine(WEIGHTS)
    tickets = [Ticket(1, source) for source in sources for _ in range(turns)]
    random.shuffle(tickets)
    for ticket in tickets:
        line.push(ticket)
    had: Counter[str] = Counter()
    # While no source has run out of tickets.
    for _ in range(turns):
        had[served_sources(line, 1)] += 1
        for one in sources:
            for other in sources:
                gap = had[one] / weight(one) - had[other] / weight(other)
                assert gap <= 1 / weight(one) + 1 / weight(other)
