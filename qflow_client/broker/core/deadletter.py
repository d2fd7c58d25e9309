"""Dead-lettering like RabbitMQ's: where a dead message goes, and which headers record its deaths.

`VirtualHost.died` passes dropped and refused messages to `DeadLetters`. A dead letter can die again in its next queue,
and so on. Two rules limit the number of dead letters.

The first rule is RabbitMQ's. A dead letter does not enter a queue in which it has died before, according to its header
``x-death``. With this rule alone, the copies of one message can take more than n! paths through n queues.

The second rule is not from RabbitMQ. If several copies of one message die in a queue, the queue dead-letters only the
first copy to each target (an exchange and a routing key). So there is at most one dead letter for each queue and
target.

After a rejection by a consumer, both rules ignore earlier deaths. The second rule also ignores deaths before a restart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from qflow_client.amqp.fields import encode_table
from qflow_client.broker.core.entries import DropReason, StoredMessage
from qflow_client.broker.core.errors import ChannelException
from qflow_client.broker.core.exchange import Target
from qflow_client.broker.core.logs import get_logger
from qflow_client.broker.core.properties import decode_headers, with_headers
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.wire import EXPIRATION_FLAG, short_property

__all__ = ["DeadLetters"]

_log = get_logger(__name__)

_DEATHS = "x-death"
_MAX_COUNT = 2**63 - 1


class Death(NamedTuple):
    """The place and the reason of a message's death, as an entry of ``x-death``.

    Attributes:
        queue: name of the queue, or any value that a client sent.
        reason: the reason, or any value that a client sent.
        raw: the entry of ``x-death``, encoded with its type.
    """

    queue: Any
    reason: Any
    fields: dict[str, Any]
    raw: bytes


class DeadLetter(StoredMessage):
    """A message that died and is published again.

    Args:
        target: the dead-letter exchange and the routing key.
        header: the payload of the content header frame, which records the deaths of the message.
        deaths: the deaths in the header, the latest first, cached until the end of `DeadLetters._send_all`.
    """

    __slots__ = ("deaths",)

    def __init__(self, target: Target, header: bytes, body: bytes, deaths: list[Death]) -> None:
        super().__init__(target, header, body)
        self.deaths: list[Death] | None = deaths


class DeadLetters:
    """The dead messages that still have to be sent to their dead-letter exchanges.

    Inside ``with dead_letters:`` dead messages wait until the end of the block. A publish that can cause dead letters
    uses such a block, from the check for room until all queues have the message. Without the block, a dead letter could
    use the room that was checked.

    Args:
        resolve: returns the current target for an exchange and a routing key; ``None`` if the exchange does not exist.
        destinations: returns the queues of a message with a current target.
        when_read: calls a function when the body of a message is in memory, or is known to be damaged on disk.
        wall_clock: returns seconds since 1970.
    """

    __slots__ = ("_dead", "_destinations", "_letters", "_pauses", "_resolve", "_wall_clock", "_when_read")

    def __init__(
        self,
        resolve: Callable[[str, str], Target | None],
        destinations: Callable[[StoredMessage, Target], Sequence[Queue]],
        when_read: Callable[[StoredMessage, Callable[[], None]], None],
        wall_clock: Callable[[], float],
    ) -> None:
        self._resolve = resolve
        self._destinations = destinations
        self._when_read = when_read
        self._wall_clock = wall_clock
        # Dead messages that are not dead-lettered yet. The messages wait while `_pauses` is not 0.
        self._dead: deque[tuple[Queue, StoredMessage, DropReason]] = deque()
        self._pauses = 0
        # The dead letters that the current `_send_all` has created.
        self._letters: list[DeadLetter] = []

    def __enter__(self) -> None:
        self._pauses += 1

    def __exit__(self, *error: object) -> None:
        self._pauses -= 1
        if self._dead and not self._pauses:
            self._send_all()

    def died(self, queue: Queue, message: StoredMessage, reason: DropReason) -> None:
        """Dead-letter a message that a queue with a dead-letter exchange has dropped or refused."""
        self._dead.append((queue, message, reason))
        if not self._pauses:
            self._send_all()

    def _send_all(self) -> None:
        """Send all dead messages. Messages that die meanwhile are only added to `_dead`, so calls are not nested."""
        self._pauses += 1
        try:
            while self._dead:
                self._send_next(*self._dead.popleft())
        finally:
            self._pauses -= 1
            for letter in self._letters:
                # The decoded deaths use far more memory than their bytes.
                letter.deaths = None
            self._letters.clear()

    def _send_next(self, queue: Queue, message: StoredMessage, reason: DropReason) -> None:
        if message.is_lost:
            queue.contents.count_drop(DropReason.DAMAGED)
            if queue.storage is not None:
                queue.storage.letter_done(message)
        elif message.body is None:
            self._when_read(message, lambda: self.died(queue, message, reason))
        else:
            try:
                self._send(queue, message, reason)
            except ChannelException as error:
                _log.warning("queue '%s': a message is lost (%s): %s", queue.name, reason, error.text)
            if queue.storage is not None:
                queue.storage.letter_done(message)

    def _send(self, queue: Queue, message: StoredMessage, reason: DropReason) -> None:
        options = queue.options
        key = options.dead_letter_routing_key
        target = self._resolve(options.dead_letter_exchange or "", message.target.routing_key if key is None else key)
        if target is None:
            _log.warning(
                "queue '%s': a message is lost (%s): dead-letter exchange '%s' does not exist",
                queue.name,
                reason,
                options.dead_letter_exchange,
            )
            return
        sent: set[tuple[str, str, str]] = set()
        if reason is not DropReason.REJECTED:
            sent = message.dead_lettered = getattr(message, "dead_lettered", sent)
            way = queue.name, target.exchange, target.routing_key
            if way in sent:
                if DropReason.COPY not in queue.contents.drops:
                    _log.warning(
                        "queue '%s': sends one dead letter for all copies of a message; further copies are only "
                        "counted",
                        queue.name,
                    )
                queue.contents.count_drop(DropReason.COPY)
                return
            sent.add(way)
        assert message.body is not None
        deaths, headers = _deaths_and_headers(message, queue.name, reason, self._wall_clock())
        letter = DeadLetter(target, with_headers(message.header, headers), message.body, deaths)
        letter.dead_lettered = sent
        self._letters.append(letter)
        blocked = _cycle_queues(reason, deaths)
        for destination in self._destinations(letter, target):
            # A dead letter has no publisher that could get a nack. So each destination accepts or drops it separately.
            if destination.name in blocked:
                if DropReason.CYCLE not in destination.contents.drops:
                    _log.warning(
                        "queue '%s': drops a dead letter, because its message died here before; further ones are "
                        "only counted",
                        destination.name,
                    )
                destination.contents.count_drop(DropReason.CYCLE)
            elif destination.refusal(letter.size) is not None:
                destination.contents.count_drop(DropReason.REFUSED)
            else:
                destination.enqueue(letter)
                destination.after_publish()


def _field(value: Any) -> bytes:
    """Encode a value with its type."""
    # The first 5 bytes of the table are its size and the size of the empty name.
    return encode_table({"": value}, "a header")[5:]


def _entry(fields: Mapping[str, Any]) -> bytes:
    """Encode an entry of ``x-death`` with its type. As in RabbitMQ, the count has 64 bits: clients cast it to long."""
    count = fields.get("count")
    if not isinstance(count, int) or isinstance(count, bool):
        return _field(fields)
    others = encode_table({name: value for name, value in fields.items() if name != "count"}, "a header")[4:]
    table = b"\x05countl" + count.to_bytes(8, "big", signed=True) + others
    return b"F" + len(table).to_bytes(4, "big") + table


def _deaths_of(message: StoredMessage) -> list[Death]:
    """Return the earlier deaths of a message, the latest first.

    Raises:
        TypeError, ValueError: the header has a value from a client that cannot be encoded again.
    """
    if isinstance(message, DeadLetter) and message.deaths is not None:
        return message.deaths
    entries = decode_headers(message.header).get(_DEATHS)
    if not isinstance(entries, list):
        return []
    return [
        Death(fields.get("queue"), fields.get("reason"), fields, _entry(fields))
        for fields in entries
        if isinstance(fields, dict)
    ]


def _cycle_queues(reason: DropReason, deaths: Sequence[Death]) -> set[str]:
    """Return the queues that must not get a dead letter, because its message died in them and was not rejected since.

    `reason` is the reason of the latest death. `deaths` begins with the latest death.
    """
    found: set[str] = set()
    if reason is not DropReason.REJECTED:
        for death in deaths:
            if death.reason == DropReason.REJECTED:
                break
            if isinstance(death.queue, str):
                found.add(death.queue)
    return found


def _deaths_and_headers(
    message: StoredMessage, queue: str, reason: DropReason, time: float
) -> tuple[list[Death], dict[bytes, bytes]]:
    """Return the deaths of a message that has just died, the latest first, and the headers that record them.

    The keys of the headers are names; the values are encoded with their types. `time` is in seconds since 1970.
    """
    try:
        before = _deaths_of(message)
        death = _next_death(message, before, queue, reason, time)
    except (TypeError, ValueError):
        before = []
        death = _next_death(message, before, queue, reason, time)
    deaths = [death, *(each for each in before if (each.queue, each.reason) != (queue, reason))]
    array = b"".join([each.raw for each in deaths])
    headers = {_DEATHS.encode(): b"A" + len(array).to_bytes(4, "big") + array}
    if not before:
        headers[b"x-first-death-reason"] = _field(reason.value)
        headers[b"x-first-death-queue"] = _field(queue)
        headers[b"x-first-death-exchange"] = _field(message.target.exchange)
    return deaths, headers


def _next_death(message: StoredMessage, before: Sequence[Death], queue: str, reason: DropReason, time: float) -> Death:
    """Return the latest death. Its count includes the earlier deaths (`before`) in this queue for this reason."""
    fields: dict[str, Any]
    same = next((death for death in before if (death.queue, death.reason) == (queue, reason)), None)
    if same is not None:
        count = same.fields.get("count")
        fields = same.fields | {"count": count + 1 if type(count) is int and 0 < count < _MAX_COUNT else 1}
    else:
        fields = {
            "count": 1,
            "reason": reason.value,
            "queue": queue,
            "time": datetime.fromtimestamp(int(time), UTC),
            "exchange": message.target.exchange,
            "routing-keys": [message.target.routing_key],
        }
        if message.ttl is not None:
            fields["original-expiration"] = short_property(message.header, EXPIRATION_FLAG)
    return Death(queue, reason.value, fields, _entry(fields))
