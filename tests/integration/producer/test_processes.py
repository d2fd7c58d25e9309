"""Signals and forks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qflow_client import FlowManager, Outbox, Outcome, OutcomeUnknown, Producer
from qflow_client.broker import Broker
from qflow_client.testing.proxy import FaultProxy
from tests.effort import rounds

from .processes import Start, ends_well, in_child, rest_of_output, says, starting
from .tools import PATIENCE, Proxy, bodies, ends_within, fill_transport, heal, holds, stop


@pytest.fixture
def run() -> Iterator[Start]:
    """Starts one of `programs`."""
    with starting("tests.integration.producer.programs") as start:
        yield start


@pytest.mark.program
def test_ctrl_c_ends_every_blocking_call_of_a_producer(run: Start) -> None:
    calls = ["send", "flush", "result", "wait_unflowed", "flow_events", "close", "leaving", "connect", "good_bye"]
    process = run("interrupted", *calls)
    for call in calls:
        assert says(process) == "waiting"
        with ends_within(10.0):
            process.send_signal(signal.SIGINT)
            assert says(process) == "interrupted", call
    ends_well(process)


@pytest.mark.program
def test_a_forked_child_that_uses_the_producer_gets_a_clear_error_and_the_parent_process_continues(run: Start) -> None:
    ends_well(run("forked"))


@pytest.mark.program
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks at descriptors by way of /proc")
def test_a_fork_while_a_producer_is_busy_leaves_parent_and_child_independent(run: Start) -> None:
    ends_well(run("forked_in_the_middle"))


def test_in_a_forked_child_all_unsettled_messages_are_unknown_even_if_they_were_not_written(
    proxy: Proxy, broker: Broker, make_producer: Callable[..., Producer]
) -> None:
    producer = make_producer(proxy.url(broker))
    proxy.stop_reading()
    receipts = list(fill_transport(producer))
    assert 0 < producer.in_flight < len(receipts)

    def look() -> None:
        # The parent is about to write the others, too, so none of them is safe to send again.
        assert {receipt.outcome for receipt in receipts} == {Outcome.UNKNOWN}
        error = receipts[-1].error()
        assert isinstance(error, OutcomeUnknown)
        assert "is a child of process" in str(error)

    in_child(look)
    proxy.go_on_reading()
    producer.flush(timeout=PATIENCE)
    assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}
    assert broker.queue("q").depth == len(receipts)


def test_the_flow_manager_of_a_forked_child_waits_for_no_thread_and_holds_no_producer_of_the_parent(
    make_producer: Callable[..., Producer],
) -> None:
    manager = FlowManager()
    producer = make_producer(manager=manager)
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with manager._lock:
            held.set()
            go_on.wait(PATIENCE)

    other = threading.Thread(target=hold)
    other.start()
    assert held.wait(PATIENCE)
    try:
        in_child(manager.stop_all)
    finally:
        go_on.set()
        other.join(PATIENCE)
    assert holds(producer) == []
    producer.send(b"").result(timeout=PATIENCE)


@pytest.mark.program
def test_a_forked_child_may_create_its_own_producer(run: Start, broker: Broker) -> None:
    ends_well(run("forked_makes_its_own", broker.url))
    assert bodies(broker) == [b"parent 1", b"child", b"parent 2"]


@pytest.mark.program
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks at descriptors by way of /proc")
@pytest.mark.parametrize("fault", [FaultProxy.refuse, FaultProxy.black_hole])
def test_a_fork_while_the_producer_reconnects_leaves_parent_and_child_independent(
    run: Start, broker: Broker, fault: Callable[[FaultProxy], object]
) -> None:
    broker.withhold_confirms()
    with FaultProxy(broker.url) as proxy:
        process = run("forked_while_disconnected", proxy.url, str(rounds(20, least=5)))
        assert says(process) == "sent"
        broker.wait_until(lambda b: b.queue("q").depth == 1)
        fault(proxy)
        proxy.cut()
        assert says(process) == "forked"
        broker.release_confirms()
        heal(proxy)
        ends_well(process)
    assert bodies(broker) == [b"unsettled", b"unsettled", b"parent"]


@pytest.mark.program
def test_a_program_that_does_not_close_its_producer_still_delivers_as_many_messages_as_possible(
    run: Start, broker: Broker
) -> None:
    broker.withhold_confirms()
    process = run("forgotten", broker.url, "900", str(PATIENCE))
    assert says(process) == "fine"
    # While it ends.
    broker.release_confirms()
    assert rest_of_output(process) == ""
    assert broker.queue("q").depth == 900


@pytest.mark.program
@pytest.mark.parametrize("how", ["flow", "alarm"])
def test_a_program_that_does_not_close_its_producer_reports_lost_messages(run: Start, broker: Broker, how: str) -> None:
    broker.withhold_confirms()
    process = run("forgotten", broker.url, "3")
    assert says(process) == "fine"
    # While it ends.
    stop(broker, how)
    said = rest_of_output(process)
    # The holds are logged too.
    (last,) = (line for line in said.splitlines() if "the process ends" in line)
    assert last.startswith("orders: the process ends, and the producer was not closed: 3 admitted messages")


@pytest.mark.program
def test_ctrl_c_at_any_moment_leaves_no_lock_held_and_each_message_is_admitted_or_not(
    run: Start, broker: Broker
) -> None:
    process = run("pressed_at_any_moment", broker.url, str(rounds(3000, least=750)))
    own, others = map(int, rest_of_output(process).split())
    came = bodies(broker)
    assert came.count(b"other") == others
    # What was admitted in a send that was interrupted has no receipt.
    assert came.count(b"own") >= own > 0


@pytest.mark.program
def test_a_program_that_ends_while_threads_send_ends_without_an_error(run: Start, broker: Broker) -> None:
    ends_well(run("forgotten_while_threads_send", broker.url))


@pytest.mark.program
def test_an_exit_handler_that_runs_after_the_exit_handler_of_the_library_can_send_with_an_outbox(
    run: Start, broker: Broker, tmp_path: Path
) -> None:
    process = run("sends_at_the_very_end", broker.url, str(tmp_path / "outbox"))
    assert rest_of_output(process) == "sent\n"
    assert bodies(broker) == [b"early", b"late"]
    # What was confirmed last may still be in the outbox, but the outbox is free.
    Outbox(tmp_path / "outbox").close()


@pytest.mark.program
def test_E4_a_program_can_end_even_if_the_disk_of_its_outbox_does_not_answer(
    run: Start, broker: Broker, tmp_path: Path
) -> None:
    process = run("ends_while_the_disk_hangs", broker.url, str(tmp_path / "outbox"))
    assert "settled messages may be sent once more" in rest_of_output(process)
    assert bodies(broker) == [b"early"]


@pytest.mark.program
def test_a_program_that_closes_its_producer_at_the_very_end_loses_no_message_silently(
    run: Start, broker: Broker
) -> None:
    process = run("closed_at_the_very_end", broker.url)
    assert rest_of_output(process).splitlines() == ["closed", "reported"]
    assert bodies(broker) == [b"late"]
