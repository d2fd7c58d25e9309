"""Requests and answers of the HTTP API. The models of answers are created from the broker's snapshots."""

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
#: Names of Qpid C++ for the flow state (C7).
_C7 = {
    "flowState": (bool, Field(description="whether it is held, or, of a queue, whether it holds (C7)")),
    "flowStopped": (bool, Field(description="the same by its newer name (C7)")),
    "flowStoppedCount": (int, Field(description="how often it went from OFF to ON (C7)")),
}


def _words(kind: type) -> dict[str, str]:
    """Return the descriptions of the attributes in a snapshot's docstring."""
    text = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:")[2]
    return {name: " ".join(words.split()).replace("``", "`") for name, words in _ATTRIBUTE.findall(text)}


def _answer(name: str, kind: type, **more: Any) -> type[BaseModel]:
    """Create the model of a snapshot's JSON."""
    hints, words = get_type_hints(kind), _words(kind)
    told: dict[str, Any] = {
        json_name: (
            _NESTED.get(hints[attribute], hints[attribute]),
            Field(description=words[attribute]),
        )
        for attribute, json_name in json_names(kind)
    }
    first_line = (kind.__doc__ or "").partition("\n")[0]
    config = ConfigDict(extra="forbid")
    return create_model(name, __config__=config, __doc__=first_line, **told | more)


# Models of snapshots inside snapshots, by their annotation.
_NESTED: dict[Any, Any] = {}
Thresholds = _NESTED[ThresholdsSnapshot] = _answer("Thresholds", ThresholdsSnapshot)
Target = _answer("Target", TargetSnapshot)
_NESTED[tuple[TargetSnapshot, ...]] = types.GenericAlias(list, (Target,))
Queue = _answer("Queue", QueueSnapshot, **_C7)
Channel = _answer("Channel", ChannelSnapshot, **_C7)
Connection = _answer("Connection", ConnectionSnapshot, **_C7)
Exchange = _answer("Exchange", ExchangeSnapshot)
Memory = _answer("Memory", MemorySnapshot)
Binding = _answer("Binding", BindingSnapshot, id=(str, Field(description="by which it can be deleted")))


def binding_id(binding: BindingSnapshot) -> str:
    """Return the id of a binding for URLs."""
    return blake2s(to_json(list(binding.to_json().values())), digest_size=12).hexdigest()


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel, populate_by_name=True)


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)


class Health(_Answer):
    """Whether the broker runs."""

    status: Literal["ok"] = "ok"


class Removed(_Answer):
    """The number of removed messages."""

    messages: int = Field(description="how many messages were ready, and are gone")


class Counters(_Answer):
    """Counters of the broker. Queues, channels and connections that no longer exist are not counted."""

    connections: int = Field(description="connections")
    channels: int = Field(description="open channels")
    producers: int = Field(description="channels that publish, or said that they will")
    producers_flowed: int = Field(description="those of them that are flowed")
    producers_stopped: bool = Field(description="whether an operator has stopped all producers (D5)")
    queues: int = Field(description="queues")
    queues_flow_stopped: int = Field(description="those of them whose flow state is ON (C7)")
    flow_stopped_count: int = Field(description="how often queues went from OFF to ON (C7)")
    exchanges: int = Field(description="exchanges, the default exchange included")
    depth: int = Field(description="messages in queues, ready and unacked (D6)")
    ready: int = Field(description="messages to be delivered")
    unacked: int = Field(description="messages that consumers have not settled")
    bytes: int = Field(description="body bytes of all of them")
    held_confirms: int = Field(description="messages whose confirms wait for OFF (C5)")
    published: int = Field(description="messages enqueued so far")
    delivered: int = Field(description="deliveries so far, repeated ones included")
    acked: int = Field(description="messages acked so far")
    dropped: int = Field(description="messages rejected for good or dropped for want of room so far")
    consumers: int = Field(description="consumers")
    alarms: dict[str, str] = Field(description="what blocks all connections, and why")
    memory: Memory = Field(description="what messages take in memory, and what went to disk")  # type: ignore[valid-type]
    sanctions: dict[str, int] = Field(description="how often clients that do not listen were held, by how (D8)")


class QueueFlowState(_Answer):
    """The flow state of a queue, and the channels that it blocks."""

    name: str = Field(description="of the queue")
    flow_state: bool = Field(description="whether it is ON (C7)")
    flow_stopped: bool = Field(description="the same by its newer name (C7)")
    flow_stopped_count: int = Field(description="how often it went from OFF to ON (C7)")
    depth: int = Field(description="messages, ready and delivered-unacknowledged (D6)")
    bytes: int = Field(description="body bytes of all of them")
    thresholds: Thresholds = Field(description="the marks in force")  # type: ignore[valid-type]
    enforcement: str = Field(description="how it holds its producers")
    blocked: list[str] = Field(description="names of the channels that it flows, the oldest first (J4)")
    held_confirms: int = Field(description="messages whose confirms wait for OFF (C5)")


class ChannelFlowState(_Answer):
    """A channel that is flowed (blocked)."""

    name: str = Field(description="of the channel")
    connection: str = Field(description="the connection's name")
    blocked_by: list[str] = Field(description="names of the queues that flow it, and `operator` for an operator's hold")
    flow_ok: bool = Field(description="whether the client has answered every `Channel.Flow`")
    times_flowed: int = Field(description="how often it went from unflowed to flowed")
    flowed_seconds: float = Field(description="seconds flowed so far, the present time included")


class FlowStates(_Answer):
    """The flow states of all queues, and of the channels that are blocked."""

    producers_stopped: bool = Field(description="whether an operator has stopped all producers (D5)")
    queues: list[QueueFlowState] = Field(description="all queues")
    channels: list[ChannelFlowState] = Field(description="the channels that are flowed (blocked)")


class QueueRequest(_Request):
    """The settings of a new queue; see `Queue.Declare`."""

    durable: bool = Field(default=False, description="as in `Queue.Declare`")
    auto_delete: bool = Field(default=False, description="whether it goes with its last consumer")
    arguments: Arguments = Field(default={}, description="thresholds and the like")


class ExchangeRequest(_Request):
    """The settings of a new exchange; see `Exchange.Declare`."""

    type: Literal["direct", "fanout", "topic", "headers"] = Field(default="direct", description="of the exchange")
    durable: bool = Field(default=False, description="as in `Exchange.Declare`")
    auto_delete: bool = Field(default=False, description="whether it goes with its last binding")
    internal: bool = Field(default=False, description="whether clients may not publish to it")
    arguments: Arguments = Field(default={}, description="as in `Exchange.Declare`")


class BindingRequest(_Request):
    """The settings of a new binding; see `Queue.Bind`."""

    source: Name = Field(description="the exchange")
    destination: Name = Field(description="the queue, or the exchange")
    destination_type: Literal["queue", "exchange"] = Field(default="queue", description="which of them")
    routing_key: Key = Field(default="", description="the binding key")
    arguments: Arguments = Field(default={}, description="for headers exchanges")


def _thresholds_request() -> type[BaseModel]:
    words = _words(ThresholdsSnapshot)
    marks: dict[str, Any] = {}
    for field in fields(ThresholdsSnapshot):
        amount = Annotated[int, Field(ge=0, le=_LARGEST)]
        if "resume" in field.name:
            description = f"{words[field.name]}; null for the default that goes with the stop, or the capacity"
            marks[field.name] = (amount | None, Field(default=None, description=description))
        else:
            marks[field.name] = (amount, Field(default=0, description=words[field.name]))
    return create_model(
        "ThresholdsRequest",
        __base__=_Request,
        __doc__="The marks to change; those that are not given stay.",
        **marks,
    )


ThresholdsRequest = _thresholds_request()


# Newer versions of RabbitMQ export more fields than this broker knows.
for _kind in (QueueDefinition, ExchangeDefinition, BindingDefinition):
    with_config(ConfigDict(extra="ignore"))(_kind)


def _policy_parts() -> tuple[type[BaseModel], type[BaseModel], type[BaseModel]]:
    """Create the models of a policy's definition, of the request that sets a policy, and of its description.

    They are created from the broker's own classes, which check the types and values.
    """

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
        "PolicyDefinition", __base__=_Request, __doc__="What a policy sets.", **parts(PolicyDefinition)
    )
    told = parts(Policy, "name", "definition") | {"definition": (definition, Field(description="what it sets"))}
    request = create_model(
        "PolicyRequest", __base__=_Request, __doc__="A policy to be; its name stands in the path.", **told
    )
    name = (str, Field(description="of the policy"))
    answer = create_model("Policy", __base__=_Answer, __doc__="A policy.", name=name, **told)
    return definition, request, answer


PolicyDefinitionModel, PolicyRequest, PolicyAnswer = _policy_parts()


class RateLimitRequest(_Request):
    """The settings of a rate limit."""

    messages: float | None = Field(default=None, description="per second; null for any number")
    bytes: float | None = Field(default=None, description="body bytes per second; null for any number")
    burst: float = Field(default=0.1, description="seconds; what the rate gives in them may pass at once after a rest")


class RateLimitAnswer(_Answer):
    """A rate limit."""

    apply_to: str = Field(description="what the name is of: `exchange`, `queue` or `user`")
    name: str = Field(description="of the exchange, the queue or the user")
    messages: float | None = Field(description="per second; null for any number")
    bytes: float | None = Field(description="body bytes per second; null for any number")
    burst: float = Field(description="seconds; what the rate gives in them may pass at once after a rest")


class DefinitionsDocument(BaseModel):
    """Queues, exchanges and bindings in the format of RabbitMQ's definitions. Other parts are ignored."""

    model_config = ConfigDict(extra="allow")

    exchanges: list[ExchangeDefinition] = []
    queues: list[QueueDefinition] = []
    bindings: list[BindingDefinition] = []
    # The key is not `policies`, because that key holds RabbitMQ's own policies, which set other values.
    queue_policies: list[dict[str, JsonValue]] = Field(default=[], description="this broker's policies")

    def definitions(self) -> Definitions:
        """Return the definitions that the broker can use.

        Raises:
            DefinitionError: a policy is invalid.
        """
        policies = []
        for number, told in enumerate(self.queue_policies):
            try:
                policies.append(Policy(**told))  # type: ignore[arg-type]
            except (TypeError, ValueError) as error:
                raise DefinitionError(f"queue_policies[{number}]", str(error)) from error
        return Definitions(tuple(self.exchanges), tuple(self.queues), tuple(self.bindings), tuple(policies))


class Loaded(_Answer):
    """The result of loading definitions."""

    exchanges: int = Field(description="how many exchanges were declared")
    queues: int = Field(description="how many queues were declared")
    bindings: int = Field(description="how many bindings were made")
    policies: int = Field(description="how many policies were set")
    ignored: list[str] = Field(description="parts of the document that mean nothing here")
