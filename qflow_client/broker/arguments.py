"""Queue arguments: what ``Queue.Declare`` may ask for, and the thresholds and limits that come of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TypeVar

from qflow_client.broker.errors import ChannelException, ReplyCode
from qflow_client.broker.policy import FullPolicy, Reject, Ring
from qflow_client.broker.settings import BrokerSettings, Enforcement
from qflow_client.flow import Capacity, StopResume, Thresholds

__all__ = ["PolicyType", "QueueLimits"]

FLOW_STOP_COUNT = "qpid.flow_stop_count"
FLOW_RESUME_COUNT = "qpid.flow_resume_count"
FLOW_STOP_SIZE = "qpid.flow_stop_size"
FLOW_RESUME_SIZE = "qpid.flow_resume_size"
MAX_COUNT = "qpid.max_count"
MAX_SIZE = "qpid.max_size"
POLICY_TYPE = "qpid.policy_type"
CAPACITY = "x-qpid-capacity"
FLOW_RESUME_CAPACITY = "x-qpid-flow-resume-capacity"
ENFORCEMENT = "x-qflow-enforcement"


_Choice = TypeVar("_Choice", bound=Enum)


class PolicyType(StrEnum):
    """What a queue does at its maximum (Qpid C++'s ``qpid.policy_type``)."""

    #: Refuse the new message.
    REJECT = "reject"
    #: Drop the oldest message.
    RING = "ring"
    #: Drop the oldest message unless a consumer has it; then refuse the new one.
    RING_STRICT = "ring_strict"


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What a queue's arguments and the broker's defaults come to.

    Attributes:
        stop_resume: Qpid C++'s thresholds (C1 C2).
        capacity: Qpid Java's (J1 J2).
        max_count: messages; 0 for no maximum.
        max_size: body bytes; 0 for no maximum.
        policy_type: what happens at the maximum.
        enforcement: how producers are held.
    """

    stop_resume: StopResume
    capacity: Capacity
    max_count: int
    max_size: int
    policy_type: PolicyType
    enforcement: Enforcement

    @classmethod
    def from_arguments(cls, queue: str, arguments: Mapping[str, object], settings: BrokerSettings) -> QueueLimits:
        """Read a queue's arguments; those not named here are left to whoever declared them.

        Args:
            queue: the queue's name, for messages.
            arguments: as declared.
            settings: the broker's defaults (C4, J2).

        Raises:
            ChannelException: 406; a value of the wrong type, with the argument and the value named, or two that
                contradict each other, with both values named.
        """
        reader = _Reader(queue, arguments)
        max_count = reader.count(MAX_COUNT) or 0
        max_size = reader.count(MAX_SIZE) or 0
        policy_type = reader.choice(POLICY_TYPE, PolicyType, PolicyType.REJECT)
        enforcement = reader.choice(ENFORCEMENT, Enforcement, settings.enforcement)
        stop_count, resume_count = reader.count(FLOW_STOP_COUNT), reader.count(FLOW_RESUME_COUNT)
        stop_size, resume_size = reader.count(FLOW_STOP_SIZE), reader.count(FLOW_RESUME_SIZE)
        reader.check_pair(FLOW_STOP_COUNT, stop_count, FLOW_RESUME_COUNT, resume_count)
        reader.check_pair(FLOW_STOP_SIZE, stop_size, FLOW_RESUME_SIZE, resume_size)
        if stop_count is None and stop_size is None:
            if policy_type is PolicyType.REJECT:
                stop_resume = StopResume.from_limits(
                    max_count,
                    max_size,
                    stop_percent=settings.default_flow_stop_threshold,
                    resume_percent=settings.default_flow_resume_threshold,
                )
            else:
                stop_resume = StopResume()
        else:
            stop_resume = StopResume(stop_count or 0, resume_count, stop_size or 0, resume_size)
        reader.check_maximum(FLOW_STOP_COUNT, stop_count, MAX_COUNT, max_count)
        reader.check_maximum(FLOW_STOP_SIZE, stop_size, MAX_SIZE, max_size)
        return cls(
            stop_resume,
            cls._capacity(reader, settings),
            max_count,
            max_size,
            policy_type,
            enforcement,
        )

    @staticmethod
    def _capacity(reader: _Reader, settings: BrokerSettings) -> Capacity:
        capacity, resume = reader.count(CAPACITY), reader.count(FLOW_RESUME_CAPACITY)
        if capacity is None:
            capacity = settings.capacity
            if resume is None:
                return Capacity(settings.capacity, settings.flow_resume_capacity)
        if resume is not None and resume > capacity:
            raise reader.refuse(
                f"{CAPACITY}={capacity} and {FLOW_RESUME_CAPACITY}={resume}: the resume capacity must not be above "
                "the capacity"
            )
        return Capacity(capacity, resume)

    @property
    def thresholds(self) -> tuple[Thresholds, ...]:
        """The families of marks that are set."""
        return tuple(marks for marks in (self.stop_resume, self.capacity) if marks.is_set)

    @property
    def full_policy(self) -> FullPolicy | None:
        """What keeps the queue within its maximum; ``None`` if there is none."""
        if not self.max_count and not self.max_size:
            return None
        if self.policy_type is PolicyType.REJECT:
            return Reject(self.max_count, self.max_size)
        return Ring(self.max_count, self.max_size, strict=self.policy_type is PolicyType.RING_STRICT)


class _Reader:
    def __init__(self, queue: str, arguments: Mapping[str, object]) -> None:
        self._queue = queue
        self._arguments = arguments

    def refuse(self, text: str) -> ChannelException:
        return ChannelException(ReplyCode.PRECONDITION_FAILED, f"queue '{self._queue}': {text}")

    def count(self, name: str) -> int | None:
        value = self._arguments.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.refuse(f"{name}={value!r}: it must be an integer, not {type(value).__name__}")
        if value < 0:
            raise self.refuse(f"{name}={value}: it must be at least 0")
        return value

    def choice(self, name: str, kind: type[_Choice], default: _Choice) -> _Choice:
        value = self._arguments.get(name)
        if value is None:
            return default
        try:
            return kind(value)
        except ValueError:
            allowed = ", ".join(member.value for member in kind)
            raise self.refuse(f"{name}={value!r}: it must be one of {allowed}") from None

    def check_pair(self, stop_name: str, stop: int | None, resume_name: str, resume: int | None) -> None:
        if resume is None:
            return
        if stop is None:
            raise self.refuse(f"{resume_name}={resume} without {stop_name}: set {stop_name} too")
        if stop < resume:
            raise self.refuse(f"{stop_name}={stop} and {resume_name}={resume}: the stop must not be below the resume")
        if stop > 0 and resume < 1:
            raise self.refuse(
                f"{stop_name}={stop} and {resume_name}={resume}: the resume must be at least 1, or it is never met"
            )

    def check_maximum(self, stop_name: str, stop: int | None, max_name: str, maximum: int) -> None:
        if stop and maximum and stop > maximum:
            raise self.refuse(f"{stop_name}={stop} and {max_name}={maximum}: the stop must not be above the maximum")
