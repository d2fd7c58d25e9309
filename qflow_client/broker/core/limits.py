"""What is in force for one queue: its marks, its maximum, and what else it was declared with.

`Rules` make these from a queue's name and arguments; the core comes with `PlainRules`, which take the broker's settings
and know no arguments. The room `qflow_client.broker.policies` has the rules that read arguments and policies.
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
    """RabbitMQ's arguments other than those for the maximum.

    Attributes:
        message_ttl: seconds that a message may wait in the queue; ``None`` for ever.
        expires: seconds that the queue may be unused; ``None`` for ever.
        dead_letter_exchange: where messages go that are rejected, expire or are dropped; ``None`` for nowhere.
        dead_letter_routing_key: with which routing key; ``None`` for the one that they came with.
        single_active_consumer: whether only the oldest consumer is given messages.
    """

    message_ttl: float | None = None
    expires: float | None = None
    dead_letter_exchange: str | None = None
    dead_letter_routing_key: str | None = None
    single_active_consumer: bool = False


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What a queue's arguments, policies and the broker's defaults come to.

    Attributes:
        stop_resume: Qpid C++'s thresholds (C1 C2).
        capacity: Qpid Java's (J1 J2).
        overflow: the maximum and what happens at it; ``None`` for no maximum.
        enforcement: how producers are held.
        policy: what the queue does when it is full, for people.
        max_flow_wait: seconds that it may be ON; ``None`` for any number.
        then: what keeps it within its maximum after that.
        policies: the names of the policies that apply to it.
        drop_transient: whether messages that are not persistent may be dropped when memory is beyond its limit (A1).
    """

    stop_resume: StopResume
    capacity: Capacity
    overflow: Overflow | None
    enforcement: Enforcement
    policy: str = "flow"
    max_flow_wait: float | None = None
    then: Overflow | None = None
    policies: tuple[str, ...] = ()
    drop_transient: bool = False

    def to_json(self) -> dict[str, object]:
        """What is set, by the names that policies have for it."""
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
        return told if self.then is None else told | {"then": str(self.then.name)}

    @property
    def thresholds(self) -> tuple[Thresholds, ...]:
        """The families of marks that are set."""
        return tuple(marks for marks in (self.stop_resume, self.capacity) if marks.is_set)


@dataclass(frozen=True, slots=True)
class Inheritance:
    """Where a queue's messages come from.

    Attributes:
        bindings: exchanges to which it is bound, each with the routing key.
        exchanges: all that lead to it, through others too.
    """

    bindings: tuple[tuple[str, str], ...]
    exchanges: tuple[str, ...]


class QueueRule(Protocol):
    """What one queue was declared with, and what an operator has set for it since."""

    @property
    def options(self) -> QueueOptions:
        """What does not change while the queue is there."""

    def limits(self, inheritance: Callable[[], Inheritance]) -> QueueLimits:
        """What is in force now.

        Args:
            inheritance: gives where the queue's messages come from.

        Raises:
            ChannelException: 406; it contradicts the broker's settings, or what the broker has.
        """


class Rules(Protocol):
    """Decide what is in force for each queue."""

    @property
    def are_inherited(self) -> bool:
        """Whether any of them reaches queues by their bindings."""

    def rule_for(self, queue: str, arguments: Mapping[str, object]) -> QueueRule:
        """The rule of a new queue.

        Args:
            queue: its name.
            arguments: as declared.

        Raises:
            ChannelException: 406; arguments are refused.
        """


class PlainRules:
    """The same marks for every queue: the broker's capacity (J2), and no maximum. Arguments are kept, without effect.

    Args:
        settings: the broker's.
    """

    are_inherited = False
    options = QueueOptions()

    def __init__(self, settings: Settings) -> None:
        capacity = Capacity(settings.capacity, settings.flow_resume_capacity)
        self._limits = QueueLimits(StopResume(), capacity, None, settings.enforcement)

    def rule_for(self, queue: str, arguments: Mapping[str, object]) -> PlainRules:
        """The one rule that all queues have."""
        return self

    def limits(self, inheritance: Callable[[], Inheritance]) -> QueueLimits:
        """What is in force for every queue."""
        return self._limits
