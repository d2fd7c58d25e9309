from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from qflow_client.broker import Broker

pytest_plugins = ["pytester"]

MODULE = "qflow_client.testing.plugin"
NAMED = ("-p", MODULE)
ROOT = Path(__file__).parents[3]

USERS_TESTS = """
from __future__ import annotations

import pytest

from qflow_client import (
    ConfirmTimeout,
    FlowControlTimeout,
    MessageNacked,
    Outcome,
    OutcomeUnknown,
    Producer,
    QflowError,
    UndeliveredMessages,
)


@pytest.fixture
def producer(qflow_broker):
    qflow_broker.declare_queue("orders")
    producer = Producer(qflow_broker.url, routing_key="orders", reconnect_timeout=0, on_refused="fail")
    yield producer
    try:
        producer.close(timeout=0)
    except UndeliveredMessages:
        pass


def test_in_a_test_with_the_plugin_a_message_arrives_in_the_broker(qflow_broker, producer):
    assert producer.send(b"one").result(20) is Outcome.CONFIRMED
    assert [message.body for message in qflow_broker.messages("orders")] == [b"one"]


def test_the_plugin_gives_each_test_a_broker_without_queues(qflow_broker):
    assert qflow_broker.queues() == ()
    assert qflow_broker.connections() == ()


def test_a_send_of_a_producer_that_the_plugin_flows_times_out_and_sends_nothing(qflow_broker, producer):
    producer.send(b"first").result(20)
    qflow_broker.flow(False)
    qflow_broker.wait_until(lambda broker: broker.producers()[0].flow_ok)
    with pytest.raises(FlowControlTimeout):
        producer.send(b"late", timeout=0.05)
    qflow_broker.flow(True)
    assert producer.wait_unflowed(20)
    producer.flush(20)
    assert qflow_broker.queue("orders").depth == 1


def test_the_plugin_stops_only_the_named_producer(qflow_broker, producer):
    (first,) = qflow_broker.producers()
    with Producer(qflow_broker.url, routing_key="orders") as other:
        events = producer.flow_events()
        qflow_broker.flow(False, channel=first.name)
        assert next(events).flowed
        other.send(b"goes on").result(20)
        assert not other.flow_state.flowed
    qflow_broker.flow(True)


def test_a_connection_that_the_plugin_blocks_holds_its_producer(qflow_broker, producer):
    events = producer.flow_events()
    qflow_broker.block("out of memory")
    assert next(events).hold.kind == "connection_blocked"
    qflow_broker.unblock()
    assert producer.wait_unflowed(20)


def test_confirms_that_the_plugin_withholds_leave_the_outcome_unknown(qflow_broker, producer):
    qflow_broker.withhold_confirms()
    receipt = producer.send(b"one")
    qflow_broker.wait_until(lambda broker: broker.queue("orders").depth == 1)
    with pytest.raises(ConfirmTimeout):
        receipt.result(0)
    qflow_broker.release_confirms()
    assert receipt.result(20) is Outcome.CONFIRMED


def test_a_nack_by_the_plugin_is_reported_to_the_producer(qflow_broker, producer):
    qflow_broker.nack_publishes()
    with pytest.raises(MessageNacked):
        producer.send(b"one").result(20)


@pytest.mark.parametrize("end", ["close_connections", "drop_connections"])
def test_a_connection_ended_by_the_plugin_leaves_the_outcome_unknown(qflow_broker, producer, end):
    qflow_broker.withhold_confirms()
    receipt = producer.send(b"one")
    qflow_broker.wait_until(lambda broker: broker.queue("orders").depth == 1)
    getattr(qflow_broker, end)()
    with pytest.raises(OutcomeUnknown):
        receipt.result(20)


@pytest.mark.parametrize(("end", "words"), [("close_connections", "320"), ("drop_connections", "")])
def test_the_reply_code_320_is_reported_if_the_plugin_closes_the_connection_but_not_if_it_drops_it(
    qflow_broker, producer, end, words
):
    events = producer.flow_events(kinds=["disconnected"])
    getattr(qflow_broker, end)()
    hold = next(events).hold
    assert words in hold.detail
    assert ("320" in hold.detail) is bool(words)


def test_a_channel_closed_by_the_plugin_is_reopened_by_the_producer(qflow_broker, producer):
    (before,) = qflow_broker.producers()
    events = producer.flow_events(kinds=["disconnected"])
    qflow_broker.close_channels()
    hold = next(events).hold
    assert "the broker closed the channel" in hold.detail
    producer.send(b"one").result(20)
    (after,) = qflow_broker.producers()
    assert (after.connection, after.published) == (before.connection, 1)


def test_the_plugin_drops_only_the_named_connection(qflow_broker, producer):
    (first,) = qflow_broker.producers()
    with Producer(qflow_broker.url, routing_key="orders") as other:
        qflow_broker.drop_connections(connection=first.connection)
        qflow_broker.wait_until(lambda broker: len(broker.producers()) == 1)
        other.send(b"goes on").result(20)
        with pytest.raises(QflowError):
            producer.send(b"one").result(20)


def test_the_plugin_can_nack_messages_to_one_queue_and_accept_messages_to_another(qflow_broker, producer):
    qflow_broker.declare_queue("refused-orders")
    qflow_broker.nack_publishes(queue="orders")
    with pytest.raises(MessageNacked):
        producer.send(b"one").result(20)
    assert producer.send(b"one", routing_key="refused-orders").result(20) is Outcome.CONFIRMED


def test_a_full_queue_of_the_plugin_holds_the_producer_until_a_consumer_makes_room(qflow_broker, producer):
    qflow_broker.declare_queue("small", arguments={"qpid.flow_stop_count": 2, "qpid.flow_resume_count": 1})
    events = producer.flow_events()
    for number in range(3):
        producer.send(b"%d" % number, routing_key="small")
    assert next(events).hold.kind == "channel_flow"
    while qflow_broker.get("small"):
        pass
    assert producer.wait_unflowed(20)
    producer.flush(20)
    assert qflow_broker.queue("small").flow_stopped_count == 1


def test_messages_that_the_fault_proxy_of_the_plugin_discards_are_not_confirmed(qflow_broker, qflow_proxy):
    qflow_broker.declare_queue("orders")
    producer = Producer(qflow_proxy.url, routing_key="orders")
    producer.send(b"arrives").result(20)
    qflow_proxy.black_hole("to_client")
    receipt = producer.send(b"arrives, and nobody says so")
    qflow_broker.wait_until(lambda broker: broker.queue("orders").depth == 2)
    with pytest.raises(ConfirmTimeout):
        receipt.result(0)
    with pytest.raises(UndeliveredMessages):
        producer.close(timeout=0)
"""


@pytest.fixture(autouse=True)
def _the_package_is_found_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)


@pytest.fixture(autouse=True)
def _no_plugin_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that are installed take seconds to load."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.mark.program
def test_users_can_test_their_own_producers_with_the_plugin(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(USERS_TESTS)
    result = pytester.runpytest_subprocess(*NAMED, "-q", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=16)


def test_pytest_loads_the_installed_plugin_automatically() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"qflow": MODULE}


def test_the_nearest_marker_overrides_the_broker_settings_of_the_fixture(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import pytest

        @pytest.fixture(scope="session")
        def qflow_broker_settings():
            return {"enforcement": "completion", "heartbeat": 7}
        """
    )
    pytester.makepyfile(
        """
        import pytest

        pytestmark = pytest.mark.qflow_broker(users={"a": "b"}, flow_scope="publishers")

        def test_fixture_and_module(qflow_broker):
            settings = qflow_broker.settings
            assert (settings.enforcement, settings.heartbeat) == ("completion", 7)
            assert dict(settings.users) == {"a": "b"}
            assert settings.flow_scope == "publishers"

        @pytest.mark.qflow_broker(enforcement="channel_flow", flow_scope="offender")
        def test_marker(qflow_broker):
            settings = qflow_broker.settings
            assert (settings.enforcement, settings.heartbeat) == ("channel_flow", 7)
            assert settings.flow_scope == "offender"
        """
    )
    result = pytester.runpytest_inprocess(*NAMED, "--strict-markers")
    result.assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        ('"completion"', "accepts only keyword arguments, not 'completion'"),
        ('enforcement="often"', "enforcement must be one of"),
        ("colour=1", "colour"),
    ],
)
def test_an_invalid_marker_of_the_plugin_is_an_error_that_names_the_marker(
    pytester: pytest.Pytester, marker: str, words: str
) -> None:
    pytester.makepyfile(
        f"""
        import pytest

        @pytest.mark.qflow_broker({marker})
        def test(qflow_broker): pass
        """
    )
    result = pytester.runpytest_inprocess(*NAMED)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*{words}*"])


def test_pytest_lists_the_marker_of_the_plugin(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess(*NAMED, "--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.qflow_broker(**settings): *"])


def test_the_broker_of_the_plugin_adds_little_time_to_a_test() -> None:
    times = []
    for _ in range(5):
        began = time.process_time()
        with Broker():
            pass
        times.append(time.process_time() - began)
    # The best of them, and of the time of this process: others may be at work.
    assert min(times) < 0.05


def test_loading_the_plugin_imports_neither_broker_nor_client_library() -> None:
    code = (
        "import sys, qflow_client.testing.plugin\n"
        "print(sorted({'pika', 'aio_pika', 'asyncio', 'typer', 'rich', 'qflow_client.broker'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
