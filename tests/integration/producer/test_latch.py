from __future__ import annotations

import threading

import pytest

from qflow_client.sync.latch import Latch

from .tools import PATIENCE, ends_within, eventually, start, takes


def test_a_set_latch_wakes_all_waiting_threads_and_later_threads_do_not_wait() -> None:
    latch = Latch()
    waiting = [start(latch.wait, timeout) for timeout in (None, PATIENCE, 1e9)]
    eventually(lambda: len(latch._locks) == 3)
    with takes(0.05):
        assert not latch.wait(0.05)
    assert not latch.wait(-1.0)
    assert len(latch._locks) == 3, "who waits no longer is forgotten"
    latch.set()
    latch.set()
    assert [each.result() for each in waiting] == [True] * 3
    assert latch.wait(0.0)
    assert latch._locks == []


@pytest.mark.parametrize("round_", range(20))
def test_a_thread_that_begins_to_wait_while_a_latch_is_being_set_is_woken(round_: int) -> None:
    latch, ready = Latch(), threading.Barrier(3)

    def wait() -> bool:
        ready.wait()
        return latch.wait(PATIENCE)

    waiting = [start(wait) for _ in range(2)]
    ready.wait()
    latch.set()
    with ends_within(PATIENCE):
        assert [each.result() for each in waiting] == [True, True]
