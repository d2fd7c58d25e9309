"""Signals and forks."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qflow_client.broker import Broker
from qflow_client.testing.proxy import FaultProxy

from .tools import PATIENCE, Stopwatch, bodies

_ROOT = Path(__file__).parents[3]


@pytest.fixture
def run() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts one of `programs`."""
    processes: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.integration.producer.programs", *arguments],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.wait(PATIENCE)
        assert process.stdout is not None
        process.stdout.close()


def _say(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    # If it failed, the test that failed with it is to say how.
    return line + process.stdout.read() if line.startswith("Traceback") else line


def _ends_well(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    # To the end of what it says; a program that hangs is ended by the timeout of the test.
    said = process.stdout.read()
    assert (said, process.wait(PATIENCE)) == ("fine\n", 0)


@pytest.mark.parametrize("call", ["send", "flush", "result", "wait_unflowed", "flow_events", "close", "leaving"])
def test_ctrl_c_gets_out_of_every_blocking_call(run: Callable[..., subprocess.Popen[str]], call: str) -> None:
    process = run("interrupted", call)
    assert _say(process) == "waiting"
    with Stopwatch() as watch:
        process.send_signal(signal.SIGINT)
        assert _say(process) == "interrupted"
    assert watch.seconds < 1.0
    _ends_well(process)


@pytest.mark.parametrize("program", ["interrupted_connecting", "interrupted_good_bye"])
def test_ctrl_c_gets_out_of_connecting_and_of_saying_good_bye(
    run: Callable[..., subprocess.Popen[str]], program: str
) -> None:
    process = run(program)
    assert _say(process) == "waiting"
    with Stopwatch() as watch:
        process.send_signal(signal.SIGINT)
        assert _say(process) == "interrupted"
    assert watch.seconds < 1.0
    _ends_well(process)


def test_a_forked_child_gets_a_clear_error_and_its_parent_goes_on(run: Callable[..., subprocess.Popen[str]]) -> None:
    _ends_well(run("forked"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks at descriptors by way of /proc")
def test_a_fork_in_the_middle_leaves_parent_and_child_to_themselves(run: Callable[..., subprocess.Popen[str]]) -> None:
    _ends_well(run("forked_in_the_middle"))


def test_a_forked_child_may_make_a_producer_of_its_own(
    run: Callable[..., subprocess.Popen[str]], broker: Broker
) -> None:
    _ends_well(run("forked_makes_its_own", broker.url))
    assert bodies(broker) == [b"parent 1", b"child", b"parent 2"]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks at descriptors by way of /proc")
@pytest.mark.parametrize("fault", [FaultProxy.refuse, FaultProxy.black_hole])
def test_a_fork_while_it_waits_for_a_connection_or_makes_one_leaves_parent_and_child_to_themselves(
    run: Callable[..., subprocess.Popen[str]], broker: Broker, fault: Callable[[FaultProxy], object]
) -> None:
    broker.withhold_confirms()
    with FaultProxy(broker.url) as proxy:
        process = run("forked_while_disconnected", proxy.url)
        assert _say(process) == "sent"
        broker.wait_until(lambda b: b.queue("q").depth == 1)
        fault(proxy)
        proxy.cut()
        assert _say(process) == "forked"
        broker.release_confirms()
        proxy.heal()
        _ends_well(process)
    assert bodies(broker) == [b"unsettled", b"unsettled", b"parent"]


def test_a_program_that_forgets_to_close_still_delivers_what_can_be_delivered(
    run: Callable[..., subprocess.Popen[str]], broker: Broker
) -> None:
    _ends_well(run("forgotten", broker.url, "900"))
    assert broker.queue("q").depth == 900


@pytest.mark.parametrize("way", ["withhold_confirms", "flow", "block"])
def test_a_program_that_forgets_to_close_says_what_is_lost_by_that(
    run: Callable[..., subprocess.Popen[str]], broker: Broker, way: str
) -> None:
    broker.withhold_confirms()
    process = run("forgotten", broker.url, "3")
    assert _say(process) == "fine"
    # While it ends.
    if way == "flow":
        broker.flow(False)
    elif way == "block":
        broker.block()
    assert process.stdout is not None
    said = process.stdout.read()
    assert process.wait(PATIENCE) == 0
    # The holds are logged too.
    last = said.splitlines()[-1]
    assert last.startswith("orders: the process ends, and the producer was not closed: 3 admitted messages")


def test_ctrl_c_at_any_moment_leaves_no_lock_held_and_every_message_whole(
    run: Callable[..., subprocess.Popen[str]], broker: Broker
) -> None:
    process = run("pressed_at_any_moment", broker.url)
    own, others = map(int, _say(process).split())
    assert process.wait(PATIENCE) == 0
    came = bodies(broker)
    assert came.count(b"other") == others
    # What was admitted in a send that was interrupted has no receipt.
    assert came.count(b"own") >= own > 0


def test_a_program_that_ends_while_threads_send_ends_in_peace(
    run: Callable[..., subprocess.Popen[str]], broker: Broker
) -> None:
    _ends_well(run("forgotten_while_threads_send", broker.url))
