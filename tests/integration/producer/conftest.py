from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from qflow_client import Producer, UndeliveredMessages, flow_manager
from qflow_client.broker import Broker
from qflow_client.logs import flush_logs
from tests.certificates import certify
from tests.effort import COMPLETE

from .bridge import Bridged
from .tools import PATIENCE, Proxy, Wire, eventually, wait_for_commits, wait_for_ends


def _ours() -> list[threading.Thread]:
    # The log thread belongs to the process, and not to a producer.
    names = {thread: thread.name for thread in threading.enumerate()}
    return [thread for thread, name in names.items() if name.startswith("qflow-") and name != "qflow-log"]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    # Ignore threads and producers that an earlier test left because it failed.
    threads, resources = set(_ours()), set(flow_manager.resources)
    yield
    # Do not use `join`, because a new thread may be about to start.
    eventually(lambda: set(_ours()) <= threads, "the end of its threads")
    assert set(flow_manager.resources) <= resources


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def all_logs(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """A function that returns all log lines of all levels and libraries."""
    caplog.set_level(logging.DEBUG)

    def read() -> str:
        assert flush_logs(PATIENCE)
        return caplog.text

    return read


@pytest.fixture
def wire() -> Wire:
    """The frames that `broker` has received and sent."""
    return Wire()


@pytest.fixture
def make_broker(stack: ExitStack, wire: Wire) -> Callable[..., Broker]:
    """A function that creates a broker with a queue ``q``, from the broker's settings and the queue's arguments."""

    def make(*, arguments: dict[str, object] | None = None, **options: Any) -> Broker:
        broker = Broker(**({"trace": wire} | options))
        # A producer that waits for this broker finds the queue, however early it connects.
        broker.declare_queue("q", arguments=arguments)
        return stack.enter_context(broker)

    return make


@pytest.fixture
def broker(make_broker: Callable[..., Broker]) -> Broker:
    """A new broker with an empty queue ``q``."""
    return make_broker()


# Tests only for `Producer`, because their callbacks wait or exit, or because they use its internals. If such a test has
# a meaning for `AsyncProducer`, tests/integration/aio has a similar test.
_THREADS_ONLY = (
    "test_a_resume_of_a_producer_that_ctrl_c_interrupts_at_any_line_is_completed_by_the_next_call",
    "test_a_send_that_ctrl_c_interrupts_at_any_line_leaves_the_producer_usable",
    "test_a_flow_callback_may_call_any_method_of_the_producer",
    "test_a_callback_may_wait_for_a_producer_that_is_held_because_callbacks_are_slow",
    "test_system_exit_in_a_flow_callback_loses_no_event_and_the_producer_can_still_be_closed",
    "test_a_slow_flow_callback_delays_no_sender",
    "test_a_send_in_on_delivery_with_timeout_0_raises_immediately",
    "test_E6_flow_events_for_a_slow_callback_are_bounded_and_the_oldest_are_dropped",
    "test_an_abandoned_iterator_over_flow_events_leaves_no_state",
    "test_a_producer_can_be_closed_in_a_flow_callback",
    "test_a_producer_can_be_closed_in_on_delivery",
    "test_close_waits_for_slow_callbacks",
    "test_close_of_a_producer_keeps_its_deadline_while_a_callback_is_slow",
    "test_send_many_sends_each_message_before_it_takes_the_next_from_the_iterable",
    "test_the_io_thread_wakes_up_even_if_ctrl_c_interrupts_the_call_that_wakes_it",
    "test_F4_a_sender_that_is_interrupted_right_after_it_joined_the_waiting_line_leaves_the_line",
    "test_close_raises_failures_that_were_not_reported_to_on_delivery_in_time",
    "test_on_delivery_may_send_messages_with_the_producer",
    "test_on_delivery_may_send_even_if_other_threads_send_faster_than_receipts_are_reported",
    "test_flush_and_wait_unflowed_succeed_if_their_condition_becomes_true_exactly_at_the_deadline",
    "test_receipts_that_wait_for_on_delivery_are_bounded",
    "test_a_producer_uses_the_certificates_that_it_has_read_if_it_cannot_read_the_files_when_it_reconnects",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that uses the fixture `skin` with both producers, because both have the same contract."""
    chosen = any("skin" in str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize"))
    if "skin" in metafunc.fixturenames and not chosen:
        skins = ["threads"]
        if metafunc.function.__name__ not in _THREADS_ONLY:
            # These modules test the use of the socket, so the kind of event loop matters.
            near = COMPLETE and metafunc.module.__name__.endswith(
                ("test_channel_flow", "test_coalescing", "test_garbage", "test_tls", "test_transport")
            )
            skins += ["asyncio", "uvloop"] if near else ["asyncio"]
        metafunc.parametrize("skin", skins, indirect=True)


@pytest.fixture
def skin(request: pytest.FixtureRequest) -> Any:
    """The class or function that creates a producer."""
    if request.param == "threads":
        return Producer
    return partial(Bridged, new_loop=asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop)


@pytest.fixture
def make_producer(stack: ExitStack, request: pytest.FixtureRequest, skin: Any) -> Callable[..., Producer]:
    """A function that creates a producer for queue ``q`` of `broker` or of a URL. The test need not close producers."""

    def make(url: Any = None, **settings: Any) -> Producer:
        if url is None:
            url = request.getfixturevalue("broker").url
        producer: Producer = skin(url, **({"routing_key": "q"} | settings))
        stack.callback(_close, producer)
        return producer

    return make


def _close(producer: Producer) -> None:
    try:
        producer.close(timeout=0)
    except UndeliveredMessages:
        # Ignore undelivered messages, because the test has already made its checks.
        pass


@pytest.fixture
def producer(make_producer: Callable[..., Producer]) -> Producer:
    """A producer for queue ``q`` of `broker`."""
    return make_producer()


@pytest.fixture
def proxy(broker: Broker, stack: ExitStack) -> Proxy:
    """A relay in front of `broker`."""
    proxy = Proxy(broker.port)
    stack.callback(proxy.close)
    return proxy


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    return certify(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def patient_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends with a short timeout wait long for the disk, because the test is not about a disk that does not answer."""
    wait_for_commits(monkeypatch)


@pytest.fixture
def patient_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Producers that cannot be created, or are cancelled, wait long for the end of their threads and outboxes."""
    wait_for_ends(monkeypatch)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of an outbox."""
    return tmp_path / "orders.outbox"
