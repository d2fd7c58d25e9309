from __future__ import annotations

import pytest

from qflow_client.broker.core.errors import ChannelException
from qflow_client.broker.core.settings import Enforcement
from qflow_client.broker.policies.arguments import read_options
from qflow_client.broker.policies.overflow import DropHead, RejectPublish, Ring
from qflow_client.broker.settings import BrokerSettings
from qflow_client.flow import Capacity, StopResume

from ..tools import limits_of


def test_C3_stop_and_resume_thresholds_can_be_set_by_queue_arguments():
    found = limits_of(
        {
            "qpid.flow_stop_count": 100,
            "qpid.flow_resume_count": 50,
            "qpid.flow_stop_size": 1000,
            "qpid.flow_resume_size": 500,
        }
    )
    assert found.stop_resume == StopResume(100, 50, 1000, 500)
    assert found.thresholds == (StopResume(100, 50, 1000, 500),)


@pytest.mark.parametrize(("stop", "resume"), [(1, 1), (8, 7), (100, 87)])
def test_C3_a_queue_with_only_a_stop_threshold_gets_a_resume_threshold_of_seven_eighths(stop, resume):
    assert limits_of({"qpid.flow_stop_count": stop}).stop_resume == StopResume(stop, resume)
    assert limits_of({"qpid.flow_stop_size": stop}).stop_resume == StopResume(0, 0, stop, resume)


@pytest.mark.parametrize(
    ("maximum", "stop", "resume"), [(1, 1, 1), (2, 1, 1), (9, 7, 6), (10, 8, 7), (1000, 800, 700), (999, 799, 699)]
)
def test_C4_a_queue_maximum_without_a_stop_gives_stop_and_resume_thresholds_of_80_and_70_percent(maximum, stop, resume):
    assert limits_of({"qpid.max_count": maximum}).stop_resume == StopResume(stop, resume)
    assert limits_of({"qpid.max_size": maximum}).stop_resume == StopResume(0, 0, stop, resume)


def test_C4_the_default_percentages_of_the_thresholds_can_be_set_and_0_means_no_default_thresholds():
    both = {"qpid.max_count": 1000, "qpid.max_size": 10_000}
    found = limits_of(both, default_flow_stop_threshold=90, default_flow_resume_threshold=75)
    assert found.stop_resume == StopResume(900, 750, 9000, 7500)
    none = {"default_flow_stop_threshold": 0, "default_flow_resume_threshold": 0}
    assert limits_of(both, **none).thresholds == ()
    found = limits_of({**both, "qpid.flow_stop_count": 10}, **none)
    assert found.stop_resume.stop_count == 10


def test_C4_stop_thresholds_of_0_turn_flow_control_off_for_a_queue_with_a_maximum():
    assert limits_of({"qpid.max_count": 10, "qpid.flow_stop_count": 0, "qpid.flow_stop_size": 0}).thresholds == ()
    assert limits_of({"qpid.max_count": 10, "qpid.flow_stop_count": 0}).thresholds == ()


def test_C4_a_queue_with_a_stop_count_but_no_stop_size_has_no_threshold_for_its_size():
    found = limits_of({"qpid.max_count": 10, "qpid.max_size": 1000, "qpid.flow_stop_count": 5})
    assert found.stop_resume == StopResume(5, 4)


@pytest.mark.parametrize("policy", ["ring", "ring_strict"])
def test_C4_ring_queues_have_thresholds_only_if_the_arguments_set_them(policy):
    ring = {"qpid.policy_type": policy, "qpid.max_count": 10}
    assert limits_of(ring).thresholds == ()
    assert limits_of({**ring, "qpid.flow_stop_count": 5}).stop_resume == StopResume(5, 4)


def test_J2_capacities_can_be_set_by_queue_arguments_and_have_defaults_from_the_virtual_host():
    assert limits_of({"x-qpid-capacity": 100}).capacity == Capacity(100, 100)
    assert limits_of({"x-qpid-capacity": 100, "x-qpid-flow-resume-capacity": 60}).capacity == Capacity(100, 60)
    assert limits_of({}, capacity=100, flow_resume_capacity=60).capacity == Capacity(100, 60)
    assert limits_of({"x-qpid-flow-resume-capacity": 10}, capacity=100).capacity == Capacity(100, 10)
    assert limits_of({"x-qpid-capacity": 50}, capacity=100, flow_resume_capacity=60).capacity == Capacity(50, 50)
    assert limits_of({"x-qpid-capacity": 0}, capacity=100).thresholds == ()


@pytest.mark.parametrize(
    "arguments",
    [
        {"qpid.flow_stop_count": 5, "qpid.flow_resume_count": 5},
        {"qpid.flow_stop_count": 1, "qpid.flow_resume_count": 1},
        {"qpid.flow_stop_count": 0, "qpid.flow_resume_count": 0},
        {"qpid.flow_stop_size": 5, "qpid.flow_resume_size": 5},
        {"qpid.flow_stop_size": 1, "qpid.flow_resume_size": 1},
        {"qpid.flow_stop_count": 10, "qpid.max_count": 10},
        {"qpid.flow_stop_size": 10, "qpid.max_size": 10},
        {"x-qpid-capacity": 5, "x-qpid-flow-resume-capacity": 5},
        {"x-qpid-capacity": 5, "x-qpid-flow-resume-capacity": 0},
    ],
)
def test_C2_J2_thresholds_that_are_equal_to_each_other_or_to_the_maximum_are_accepted(arguments):
    limits_of(arguments)


def test_a_queue_may_have_both_stop_thresholds_and_a_capacity():
    found = limits_of({"x-qpid-capacity": 100, "qpid.flow_stop_count": 5})
    assert found.thresholds == (StopResume(5, 4), Capacity(100, 100))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"qpid.flow_stop_count": 5, "qpid.flow_resume_count": 6}, ("qpid.flow_stop_count=5", "flow_resume_count=6")),
        ({"qpid.flow_stop_size": 5, "qpid.flow_resume_size": 6}, ("qpid.flow_stop_size=5", "flow_resume_size=6")),
        ({"qpid.flow_stop_count": 5, "qpid.flow_resume_count": 0}, ("qpid.flow_stop_count=5", "resume_count=0")),
        ({"qpid.flow_stop_size": 5, "qpid.flow_resume_size": 0}, ("qpid.flow_stop_size=5", "resume_size=0")),
        ({"qpid.flow_stop_size": 0, "qpid.flow_resume_size": 1}, ("qpid.flow_stop_size=0", "resume_size=1")),
        ({"qpid.flow_stop_size": 11, "qpid.max_size": 10}, ("qpid.flow_stop_size=11", "qpid.max_size=10")),
        ({"qpid.flow_stop_count": 0, "qpid.flow_resume_count": 1}, ("qpid.flow_stop_count=0", "resume_count=1")),
        ({"qpid.flow_resume_count": 1}, ("qpid.flow_resume_count=1", "qpid.flow_stop_count")),
        ({"x-qpid-capacity": 5, "x-qpid-flow-resume-capacity": 6}, ("x-qpid-capacity=5", "flow-resume-capacity=6")),
        ({"x-qpid-flow-resume-capacity": 6}, ("x-qpid-capacity=0", "x-qpid-flow-resume-capacity=6")),
        ({"qpid.flow_stop_count": 11, "qpid.max_count": 10}, ("qpid.flow_stop_count=11", "qpid.max_count=10")),
        ({"qpid.flow_stop_count": "5"}, ("qpid.flow_stop_count='5'", "integer")),
        ({"qpid.flow_stop_count": 5.0}, ("qpid.flow_stop_count=5.0", "integer")),
        ({"qpid.flow_stop_count": True}, ("qpid.flow_stop_count=True", "integer")),
        ({"qpid.flow_stop_size": -1}, ("qpid.flow_stop_size=-1", "at least 0")),
        ({"qpid.max_count": []}, ("qpid.max_count=[]", "integer")),
        ({"x-qpid-capacity": {}}, ("x-qpid-capacity={}", "integer")),
        ({"qpid.policy_type": "drop"}, ("qpid.policy_type='drop'", "reject, ring, ring_strict")),
        ({"qpid.policy_type": ["ring"]}, ("qpid.policy_type=['ring']",)),
        ({"qpid.flow_stop_cout": 1}, ("no argument qpid.flow_stop_cout", "did you mean qpid.flow_stop_count")),
        ({"qpid.capacity": 1}, ("no argument qpid.capacity", "did you mean x-qpid-capacity")),
        ({"x-qflow-enforcment": "both"}, ("no argument x-qflow-enforcment", "did you mean x-qflow-enforcement")),
        ({"x-qpid-capasity": 1}, ("no argument x-qpid-capasity", "did you mean x-qpid-capacity")),
        ({"qpid.max_count": 1, "x-max-length": 1}, ("qpid.max_", "x-max-")),
        ({"x-max-length": -1}, ("x-max-length=-1", "at least 0")),
        ({"x-overflow": "reject"}, ("x-overflow='reject'", "drop-head, reject-publish, reject-publish-dlx")),
        ({"x-qflow-enforcement": 1}, ("x-qflow-enforcement=1", "channel_flow, completion, both")),
    ],
)
def test_C2_J2_contradictory_or_mistyped_queue_arguments_are_refused_with_406(arguments, words):
    with pytest.raises(ChannelException) as caught:
        limits_of(arguments)
    assert caught.value.code == 406
    for word in words:
        assert word in caught.value.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x-message-ttl": -1}, ("x-message-ttl=-1", "at least 0")),
        ({"x-message-ttl": "1"}, ("x-message-ttl='1'", "integer")),
        ({"x-expires": 0}, ("x-expires=0", "at least 1")),
        ({"x-dead-letter-exchange": 1}, ("x-dead-letter-exchange=1", "string")),
        ({"x-dead-letter-routing-key": "k"}, ("x-dead-letter-routing-key='k'", "x-dead-letter-exchange")),
        ({"x-single-active-consumer": 1}, ("x-single-active-consumer=1", "true or false")),
        (
            {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "ö" * 128},
            ("x-dead-letter-routing-key='ööö", "255 bytes, not 256"),
        ),
        ({"x-dead-letter-exchange": "\ud800"}, ("x-dead-letter-exchange='\\ud800'", "UTF-8")),
    ],
)
def test_an_invalid_value_of_a_RabbitMQ_queue_argument_is_refused_with_406(arguments, words):
    with pytest.raises(ChannelException) as caught:
        read_options("q", arguments)
    assert caught.value.code == 406
    for word in words:
        assert word in caught.value.text


def test_a_dead_letter_routing_key_may_have_the_maximum_length():
    key = "ö" * 127 + "k"
    options = read_options("q", {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": key})
    assert options.dead_letter_routing_key == key


def test_x_max_length_gives_no_stop_thresholds_and_unknown_queue_arguments_are_ignored():
    assert limits_of({"x-max-length": 10, "x-queue-mode": "lazy", "qpid": 1, "x-max-priority": 5}).thresholds == ()
    assert limits_of({"x-max-length": 0}).overflow == DropHead(0, None)
    assert limits_of({"x-max-length-bytes": 9, "x-overflow": "reject-publish"}).overflow == RejectPublish(None, 9)
    assert limits_of({"x-overflow": "reject-publish"}).overflow is None


def test_a_queue_uses_the_enforcement_of_the_broker_unless_its_arguments_set_another():
    assert limits_of({}).enforcement is Enforcement.BOTH
    assert limits_of({}, enforcement="completion").enforcement is Enforcement.COMPLETION
    assert limits_of({"x-qflow-enforcement": "channel_flow"}, enforcement="completion").enforcement.flows_channels
    assert limits_of({"qpid.policy_type": "ring", "qpid.max_count": 2}).overflow == Ring(2)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"port": 65536}, ValueError, ("port", "65536", "0 to 65535")),
        ({"port": "5672"}, TypeError, ("port", "int", "'5672'")),
        ({"heartbeat": True}, TypeError, ("heartbeat", "bool")),
        ({"frame_max": 4095}, ValueError, ("frame_max", "4095", "4096")),
        ({"channel_max": 0}, ValueError, ("channel_max",)),
        ({"recent": 0}, ValueError, ("recent",)),
        ({"recent": "1"}, TypeError, ("recent",)),
        ({"enforcement": "none"}, ValueError, ("enforcement", "'none'", "'channel_flow', 'completion', 'both'")),
        ({"flow_scope": "all"}, ValueError, ("flow_scope", "'all'", "'offender', 'publishers'")),
        (
            {"default_flow_stop_threshold": 60, "default_flow_resume_threshold": 70},
            ValueError,
            ("default_flow_stop_threshold=60", "default_flow_resume_threshold=70"),
        ),
        ({"capacity": 1, "flow_resume_capacity": 2}, ValueError, ("capacity=1", "flow_resume_capacity=2")),
        ({"users": {}}, ValueError, ("users",)),
        ({"users": {"guest": 1}}, TypeError, ("guest",)),
        ({"host": 1}, TypeError, ("host",)),
        ({"virtual_host": ""}, ValueError, ("virtual_host",)),
        ({"ssl_context": True}, TypeError, ("ssl_context",)),
        ({"trace": 1}, TypeError, ("trace",)),
        ({"colour": "red"}, TypeError, ("colour",)),
    ],
)
def test_an_invalid_broker_setting_raises_an_error_that_shows_the_value(options, error, words):
    with pytest.raises(error) as caught:
        BrokerSettings(**options)
    for word in words:
        assert word in str(caught.value)
