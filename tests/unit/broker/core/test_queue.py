from __future__ import annotations

import gc

import pytest

from qflow_client.broker.core.entries import Completion, DropReason
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.queueflow import QueueFlow
from tests.interleavings import Stepwise

from ..tools import Publisher, make_queue, message, run_all


class Taker:
    is_active = False
    can_take = True

    def __init__(self, *, no_ack=False):
        self.no_ack = no_ack
        self.entries = []
        self.is_cancelled = False

    def deliver(self, entry):
        self.entries.append(entry)

    def cancelled_by_queue(self):
        self.is_cancelled = True


def fill(queue, sizes, publisher=None):
    for size in sizes:
        queue.enqueue(message(size), publisher)
    return queue


@pytest.mark.parametrize(("depth", "on"), [(9, False), (10, False), (11, True)])
def test_C1_the_state_turns_ON_when_there_are_more_messages_than_the_stop_count(depth, on):
    queue = fill(make_queue({"qpid.flow_stop_count": 10}), [1] * depth)
    assert queue.flows.is_on is on
    assert queue.flows.times_on == on


@pytest.mark.parametrize(("size", "on"), [(99, False), (100, False), (101, True)])
def test_C1_the_state_turns_ON_when_there_are_more_bytes_than_the_stop_size(size, on):
    assert fill(make_queue({"qpid.flow_stop_size": 100}), [size]).flows.is_on is on


@pytest.mark.parametrize(("left", "on"), [(6, True), (5, True), (4, False)])
def test_C1_the_state_turns_OFF_when_there_are_fewer_messages_than_the_resume_count(left, on):
    queue = fill(make_queue({"qpid.flow_stop_count": 10, "qpid.flow_resume_count": 5}), [1] * 11)
    for _ in range(11 - left):
        queue.take(no_ack=True)
    assert queue.flows.is_on is on


@pytest.mark.parametrize(("left", "on"), [(51, True), (50, True), (49, False)])
def test_C1_the_state_turns_OFF_when_there_are_fewer_bytes_than_the_resume_size(left, on):
    queue = fill(make_queue({"qpid.flow_stop_size": 100, "qpid.flow_resume_size": 50}), [101 - left, left])
    queue.take(no_ack=True)
    assert (queue.size, queue.flows.is_on) == (left, on)


BOTH = {
    "qpid.flow_stop_count": 3,
    "qpid.flow_resume_count": 2,
    "qpid.flow_stop_size": 100,
    "qpid.flow_resume_size": 50,
}


@pytest.mark.parametrize(
    ("sizes", "on"),
    [
        pytest.param([33, 33], False, id="count and bytes below"),
        pytest.param([33, 33, 33], False, id="count at, bytes below"),
        pytest.param([100], False, id="count below, bytes at"),
        pytest.param([33, 33, 34], False, id="count and bytes at"),
        pytest.param([1, 1, 1, 1], True, id="count above, bytes below"),
        pytest.param([25, 25, 25, 25], True, id="count above, bytes at"),
        pytest.param([101], True, id="count below, bytes above"),
        pytest.param([33, 33, 35], True, id="count at, bytes above"),
        pytest.param([26, 25, 25, 25], True, id="count and bytes above"),
    ],
)
def test_C1_exceeding_the_stop_count_or_the_stop_size_turns_the_state_ON(sizes, on):
    assert fill(make_queue(BOTH), sizes).flows.is_on is on


@pytest.mark.parametrize(
    ("left", "on"),
    [
        pytest.param([49], False, id="count and bytes below"),
        pytest.param([50], True, id="count below, bytes at"),
        pytest.param([51], True, id="count below, bytes above"),
        pytest.param([25, 24], True, id="count at, bytes below"),
        pytest.param([25, 25], True, id="count and bytes at"),
        pytest.param([25, 26], True, id="count at, bytes above"),
        pytest.param([1, 1, 1], True, id="count above, bytes below"),
        pytest.param([20, 20, 11], True, id="count and bytes above"),
        pytest.param([], False, id="empty"),
    ],
)
def test_C1_both_resume_thresholds_must_be_met_to_turn_the_state_OFF(left, on):
    queue = fill(make_queue(BOTH), [101, *left])
    assert queue.flows.is_on
    queue.take(no_ack=True)
    assert queue.flows.is_on is on


@pytest.mark.parametrize(("depth", "on"), [(7, False), (8, False), (9, True)])
def test_C4_a_maximum_count_gives_a_stop_threshold_of_80_percent(depth, on):
    assert fill(make_queue({"qpid.max_count": 10}), [1] * depth).flows.is_on is on


@pytest.mark.parametrize(("left", "on"), [(8, True), (7, True), (6, False)])
def test_C4_a_maximum_count_gives_a_resume_threshold_of_70_percent(left, on):
    queue = fill(make_queue({"qpid.max_count": 10}), [1] * 9)
    for _ in range(9 - left):
        queue.take(no_ack=True)
    assert queue.flows.is_on is on


@pytest.mark.parametrize(("size", "on"), [(799, False), (800, False), (801, True)])
def test_C4_a_maximum_size_gives_a_stop_threshold_of_80_percent(size, on):
    assert fill(make_queue({"qpid.max_size": 1000}), [size]).flows.is_on is on


@pytest.mark.parametrize(("left", "on"), [(701, True), (700, True), (699, False)])
def test_C4_a_maximum_size_gives_a_resume_threshold_of_70_percent(left, on):
    queue = fill(make_queue({"qpid.max_size": 1000}), [900 - left, left])
    queue.take(no_ack=True)
    assert queue.flows.is_on is on


def test_C2_with_stop_and_resume_thresholds_of_2_the_state_turns_ON_at_3_messages_and_OFF_at_1():
    queue = make_queue({"qpid.flow_stop_count": 2, "qpid.flow_resume_count": 2})
    fill(queue, [1, 1, 1])
    assert queue.flows.is_on
    queue.take(no_ack=True)
    assert queue.flows.is_on
    queue.take(no_ack=True)
    assert not queue.flows.is_on


# Qpid Java's capacities, as arguments of a queue and as defaults of the virtual host.
CAPACITIES = pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        pytest.param({"x-qpid-capacity": 100, "x-qpid-flow-resume-capacity": 60}, {}, id="queue"),
        pytest.param({}, {"capacity": 100, "flow_resume_capacity": 60}, id="virtual host"),
    ],
)


@CAPACITIES
@pytest.mark.parametrize(("size", "on"), [(99, False), (100, False), (101, True)])
def test_J1_J2_a_queue_is_ON_above_its_capacity(arguments, settings, size, on):
    publisher = Publisher()
    queue = fill(make_queue(arguments, **settings), [size], publisher)
    assert queue.flows.is_on is on
    assert publisher.told == ([False] if on else [])


@CAPACITIES
@pytest.mark.parametrize(("left", "on"), [(61, True), (60, False), (59, False)])
def test_J1_J2_a_queue_is_OFF_at_its_resume_capacity(arguments, settings, left, on):
    publisher = Publisher()
    queue = fill(make_queue(arguments, **settings), [101 - left, left], publisher)
    queue.take(no_ack=True)
    assert queue.flows.is_on is on
    assert publisher.told == ([False] if on else [False, True])


def test_J2_a_queue_capacity_of_0_means_no_limit():
    queue = fill(make_queue({"x-qpid-capacity": 0}), [10**6])
    assert not queue.flows.is_on
    assert not queue.is_watched


def test_J3_a_publisher_is_not_flowed_while_the_queue_is_between_its_resume_capacity_and_its_capacity():
    first, second = Publisher("first"), Publisher("second")
    queue = make_queue({"x-qpid-capacity": 100, "x-qpid-flow-resume-capacity": 50})
    fill(queue, [60, 41], first)
    queue.take(no_ack=True)
    fill(queue, [1], second)
    assert queue.flows.is_on is False
    fill(queue, [59], first)
    queue.take(no_ack=True)
    assert (queue.size, queue.flows.is_on) == (60, True)
    fill(queue, [1], second)
    assert (first.told, second.told) == ([False, True, False], [])


def test_C1_every_publisher_to_a_queue_with_stop_thresholds_in_state_ON_is_flowed():
    first, second = Publisher("first"), Publisher("second")
    queue = make_queue({"qpid.flow_stop_count": 2, "qpid.flow_resume_count": 1})
    fill(queue, [1, 1, 1], first)
    queue.take(no_ack=True)
    fill(queue, [1], second)
    assert (first.told, second.told) == ([False], [False])
    assert queue.flows.blocked == (first, second)


def test_a_queue_with_stop_thresholds_and_a_capacity_unflows_publishers_only_when_both_allow_it():
    publisher = Publisher()
    queue = make_queue({"qpid.flow_stop_count": 2, "qpid.flow_resume_count": 2, "x-qpid-capacity": 100})
    fill(queue, [1, 1, 101], publisher)
    assert queue.flows.times_on == 2
    assert publisher.told == [False]
    queue.take(no_ack=True)
    queue.take(no_ack=True)
    # One message is left, fewer than the resume count, but its bytes are still above the capacity.
    assert (queue.flows.is_on, publisher.told) == (True, [False])
    queue.take(no_ack=True)
    assert (queue.flows.is_on, publisher.told) == (False, [False, True])


def ack(queue):
    entry = queue.take(no_ack=False)
    assert queue.flows.is_on
    queue.dispatcher.settle(entry, acked=True)


def reject(queue):
    entry = queue.take(no_ack=False)
    assert queue.flows.is_on
    queue.dispatcher.settle(entry, acked=False)


def consume_no_ack(queue):
    taker = Taker(no_ack=True)
    queue.dispatcher.add(taker, exclusive=False)
    queue.dispatcher.dispatch()


SHRINKERS = [
    ack,
    reject,
    consume_no_ack,
    lambda queue: queue.take(no_ack=True),
    lambda queue: queue.dropping.drop(next(queue.contents.oldest_first()), DropReason.MAXLEN),
    Queue.purge,
    Queue.delete,
]


@pytest.mark.parametrize(
    "shrink", SHRINKERS, ids=["ack", "reject", "consumed no_ack", "get no_ack", "ring drop", "purge", "delete"]
)
@pytest.mark.parametrize(
    "arguments",
    [
        {"qpid.flow_stop_count": 2, "qpid.flow_resume_count": 3 - 1},
        {"qpid.flow_stop_size": 2, "qpid.flow_resume_size": 2},
        {"x-qpid-capacity": 2, "x-qpid-flow-resume-capacity": 1},
    ],
    ids=["count", "size", "capacity"],
)
def test_J6_every_way_in_which_messages_leave_a_queue_can_unflow_publishers(shrink, arguments):
    publisher = Publisher()
    confirmed: list[int] = []
    queue = make_queue(arguments)
    fill(queue, [1, 1], publisher)
    completion = Completion(7, confirmed.append)
    queue.enqueue(message(1), publisher, completion)
    assert not completion.arm()
    queue.take(no_ack=True)
    assert (publisher.told, queue.flows.is_on) == ([False], True)
    shrink(queue)
    assert (publisher.told, queue.flows.is_on) == ([False, True], False)
    assert queue.flows.blocked == ()
    # C5: the withheld confirms are released.
    assert confirmed == [7]
    assert queue.flows.held_confirms == 0


@pytest.mark.parametrize("taken", [1, 2, 3])
@pytest.mark.parametrize("step", ["taken", "blocked"])
@pytest.mark.parametrize(
    "arguments", [{"qpid.flow_stop_count": 2, "qpid.flow_resume_count": 2}, {"x-qpid-capacity": 2}]
)
def test_J5_a_publisher_is_unflowed_if_the_queue_shrinks_while_the_publisher_is_being_flowed(arguments, step, taken):
    class Interrupted(Stepwise, QueueFlow):
        """A queue from which messages leave while it blocks their publisher."""

        def offer(self, source, size, now):
            for done in self.offer_steps(source, size, now):
                if done == step:
                    for _ in range(taken):
                        queue.take(no_ack=True)
            return source in self._blocked

    publisher = Publisher()
    queue = make_queue(arguments)
    queue.flows.families = tuple(
        Interrupted(flow.limiter.thresholds, "q", run=run_all) for flow in queue.flows.families
    )
    fill(queue, [1, 1, 1], publisher)
    assert queue.depth == 3 - taken
    assert publisher.is_blocked is queue.flows.is_on
    assert queue.flows.blocked == ((publisher,) if queue.flows.is_on else ())


def test_J6_delivering_and_requeueing_a_message_do_not_change_the_depth_of_the_queue():
    publisher = Publisher()
    queue = fill(make_queue({"qpid.flow_stop_count": 1, "qpid.flow_resume_count": 1}), [1, 1], publisher)
    entries = [queue.take(no_ack=False), queue.dispatcher.take(no_ack=False)]
    assert (queue.depth, len(queue.contents.ready), queue.flows.is_on) == (2, 0, True)
    queue.dispatcher.requeue(entries)
    assert (queue.depth, len(queue.contents.ready), queue.flows.is_on) == (2, 2, True)
    assert publisher.told == [False]


@pytest.mark.parametrize(
    ("enforcement", "told", "holds"), [("completion", [], 1), ("channel_flow", [False], 0), ("both", [False], 1)]
)
def test_the_enforcement_of_a_queue_decides_whether_it_flows_publishers_and_whether_it_withholds_confirms(
    enforcement, told, holds
):
    publisher = Publisher()
    completion = Completion(1, print)
    queue = make_queue({"qpid.flow_stop_count": 1, "x-qflow-enforcement": enforcement})
    fill(queue, [1], publisher)
    queue.enqueue(message(), publisher, completion)
    assert (publisher.told, completion.holds) == (told, holds)


def test_C5_a_message_is_not_confirmed_before_it_was_offered_to_all_of_its_queues():
    completed: list[int] = []
    completion = Completion(7, completed.append)
    completion.holds = 1
    completion.release()
    assert completed == []
    assert completion.arm()


def test_messages_that_are_requeued_together_keep_their_order():
    queue = make_queue()
    for size in range(1, 7):
        queue.enqueue(message(size))
    taken = [queue.take(no_ack=False) for _ in range(4)]
    queue.dispatcher.requeue([taken[2], taken[0]])
    assert [entry.message.size for entry in queue.contents.ready] == [1, 3, 5, 6]
    queue.dispatcher.requeue([taken[3], taken[1]])
    assert [entry.message.size for entry in queue.contents.ready] == [1, 2, 3, 4, 5, 6]
    assert [entry.redelivered for entry in queue.contents.ready] == [True] * 4 + [False] * 2
    assert queue.contents.unacked == {}


def test_a_queue_serves_its_consumers_round_robin_and_skips_consumers_that_cannot_accept_a_message():
    queue = make_queue()
    takers = [Taker(), Taker(), Taker()]
    for taker in takers:
        queue.dispatcher.add(taker, exclusive=False)
    takers[1].can_take = False
    fill(queue, [1] * 4)
    queue.dispatcher.dispatch()
    assert [len(taker.entries) for taker in takers] == [2, 0, 2]
    takers[1].can_take = True
    fill(queue, [1] * 2)
    queue.dispatcher.dispatch()
    assert len(takers[1].entries) == 0
    queue.dispatcher.wake(takers[1])
    fill(queue, [1] * 3)
    queue.dispatcher.dispatch()
    assert [len(taker.entries) for taker in takers] == [4, 1, 4]


def test_a_deleted_queue_notifies_its_consumers_and_ignores_their_acks():
    queue = make_queue()
    taker = Taker()
    queue.dispatcher.add(taker, exclusive=False)
    fill(queue, [1])
    queue.dispatcher.dispatch()
    queue.delete()
    list(queue.dispatcher.cancel_all_in_steps())
    assert taker.is_cancelled
    queue.dispatcher.settle(taker.entries[0], acked=True)
    queue.dispatcher.requeue(taker.entries)
    assert (queue.depth, queue.size, queue.dispatcher.acked) == (0, 0, 0)


@pytest.mark.parametrize(("count", "refused"), [(9, False), (10, True)])
def test_a_reject_queue_refuses_messages_beyond_the_maximum_count(count, refused):
    queue = fill(make_queue({"qpid.max_count": 10}), [1] * count)
    assert (queue.refusal(1) is not None) is refused


@pytest.mark.parametrize(("size", "refused"), [(9, False), (10, False), (11, True)])
def test_a_reject_queue_refuses_messages_beyond_the_maximum_size(size, refused):
    queue = fill(make_queue({"qpid.max_size": 20}), [10])
    assert (queue.refusal(size) is not None) is refused


def test_unacked_messages_count_for_the_maximum_of_a_queue():
    queue = fill(make_queue({"qpid.max_count": 1}), [1])
    entry = queue.take(no_ack=False)
    assert "full" in queue.refusal(1)
    queue.dispatcher.settle(entry, acked=True)
    assert queue.refusal(1) is None


def test_a_ring_queue_drops_the_oldest_message():
    queue = fill(make_queue({"qpid.max_count": 3, "qpid.policy_type": "ring"}), [1, 2, 3, 4, 5])
    assert [entry.message.size for entry in queue.contents.ready] == [3, 4, 5]
    assert (queue.depth, queue.contents.dropped, queue.contents.peak_depth) == (3, 2, 3)


def test_a_ring_queue_drops_as_many_messages_as_the_maximum_size_requires():
    queue = fill(make_queue({"qpid.max_size": 10, "qpid.policy_type": "ring"}), [3, 3, 3, 8])
    assert [entry.message.size for entry in queue.contents.ready] == [8]
    assert queue.contents.dropped == 3
    assert "larger than queue 'q'" in queue.refusal(11)


def test_a_ring_queue_drops_the_oldest_message_even_if_it_is_unacked():
    queue = fill(make_queue({"qpid.max_count": 2, "qpid.policy_type": "ring"}), [1, 2])
    entry = queue.take(no_ack=False)
    fill(queue, [3])
    assert entry.is_gone
    queue.dispatcher.settle(entry, acked=True)
    assert (queue.depth, queue.contents.dropped, queue.dispatcher.acked) == (2, 1, 0)


def test_a_ring_strict_queue_refuses_messages_while_the_oldest_message_is_unacked():
    queue = fill(make_queue({"qpid.max_count": 2, "qpid.policy_type": "ring_strict"}), [1, 2])
    assert queue.refusal(1) is None
    entry = queue.take(no_ack=False)
    assert "message that a consumer has not acknowledged yet" in queue.refusal(1)
    queue.dispatcher.settle(entry, acked=True)
    assert queue.refusal(1) is None
    fill(queue, [3, 4])
    assert [entry.message.size for entry in queue.contents.ready] == [3, 4]


MARKED = {"qpid.flow_stop_count": 1, "x-message-ttl": 10, "x-dead-letter-exchange": "x"}


@pytest.mark.parametrize("arguments", [{}, MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize("depth", [0, 2, 2500])
def test_a_deleted_queue_is_freed_without_the_garbage_collector(arguments, depth):
    gc.disable()
    try:
        # From now on new objects are in the young generation.
        gc.collect(0)
        queue = fill(make_queue(arguments), [1] * depth, Publisher())
        queue.delete()
        list(queue.dispatcher.cancel_all_in_steps())
        while queue._tick_at <= queue._clock():
            queue.tick(queue._clock())
        # Timers that were set before still fire.
        queue.tick(float("inf"))
        del queue
        assert not any(type(each) is Queue for each in gc.get_objects(generation=0))
    finally:
        gc.enable()
