"""The calls that wait for settled messages or for an open gate. Calls of `send` wait in `core.sendline`."""

from __future__ import annotations

from typing import Any

from qflow_client.core.admission import Admission
from qflow_client.core.limits import Limits
from qflow_client.core.reporting import Reports
from qflow_client.core.step import Steps, step
from qflow_client.core.unreported import ON_DELIVERY

__all__ = ["Waiters"]


class Waiters:
    """The waiters of the calls in `core.calls`, except `send`. An engine or drop-in wakes each call by its waiter."""

    __slots__ = ("_admission", "_gate", "_limits", "_reports", "settled", "steps", "unflowed")

    def __init__(self, reports: Reports, limits: Limits, admission: Admission, steps: Steps) -> None:
        self._reports = reports
        self._limits = limits
        self._gate = limits.controller.gate
        self._admission = admission
        self.steps = steps
        #: Waiters, each with a message number. A waiter is woken when all messages up to this number are settled.
        self.settled: list[tuple[int, Any]] = []
        #: Waiters for an open gate, each with the source of the holds that the waiter ignores; "" for none.
        self.unflowed: list[tuple[str, Any]] = []

    # Registration.

    @step
    def when_flushed(self, waiter: Any) -> bool:
        """Keep a waiter, and wake it when all messages that are now admitted or in the `Store`'s backlog are settled.

        Returns:
            False if no message is unsettled. Then the waiter is not kept, and is never woken.
        """
        store = self._admission.store
        if store is not None and store.has_backlog:
            store.when_flushed(waiter)
            return True
        return self.add_settled(waiter)

    @step
    def when_settled(self, waiter: Any) -> bool:
        """Same as `when_flushed`, but without the backlog of a `Store`."""
        return self.add_settled(waiter)

    def add_settled(self, waiter: Any) -> bool:
        """Same as `when_settled`, for callers that are already inside a step (see `step`)."""
        if not self._limits.window.used:
            return False
        self.settled.append((self._admission.admitted, waiter))
        return True

    @step
    def when_unflowed(self, waiter: Any, now: float, *, in_callback: bool = False) -> bool:
        """Keep a waiter, and wake it when the producer is unflowed.

        Args:
            in_callback: whether a callback waits. The hold for slow callbacks (`ON_DELIVERY`) may last until this
                callback returns, so the wait ignores that hold.

        Returns:
            False if the producer is already unflowed or closed. Then the waiter is not kept, and is never woken.
        """
        self._limits.controller.look(now)
        ignored = ON_DELIVERY if in_callback else ""
        if self._is_unflowed(ignored) or self._admission.closed is not None:
            return False
        self.unflowed.append((ignored, waiter))
        return True

    def forget(self, waiter: Any) -> bool:
        """Drop a waiter. Return True if the waiter was still waiting, False if it was already woken."""
        before = len(self.settled) + len(self.unflowed)
        self.settled = [entry for entry in self.settled if entry[1] is not waiter]
        self.unflowed = [entry for entry in self.unflowed if entry[1] is not waiter]
        was_kept = len(self.settled) + len(self.unflowed) < before
        store = self._admission.store
        return was_kept if store is None else store.forget_waiter(waiter) or was_kept

    # Waking.

    def _is_unflowed(self, ignored: str) -> bool:
        gate = self._gate
        return gate.is_open or (ignored != "" and all(hold.source == ignored for hold in gate.holds))

    def wake_settled(self, oldest: int) -> None:
        """Wake the waiters whose messages are settled. `oldest` is the number of the oldest unsettled message."""
        self._reports.wake += [waiter for number, waiter in self.settled if number < oldest]
        self.settled = [entry for entry in self.settled if entry[0] >= oldest]

    def wake_unflowed(self) -> None:
        """If the gate is open, wake all waiters of `when_unflowed`. Otherwise wake those that ignore all holds."""
        self._reports.wake += [waiter for ignored, waiter in self.unflowed if self._is_unflowed(ignored)]
        self.unflowed = [entry for entry in self.unflowed if not self._is_unflowed(entry[0])]

    def end_unflowed(self) -> None:
        """Wake all waiters of `when_unflowed`, because the gate will never open."""
        self._reports.wake += [waiter for _, waiter in self.unflowed]
        self.unflowed.clear()
