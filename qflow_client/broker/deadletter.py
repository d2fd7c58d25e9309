"""Dead-lettering as RabbitMQ does it: where a message goes that died, and what its headers tell of its deaths."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from qflow_client.broker.entries import DropReason
from qflow_client.broker.message import StoredMessage, Target
from qflow_client.broker.wire import decode_headers, expiration_of, with_headers
from qflow_client.fields import encode_table

if TYPE_CHECKING:
    from qflow_client.broker.queue import Queue

__all__ = ["DeadLetters"]

_log = logging.getLogger(__name__)

_DEATHS = "x-death"


class DeadLetters:
    """Messages that died, on their way to where they are dead-lettered.

    Args:
        resolve: the target, up to date, of a message to an exchange with a routing key; ``None`` if there is no such
            exchange.
        destinations: the queues that a message goes to, whose target is up to date.
        when_read: has something called when the body of a message is in memory.
        wall_clock: seconds since 1970.
    """

    __slots__ = ("_dead", "_destinations", "_is_burying", "_resolve", "_wall_clock", "_when_read")

    def __init__(
        self,
        resolve: Callable[[str, str], Target | None],
        destinations: Callable[[StoredMessage], Sequence[Queue]],
        when_read: Callable[[StoredMessage, Callable[[], None]], None],
        wall_clock: Callable[[], float],
    ) -> None:
        self._resolve = resolve
        self._destinations = destinations
        self._when_read = when_read
        self._wall_clock = wall_clock
        # Messages that died and are not buried yet, and whether somebody is at it.
        self._dead: deque[tuple[Queue, StoredMessage, DropReason]] = deque()
        self._is_burying = False

    def died(self, queue: Queue, message: StoredMessage, reason: DropReason) -> None:
        """A message was dropped by a queue with a dead-letter exchange.

        One that dies while another is buried waits for its turn, so that a chain of queues is no chain of calls.
        """
        self._dead.append((queue, message, reason))
        if self._is_burying:
            return
        self._is_burying = True
        try:
            while self._dead:
                self._bury_next(*self._dead.popleft())
        finally:
            self._is_burying = False

    def _bury_next(self, queue: Queue, message: StoredMessage, reason: DropReason) -> None:
        if message.body is None:
            # It must be read before.
            self._when_read(message, lambda: self.died(queue, message, reason))
        else:
            self._bury(queue, message, reason)
            queue.buried(message)

    def _bury(self, queue: Queue, message: StoredMessage, reason: DropReason) -> None:
        options = queue.options
        key = options.dead_letter_routing_key
        target = self._resolve(options.dead_letter_exchange or "", message.target.routing_key if key is None else key)
        if target is None:
            _log.warning(
                "queue '%s': a message is lost (%s): there is no dead-letter exchange '%s'",
                queue.name,
                reason,
                options.dead_letter_exchange,
            )
            return
        letter = _mourn(message, queue.name, reason, target, self._wall_clock())
        deaths = _deaths_of(letter)
        for heir in self._destinations(letter):
            # Nobody is there to be told of a refusal, and each queue decides for itself.
            if _is_cycle(heir.name, reason, deaths):
                _log.warning("queue '%s': a message is lost: it died there before, and comes round again", heir.name)
            elif heir.refusal(letter.size) is not None:
                heir.count_drop(DropReason.REFUSED)
            else:
                heir.enqueue(letter)
                heir.after_publish()


def _deaths_of(message: StoredMessage) -> list[dict[str, Any]]:
    """Where and why a message died before, the last first."""
    deaths = decode_headers(message.header).get(_DEATHS)
    return [death for death in deaths if isinstance(death, dict)] if isinstance(deaths, list) else []


def _is_cycle(queue: str, reason: DropReason, deaths: Sequence[dict[str, Any]]) -> bool:
    """Whether a message that died may not go to a queue: it died there before, and no consumer has rejected it since.

    Args:
        queue: where it would go.
        reason: of its death now.
        deaths: all of them, this one included.
    """
    if reason is DropReason.REJECTED:
        return False
    for death in deaths:
        if death.get("reason") == DropReason.REJECTED:
            return False
        if death.get("queue") == queue:
            return True
    return False


def _mourn(message: StoredMessage, queue: str, reason: DropReason, target: Target, time: float) -> StoredMessage:
    """The message that goes to a dead-letter exchange.

    Args:
        message: which died.
        queue: where.
        reason: why.
        target: where it goes.
        time: seconds since 1970.
    """
    try:
        headers = _headers(message, _deaths_of(message), queue, reason, time)
    except (TypeError, ValueError):
        # What a client wrote there cannot be written again.
        headers = _headers(message, [], queue, reason, time)
    assert message.body is not None
    return StoredMessage(target, with_headers(message.header, headers), message.body)


def _headers(
    message: StoredMessage, deaths: list[dict[str, Any]], queue: str, reason: DropReason, time: float
) -> dict[bytes, bytes]:
    """The headers that tell of a message's deaths, each with its type, by name."""
    same = [death for death in deaths if (death.get("queue"), death.get("reason")) == (queue, reason)]
    others = [death for death in deaths if death not in same]
    death: dict[str, Any]
    if same:
        count = same[0].get("count")
        death = same[0] | {"count": count + 1 if isinstance(count, int) else 1}
    else:
        death = {
            "count": 1,
            "reason": reason.value,
            "queue": queue,
            "time": datetime.fromtimestamp(int(time), UTC),
            "exchange": message.target.exchange,
            "routing-keys": [message.target.routing_key],
        }
        if message.ttl is not None:
            death["original-expiration"] = expiration_of(message.header)
    headers: dict[str, Any] = {_DEATHS: [death, *others]}
    if not deaths:
        headers |= {
            "x-first-death-reason": reason.value,
            "x-first-death-queue": queue,
            "x-first-death-exchange": message.target.exchange,
        }
    # A table of one field is its size, the size of its name, its name and what is wanted.
    return {name.encode(): encode_table({name: value}, name)[5 + len(name) :] for name, value in headers.items()}
