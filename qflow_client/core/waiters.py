"""Callers that wait for something other than a place in line: for settled messages, or for an open gate."""

from __future__ import annotations

from typing import Any

from qflow_client.core.admission import Admission
from qflow_client.core.limits import Limits
from qflow_client.core.reporting import Reports
from qflow_client.core.step import Steps, step
from qflow_client.core.untold import ON_DELIVERY

__all__ = ["Waiters"]


class Waiters:
    """The waiters of `flush` and `wait_unflowed`. A waiter that is woken is in `Reports.wake`.

    Args:
        reports: of the producer.
        limits: of admission, with the gate.
        admission: knows what is admitted.
        steps: whether the last step came to its end.
    """

    __slots__ = ("_admission", "_gate", "_limits", "_reports", "settled", "steps", "unflowed")

    def __init__(self, reports: Reports, limits: Limits, admission: Admission, steps: Steps) -> None:
        self._reports = reports
        self._limits = limits
        self._gate = limits.controller.gate
        self._admission = admission
        self.steps = steps
        #: Waiters for all messages up to a number to be settled.
        self.settled: list[tuple[int, Any]] = []
        #: Waiters for an open gate, each with the source of the holds that it ignores; "" for none.
        self.unflowed: list[tuple[str, Any]] = []

    # What callers ask for.

    @step
    def when_flushed(self, waiter: Any) -> bool:
        """Have a waiter woken once all that is admitted now is settled.

        Returns:
            False if it is already, and the waiter is not kept.
        """
        store = self._admission.store
        if store is not None and store.has_backlog:
            store.when_flushed(waiter)
            return True
        return self.add_settled(waiter)

    @step
    def when_settled(self, waiter: Any) -> bool:
        """Have a waiter woken once all that is in the window now is settled; messages on disk do not count.

        Returns:
            False if it is already, and the waiter is not kept.
        """
        return self.add_settled(waiter)

    def add_settled(self, waiter: Any) -> bool:
        """As `when_settled`, inside a step."""
        if not self._limits.window.used:
            return False
        self.settled.append((self._admission.admitted, waiter))
        return True

    @step
    def when_unflowed(self, waiter: Any, now: float, *, in_callback: bool = False) -> bool:
        """Have a waiter woken once the producer is unflowed.

        Args:
            waiter: is in `Reports.wake` then.
            now: seconds.
            in_callback: used by callbacks. Others may be held until it returns, so it does not wait for that hold.

        Returns:
            False if it is already, or is closed and never will be, and the waiter is not kept.
        """
        self._limits.controller.look(now)
        ignored = ON_DELIVERY if in_callback else ""
        if self._is_unflowed(ignored) or self._admission.closed is not None:
            return False
        self.unflowed.append((ignored, waiter))
        return True

    def forget(self, waiter: Any) -> bool:
        """Drop a waiter; whether it was still kept. If not, its wait is over."""
        before = len(self.settled) + len(self.unflowed)
        self.settled = [entry for entry in self.settled if entry[1] is not waiter]
        self.unflowed = [entry for entry in self.unflowed if entry[1] is not waiter]
        was_kept = len(self.settled) + len(self.unflowed) < before
        store = self._admission.store
        return was_kept if store is None else store.forget_waiter(waiter) or was_kept

    # What wakes them.

    def _is_unflowed(self, ignored: str) -> bool:
        """Whether no hold is left but those of the source `ignored`."""
        gate = self._gate
        return gate.is_open or (ignored != "" and all(hold.source == ignored for hold in gate.holds))

    def wake_settled(self, oldest: int) -> None:
        """Wake the waiters for numbers below that of the oldest unsettled message."""
        self._reports.wake += [waiter for number, waiter in self.settled if number < oldest]
        self.settled = [entry for entry in self.settled if entry[0] >= oldest]

    def wake_unflowed(self) -> None:
        """Wake the waiters for which the gate is open."""
        self._reports.wake += [waiter for ignored, waiter in self.unflowed if self._is_unflowed(ignored)]
        self.unflowed = [entry for entry in self.unflowed if not self._is_unflowed(entry[0])]

    def end_unflowed(self) -> None:
        """Wake all waiters for an open gate, because it never will be."""
        self._reports.wake += [waiter for _, waiter in self.unflowed]
        self.unflowed.clear()
