"""Credentials that change, and the times at which they are replaced.

`Expiry` does no I/O, reads no clock and calls no functions of the application.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from qflow_client.errors import SettingsError
from qflow_client.recovery import Backoff
from qflow_client.redaction import shown
from qflow_client.settings import ProducerSettings

__all__ = ["Credentials", "Expiry"]

# Credentials are replaced after this part of their lifetime. RabbitMQ's Java client uses the same value.
_PART = 0.8


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user name and a password, or a token instead of the password.

    Attributes:
        username: the user name. With OAuth 2, RabbitMQ uses the name in the token and ignores this name.
        password: the password or the token. The `repr` does not show this value.
        expires_in: seconds until the password expires, from when the producer gets this object; ``None`` for no limit.

    Raises:
        SettingsError: a value is not allowed.
    """

    username: str
    password: str = field(repr=False)
    expires_in: float | None = None

    def __post_init__(self) -> None:
        for name in ("username", "password"):
            if not _is_text(getattr(self, name)):
                raise SettingsError(f"Credentials.{name}: it must be a str that UTF-8 can encode")
        seconds = self.expires_in
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and 0 < seconds < math.inf):
            raise SettingsError(
                f"Credentials.expires_in={shown(seconds)}: it must be None or seconds, more than 0; credentials with "
                "a lower value have expired"
            )


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


class Expiry:
    """Computes when the credentials of a connection are replaced.

    The producer requests new credentials after 80 % of the lifetime, and again after growing pauses if a request fails.
    If the present credentials expire before new ones exist, the producer ends the connection. Otherwise the broker
    would refuse messages with an error that seems to concern the messages and not the credentials.

    Args:
        settings: settings of the producer. The pauses between requests are those of the settings ``reconnect_…``.
    """

    def __init__(self, settings: ProducerSettings) -> None:
        self._backoff = Backoff(settings.reconnect_delay, settings.reconnect_delay_max, settings.reconnect_jitter)
        self._shortest = settings.reconnect_delay
        self._limit = settings.connect_timeout
        # When the present credentials should be replaced, and when they expire; infinite for never.
        self._due_at = self._expires_at = math.inf
        #: The name of the logged-in user.
        self.username = ""

    def obtained(self, credentials: Credentials, now: float) -> None:
        self.username = credentials.username
        self._backoff.begin(now)
        life = math.inf if credentials.expires_in is None else credentials.expires_in
        self._expires_at = now + life
        # Without the minimum `_shortest`, credentials with a short lifetime would cause requests without a pause.
        self._due_at = now + max(_PART * life, self._shortest)

    def wait(self, now: float) -> float | None:
        """Return the seconds until new credentials have to be requested; ``None`` if the present ones never expire."""
        return None if self._due_at == math.inf else max(0.0, self._due_at - now)

    def patience(self, now: float) -> float:
        """Return the maximum seconds from the call of the application's function to the answer of the broker."""
        return max(0.0, min(self._limit, self._expires_at - now))

    def failed(self, now: float) -> float | None:
        """Return the seconds from a failed request to the next request; ``None`` if the connection must end."""
        left = self._expires_at - now
        pause = self._backoff.pause(now)
        assert pause is not None
        return min(pause, left) if left > 0.0 else None
