"""How a task handles credits, without I/O, with any order of deliveries, confirms and killed tasks."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qflow_client.spark.credits import Credit, Purse, issue
from tests.effort import rounds


@pytest.mark.parametrize("capacity", [1, 3, 50, 256, 257, 1000, 1_000_003])
def test_C6_the_units_of_all_credits_add_up_to_exactly_the_capacity(capacity: int) -> None:
    credits = list(issue("p", capacity))
    assert sum(credit.units for credit in credits) == capacity
    assert {credit.credits for credit in credits} == {len(credits)}
    assert max(credit.units for credit in credits) - min(credit.units for credit in credits) <= 1
    assert [Credit.decode(credit.encode()) for credit in credits] == credits


@pytest.mark.parametrize("body", [b"", b"\xff", b"1", b"[]", b'{"pool": "p"}', b'{"id": 7}'])
def test_a_body_that_is_not_a_credit_decodes_to_None(body: bytes) -> None:
    assert Credit.decode(body) is None


def test_a_task_immediately_returns_a_credit_that_it_does_not_need() -> None:
    purse = Purse()
    for tag in range(4):
        purse.grant(tag, 10, 0)
    purse.plan(sent=0, unsettled=0, left=15)
    assert (purse.window, purse.wants) == (20, False)
    assert purse.release(unsettled=0) == [0, 1]
    # The task has no rows, so it keeps only the credits that cover its unsettled messages.
    purse.plan(sent=15, unsettled=11, left=0)
    assert purse.release(unsettled=11) == []
    purse.plan(sent=15, unsettled=10, left=0)
    assert purse.release(unsettled=10) == [2]
    purse.plan(sent=15, unsettled=0, left=0)
    assert purse.release(unsettled=0) == [3]
    assert (len(purse), purse.units, purse.window, purse.wants) == (0, 0, 0, False)


def test_a_task_returns_a_credit_when_all_messages_of_the_credit_are_sent_and_settled() -> None:
    purse = Purse()
    purse.grant(1, 5, 0)
    purse.plan(sent=4, unsettled=4, left=100)
    assert (purse.window, purse.wants) == (5, True)
    purse.plan(sent=5, unsettled=5, left=99)
    assert (purse.units, purse.window) == (5, 0)
    assert purse.release(unsettled=1) == []
    assert purse.release(unsettled=0) == [1]


class Task:
    def __init__(self, rows: int) -> None:
        self.purse = Purse()
        # Rows that Spark has not passed yet, and rows that the task has but has not sent.
        self.to_come, self.left = rows, 0
        self.sent = self.unsettled = self.window = 0
        self.consumes = False
        self.prefetch = 0
        self.tags: dict[int, int] = {}


class Model:
    """A model of tasks and of the two queues of the broker."""

    def set_up(self, capacity: int, rows: list[int]) -> None:
        self.capacity = capacity
        self.units = {credit.number: credit.units for credit in issue("p", capacity)}
        self.ready = deque(self.units)
        # Consumers that can get a credit. The first has waited longest.
        self.line: deque[Task] = deque()
        self.tasks = [Task(count) for count in rows]
        self.next_tag = 0
        # Messages of dead tasks that were unsettled, and units of the credits that these tasks had.
        self.orphans = self.lost_with = 0

    def deliver(self) -> None:
        """Deliver credits as brokers do: the consumer that has waited longest gets the oldest credit."""
        while self.ready and self.line:
            task = self.line.popleft()
            number = self.ready.popleft()
            self.next_tag += 1
            task.tags[self.next_tag] = number
            task.purse.grant(self.next_tag, self.units[number], task.sent)
            self.join(task)

    def join(self, task: Task) -> None:
        if task.consumes and len(task.tags) < task.prefetch and task not in self.line:
            self.line.append(task)

    def look(self, task: Task) -> None:
        """Do what the I/O code does for a task 200 times a second."""
        purse = task.purse
        purse.plan(task.sent, task.unsettled, task.left)
        task.window = purse.window
        if purse.wants and not task.consumes:
            task.consumes, task.prefetch = True, len(self.units)
            self.join(task)
        elif task.consumes and not purse.wants:
            task.consumes = False
            if task in self.line:
                self.line.remove(task)
        for tag in purse.release(task.unsettled):
            # The broker puts a requeued message back to its old position, usually the front.
            self.ready.appendleft(task.tags.pop(tag))
            self.join(task)
        self.deliver()

    def send_some(self, task: Task, most: int) -> None:
        count = max(0, min(most, task.left, task.window - task.unsettled))
        task.left -= count
        task.sent += count
        task.unsettled += count


class Cluster(Model, RuleBasedStateMachine):
    """Rules for tasks that start, send, wait and die."""

    @initialize(capacity=st.integers(1, 700), tasks=st.integers(1, 6))
    def begin(self, capacity: int, tasks: int) -> None:
        self.set_up(capacity, [30 * (at + 1) for at in range(tasks)])

    def pick(self, data: st.DataObject) -> Task:
        return data.draw(st.sampled_from(self.tasks))

    @rule(data=st.data(), rows=st.integers(1, 40))
    def hand_over(self, data: st.DataObject, rows: int) -> None:
        task = self.pick(data)
        if not task.left:
            task.left = min(rows, task.to_come)
            task.to_come -= task.left

    @rule(data=st.data())
    def turn(self, data: st.DataObject) -> None:
        self.look(self.pick(data))

    @rule(data=st.data(), most=st.integers(1, 50))
    def send(self, data: st.DataObject, most: int) -> None:
        self.send_some(self.pick(data), most)

    @rule(data=st.data(), most=st.integers(1, 50))
    def confirm(self, data: st.DataObject, most: int) -> None:
        task = self.pick(data)
        task.unsettled -= min(most, task.unsettled)

    @precondition(lambda self: any(task.tags for task in self.tasks))
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from([task for task in self.tasks if task.tags]))
        self.orphans += task.unsettled
        self.lost_with += task.purse.units
        if task in self.line:
            self.line.remove(task)
        for tag in sorted(task.tags, reverse=True):
            self.ready.appendleft(task.tags[tag])
        # Spark starts the task again.
        self.tasks[self.tasks.index(task)] = Task(task.sent + task.left + task.to_come)
        self.deliver()

    @invariant()
    def no_credit_is_lost_or_doubled(self) -> None:
        if hasattr(self, "tasks"):
            held = [number for task in self.tasks for number in task.tags.values()]
            assert sorted([*self.ready, *held]) == sorted(self.units)

    @invariant()
    def C6_unconfirmed_messages_of_the_living_never_exceed_the_capacity(self) -> None:
        if hasattr(self, "tasks"):
            for task in self.tasks:
                assert task.unsettled <= task.purse.units == sum(self.units[number] for number in task.tags.values())
            assert sum(task.unsettled for task in self.tasks) <= self.capacity
            # Dead tasks left at most as many messages as their credits had units.
            assert self.orphans <= self.lost_with

    def teardown(self) -> None:
        """Check that no task starves. If every task runs and every message is confirmed, all rows are sent."""
        if not hasattr(self, "tasks"):
            return
        turns = sum(task.to_come + task.left for task in self.tasks) * 4 + 20
        for _ in range(turns):
            for task in self.tasks:
                if not task.left:
                    task.left = min(10, task.to_come)
                    task.to_come -= task.left
                self.look(task)
                self.send_some(task, 1000)
                self.look(task)
                task.unsettled = 0
                self.look(task)
        assert [task.left + task.to_come for task in self.tasks] == [0] * len(self.tasks)
        assert sorted(self.ready) == sorted(self.units)


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=rounds(60), stateful_step_count=40)


@pytest.mark.parametrize("capacity", [1, 2, 100, 600])
def test_a_task_with_endless_rows_does_not_starve_other_tasks(capacity: int) -> None:
    model = Model()
    model.set_up(capacity, [0] * 4)
    greedy, *others = model.tasks
    greedy.left = 10**9
    # The first task has all credits before the others start.
    model.look(greedy)
    assert not model.ready
    for other in others:
        other.left = 50
    for _ in range(400):
        for task in model.tasks:
            model.look(task)
            model.send_some(task, 1000)
            model.look(task)
            task.unsettled = 0
            model.look(task)
    assert [other.left for other in others] == [0] * 3
    assert greedy.sent > 50
