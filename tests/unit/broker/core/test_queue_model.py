"""The queue against a plain model. The model keeps lists and computes everything anew each time."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qflow_client.broker.core.entries import Completion
from tests.effort import rounds

from ..tools import Publisher, make_queue, message

PUBLISHERS = 3


class Family:
    """One kind of thresholds, as its source describes it."""

    def __init__(self, stops, resumes, holds_all):
        self.stops = stops
        self.resumes = resumes
        self.holds_all = holds_all
        self.on = False
        self.times = 0
        self.blocked = set()
        self.held = set()

    def look(self, depth, size):
        if not self.on and self.stops(depth, size):
            self.on = True
            self.times += 1
        elif self.on and self.resumes(depth, size):
            self.on = False
            self.blocked.clear()
            self.held.clear()


class QueueMachine(RuleBasedStateMachine):
    @initialize(
        count=st.sampled_from([(0, 0), (1, 1), (3, 3), (4, 2)]),
        size=st.sampled_from([(0, 0), (5, 5), (9, 4)]),
        capacity=st.sampled_from([(0, 0), (6, 6), (8, 3)]),
        maximum=st.sampled_from([0, 5]),
        policy=st.sampled_from(["reject", "ring", "ring_strict"]),
        enforcement=st.sampled_from(["channel_flow", "completion", "both"]),
    )
    def start(self, count, size, capacity, maximum, policy, enforcement):
        arguments = {
            "qpid.flow_stop_count": count[0],
            "qpid.flow_resume_count": count[1],
            "qpid.flow_stop_size": size[0],
            "qpid.flow_resume_size": size[1],
            "x-qpid-capacity": capacity[0],
            "x-qpid-flow-resume-capacity": capacity[1],
            "qpid.max_count": maximum,
            "qpid.policy_type": policy,
            "x-qflow-enforcement": enforcement,
        }
        self.queue = make_queue(arguments)
        self.publishers = [Publisher(str(number)) for number in range(PUBLISHERS)]
        self.flows, self.holds = enforcement != "completion", enforcement != "channel_flow"
        self.maximum, self.policy = maximum, policy
        self.families = []
        if count[0] or size[0]:
            self.families.append(
                Family(
                    lambda n, b: 0 < count[0] < n or 0 < size[0] < b,
                    lambda n, b: (not count[0] or n < count[1]) and (not size[0] or b < size[1]),
                    True,
                )
            )
        if capacity[0]:
            self.families.append(Family(lambda n, b: b > capacity[0], lambda n, b: b <= capacity[1], False))
        # Messages in the order of the queue, as (number, size), and the numbers of the unacked ones.
        self.messages = []
        self.unacked = {}
        self.numbers = 0
        self.dropped = 0
        self.completed = []
        self.pending = set()

    def _depth(self):
        return len(self.messages), sum(size for _, size in self.messages)

    def _left(self, number):
        self.messages = [each for each in self.messages if each[0] != number]
        self.unacked.pop(number, None)
        for family in self.families:
            family.held.discard(number)
            family.look(*self._depth())

    @rule(who=st.integers(0, PUBLISHERS - 1), size=st.integers(0, 5))
    def publish(self, who, size):
        full = self.maximum and len(self.messages) >= self.maximum
        refused = full and (
            self.policy == "reject" or (self.policy == "ring_strict" and self.messages[0][0] in self.unacked)
        )
        assert (self.queue.refusal(size) is not None) == bool(refused)
        if refused:
            return
        self.numbers += 1
        number = self.numbers
        completion = Completion(number, self.completed.append)
        self.queue.enqueue(message(size), self.publishers[who], completion)
        if full:
            self.dropped += 1
            self._left(self.messages[0][0])
        self.messages.append((number, size))
        for family in self.families:
            family.look(*self._depth())
            if family.on and self.holds:
                family.held.add(number)
            if self.flows and family.on and (family.holds_all or family.stops(*self._depth())):
                family.blocked.add(who)
        if completion.arm():
            self.completed.append(number)
        self.pending.add(number)

    @precondition(lambda self: self.queue.contents.ready)
    @rule(no_ack=st.booleans())
    def take(self, no_ack):
        entry = self.queue.take(no_ack=no_ack)
        assert entry is not None
        number, size = next(each for each in self.messages if each[0] not in self.unacked)
        assert entry.message.size == size
        if no_ack:
            self._left(number)
        else:
            self.unacked[number] = entry

    @precondition(lambda self: self.unacked)
    @rule(data=st.data(), acked=st.booleans())
    def settle(self, data, acked):
        number = data.draw(st.sampled_from(sorted(self.unacked)))
        self.queue.dispatcher.settle(self.unacked[number], acked=acked)
        self.dropped += not acked
        self._left(number)

    @precondition(lambda self: self.unacked)
    @rule(data=st.data())
    def requeue(self, data):
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.unacked)), unique=True))
        self.queue.dispatcher.requeue([self.unacked.pop(number) for number in numbers])

    @rule()
    def purge(self):
        ready = [number for number, _ in self.messages if number not in self.unacked]
        assert self.queue.purge() == len(ready)
        for number in ready:
            self._left(number)

    @rule(who=st.integers(0, PUBLISHERS - 1))
    def a_publisher_ends(self, who):
        for controller in tuple(self.publishers[who].blocked_by):
            controller.forget(self.publishers[who])
        for family in self.families:
            family.blocked.discard(who)

    @invariant()
    def they_agree(self):
        queue = self.queue
        assert (queue.depth, queue.size) == self._depth()
        assert [entry.message.size for entry in queue.contents.oldest_first()] == [size for _, size in self.messages]
        assert len(queue.contents.ready) == len(self.messages) - len(self.unacked)
        assert queue.contents.dropped == self.dropped
        assert [real.limiter.on for real in queue.flows.families] == [family.on for family in self.families]
        assert queue.flows.times_on == sum(family.times for family in self.families)
        blocked = set().union(*(family.blocked for family in self.families))
        assert {int(source.name) for source in queue.flows.blocked} == blocked
        for number, publisher in enumerate(self.publishers):
            assert publisher.is_blocked == (number in blocked)
            # One notice for each transition, so two notices in a row differ.
            assert publisher.told == [bool(at % 2) for at in range(len(publisher.told))]
            assert len(publisher.told) % 2 == publisher.is_blocked
        held = set().union(*(family.held for family in self.families))
        assert queue.flows.held_confirms == len(held)
        assert sorted(self.completed) == sorted(self.pending - held)


QueueMachine.TestCase.settings = settings(max_examples=rounds(60), stateful_step_count=40)
TestQueue = QueueMachine.TestCase
