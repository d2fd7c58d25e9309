"""Decides when, where and how often to connect.

The caller reports failures with their times, and gets the seconds to wait. `Reconnection` decides when and where to
reconnect. `Watch` decides whether to end an open connection. `Return` decides whether to return to the first host.

This module does no I/O and reads no clock. Times are monotonic seconds.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from qflow_client.redaction import hide_password
from qflow_client.settings import HostOrder, OnBlocked, OnRefused, ProducerSettings

__all__ = ["Backoff", "Reconnection", "Return", "Watch", "hosts_in_order", "is_final", "retries", "silent"]

_T = TypeVar("_T")

# The broker's reply codes for a client that it will never accept. The name or password is wrong (403). Or the virtual
# host does not exist (530, in older brokers 402 or 404), or the user has no access to it (530).
_REFUSALS = (402, 403, 404, 530)

# Number of checks of `Watch` within the shorter of `liveness` and `failover_delay`.
_LOOKS = 8
# Number of probes of `Return` within `return_to_first` seconds.
_PROBES = 4
# The delay before a failover or a return is doubled at most this number of times.
_MOST_DOUBLINGS = 5


def is_final(code: int, text: str) -> bool:
    """Return True if, after a refusal with this reply code and text, each further try to connect would fail."""
    # RabbitMQ also uses 530 for a reached limit of connections, which is not final: another client may disconnect.
    return code in _REFUSALS and "limit" not in text


def silent(timeout: float) -> str:
    """Return the text for a host that did not answer in time."""
    return f"no answer within {timeout:.3g} s"


class Backoff:
    """Computes growing pauses between tries.

    Args:
        first: first pause in seconds.
        longest: maximum pause in seconds, including the jitter.
        jitter: maximum random extension of a pause, as a fraction of the pause.
        limit: seconds after which no more tries are made; ``None`` for no limit.
    """

    def __init__(self, first: float, longest: float, jitter: float, limit: float | None = None) -> None:
        self._first = first
        # The maximum of a pause without its jitter. It leaves room for jitter, so even the longest pauses are random.
        self._longest = longest / (1.0 + jitter)
        self._jitter = jitter
        self._limit = limit
        # The next pause without jitter.
        self._next = first
        # When the time limit started.
        self._began = 0.0

    def begin(self, now: float, *, anew: bool = True) -> None:
        """Start the time limit of `limit` seconds.

        Args:
            anew: whether the next pause is the first, shortest one. If False, the pauses continue to grow.
        """
        self._began = now
        if anew:
            self._next = self._first

    def pause(self, now: float) -> float | None:
        """Return the next pause in seconds, or ``None`` if `limit` seconds have passed since `begin`."""
        left = math.inf if self._limit is None else self._began + self._limit - now
        if left <= 0.0:
            return None
        pause = min(self._next, self._longest)
        self._next = min(2.0 * pause, self._longest)
        # Shorten the last pause, so that the last try comes exactly at the time limit.
        return min(pause * (1.0 + random.uniform(0.0, self._jitter)), left)


def retries(settings: ProducerSettings) -> Backoff | None:
    """Return the pauses before refused messages are sent again, or ``None`` if they are not sent again."""
    if settings.on_refused is OnRefused.FAIL or not settings.confirms:
        return None
    return Backoff(settings.retry_delay, settings.retry_delay_max, settings.reconnect_jitter)


def hosts_in_order(settings: ProducerSettings) -> tuple[str, ...]:
    """Return the URLs of the hosts in the order in which a producer tries them (`host_order`)."""
    hosts = list(settings.urls)
    if settings.host_order is HostOrder.SHUFFLED:
        random.shuffle(hosts)
    return tuple(hosts)


class Reconnection:
    """Decides after the loss of a connection when each host is tried, and when the producer stops trying.

    After a pause, the producer tries the host of the lost connection (after `move_on`, the next host), then the others.

    Args:
        hosts: URLs of the hosts, in order.
        host: index of the connected host.
        credentials_change: whether each try may use new credentials. If True, no refusal ends the tries.
    """

    def __init__(
        self, settings: ProducerSettings, hosts: Sequence[str], host: int, *, credentials_change: bool = False
    ) -> None:
        self._urls = hosts
        #: Number of hosts.
        self.hosts = len(hosts)
        #: Index of the connected host, or of the host to try next.
        self.host = host
        self._backoff = Backoff(
            settings.reconnect_delay,
            settings.reconnect_delay_max,
            settings.reconnect_jitter,
            settings.reconnect_timeout,
        )
        self._reopening = Backoff(settings.reconnect_delay, settings.reconnect_delay_max, settings.reconnect_jitter)
        # Number of messages that were settled before the broker last closed a channel; -1 if it closed none.
        self._settled = -1
        # If a connection lasts for this number of seconds, the pauses after its loss begin with the shortest again.
        self._proves = settings.reconnect_delay_max
        self._timeout = settings.reconnect_timeout
        self._connect_timeout = settings.connect_timeout
        self._opened_at: float | None = None
        self._credentials_change = credentials_change
        # How often each host has failed or was left by `move_on`. This number selects the address that is tried first.
        self._turns: Counter[int] = Counter()
        # For each host that has failed since the last pause: the error, and whether the error is final.
        self._failures: dict[int, tuple[str, bool]] = {}
        #: Text for people: why the connection was lost or, at the end, why the producer stopped trying.
        self.verdict = ""
        #: Text for people: why the last try failed. Empty if no try has failed since the last connection.
        self.last = ""

    @property
    def url(self) -> str:
        """The URL of the connected host, or of the host to try next, without secrets."""
        return hide_password(self._urls[self.host])

    @property
    def first_url(self) -> str:
        """The URL of the first host, with its password."""
        return self._urls[0]

    @property
    def host_url(self) -> str:
        """The URL of the connected host, or of the host to try next, with its password."""
        return self._urls[self.host]

    def opened(self, now: float) -> None:
        self._opened_at = now
        self.last = ""

    def move_on(self) -> None:
        """Choose the next host for the next try, because the producer leaves the connected host."""
        self._turns[self.host] += 1
        self.host = (self.host + 1) % len(self._urls)

    def addresses(self, found: Sequence[_T]) -> tuple[list[_T], float]:
        """Return the addresses of the host in the order of tries, and the maximum seconds for each.

        After each failed try of the host, the next try begins with another address. Otherwise a first address that
        accepts the connection and then sends nothing would make every try fail.
        """
        first = self._turns[self.host] % len(found)
        return [*found[first:], *found[:first]], self._connect_timeout / len(found)

    def move_to_first(self) -> None:
        """Choose the first host for the next try, because the producer returns to it."""
        self.host = 0

    def lost(self, why: str, now: float) -> float | None:
        """Handle a lost connection. Return the seconds until the first try; ``None`` if there will be no try."""
        self._failures.clear()
        self.verdict = why
        self._backoff.begin(now, anew=self._opened_at is None or now - self._opened_at >= self._proves)
        return self._backoff.pause(now)

    def channel_closed(self, settled: int, now: float) -> float:
        """Handle a channel that the broker has closed. Return the seconds until the next channel is opened."""
        if settled > self._settled:
            self._settled = settled
            self._reopening.begin(now)
            return 0.0
        pause = self._reopening.pause(now)
        assert pause is not None
        return pause

    def failed(self, why: str, final: bool, now: float) -> float | None:
        """Handle a failed try. Return the seconds until the next try; ``None`` if there will be no try."""
        self.last = why
        self._turns[self.host] += 1
        self._failures[self.host] = why, final and not self._credentials_change
        self.host = (self.host + 1) % len(self._urls)
        if len(self._failures) < len(self._urls):
            return 0.0
        if all(final for _, final in self._failures.values()):
            self.verdict += f"; connecting is not possible: {self._words()}"
            return None
        pause = self._backoff.pause(now)
        if pause is None:
            self.verdict += f"; connecting did not succeed within {self._timeout:.3g} s: {self._words()}"
        else:
            self._failures.clear()
        return pause

    def _words(self) -> str:
        return "; ".join(f"{hide_password(self._urls[host])}: {why}" for host, (why, _) in self._failures.items())


class Watch:
    """Decides whether to end an open connection if the broker is silent or blocks the connection (E15).

    `Upkeep` calls `look` every `period` seconds while the connection is open. While confirms are missing, the broker
    must send something every `liveness` seconds. If the broker sends nothing, the producer sends a probe (a second
    ``Confirm.Select``). If a broker is merely late with its confirms, it answers the probe, and the producer keeps the
    connection. A broker that blocks the connection reads nothing from it, so the silence of such a broker is ignored.

    Each time the producer has tried all other hosts without success, the delay before a failover is doubled (at most
    five times). When a message is settled, the delay is `failover_delay` again.
    """

    def __init__(self, settings: ProducerSettings, hosts: int) -> None:
        self._liveness = settings.liveness
        self._delay = settings.failover_delay if settings.on_blocked is OnBlocked.FAILOVER and hosts > 1 else None
        self._hosts = hosts
        limits = [limit for limit in (self._liveness, self._delay) if limit is not None]
        #: Seconds between two calls of `look`; ``None`` if no calls are needed.
        self.period = min(limits) / _LOOKS if limits else None
        # How often the producer has left a blocked connection since a message was last settled.
        self._moves = 0
        self._settled = 0
        self.opened(0.0)

    def opened(self, now: float) -> None:
        # The last time at which the broker was alive, no confirm was missing, or the broker blocked the connection.
        self._silent_since = now
        # When the unanswered probe was sent; ``None`` if there is none.
        self._probed_at: float | None = None
        # Since when the connection is blocked; ``None`` while it is not blocked.
        self._blocked_since: float | None = None

    @property
    def served_until(self) -> float:
        """When the broker began to block the connection or, if it does not block it, was last alive."""
        return self._silent_since if self._blocked_since is None else self._blocked_since

    @property
    def _doublings(self) -> int:
        return min(self._moves // (self._hosts - 1), _MOST_DOUBLINGS)

    def look(self, now: float, *, heard_at: float, is_due: bool, is_blocked: bool, settled: int) -> str | None:
        """Decide whether to keep the connection.

        Args:
            heard_at: the time at which the broker last showed that it is alive, see `Tap.alive_at`.
            is_due: whether there are messages in flight, so that the broker has to send confirms.
            is_blocked: whether the broker blocks the connection.
            settled: number of messages that were settled so far.

        Returns:
            ``None`` to keep the connection; ``""`` to keep it and send a probe; any other text is the reason to end it.
        """
        if is_blocked:
            self._silent_since, self._probed_at = now, None
            if self._blocked_since is None:
                self._blocked_since = now
            blocked = now - self._blocked_since
            if self._delay is None or blocked < self._delay * 2**self._doublings:
                return None
            self._moves += 1
            return f"the broker has blocked the connection for {blocked:.3g} s, and there are other hosts"
        self._blocked_since = None
        if settled > self._settled:
            self._settled, self._moves = settled, 0
        if self._liveness is None:
            return None
        self._silent_since = max(self._silent_since, heard_at) if is_due else now
        silent = now - self._silent_since
        if silent < self._liveness:
            self._probed_at = None
        elif self._probed_at is None:
            self._probed_at = now
            return ""
        elif now - self._probed_at >= self._liveness / 2:
            return f"the broker has sent nothing for {silent:.3g} s, although confirms are due and a probe was sent"
        return None


class Return:
    """Decides whether a producer that uses another host returns to the first host (E15).

    While a producer is connected to another host, it probes the first host every `period` seconds. When the first host
    has answered all probes for `return_to_first` seconds, the producer returns. If the new connection fails, or is lost
    or blocked within `return_to_first` seconds, the next wait is twice as long, but at most 32 times `return_to_first`.
    """

    def __init__(self, settings: ProducerSettings, hosts: int) -> None:
        self._after = settings.return_to_first if hosts > 1 else None
        #: Seconds between two probes; ``None`` if no probes are needed.
        self.period = None if self._after is None else self._after / _PROBES
        # Since when the first host has answered all probes; ``None`` until it answers, and after a missing answer.
        self._answers_since: float | None = None
        # When the producer connected to the first host; ``None`` if its last connection was to another host or is over.
        self._kept_since: float | None = None
        # Number of returns to the first host since a connection to it lasted for `return_to_first` seconds.
        self._returns = 0

    def opened(self, host: int, now: float) -> None:
        """Record a new connection or channel to the host with this index."""
        if host == 0:
            self._answers_since = None
            self._kept_since = now if self._kept_since is None else self._kept_since
            return
        self.served_until(now)

    def served_until(self, now: float) -> None:
        """Record when the connection to the first host ended, or when that host began to be silent or to block it."""
        if self._after is not None and self._kept_since is not None and now - self._kept_since >= self._after:
            self._returns = 0
        self._kept_since = None

    def probed(self, answered: bool, now: float) -> bool:
        """Record whether the first host has answered a probe. Return True if the producer should return now."""
        assert self._after is not None
        if not answered:
            self._answers_since = None
            return False
        if self._answers_since is None:
            self._answers_since = now
        if now - self._answers_since < self._after * 2 ** min(self._returns, _MOST_DOUBLINGS):
            return False
        self._returns += 1
        self._answers_since = None
        return True
