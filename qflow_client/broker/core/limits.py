"""The limits of one queue: its flow thresholds, its maximum, and its other options.

`Rules` create a `QueueRule` for each new queue, and the `QueueRule` computes the limits. The core has only
`PlainRules`, with the same rule for all queues. Only the rules of `broker.policies` read arguments and policies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from qflow_client.broker.core.overflow import Overflow
from qflow_client.broker.core.settings import Enforcement, Settings
from qflow_client.flow import Capacity, StopResume, Thresholds

__all__ = ["Inheritance", "PlainRules", "QueueLimits", "QueueOptions", "QueueRule", "Rules"]


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """The values of RabbitMQ's queue arguments, except those for the maximum.

    Attributes:
        message_ttl: time to live of a message in the queue, in seconds; ``None`` for no limit.
        expires: seconds without use after which the queue is deleted; ``None`` to keep an unused queue.
        dead_letter_exchange: exchange for messages that are rejected, expire, or are dropped because of the maximum;
            ``None`` for none.
        dead_letter_routing_key: routing key of dead letters; ``None`` for the routing key of the dead message.
        single_active_consumer: whether only the oldest consumer gets messages.
    """

    message_ttl: float | None = None
    expires: float | None = None
    dead_letter_exchange: str | None = None
    dead_letter_routing_key: str | None = None
    single_active_consumer: bool = False


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The limits of a queue, which come from its arguments, its policies and the broker's defaults.

    When you add thresholds, also change `to_json`, `thresholds`, `ThresholdsSnapshot` and `_thresholds_snapshot`.

    Attributes:
        stop_resume: the thresholds of Qpid C++ (C1 C2).
        capacity: the thresholds of Qpid Java (J1 J2).
        overflow: the overflow policy with its maximum; ``None`` for no overflow policy.
        enforcement: how the queue holds back producers while it is ON.
        policy: name of the overflow policy, for snapshots and logs: `overflow.name` if `overflow` is not ``None``.
        max_flow_wait: maximum seconds for which a queue that is ON holds back producers; ``None`` for no limit.
        overdue_overflow: the overflow policy after the queue was ON for `max_flow_wait`; called ``then`` in policies.
        policies: the names of the operator's policies that apply to the queue.
        drop_transient: whether non-persistent messages may be dropped when memory exceeds its limit (A1).
    """

    stop_resume: StopResume
    capacity: Capacity
    overflow: Overflow | None
    enforcement: Enforcement
    policy: str = "flow"
    max_flow_wait: float | None = None
    overdue_overflow: Overflow | None = None
    policies: tuple[str, ...] = ()
    drop_transient: bool = False

    def to_json(self) -> dict[str, object]:
        """Return the limits that are set. The keys are the names of the limits in an operator's policy."""
        marks = self.stop_resume
        overflow = self.overflow or Overflow()
        numbers = {
            "flow_stop_count": marks.stop_count,
            "flow_resume_count": marks.resume_count,
            "flow_stop_size": marks.stop_size,
            "flow_resume_size": marks.resume_size,
            "capacity": self.capacity.capacity,
            "flow_resume_capacity": self.capacity.resume,
            "max_count": overflow.max_count,
            "max_size": overflow.max_size,
            "max_flow_wait": self.max_flow_wait,
        }
        told: dict[str, object] = {name: value for name, value in numbers.items() if value}
        told |= {"policy": str(self.policy), "enforcement": self.enforcement.value}
        if self.drop_transient:
            told["drop_transient"] = True
        return told if self.overdue_overflow is None else told | {"then": str(self.overdue_overflow.name)}

    @property
    def thresholds(self) -> tuple[Thresholds, ...]:
        return tuple(marks for marks in (self.stop_resume, self.capacity) if marks.is_set)


@dataclass(frozen=True, slots=True)
class Inheritance:
    """The exchanges that route to a queue.

    Attributes:
        bindings: the exchanges that the queue is bound to, each with the routing key.
        exchanges: all exchanges from which bindings lead to the queue, directly or through other exchanges.
    """

    bindings: tuple[tuple[str, str], ...]
    exchanges: tuple[str, ...]


class QueueRule(Protocol):
    """Computes the limits of one queue from its arguments, and from the current policies of the operator."""

    @property
    def options(self) -> QueueOptions:
        """The options of the queue, which never change."""

    def limits(self, inheritance: Callable[[], Inheritance]) -> QueueLimits:
        """Return the current limits.

        Args:
            inheritance: returns the exchanges that route to the queue.

        Raises:
            ChannelException: 406 if the arguments contradict the broker's settings or features.
        """


class Rules(Protocol):
    """Creates the `QueueRule` of each new queue."""

    @property
    def are_inherited(self) -> bool:
        """Whether the limits of a queue can depend on its bindings."""

    def rule_for(self, queue: str, arguments: Mapping[str, object]) -> QueueRule:
        """Return the rule of a new queue.

        Raises:
            ChannelException: 406 if the arguments are refused.
        """


class PlainRules:
    """The same limits for every queue: the broker's capacity (J1 J2), and no maximum. Arguments have no effect."""

    are_inherited = False
    options = QueueOptions()

    def __init__(self, settings: Settings) -> None:
        capacity = Capacity(settings.capacity, settings.flow_resume_capacity)
        self._limits = QueueLimits(StopResume(), capacity, None, settings.enforcement)

    def rule_for(self, queue: str, arguments: Mapping[str, object]) -> PlainRules:
        return self

    def limits(self, inheritance: Callable[[], Inheritance]) -> QueueLimits:
        return self._limits
