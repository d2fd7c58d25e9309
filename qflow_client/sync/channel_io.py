"""The base class of a `Producer`'s publishing channels: `Link` and, on a shared connection, `SharedLink`.

`Engine` calls the public methods on any thread. Most other methods run on the I/O thread of the connection.
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
    """Attaches the channel to the `Tap`, runs the `ProducerProtocol`'s timer, and schedules calls on the I/O thread.

    Args:
        after: called without `lock` after every possible change of the `ProducerProtocol`, usually on the I/O thread.
    """

    #: pika's I/O services. The I/O thread runs the loop of these services.
    services: TapIOServices
    #: The same object as `services`. `BaseProducer` uses this name, because a link for asyncio has no `services`.
    writer: TapIOServices
    # The `Tap` at the socket. Channels are added to the tap, and removed from it, only under `_lock`.
    _tap: Tap

    def __init__(self, protocol: ProducerProtocol, lock: Guard, after: Callable[[], None]) -> None:
        self._protocol = protocol
        self._lock = lock
        self._after = after
        # Whether the I/O thread has finished its work for the channel. The I/O thread sets it under `_lock`.
        self.ended = False
        # `open` waits until this future is done. If the channel could not be opened, the future has the error.
        self._opened: Future[None] = Future()
        # The time at which the timer fires, in seconds of `time.monotonic`; ``None`` without a timer.
        self._timer_at: float | None = None

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL of the host without secrets."""

    def call_after(self) -> None:
        """Make the I/O thread call `after`, unless the thread has ended."""
        self.services.add_callback_threadsafe(self._after)

    def look(self) -> None:
        """Make the I/O thread call `ProducerProtocol.on_timer`, which also repairs an interrupted step."""
        self.services.add_callback_threadsafe(self._on_timer)

    def arm_timer(self) -> None:
        """Start the timer for the next `ProducerProtocol.on_timer`, if there is anything to wait for."""
        self.services.add_callback_threadsafe(self._arm_timer)

    def forget(self) -> None:
        """In a forked child, close the copy of the socket. Nothing is sent to the broker."""
        self.ended = True
        self.services.forget()

    # The methods below run on the I/O thread.

    def _attach(self, number: int, frame_max: int) -> None:
        now = time.monotonic()
        try:
            with self._lock:
                self._protocol.channel_opened(number, frame_max, now)
                self._tap.attach(number, self._protocol, now)
                if self._protocol.admission.observer is not None:
                    self._protocol.admission.observer.peer = self.services.peer
        except BaseException as error:
            # Wake the caller of `open`, which would otherwise wait until its timeout.
            self._not_opened(f"the channel cannot be used: {error!r}")
            raise

    def _failed(self, why: str) -> ConnectionFailed:
        return connection_failed(self.url, why)

    def _not_opened(self, why: str) -> bool:
        """If `open` still waits, make it raise an error with the reason. Return False if `open` has succeeded."""
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
        # If the socket is full, do not call `pump` here. The loop calls `pump` when the socket accepts more bytes.
        if tapped is not None and not tapped.full:
            self.services.pump()
