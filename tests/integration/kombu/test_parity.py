"""The transport here compared with kombu's transport for py-amqp, on the same broker."""

from __future__ import annotations

import inspect

import pytest
from kombu.transport import pyamqp

from qflow_client import kombu as ours
from qflow_client.broker import Broker
from tests.integration.parity import members, parameters, public, until_release

from .parity import SCENARIOS, all_scenarios, outcome_on_its_own

# The newest releases with which these tests have passed.
KNOWN = {"amqp": "5.4.2", "kombu": "5.7.0"}

CLASSES = {name: (getattr(pyamqp, name), getattr(ours, name)) for name in ("Channel", "Connection", "Transport")}


@pytest.mark.parametrize("name", CLASSES)
def test_every_method_of_the_qflow_transport_has_the_signature_of_the_pyamqp_transport(name: str) -> None:
    theirs, ours = CLASSES[name]
    assert issubclass(ours, theirs)
    for member, of_theirs in members(theirs).items():
        if inspect.isfunction(of_theirs):
            with until_release(**KNOWN):
                assert parameters(inspect.getattr_static(ours, member)) == parameters(of_theirs), member


def test_every_public_member_of_a_channel_of_kombu_has_a_parity_scenario() -> None:
    with until_release(**KNOWN):
        assert public(pyamqp.Channel) == {name.partition("__")[0] for name in SCENARIOS}


@all_scenarios
@pytest.mark.parametrize("confirms", [False, True], ids=["unconfirmed", "confirmed"])
def test_the_qflow_transport_has_the_results_exceptions_and_order_of_callbacks_of_pyamqp(
    name: str, confirms: bool
) -> None:
    with Broker() as one, Broker() as other:
        expected = outcome_on_its_own(one.url, "pyamqp", name, confirms=confirms)
        assert outcome_on_its_own(other.url, "qflow", name, confirms=confirms) == expected
