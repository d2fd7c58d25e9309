from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from qflow_client import flow_manager
from tests.integration.coroutines import pytest_pycollect_makeitem as pytest_pycollect_makeitem
from tests.integration.coroutines import pytest_pyfunc_call as pytest_pyfunc_call
from tests.integration.producer.conftest import broker as broker
from tests.integration.producer.conftest import certificate as certificate
from tests.integration.producer.conftest import make_broker as make_broker
from tests.integration.producer.conftest import patient_ends as patient_ends
from tests.integration.producer.conftest import patient_sends as patient_sends
from tests.integration.producer.conftest import proxy as proxy
from tests.integration.producer.conftest import stack as stack
from tests.integration.producer.conftest import wire as wire
from tests.integration.producer.tools import PATIENCE

from .tools import soon

# Modules and single tests that also run on uvloop, because the event loop itself matters for them.
_NEAR_THE_LOOP = (
    # Use of sockets and transports. uvloop has its own transports.
    "aio.test_transport",
    # Order of callbacks, timers and cancellations within one iteration of the loop.
    "aio.test_cancellation",
    # Number of loop iterations of a call or a callback, and the end of a loop.
    "test_callbacks_are_called_by_the_event_loop_in_order_and_never_inside_producer_calls",
    "test_a_system_exit_in_on_delivery_loses_no_receipt_and_ends_the_loop",
    "test_a_flow_manager_may_stop_a_producer_whose_event_loop_is_closed",
    "test_F8_a_send_that_need_not_wait_takes_no_loop_iteration_and_one_write_contains_many_messages",
    "test_a_producer_whose_event_loop_is_closed_admits_no_message",
    "test_an_outbox_is_free_after_its_producer_is_closed_on_another_event_loop",
    "test_E4_close_of_an_async_producer_needs_no_thread_of_the_executor_of_the_event_loop",
    # Calls from other threads.
    "test_D5_flow_managers_and_other_threads_can_hold_an_async_producer",
    "test_F6_the_flow_manager_stops_and_starts_a_channel_from_any_thread",
    # Sockets that are full, cut, refused, wrapped in TLS, or to be closed.
    "test_a_producer_that_cannot_connect_is_closed_and_reports_the_reason",
    "test_a_robust_connection_reconnects_together_with_its_producers",
    "test_closing_a_shared_connection_keeps_the_deadline_if_the_peer_is_dead",
    "test_closing_a_producer_in_the_middle_of_a_message_does_not_end_the_shared_connection",
    "test_J7_a_stop_is_answered_with_flow_ok_and_no_message_is_published_before_the_stop_ends",
    "test_after_a_reconnection_only_the_holds_of_the_new_channel_apply_to_a_robust_channel",
    "test_publishes_written_before_the_connection_is_lost_raise_the_error_of_aio_pika",
    "test_a_socket_that_accepts_no_bytes_holds_a_channel_without_confirms",
    "test_flow_control_works_over_tls",
    "test_E11_the_socket_is_closed_even_if_the_program_has_cleared_close_callbacks",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = any("run" in str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize"))
    if "run" in metafunc.fixturenames and not chosen:
        near = metafunc.module.__name__.endswith(_NEAR_THE_LOOP) or metafunc.function.__name__ in _NEAR_THE_LOOP
        metafunc.parametrize("run", ["asyncio", "uvloop"] if near else ["asyncio"], indirect=True)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """A function that runs a test's coroutine on a loop. It checks that all tasks end, and that no error is ignored."""

    def run(test: Coroutine[Any, Any, Any]) -> Any:
        unseen: list[dict[str, Any]] = []

        async def watched() -> Any:
            asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unseen.append(context))
            result = await asyncio.wait_for(test, 6 * PATIENCE)
            me = asyncio.current_task()
            await soon(lambda: asyncio.all_tasks() == {me}, "the end of all tasks")
            return result

        factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            result = runner.run(watched())
        assert unseen == []
        return result

    return run


@pytest.fixture(autouse=True)
def _no_producer_is_left() -> Iterator[None]:
    # Ignore producers that an earlier test left because it failed.
    before = set(flow_manager.resources)
    yield
    assert set(flow_manager.resources) <= before
