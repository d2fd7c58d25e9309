"""When, where and how often to try again, sans-I/O: told what failed and when, it says how long to wait.

The pauses are tenacity's. Nothing here sleeps, connects or reads a clock.
"""

from __future__ import annotations

from tenacity import RetryCallState, Retrying, stop_after_delay, stop_never, wait_exponential, wait_random_exponential

from qflow_client.redaction import hide_password
from qflow_client.settings import OnRefused, ProducerSettings

__all__ = ["Backoff", "Reconnection", "is_final", "retries"]

# What the broker says to a client that it will never let in: wrong name or password (403), no such virtual host (530,
# and 402 or 404 in older brokers), no access to it (530).
_REFUSALS = (402, 403, 404, 530)


def is_final(code: int, text: str) -> bool:
    """Whether the broker would say the same again, however often it is asked to open a connection.

    Args:
        code: of its ``Connection.Close``.
        text: its words.
    """
    # A limit on connections (530 in RabbitMQ) is there until somebody else leaves.
    return code in _REFUSALS and "limit" not in text


class Backoff:
    """Pauses that grow.

    Args:
        first: the shortest pause in seconds.
        longest: the longest, before jitter.
        jitter: the part of a pause by which it may be longer, by chance.
        limit: seconds after which there is none any more; ``None`` for never.
    """

    def __init__(self, first: float, longest: float, jitter: float, limit: float | None = None) -> None:
        self._limit = limit
        self._retrying = Retrying(
            wait=wait_exponential(multiplier=first, max=longest)
            + wait_random_exponential(multiplier=first * jitter, max=longest * jitter),
            stop=stop_never if limit is None else stop_after_delay(limit),
        )
        self._state = RetryCallState(self._retrying, None, (), {})

    def begin(self, now: float, *, anew: bool = True) -> None:
        """The time limit counts from now.

        Args:
            now: seconds.
            anew: begin with the shortest pause, too.
        """
        attempt = self._state.attempt_number
        self._state = RetryCallState(self._retrying, None, (), {})
        self._state.start_time = now
        if not anew:
            self._state.attempt_number = attempt

    def pause(self, now: float) -> float | None:
        """How long to wait now, in seconds; ``None`` once the time is up."""
        state = self._state
        state.outcome_timestamp = now
        if self._retrying.stop(state):
            return None
        pause = float(self._retrying.wait(state))
        state.prepare_for_next_attempt()
        # The last try comes when the time is up, not later.
        return pause if self._limit is None else min(pause, state.start_time + self._limit - now)


def retries(settings: ProducerSettings) -> Backoff | None:
    """The pauses before messages leave again that the broker refused; ``None`` if they do not."""
    if settings.on_refused is OnRefused.FAIL or not settings.confirms:
        return None
    return Backoff(settings.retry_delay, settings.retry_delay_max, settings.reconnect_jitter)


class Reconnection:
    """Which host is to be tried when after the connection was lost, and whether to go on.

    First comes the host that was lost, then the others, then there is a pause.

    Args:
        settings: the producer's.
        host: the index, in `settings.urls`, of the host that is connected to.
    """

    def __init__(self, settings: ProducerSettings, host: int) -> None:
        self._urls = settings.urls
        #: The index of the host that is in use, or to be tried next.
        self.host = host
        self._backoff = Backoff(
            settings.reconnect_delay,
            settings.reconnect_delay_max,
            settings.reconnect_jitter,
            settings.reconnect_timeout,
        )
        self._reopening = Backoff(settings.reconnect_delay, settings.reconnect_delay_max, settings.reconnect_jitter)
        # How many messages were settled when a channel was last closed.
        self._settled = -1
        # A connection that lasts less than that has shown nothing: it may be lost again and again for the same reason.
        self._proves = settings.reconnect_delay_max
        self._timeout = settings.reconnect_timeout
        self._opened_at: float | None = None
        # By host, why it could not be connected to in this round, and whether it never will be.
        self._failures: dict[int, tuple[str, bool]] = {}
        #: Why the connection was lost, and once it is given up why that is; for people.
        self.verdict = ""
        #: Why the last try failed; likewise.
        self.last = ""

    @property
    def url(self) -> str:
        """The host that is in use, or to be tried next, as it may be shown."""
        return hide_password(self._urls[self.host])

    def opened(self, now: float) -> None:
        """A connection is there."""
        self._opened_at = now

    def lost(self, why: str, now: float) -> float | None:
        """The connection is gone.

        Args:
            why: for people.
            now: seconds.

        Returns:
            Seconds until the first try; ``None`` if there is to be none.
        """
        self._failures.clear()
        self.verdict = why
        self._backoff.begin(now, anew=self._opened_at is None or now - self._opened_at >= self._proves)
        return self._backoff.pause(now)

    def channel_closed(self, settled: int, now: float) -> float:
        """The broker closed the channel, and the connection is still there.

        Args:
            settled: how many messages are settled so far.
            now: seconds.

        Returns:
            Seconds until the next channel is to be opened: none if anything was settled since the last time.
        """
        if settled > self._settled:
            self._settled = settled
            self._reopening.begin(now)
            return 0.0
        pause = self._reopening.pause(now)
        assert pause is not None
        return pause

    def failed(self, why: str, final: bool, now: float) -> float | None:
        """A try has failed.

        Args:
            why: for people.
            final: no further one can do better with this host.
            now: seconds.

        Returns:
            Seconds until the next try; ``None`` if there is to be none.
        """
        self.last = why
        self._failures[self.host] = why, final
        self.host = (self.host + 1) % len(self._urls)
        if len(self._failures) < len(self._urls):
            return 0.0
        if all(final for _, final in self._failures.values()):
            self.verdict += f"; it cannot be had again: {self._words()}"
            return None
        pause = self._backoff.pause(now)
        if pause is None:
            self.verdict += f"; it could not be had again within {self._timeout:.3g} s: {self._words()}"
        else:
            self._failures.clear()
        return pause

    def _words(self) -> str:
        return "; ".join(f"{hide_password(self._urls[host])}: {why}" for host, (why, _) in self._failures.items())
