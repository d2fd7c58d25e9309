"""The part of a publishing channel that runs on the I/O thread, with an own or a shared connection."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError

from qflow_client.amqp.tap import Tap
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.errors import ConnectionFailed
from qflow_client.guard import Guard
from qflow_client.skin import connection_failed
from qflow_client.sync.pika_io import TapIOServices

__all__ = ["ChannelIO"]


class ChannelIO(ABC):
    """Wakes the I/O thread for timers and for other threads, and attaches the channel to the tap.

    Args:
        protocol: the producer's state.
        lock: its lock.
        after: called on the I/O thread, without the lock, after any possible change of the protocol.
    """

    #: The I/O thread's; and the same object under the name that it has in every skin.
    services: TapIOServices
    writer: TapIOServices
    # The tap at the socket; guarded by the lock.
    _tap: Tap

    def __init__(self, protocol: ProducerProtocol, lock: Guard, after: Callable[[], None]) -> None:
        self._protocol = protocol
        self._lock = lock
        self._after = after
        # Whether the I/O thread does nothing for the channel any more; guarded by the lock.
        self.ended = False
        # Done when the channel is open for the first time, or failed if it cannot be opened.
        self._opened: Future[None] = Future()
        # When the present timer fires; ``None`` without a timer.
        self._timer_at: float | None = None

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL of the host without secrets."""

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

    def _attach(self, number: int, frame_max: int) -> None:
        """Publish on an open channel from now on."""
        now = time.monotonic()
        try:
            with self._lock:
                self._protocol.channel_opened(number, frame_max, now)
                self._tap.attach(number, self._protocol, now)
                if self._protocol.admission.observer is not None:
                    self._protocol.admission.observer.peer = self.services.peer
        except BaseException as error:
            # No other code would wake the caller that waits.
            self._not_opened(f"the channel cannot be used: {error!r}")
            raise

    def _failed(self, why: str) -> ConnectionFailed:
        return connection_failed(self.url, why)

    def _not_opened(self, why: str) -> bool:
        """Return True if the channel was never open. Then `open` raises the reason."""
        try:
            self._opened.set_exception(self._failed(why))
        except InvalidStateError:
            return self._opened.cancelled() or self._opened.exception() is not None
        return True

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
