"""The operations of the HTTP API."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import closing
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from pydantic.alias_generators import to_camel

from qflow_client.broker.broker import Broker
from qflow_client.broker.core.errors import ChannelException, ReplyCode
from qflow_client.broker.core.snapshots import (
    BindingSnapshot,
    ChannelSnapshot,
    ConnectionSnapshot,
    ExchangeSnapshot,
    QueueSnapshot,
)
from qflow_client.broker.http.events import EventsRequest
from qflow_client.broker.http.metrics import OPEN_METRICS, PROMETHEUS, metrics_text
from qflow_client.broker.http.models import (
    Binding,
    BindingRequest,
    Channel,
    ChannelFlowState,
    Connection,
    Counters,
    DefinitionsDocument,
    Exchange,
    ExchangeRequest,
    FlowStates,
    Health,
    Loaded,
    Memory,
    Name,
    PolicyAnswer,
    PolicyRequest,
    Queue,
    QueueFlowState,
    QueueRequest,
    RateLimitAnswer,
    RateLimitRequest,
    Removed,
    ThresholdsRequest,
    binding_id,
)
from qflow_client.broker.http.openapi import Api, MediaType
from qflow_client.broker.http.problems import Problem
from qflow_client.broker.http.turns import Turns
from qflow_client.broker.policies.definitions import (
    BindingDefinition,
    DefinitionError,
    ExchangeDefinition,
    Exported,
    QueueDefinition,
)
from qflow_client.broker.policies.policy import Policy, PolicyDefinition
from qflow_client.broker.policies.rates import RateLimit, RateScope

__all__ = ["api"]

api = Api()

QueueName = Annotated[str, Field(min_length=1, description="Name of the queue.")]
ExchangeName = Annotated[str, Field(min_length=1, description="Name of the exchange.")]
NewQueueName = Annotated[Name, Field(description="Name of the queue, 1 to 255 bytes in UTF-8.")]
NewExchangeName = Annotated[Name, Field(description="Name of the exchange, 1 to 255 bytes in UTF-8.")]
PolicyName = Annotated[str, Field(min_length=1, description="Name of the policy.")]
ChannelName = Annotated[str, Field(min_length=1, description="Name of the channel, such as `127.0.0.1:40412 (1)`.")]
ConnectionName = Annotated[str, Field(min_length=1, description="Name of the connection, such as `127.0.0.1:40412`.")]

# Attributes of queues. The answer of `counters` has the sum of each attribute over all queues.
_SUMS = (
    "flow_stopped_count",
    "depth",
    "ready",
    "unacked",
    "bytes",
    "held_confirms",
    "published",
    "delivered",
    "acked",
    "dropped",
    "consumers",
)
# Names of the fields that the answer of `flow_states` has for each queue, and for each channel.
_FLOW_STATE = tuple(map(to_camel, QueueFlowState.model_fields))
_CHANNEL_FLOW_STATE = tuple(map(to_camel, ChannelFlowState.model_fields))


# Status of the broker.


@api.operation("GET", "/api/health", "broker", answer=Health, is_public=True)
def health(broker: Broker) -> Health:
    """Check that the broker is running."""
    return Health()


@api.operation("GET", "/api/openapi.json", "broker", answer=dict[str, Any], is_public=True)
def openapi(broker: Broker) -> bytes:
    """Get this description of the API."""
    return api.description_json(has_token=broker.settings.http_token is not None)


@api.operation("GET", "/api/counters", "broker", answer=Counters)
async def counters(broker: Broker, turns: Turns) -> Counters:
    """Get the counters of the whole broker."""
    sums = dict.fromkeys((*_SUMS, "queues", "queues_flow_stopped", "channels", "producers", "producers_flowed"), 0)
    async for queue in turns.each(broker.each_queue()):
        sums["queues"] += 1
        sums["queues_flow_stopped"] += queue.flow_stopped
        for name in _SUMS:
            sums[name] += getattr(queue, name)
    async for channel in turns.each(broker.each_channel()):
        sums["channels"] += 1
        if channel.is_producer:
            sums["producers"] += 1
            sums["producers_flowed"] += channel.flowed
    return Counters(
        connections=broker.connection_count,
        producers_stopped=broker.producers_stopped,
        exchanges=len([None async for _ in turns.each(broker.each_exchange())]),
        alarms=broker.alarms,
        memory=Memory(**broker.memory.to_json()),
        sanctions=broker.sanctions,
        **sums,
    )


@api.operation("GET", "/api/flow-states", "flow control", answer=FlowStates, is_large=True)
def flow_states(broker: Broker) -> dict[str, Any]:
    """Get the flow states of all queues, and the channels that are blocked (flowed)."""

    def part(of: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
        return {name: of[name] for name in names}

    return {
        "producersStopped": broker.producers_stopped,
        "queues": (part(queue.to_json(), _FLOW_STATE) for queue in broker.each_queue()),
        "channels": (
            part(channel.to_json(), _CHANNEL_FLOW_STATE) for channel in broker.each_channel() if channel.flowed
        ),
    }


@api.operation("GET", "/api/events", "broker", answer=str, media_types=["text/event-stream"], problems=[429])
def events(
    broker: Broker,
    period: Annotated[float, Field(ge=0.1, le=60, description="Seconds between two polls of the broker.")] = 1.0,
) -> EventsRequest:
    """Get a stream of the broker's changes, as server-sent events.

    The first event, `state`, has all objects in its members `queues`, `channels`, `connections`, `exchanges`,
    `bindings` and `producersStopped`. Each later event, `change`, has only the changes. The members `queues`,
    `channels` and `connections` of a `change` have the new and the changed objects. The member `gone` has the names of
    deleted objects. The members `exchanges`, `bindings` and `producersStopped` have the complete new values. A member
    without changes is missing. There is no event if only the `flowedSeconds` of channels have changed. All streams
    share the polls of the broker. The polls use at most a twentieth of the time, so a broker with many queues may be
    polled less often than `period`.
    """
    return EventsRequest(period)


@api.operation("GET", "/metrics", "broker", answer=str, media_types=(PROMETHEUS, OPEN_METRICS), is_large=True)
async def metrics(broker: Broker, turns: Turns, media_type: MediaType) -> bytearray:
    """Get the metrics for Prometheus.

    The header `Accept` chooses between the text format of Prometheus and OpenMetrics.
    """
    return await metrics_text(broker, turns, media_type)


# Connections and channels.


@api.operation("GET", "/api/connections", "connections", each=Connection)
def list_connections(broker: Broker) -> Iterator[ConnectionSnapshot]:
    """List the connections, oldest first."""
    return broker.each_connection()


@api.operation("GET", "/api/connections/{name}", "connections", answer=Connection, problems=[404])
async def get_connection(broker: Broker, name: ConnectionName, turns: Turns) -> ConnectionSnapshot:
    """Get one connection."""
    return await _found("connection", name, turns.each(broker.each_connection()))


@api.operation("DELETE", "/api/connections/{name}", "connections", problems=[404])
def close_connection(broker: Broker, name: ConnectionName) -> None:
    """Close a connection. The client gets `Connection.Close` with the code 320."""
    broker.close_connections(connection=name)


@api.operation("GET", "/api/channels", "connections", each=Channel)
def list_channels(broker: Broker) -> Iterator[ChannelSnapshot]:
    """List the open channels."""
    return broker.each_channel()


@api.operation("GET", "/api/channels/{name}", "connections", answer=Channel, problems=[404])
async def get_channel(broker: Broker, name: ChannelName, turns: Turns) -> ChannelSnapshot:
    """Get one channel: whether it is blocked (flowed), by which queues, how often, and for how long."""
    return await _found("channel", name, turns.each(broker.each_channel()))


# Producers.


@api.operation("GET", "/api/producers", "flow control", each=Channel)
def list_producers(broker: Broker) -> Iterator[ChannelSnapshot]:
    """List the producers: channels that have published, or are in confirm or transaction mode."""
    return (channel for channel in broker.each_channel() if channel.is_producer)


@api.operation("POST", "/api/producers/stop", "flow control")
def stop_producers(broker: Broker) -> None:
    """Stop all producers, including those that connect later."""
    broker.flow(active=False)


@api.operation("POST", "/api/producers/start", "flow control")
def start_producers(broker: Broker) -> None:
    """Start all producers that an operator has stopped. Producers that a queue blocks (flows) stay blocked."""
    broker.flow(active=True)


@api.operation("POST", "/api/producers/{name}/stop", "flow control", problems=[404])
def stop_producer(broker: Broker, name: ChannelName) -> None:
    """Stop one producer."""
    broker.flow(active=False, channel=name)


@api.operation("POST", "/api/producers/{name}/start", "flow control", problems=[404])
def start_producer(broker: Broker, name: ChannelName) -> None:
    """Start one producer that an operator has stopped. A producer that a queue blocks (flows) stays blocked."""
    broker.flow(active=True, channel=name)


# Queues.


@api.operation("GET", "/api/queues", "queues", each=Queue)
def list_queues(broker: Broker) -> Iterator[QueueSnapshot]:
    """List the queues, in the order in which they were declared."""
    return broker.each_queue()


@api.operation("GET", "/api/queues/{name}", "queues", answer=Queue, problems=[404])
def get_queue(broker: Broker, name: QueueName) -> QueueSnapshot:
    """Get one queue."""
    return broker.queue(name)


@api.operation("PUT", "/api/queues/{name}", "queues", answer=Queue, statuses=[200, 201], problems=[409], lasts=True)
def declare_queue(broker: Broker, name: NewQueueName, body: QueueRequest) -> tuple[int, QueueSnapshot]:
    """Declare a queue. If the queue exists with the same settings, nothing changes."""
    exists = broker.has_queue(name)
    try:
        queue = broker.declare_queue(name, durable=body.durable, auto_delete=body.auto_delete, arguments=body.arguments)
    except ChannelException as error:
        if exists or error.code != ReplyCode.PRECONDITION_FAILED:
            raise
        raise Problem(400, error.text, [("arguments", error.text)]) from error
    return 200 if exists else 201, queue


@api.operation("DELETE", "/api/queues/{name}", "queues", answer=Removed, problems=[404], lasts=True)
def delete_queue(broker: Broker, name: QueueName) -> Removed:
    """Delete a queue and its messages."""
    return Removed(messages=broker.delete_queue(name))


@api.operation("POST", "/api/queues/{name}/purge", "queues", answer=Removed, problems=[404])
def purge_queue(broker: Broker, name: QueueName) -> Removed:
    """Remove the ready messages of a queue."""
    return Removed(messages=broker.purge(name))


@api.operation("PATCH", "/api/queues/{name}/thresholds", "flow control", answer=Queue, problems=[404])
def set_thresholds(broker: Broker, name: QueueName, body: ThresholdsRequest) -> QueueSnapshot:  # type: ignore[valid-type]  # made at run time
    """Change the thresholds of a queue. The flow state of the queue is updated immediately.

    A stop threshold of 0 turns off the pair of thresholds. A capacity of 0 turns off the pair of capacities. The new
    thresholds have priority over policies and arguments. The arguments of the queue do not change.
    """
    marks = body.model_dump(exclude_unset=True)  # type: ignore[attr-defined]
    try:
        return broker.set_thresholds(name, **marks)
    except ChannelException as error:
        if error.code != ReplyCode.PRECONDITION_FAILED:
            raise
        raise Problem(400, error.text, [(field, error.text) for field in _named_in(error.text, marks)]) from error


# Policies.


@api.operation("GET", "/api/policies", "policies", each=PolicyAnswer)
def list_policies(broker: Broker) -> list[dict[str, Any]]:
    """List the policies, in the order in which they were first set."""
    return [_policy(policy) for policy in broker.policies]


@api.operation("PUT", "/api/policies/{name}", "policies", answer=PolicyAnswer, statuses=[200, 201])
async def set_policy(
    broker: Broker,
    name: PolicyName,
    body: PolicyRequest,  # type: ignore[valid-type]  # made at run time
    turns: Turns,
) -> tuple[int, dict[str, Any]]:
    """Add a policy, or replace the policy with the same name. Existing queues use the policy immediately."""
    told = body.model_dump()  # type: ignore[attr-defined]
    definition = told.pop("definition")
    try:
        policy = Policy(name, PolicyDefinition(**definition), **told)
        exists = any(each.name == name for each in broker.policies)
        async for _ in turns.each(broker.set_policy_in_steps(policy)):
            pass
    except (TypeError, ValueError) as error:
        text = str(error)
        wrong = [f"definition.{field}" for field in _named_in(text, definition)] + _named_in(text, told)
        raise Problem(400, text, [(field, text) for field in wrong or ["definition"]]) from error
    return 200 if exists else 201, _policy(policy)


@api.operation("DELETE", "/api/policies/{name}", "policies", problems=[404])
async def delete_policy(broker: Broker, name: PolicyName, turns: Turns) -> None:
    """Delete a policy. Queues that used the policy continue with their other policies and their arguments."""
    async for _ in turns.each(broker.delete_policy_in_steps(name)):
        pass


# Rate limits.

Scope = Annotated[Literal["exchange", "queue", "user"], Field(description="Kind of the limited object.")]
Limited = Annotated[str, Field(min_length=1, description="Name of the exchange, queue or user.")]


@api.operation("GET", "/api/rate-limits", "flow control", each=RateLimitAnswer)
def list_rate_limits(broker: Broker) -> list[dict[str, Any]]:
    """List the rate limits, in the order in which they were first set."""
    return [_rate_limit(limit) for limit in broker.rate_limits]


@api.operation("PUT", "/api/rate-limits/{scope}/{name}", "flow control", answer=RateLimitAnswer, statuses=[200, 201])
def set_rate_limit(broker: Broker, scope: Scope, name: Limited, body: RateLimitRequest) -> tuple[int, dict[str, Any]]:
    """Add a rate limit, or replace the rate limit of the same exchange, queue or user."""
    try:
        limit = RateLimit(RateScope(scope), name, body.messages, body.bytes, body.burst)
    except ValueError as error:
        text = str(error)
        wrong = _named_in(text, RateLimitRequest.model_fields)
        raise Problem(400, text, [(field, text) for field in wrong or ["messages", "bytes"]]) from error
    exists = any((each.apply_to, each.name) == (scope, name) for each in broker.rate_limits)
    broker.set_rate_limit(limit)
    return 200 if exists else 201, _rate_limit(limit)


@api.operation("DELETE", "/api/rate-limits/{scope}/{name}", "flow control", problems=[404])
def delete_rate_limit(broker: Broker, scope: Scope, name: Limited) -> None:
    """Delete a rate limit, and unblock (unflow) the channels that this limit blocks."""
    broker.delete_rate_limit(scope, name)


# Exchanges and bindings.


@api.operation("GET", "/api/exchanges", "exchanges", each=Exchange)
def list_exchanges(broker: Broker) -> Iterator[ExchangeSnapshot]:
    """List the exchanges. The first one is the default exchange."""
    return broker.each_exchange()


@api.operation(
    "PUT", "/api/exchanges/{name}", "exchanges", answer=Exchange, statuses=[200, 201], problems=[409], lasts=True
)
def declare_exchange(broker: Broker, name: NewExchangeName, body: ExchangeRequest) -> tuple[int, ExchangeSnapshot]:
    """Declare an exchange. If the exchange exists with the same settings, nothing changes."""
    exists = broker.has_exchange(name)
    exchange = broker.declare_exchange(
        name,
        body.type,
        durable=body.durable,
        auto_delete=body.auto_delete,
        internal=body.internal,
        arguments=body.arguments,
    )
    return 200 if exists else 201, exchange


@api.operation("DELETE", "/api/exchanges/{name}", "exchanges", problems=[404], lasts=True)
def delete_exchange(broker: Broker, name: ExchangeName) -> None:
    """Delete an exchange and its bindings."""
    broker.delete_exchange(name)


@api.operation("GET", "/api/bindings", "exchanges", each=Binding)
def list_bindings(broker: Broker) -> Iterator[dict[str, Any]]:
    """List the bindings, grouped by exchange, without the bindings to the default exchange."""
    return map(_binding, broker.each_binding())


@api.operation("POST", "/api/bindings", "exchanges", answer=Binding, statuses=[201], problems=[404], lasts=True)
def bind(broker: Broker, body: BindingRequest) -> dict[str, Any]:
    """Bind a queue or an exchange to an exchange. If the binding exists, nothing changes."""
    try:
        broker.bind(
            body.source,
            body.destination,
            body.routing_key,
            destination_type=body.destination_type,
            arguments=body.arguments,
        )
    except ChannelException as error:
        if error.code != ReplyCode.PRECONDITION_FAILED:
            raise
        raise Problem(400, error.text, [("arguments", error.text)]) from error
    made = BindingSnapshot(body.source, body.destination, body.destination_type, body.routing_key, dict(body.arguments))
    return _binding(made)


@api.operation("DELETE", "/api/bindings/{id}", "exchanges", problems=[404], lasts=True)
async def unbind(
    broker: Broker,
    id: Annotated[str, Field(min_length=1, description="Id of the binding, from the list of bindings.")],
    turns: Turns,
) -> None:
    """Delete a binding."""
    async for binding in turns.each(broker.each_binding()):
        if binding_id(binding) == id:
            broker.unbind(
                binding.source,
                binding.destination,
                binding.routing_key,
                destination_type="queue" if binding.destination_type == "queue" else "exchange",
                arguments=binding.arguments,
            )
            return
    raise Problem(404, f"there is no binding {id!r}; GET /api/bindings lists all")


# Definitions.


@api.operation("GET", "/api/definitions", "definitions", answer=DefinitionsDocument, is_large=True)
async def export_definitions(broker: Broker, turns: Turns) -> dict[str, Any]:
    """Export the queues, exchanges, bindings and policies.

    The export contains neither exclusive queues nor predeclared exchanges. An exported queue has the arguments with
    which it was declared. Thresholds that an operator has set for the queue are not exported.
    """
    found: dict[type[Exported], list[Exported]] = {ExchangeDefinition: [], QueueDefinition: [], BindingDefinition: []}
    async for each in turns.each(broker.each_definition()):
        found[type(each)].append(each)
    return {
        "exchanges": found[ExchangeDefinition],
        "queues": found[QueueDefinition],
        "bindings": found[BindingDefinition],
        "queue_policies": [policy.to_json() for policy in broker.policies],
    }


@api.operation("POST", "/api/definitions", "definitions", answer=Loaded, lasts=True)
async def load_definitions(broker: Broker, body: DefinitionsDocument, turns: Turns) -> Loaded:
    """Import queues, exchanges, bindings and policies: all of them, or none.

    An object that exists with the same settings is not changed. The document can be an export of RabbitMQ. The answer
    has the names of the parts of the document that this broker ignores. During the import, clients can already see some
    of the objects.
    """
    try:
        with closing(broker.load_in_steps(body.definitions())) as steps:
            async for _ in turns.each(steps):
                pass
    except DefinitionError as error:
        raise Problem(400, str(error), [(error.field, error.text)]) from error
    return Loaded(
        exchanges=len(body.exchanges),
        queues=len(body.queues),
        bindings=len(body.bindings),
        policies=len(body.queue_policies),
        ignored=sorted(body.model_extra or ()),
    )


_Named = TypeVar("_Named", ChannelSnapshot, ConnectionSnapshot)


async def _found(what: str, name: str, all_there_are: AsyncIterator[_Named]) -> _Named:
    async for each in all_there_are:
        if each.name == name:
            return each
    raise Problem(404, f"there is no {what} {name!r}; GET /api/{what}s lists all")


def _named_in(text: str, names: Iterable[str]) -> list[str]:
    """Return those fields whose names and values are in the text of an error, with their names in JSON."""
    return [to_camel(name) for name in names if re.search(rf"\b{name}=", text)]


def _rate_limit(limit: RateLimit) -> dict[str, Any]:
    return {to_camel(name): value for name, value in limit.to_json().items()}


def _policy(policy: Policy) -> dict[str, Any]:
    told = {to_camel(name): value for name, value in policy.to_json().items()}
    # The answer has all fields of a definition. A field that the policy does not set is null.
    names = (field.name for field in fields(PolicyDefinition))
    return told | {"definition": {to_camel(name): told["definition"].get(name) for name in names}}


def _binding(binding: BindingSnapshot) -> dict[str, Any]:
    return binding.to_json() | {"id": binding_id(binding)}
