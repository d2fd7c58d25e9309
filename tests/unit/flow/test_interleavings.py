"""J5: however publishers and consumers come in between each other around a mark, nobody stays blocked for nothing.

Publishers and consumers run as the atomic steps of `FlowController.offer_steps` and `release_steps`. Every order of
these steps is walked: from every state that can be reached, each of them that is not done goes next once. What happens
from a state on depends neither on how it was reached nor on which of the like publishers or consumers is which, so such
states are walked on from once only, however many orders lead to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from qflow_client.flow import Capacity, FlowController, FlowSource, StopResume, ThresholdLimiter, Thresholds

#: The body bytes of every message.
SIZE = 10


class World:
    """A queue at a depth, with publishers of one message each and consumers of one message each."""

    def __init__(
        self, controller_type: type[FlowController], thresholds: Thresholds, depth: int, publishers: int, consumers: int
    ) -> None:
        self.queue = ThresholdLimiter(thresholds, count=depth, size=depth * SIZE)
        self.controller = controller_type(self.queue)
        self.sources = [FlowSource(f"publisher {number}") for number in range(publishers)]
        self.running: dict[int, Iterator[str]] = {}
        for source in self.sources:
            self.running[len(self.running)] = self.controller.offer_steps(source, SIZE, 0.0)
        for _ in range(consumers):
            self.running[len(self.running)] = self.controller.release_steps(SIZE)
        self.steps_done = dict.fromkeys(self.running, 0)

    def step(self, who: int) -> None:
        self.steps_done[who] += 1
        if next(self.running[who], None) is None:
            del self.running[who]

    def state(self) -> tuple[object, ...]:
        """All on which the rest of a run depends, with no names in it."""
        publishers = len(self.sources)
        return (
            (self.queue.count, self.queue.size, self.queue.on),
            sorted(
                (who in self.running, self.steps_done[who], source in self.controller.blocked, source.is_blocked)
                for who, source in enumerate(self.sources)
            ),
            sorted((who in self.running, done) for who, done in self.steps_done.items() if who >= publishers),
        )

    def is_wrong(self) -> bool:
        """Whether somebody is blocked for nothing, or the two sides disagree on who is."""
        blocked = [source for source in self.sources if source.is_blocked]
        return set(blocked) != set(self.controller.blocked) or (bool(blocked) and self.queue.resumable)


@dataclass(frozen=True)
class Scenario:
    thresholds: Thresholds
    depth: int
    publishers: int
    consumers: int

    def run(self, controller_type: type[FlowController], order: tuple[int, ...]) -> World:
        world = World(controller_type, self.thresholds, self.depth, self.publishers, self.consumers)
        for who in order:
            world.step(who)
        return world

    def walk(self, controller_type: type[FlowController] = FlowController) -> tuple[int, int, list[tuple[int, ...]]]:
        """Walk every order.

        Returns:
            How many orders there are, how many of them end wrong, and the first order that led to each wrong end.
        """
        known: dict[str, tuple[int, int]] = {}
        examples: list[tuple[int, ...]] = []

        def walk_on(order: tuple[int, ...]) -> tuple[int, int]:
            world = self.run(controller_type, order)
            state = str(world.state())
            if state not in known:
                if world.running:
                    ends = [walk_on((*order, who)) for who in list(world.running)]
                    known[state] = sum(count for count, _ in ends), sum(wrong for _, wrong in ends)
                else:
                    known[state] = 1, int(world.is_wrong())
                    if world.is_wrong():
                        examples.append(order)
            return known[state]

        orders, wrong = walk_on(())
        return orders, wrong, examples


MARKS: dict[str, Thresholds] = {
    "count, resume at stop": StopResume(stop_count=3, resume_count=3),
    "count, gap": StopResume(stop_count=3, resume_count=2),
    "bytes, resume at stop": StopResume(stop_size=30, resume_size=30),
    "bytes, gap": StopResume(stop_size=30, resume_size=11),
    "count and bytes": StopResume(stop_count=4, resume_count=4, stop_size=30, resume_size=25),
    "capacity": Capacity(30),
    "capacity, gap": Capacity(30, 20),
    "capacity, wide gap": Capacity(30, 10),
}

#: One below the mark, at it, and one above.
DEPTHS = (2, 3, 4)


def assert_nobody_is_blocked_for_nothing(
    marks: str, publishers: int, consumers: int, controller_type: type[FlowController] = FlowController
) -> None:
    for depth in DEPTHS:
        # Only what is there can be consumed.
        scenario = Scenario(MARKS[marks], depth, publishers, min(consumers, depth))
        orders, wrong, examples = scenario.walk(controller_type)
        assert orders > 1
        assert wrong == 0, f"{scenario} goes wrong in {wrong} of {orders} orders, such as {examples[0]}"


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("publishers", [1, 2, 3])
@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_J5_no_order_of_publishers_and_consumers_leaves_one_blocked_for_nothing(
    marks: str, publishers: int, consumers: int
) -> None:
    assert_nobody_is_blocked_for_nothing(marks, publishers, consumers)


class WithoutSecondLook(FlowController):
    """The race guard is gone: what left between the overflow and the block does not unblock."""

    def offer_steps(self, source: FlowSource, size: int, now: float) -> Iterator[str]:
        for step in super().offer_steps(source, size, now):
            yield step
            if step == "blocked":
                return


class LooksBeforeItBlocks(FlowController):
    """The race guard is in the wrong place."""

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


class ReleasesWithoutLooking(FlowController):
    """What leaves unblocks nobody."""

    def release_steps(self, size: int, count: int = 1) -> Iterator[str]:
        self.limiter.remove(size, count)
        yield "removed"


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("publishers", [1, 2, 3])
@pytest.mark.parametrize("mutant", [WithoutSecondLook, LooksBeforeItBlocks, ReleasesWithoutLooking])
def test_J5_the_same_walk_catches_a_controller_without_the_second_look(
    marks: str, publishers: int, mutant: type[FlowController]
) -> None:
    with pytest.raises(AssertionError, match="goes wrong in"):
        assert_nobody_is_blocked_for_nothing(marks, publishers, 3, mutant)


@pytest.mark.parametrize("marks", MARKS)
def test_J5_without_the_second_look_it_takes_one_to_come_in_between(marks: str) -> None:
    scenario = Scenario(MARKS[marks], 3, 1, 3)
    orders, wrong, examples = scenario.walk(WithoutSecondLook)
    assert 0 < wrong < orders
    for order in examples:
        assert scenario.run(WithoutSecondLook, order).is_wrong()
        assert not scenario.run(FlowController, order).is_wrong()


@pytest.mark.parametrize("mutant", [FlowController, WithoutSecondLook])
@pytest.mark.parametrize("marks", ["count, gap", "capacity"])
def test_J5_the_walk_leaves_no_order_out(marks: str, mutant: type[FlowController]) -> None:
    scenario = Scenario(MARKS[marks], 3, 2, 2)
    walked = itertools.count()
    wrong = itertools.count()

    def every_order(order: tuple[int, ...]) -> None:
        """The same with no state remembered."""
        world = scenario.run(mutant, order)
        for who in list(world.running):
            every_order((*order, who))
        if not world.running:
            next(walked)
            if world.is_wrong():
                next(wrong)

    every_order(())
    assert scenario.walk(mutant)[:2] == (next(walked), next(wrong))


@pytest.mark.parametrize("publishers", [1, 2])
@pytest.mark.parametrize("depth", DEPTHS)
def test_J5_whoever_publishes_while_a_hold_is_lifted_is_not_left_blocked_by_it(depth: int, publishers: int) -> None:
    def lift(controller: FlowController) -> Iterator[str]:
        controller.gate.lift("paused", now=0.0)
        yield "lifted"
        controller.resume()

    ends: set[tuple[bool, ...]] = set()

    def every_order(order: tuple[int, ...]) -> None:
        world = World(FlowController, Capacity(30), depth, publishers, 0)
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
def test_J6_whoever_is_still_blocked_at_the_end_is_unblocked_when_the_queue_is_drained(marks: str) -> None:
    scenario = Scenario(MARKS[marks], 3, 2, 1)
    # In these orders nobody comes in between.
    for order in itertools.permutations(range(3)):
        world = scenario.run(FlowController, ())
        for who in order:
            while who in world.running:
                world.step(who)
        while world.queue.count:
            world.controller.release(SIZE)
        assert not any(source.is_blocked for source in world.sources)
