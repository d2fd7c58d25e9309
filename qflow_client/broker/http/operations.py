"""Everything that can be asked of the broker over HTTP."""

from __future__ import annotations

import re
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
from qflow_client.broker.http.events import EventStream
from qflow_client.broker.http.metrics import MEDIA_TYPE as PROMETHEUS
from qflow_client.broker.http.metrics import metrics_text
from qflow_client.broker.http.models import (
    Binding,
    BindingRequest,
    Channel,
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
    QueueRequest,
    RateLimitAnswer,
    RateLimitRequest,
    Removed,
    ThresholdsRequest,
    binding_id,
)
from qflow_client.broker.http.openapi import Api
from qflow_client.broker.http.problems import Problem
from qflow_client.broker.policies.definitions import DefinitionError
from qflow_client.broker.policies.marks import MARKS
from qflow_client.broker.policies.policy import Policy, PolicyDefinition
from qflow_client.broker.policies.rates import RateLimit, RateScope

__all__ = ["api"]

api = Api()

QueueName = Annotated[str, Field(min_length=1, description="of the queue")]
ExchangeName = Annotated[str, Field(min_length=1, description="of the exchange")]
ChannelName = Annotated[str, Field(min_length=1, description="of the channel, as its producer's snapshot has it")]
ConnectionName = Annotated[str, Field(min_length=1, description="of the connection")]


# What there is.


@api.operation("GET", "/api/health", "broker", answer=Health, is_public=True)
def health(broker: Broker) -> Health:
    """Whether the broker runs."""
    return Health()


@api.operation("GET", "/api/openapi.json", "broker", answer=dict[str, Any], is_public=True)
def openapi(broker: Broker) -> bytes:
    """This description."""
    return api.description_json(has_token=broker.settings.http_token is not None)


@api.operation("GET", "/api/counters", "broker", answer=Counters)
def counters(broker: Broker) -> Counters:
    """Sums over everything, by the names that Qpid's management has for them (C7)."""
    queues, channels = broker.queues(), broker.channels()
    producers = [channel for channel in channels if channel.is_producer]
    return Counters(
        connections=len(broker.connections()),
        channels=len(channels),
        producers=len(producers),
        producers_flowed=sum(producer.flowed for producer in producers),
        producers_stopped=broker.producers_stopped,
        queues=len(queues),
        queues_flow_stopped=sum(queue.flow_stopped for queue in queues),
        flow_stopped_count=sum(queue.flow_stopped_count for queue in queues),
        exchanges=len(broker.exchanges()),
        depth=sum(queue.depth for queue in queues),
        ready=sum(queue.ready for queue in queues),
        unacked=sum(queue.unacked for queue in queues),
        bytes=sum(queue.bytes for queue in queues),
        held_confirms=sum(queue.held_confirms for queue in queues),
        published=sum(queue.published for queue in queues),
        delivered=sum(queue.delivered for queue in queues),
        acked=sum(queue.acked for queue in queues),
        dropped=sum(queue.dropped for queue in queues),
        consumers=sum(queue.consumers for queue in queues),
        alarms=broker.alarms,
        memory=Memory(**broker.memory.to_json()),
        sanctions=broker.sanctions,
    )


@api.operation("GET", "/api/flow-states", "flow control", answer=FlowStates)
def flow_states(broker: Broker) -> dict[str, Any]:
    """Queues with their flow states, and the channels that each of them holds."""

    def part(of: dict[str, Any], *names: str) -> dict[str, Any]:
        return {name: of[name] for name in names}

    return {
        "producersStopped": broker.producers_stopped,
        "queues": [
            part(
                queue.to_json(),
                "name",
                "flowState",
                "flowStopped",
                "flowStoppedCount",
                "depth",
                "bytes",
                "thresholds",
                "enforcement",
                "blocked",
                "heldConfirms",
            )
            for queue in broker.queues()
        ],
        "channels": [
            part(channel.to_json(), "name", "connection", "blockedBy", "flowOk", "timesFlowed", "flowedSeconds")
            for channel in broker.channels()
            if channel.flowed
        ],
    }


@api.operation("GET", "/api/events", "broker", answer=str, media_type="text/event-stream")
def events(
    broker: Broker,
    period: Annotated[float, Field(ge=0.1, le=60, description="seconds between two looks at the broker")] = 1.0,
) -> EventStream:
    """What changes, as server-sent events.

    The first event, `state`, has everything: `queues`, `channels`, `connections`, `exchanges`, `bindings` and
    `producersStopped`. Every `change` that follows has those queues, channels and connections that are new or other
    than before, the names of those that are `gone`, and the rest if it has changed. The time for which a channel has
    been flowed is no change by itself.
    """
    return EventStream(broker, period)


@api.operation("GET", "/metrics", "broker", answer=str, media_type=PROMETHEUS)
def metrics(broker: Broker) -> bytes:
    """Metrics for Prometheus, in its text format."""
    return metrics_text(broker)


# Connections and channels.


@api.operation("GET", "/api/connections", "connections", each=Connection)
def list_connections(broker: Broker) -> tuple[ConnectionSnapshot, ...]:
    """All connections, oldest first."""
    return broker.connections()


@api.operation("GET", "/api/connections/{name}", "connections", answer=Connection, problems=[404])
def get_connection(broker: Broker, name: ConnectionName) -> ConnectionSnapshot:
    """A connection."""
    return _found("connection", name, broker.connections())


@api.operation("DELETE", "/api/connections/{name}", "connections", problems=[404])
def close_connection(broker: Broker, name: ConnectionName) -> None:
    """Close a connection with `Connection.Close` (320)."""
    broker.close_connections(connection=name)


@api.operation("GET", "/api/channels", "connections", each=Channel)
def list_channels(broker: Broker) -> tuple[ChannelSnapshot, ...]:
    """All open channels."""
    return broker.channels()


@api.operation("GET", "/api/channels/{name}", "connections", answer=Channel, problems=[404])
def get_channel(broker: Broker, name: ChannelName) -> ChannelSnapshot:
    """A channel: whether it is flowed, by which queues, how often, for how long."""
    return _found("channel", name, broker.channels())


# Producers.


@api.operation("GET", "/api/producers", "flow control", each=Channel)
def list_producers(broker: Broker) -> tuple[ChannelSnapshot, ...]:
    """The channels that publish, or said that they will."""
    return broker.producers()


@api.operation("POST", "/api/producers/stop", "flow control")
def stop_producers(broker: Broker) -> None:
    """Stop all producers, those to come too (D5)."""
    broker.flow(active=False)


@api.operation("POST", "/api/producers/start", "flow control")
def start_producers(broker: Broker) -> None:
    """Start all producers; queues keep their holds (D5)."""
    broker.flow(active=True)


@api.operation("POST", "/api/producers/{name}/stop", "flow control", problems=[404])
def stop_producer(broker: Broker, name: ChannelName) -> None:
    """Stop one producer (D5)."""
    broker.flow(active=False, channel=name)


@api.operation("POST", "/api/producers/{name}/start", "flow control", problems=[404])
def start_producer(broker: Broker, name: ChannelName) -> None:
    """Start one producer; queues go on holding it (D5)."""
    broker.flow(active=True, channel=name)


# Queues.


@api.operation("GET", "/api/queues", "queues", each=Queue)
def list_queues(broker: Broker) -> tuple[QueueSnapshot, ...]:
    """All queues, in the order in which they were made."""
    return broker.queues()


@api.operation("GET", "/api/queues/{name}", "queues", answer=Queue, problems=[404])
def get_queue(broker: Broker, name: QueueName) -> QueueSnapshot:
    """A queue."""
    return broker.queue(name)


@api.operation("PUT", "/api/queues/{name}", "queues", answer=Queue, statuses=[200, 201], problems=[409], lasts=True)
def declare_queue(broker: Broker, name: Name, body: QueueRequest) -> tuple[int, QueueSnapshot]:
    """Make a queue, or find the one that was declared alike."""
    exists = any(queue.name == name for queue in broker.queues())
    try:
        queue = broker.declare_queue(name, durable=body.durable, auto_delete=body.auto_delete, arguments=body.arguments)
    except ChannelException as error:
        if exists or error.code != ReplyCode.PRECONDITION_FAILED:
            raise
        raise Problem(400, error.text, [("arguments", error.text)]) from error
    return 200 if exists else 201, queue


@api.operation("DELETE", "/api/queues/{name}", "queues", answer=Removed, problems=[404], lasts=True)
def delete_queue(broker: Broker, name: QueueName) -> Removed:
    """Delete a queue with all that is in it."""
    return Removed(messages=broker.delete_queue(name))


@api.operation("POST", "/api/queues/{name}/purge", "queues", answer=Removed, problems=[404])
def purge_queue(broker: Broker, name: QueueName) -> Removed:
    """Remove the ready messages of a queue."""
    return Removed(messages=broker.purge(name))


@api.operation("PATCH", "/api/queues/{name}/thresholds", "flow control", answer=Queue, problems=[404])
def set_thresholds(broker: Broker, name: QueueName, body: ThresholdsRequest) -> QueueSnapshot:  # type: ignore[valid-type]
    """Put other marks in force while a queue is in use; the flow state follows at once (D4).

    A stop, or a capacity, of 0 turns it off, and its resume with it.
    """
    marks = body.model_dump(exclude_unset=True)  # type: ignore[attr-defined]
    try:
        return broker.set_thresholds(name, **marks)
    except ChannelException as error:
        if error.code != ReplyCode.PRECONDITION_FAILED:
            raise
        wrong = [to_camel(mark) for mark in MARKS if mark in marks and re.search(rf"\b{mark}=", error.text)]
        raise Problem(400, error.text, [(field, error.text) for field in wrong]) from error


# Policies.


@api.operation("GET", "/api/policies", "policies", each=PolicyAnswer)
def list_policies(broker: Broker) -> list[dict[str, Any]]:
    """All policies, in the order in which they were set first."""
    return [_policy(policy) for policy in broker.policies]


@api.operation("PUT", "/api/policies/{name}", "policies", answer=PolicyAnswer, statuses=[200, 201])
def set_policy(
    broker: Broker,
    name: Annotated[str, Field(min_length=1, description="of the policy")],
    body: PolicyRequest,  # type: ignore[valid-type]
) -> tuple[int, dict[str, Any]]:
    """Add a policy, or replace the one of its name; queues that are there follow at once (D4)."""
    told = body.model_dump()  # type: ignore[attr-defined]
    definition = told.pop("definition")
    try:
        policy = Policy(name, PolicyDefinition(**definition), **told)
        exists = any(each.name == name for each in broker.policies)
        broker.set_policy(policy)
    except (TypeError, ValueError) as error:
        text = str(error)
        wrong = [f"definition.{to_camel(field)}" for field in definition if re.search(rf"\b{field}=", text)]
        wrong += [to_camel(field) for field in told if re.search(rf"\b{field}=", text)]
        raise Problem(400, text, [(field, text) for field in wrong or ["definition"]]) from error
    return 200 if exists else 201, _policy(policy)


@api.operation("DELETE", "/api/policies/{name}", "policies", problems=[404])
def delete_policy(broker: Broker, name: Annotated[str, Field(min_length=1, description="of the policy")]) -> None:
    """Remove a policy; queues go back to what else applies to them."""
    broker.delete_policy(name)


# Rate limits.

Scope = Annotated[Literal["exchange", "queue", "user"], Field(description="what the name is of")]
Limited = Annotated[str, Field(min_length=1, description="of the exchange, the queue or the user")]


@api.operation("GET", "/api/rate-limits", "flow control", each=RateLimitAnswer)
def list_rate_limits(broker: Broker) -> list[dict[str, Any]]:
    """All rate limits, in the order in which they were set first."""
    return [_rate_limit(limit) for limit in broker.rate_limits]


@api.operation("PUT", "/api/rate-limits/{scope}/{name}", "flow control", answer=RateLimitAnswer, statuses=[200, 201])
def set_rate_limit(broker: Broker, scope: Scope, name: Limited, body: RateLimitRequest) -> tuple[int, dict[str, Any]]:
    """Add a rate limit, or replace the one for the same exchange, queue or user (F6)."""
    try:
        limit = RateLimit(RateScope(scope), name, body.messages, body.bytes, body.burst)
    except ValueError as error:
        text = str(error)
        wrong = [field for field in RateLimitRequest.model_fields if re.search(rf"\b{field}=", text)]
        raise Problem(400, text, [(field, text) for field in wrong or ["messages", "bytes"]]) from error
    exists = any((each.apply_to, each.name) == (scope, name) for each in broker.rate_limits)
    broker.set_rate_limit(limit)
    return 200 if exists else 201, _rate_limit(limit)


@api.operation("DELETE", "/api/rate-limits/{scope}/{name}", "flow control", problems=[404])
def delete_rate_limit(broker: Broker, scope: Scope, name: Limited) -> None:
    """Remove a rate limit, and release the channels that it holds."""
    broker.delete_rate_limit(scope, name)


# Exchanges and bindings.


@api.operation("GET", "/api/exchanges", "exchanges", each=Exchange)
def list_exchanges(broker: Broker) -> tuple[ExchangeSnapshot, ...]:
    """All exchanges, the default exchange first."""
    return broker.exchanges()


@api.operation(
    "PUT", "/api/exchanges/{name}", "exchanges", answer=Exchange, statuses=[200, 201], problems=[409], lasts=True
)
def declare_exchange(broker: Broker, name: Name, body: ExchangeRequest) -> tuple[int, ExchangeSnapshot]:
    """Make an exchange, or find the one that was declared alike."""
    exists = any(exchange.name == name for exchange in broker.exchanges())
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
    """Delete an exchange with its bindings."""
    broker.delete_exchange(name)


@api.operation("GET", "/api/bindings", "exchanges", each=Binding)
def list_bindings(broker: Broker) -> list[dict[str, Any]]:
    """All bindings, by exchange; not those that the default exchange has with every queue."""
    return [_binding(binding) for binding in broker.bindings()]


@api.operation("POST", "/api/bindings", "exchanges", answer=Binding, statuses=[201], problems=[404], lasts=True)
def bind(broker: Broker, body: BindingRequest) -> dict[str, Any]:
    """Bind a queue or an exchange to an exchange; once more changes nothing."""
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
def unbind(
    broker: Broker, id: Annotated[str, Field(min_length=1, description="as the list of bindings has it")]
) -> None:
    """Delete a binding."""
    for binding in broker.bindings():
        if binding_id(binding) == id:
            broker.unbind(
                binding.source,
                binding.destination,
                binding.routing_key,
                destination_type="queue" if binding.destination_type == "queue" else "exchange",
                arguments=binding.arguments,
            )
            return
    raise Problem(404, f"there is no binding {id!r}")


# Definitions.


@api.operation("GET", "/api/definitions", "definitions", answer=DefinitionsDocument)
def export_definitions(broker: Broker) -> DefinitionsDocument:
    """The queues, exchanges, bindings and policies, but for exclusive queues and what every broker has.

    Queues have the arguments that they were declared with; marks that were changed since are not told.
    """
    definitions = broker.definitions()
    return DefinitionsDocument(
        exchanges=list(definitions.exchanges),
        queues=list(definitions.queues),
        bindings=list(definitions.bindings),
        queue_policies=[policy.to_json() for policy in definitions.policies],
    )


@api.operation("POST", "/api/definitions", "definitions", answer=Loaded, lasts=True)
def load_definitions(broker: Broker, body: DefinitionsDocument) -> Loaded:
    """Declare everything, or nothing; what is there alike stays.

    The definitions that RabbitMQ exports are understood; parts that mean nothing here are named in the answer.
    """
    try:
        broker.load_definitions(body.definitions())
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


def _found(what: str, name: str, all_there_are: tuple[_Named, ...]) -> _Named:
    for each in all_there_are:
        if each.name == name:
            return each
    raise Problem(404, f"there is no {what} {name!r}")


def _rate_limit(limit: RateLimit) -> dict[str, Any]:
    return {to_camel(name): value for name, value in limit.to_json().items()}


def _policy(policy: Policy) -> dict[str, Any]:
    told = {to_camel(name): value for name, value in policy.to_json().items()}
    # What it says nothing about is null.
    names = (field.name for field in fields(PolicyDefinition))
    return told | {"definition": {to_camel(name): told["definition"].get(name) for name in names}}


def _binding(binding: BindingSnapshot) -> dict[str, Any]:
    return binding.to_json() | {"id": binding_id(binding)}
