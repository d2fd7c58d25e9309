"""J5 for the flow controller of the broker's queues. It unflows publishers in its own order (F4)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qflow_client.broker.core.queueflow import CountedSource, QueueFlow, Spacing
from qflow_client.flow import FlowSource, Thresholds
from tests.interleavings import MARKS, SIZE, Make, Stepwise, World, assert_nobody_is_blocked_for_nothing

from ..tools import run_all


class StepwiseQueueFlow(Stepwise, QueueFlow):
    pass


def of_a_queue(flow_type: type[StepwiseQueueFlow], spacing: Spacing | None = None) -> Make:
    return lambda thresholds, count, size: flow_type(thresholds, "q", count, size, spacing, run=run_all)


class WithoutSecondLook(StepwiseQueueFlow):
    """A controller without the check after blocking: it misses messages that left before the source was blocked."""

    def offer_steps(self, source: FlowSource, size: int, now: float) -> Iterator[str]:
        for step in super().offer_steps(source, size, now):
            yield step
            if step == "blocked":
                return


@pytest.mark.parametrize("marks", MARKS)
def test_J5_no_order_of_publishing_blocking_and_consuming_leaves_a_publisher_blocked_without_reason(marks: str) -> None:
    assert_nobody_is_blocked_for_nothing(marks, [(1, 3), (2, 2), (3, 3)], of_a_queue(StepwiseQueueFlow))


@pytest.mark.parametrize("marks", MARKS)
def test_J5_without_the_check_after_blocking_some_order_leaves_a_publisher_blocked(marks: str) -> None:
    for publishers in (1, 2):
        with pytest.raises(AssertionError, match="goes wrong in"):
            assert_nobody_is_blocked_for_nothing(marks, [(publishers, 3)], of_a_queue(WithoutSecondLook))


class Clock:
    """A clock that advances only to the next alarm."""

    def __init__(self) -> None:
        self.now = 0.0
        self.alarms: list[float] = []
        self.spacing = Spacing(1.0, lambda: self.now, self.alarms.append)


class Timed(World):
    """A queue that unflows its publishers one after the other, one each second."""

    def __init__(self, make: Make, thresholds: Thresholds, depth: int, publishers: int, consumers: int) -> None:
        self.clock = Clock()
        super().__init__(of_a_queue(StepwiseQueueFlow, self.clock.spacing), thresholds, depth, publishers, consumers)

    def state(self) -> tuple[object, ...]:
        return (*super().state(), self.clock.spacing._next_at, bool(self.clock.alarms))

    def let_time_pass(self) -> int:
        """Resume the controller at each of its alarms. Return the number of alarms."""
        times = 0
        while self.clock.alarms:
            self.clock.now = max(self.clock.now, min(self.clock.alarms))
            self.clock.alarms.clear()
            self.controller.resume()
            times += 1
        return times

    def is_wrong(self) -> bool:
        self.let_time_pass()
        return super().is_wrong()


@pytest.mark.parametrize("marks", MARKS)
def test_J5_publishers_that_a_queue_unflows_one_by_one_do_not_stay_blocked_in_any_order_of_steps(marks: str) -> None:
    assert_nobody_is_blocked_for_nothing(marks, [(1, 3), (2, 3), (3, 2)], of_a_queue(StepwiseQueueFlow), Timed)


@pytest.mark.parametrize("marks", MARKS)
def test_F4_a_queue_with_a_resume_interval_unflows_its_publishers_one_by_one(marks: str) -> None:
    timed = Timed(of_a_queue(StepwiseQueueFlow), MARKS[marks], 4, 3, 0)
    while timed.running:
        timed.step(next(iter(timed.running)))
    assert all(source.is_blocked for source in timed.sources)
    while timed.queue.count:
        timed.controller.release(SIZE)
    assert [source.is_blocked for source in timed.sources] == [False, True, True]
    assert timed.let_time_pass() == 2
    assert timed.clock.now == 2.0
    assert not any(source.is_blocked for source in timed.sources)


def test_F4_a_drained_queue_first_unflows_the_publisher_that_has_published_the_fewest_messages() -> None:
    told: list[str] = []

    class Publisher(CountedSource):
        def on_unblocked(self) -> None:
            told.append(self.name)

    flow = QueueFlow(MARKS["count, gap"], "q", 3, 30, run=run_all)
    for name, published in (("most", 9), ("least", 1), ("between", 5)):
        source = Publisher(name)
        source.published = published
        flow.offer(source, 1, 0.0)
    for _ in range(5):
        flow.release(1)
    assert told == ["least", "between", "most"]
