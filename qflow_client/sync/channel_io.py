"""The I/O thread's part of one publishing channel, whoever owns the connection."""

from __future__ import annotations

import time
from collections.abc import Callable

from qflow_client.core.protocol import ProducerProtocol
from qflow_client.guard import Guard
from qflow_client.sync.pika_io import TapIOServices

__all__ = ["ChannelIO"]


class ChannelIO:
    """What time and other threads have the I/O thread do."""

    services: TapIOServices
    # Whether the I/O thread does nothing for the channel any more; guarded by the lock.
    ended: bool
    # The producer's state, and what guards it.
    _protocol: ProducerProtocol
    _lock: Guard
    # Called on the I/O thread, without the lock, after anything that may have changed the protocol.
    _after: Callable[[], None]
    # When the timer that is armed fires; None if none is.
    _timer_at: float | None

    def tell(self) -> None:
        """Have `after` called on the I/O thread. For any thread, unless it has ended."""
        self.services.add_callback_threadsafe(self._after)

    def look(self) -> None:
        """Have the I/O thread take a step, which repairs an interrupted one. For any thread, unless it has ended."""
        self.services.add_callback_threadsafe(self._on_timer)

    def arm_timer(self) -> None:
        """Have the protocol told when its time comes. For any thread."""
        self.services.add_callback_threadsafe(self._arm_timer)

    def forget(self) -> None:
        """In a child process after a fork: let go of the parent's socket without a word to the broker."""
        self.ended = True
        self.services.forget()

    # On the I/O thread.

    def _after_io(self) -> None:
        self._after()
        if self._protocol.needs_timer:
            self._arm_timer()

    def _arm_timer(self) -> None:
        now = time.monotonic()
        with self._lock:
            at = self._protocol.next_timer(now)
        if at is not None and (self._timer_at is None or at < self._timer_at):
            self._timer_at = at
            self.services.call_later(max(0.0, at - now), self._on_timer)

    def _on_timer(self) -> None:
        self._timer_at = None
        with self._lock:
            self._protocol.on_timer(time.monotonic())
        self._after_io()
        tapped = self.services.tapped
        # A full socket says itself when it takes more.
        if tapped is not None and not tapped.full:
            self.services.pump()
