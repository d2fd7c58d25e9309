"""An operator's rate limits for an exchange, a queue or a user (F2 F6).

A message that exceeds a rate limit is accepted, but the limit then blocks (flows) its channel. The limit unblocks the
channel when the average rate is low enough again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from qflow_client.broker.core.ports import Timed
from qflow_client.broker.policies.policy import choose
from qflow_client.flow import FlowController, FlowSource, RateLimiter
from qflow_client.redaction import shown

__all__ = ["RateLimit", "RateScope", "Rates"]


class RateScope(StrEnum):
    """The kind of object to which a rate limit applies."""

    #: Messages that clients publish to an exchange.
    EXCHANGE = "exchange"
    #: Messages that clients publish through any exchange, and that are routed to a queue. Dead letters are not counted.
    QUEUE = "queue"
    #: Messages that a user publishes, on all connections of the user together.
    USER = "user"


@dataclass(frozen=True, slots=True)
class RateLimit:
    """A limit for the messages per second, the bytes per second, or both.

    Attributes:
        apply_to: kind of the limited object.
        name: name of the exchange, queue or user. The object need not exist yet.
        messages: maximum messages per second; ``None`` for no limit.
        bytes: maximum body bytes per second; ``None`` for no limit.
        burst: size of a burst in seconds. After a pause, a burst is accepted without blocking the channel. A burst has
            as many messages and bytes as the rate allows in `burst` seconds, but at least one message and one byte.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is not allowed. The error contains the value.
    """

    apply_to: RateScope
    name: str
    messages: float | None = None
    bytes: float | None = None
    burst: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "apply_to", choose(f"apply_to={shown(self.apply_to)}", self.apply_to, RateScope))
        if not isinstance(self.name, str):
            raise TypeError(f"name={shown(self.name)}: it must be a string")
        if self.messages is None and self.bytes is None:
            raise ValueError(f"the rate limit of {self.apply_to} '{self.name}' limits nothing; set messages or bytes")
        for what in ("messages", "bytes", "burst"):
            value = getattr(self, what)
            if value is None:
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise TypeError(f"{what}={shown(value)}: it must be a number")
            if not 0 < value < math.inf:
                raise ValueError(f"{what}={shown(value)}: it must be more than 0 and finite")
        for what in ("messages", "bytes"):
            value = getattr(self, what)
            if value is not None and not value * self.burst < math.inf:
                raise ValueError(f"{what}={shown(value)} and burst={self.burst!r}: their product must be finite")

    def to_json(self) -> dict[str, Any]:
        """Return the limit as JSON types."""
        return asdict(self) | {"apply_to": self.apply_to.value}


class _Rate(FlowController):
    """The rate of one `RateLimit` in messages or in bytes, and the channels that it blocks."""

    __slots__ = ("_is_awaited", "_wake_at")

    def __init__(self, name: str, rate: float, burst: float, wake_at: Callable[[Timed, float], None], *, by_size: bool):
        super().__init__(RateLimiter(rate, burst=max(1.0, rate * burst), by_size=by_size), name=name)
        self._wake_at = wake_at
        # Whether a call of `tick` is scheduled.
        self._is_awaited = False

    def change(self, rate: float, burst: float, now: float) -> None:
        """Change the rate. Unblock the channels now if the new rate allows this, otherwise at a later `tick`."""
        assert isinstance(self.limiter, RateLimiter)
        self.limiter.rate, self.limiter.burst = rate, max(1.0, rate * burst)
        self.tick(now)

    def take(self, source: FlowSource, size: int, now: float) -> None:
        if self.offer(source, size, now) and not self._is_awaited:
            self._await(now)

    def tick(self, now: float) -> None:
        self._is_awaited = False
        self.resume(now)
        self._await(now)

    def _await(self, now: float) -> None:
        at = self.ready_at(now)
        if at is not None:
            self._is_awaited = True
            self._wake_at(self, at)

    def let_go(self) -> None:
        for source in self.blocked:
            self.forget(source)


class Rates:
    """All rate limits of a virtual host. `wake_at` schedules a call of an object's `tick`."""

    def __init__(self, wake_at: Callable[[Timed, float], None]) -> None:
        self._wake_at = wake_at
        self._limits: dict[tuple[RateScope, str], RateLimit] = {}
        # The rates of each limit. The outer key is the scope and name. The inner key is True for the rate in bytes.
        self._rates: dict[tuple[RateScope, str], dict[bool, _Rate]] = {}

    def __iter__(self) -> Iterator[RateLimit]:
        return iter(tuple(self._limits.values()))

    def __bool__(self) -> bool:
        return bool(self._limits)

    def set(self, limit: RateLimit, now: float) -> None:
        key = limit.apply_to, limit.name
        self._limits[key] = limit
        rates = self._rates.setdefault(key, {})
        for by_size, rate in ((False, limit.messages), (True, limit.bytes)):
            there = rates.get(by_size)
            if rate is None:
                if there is not None:
                    rates.pop(by_size).let_go()
            elif there is not None:
                there.change(rate, limit.burst, now)
            else:
                name = f"rate of {limit.apply_to} '{limit.name}'"
                rates[by_size] = _Rate(name, rate, limit.burst, self._wake_at, by_size=by_size)

    def delete(self, apply_to: RateScope, name: str) -> None:
        """Remove a limit. Raise `LookupError` if no limit has this scope and name."""
        key = apply_to, name
        if key not in self._limits:
            raise LookupError(f"there is no rate limit of {apply_to} '{name}'")
        del self._limits[key]
        for rate in self._rates.pop(key).values():
            rate.let_go()

    def take(self, source: FlowSource, size: int, exchange: str, queues: Iterable[str], user: str, now: float) -> None:
        """Count a published message. If the message exceeds a rate, block (flow) its channel, which is `source`."""
        keys = (
            (RateScope.EXCHANGE, exchange),
            (RateScope.USER, user),
            *((RateScope.QUEUE, queue) for queue in queues),
        )
        for key in keys:
            for rate in self._rates.get(key, {}).values():
                rate.take(source, size, now)
