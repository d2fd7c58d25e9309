"""J5: no interleaving of publishers and consumers at a threshold leaves a publisher blocked without reason."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from qflow_client.flow import Capacity, FlowController, FlowSource
from tests.interleavings import (
    DEPTHS,
    MARKS,
    SIZE,
    Scenario,
    Stepwise,
    World,
    assert_nobody_is_blocked_for_nothing,
    made_of,
)


@pytest.mark.parametrize("marks", MARKS)
def test_J5_no_order_of_the_steps_of_publishers_and_consumers_leaves_a_publisher_blocked_without_reason(
    marks: str,
) -> None:
    assert_nobody_is_blocked_for_nothing(marks, [(1, 1), (1, 3), (2, 2), (3, 1), (3, 3)], made_of(Stepwise))


class WithoutSecondLook(Stepwise):
    """A controller without the check after blocking: it misses elements that left before the source was blocked."""

    def offer_steps(self, source: FlowSource, size: int, now: float) -> Iterator[str]:
        for step in super().offer_steps(source, size, now):
            yield step
            if step == "blocked":
                return


class LooksBeforeItBlocks(Stepwise):
    """A controller that checks again before it blocks the source, and not after it."""

    def offer_steps(self, source: FlowSource, size: int, now: float) -> Iterator[str]:
        if not self.limiter.add(size, now):
            return
        yield "taken"
        if self.limiter.resumable:
            return
        yield "looked"
        self._blocked.setdefault(source)
        source.block(self)
        yield "blocked"


class ReleasesWithoutLooking(Stepwise):
    """A controller that unblocks no source when elements leave."""

    def release_steps(self, size: int) -> Iterator[str]:
        self.limiter.remove(size)
        yield "removed"


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("mutant", [WithoutSecondLook, LooksBeforeItBlocks, ReleasesWithoutLooking])
def test_J5_without_the_check_after_blocking_the_search_over_all_orders_finds_a_publisher_left_blocked(
    marks: str, mutant: type[Stepwise]
) -> None:
    for publishers in (1, 2):
        with pytest.raises(AssertionError, match="goes wrong in"):
            assert_nobody_is_blocked_for_nothing(marks, [(publishers, 3)], made_of(mutant))


@pytest.mark.parametrize("marks", MARKS)
def test_J5_without_the_check_after_blocking_only_some_orders_leave_a_publisher_blocked(marks: str) -> None:
    scenario = Scenario(MARKS[marks], 3, 1, 3)
    orders, wrong, examples = scenario.walk(made_of(WithoutSecondLook))
    assert 0 < wrong < orders
    for order in examples:
        assert scenario.run(made_of(WithoutSecondLook), order).is_wrong()
        assert not scenario.run(made_of(Stepwise), order).is_wrong()


@pytest.mark.parametrize(("marks", "mutant"), [("count, gap", WithoutSecondLook), ("capacity", Stepwise)])
def test_J5_the_search_that_skips_known_states_counts_the_same_orders_as_a_full_search(
    marks: str, mutant: type[Stepwise]
) -> None:
    scenario = Scenario(MARKS[marks], 3, 2, 2)
    walked = itertools.count()
    wrong = itertools.count()

    def every_order(order: tuple[int, ...]) -> None:
        """Walk all orders as `walk` does, but without skipping known states."""
        world = scenario.run(made_of(mutant), order)
        for who in list(world.running):
            every_order((*order, who))
        if not world.running:
            next(walked)
            if world.is_wrong():
                next(wrong)

    every_order(())
    assert scenario.walk(made_of(mutant))[:2] == (next(walked), next(wrong))


@pytest.mark.parametrize("publishers", [1, 2])
@pytest.mark.parametrize("depth", DEPTHS)
def test_J5_a_publisher_that_publishes_while_a_hold_is_lifted_is_not_left_blocked_because_of_that_hold(
    depth: int, publishers: int
) -> None:
    def lift(controller: FlowController) -> Iterator[str]:
        controller.gate.lift("paused", now=0.0)
        yield "lifted"
        controller.resume()

    ends: set[tuple[bool, ...]] = set()

    def every_order(order: tuple[int, ...]) -> None:
        world = World(made_of(Stepwise), Capacity(30), depth, publishers, 0)
        world.controller.gate.hold("paused", now=0.0)
        world.running[publishers] = lift(world.controller)
        world.steps_done[publishers] = 0
        for who in order:
            world.step(who)
        for who in list(world.running):
            every_order((*order, who))
        if not world.running:
            assert not world.is_wrong(), f"{order} leaves somebody blocked for nothing"
            ends.add(tuple(source.is_blocked for source in world.sources))

    every_order(())
    assert any(map(any, ends)) is (depth + publishers > 3)


@pytest.mark.parametrize("marks", MARKS)
def test_J6_a_publisher_that_is_blocked_when_all_have_published_is_unblocked_when_the_queue_drains(marks: str) -> None:
    scenario = Scenario(MARKS[marks], 3, 2, 1)
    # In these orders each publisher and consumer runs to its end.
    for order in itertools.permutations(range(3)):
        world = scenario.run(made_of(Stepwise), ())
        for who in order:
            while who in world.running:
                world.step(who)
        while world.queue.count:
            world.controller.release(SIZE)
        assert not any(source.is_blocked for source in world.sources)
