"""`Deadlines` in simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from qflow_client.aio import turn
from qflow_client.aio.turn import Deadlines


class Clock:
    """A clock, and the methods of an event loop that set timers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None], Any]] = []
        self.made = 0

    def call_later(self, delay: float, callback: Callable[[], None]) -> Any:
        self.made += 1
        entry: Any = None

        class Handle:
            @staticmethod
            def cancel() -> None:
                if entry in self.timers:
                    self.timers.remove(entry)

        entry = (self.now + delay, callback, Handle)
        self.timers.append(entry)
        return Handle

    def run_to(self, now: float) -> None:
        while due := [each for each in self.timers if each[0] <= now]:
            first = min(due, key=lambda each: each[0])
            self.timers.remove(first)
            self.now = max(self.now, first[0])
            first[1]()
        self.now = now


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(turn, "_monotonic", lambda: clock.now)
    return clock


def test_each_future_is_set_at_its_deadline_and_never_earlier(clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
    deadlines = Deadlines(clock, 5.0)  # type: ignore[arg-type]  # the part of it that is used
    waiters = [loop.create_future() for _ in range(10)]
    for at, waiter in enumerate(waiters):
        clock.run_to(at)
        deadlines.add(waiter, clock.now)
        assert [each.done() for each in waiters] == [number + 5 <= at for number in range(10)]
    clock.run_to(13.9)
    assert [each.done() for each in waiters] == [True] * 9 + [False]
    clock.run_to(14.0)
    assert waiters[9].done()
    assert not clock.timers


def test_one_timer_is_enough_for_all_futures_that_are_done_before_their_deadlines(
    clock: Clock, loop: asyncio.AbstractEventLoop
) -> None:
    deadlines = Deadlines(clock, 60.0)  # type: ignore[arg-type]  # as above
    for number in range(10_000):
        clock.run_to(number / 1000)
        waiter = loop.create_future()
        deadlines.add(waiter, clock.now)
        deadlines.remove(waiter)
    assert clock.made == 1
    assert not deadlines._times
    # The timer is not set again.
    clock.run_to(100)
    assert not clock.timers


def test_a_timer_whose_callback_was_interrupted_is_set_again(clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
    deadlines = Deadlines(clock, 5.0)  # type: ignore[arg-type]  # as above
    late, next_one = loop.create_future(), loop.create_future()
    deadlines.add(late, clock.now)
    # The callback of the timer does nothing, as if it were interrupted at its first line.
    clock.timers.clear()
    clock.run_to(6.0)
    deadlines.add(next_one, clock.now)
    clock.run_to(11.0)
    assert late.done()
    assert next_one.done()


def test_a_timer_that_fires_before_the_deadline_sets_no_future(clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
    deadlines = Deadlines(clock, 5.0)  # type: ignore[arg-type]  # as above
    waiter = loop.create_future()
    deadlines.add(waiter, clock.now)
    clock.now = 4.99
    clock.timers.pop()[1]()
    assert not waiter.done()
    clock.run_to(5.0)
    assert waiter.done()


def test_without_a_time_limit_no_timer_is_set(clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
    deadlines = Deadlines(clock, None)  # type: ignore[arg-type]  # as above
    waiter = loop.create_future()
    deadlines.add(waiter, clock.now)
    deadlines.remove(waiter)
    assert not clock.timers


def test_after_the_deadlines_are_ended_a_timer_remains_only_while_a_future_waits(
    clock: Clock, loop: asyncio.AbstractEventLoop
) -> None:
    deadlines = Deadlines(clock, 5.0)  # type: ignore[arg-type]  # as above
    waits, settled = loop.create_future(), loop.create_future()
    deadlines.add(settled, clock.now)
    settled.set_result(None)
    deadlines.end()
    assert not clock.timers
    deadlines.add(waits, clock.now)
    deadlines.end()
    clock.run_to(5.0)
    assert waits.done()


def test_futures_are_set_at_their_deadlines_even_if_the_busy_loop_calls_no_timer(
    clock: Clock, loop: asyncio.AbstractEventLoop
) -> None:
    deadlines = Deadlines(clock, 5.0)  # type: ignore[arg-type]  # as above
    waiters = [loop.create_future() for _ in range(6)]
    for number, waiter in enumerate(waiters):
        # The loop is busy and calls no timer.
        clock.now = number * 5.0
        deadlines.add(waiter, clock.now)
    assert [waiter.done() for waiter in waiters] == [True] * 5 + [False]
    # Futures that are set are forgotten.
    assert list(deadlines._times) == waiters[5:]


def test_a_future_that_is_added_after_a_timer_fired_early_is_set_at_its_deadline(
    clock: Clock, loop: asyncio.AbstractEventLoop
) -> None:
    deadlines = Deadlines(clock, 5.0)  # type: ignore[arg-type]  # as above
    settled, waits = loop.create_future(), loop.create_future()
    deadlines.add(settled, clock.now)
    deadlines.remove(settled)
    clock.now = 4.999
    clock.timers.pop()[1]()
    deadlines.add(waits, clock.now)
    clock.run_to(10.0)
    assert waits.done()
