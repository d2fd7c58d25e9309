"""Reads the arguments of ``Queue.Declare``, and computes the limits of the queue.

Arguments of Qpid and of this broker set the same values as policies, and are read as a `PolicyDefinition`. Arguments of
RabbitMQ can also set a maximum. With a maximum of RabbitMQ, a queue has no default thresholds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum

from qflow_client.broker.core.errors import ChannelException, ReplyCode
from qflow_client.broker.core.limits import QueueLimits, QueueOptions
from qflow_client.broker.core.overflow import Overflow
from qflow_client.broker.core.settings import Settings
from qflow_client.broker.policies.overflow import DropHead, RejectPublish, make_overflow
from qflow_client.broker.policies.policy import PolicyDefinition, QueuePolicy, choose
from qflow_client.flow import Capacity, StopResume

__all__ = ["QueueArguments", "XOverflow", "read_options", "resolve_limits"]

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
POLICY = "x-qflow-policy"
MAX_FLOW_WAIT = "x-qflow-max-flow-wait"
THEN = "x-qflow-then"
CONFLATE_KEY = "x-qflow-conflate-key"
DROP_TRANSIENT = "x-qflow-drop-transient"

# For each field of a policy, the argument that sets the same value.
_FIELDS = {
    "flow_stop_count": FLOW_STOP_COUNT,
    "flow_resume_count": FLOW_RESUME_COUNT,
    "flow_stop_size": FLOW_STOP_SIZE,
    "flow_resume_size": FLOW_RESUME_SIZE,
    "max_count": MAX_COUNT,
    "max_size": MAX_SIZE,
    "capacity": CAPACITY,
    "flow_resume_capacity": FLOW_RESUME_CAPACITY,
    "enforcement": ENFORCEMENT,
    "policy": POLICY,
    "max_flow_wait": MAX_FLOW_WAIT,
    "then": THEN,
    "conflate_key": CONFLATE_KEY,
    "drop_transient": DROP_TRANSIENT,
}
_OURS = (*_FIELDS.values(), POLICY_TYPE)
# The allowed values of `POLICY_TYPE`. Qpid C++ has these policies under the same names.
_POLICY_TYPES = (QueuePolicy.REJECT, QueuePolicy.RING, QueuePolicy.RING_STRICT)
# Prefixes of the arguments in `_OURS`. Any other argument with one of these prefixes is refused as misspelt.
_OUR_PREFIXES = ("qpid.", "x-qpid-", "x-qflow-")

# Arguments of RabbitMQ.
MAX_LENGTH = "x-max-length"
MAX_LENGTH_BYTES = "x-max-length-bytes"
OVERFLOW = "x-overflow"
MESSAGE_TTL = "x-message-ttl"
EXPIRES = "x-expires"
DEAD_LETTER_EXCHANGE = "x-dead-letter-exchange"
DEAD_LETTER_ROUTING_KEY = "x-dead-letter-routing-key"
SINGLE_ACTIVE_CONSUMER = "x-single-active-consumer"


class XOverflow(StrEnum):
    """The values of ``x-overflow``: what a queue does at the maximum that RabbitMQ's arguments set."""

    DROP_HEAD = "drop-head"
    REJECT_PUBLISH = "reject-publish"
    REJECT_PUBLISH_DLX = "reject-publish-dlx"


@dataclass(frozen=True, slots=True)
class QueueArguments:
    """The arguments that define thresholds, the maximum, and what the queue does at the maximum.

    Attributes:
        definition: the values of the arguments of Qpid and of this broker.
        overflow: overflow policy from RabbitMQ's arguments; ``None`` if RabbitMQ's arguments set no maximum.
    """

    definition: PolicyDefinition
    overflow: Overflow | None

    @classmethod
    def read(cls, queue: str, arguments: Mapping[str, object]) -> QueueArguments:
        """Read the arguments. Unknown arguments without a prefix in `_OUR_PREFIXES` are ignored.

        Raises:
            ChannelException: 406 if a value is not allowed, values contradict each other, or an argument is misspelt.
        """
        reader = _Reader(queue, arguments)
        reader.check_names()
        names = dict(_FIELDS)
        values = {field: arguments.get(name) for field, name in names.items()}
        try:
            policy_type = arguments.get(POLICY_TYPE)
            if policy_type is not None:
                if values["policy"] is not None:
                    raise reader.refuse(f"{POLICY} and {POLICY_TYPE} mean the same; set only one of them")
                names["policy"], values["policy"] = POLICY_TYPE, policy_type
                if policy_type not in _POLICY_TYPES:
                    raise reader.refuse(f"{POLICY_TYPE}={policy_type!r}: it must be one of {', '.join(_POLICY_TYPES)}")
            definition = PolicyDefinition.from_mapping(values, names)
        except (TypeError, ValueError) as error:
            raise reader.refuse(str(error)) from None
        overflow = cls._overflow(reader)
        has_maximum = definition.max_count or definition.max_size
        if overflow is not None and (has_maximum or values["policy"] is not None):
            raise reader.refuse(
                "a maximum of RabbitMQ (x-max-…) and a maximum (qpid.max_…) or policy of Qpid are set; set only one"
            )
        if values["policy"] is not None and names["policy"] is POLICY and not has_maximum:
            assert definition.policy is not None
            if definition.policy.needs_maximum:
                raise reader.refuse(f"{POLICY}={definition.policy.value} without {MAX_COUNT} or {MAX_SIZE}: set one")
        return cls(definition, overflow)

    @staticmethod
    def _overflow(reader: _Reader) -> Overflow | None:
        maxima = reader.count(MAX_LENGTH), reader.count(MAX_LENGTH_BYTES)
        kind = reader.choice(OVERFLOW, XOverflow, XOverflow.DROP_HEAD)
        if maxima == (None, None):
            return None
        if kind is XOverflow.DROP_HEAD:
            return DropHead(*maxima)
        return RejectPublish(*maxima, dead_letters=kind is XOverflow.REJECT_PUBLISH_DLX)

    @property
    def is_set(self) -> bool:
        """Whether the arguments set a maximum, a threshold, a capacity or a policy."""
        return self.definition.is_set or self.overflow is not None


def read_options(queue: str, arguments: Mapping[str, object]) -> QueueOptions:
    """Read RabbitMQ's queue arguments, except for the maximum.

    Raises:
        ChannelException: 406 if a value has the wrong type or is not allowed.
    """
    reader = _Reader(queue, arguments)
    message_ttl, expires = reader.count(MESSAGE_TTL), reader.count(EXPIRES)
    if expires == 0:
        raise reader.refuse(f"{EXPIRES}=0: it must be at least 1 millisecond")
    exchange, routing_key = reader.text(DEAD_LETTER_EXCHANGE), reader.text(DEAD_LETTER_ROUTING_KEY)
    if routing_key is not None and exchange is None:
        raise reader.refuse(f"{DEAD_LETTER_ROUTING_KEY}={routing_key!r} without {DEAD_LETTER_EXCHANGE}: set that too")
    return QueueOptions(
        message_ttl=None if message_ttl is None else message_ttl / 1000,
        expires=None if expires is None else expires / 1000,
        dead_letter_exchange=exchange,
        dead_letter_routing_key=routing_key,
        single_active_consumer=reader.flag(SINGLE_ACTIVE_CONSUMER),
    )


def resolve_limits(
    queue: str,
    definition: PolicyDefinition,
    settings: Settings,
    *,
    overflow: Overflow | None = None,
    policies: tuple[str, ...] = (),
) -> QueueLimits:
    """Return the limits of a queue.

    Args:
        settings: settings of the broker, which have the default thresholds, capacity and enforcement (C4, J2).
        overflow: overflow policy from RabbitMQ's arguments. It is not used if the definition sets a maximum, or the
            policy `conflate` or `flow_to_disk`.
        policies: names of the policies that the definition comes from, for `QueueLimits.policies`.

    Raises:
        ChannelException: 406 if the resume capacity is above the capacity.
    """
    max_count, max_size = definition.max_count or 0, definition.max_size or 0
    policy = definition.policy or (QueuePolicy.REJECT if max_count or max_size else QueuePolicy.FLOW)
    if definition.flow_stop_count is None and definition.flow_stop_size is None:
        percents = settings.default_flow_stop_threshold, settings.default_flow_resume_threshold
        if not policy.has_default_thresholds:
            percents = 0, 0
        stop_resume = StopResume.from_limits(max_count, max_size, stop_percent=percents[0], resume_percent=percents[1])
    else:
        stop_resume = StopResume(
            definition.flow_stop_count or 0,
            definition.flow_resume_count,
            definition.flow_stop_size or 0,
            definition.flow_resume_size,
        )
    capacity = _capacity(queue, definition, settings)
    key = definition.conflate_key
    if max_count or max_size or policy in (QueuePolicy.CONFLATE, QueuePolicy.FLOW_TO_DISK):
        overflow = make_overflow(policy, max_count or None, max_size or None, key)
    then = None
    if definition.max_flow_wait is not None:
        if policy is QueuePolicy.FLOW_TO_DISK:
            # With `flow_to_disk` the maximum limits only bodies in memory, so the policy `then` does not use it.
            max_count = max_size = 0
        maxima = max_count or stop_resume.stop_count, max_size or stop_resume.stop_size or capacity.capacity
        then = make_overflow(definition.then or QueuePolicy.REJECT, maxima[0] or None, maxima[1] or None, None)
    return QueueLimits(
        stop_resume,
        capacity,
        overflow,
        definition.enforcement or settings.enforcement,
        policy.value if overflow is None else overflow.name,
        definition.max_flow_wait,
        then,
        policies,
        bool(definition.drop_transient),
    )


def _capacity(queue: str, definition: PolicyDefinition, settings: Settings) -> Capacity:
    capacity, resume = definition.capacity, definition.flow_resume_capacity
    if capacity is None:
        capacity = settings.capacity
        if resume is None:
            return Capacity(settings.capacity, settings.flow_resume_capacity)
    if resume is not None and resume > capacity:
        raise _Reader(queue, {}).refuse(
            f"{CAPACITY}={capacity} and {FLOW_RESUME_CAPACITY}={resume}: the resume capacity must not be above the "
            "capacity"
        )
    return Capacity(capacity, resume)


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

    def text(self, name: str) -> str | None:
        value = self._arguments.get(name)
        if value is not None and not isinstance(value, str):
            raise self.refuse(f"{name}={value!r}: it must be a string, not {type(value).__name__}")
        if value is None:
            return None
        # The value must fit into an AMQP short string.
        try:
            length = len(value.encode())
        except UnicodeEncodeError:
            raise self.refuse(f"{name}={value[:32]!r}: it cannot be encoded as UTF-8") from None
        if length > 255:
            raise self.refuse(f"{name}={value[:32]!r}…: it may have at most 255 bytes, not {length}")
        return value

    def flag(self, name: str) -> bool:
        value = self._arguments.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(f"{name}={value!r}: it must be true or false, not {type(value).__name__}")
        return bool(value)

    def check_names(self) -> None:
        for name in self._arguments:
            if name.startswith(_OUR_PREFIXES) and name not in _OURS:
                (nearest,) = get_close_matches(name, _OURS, n=1, cutoff=0.0)
                raise self.refuse(f"there is no argument {name}; did you mean {nearest}?")

    def choice(self, name: str, kind: type[XOverflow], default: XOverflow) -> XOverflow:
        value = self._arguments.get(name)
        if value is None:
            return default
        try:
            return choose(f"{name}={value!r}", value, kind)
        except ValueError as error:
            raise self.refuse(str(error)) from None
