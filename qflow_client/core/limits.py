"""The limits of admission: the window of messages, the window of bytes, and the rate.

An admitted message uses room in both windows until it is settled. With ``capacity="auto"``, the window of messages
adapts its size. The flow controller checks all limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qflow_client.errors import SettingsError
from qflow_client.events import HoldKind
from qflow_client.flow import (
    AdaptiveWindow,
    CompositeLimiter,
    FlowController,
    Limiter,
    Line,
    RateLimiter,
    SizeLimiter,
    WindowLimiter,
)
from qflow_client.receipt import Receipt
from qflow_client.settings import ProducerSettings, check_argument, check_setting

__all__ = ["Limits", "check_capacity"]


def check_capacity(capacity: object) -> None:
    """Raise `SettingsError` if `capacity` is not allowed for an existing producer."""
    check_setting("capacity", capacity)
    if isinstance(capacity, str):
        raise SettingsError(f"capacity={capacity!r}: the capacity of an existing producer can only be set to a number")


class Limits:
    """The windows and the rate of one producer. For `line` and its errors, see `ProducerProtocol`."""

    __slots__ = ("adaptive", "byte_window", "controller", "is_plain", "max_capacity", "window")

    def __init__(self, settings: ProducerSettings, line: Line | None) -> None:
        is_line = line is None or all(callable(getattr(line, name, None)) for name in ("push", "head", "pop", "clear"))
        check_argument("line", line, is_line and not isinstance(line, type), "None or have the methods of a Line")
        #: Limits the number of unsettled messages.
        self.window: WindowLimiter = (
            AdaptiveWindow(settings.capacity_max, kind=HoldKind.CAPACITY)
            if settings.capacity == "auto"
            else WindowLimiter(settings.capacity, kind=HoldKind.CAPACITY)
        )
        parts: list[Limiter] = [self.window]
        #: Limits the bytes of unsettled messages; ``None`` without `capacity_bytes`.
        self.byte_window: SizeLimiter | None = None
        if settings.capacity_bytes is not None:
            self.byte_window = SizeLimiter(settings.capacity_bytes, kind=HoldKind.CAPACITY)
            parts.append(self.byte_window)
        if settings.rate is not None:
            parts.append(RateLimiter(settings.rate, burst=settings.burst, kind=HoldKind.RATE))
        #: The window if it adapts its size; ``None`` if the size is fixed.
        self.adaptive = self.window if isinstance(self.window, AdaptiveWindow) else None
        #: The highest capacity that the window can reach.
        self.max_capacity = settings.capacity_max if self.adaptive is not None else self.window.capacity
        #: Whether the window of messages is the only limit of admission.
        self.is_plain = len(parts) == 1
        #: Checks the limits and the gate, and keeps the line of waiting messages.
        self.controller = FlowController(
            parts[0] if self.is_plain else CompositeLimiter(parts), line=line, name=settings.name
        )

    def add(self, limiter: Limiter) -> None:
        """Add a limit. Call this method before the first message is admitted."""
        self.is_plain = False
        self.controller.limiter = CompositeLimiter((self.controller.limiter, limiter))

    def set_capacity(self, capacity: int) -> None:
        """Set a fixed size of the window, see `check_capacity`. Only later admissions are affected (C6)."""
        check_capacity(capacity)
        self.adaptive = None
        self.window.capacity = self.max_capacity = capacity

    def release(self, receipts: Sequence[Receipt], now: float) -> None:
        """Free the room of settled messages."""
        if not receipts:
            return
        if self.adaptive is not None:
            self.adaptive.observe(len(receipts), now)
        size = 0 if self.byte_window is None else sum(receipt.size for receipt in receipts)
        self.controller.release(size, len(receipts))

    def give_back(self, size: int) -> None:
        """Free the room of a message that was counted, but is not admitted."""
        self.window.used -= 1
        if self.byte_window is not None:
            self.byte_window.used -= size

    def heal(self, unsettled: Callable[[], Sequence[Receipt]]) -> Sequence[Receipt]:
        """Recount the used room, and return the receipts of the unsettled messages."""
        while True:
            used = self.window.used
            receipts = unsettled()
            count = len(receipts)
            # If another thread has admitted messages meanwhile, count again. No thread switch comes between this check
            # and the assignment.
            if used == self.window.used:
                self.window.used = count
                break
        if self.byte_window is not None:
            self.byte_window.used = sum(receipt.size for receipt in receipts)
        return receipts
