"""Signals and forks."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qflow_client.broker import Broker
from qflow_client.testing.proxy import FaultProxy
from tests.effort import rounds
from tests.integration.producer.processes import Start, ends_well, rest_of_output, says, starting
from tests.integration.producer.tools import bodies, ends_within, heal

pytestmark = pytest.mark.program


@pytest.fixture
def program() -> Iterator[Start]:
    """Starts one of `programs`."""
    with starting("tests.integration.aio.programs") as start:
        yield start


def test_ctrl_c_ends_every_wait_of_an_async_producer(program: Start) -> None:
    calls = ["send", "flush", "result", "wait_unflowed", "close"]
    process = program("interrupted", *calls)
    for call in calls:
        assert says(process) == "waiting"
        with ends_within(10.0):
            process.send_signal(signal.SIGINT)
            said = says(process)
            assert "closed on CancelledError: 1 admitted messages were not delivered" in said, call
            assert says(process) == "interrupted"
    ends_well(process)


# A task that is cancelled is the same with each loop; signals and timers are uvloop's own.
@pytest.mark.parametrize(
    ("loop", "ways"),
    [("asyncio", ["cancelled", "cancelled twice", "timeout", "ctrl-c"]), ("uvloop", ["timeout", "ctrl-c"])],
)
def test_E4_a_close_that_is_cancelled_at_any_moment_ends_and_reports_withdrawn_messages(
    program: Start, loop: str, ways: list[str]
) -> None:
    ends_well(program("cancelled_while_closing", loop, *ways))


def test_a_forked_child_that_uses_the_producer_gets_a_clear_error_and_the_parent_process_continues(
    program: Start, broker: Broker
) -> None:
    broker.declare_queue("r")
    forks = rounds(5, least=2)
    process = program("forked", broker.url, str(forks))
    sent = int(says(process))
    ends_well(process)
    assert bodies(broker) == [b"parent"] * sent
    assert bodies(broker, "r") == [b"child"] * forks


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks at descriptors by way of /proc")
@pytest.mark.parametrize("fault", [FaultProxy.refuse, FaultProxy.black_hole])
def test_a_fork_while_the_producer_reconnects_leaves_parent_and_child_independent(
    program: Start, broker: Broker, fault: Callable[[FaultProxy], object]
) -> None:
    forks = rounds(20, least=3)
    broker.declare_queue("r")
    broker.withhold_confirms("q")
    with FaultProxy(broker.url) as proxy:
        process = program("forked_while_disconnected", proxy.url, broker.url, str(forks))
        assert says(process) == "sent"
        broker.wait_until(lambda b: b.queue("q").depth == 1)
        fault(proxy)
        proxy.cut()
        assert says(process) == "forked"
        broker.release_confirms("q")
        heal(proxy)
        ends_well(process)
    assert bodies(broker) == [b"unsettled", b"unsettled", b"parent"]
    assert bodies(broker, "r") == [b"child"] * forks


def test_a_program_that_does_not_close_its_async_producer_still_ends(program: Start, broker: Broker) -> None:
    process = program("forgotten", broker.url)
    # aio-pika and the log may have something to say about it, too, in the middle of a line.
    said = rest_of_output(process)
    assert "fine" in said
    assert "not closed" not in said
    assert bodies(broker) == [b""]


@pytest.mark.parametrize(
    ("dropped", "why"),
    [
        ("", "the process ends, and the producer was not closed"),
        ("dropped", "the producer was dropped without close()"),
    ],
)
def test_messages_that_are_lost_because_an_async_producer_is_not_closed_are_logged(
    dropped: str, why: str, program: Start, broker: Broker
) -> None:
    broker.withhold_confirms()
    process = program("forgotten", broker.url, "unconfirmed", dropped)
    assert f"{why}: 1 admitted messages were not delivered" in rest_of_output(process)


def test_a_producer_garbage_collected_before_its_event_loop_is_closed_frees_the_outbox_and_logs_once(
    program: Start, broker: Broker, tmp_path: Path
) -> None:
    broker.withhold_confirms()
    process = program("dropped_before_its_loop_is_closed", broker.url, str(tmp_path / "outbox"))
    said = rest_of_output(process)
    assert "free\n" in said
    for name in "lost", "stored":
        assert said.count(f"{name}: the producer was dropped without close(): 1 admitted messages") == 1
    assert said.count("1 admitted messages were not delivered") == 2


def test_a_program_that_logs_can_end_even_if_no_more_threads_can_be_started(program: Start, broker: Broker) -> None:
    process = program("forgotten_with_its_loop", broker.url)
    assert says(process) == "fine"
    # aiormq's coroutines complain about the loop.
    rest_of_output(process)
