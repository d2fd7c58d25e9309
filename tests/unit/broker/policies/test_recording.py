"""The records that the broker writes to a flow log. Without a flow log recording costs nothing."""

from __future__ import annotations

from typing import Any

import pytest
from pamqp import commands

from qflow_client.broker.core.contents import Contents
from qflow_client.broker.core.settings import Enforcement
from qflow_client.broker.policies.policy import Policy, PolicyDefinition
from qflow_client.broker.policies.recording import FlowRecorder


def _recorded(make_world, **options):
    world = make_world(**options)
    lines: list[dict[str, Any]] = []
    world.host.observe(FlowRecorder(lines.append, lambda: world.now, lambda: world.now + 1000.0, names=_who))
    return world, lines


def _who(source):
    return f"{source.session.name}/p", source.session.name


def _of(lines, kind, **fields):
    return [
        line for line in lines if line["kind"] == kind and all(line.get(key) == value for key, value in fields.items())
    ]


ARGUMENTS = {"qpid.flow_stop_count": 2, "qpid.flow_resume_count": 1}


def _get(client, count=1):
    for _ in range(count):
        client.send(1, commands.Basic.Get(queue="q", no_ack=True))
    client.raw_output()


def test_a_queue_is_observed_only_if_the_broker_writes_a_flow_log(make_world) -> None:
    world = make_world()
    world.client().channel().declare()
    assert not world.queue().is_watched
    recorded, _ = _recorded(make_world)
    recorded.client().channel().declare()
    assert recorded.queue().is_watched


def test_J4_the_flow_log_shows_which_channel_waits_for_which_queue_and_which_channel_filled_the_queue(
    make_world,
) -> None:
    world, lines = _recorded(make_world)
    one, two = world.client().channel().with_queue(arguments=ARGUMENTS), world.client().channel()
    one.publish(b"abc", times=2)
    world.now = 1.0
    two.publish(b"ab")
    (on,) = _of(lines, "on")
    assert (on["at"], on["queue"], on["depth"], on["bytes"]) == (1_001_000_000, "q", 3, 8)
    (raised,) = _of(lines, "raised")
    assert (raised["producer"], raised["connection"], raised["queue"]) == ("client-2/p", "client-2", "q")
    assert (raised["reason"], raised["since"]) == ("channel_flow", 1_001_000_000)
    world.tick(3.0)
    (held,) = _of(lines, "held")
    assert (held["begun"], held["at"]) == (1_001_000_000, 1_003_000_000)
    assert held["causes"] == {"client-1/p": 1_333_334, "client-2/p": 666_666}
    world.now = 4.0
    _get(one, 3)
    (lifted,) = _of(lines, "lifted")
    assert (lifted["since"], lifted["begun"], lifted["at"]) == (1_001_000_000, 1_003_000_000, 1_004_000_000)
    assert sum(lifted["causes"].values()) == 1_000_000
    (off,) = _of(lines, "off")
    assert (off["since"], off["peak"], off["overshoot"], off["peak_bytes"]) == (1_001_000_000, 3, 1, 8)
    # Messages that are published later do not change the recorded wait.
    two.publish(b"ab", times=3)
    world.now = 5.0
    _get(two, 3)
    assert _of(lines, "lifted")[-1]["causes"] == {"client-2/p": 1_000_000}


def test_C5_withheld_confirms_are_recorded_in_the_flow_log_as_a_wait_of_their_own(make_world) -> None:
    world, lines = _recorded(make_world)
    client = world.client().channel(confirms=True)
    client.declare(arguments={**ARGUMENTS, "x-qflow-enforcement": "completion"})
    client.publish(times=4)
    assert [line["reason"] for line in _of(lines, "raised")] == ["completion"]
    world.now = 2.0
    _get(client, 4)
    (lifted,) = _of(lines, "lifted")
    assert (lifted["reason"], lifted["at"] - lifted["since"]) == ("completion", 2_000_000)


def test_C5_the_flow_log_records_the_end_of_a_wait_when_the_last_withheld_confirm_is_sent_by_a_queue_that_is_ON(
    make_world,
) -> None:
    world, lines = _recorded(make_world)
    client = world.client().channel(confirms=True)
    client.declare(arguments={**ARGUMENTS, "x-qflow-enforcement": "completion"})
    for _ in range(4):
        client.publish()
    # The queue stays ON, because two messages are not acknowledged.
    for _ in range(2):
        world.queue().take(no_ack=False)
    world.now = 1.0
    _get(client)
    assert _of(lines, "lifted") == []
    world.now = 2.0
    _get(client)
    (lifted,) = _of(lines, "lifted")
    assert (lifted["reason"], lifted["at"] - lifted["since"]) == ("completion", 2_000_000)
    assert world.queue().flows.is_on


def test_C5_D4_the_flow_log_records_the_release_of_confirms_by_a_change_of_enforcement(make_world) -> None:
    world, lines = _recorded(make_world)
    client = world.client().channel(confirms=True)
    client.declare(arguments={**ARGUMENTS, "x-qflow-enforcement": "completion"})
    client.publish(times=4)
    world.now = 1.0
    world.set_policy(Policy("p", PolicyDefinition(enforcement=Enforcement.CHANNEL_FLOW, flow_stop_count=2)))
    assert len(client.names()) == 1
    (lifted,) = _of(lines, "lifted")
    assert (lifted["reason"], lifted["at"] - lifted["since"]) == ("completion", 1_000_000)
    # The queue is still ON.
    assert _of(lines, "off") == []


def test_a_broker_accepts_only_one_flow_log_recorder(make_world) -> None:
    world, _ = _recorded(make_world)
    with pytest.raises(RuntimeError, match="already has an observer, a FlowRecorder"):
        world.host.observe(FlowRecorder(print, lambda: 0.0, lambda: 0.0))


def test_the_flow_log_records_one_wait_if_two_thresholds_of_one_queue_block_a_channel(make_world) -> None:
    world, lines = _recorded(make_world)
    client = world.client().channel()
    client.declare(arguments={**ARGUMENTS, "x-qpid-capacity": 4, "x-qpid-flow-resume-capacity": 0})
    client.publish(b"ab", times=3)
    world.now = 1.0
    _get(client, 3)
    assert [line["kind"] for line in lines if line.get("reason")] == ["raised", "lifted"]


def test_the_recorded_depth_samples_add_up_to_the_messages_that_were_enqueued_and_dequeued(make_world) -> None:
    world, lines = _recorded(make_world)
    client = world.client().channel().with_queue(arguments=ARGUMENTS)
    for second in range(1, 6):
        client.publish(b"abc", times=second)
        world.now = float(second)
        _get(client, 2)
        world.host.timers.tick(world.now)
    samples = _of(lines, "depth")
    assert [line["depth"] for line in samples] == [0, 0, 1, 3, 6]
    assert [line["peak"] for line in samples] == [1, 2, 3, 5, 8]
    assert sum(line["arrived"] for line in samples) == sum(line["arrivals"]["client-1/p"] for line in samples) == 15
    assert sum(line["left"] for line in samples) == 9
    assert sum(line["arrived_bytes"] - line["left_bytes"] for line in samples) == world.queue().size
    assert [line["us"] for line in samples[1:]] == [1_000_000] * 4
    assert {(line["stop"], line["resume"]) for line in samples} == {(2, 1)}


def test_no_depth_samples_are_recorded_for_an_empty_idle_queue(make_world) -> None:
    world, lines = _recorded(make_world)
    client = world.client().channel().with_queue()
    client.publish()
    _get(client)
    for second in range(1, 6):
        world.tick(float(second))
    assert len(_of(lines, "depth")) == 1


def test_the_flow_log_records_the_end_of_a_wait_when_its_channel_ends_or_its_queue_is_deleted(make_world) -> None:
    world, lines = _recorded(make_world)
    one, two = world.client().channel(confirms=True), world.client().channel(confirms=True)
    one.declare(arguments=ARGUMENTS)
    for _ in range(3):
        one.publish()
        two.publish()
    one.send(1, commands.Channel.Close(0, "", 0, 0))
    assert len(_of(lines, "lifted", producer="client-1/p")) == len(_of(lines, "raised", producer="client-1/p")) == 2
    world.now = 1.0
    two.send(1, commands.Queue.Delete(queue="q"))
    assert len(_of(lines, "lifted")) == len(_of(lines, "raised"))
    assert len(_of(lines, "off")) == 1
    assert _of(lines, "depth")[-1]["left"] == 6
    count = len(lines)
    world.tick(2.0)
    assert len(lines) == count


def test_C5_the_deletion_of_a_queue_ends_no_recorded_wait_for_a_new_queue_with_the_same_name(make_world) -> None:
    world, lines = _recorded(make_world)
    old, new = (world.client().channel(confirms=True) for _ in range(2))
    declared = {"arguments": {**ARGUMENTS, "x-qflow-enforcement": "completion"}, "exclusive": True}
    old.declare(**declared)
    old.publish()
    # The queues of a lost connection are deleted in slices. Their names are free before.
    with world.host.slices.together():
        old.session.lost()
        new.declare(**declared)
        new.publish(times=4)
    assert [line["connection"] for line in _of(lines, "raised")] == ["client-2"]
    assert _of(lines, "lifted") == []
    _get(new, 4)
    assert [line["connection"] for line in _of(lines, "lifted")] == ["client-2"]


def test_the_last_line_of_a_deleted_queue_in_the_flow_log_counts_messages_that_are_still_leaving(make_world) -> None:
    world, lines = _recorded(make_world)
    client = world.client().channel().with_queue()
    count = 2 * Contents.AT_ONCE
    client.publish(b"ab", times=count)
    queue = world.queue()
    client.call(1, commands.Queue.Delete(queue="q"), commands.Queue.DeleteOk)
    client.declare()
    client.publish(b"new")
    assert queue.depth == count - Contents.AT_ONCE
    world.tick(1.0)
    last, new = _of(lines, "depth")
    assert (queue.depth, last["depth"], last["bytes"], last["left"], last["left_bytes"]) == (0, 0, 0, count, 2 * count)
    assert (new["depth"], new["arrived"], new["left"]) == (1, 1, 0)


def test_D5_a_channel_stopped_by_an_operator_is_recorded_in_the_flow_log_without_a_queue(make_world) -> None:
    world, lines = _recorded(make_world)
    client = world.client().channel().with_queue()
    client.publish()
    channel = client.session.channels[1]
    channel.flow.block(world.controls.operator)
    channel.flow.unblock(world.controls.operator)
    assert [(line["kind"], line["queue"], line["reason"]) for line in lines] == [
        ("raised", "", "operator"),
        ("lifted", "", "operator"),
    ]
