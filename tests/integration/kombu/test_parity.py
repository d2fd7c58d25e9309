"""What our transport does beside kombu's for py-amqp, on the same broker."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from kombu.transport import pyamqp

from qflow_client import kombu as ours

from .parity import all_scenarios, members, outcome

CLASSES = {name: (getattr(pyamqp, name), getattr(ours, name)) for name in ("Channel", "Connection", "Transport")}


def public(kind: type) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("_")]


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", CLASSES)
def test_every_signature_is_kombus(name: str) -> None:
    theirs, ours = CLASSES[name]
    assert issubclass(ours, theirs)
    for member in public(theirs):
        of_theirs, of_ours = (inspect.getattr_static(kind, member) for kind in (theirs, ours))
        if inspect.isfunction(of_theirs):
            assert parameters(of_ours) == parameters(of_theirs), member


def test_every_public_member_of_the_channel_has_a_scenario() -> None:
    assert set(public(pyamqp.Channel)) == members()


@all_scenarios
@pytest.mark.parametrize("confirms", [False, True], ids=["unconfirmed", "confirmed"])
def test_the_same_result_exception_and_order_of_callbacks(broker: Any, name: str, confirms: bool) -> None:
    broker.delete_queue("q")
    expected = outcome(broker.url, "pyamqp", name, confirms=confirms)
    assert outcome(broker.url, "qflow", name, confirms=confirms) == expected
