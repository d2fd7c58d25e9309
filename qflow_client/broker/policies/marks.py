"""Computes the marks of a queue: the thresholds and capacities that operators change at run time (D4)."""

from __future__ import annotations

from collections.abc import Mapping

from qflow_client.broker.core.errors import ChannelException, ReplyCode
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.policies.policy import PAIRS, PolicyDefinition
from qflow_client.broker.policies.rules import rule_of

__all__ = ["steered"]


def steered(queue: Queue, marks: Mapping[str, int | None]) -> PolicyDefinition:
    """Return the marks of a queue after a change: the new marks, and the marks that operators have set earlier.

    Args:
        marks: new values. The keys are names in `MARKS`. A mark that is not in this mapping keeps its value. ``None``
            for a resume mark means 7/8 of its stop mark. ``None`` for a resume capacity means the capacity. A stop mark
            or capacity of 0 also turns off its resume value.

    Raises:
        ChannelException: 406 if a value is not allowed, or if the marks contradict each other or the queue's maximum.
    """
    limits = queue.limits
    stop_resume, capacity = limits.stop_resume, limits.capacity
    asked: dict[str, int | None] = {
        "flow_stop_count": stop_resume.stop_count,
        "flow_resume_count": stop_resume.resume_count,
        "flow_stop_size": stop_resume.stop_size,
        "flow_resume_size": stop_resume.resume_size,
        "capacity": capacity.capacity,
        "flow_resume_capacity": capacity.resume,
    }
    for stop, resume in PAIRS:
        # If the stop mark is 0, leave out the resume mark, which would be refused because it is above the stop mark.
        if not asked[stop] or marks.get(stop) == 0:
            asked[resume] = None
    asked |= marks
    maximum = limits.overflow
    try:
        # Skip RabbitMQ's maximum, because it counts only ready messages. Marks count unacked messages too.
        if maximum is not None and maximum is not rule_of(queue).own.overflow:
            PolicyDefinition.from_mapping({**asked, "max_count": maximum.max_count, "max_size": maximum.max_size})
        touched = {name for pair in PAIRS for name in pair if any(each in marks for each in pair)}
        now = PolicyDefinition.from_mapping({name: asked[name] for name in touched})
    except (TypeError, ValueError) as error:
        raise ChannelException(ReplyCode.PRECONDITION_FAILED, f"queue '{queue.name}': {error}") from None
    return now.over(rule_of(queue).steered)
