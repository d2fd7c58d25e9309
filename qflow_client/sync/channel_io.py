"""The part of a publishing channel that runs on the I/O thread, with an own or a shared connection."""

from __future__ import annotations

import time
from collections.abc import Callable

from qflow_client.core.protocol import ProducerProtocol
from qflow_client.guard import Guard
from qflow_client.sync.pika_io import TapIOServices

__all__ = ["ChannelIO"]


class ChannelIO:
    """Wakes the I/O thread for timers and for other threads."""

    services: TapIOServices
    # Whether the I/O thread does nothing for the channel any more; guarded by the lock.
    ended: bool
    # The producer's state, and its lock.
    _protocol: ProducerProtocol
    _lock: Guard
    # Called on the I/O thread, without the lock, after any possible change of the protocol.
    _after: Callable[[], None]
    # When the present timer fires; ``None`` without a timer.
    _timer_at: float | None

    def call_after(self) -> None:
        """Call `after` on the I/O thread, unless it has ended. Any thread may call this."""
        self.services.add_callback_threadsafe(self._after)

    def look(self) -> None:
        """Let the I/O thread take a step, which repairs an interrupted one. Any thread may call this.

        If the I/O thread has ended, do nothing.
        """
        self.services.add_callback_threadsafe(self._on_timer)

    def arm_timer(self) -> None:
        """Start the timer for the time at which the protocol has to be called next. Any thread may call this."""
        self.services.add_callback_threadsafe(self._arm_timer)

    def forget(self) -> None:
        """Close the copy of the parent's socket in a child process after a fork. Nothing is sent to the broker."""
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
        # A full socket reports itself when it takes more bytes.
        if tapped is not None and not tapped.full:
            self.services.pump()
