"""The base class of `Link` (own connection) and `SharedLink` (shared connection), the channels of a `Producer`.

The engine calls its public methods on any thread. Most other methods run on the connection's I/O thread.
"""

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
    """Attaches the channel to the tap, runs the protocol's timer, and lets other threads call the I/O thread.

    Args:
        after: called on the I/O thread, without the lock, after any possible change of the protocol.
    """

    #: The I/O services of the I/O thread. `writer` is the same object, because the link of every skin has a `writer`.
    services: TapIOServices
    writer: TapIOServices
    # The tap at the socket; guarded by the lock.
    _tap: Tap

    def __init__(self, protocol: ProducerProtocol, lock: Guard, after: Callable[[], None]) -> None:
        self._protocol = protocol
        self._lock = lock
        self._after = after
        # Whether the I/O thread has ended its work for the channel; guarded by the lock.
        self.ended = False
        # Done when the channel is open for the first time. If that is not possible, it has the error.
        self._opened: Future[None] = Future()
        # When the timer fires, in seconds of `time.monotonic`; ``None`` without a timer.
        self._timer_at: float | None = None

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL of the host without secrets."""

    def call_after(self) -> None:
        """Call `after` on the I/O thread, unless it has ended. Any thread may call this."""
        self.services.add_callback_threadsafe(self._after)

    def look(self) -> None:
        """Make the I/O thread execute a step, because each step first repairs an interrupted step.

        Any thread may call this method. If the I/O thread has ended, the method does nothing.
        """
        self.services.add_callback_threadsafe(self._on_timer)

    def arm_timer(self) -> None:
        """Start the timer for the protocol's next `on_timer`. Any thread may call this."""
        self.services.add_callback_threadsafe(self._arm_timer)

    def forget(self) -> None:
        """Close a forked child's copy of the socket. Nothing is sent to the broker."""
        self.ended = True
        self.services.forget()

    # On the I/O thread.

    def _attach(self, number: int, frame_max: int) -> None:
        now = time.monotonic()
        try:
            with self._lock:
                self._protocol.channel_opened(number, frame_max, now)
                self._tap.attach(number, self._protocol, now)
                if self._protocol.admission.observer is not None:
                    self._protocol.admission.observer.peer = self.services.peer
        except BaseException as error:
            # Otherwise the caller of `open` would wait until its timeout.
            self._not_opened(f"the channel cannot be used: {error!r}")
            raise

    def _failed(self, why: str) -> ConnectionFailed:
        return connection_failed(self.url, why)

    def _not_opened(self, why: str) -> bool:
        """If the channel was never open, make `open` raise the reason, and return True."""
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
        # If the socket is full, the loop calls `pump` when the socket accepts more bytes.
        if tapped is not None and not tapped.full:
            self.services.pump()
