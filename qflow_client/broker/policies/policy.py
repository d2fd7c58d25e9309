"""Policies: what a queue does when it is full, set by name for many queues at once and changed while the broker runs.

Where a queue's policy comes from (D3): what is set for the queue itself, by a policy for queues or, where that says
nothing, by the queue's arguments; else by a policy for an exchange and a routing key with which it is bound; else by
policies for the exchanges that its messages come through, the strictest; else by one for the virtual host.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from enum import Enum, StrEnum
from functools import lru_cache
from typing import Any, TypeVar, cast

from qflow_client.broker.core.limits import Inheritance
from qflow_client.broker.core.settings import Enforcement
from qflow_client.broker.policies.patterns import compile_pattern
from qflow_client.flow import StopResume
from qflow_client.redaction import shown

__all__ = ["ApplyTo", "Policies", "Policy", "PolicyDefinition", "QueuePolicy", "choose"]

_Choice = TypeVar("_Choice", bound=Enum)


class QueuePolicy(StrEnum):
    """What a full queue does, the mildest first."""

    #: Take everything; the thresholds hold the producers.
    FLOW = "flow"
    #: Evict bodies to a store.
    FLOW_TO_DISK = "flow_to_disk"
    #: Keep the last message of each key, and drop the oldest at the maximum.
    CONFLATE = "conflate"
    #: Drop the oldest message.
    RING = "ring"
    #: Drop the oldest message unless a consumer has it; then refuse the new one.
    RING_STRICT = "ring_strict"
    #: Let the new message wait for room.
    WAIT = "wait"
    #: Refuse the new message.
    REJECT = "reject"

    @property
    def needs_maximum(self) -> bool:
        """Whether it does nothing without a maximum."""
        return self not in (QueuePolicy.FLOW, QueuePolicy.FLOW_TO_DISK, QueuePolicy.CONFLATE)

    @property
    def has_default_thresholds(self) -> bool:
        """Whether a maximum brings thresholds with it (C4)."""
        return self in (QueuePolicy.FLOW, QueuePolicy.REJECT)


class ApplyTo(StrEnum):
    """What a policy's pattern is about."""

    #: Names of queues.
    QUEUES = "queues"
    #: Names of exchanges, together with the routing keys with which queues are bound to them.
    ROUTING_KEYS = "routing_keys"
    #: Names of exchanges.
    EXCHANGES = "exchanges"
    #: The name of the virtual host.
    VIRTUAL_HOST = "virtual_host"


#: What a queue may turn to after `max_flow_wait`.
_THEN = (QueuePolicy.REJECT, QueuePolicy.RING, QueuePolicy.WAIT)
#: Fields that only make sense together, or with those that go before.
_GROUPS = (
    ("flow_stop_count", "flow_resume_count"),
    ("flow_stop_size", "flow_resume_size"),
    ("capacity", "flow_resume_capacity"),
    ("max_count",),
    ("max_size",),
    ("policy", "conflate_key"),
    ("enforcement",),
    ("max_flow_wait", "then"),
    ("drop_transient",),
)
_NUMBERS = (*_GROUPS[0], *_GROUPS[1], *_GROUPS[2], *_GROUPS[3], *_GROUPS[4])


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyDefinition:
    """What a policy sets; ``None`` for what it says nothing about.

    Attributes:
        policy: what a full queue does.
        max_count: messages; beyond it a queue is full; 0 for no maximum. What flows to disk has so much in memory.
        max_size: body bytes; as `max_count`.
        flow_stop_count: messages; above it the flow state turns ON (C1); 0 for none.
        flow_resume_count: messages; below it the state turns OFF; 7/8 of the stop unless given.
        flow_stop_size: body bytes; as `flow_stop_count`.
        flow_resume_size: body bytes; as `flow_resume_count`.
        capacity: body bytes; above it the state turns ON (J1); 0 for none.
        flow_resume_capacity: body bytes; at it or below the state turns OFF; the capacity unless given.
        enforcement: how producers are held.
        max_flow_wait: seconds; a queue that is ON for longer turns to `then` (D10).
        then: `reject` unless given, `ring` or `wait`, by the maximum or, without one, by the stop thresholds.
        conflate_key: the header that has the key, for `conflate`; the routing key unless given.
        drop_transient: whether messages that are not persistent and that no consumer has may be dropped when memory is
            beyond its limit (A1); they may not unless given.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: one that is not allowed, or two that contradict each other; the text names them.
    """

    policy: QueuePolicy | None = None
    max_count: int | None = None
    max_size: int | None = None
    flow_stop_count: int | None = None
    flow_resume_count: int | None = None
    flow_stop_size: int | None = None
    flow_resume_size: int | None = None
    capacity: int | None = None
    flow_resume_capacity: int | None = None
    enforcement: Enforcement | None = None
    max_flow_wait: float | None = None
    then: QueuePolicy | None = None
    conflate_key: str | None = None
    drop_transient: bool | None = None

    def __post_init__(self) -> None:
        for name, value in _checked({field.name: getattr(self, field.name) for field in fields(self)}, {}).items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_mapping(cls, values: Mapping[str, object], names: Mapping[str, str] | None = None) -> PolicyDefinition:
        """A definition from values by field name.

        Args:
            values: none of them has to be there.
            names: what fields are called in errors, by field name; ``None`` for their own names.

        Raises:
            TypeError: a value of the wrong type.
            ValueError: as of the class, or there is no such field; the text names the nearest.
        """
        known = tuple(field.name for field in fields(cls))
        for name in values:
            if name not in known:
                nearest = get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise ValueError(f"a policy sets no {name!r}; the nearest is {nearest!r}")
        return cls(**cast(dict[str, Any], _checked(values, names or {})))

    @property
    def is_set(self) -> bool:
        """Whether it says anything of when a queue is full, or what it does then."""
        return any(getattr(self, name) is not None for name in (*_NUMBERS, "policy"))

    @property
    def implies_reject(self) -> bool:
        """Whether it sets a maximum, and does not say what happens there."""
        return self.policy is None and bool(self.max_count or self.max_size)

    def over(self, below: PolicyDefinition) -> PolicyDefinition:
        """What it sets, and of what it does not set what another does.

        Args:
            below: the other.
        """
        return _over(self, below)

    @classmethod
    def strictest(cls, definitions: Iterable[PolicyDefinition]) -> PolicyDefinition:
        """The strictest of each thing that is set: the lowest mark, the least patient policy.

        Args:
            definitions: at least one.
        """
        definitions = tuple(definitions)
        values: dict[str, Any] = {}
        for name in (*_NUMBERS, "max_flow_wait"):
            # 0 is none at all, which is the mildest.
            found = [value for each in definitions if (value := getattr(each, name)) is not None]
            values[name] = min((value for value in found if value), default=0 if found else None)
        for stop, resume in _GROUPS[:3]:
            resumes = [each.resume_of(stop, resume) for each in definitions if getattr(each, stop)]
            values[resume] = min(resumes, default=None)
        ranks = list(QueuePolicy)
        for name in ("policy", "then"):
            chosen = [value for each in definitions if (value := getattr(each, name)) is not None]
            if name == "policy" and chosen and any(each.implies_reject for each in definitions):
                chosen.append(QueuePolicy.REJECT)
            values[name] = max(chosen, key=ranks.index, default=None)
        values["conflate_key"] = next(
            (each.conflate_key for each in definitions if each.policy is values["policy"] and each.conflate_key), None
        )
        drops = {each.drop_transient for each in definitions if each.drop_transient is not None}
        values["drop_transient"] = any(drops) if drops else None
        ways = {each.enforcement for each in definitions if each.enforcement is not None}
        values["enforcement"] = ways.pop() if len(ways) == 1 else Enforcement.BOTH if ways else None
        return _fitting(values)

    def resume_of(self, stop_name: str, resume_name: str) -> int:
        """The resume that goes with a stop that it sets: what it says, or what follows from the stop."""
        stop: int = getattr(self, stop_name)
        resume: int | None = getattr(self, resume_name)
        if resume is not None:
            return resume
        return stop if stop_name == "capacity" else cast(int, StopResume(stop).resume_count)

    def _values(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> dict[str, Any]:
        """What it sets, by field name."""
        return {name: value for name, value in self._values().items() if value is not None}


@lru_cache(1024)
def _over(above: PolicyDefinition, below: PolicyDefinition) -> PolicyDefinition:
    """`PolicyDefinition.over`: very many queues have the same arguments."""
    values = above._values()
    for group in _GROUPS:
        if all(values[name] is None for name in group):
            values |= {name: getattr(below, name) for name in group}
    return _fitting(values)


def _fitting(values: dict[str, Any]) -> PolicyDefinition:
    """What was put together from several definitions, which may not fit: a stop goes down to the maximum, and so on."""
    for unit in ("count", "size"):
        stop, maximum = values[f"flow_stop_{unit}"], values[f"max_{unit}"]
        if stop and maximum and values["policy"] is not QueuePolicy.FLOW_TO_DISK:
            values[f"flow_stop_{unit}"] = min(stop, maximum)
    for stop_name, resume_name in _GROUPS[:3]:
        stop, resume = values[stop_name], values[resume_name]
        if resume is not None and stop is not None:
            values[resume_name] = min(stop, resume)
    if values["policy"] is not QueuePolicy.CONFLATE:
        values["conflate_key"] = None
    return PolicyDefinition(**values)


def _checked(values: Mapping[str, object], names: Mapping[str, str]) -> dict[str, object]:
    """The values as they are kept, if they are allowed.

    Args:
        values: by field name.
        names: what fields are called in errors, by field name.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: one that is not allowed, or two that contradict each other.
    """
    found = {name: value for name, value in values.items() if value is not None}

    def named(name: str) -> str:
        value = found[name]
        return f"{names.get(name, name)}={value.value if isinstance(value, Enum) else repr(value)}"

    for name in _NUMBERS:
        value = found.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{named(name)}: it must be an integer, not {type(value).__name__}")
        if value < 0:
            raise ValueError(f"{named(name)}: it must be at least 0")
    kinds: tuple[tuple[str, type[Enum]], ...]
    kinds = ("policy", QueuePolicy), ("then", QueuePolicy), ("enforcement", Enforcement)
    for name, kind in kinds:
        if name in found:
            found[name] = choose(named(name), found[name], kind)
    if not isinstance(found.get("drop_transient", False), bool):
        raise TypeError(f"{named('drop_transient')}: it must be true or false")
    _check_then(found, named)
    if "conflate_key" in found:
        if not isinstance(found["conflate_key"], str) or not found["conflate_key"]:
            raise TypeError(f"{named('conflate_key')}: it must be the name of a header")
        if found.get("policy") is not QueuePolicy.CONFLATE:
            raise ValueError(f"{named('conflate_key')} without {names.get('policy', 'policy')}=conflate")
    for stop, resume in _GROUPS[:2]:
        _check_pair(found, named, stop, names.get(stop, stop), resume)
    capacity, resume_capacity = (cast(int | None, found.get(name)) for name in _GROUPS[2])
    if capacity is not None and resume_capacity is not None and resume_capacity > capacity:
        raise ValueError(
            f"{named('capacity')} and {named('flow_resume_capacity')}: the resume capacity must not be above "
            "the capacity"
        )
    for unit in ("count", "size"):
        stop_value, maximum = (cast(int, found.get(name, 0)) for name in (f"flow_stop_{unit}", f"max_{unit}"))
        # Of what flows to disk, the maximum is only what is in memory.
        if maximum and stop_value > maximum and found.get("policy") is not QueuePolicy.FLOW_TO_DISK:
            raise ValueError(
                f"{named(f'flow_stop_{unit}')} and {named(f'max_{unit}')}: the stop must not be above the maximum"
            )
    return found


def choose(named: str, value: object, kind: type[_Choice]) -> _Choice:
    """The member of an enumeration that a value stands for.

    Args:
        named: the name and the value, for the error.
        value: what was given.
        kind: the enumeration.

    Raises:
        ValueError: there is none; the text names all that there are.
    """
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(member.value for member in kind)
        raise ValueError(f"{named}: it must be one of {allowed}") from None


def _check_then(found: Mapping[str, object], named: Callable[[str], str]) -> None:
    wait = found.get("max_flow_wait")
    if wait is not None:
        if not isinstance(wait, (int, float)) or isinstance(wait, bool):
            raise TypeError(f"{named('max_flow_wait')}: it must be a number of seconds")
        if not 0 < wait < float("inf"):
            raise ValueError(f"{named('max_flow_wait')}: it must be more than 0 seconds")
    if "then" in found:
        if wait is None:
            raise ValueError(f"{named('then')} without a time after which: set max_flow_wait too")
        if found["then"] not in _THEN:
            raise ValueError(f"{named('then')}: it must be one of {', '.join(each.value for each in _THEN)}")


def _check_pair(
    found: Mapping[str, object], named: Callable[[str], str], stop_name: str, stop_named: str, resume_name: str
) -> None:
    if resume_name not in found:
        return
    if stop_name not in found:
        raise ValueError(f"{named(resume_name)} without {stop_named}: set {stop_named} too")
    stop, resume = cast(int, found[stop_name]), cast(int, found[resume_name])
    if stop < resume:
        raise ValueError(f"{named(stop_name)} and {named(resume_name)}: the stop must not be below the resume")
    if stop > 0 and resume < 1:
        raise ValueError(
            f"{named(stop_name)} and {named(resume_name)}: the resume must be at least 1, or it is never met"
        )


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy with a name, for all queues that it applies to, those that come later too.

    Patterns are regular expressions that may match anywhere: ``^orders`` for what begins so, ``^orders$`` for that one.
    What cannot be matched in linear time, such as back references and word boundaries, is refused.

    Attributes:
        name: of the policy.
        definition: what it sets; or a mapping of that by field name.
        pattern: of what `apply_to` says.
        apply_to: what the pattern is about.
        routing_key: a pattern of the routing keys with which queues are bound; only for `routing_keys`.
        priority: of several for queues, for routing keys or for the virtual host, the one with the highest counts; of
            several with the highest, the strictest of each thing that is set.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: one that is not allowed; the text names it.
    """

    name: str
    definition: PolicyDefinition
    pattern: str = ""
    apply_to: ApplyTo = ApplyTo.QUEUES
    routing_key: str | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name={shown(self.name)}: a policy must have a name")
        if isinstance(self.definition, Mapping):
            object.__setattr__(self, "definition", PolicyDefinition.from_mapping(self.definition))
        if not isinstance(self.definition, PolicyDefinition):
            raise TypeError(f"definition={shown(self.definition)}: it must be a PolicyDefinition or a mapping")
        if self.definition == PolicyDefinition():
            raise ValueError(f"policy {shown(self.name)} sets nothing; give it a definition")
        if self.definition.flow_resume_capacity is not None and self.definition.capacity is None:
            raise ValueError("flow_resume_capacity without capacity: set capacity too")
        apply_to = choose(f"apply_to={shown(self.apply_to)}", self.apply_to, ApplyTo)
        object.__setattr__(self, "apply_to", apply_to)
        if not isinstance(self.priority, int) or isinstance(self.priority, bool):
            raise TypeError(f"priority={shown(self.priority)}: it must be an integer")
        if (self.routing_key is not None) is not (apply_to is ApplyTo.ROUTING_KEYS):
            raise ValueError(
                f"routing_key={shown(self.routing_key)} with apply_to={apply_to.value}: "
                "it is for routing_keys, which must have it"
            )
        for name in ("pattern", "routing_key"):
            pattern = getattr(self, name)
            if pattern is not None:
                try:
                    compile_pattern(pattern)
                except (TypeError, ValueError) as error:
                    raise ValueError(f"{name}={shown(pattern)}: {error}") from None

    @classmethod
    def parse(cls, text: str) -> Policy:
        """A policy as one types it: its name and ``key=value`` for what it sets, as in ``"slow max_count=9"``.

        Args:
            text: keys are those of this class and of `PolicyDefinition`; quotes as in a shell.

        Raises:
            TypeError: a value of the wrong type.
            ValueError: it is not of that form, or as of the class.
        """
        name, *pairs = shlex.split(text) or [""]
        values: dict[str, Any] = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals or key in values:
                raise ValueError(f"{shown(pair)}: a policy is given as NAME KEY=VALUE KEY=VALUE…, each key once")
            values[key] = value
        for key, kind in (("priority", int), ("max_flow_wait", float), *((number, int) for number in _NUMBERS)):
            if key in values:
                try:
                    values[key] = kind(values[key])
                except ValueError:
                    raise ValueError(f"{key}={shown(values[key])}: it must be a number") from None
        if "drop_transient" in values:
            # What is neither is refused by its name.
            values["drop_transient"] = {"true": True, "false": False}.get(
                values["drop_transient"], values["drop_transient"]
            )
        own = {key: values.pop(key) for key in ("pattern", "apply_to", "routing_key", "priority") if key in values}
        return cls(name, PolicyDefinition.from_mapping(values), **own)

    def matches(self, name: str) -> bool:
        """Whether its pattern matches a name."""
        return compile_pattern(self.pattern).search(name)

    def matches_binding(self, exchange: str, routing_key: str) -> bool:
        """Whether its patterns match an exchange and a routing key."""
        return self.matches(exchange) and compile_pattern(self.routing_key or "").search(routing_key)

    def to_json(self) -> dict[str, Any]:
        """It as JSON can tell it; what it was made of."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return own | {"apply_to": self.apply_to.value, "definition": self.definition.to_json()}


class Policies:
    """The policies of a virtual host.

    Args:
        virtual_host: its name.
        policies: to begin with.
    """

    def __init__(self, virtual_host: str, policies: Iterable[Policy] = ()) -> None:
        self._virtual_host = virtual_host
        self._by_name = {policy.name: policy for policy in policies}

    def __iter__(self) -> Any:
        return iter(tuple(self._by_name.values()))

    @property
    def are_inherited(self) -> bool:
        """Whether any of them reaches queues by their bindings."""
        return any(policy.apply_to in (ApplyTo.ROUTING_KEYS, ApplyTo.EXCHANGES) for policy in self)

    def set(self, policy: Policy) -> None:
        """Add a policy, or replace the one of that name."""
        self._by_name[policy.name] = policy

    def delete(self, name: str) -> None:
        """Remove a policy.

        Raises:
            LookupError: there is none of that name.
        """
        if name not in self._by_name:
            there = ", ".join(self._by_name) or "none"
            raise LookupError(f"there is no policy {name!r}; there are: {there}")
        del self._by_name[name]

    def definition_for(
        self, queue: str, own: PolicyDefinition, inheritance: Callable[[], Inheritance], *, is_set: bool
    ) -> tuple[PolicyDefinition, tuple[str, ...]]:
        """What applies to a queue, and the names of the policies that say so (D3).

        Args:
            queue: its name.
            own: what its arguments say.
            inheritance: gives where its messages come from.
            is_set: whether its arguments say when it is full, or what it does then.
        """
        if not self._by_name:
            return own, ()
        chosen = self._foremost(ApplyTo.QUEUES, lambda policy: policy.matches(queue))
        if chosen:
            return self._strictest(chosen).over(own), _names(chosen)
        if is_set:
            return own, ()
        for apply_to in (ApplyTo.ROUTING_KEYS, ApplyTo.EXCHANGES, ApplyTo.VIRTUAL_HOST):
            chosen = self._inherited(apply_to, inheritance)
            if chosen:
                # How producers are held may be a queue's own affair.
                return own.over(self._strictest(chosen)), _names(chosen)
        return own, ()

    def _inherited(self, apply_to: ApplyTo, inheritance: Callable[[], Inheritance]) -> tuple[Policy, ...]:
        if apply_to is ApplyTo.VIRTUAL_HOST:
            return self._foremost(apply_to, lambda policy: policy.matches(self._virtual_host))
        if not any(policy.apply_to is apply_to for policy in self):
            return ()
        ways = inheritance()
        if apply_to is ApplyTo.ROUTING_KEYS:
            return self._foremost(apply_to, lambda policy: any(policy.matches_binding(*way) for way in ways.bindings))
        found: set[Policy] = set()
        for exchange in ways.exchanges:
            found.update(self._foremost(apply_to, lambda policy: policy.matches(exchange)))  # noqa: B023
        return tuple(policy for policy in self if policy in found)

    def _foremost(self, apply_to: ApplyTo, matches: Callable[[Policy], bool]) -> tuple[Policy, ...]:
        """Those that match with the highest priority."""
        found = [policy for policy in self if policy.apply_to is apply_to and matches(policy)]
        highest = max((policy.priority for policy in found), default=0)
        return tuple(policy for policy in found if policy.priority == highest)

    @staticmethod
    def _strictest(policies: Iterable[Policy]) -> PolicyDefinition:
        return PolicyDefinition.strictest(policy.definition for policy in policies)


def _names(policies: Iterable[Policy]) -> tuple[str, ...]:
    return tuple(policy.name for policy in policies)
