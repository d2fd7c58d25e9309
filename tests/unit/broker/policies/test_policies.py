from __future__ import annotations

import json
from typing import Any

import pytest
from pamqp import commands

from qflow_client.broker.core.errors import ChannelException
from qflow_client.broker.core.settings import Enforcement
from qflow_client.broker.core.timers import Slices, Timers
from qflow_client.broker.policies.arguments import QueueArguments, resolve_limits
from qflow_client.broker.policies.overflow import Conflate, Reject, Ring, Wait
from qflow_client.broker.policies.policy import ApplyTo, Policy, PolicyDefinition, QueuePolicy
from qflow_client.broker.settings import BrokerSettings
from qflow_client.flow import StopResume

Definition = PolicyDefinition


def policy(name="p", pattern="", apply_to="queues", routing_key=None, priority=0, **definition):
    return Policy(name, PolicyDefinition.from_mapping(definition), pattern, apply_to, routing_key, priority)


def limits(definition, arguments=None, **settings):
    own = QueueArguments.read("q", arguments or {})
    return resolve_limits("q", definition.over(own.definition), BrokerSettings(**settings), overflow=own.overflow)


# Definitions.


def test_a_policy_definition_accepts_the_names_of_queue_policies_and_enforcements():
    found = Definition.from_mapping({"policy": "ring", "max_count": 5, "enforcement": "completion"})
    assert found == Definition(policy=QueuePolicy.RING, max_count=5, enforcement=Enforcement.COMPLETION)
    assert found.to_json() == {"policy": "ring", "max_count": 5, "enforcement": "completion"}
    assert json.loads(json.dumps(found.to_json())) == found.to_json()


@pytest.mark.parametrize(
    ("definition", "error", "words"),
    [
        ({"polcy": "ring"}, ValueError, ("'polcy'", "did you mean 'policy'")),
        ({"policy": "drop"}, ValueError, ("policy='drop'", "reject")),
        ({"policy": 1}, ValueError, ("policy=1",)),
        ({"max_count": "1"}, TypeError, ("max_count='1'", "integer")),
        ({"max_count": True}, TypeError, ("max_count=True", "integer")),
        ({"max_size": -1}, ValueError, ("max_size=-1", "at least 0")),
        ({"flow_stop_count": 5, "flow_resume_count": 6}, ValueError, ("flow_stop_count=5", "flow_resume_count=6")),
        ({"flow_stop_count": 5, "flow_resume_count": 0}, ValueError, ("flow_stop_count=5", "flow_resume_count=0")),
        ({"flow_resume_size": 5}, ValueError, ("flow_resume_size=5", "flow_stop_size")),
        ({"flow_stop_count": 6, "max_count": 5}, ValueError, ("flow_stop_count=6", "max_count=5")),
        ({"flow_stop_size": 6, "max_size": 5}, ValueError, ("flow_stop_size=6", "max_size=5")),
        ({"capacity": 5, "flow_resume_capacity": 6}, ValueError, ("capacity=5", "flow_resume_capacity=6")),
        ({"max_flow_wait": 0}, ValueError, ("max_flow_wait=0", "more than 0")),
        ({"max_flow_wait": float("inf")}, ValueError, ("max_flow_wait=inf",)),
        ({"max_flow_wait": "1"}, TypeError, ("max_flow_wait='1'", "seconds")),
        ({"then": "ring"}, ValueError, ("then=", "max_flow_wait")),
        ({"max_flow_wait": 1, "then": "flow"}, ValueError, ("then=", "reject, ring, wait")),
        ({"max_flow_wait": 1, "then": "conflate"}, ValueError, ("then=", "reject, ring, wait")),
        ({"conflate_key": "k"}, ValueError, ("conflate_key='k'", "policy=conflate")),
        ({"conflate_key": "", "policy": "conflate"}, TypeError, ("conflate_key=''", "header")),
        ({"enforcement": "no"}, ValueError, ("enforcement='no'", "both")),
        ({"drop_transient": "yes"}, TypeError, ("drop_transient='yes'", "true or false")),
        ({"drop_transient": 1}, TypeError, ("drop_transient=1", "true or false")),
    ],
)
def test_an_invalid_policy_definition_raises_an_error_with_the_reason(definition, error, words):
    with pytest.raises(error) as caught:
        Definition.from_mapping(definition)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"name": ""}, ValueError, ("name=''",)),
        ({"definition": {}}, ValueError, ("sets nothing",)),
        ({"definition": 5}, TypeError, ("definition=5",)),
        ({"definition": {"flow_resume_capacity": 5}}, ValueError, ("flow_resume_capacity without capacity",)),
        ({"pattern": "("}, ValueError, ("pattern='('", "regular expression")),
        ({"pattern": 1}, ValueError, ("pattern=1",)),
        ({"apply_to": "all"}, ValueError, ("apply_to='all'", "queues, routing_keys, exchanges, virtual_host")),
        ({"routing_key": "a"}, ValueError, ("routing_key='a'", "routing_keys")),
        ({"apply_to": "routing_keys"}, ValueError, ("routing_key=None", "routing_keys")),
        ({"apply_to": "routing_keys", "routing_key": "["}, ValueError, ("routing_key='['",)),
        ({"priority": "1"}, TypeError, ("priority='1'",)),
    ],
)
def test_an_invalid_policy_raises_an_error_with_the_reason(options, error, words):
    given: dict[str, Any] = {"name": "p", "definition": {"max_count": 1}, **options}
    with pytest.raises(error) as caught:
        Policy(**given)
    for word in words:
        assert word in str(caught.value)


def test_a_policy_can_be_parsed_from_a_text_with_its_name_and_key_value_pairs():
    assert Policy.parse("small pattern='^a b' max_count=9 policy=ring priority=2") == Policy(
        "small", Definition(max_count=9, policy=QueuePolicy.RING), "^a b", priority=2
    )
    found = Policy.parse("p apply_to=routing_keys pattern=x routing_key=y max_flow_wait=0.5 then=ring flow_stop_size=1")
    assert (found.apply_to, found.routing_key, found.definition.max_flow_wait) == (ApplyTo.ROUTING_KEYS, "y", 0.5)
    assert found.to_json() == {
        "name": "p",
        "pattern": "x",
        "apply_to": "routing_keys",
        "routing_key": "y",
        "priority": 0,
        "definition": {"flow_stop_size": 1, "max_flow_wait": 0.5, "then": "ring"},
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("name=''",)),
        ("p max_count", ("'max_count'", "KEY=VALUE")),
        ("p max_count=1 max_count=2", ("'max_count=2'", "once")),
        ("p max_count=x", ("max_count='x'", "number")),
        ("p max_cont=1", ("'max_cont'", "'max_count'")),
        ("p", ("sets nothing",)),
    ],
)
def test_a_policy_text_with_a_mistake_raises_an_error_with_the_reason(text, words):
    with pytest.raises(ValueError) as caught:
        Policy.parse(text)
    for word in words:
        assert word in str(caught.value)


# The limits that result from definitions.


@pytest.mark.parametrize(
    ("policy", "overflow", "stop_resume"),
    [
        ("flow", None, StopResume(8, 7)),
        ("reject", Reject(10), StopResume(8, 7)),
        (None, Reject(10), StopResume(8, 7)),
        ("ring", Ring(10), StopResume()),
        ("ring_strict", Ring(10, strict=True), StopResume()),
        ("wait", Wait(10), StopResume()),
        ("conflate", Conflate(10), StopResume()),
    ],
)
def test_C4_a_maximum_sets_default_thresholds_only_with_the_policies_reject_and_flow(policy, overflow, stop_resume):
    found = limits(Definition.from_mapping({"policy": policy, "max_count": 10}))
    assert (found.overflow, found.stop_resume) == (overflow, stop_resume)
    assert found.policy == (policy or "reject")
    arguments: dict[str, object] = {"qpid.max_count": 10} | ({"x-qflow-policy": policy} if policy else {})
    assert limits(Definition(), arguments) == found


def test_a_policy_replaces_only_the_queue_arguments_for_which_it_has_a_value():
    arguments = {"qpid.flow_stop_count": 100, "qpid.flow_resume_count": 90, "qpid.max_count": 200, "qpid.max_size": 50}
    found = limits(Definition(flow_stop_count=20), arguments)
    assert found.stop_resume == StopResume(20, 17)
    assert found.overflow == Reject(200, 50)
    found = limits(Definition(max_count=30, policy=QueuePolicy.RING), arguments)
    assert (found.stop_resume, found.overflow) == (StopResume(30, 30), Ring(30, 50))
    found = limits(Definition(max_count=0, max_size=0), arguments)
    assert (found.stop_resume, found.overflow) == (StopResume(100, 90), None)
    found = limits(Definition(policy=QueuePolicy.RING, max_count=5), {"x-max-length": 9})
    assert found.overflow == Ring(5)
    found = limits(Definition(flow_stop_count=5), {"x-max-length": 9})
    assert (found.stop_resume, found.policy) == (StopResume(5, 4), "drop-head")


def test_D10_after_max_flow_wait_the_maximum_or_else_the_stop_thresholds_limit_the_queue():
    assert limits(Definition(flow_stop_count=9, max_flow_wait=1)).overdue_overflow == Reject(9)
    assert limits(Definition(capacity=9, max_flow_wait=1, then=QueuePolicy.RING)).overdue_overflow == Ring(None, 9)
    found = limits(Definition(flow_stop_size=9, max_size=20, max_flow_wait=1, then=QueuePolicy.WAIT))
    assert found.overdue_overflow == Wait(None, 20)


def test_several_policies_are_combined_to_the_strictest_value_of_each_setting():
    found = Definition.strictest(
        [
            Definition(flow_stop_count=100, flow_resume_count=10, max_size=1000, policy=QueuePolicy.RING),
            Definition(flow_stop_count=50, max_flow_wait=9, enforcement=Enforcement.COMPLETION),
            Definition(max_count=40, capacity=5, policy=QueuePolicy.REJECT, enforcement=Enforcement.CHANNEL_FLOW),
            Definition(max_size=0, capacity=7, flow_resume_capacity=1, max_flow_wait=3, then=QueuePolicy.RING),
        ]
    )
    assert found == Definition(
        flow_stop_count=40,
        flow_resume_count=10,
        max_count=40,
        max_size=1000,
        capacity=5,
        flow_resume_capacity=1,
        policy=QueuePolicy.REJECT,
        enforcement=Enforcement.BOTH,
        max_flow_wait=3,
        then=QueuePolicy.RING,
    )


@pytest.mark.parametrize(
    ("said", "strictest"),
    [
        ((None, None), None),
        ((False, None), False),
        ((True, None), True),
        ((True, False), True),
        ((False, False), False),
    ],
)
def test_A1_of_two_policies_the_one_that_allows_dropping_transient_messages_counts_as_stricter(said, strictest):
    found = Definition.strictest(Definition(policy=QueuePolicy.FLOW, drop_transient=each) for each in said)
    assert found.drop_transient is strictest


@pytest.mark.parametrize(("word", "value"), [("true", True), ("false", False)])
def test_A1_drop_transient_in_the_text_of_a_policy_must_be_true_or_false(word, value):
    policy = Policy.parse(f"p drop_transient={word}")
    assert policy.definition == Definition(drop_transient=value)
    assert policy.to_json()["definition"] == {"drop_transient": value}
    with pytest.raises(TypeError, match="drop_transient='maybe'"):
        Policy.parse("p drop_transient=maybe")


@pytest.mark.parametrize(
    ("policies", "strictest"),
    [
        (["flow", "conflate", "ring", "ring_strict", "wait", "reject"], "reject"),
        (["flow", "conflate", "ring", "ring_strict", "wait"], "wait"),
        (["flow", "conflate", "ring", "ring_strict"], "ring_strict"),
        (["conflate", "ring"], "ring"),
        (["conflate", "flow"], "conflate"),
    ],
)
def test_of_several_queue_policies_the_strictest_applies(policies, strictest):
    found = Definition.strictest(Definition.from_mapping({"policy": each}) for each in policies)
    assert found.policy == strictest


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x-qflow-policy": "ring"}, ("x-qflow-policy=ring", "qpid.max_count", "qpid.max_size")),
        ({"x-qflow-policy": "wait", "qpid.max_count": 0}, ("x-qflow-policy=wait", "qpid.max_count")),
        ({"x-qflow-policy": "x"}, ("x-qflow-policy='x'", "conflate")),
        ({"x-qflow-policy": "ring", "qpid.policy_type": "ring"}, ("x-qflow-policy", "qpid.policy_type", "one")),
        ({"x-qflow-policy": "ring", "x-max-length": 1}, ("x-max-", "one")),
        ({"qpid.policy_type": "wait"}, ("qpid.policy_type='wait'", "reject, ring, ring_strict")),
        ({"x-qflow-max-flow-wait": "1"}, ("x-qflow-max-flow-wait='1'", "seconds")),
        ({"x-qflow-then": "ring"}, ("x-qflow-then=", "max_flow_wait")),
        ({"x-qflow-conflate-key": "k"}, ("x-qflow-conflate-key='k'", "x-qflow-policy=conflate")),
        ({"x-qflow-drop-transient": "true"}, ("x-qflow-drop-transient='true'", "true or false")),
        ({"x-qflow-polcy": "ring"}, ("x-qflow-polcy", "did you mean x-qflow-policy")),
    ],
)
def test_an_error_about_a_policy_in_queue_arguments_shows_the_names_of_the_queue_arguments(arguments, words):
    with pytest.raises(ChannelException) as caught:
        QueueArguments.read("q", arguments)
    assert caught.value.code == 406
    for word in words:
        assert word in caught.value.text


# The policy that applies (D3).


def bind(client, queue, exchange, routing_key=""):
    client.call(1, commands.Queue.Bind(queue=queue, exchange=exchange, routing_key=routing_key), commands.Queue.BindOk)


def unbind(client, queue, exchange, routing_key=""):
    method = commands.Queue.Unbind(queue=queue, exchange=exchange, routing_key=routing_key)
    client.call(1, method, commands.Queue.UnbindOk)


def in_force(world, queue="q"):
    found = world.queue(queue).limits
    return found.overflow and found.overflow.max_count, found.policies


@pytest.fixture(name="client")
def _client(world):
    client = world.client().channel().with_queue()
    bind(client, "q", "amq.topic", "orders.new")
    return client


ALL = (
    policy("vhost", "^/$", "virtual_host", max_count=1, policy="ring"),
    policy("exchange", "^amq.topic$", "exchanges", max_count=2, policy="ring"),
    policy("key", "^amq.topic$", "routing_keys", r"^orders\.", max_count=3, policy="ring"),
    policy("queue", "^q$", max_count=4, policy="ring"),
)


def test_D3_a_policy_for_a_queue_precedes_one_for_a_routing_key_an_exchange_or_the_virtual_host(world, client):
    for each, count in zip(ALL, (1, 2, 3, 4), strict=True):
        world.set_policy(each)
        assert in_force(world) == (count, (each.name,))
    for each, below in zip(ALL[::-1], (3, 2, 1, None), strict=True):
        world.delete_policy(each.name)
        assert in_force(world)[0] == below
    assert in_force(world) == (None, ())


def test_D3_the_arguments_of_a_queue_override_inherited_settings(world, client):
    for each in ALL[:3]:
        world.set_policy(each)
    client.declare("own", arguments={"qpid.max_count": 9, "x-qflow-policy": "ring"})
    bind(client, "own", "amq.topic", "orders.old")
    assert in_force(world, "own") == (9, ())
    client.declare("rabbit", arguments={"x-max-length": 8})
    bind(client, "rabbit", "amq.topic", "orders.old")
    assert in_force(world, "rabbit") == (8, ())
    client.declare("lean", arguments={"x-qflow-enforcement": "completion"})
    assert in_force(world, "lean") == (1, ("vhost",))
    assert world.queue("lean").limits.enforcement is Enforcement.COMPLETION


@pytest.mark.parametrize(
    ("exchange", "routing_key", "applies"),
    [
        ("^amq.topic$", r"^orders\.", True),
        ("topic", "new", True),
        ("^amq.topic$", r"^orders$", False),
        ("^amq.direct$", r"^orders\.", False),
        ("^$", "^q$", True),
    ],
    ids=repr,
)
def test_D3_a_policy_with_an_exchange_and_a_routing_key_applies_only_if_one_binding_matches_both(
    world, client, exchange, routing_key, applies
):
    bind(client, "q", "amq.direct", "other")
    world.set_policy(policy("p", exchange, "routing_keys", routing_key, max_count=5))
    assert in_force(world) == ((5, ("p",)) if applies else (None, ()))


def test_D3_queues_inherit_the_policies_of_exchanges_that_are_bound_to_their_exchange(world, client):
    declare = commands.Exchange.Declare(exchange="far", exchange_type="fanout")
    client.call(1, declare, commands.Exchange.DeclareOk)
    world.set_policy(policy("far", "^far$", "exchanges", max_count=5))
    assert in_force(world) == (None, ())
    client.call(1, commands.Exchange.Bind(destination="amq.topic", source="far"), commands.Exchange.BindOk)
    assert in_force(world) == (5, ("far",))
    client.call(1, commands.Exchange.Delete(exchange="far"), commands.Exchange.DeleteOk)
    assert in_force(world) == (None, ())


def test_D3_queues_inherit_the_policies_of_exchanges_whose_alternate_exchange_is_their_exchange(world, client):
    world.set_policy(policy("far", "^far$", "exchanges", max_count=5))
    arguments: Any = {"alternate-exchange": "amq.topic"}
    declare = commands.Exchange.Declare(exchange="far", exchange_type="fanout", arguments=arguments)
    client.call(1, declare, commands.Exchange.DeclareOk)
    assert in_force(world) == (5, ("far",))
    client.call(1, commands.Exchange.Delete(exchange="far"), commands.Exchange.DeleteOk)
    assert in_force(world) == (None, ())


def test_E9_a_deleted_exchange_changes_the_limits_of_many_queues_in_slices(world, client, monkeypatch):
    monkeypatch.setattr(Slices, "AT_ONCE", 2)
    monkeypatch.setattr(Timers, "MAX_TICK", 0.0)
    world.set_policy(policy("far", "^far", "exchanges", max_count=5))
    for name in ("far1", "far2"):
        client.call(1, commands.Exchange.Declare(exchange=name, exchange_type="fanout"), commands.Exchange.DeclareOk)
    queues = ["q", "q2", "q3", "q4"]
    for queue in queues:
        if queue != "q":
            client.declare(queue)
        bind(client, queue, "far1" if queue == "q3" else "far2")
    client.send(1, commands.Exchange.Delete(exchange="far2"))
    assert [in_force(world, queue)[0] for queue in queues] == [None, None, 5, 5]
    # The next change does not begin again at the first queue.
    client.send(1, commands.Exchange.Delete(exchange="far1"))
    assert [in_force(world, queue)[0] for queue in queues] == [None, None, 5, 5]
    world.tick(0)
    assert [in_force(world, queue)[0] for queue in queues] == [None] * 4


def test_D3_a_queue_gets_the_strictest_policy_of_the_exchanges_to_which_it_is_currently_bound(world, client):
    world.set_policy(policy("a", "^amq.topic$", "exchanges", max_count=7, policy="ring"))
    world.set_policy(policy("b", "^amq.fanout$", "exchanges", max_count=5))
    assert (in_force(world), world.queue().overflow) == ((7, ("a",)), Ring(7))
    bind(client, "q", "amq.fanout")
    assert (in_force(world), world.queue().overflow) == ((5, ("a", "b")), Reject(5))
    unbind(client, "q", "amq.topic", "orders.new")
    assert (in_force(world), world.queue().overflow) == ((5, ("b",)), Reject(5))


def test_the_policy_with_the_highest_priority_applies_and_the_strictest_if_several_have_this_priority(world, client):
    world.set_policy(policy("a", max_count=3))
    world.set_policy(policy("b", max_count=9, priority=1))
    world.set_policy(policy("c", max_count=8, priority=1))
    assert in_force(world) == (8, ("b", "c"))
    world.set_policy(policy("c", max_count=10, priority=1))
    assert in_force(world) == (9, ("b", "c"))
    world.set_policy(policy("d", "^other$", max_count=1, priority=5))
    assert in_force(world) == (9, ("b", "c"))


def test_policies_in_the_broker_settings_apply_to_new_queues(make_world):
    world = make_world(policies=[policy("p", "^q", max_count=5)])
    client = world.client().channel().with_queue("q1")
    client.declare("other")
    assert (in_force(world, "q1"), in_force(world, "other")) == ((5, ("p",)), (None, ()))
    assert [each.name for each in world.rules.policies] == ["p"]


@pytest.mark.parametrize(
    ("policies", "error"), [([1], TypeError), ([policy("p", max_count=1), policy("p", max_count=2)], ValueError)]
)
def test_the_broker_settings_reject_two_policies_with_the_same_name_and_values_that_are_not_policies(policies, error):
    with pytest.raises(error, match="policies"):
        BrokerSettings(policies=policies)


def test_deleting_a_policy_that_does_not_exist_raises_an_error(world, client):
    world.set_policy(policy("there", max_count=1))
    with pytest.raises(LookupError, match=r"'gone'.*there"):
        world.delete_policy("gone")
