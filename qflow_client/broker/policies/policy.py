"""A policy sets limits of queues, and what a full queue does. Policies can be changed at run time.

A queue takes each value from the first of these sources that sets the value (D3). Of the sources 3 to 5, only the first
that has a matching policy applies. None of the three applies if a policy for queues matches, or if the arguments set a
maximum, a threshold, a capacity or a policy.

1. policies for queues
2. the arguments of the queue
3. policies for an exchange and a routing key of the queue's bindings
4. policies for exchanges that route messages to the queue; with several exchanges, the strictest values apply
5. policies for the virtual host
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
from qflow_client.flow.thresholds import check_capacity, check_resume
from qflow_client.redaction import shown

__all__ = ["MARKS", "PAIRS", "ApplyTo", "Policies", "Policy", "PolicyDefinition", "QueuePolicy", "choose"]

_Choice = TypeVar("_Choice", bound=Enum)


class QueuePolicy(StrEnum):
    """What a full queue does. The members are in the order from the least strict to the most strict."""

    #: Accept every message. The flow thresholds of the queue can block its producers.
    FLOW = "flow"
    #: Accept every message. Keep bodies up to the maximum in memory, and further bodies only on disk.
    FLOW_TO_DISK = "flow_to_disk"
    #: Keep the last message of each key. At the maximum, drop the oldest messages.
    CONFLATE = "conflate"
    #: Drop the oldest messages. Refuse a message that is larger than the maximum size.
    RING = "ring"
    #: Like `RING`, but if a message that must be dropped is unacked, refuse the new message instead.
    RING_STRICT = "ring_strict"
    #: Make the new message wait for room. Refuse a message that is larger than the maximum size.
    WAIT = "wait"
    #: Refuse the new message.
    REJECT = "reject"

    @property
    def needs_maximum(self) -> bool:
        """Whether the policy has an effect only if the queue has a maximum."""
        return self not in (QueuePolicy.FLOW, QueuePolicy.FLOW_TO_DISK, QueuePolicy.CONFLATE)

    @property
    def has_default_thresholds(self) -> bool:
        """Whether a queue with this policy and a maximum has default flow thresholds (C4)."""
        return self in (QueuePolicy.FLOW, QueuePolicy.REJECT)


class ApplyTo(StrEnum):
    """The kind of names with which a policy's pattern is compared."""

    #: Names of queues.
    QUEUES = "queues"
    #: Names of exchanges. `Policy.routing_key` is compared with the routing keys that bind queues to these exchanges.
    ROUTING_KEYS = "routing_keys"
    #: Names of exchanges that route messages to a queue, directly or through other exchanges.
    EXCHANGES = "exchanges"
    #: The name of the virtual host.
    VIRTUAL_HOST = "virtual_host"


#: The allowed values of `then`: the policies for a queue that has been ON for longer than `max_flow_wait`.
_THEN = (QueuePolicy.REJECT, QueuePolicy.RING, QueuePolicy.WAIT)
#: Pairs of fields: a stop threshold or the capacity, and its resume threshold or resume capacity.
PAIRS = (
    ("flow_stop_count", "flow_resume_count"),
    ("flow_stop_size", "flow_resume_size"),
    ("capacity", "flow_resume_capacity"),
)
#: Names of the marks: the thresholds and capacities that operators can change at run time (D4).
MARKS = tuple(name for pair in PAIRS for name in pair)
#: Groups of fields. A queue takes all fields of a group from the same source.
_GROUPS = (
    *PAIRS,
    ("max_count",),
    ("max_size",),
    ("policy", "conflate_key"),
    ("enforcement",),
    ("max_flow_wait", "then"),
    ("drop_transient",),
)
_NUMBERS = (*MARKS, "max_count", "max_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyDefinition:
    """The values that a policy sets. A value that the policy does not set is ``None``.

    Attributes:
        policy: what the queue does when it is full.
        max_count: maximum number of messages; 0 for no maximum. With `flow_to_disk` this is the maximum number of
            bodies in memory.
        max_size: maximum body bytes of messages; 0 for no maximum. With `flow_to_disk` this is the maximum for bodies
            in memory.
        flow_stop_count: number of messages above which the queue turns ON (C1); 0 for no threshold.
        flow_resume_count: number of messages below which the queue turns OFF. The default is 7/8 of the stop threshold.
        flow_stop_size: body bytes above which the queue turns ON (C1); 0 for no threshold.
        flow_resume_size: body bytes below which the queue turns OFF. The default is 7/8 of the stop threshold.
        capacity: body bytes above which the queue turns ON (J1); 0 for no capacity.
        flow_resume_capacity: body bytes at or below which the queue turns OFF. The default is the capacity.
        enforcement: how the queue holds back its producers while it is ON.
        max_flow_wait: maximum seconds for which the queue holds back its producers. If the queue is ON for longer, it
            lets the producers continue, and has the policy `then` until it turns OFF (D10).
        then: policy of a queue that was ON for longer than `max_flow_wait`: `reject` (the default), `ring` or `wait`.
            If there is no maximum, this policy uses the stop thresholds or the capacity as the maximum.
        conflate_key: name of the header that contains the key for `conflate`. The default is the routing key.
        drop_transient: whether the broker may drop ready, non-persistent messages if memory exceeds its limit (A1). The
            default is no.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is not allowed, or two values contradict each other. The error contains the values.
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
        """Create a definition from a mapping.

        Args:
            values: the values, with the names of the fields as keys. All values are optional.
            names: the names to show in errors, by field name; ``None`` to show the field names.

        Raises:
            TypeError: a value has the wrong type.
            ValueError: a value is not allowed or contradicts another value, or a key is not the name of a field.
        """
        known = tuple(field.name for field in fields(cls))
        for name in values:
            if name not in known:
                nearest = get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise ValueError(f"a policy has no {name!r}; did you mean {nearest!r}?")
        return cls(**cast(dict[str, Any], _checked(values, names or {})))

    @property
    def is_set(self) -> bool:
        """Whether the definition sets a maximum, a threshold, a capacity or the field `policy`."""
        return any(getattr(self, name) is not None for name in (*_NUMBERS, "policy"))

    @property
    def implies_reject(self) -> bool:
        """Whether the policy is `reject` because the definition sets a maximum, but not the field `policy`."""
        return self.policy is None and bool(self.max_count or self.max_size)

    def over(self, below: PolicyDefinition) -> PolicyDefinition:
        """Combine two definitions. If `self` sets no field of a group (see `_GROUPS`), take the group from `below`."""
        return _over(self, below)

    @classmethod
    def strictest(cls, definitions: Iterable[PolicyDefinition]) -> PolicyDefinition:
        """Combine definitions. Each field gets its strictest value, such as the lowest threshold."""
        definitions = tuple(definitions)
        values: dict[str, Any] = {}
        for name in (*_NUMBERS, "max_flow_wait"):
            # The value 0 means no limit, so every other value is stricter.
            found = [value for each in definitions if (value := getattr(each, name)) is not None]
            values[name] = min((value for value in found if value), default=0 if found else None)
        for stop, resume in PAIRS:
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
        """Return a resume threshold. If the definition does not set it, return the default for its stop threshold."""
        stop: int = getattr(self, stop_name)
        resume: int | None = getattr(self, resume_name)
        if resume is not None:
            return resume
        return stop if stop_name == "capacity" else cast(int, StopResume(stop).resume_count)

    def to_json(self) -> dict[str, Any]:
        """Return the values that the definition sets, with the names of the fields as keys."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@lru_cache(1024)
def _over(above: PolicyDefinition, below: PolicyDefinition) -> PolicyDefinition:
    """Do the work of `PolicyDefinition.over`. Results are cached, because many queues have the same arguments."""
    values = asdict(above)
    for group in _GROUPS:
        if all(values[name] is None for name in group):
            values |= {name: getattr(below, name) for name in group}
    return _fitting(values)


def _fitting(values: dict[str, Any]) -> PolicyDefinition:
    """Create a definition from values of several sources. Change values that contradict each other.

    For example, a stop threshold above the maximum is reduced to the maximum.
    """
    for unit in ("count", "size"):
        stop, maximum = values[f"flow_stop_{unit}"], values[f"max_{unit}"]
        if stop and maximum and values["policy"] is not QueuePolicy.FLOW_TO_DISK:
            values[f"flow_stop_{unit}"] = min(stop, maximum)
    for stop_name, resume_name in PAIRS:
        stop, resume = values[stop_name], values[resume_name]
        if resume is not None and stop is not None:
            values[resume_name] = min(stop, resume)
    if values["policy"] is not QueuePolicy.CONFLATE:
        values["conflate_key"] = None
    return PolicyDefinition(**values)


def _checked(values: Mapping[str, object], names: Mapping[str, str]) -> dict[str, object]:
    """Check and convert values. `names` maps field names to the names that errors show instead."""
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
    for stop_name, resume_name in PAIRS:
        if resume_name not in found:
            continue
        stop_title, resume_title = names.get(stop_name, stop_name), names.get(resume_name, resume_name)
        if stop_name in found:
            check = check_capacity if stop_name == "capacity" else check_resume
            check(stop_title, cast(int, found[stop_name]), resume_title, cast(int, found[resume_name]))
        elif stop_name != "capacity":
            raise ValueError(f"{named(resume_name)} without {stop_title}: set {stop_title} too")
    for unit in ("count", "size"):
        stop_value, maximum = (cast(int, found.get(name, 0)) for name in (f"flow_stop_{unit}", f"max_{unit}"))
        # With `flow_to_disk` the maximum limits only bodies in memory, so a stop threshold may be above the maximum.
        if maximum and stop_value > maximum and found.get("policy") is not QueuePolicy.FLOW_TO_DISK:
            raise ValueError(
                f"{named(f'flow_stop_{unit}')} and {named(f'max_{unit}')}: the stop must not be above the maximum"
            )
    return found


def choose(named: str, value: object, kind: type[_Choice]) -> _Choice:
    """Return the member of an enumeration for a value.

    Args:
        named: name and value to show in the error.

    Raises:
        ValueError: no member has this value. The error contains all allowed values.
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
            raise ValueError(f"{named('then')} has no effect without max_flow_wait: set max_flow_wait, or remove then")
        if found["then"] not in _THEN:
            raise ValueError(f"{named('then')}: it must be one of {', '.join(each.value for each in _THEN)}")


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy with a name, for existing and future queues.

    A pattern is a regular expression, and matches a name if any part of the name matches. For example, ``^orders``
    matches all names that begin with orders, and ``^orders$`` matches only the name orders. Some features of regular
    expressions, such as back references and word boundaries, are refused, so that matching takes linear time.

    Attributes:
        name: name of the policy.
        definition: the values that the policy sets. A mapping is converted to a `PolicyDefinition`.
        pattern: regular expression for the names to which the policy applies.
        apply_to: kind of the names with which the pattern is compared.
        routing_key: regular expression for the routing keys of bindings. It must be set if `apply_to` is
            `routing_keys`, and must not be set otherwise.
        priority: if several policies with the same `apply_to` match, the policy with the highest priority applies. If
            several have the highest priority, the strictest value of each field applies. If `apply_to` is `exchanges`,
            this selection is made for each exchange. The strictest values of all selected policies apply.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is not allowed. The error contains the value.
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
                "set routing_key if apply_to=routing_keys, and only then"
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
        """Create a policy from a text: the name and ``key=value`` pairs, such as ``"slow max_count=9"``.

        Args:
            text: text to parse. The keys are attributes of `Policy` and `PolicyDefinition`. Quotes work as in a shell.

        Raises:
            TypeError: a value has the wrong type.
            ValueError: the text has the wrong form, or a value is not allowed.
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
            # Keep a text that is neither "true" nor "false", so that `PolicyDefinition` refuses it with a clear error.
            values["drop_transient"] = {"true": True, "false": False}.get(
                values["drop_transient"], values["drop_transient"]
            )
        own = {key: values.pop(key) for key in ("pattern", "apply_to", "routing_key", "priority") if key in values}
        return cls(name, PolicyDefinition.from_mapping(values), **own)

    def matches(self, name: str) -> bool:
        return compile_pattern(self.pattern).search(name)

    def matches_binding(self, exchange: str, routing_key: str) -> bool:
        return self.matches(exchange) and compile_pattern(self.routing_key or "").search(routing_key)

    def to_json(self) -> dict[str, Any]:
        """Return the policy as JSON types. ``Policy(**result)`` creates an equal policy."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return own | {"apply_to": self.apply_to.value, "definition": self.definition.to_json()}


class Policies:
    """The policies of a virtual host."""

    def __init__(self, virtual_host: str, policies: Iterable[Policy] = ()) -> None:
        self._virtual_host = virtual_host
        self._by_name = {policy.name: policy for policy in policies}

    def __iter__(self) -> Any:
        return iter(tuple(self._by_name.values()))

    @property
    def are_inherited(self) -> bool:
        """Whether the bindings of a queue can decide which policies apply to the queue."""
        return any(policy.apply_to in (ApplyTo.ROUTING_KEYS, ApplyTo.EXCHANGES) for policy in self)

    def set(self, policy: Policy) -> None:
        self._by_name[policy.name] = policy

    def delete(self, name: str) -> None:
        """Remove a policy. Raise `LookupError` if no policy has this name."""
        if name not in self._by_name:
            there = ", ".join(self._by_name) or "none"
            raise LookupError(f"there is no policy {name!r}; the policies are: {there}")
        del self._by_name[name]

    def definition_for(
        self, queue: str, own: PolicyDefinition, inheritance: Callable[[], Inheritance], *, is_set: bool
    ) -> tuple[PolicyDefinition, tuple[str, ...]]:
        """Return the definition that applies to a queue, and the names of the policies that it comes from (D3).

        Args:
            own: definition from the arguments of the queue.
            inheritance: function that returns the queue's bindings and the exchanges that route to the queue.
            is_set: see `QueueArguments.is_set`.
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
                # The arguments set no limit, but their other values, such as the enforcement, have priority.
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
        found = [policy for policy in self if policy.apply_to is apply_to and matches(policy)]
        highest = max((policy.priority for policy in found), default=0)
        return tuple(policy for policy in found if policy.priority == highest)

    @staticmethod
    def _strictest(policies: Iterable[Policy]) -> PolicyDefinition:
        return PolicyDefinition.strictest(policy.definition for policy in policies)


def _names(policies: Iterable[Policy]) -> tuple[str, ...]:
    return tuple(policy.name for policy in policies)
