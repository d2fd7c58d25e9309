"""The timeouts of one connection, sans-I/O: opening, closing, heartbeats and login."""

from __future__ import annotations

import math

from qflow_client.amqp.frames import HEARTBEAT
from qflow_client.broker.core.handshake import Handshake
from qflow_client.broker.core.output import Output
from qflow_client.broker.core.settings import Settings

__all__ = ["Deadlines"]


class Deadlines:
    """The deadlines of one `Session`, whose method `tick` must be called at the time `at`.

    Args:
        now: monotonic seconds. All times of this class are monotonic seconds.
    """

    __slots__ = ("_handshake", "_output", "_settings", "at", "last_received", "open_by", "tarpit_until")

    def __init__(self, settings: Settings, handshake: Handshake, output: Output, now: float) -> None:
        self._settings = settings
        self._handshake = handshake
        self._output = output
        # Time at which bytes last arrived. If the socket is not read, `beat` and the server set it to the current time.
        self.last_received = now
        # Time at which the broker ends a connection that is not open yet, even if it is closing; infinite once open.
        self.open_by = now + settings.unauthenticated_timeout
        # Time until which the socket is not read because of a tarpit (D8); None if there is no tarpit.
        self.tarpit_until: float | None = None
        # Time of the next call of `Session.tick`.
        self.at = self.open_by

    def by(self, at: float) -> None:
        """Make sure that `Session.tick` is called at this time or earlier."""
        self.at = min(self.at, at)

    def closing(self, now: float) -> None:
        """Start the timeout for the answer to Connection.Close, and end a tarpit."""
        self.tarpit_until = None
        self.at = min(now + self._settings.close_timeout, self.open_by)

    def tarpit(self, now: float) -> None:
        """Start a tarpit: for `tarpit_time` seconds, the broker does not read the socket (D8)."""
        self.tarpit_until = now + self._settings.tarpit_time
        self.by(self.tarpit_until)

    def missed(self, now: float, *, is_closing: bool) -> str | None:
        """Return a text for the log if the deadline to open or to close was missed. Call this only at `at` or later."""
        if now >= self.open_by:
            return f"the connection was not open within {self._settings.unauthenticated_timeout} s"
        return f"no answer to Connection.Close within {self._settings.close_timeout} s" if is_closing else None

    def beat(self, now: float, *, is_silenced: bool, login_at: float = math.inf) -> str | None:
        """Send a heartbeat if one is due, and compute the time of the next `Session.tick`.

        Args:
            is_silenced: whether no bytes can arrive, because the broker does not read the socket.
            login_at: time at which a delayed login is checked; infinite if no login is delayed.

        Returns:
            A text for the log if the peer was silent for too long; otherwise ``None``.
        """
        heartbeat = self._handshake.heartbeat
        times = [self.open_by, self._handshake.expires_at, login_at]
        if self.tarpit_until is not None:
            if now >= self.tarpit_until:
                self.tarpit_until = None
            else:
                times.append(self.tarpit_until)
            is_silenced = True
        if is_silenced:
            self.last_received = now
        if heartbeat:
            if now - self.last_received >= 2 * heartbeat:
                return f"the client sent nothing for two heartbeat intervals of {heartbeat} s"
            if now - self._output.last_sent >= heartbeat / 2:
                self._output.write(HEARTBEAT)
                self._output.last_sent = now
            times += [self._output.last_sent + heartbeat / 2, self.last_received + 2 * heartbeat]
        self.at = min(times)
        return None
