"""Locks that a ``with`` statement always releases."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from qflow_client.locks import KeptLock, Lock, RLock
from tests.interrupting import each_interrupt


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_E2_an_interrupt_at_any_point_of_a_with_statement_leaves_no_kept_lock_locked(make: Callable[[], Any]) -> None:
    inside = 0
    for interrupt in each_interrupt(least=1):
        inner = make()
        lock = KeptLock(inner)

        def use(lock: KeptLock = lock) -> None:
            nonlocal inside
            with lock:
                inside += 1
                assert not try_on_another_thread(lock)

        interrupt(use)
        assert try_on_another_thread(lock)
    assert inside > 0


def try_on_another_thread(lock: KeptLock) -> bool:
    got: list[bool] = []

    def attempt() -> None:
        got.append(lock.acquire(blocking=False))
        if got[0]:
            lock.release()

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return got[0]


def test_a_recursive_lock_can_be_entered_again() -> None:
    lock: Any = KeptLock(threading.RLock())
    with lock, lock:
        pass
    for each in (Lock(), RLock()):
        with each:
            pass
