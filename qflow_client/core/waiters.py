"""Callers that wait for something other than a place in line: for settled messages, or for an open gate."""

from __future__ import annotations

from typing import Any

from qflow_client.core.reporting import Reports
from qflow_client.flow import Gate

__all__ = ["Waiters"]


class Waiters:
    """The waiters of `flush` and `wait_unflowed`. A waiter that is woken is in `Reports.wake`.

    Args:
        reports: of the producer.
        gate: likewise.
    """

    __slots__ = ("_gate", "_reports", "settled", "unflowed")

    def __init__(self, reports: Reports, gate: Gate) -> None:
        self._reports = reports
        self._gate = gate
        #: Waiters for all messages up to a number to be settled.
        self.settled: list[tuple[int, Any]] = []
        #: Waiters for an open gate, each with the source of the holds that it ignores; "" for none.
        self.unflowed: list[tuple[str, Any]] = []

    def is_unflowed(self, ignored: str) -> bool:
        """Whether no hold is left but those of the source `ignored`."""
        gate = self._gate
        return gate.is_open or (ignored != "" and all(hold.source == ignored for hold in gate.holds))

    def wake_settled(self, oldest: int) -> None:
        """Wake the waiters for numbers below that of the oldest unsettled message."""
        self._reports.wake += [waiter for number, waiter in self.settled if number < oldest]
        self.settled = [entry for entry in self.settled if entry[0] >= oldest]

    def wake_unflowed(self) -> None:
        """Wake the waiters for which the gate is open."""
        self._reports.wake += [waiter for ignored, waiter in self.unflowed if self.is_unflowed(ignored)]
        self.unflowed = [entry for entry in self.unflowed if not self.is_unflowed(entry[0])]

    def end_unflowed(self) -> None:
        """Wake all waiters for an open gate, because it never will be."""
        self._reports.wake += [waiter for _, waiter in self.unflowed]
        self.unflowed.clear()

    def forget(self, waiter: Any) -> bool:
        """Drop a waiter; whether it was still kept. If not, it was woken."""
        before = len(self.settled) + len(self.unflowed)
        self.settled = [entry for entry in self.settled if entry[1] is not waiter]
        self.unflowed = [entry for entry in self.unflowed if entry[1] is not waiter]
        return len(self.settled) + len(self.unflowed) < before
