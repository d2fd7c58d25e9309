"""When one connection has to be open, closed, or heard of, sans-I/O: heartbeats, and peers that take too long."""

from __future__ import annotations

import math

from qflow_client.amqp.frames import HEARTBEAT
from qflow_client.broker.core.handshake import Handshake
from qflow_client.broker.core.output import Output
from qflow_client.broker.core.settings import Settings

__all__ = ["Deadlines"]


class Deadlines:
    """The deadlines of one connection.

    Args:
        settings: the broker's.
        handshake: knows how often heartbeats are agreed on, and how long the login is valid.
        output: of the connection.
        now: monotonic seconds.
    """

    __slots__ = ("_handshake", "_output", "_settings", "at", "last_received", "open_by", "tarpit_until")

    def __init__(self, settings: Settings, handshake: Handshake, output: Output, now: float) -> None:
        self._settings = settings
        self._handshake = handshake
        self._output = output
        # When something last came.
        self.last_received = now
        # Until when the connection must be open, and is ended if it is not, even if it is closing; infinite once it is.
        self.open_by = now + settings.unauthenticated_timeout
        # Until when the socket is not to be read (D8); None if it is.
        self.tarpit_until: float | None = None
        # When the session's `tick` is due.
        self.at = self.open_by

    def by(self, at: float) -> None:
        """Something is due at that time at the latest."""
        self.at = min(self.at, at)

    def closing(self, now: float) -> None:
        """Connection.Close is sent: the answer is due soon, and is read."""
        self.tarpit_until = None
        self.at = min(now + self._settings.close_timeout, self.open_by)

    def tarpit(self, now: float) -> None:
        """Let nothing more be read from the socket for a time (D8)."""
        self.tarpit_until = now + self._settings.tarpit_time
        self.by(self.tarpit_until)

    def missed(self, now: float, *, is_closing: bool) -> str | None:
        """What the peer has not done in time, for the log; ``None`` if it may have more time."""
        if now >= self.open_by:
            return f"not open within {self._settings.unauthenticated_timeout} s"
        return f"no answer to Connection.Close within {self._settings.close_timeout} s" if is_closing else None

    def beat(self, now: float, *, is_silenced: bool, login_at: float = math.inf) -> str | None:
        """Send a heartbeat if one is due, and find out what is due next.

        Args:
            now: monotonic seconds.
            is_silenced: whether nothing could be heard of the peer, because it is not read.
            login_at: when its login has its turn.

        Returns:
            That the peer was silent for too long, for the log; ``None`` if it was not.
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
                return f"silent for two heartbeat intervals of {heartbeat} s"
            if now - self._output.last_sent >= heartbeat / 2:
                self._output.write(HEARTBEAT)
                self._output.last_sent = now
            times += [self._output.last_sent + heartbeat / 2, self.last_received + 2 * heartbeat]
        self.at = min(times)
        return None
