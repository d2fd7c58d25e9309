"""When, where and how often to connect, sans-I/O: told what failed and when, it says how long to wait.

`Reconnection` decides after a connection is lost, `Watch` whether to leave one that is still open, and `Return` whether
to leave it for the first host.

Nothing here sleeps, connects or reads a clock.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from qflow_client.redaction import hide_password
from qflow_client.settings import HostOrder, OnBlocked, OnRefused, ProducerSettings

__all__ = ["Backoff", "Reconnection", "Return", "Watch", "hosts_in_order", "is_final", "retries"]

_T = TypeVar("_T")

# What the broker says to a client that it will never let in: wrong name or password (403), no such virtual host (530,
# and 402 or 404 in older brokers), no access to it (530).
_REFUSALS = (402, 403, 404, 530)

# How often `Watch` looks within the shortest of its limits, how often `Return` asks within its own, and how often the
# delay of a failover or a return doubles at the most.
_LOOKS = 8
_PROBES = 4
_MOST_DOUBLINGS = 5


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
        self._first = first
        self._longest = longest
        self._jitter = jitter
        self._limit = limit
        # The next pause, before jitter, and since when the time limit counts.
        self._next = first
        self._began = 0.0

    def begin(self, now: float, *, anew: bool = True) -> None:
        """The time limit counts from now.

        Args:
            now: seconds.
            anew: begin with the shortest pause, too.
        """
        self._began = now
        if anew:
            self._next = self._first

    def pause(self, now: float) -> float | None:
        """How long to wait now, in seconds; ``None`` once the time is up."""
        left = math.inf if self._limit is None else self._began + self._limit - now
        if left <= 0.0:
            return None
        pause = min(self._next, self._longest)
        self._next = min(2.0 * pause, self._longest)
        # The last try comes when the time is up, not later.
        return min(pause * (1.0 + random.uniform(0.0, self._jitter)), left)


def retries(settings: ProducerSettings) -> Backoff | None:
    """The pauses before messages leave again that the broker refused; ``None`` if they do not."""
    if settings.on_refused is OnRefused.FAIL or not settings.confirms:
        return None
    return Backoff(settings.retry_delay, settings.retry_delay_max, settings.reconnect_jitter)


def hosts_in_order(settings: ProducerSettings) -> tuple[str, ...]:
    """The URLs of the hosts in the order in which a producer tries them (`host_order`)."""
    hosts = list(settings.urls)
    if settings.host_order is HostOrder.SHUFFLED:
        random.shuffle(hosts)
    return tuple(hosts)


class Reconnection:
    """Which host is to be tried when after the connection was lost, and whether to go on.

    First comes the host that was lost, then the others, then there is a pause.

    Args:
        settings: the producer's.
        hosts: the URLs of its hosts, in order.
        host: the index of the one that is connected to.
        credentials_change: whether each try may have other credentials, so that no refusal is the last word.
    """

    def __init__(
        self, settings: ProducerSettings, hosts: Sequence[str], host: int, *, credentials_change: bool = False
    ) -> None:
        self._urls = hosts
        #: How many hosts there are.
        self.hosts = len(hosts)
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
        self._connect_timeout = settings.connect_timeout
        self._opened_at: float | None = None
        self._credentials_change = credentials_change
        # By host, how often it could not be connected to, or was left. That decides which of its addresses comes first.
        self._turns: Counter[int] = Counter()
        # By host, why it could not be connected to in this round, and whether it never will be.
        self._failures: dict[int, tuple[str, bool]] = {}
        #: Why the connection was lost, and once it is given up why that is; for people.
        self.verdict = ""
        #: Why the last try failed; likewise. Empty if none has failed since there was a connection.
        self.last = ""

    @property
    def url(self) -> str:
        """The host that is in use, or to be tried next, as it may be shown."""
        return hide_password(self._urls[self.host])

    @property
    def first_url(self) -> str:
        """The URL of the first host, with its password."""
        return self._urls[0]

    @property
    def host_url(self) -> str:
        """The URL of that host, with its password."""
        return self._urls[self.host]

    def opened(self, now: float) -> None:
        """A connection is there."""
        self._opened_at = now
        self.last = ""

    def move_on(self) -> None:
        """Have the next host tried first, because the producer leaves the one that is in use."""
        self._turns[self.host] += 1
        self.host = (self.host + 1) % len(self._urls)

    def addresses(self, found: Sequence[_T]) -> tuple[list[_T], float]:
        """The order in which to try the addresses of the host, and the seconds that each of them may take.

        After each try that has failed the next address comes first, because one that takes connections and says nothing
        costs a whole try. One that does not even take them only costs its part of `connect_timeout`.

        Args:
            found: what the name of the host stands for, at least one.
        """
        first = self._turns[self.host] % len(found)
        return [*found[first:], *found[:first]], self._connect_timeout / len(found)

    def move_to_first(self) -> None:
        """Have the first host tried first, because the producer returns to it."""
        self.host = 0

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
        self._turns[self.host] += 1
        self._failures[self.host] = why, final and not self._credentials_change
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


class Watch:
    """Whether to leave a connection that is still open: its broker is silent, or blocks it (E15).

    The link calls `look` every `period` seconds while the connection is open. A broker that owes confirms is expected
    to send something within `liveness` seconds. If it does not, it is asked for an answer (a second
    ``Confirm.Select``), so a broker that only confirms late is not left: it answers the probe. A broker that blocks the
    connection reads nothing from it, so silence counts only while it does not.

    If all hosts are blocked, the producer goes round them ever more slowly: `failover_delay` doubles with each round
    until a message is settled.

    Args:
        settings: the producer's.
        hosts: how many it has.
    """

    def __init__(self, settings: ProducerSettings, hosts: int) -> None:
        self._liveness = settings.liveness
        self._delay = settings.failover_delay if settings.on_blocked is OnBlocked.FAILOVER and hosts > 1 else None
        self._hosts = hosts
        limits = [limit for limit in (self._liveness, self._delay) if limit is not None]
        #: Seconds between two looks; ``None`` if the settings ask for none.
        self.period = min(limits) / _LOOKS if limits else None
        # Connections that were left because they were blocked, since a message was last settled.
        self._moves = 0
        self._settled = 0
        self.opened(0.0)

    def opened(self, now: float) -> None:
        """A connection is there."""
        # Since when nothing was due, or nothing came.
        self._silent_since = now
        # When the probe was sent that is not answered; None if none was.
        self._probed_at: float | None = None
        # Since when the connection is blocked; None while it is not.
        self._blocked_since: float | None = None

    @property
    def _doublings(self) -> int:
        return min(self._moves // (self._hosts - 1), _MOST_DOUBLINGS)

    def look(self, now: float, *, heard_at: float, is_due: bool, is_blocked: bool, settled: int) -> str | None:
        """Decide whether to stay.

        Args:
            now: seconds.
            heard_at: when the broker last sent anything.
            is_due: whether it owes confirms.
            is_blocked: whether it blocks the connection.
            settled: how many messages are settled so far.

        Returns:
            ``None`` to stay, ``""`` to stay and send a probe, and otherwise why the connection is to be left.
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
    """Whether a producer that is connected to another host returns to the first one (E15).

    While it is connected to another host, it probes the first one every `period` seconds. Once that has answered each
    probe for `return_to_first` seconds, the producer returns. If the first host cannot be connected to, or does not
    keep the producer for as long, the next wait is twice as long.

    Args:
        settings: the producer's.
        hosts: how many it has.
    """

    def __init__(self, settings: ProducerSettings, hosts: int) -> None:
        self._after = settings.return_to_first if hosts > 1 else None
        #: Seconds between two probes; ``None`` if the settings ask for none.
        self.period = None if self._after is None else self._after / _PROBES
        # Since when the first host has answered all probes; None if it did not answer the last one.
        self._answers_since: float | None = None
        # Since when the producer is on the first host; None if it is not.
        self._kept_since: float | None = None
        # Returns since the first host has last kept the producer long enough.
        self._returns = 0

    def opened(self, host: int, now: float) -> None:
        """There is a connection, or a channel on it, to the host of this index."""
        if host == 0:
            self._answers_since = None
            self._kept_since = now if self._kept_since is None else self._kept_since
            return
        if self._after is not None and self._kept_since is not None and now - self._kept_since >= self._after:
            self._returns = 0
        self._kept_since = None

    def probed(self, answered: bool, now: float) -> bool:
        """The first host has answered a probe or not; True if the producer is to return now."""
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
