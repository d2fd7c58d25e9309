"""Settled receipts that the application has not been told of, and the hold if there are too many.

If `on_delivery` callbacks are slower than the broker's confirms, settled receipts pile up. Senders are held then, so no
more than about twice the capacity is settled and not told.
"""

from __future__ import annotations

from qflow_client.core.limits import Limits
from qflow_client.core.reporting import Reports
from qflow_client.events import HoldKind
from qflow_client.receipt import Receipt

__all__ = ["ON_DELIVERY", "Untold"]

#: The source of the hold for `on_delivery` callbacks that are slower than the broker's confirms.
ON_DELIVERY = "on_delivery"


class Untold:
    """Counts the untold receipts of one producer.

    Args:
        reports: has the settled receipts.
        limits: of admission.
    """

    __slots__ = ("_limits", "_reports", "count")

    def __init__(self, reports: Reports, limits: Limits) -> None:
        self._reports = reports
        self._limits = limits
        #: Settled receipts that the skin has taken, and that the application is not told of yet.
        self.count = 0

    def take(self) -> list[Receipt]:
        """Return the settled receipts, for the skin to tell the application."""
        settled, nothing = self._reports.settled, list[Receipt]()
        assert settled is not None
        count = self.count + len(settled)
        # Nothing is called between these stores, so an interrupt leaves both or none of them.
        self.count, self._reports.settled = count, nothing
        return settled

    def hold_if_many(self, now: float) -> None:
        """Hold senders if too many receipts are untold."""
        if self.count + len(self._reports.settled or ()) > self._limits.max_capacity:
            detail = "callbacks are slower than confirms"
            self._limits.controller.gate.hold(HoldKind.CAPACITY, now=now, source=ON_DELIVERY, detail=detail)

    def note_told(self, count: int) -> bool:
        """Take note that the application has been told of so many receipts.

        Returns:
            Whether the hold ends.
        """
        self.count -= count
        return self.count <= self._limits.max_capacity // 2
