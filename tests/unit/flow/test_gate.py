"""The gate: open exactly when no hold is left."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qflow_client.flow import Gate, Hold
from tests.interrupting import each_interrupt


def test_raising_a_hold_closes_the_gate_and_lifting_the_hold_opens_the_gate() -> None:
    gate = Gate()
    assert gate.hold("paused", now=3.0, source="operator", detail="stock-taking")
    assert not gate.is_open
    assert gate.closed_since == 3.0
    assert gate.holds == (Hold("paused", 3.0, "operator", "stock-taking"),)
    assert gate.lift("paused", now=5.0, source="operator") == Hold("paused", 3.0, "operator", "stock-taking")
    assert gate.is_open
    assert gate.closed_since is None
    assert gate.times_closed == 1


def test_forget_past_forgets_the_times_of_ended_holds_but_not_of_current_holds() -> None:
    gate = Gate()
    gate.hold("rate", now=0.0)
    gate.lift("rate", now=2.0)
    gate.forget_past()
    assert (gate.times_closed, gate.seconds_held(3.0)) == (0, {})
    gate.hold("rate", now=10.0)
    gate.hold("paused", now=10.0)
    gate.lift("rate", now=11.0)
    gate.forget_past()
    assert (gate.times_closed, gate.seconds_held(12.0)) == (1, {"paused": 2.0})
    assert not gate.is_open


def test_the_text_of_a_hold_is_the_kind_followed_by_source_and_detail_in_parentheses() -> None:
    assert str(Hold("paused", 0.0)) == "paused"
    assert str(Hold("paused", 0.0, "operator")) == "paused (operator)"
    assert str(Hold("connection_blocked", 0.0, "", "low on memory")) == "connection_blocked (low on memory)"
    assert str(Hold("paused", 0.0, "operator", "stock-taking")) == "paused (operator: stock-taking)"


KINDS = st.sampled_from(["capacity", "paused", "rate"])
SOURCES = st.sampled_from(["", "a", "b"])


class GateMachine(RuleBasedStateMachine):
    """A gate, a list of its current holds, and a log of the durations of ended holds."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        # Whole seconds, so that sums are exact.
        self.now = 0.0
        self.held: list[tuple[str, str, float]] = []
        self.over: list[tuple[str, float]] = []
        self.closings = 0
        self.told: list[tuple[str, str, bool]] = []
        self.expected: list[tuple[str, str, bool]] = []
        self.gate.observer = lambda hold, raised, now: self.told.append((hold.kind, hold.source, raised))

    def find(self, kind: str, source: str) -> tuple[str, str, float] | None:
        return next((each for each in self.held if each[:2] == (kind, source)), None)

    @rule(seconds=st.integers(0, 100))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(kind=KINDS, source=SOURCES)
    def hold(self, kind: str, source: str) -> None:
        new = self.find(kind, source) is None
        assert self.gate.hold(kind, now=self.now, source=source) is new
        if new:
            self.closings += not self.held
            self.held.append((kind, source, self.now))
            self.expected.append((kind, source, True))

    @rule(kind=KINDS, source=SOURCES)
    def lift(self, kind: str, source: str) -> None:
        entry = self.find(kind, source)
        gone = self.gate.lift(kind, now=self.now, source=source)
        if entry is None:
            assert gone is None
        else:
            assert gone == Hold(kind, entry[2], source)
            self.held.remove(entry)
            self.over.append((kind, self.now - entry[2]))
            self.expected.append((kind, source, False))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def lift_one_that_is_there(self, data: st.DataObject) -> None:
        kind, source, _ = data.draw(st.sampled_from(self.held))
        self.lift(kind, source)

    @invariant()
    def it_is_open_exactly_when_no_hold_is_left(self) -> None:
        assert self.gate.is_open is (not self.held)
        assert (self.gate.closed_since is None) is self.gate.is_open
        assert self.gate.times_closed == self.closings

    @invariant()
    def its_holds_are_those_that_were_raised_and_not_lifted(self) -> None:
        assert [(hold.kind, hold.source, hold.since) for hold in self.gate.holds] == self.held
        for kind in ("capacity", "paused", "rate"):
            assert self.gate.is_held_by(kind) is any(each[0] == kind for each in self.held)

    @invariant()
    def its_seconds_are_the_sum_of_its_holds(self) -> None:
        expected: dict[str, float] = {}
        for kind, seconds in self.over:
            expected[kind] = expected.get(kind, 0.0) + seconds
        for kind, _, since in self.held:
            expected[kind] = expected.get(kind, 0.0) + self.now - since
        assert self.gate.seconds_held(self.now) == expected

    @invariant()
    def the_observer_was_told_every_change_once(self) -> None:
        assert self.told == self.expected


TestGateMachine = GateMachine.TestCase


def test_a_lift_of_a_hold_that_was_interrupted_is_completed_by_the_next_lift() -> None:
    gate = Gate()
    gate.hold("capacity", now=1.0)
    # Ctrl-C came between the two changes.
    gate._holds.clear()
    assert gate.lift("capacity", now=2.0) is None
    assert gate.is_open
    assert gate.closed_since is None


def test_shutting_a_gate_raises_no_hold_and_the_gate_stays_closed_when_all_holds_have_ended() -> None:
    gate, told = Gate(), []
    gate.observer = lambda hold, raised, now: told.append((hold.kind, raised))
    gate.shut()
    assert (gate.is_open, gate.is_shut, gate.holds, gate.times_closed, gate.closed_since) == (False, True, (), 0, None)
    gate.hold("channel_flow", now=2.0)
    assert (gate.times_closed, gate.closed_since) == (1, 2.0)
    gate.forget_past()
    assert gate.times_closed == 1
    gate.lift("channel_flow", now=3.0)
    assert (gate.is_open, gate.closed_since) == (False, None)
    assert told == [("channel_flow", True), ("channel_flow", False)]


@pytest.mark.parametrize("change", ["hold", "second hold", "lift", "first lift"])
def test_a_gate_is_consistent_after_repair_if_a_change_was_interrupted_at_any_line(change: str) -> None:
    for interrupt in each_interrupt(least=1):
        gate = Gate()
        if change != "hold":
            gate.hold("a", now=1.0)
        if change == "first lift":
            gate.hold("b", now=2.0)
        if "hold" in change:
            interrupt(lambda: gate.hold("c", now=3.0))  # noqa: B023  # called at once
        else:
            interrupt(lambda: gate.lift("a", now=3.0))  # noqa: B023  # called at once
        gate.heal()
        assert gate.is_open == (gate.holds == ())
        assert (gate.closed_since is None) == gate.is_open


def test_repairing_a_gate_does_not_open_it_if_it_was_shut() -> None:
    gate = Gate()
    gate.shut()
    gate.heal()
    assert (gate.is_open, gate.closed_since) == (False, None)
