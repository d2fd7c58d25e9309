"""Settled receipts that are not reported to the application yet, and the hold that limits their number.

If `on_delivery` callbacks are slower than the broker's confirms, settled receipts accumulate. Then a hold makes calls
of `send` wait, so that the number of these receipts stays below about twice the capacity.
"""

from __future__ import annotations

from qflow_client.core.limits import Limits
from qflow_client.core.reporting import Reports
from qflow_client.events import HoldKind
from qflow_client.receipt import Receipt

__all__ = ["ON_DELIVERY", "Unreported"]

#: The source of the `capacity` hold that is raised if `on_delivery` callbacks are slower than the broker's confirms.
ON_DELIVERY = "on_delivery"


class Unreported:
    """Counts the receipts of one producer that are not reported to the application yet."""

    __slots__ = ("_limits", "_reports", "count")

    def __init__(self, reports: Reports, limits: Limits) -> None:
        self._reports = reports
        self._limits = limits
        #: How many settled receipts were returned by `take` and are not reported to the application yet.
        self.count = 0

    def take(self) -> list[Receipt]:
        """Return the settled receipts. The caller reports them to the application."""
        settled, nothing = self._reports.settled, list[Receipt]()
        assert settled is not None
        count = self.count + len(settled)
        # No function is called between the two assignments, so an interrupt comes before or after both.
        self.count, self._reports.settled = count, nothing
        return settled

    def hold_if_many(self, now: float) -> None:
        if self.count + len(self._reports.settled or ()) > self._limits.max_capacity:
            detail = "callbacks are slower than confirms"
            self._limits.controller.gate.hold(HoldKind.CAPACITY, now=now, source=ON_DELIVERY, detail=detail)

    def note_reported(self, count: int) -> bool:
        """Record that `count` receipts were reported. Return True if so few are left that the hold can end."""
        self.count -= count
        return self.count <= self._limits.max_capacity // 2
