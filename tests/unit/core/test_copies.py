"""Public values can be pickled and copied, as pools of processes and applications do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from qflow_client import (
    Binding,
    Credentials,
    Exchange,
    FlowEvent,
    FlowEventKind,
    FlowState,
    HoldKind,
    Message,
    Position,
    ProducerSettings,
    Queue,
    RoutedMessage,
    StoredMessage,
    Topology,
)
from qflow_client.broker import BrokerSettings, Policy, PolicyDefinition, RateLimit, RateScope
from qflow_client.flow import Hold, StopResume
from qflow_client.health import Health

NESTED = {"x-queue-type": "quorum", "list": [1, {"a": 2}]}
HOLD = Hold(HoldKind.CHANNEL_FLOW, since=1.0)


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, *(lambda value, p=p: pickle.loads(pickle.dumps(value, p)) for p in (2, 5))],
    ids=["copy", "deepcopy", "pickle 2", "pickle 5"],
)
@pytest.mark.parametrize(
    "value",
    [
        Queue("q", arguments=NESTED, if_missing=True),
        Exchange("e", "topic", arguments=NESTED),
        Binding("e", "q", arguments=NESTED),
        Topology([Queue("q", arguments=NESTED), "other"], [Exchange("e")], [Binding("e", to_exchange="f")]),
        ProducerSettings(url="amqp://u:p@h?capacity=5"),
        Credentials("user", "password"),
        RoutedMessage(b"body", exchange="e", routing_key="k", headers=NESTED),
        Position("source", 7),
        StoredMessage(1, 2.0, "e", "k", Message(b"body", headers=NESTED), 100, False),
        HOLD,
        StopResume(10, 5),
        FlowState((HOLD,), 1.0, 2, {HoldKind.CHANNEL_FLOW: 3.0}),
        FlowEvent(FlowEventKind.FLOWED, "name", HOLD, (HOLD,), 1.0, 1.0, 0.0, 0, 1, 1, 5),
        Health("ready", (), None, 0, 0, False),
        BrokerSettings(users={"user": "password"}),
        Policy("name", PolicyDefinition(max_count=5), ".*"),
        RateLimit(RateScope.QUEUE, "name", messages=5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_public_value_can_be_pickled_and_copied(value: Any, copied: Callable[[Any], Any]) -> None:
    found = copied(value)
    assert type(found) is type(value)
    assert found == value
    assert repr(found) == repr(value)


def test_the_arguments_of_a_copied_queue_cannot_be_changed() -> None:
    for copied in copy.deepcopy(Queue("q", arguments={"a": 1})), pickle.loads(pickle.dumps(Queue("q"))):
        with pytest.raises(TypeError):
            copied.arguments["b"] = 2  # type: ignore[index]  # on purpose


def test_a_queue_is_not_changed_when_the_caller_changes_the_dict_of_arguments_later() -> None:
    arguments: dict[str, Any] = {"list": [1]}
    queue = Queue("q", arguments=arguments)
    arguments["list"].append(2)
    assert queue.arguments == {"list": [1]}
