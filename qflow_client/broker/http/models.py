"""The pydantic models of requests and answers of the HTTP API. Snapshot classes define the fields of most answers."""

from __future__ import annotations

import inspect
import re
import types
from dataclasses import MISSING, fields
from hashlib import blake2s
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, create_model, with_config
from pydantic.alias_generators import to_camel
from pydantic_core import to_json

from qflow_client.broker.core.snapshots import (
    BindingSnapshot,
    ChannelSnapshot,
    ConnectionSnapshot,
    ExchangeSnapshot,
    MemorySnapshot,
    QueueSnapshot,
    TargetSnapshot,
    ThresholdsSnapshot,
    json_names,
)
from qflow_client.broker.policies.definitions import (
    BindingDefinition,
    DefinitionError,
    Definitions,
    ExchangeDefinition,
    QueueDefinition,
    check_name,
)
from qflow_client.broker.policies.policy import Policy, PolicyDefinition

__all__ = [
    "Arguments",
    "Binding",
    "BindingRequest",
    "Channel",
    "ChannelFlowState",
    "Connection",
    "Counters",
    "DefinitionsDocument",
    "Exchange",
    "ExchangeRequest",
    "FlowStates",
    "Health",
    "Loaded",
    "Memory",
    "Name",
    "PolicyAnswer",
    "PolicyRequest",
    "Queue",
    "QueueFlowState",
    "QueueRequest",
    "RateLimitAnswer",
    "RateLimitRequest",
    "Removed",
    "Thresholds",
    "ThresholdsRequest",
    "binding_id",
]

_LARGEST = 2**63 - 1

Name = Annotated[str, Field(min_length=1, max_length=255), AfterValidator(check_name)]
Key = Annotated[str, Field(max_length=255), AfterValidator(lambda key: check_name(key, empty=True))]
Arguments = dict[str, JsonValue]

_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
# Matches source ids such as (C7). `_plain` removes the ids from descriptions, because API users do not know them.
_IDS = re.compile(r" \([A-Z]\d+(?: [A-Z]\d+)*\)")


def _c7(state: str, count: str) -> dict[str, Any]:
    """Return the fields with the names that Qpid C++ uses for flow states (C7), described by `state` and `count`."""
    return {
        "flowState": (bool, Field(description=f"{state}, under the name in Qpid's management.")),
        "flowStopped": (bool, Field(description="The same value as `flowState`, under its newer name in Qpid.")),
        "flowStoppedCount": (int, Field(description=f"{count}, under the name in Qpid's management.")),
    }


def _summary(kind: type) -> str:
    return _plain((kind.__doc__ or "").partition("\n")[0])


def _words(kind: type) -> dict[str, str]:
    """Return the descriptions of a class's attributes, from the section ``Attributes`` of the class's docstring."""
    text = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:")[2]
    return {name: _plain(words[0].upper() + words[1:]) for name, words in _ATTRIBUTE.findall(text)}


def _plain(text: str) -> str:
    return _IDS.sub("", " ".join(text.split())).replace("``None``", "null").replace("``", "`")


def _answer(name: str, kind: type, **more: Any) -> type[BaseModel]:
    """Create the pydantic model for the JSON of a snapshot class."""
    hints, words = get_type_hints(kind), _words(kind)
    told: dict[str, Any] = {
        json_name: (
            _NESTED.get(hints[attribute], hints[attribute]),
            Field(description=words[attribute]),
        )
        for attribute, json_name in json_names(kind)
    }
    return create_model(name, __config__=ConfigDict(extra="forbid"), __doc__=_summary(kind), **told | more)


# Models of nested snapshots. A key is the type annotation of the attribute that contains the snapshots.
_NESTED: dict[Any, Any] = {}
Thresholds = _NESTED[ThresholdsSnapshot] = _answer("Thresholds", ThresholdsSnapshot)
Target = _answer("Target", TargetSnapshot)
_NESTED[tuple[TargetSnapshot, ...]] = types.GenericAlias(list, (Target,))
Queue = _answer("Queue", QueueSnapshot, **_c7("Whether the queue is ON", "How often it turned ON"))
Channel = _answer("Channel", ChannelSnapshot, **_c7("The value of `flowed`", "The value of `timesFlowed`"))
Connection = _answer("Connection", ConnectionSnapshot, **_c7("The value of `flowed`", "The value of `timesFlowed`"))
Exchange = _answer("Exchange", ExchangeSnapshot)
Memory = _answer("Memory", MemorySnapshot)
Binding = _answer(
    "Binding", BindingSnapshot, id=(str, Field(description="Id of the binding, with which it can be deleted."))
)


def binding_id(binding: BindingSnapshot) -> str:
    """Return the id that identifies a binding in URLs."""
    return blake2s(to_json(list(binding.to_json().values())), digest_size=12).hexdigest()


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel, populate_by_name=True)


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)


class Health(_Answer):
    """The health of the broker."""

    status: Literal["ok"] = Field(default="ok", description="Always `ok`, because a broker that answers is running.")


class Removed(_Answer):
    """The number of removed messages."""

    messages: int = Field(description="Number of ready messages that were removed.")


class Counters(_Answer):
    """Counters of the broker. Sums over all queues do not include deleted queues."""

    connections: int = Field(description="Number of connections.")
    channels: int = Field(description="Number of open channels.")
    producers: int = Field(description="Number of channels that have published, or are in confirm or transaction mode.")
    producers_flowed: int = Field(description="Number of producers that are blocked (flowed).")
    producers_stopped: bool = Field(description="Whether an operator has stopped all producers.")
    queues: int = Field(description="Number of queues.")
    queues_flow_stopped: int = Field(description="Number of queues that are ON.")
    flow_stopped_count: int = Field(description="How often queues turned from OFF to ON.")
    exchanges: int = Field(description="Number of exchanges, including the default exchange.")
    depth: int = Field(description="Number of messages in all queues, ready and unacked.")
    ready: int = Field(description="Number of messages to deliver.")
    unacked: int = Field(description="Number of delivered messages that consumers have not settled.")
    bytes: int = Field(description="Body bytes of the messages in all queues.")
    held_confirms: int = Field(description="Number of messages whose confirms wait until their queues are OFF.")
    published: int = Field(description="Number of messages enqueued since the start of the broker.")
    delivered: int = Field(description="Number of deliveries so far, including redeliveries.")
    acked: int = Field(description="Number of messages acked so far.")
    dropped: int = Field(
        description="Number of messages that were dropped so far, or were refused without informing their publishers. "
        "Purged messages are not counted."
    )
    consumers: int = Field(description="Number of consumers.")
    alarms: dict[str, str] = Field(description="Alarms that block all connections: their names and reasons.")
    memory: Memory = Field(description="Messages in memory and on disk.")  # type: ignore[valid-type]  # made at run time
    sanctions: dict[str, int] = Field(
        description="How often the broker acted against clients that ignore flow control, by the kind of action."
    )


class QueueFlowState(_Answer):
    """The flow state of a queue, and the channels that it blocks (flows)."""

    name: str = Field(description="Name of the queue.")
    flow_state: bool = Field(description="Whether the queue is ON.")
    flow_stopped: bool = Field(description="The same value as `flowState`, under its newer name in Qpid.")
    flow_stopped_count: int = Field(description="How often the queue turned from OFF to ON.")
    depth: int = Field(description="Number of messages in the queue, ready and unacked.")
    bytes: int = Field(description="Body bytes of the messages in the queue.")
    thresholds: Thresholds = Field(description="Current thresholds of the queue.")  # type: ignore[valid-type]  # made at run time
    enforcement: str = Field(
        description="How the queue blocks its producers while it is ON: `channel_flow`, `completion` or `both`."
    )
    blocked: list[str] = Field(description="Names of the channels that the queue blocks (flows), the oldest first.")
    held_confirms: int = Field(description="Number of messages whose confirms wait until the queue is OFF.")


class ChannelFlowState(_Answer):
    """A channel that is blocked (flowed)."""

    name: str = Field(description="Name of the channel.")
    connection: str = Field(description="Name of its connection.")
    blocked_by: list[str] = Field(
        description="Names of the queues that block the channel, and `operator` if an operator has stopped it."
    )
    flow_ok: bool = Field(description="Whether the client has answered every `Channel.Flow`.")
    times_flowed: int = Field(description="How often the channel was blocked (flowed) so far.")
    flowed_seconds: float = Field(
        description="Seconds for which the channel was blocked (flowed) so far, including the current time."
    )


class FlowStates(_Answer):
    """The flow states of all queues, and of the channels that are blocked (flowed)."""

    producers_stopped: bool = Field(description="Whether an operator has stopped all producers.")
    queues: list[QueueFlowState] = Field(description="All queues.")
    channels: list[ChannelFlowState] = Field(description="The channels that are blocked (flowed).")


class QueueRequest(_Request):
    """The settings of a new queue; see `Queue.Declare`."""

    durable: bool = Field(default=False, description="Whether the queue is durable.")
    auto_delete: bool = Field(default=False, description="Whether the queue is deleted with its last consumer.")
    arguments: Arguments = Field(default={}, description="Arguments of the queue, such as `qpid.flow_stop_count`.")


class ExchangeRequest(_Request):
    """The settings of a new exchange; see `Exchange.Declare`."""

    type: Literal["direct", "fanout", "topic", "headers"] = Field(default="direct", description="Type of the exchange.")
    durable: bool = Field(default=False, description="Whether the exchange is durable.")
    auto_delete: bool = Field(default=False, description="Whether the exchange is deleted with its last binding.")
    internal: bool = Field(
        default=False, description="Whether the broker refuses messages that are published to the exchange."
    )
    arguments: Arguments = Field(default={}, description="Arguments of the exchange.")


class BindingRequest(_Request):
    """The settings of a new binding; see `Queue.Bind`."""

    source: Name = Field(description="Name of the exchange that the messages come from.")
    destination: Name = Field(description="Name of the queue or exchange that the messages go to.")
    destination_type: Literal["queue", "exchange"] = Field(
        default="queue", description="Whether the destination is a queue or an exchange."
    )
    routing_key: Key = Field(default="", description="Binding key.")
    arguments: Arguments = Field(default={}, description="Arguments of the binding; only headers exchanges use them.")


def _thresholds_request() -> type[BaseModel]:
    words = _words(ThresholdsSnapshot)
    marks: dict[str, Any] = {}
    for field in fields(ThresholdsSnapshot):
        amount = Annotated[int, Field(ge=0, le=_LARGEST)]
        if "resume" in field.name:
            default = "the capacity" if "capacity" in field.name else "7/8 of the stop threshold"
            description = f"{words[field.name]} Null for the default: {default}."
            marks[field.name] = (amount | None, Field(default=None, description=description))
        else:
            marks[field.name] = (amount, Field(default=0, description=words[field.name]))
    return create_model(
        "ThresholdsRequest",
        __base__=_Request,
        __doc__="The thresholds to change. Thresholds that are not given stay as they are.",
        **marks,
    )


ThresholdsRequest = _thresholds_request()


def _describe(schema: dict[str, Any], kind: type[Any]) -> None:
    schema["description"] = _summary(kind)
    for name, words in _words(kind).items():
        schema["properties"][name]["description"] = words


# Ignore unknown fields of these definitions, because newer versions of RabbitMQ export more fields.
for _kind in (QueueDefinition, ExchangeDefinition, BindingDefinition):
    with_config(ConfigDict(extra="ignore", json_schema_extra=_describe))(_kind)


def _policy_parts() -> tuple[type[BaseModel], type[BaseModel], type[BaseModel]]:
    """Create models for policy definitions, requests and answers. `PolicyDefinition` and `Policy` check the values."""

    def parts(kind: type[Any], *but: str) -> dict[str, Any]:
        words, hints = _words(kind), get_type_hints(kind)
        return {
            field.name: (
                hints[field.name],
                Field(default=... if field.default is MISSING else field.default, description=words[field.name]),
            )
            for field in fields(kind)
            if field.name not in but
        }

    definition = create_model(
        "PolicyDefinition",
        __base__=_Request,
        __doc__="The values that a policy sets; null for a value that it does not set.",
        **parts(PolicyDefinition),
    )
    told = parts(Policy, "name", "definition") | {
        "definition": (definition, Field(description="The values that the policy sets."))
    }
    request = create_model(
        "PolicyRequest", __base__=_Request, __doc__="The settings of a policy. Its name is in the path.", **told
    )
    name = (str, Field(description="Name of the policy."))
    answer = create_model("Policy", __base__=_Answer, __doc__="A policy with its settings.", name=name, **told)
    return definition, request, answer


PolicyDefinitionModel, PolicyRequest, PolicyAnswer = _policy_parts()


_MESSAGES = "Maximum number of messages per second; null for no limit."
_BYTES = "Maximum body bytes per second; null for no limit."
_BURST = (
    "Size of a burst in seconds. After a pause, the broker accepts the messages that the rate allows in this time "
    "without blocking the channel."
)


class RateLimitRequest(_Request):
    """The settings of a rate limit. At least one of `messages` and `bytes` is required."""

    messages: float | None = Field(default=None, description=_MESSAGES)
    bytes: float | None = Field(default=None, description=_BYTES)
    burst: float = Field(default=0.1, description=_BURST)


class RateLimitAnswer(_Answer):
    """A rate limit."""

    apply_to: str = Field(description="Kind of the limited object: `exchange`, `queue` or `user`.")
    name: str = Field(description="Name of the exchange, queue or user.")
    messages: float | None = Field(description=_MESSAGES)
    bytes: float | None = Field(description=_BYTES)
    burst: float = Field(description=_BURST)


class DefinitionsDocument(BaseModel):
    """Queues, exchanges, bindings and policies, in the format of RabbitMQ's definitions. Other parts are ignored."""

    model_config = ConfigDict(extra="allow")

    exchanges: list[ExchangeDefinition] = Field(default=[], description="Exchanges.")
    queues: list[QueueDefinition] = Field(default=[], description="Queues.")
    bindings: list[BindingDefinition] = Field(default=[], description="Bindings.")
    # The key is not `policies`, because RabbitMQ's exports have policies of another kind under the key `policies`.
    queue_policies: list[dict[str, JsonValue]] = Field(
        default=[], description="Policies of this broker, with names in snake case. RabbitMQ's `policies` are ignored."
    )

    def definitions(self) -> Definitions:
        """Convert the document to definitions for the broker. Raise `DefinitionError` if a policy is invalid."""
        policies = []
        for number, told in enumerate(self.queue_policies):
            try:
                policies.append(Policy(**told))  # type: ignore[arg-type]
            except (TypeError, ValueError) as error:
                raise DefinitionError(f"queue_policies[{number}]", str(error)) from error
        return Definitions(tuple(self.exchanges), tuple(self.queues), tuple(self.bindings), tuple(policies))


class Loaded(_Answer):
    """The result of loading definitions."""

    exchanges: int = Field(description="Number of exchanges in the document.")
    queues: int = Field(description="Number of queues in the document.")
    bindings: int = Field(description="Number of bindings in the document.")
    policies: int = Field(description="Number of policies in the document.")
    ignored: list[str] = Field(description="Names of the parts of the document that this broker ignores.")
