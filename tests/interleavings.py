"""J5: tries every order of the atomic steps of publishers and consumers at a queue whose depth is near a threshold.

Publishers and consumers run as the atomic steps of a `Stepwise` controller. From every reachable state, each publisher
or consumer that is not done makes the next step once. The rest of a run depends only on its state. The state does not
contain the order that led to it, or the names of publishers and consumers. So each state is continued only once, even
if several orders lead to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from qflow_client.flow import Capacity, FlowController, FlowSource, StopResume, ThresholdLimiter, Thresholds
from tests.effort import EFFORT

__all__ = [
    "DEPTHS",
    "MARKS",
    "SIZE",
    "Make",
    "Scenario",
    "Stepwise",
    "World",
    "assert_nobody_is_blocked_for_nothing",
    "made_of",
]


class Stepwise(FlowController):
    """A controller whose `offer` and `release` can be executed in single atomic steps.

    At each yield, another thread could run. The yielded value is the name of the executed step.
    """

    __slots__ = ()

    def offer_steps(self, source: FlowSource, size: int, now: float) -> Iterator[str]:
        if self.limiter.add(size, now) or self._is_held:
            yield "taken"
            self._block(source, now)
            yield "blocked"
            super()._look_again(source, now)

    def _look_again(self, source: FlowSource, now: float | None) -> None:
        """Do nothing, because `offer_steps` makes this check as a separate step."""

    def release_steps(self, size: int) -> Iterator[str]:
        self.limiter.remove(size)
        if self._blocked:
            yield "removed"
            self.resume()


#: Creates the controller of a queue. The arguments are the thresholds, the number of messages, and their total bytes.
Make = Callable[[Thresholds, int, int], Stepwise]

#: The body bytes of every message.
SIZE = 10


def made_of(controller_type: type[Stepwise]) -> Make:
    """Return a function that creates controllers of a type. The type gets its limiter as an argument."""
    return lambda thresholds, count, size: controller_type(ThresholdLimiter(thresholds, count=count, size=size))


class World:
    """A queue with a given depth. Each publisher publishes one message, and each consumer consumes one message."""

    def __init__(self, make: Make, thresholds: Thresholds, depth: int, publishers: int, consumers: int) -> None:
        self.controller = make(thresholds, depth, depth * SIZE)
        assert isinstance(self.controller.limiter, ThresholdLimiter)
        self.queue = self.controller.limiter
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
        """Return everything on which the rest of a run depends, without the names of publishers and consumers."""
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
        """Whether a source is blocked without a reason, or controller and sources disagree on the blocked sources."""
        blocked = [source for source in self.sources if source.is_blocked]
        return set(blocked) != set(self.controller.blocked) or (bool(blocked) and self.queue.resumable)


@dataclass(frozen=True)
class Scenario:
    thresholds: Thresholds
    depth: int
    publishers: int
    consumers: int
    world_type: type[World] = World

    def run(self, make: Make, order: tuple[int, ...]) -> World:
        world = self.world_type(make, self.thresholds, self.depth, self.publishers, self.consumers)
        for who in order:
            world.step(who)
        return world

    def walk(self, make: Make) -> tuple[int, int, list[tuple[int, ...]]]:
        """Try every order of the steps.

        Returns:
            The number of orders, the number of orders with a wrong end, and for each wrong end its first order.
        """
        known: dict[str, tuple[int, int]] = {}
        examples: list[tuple[int, ...]] = []

        def walk_on(order: tuple[int, ...]) -> tuple[int, int]:
            world = self.run(make, order)
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

#: Depths in messages: one below the threshold, at the threshold, and one above it.
DEPTHS = (2, 3, 4)


def assert_nobody_is_blocked_for_nothing(
    marks: str, counts: Iterable[tuple[int, int]], make: Make, world_type: type[World] = World
) -> None:
    """Try every order of the steps from each depth of `DEPTHS`.

    With the effort `quick`, scenarios with six publishers and consumers are left out.

    Args:
        marks: name of the queue's thresholds in `MARKS`.
        counts: number of publishers and number of consumers for each scenario.
        make: function that creates the controller of the queue.
        world_type: class of the queue with its publishers and consumers.
    """
    for (publishers, consumers), depth in product(counts, DEPTHS):
        if EFFORT == "quick" and publishers + consumers > 5:
            continue
        # Consumers can consume only the messages that the queue has at the start.
        scenario = Scenario(MARKS[marks], depth, publishers, min(consumers, depth), world_type)
        orders, wrong, examples = scenario.walk(make)
        assert orders > 1
        assert wrong == 0, f"{scenario} goes wrong in {wrong} of {orders} orders, such as {examples[0]}"
