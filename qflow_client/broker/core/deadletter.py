"""Dead-lettering like RabbitMQ's: where a dead message goes, and which headers record its deaths.

A queue with a dead-letter exchange passes its dead messages (see `dropping.py`) to `DeadLetters`. A dead letter can die
again in its next queue, and so on. Two rules limit the number of dead letters.

The first rule is RabbitMQ's. A dead letter does not enter a queue in which it has died before, according to its header
``x-death``. With this rule alone, the copies of one message can take more than n! paths through n queues.

The second rule is not from RabbitMQ. If several copies of one message die in a queue, the queue dead-letters only the
first copy to each target (an exchange and a routing key). So there is at most one dead letter for each queue and
target.

After a rejection by a consumer, both rules ignore earlier deaths. The second rule also ignores deaths before a restart.

One frame of a client can make very many messages die: for example, one large message can displace very many small ones
from a full queue. `DeadLetters` sends one slice of the dead letters immediately, and the others in later slices. A
queue also drops its messages in slices. Between the slices the broker does other work (E9), but handles no more frames
of that client. So a connection cannot make messages die faster than their letters are sent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any, NamedTuple

from qflow_client.amqp.fields import encode_table
from qflow_client.broker.core.dropping import drops_each
from qflow_client.broker.core.entries import DropReason, StoredMessage
from qflow_client.broker.core.errors import ChannelException
from qflow_client.broker.core.exchange import Target
from qflow_client.broker.core.logs import get_logger
from qflow_client.broker.core.properties import decode_headers, with_headers
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.timers import Timers
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
        deaths: the deaths in the header, the latest first, cached until the end of `DeadLetters._send`.
    """

    __slots__ = ("deaths",)

    def __init__(self, target: Target, header: bytes, body: bytes, deaths: list[Death]) -> None:
        super().__init__(target, header, body)
        self.deaths: list[Death] | None = deaths


class DeadLetters:
    """The dead messages that still have to be sent to their dead-letter exchanges.

    Inside ``with dead_letters:`` dead messages wait until the end of the block. A publish that can cause dead letters
    uses such a block, from the check for room until all queues have the message. Without the block, a dead letter could
    take the room that the check has found. Messages that die outside of a block wait until the next `tick`.

    A dead letter can make messages die in the queues that it enters. The letters of these messages are sent before the
    letters of older dead messages. Otherwise the number of waiting dead messages could grow without limit.

    Args:
        timers: calls `tick`.
        resolve: returns the current target for an exchange and a routing key; ``None`` if the exchange does not exist.
        destinations: returns the queues of a message with a current target.
        when_read: calls a function when the body of a message is in memory, or is known to be damaged on disk.
        wall_clock: returns seconds since 1970.
    """

    #: Maximum size of a slice: the number of its dead messages, plus the number of queues that each of them goes to.
    AT_ONCE = 1000
    #: Maximum number of dead messages, and approximate bytes of their bodies, that are read from disk at once.
    READS = 100
    READ_SIZE = 1 << 20

    __slots__ = (
        "_began",
        "_clock",
        "_dead",
        "_destinations",
        "_dying",
        "_has_timer",
        "_letters",
        "_number",
        "_pauses",
        "_reads",
        "_resolve",
        "_surplus",
        "_timers",
        "_waiting",
        "_wall_clock",
        "_when_read",
        "causes",
    )

    def __init__(
        self,
        timers: Timers,
        resolve: Callable[[str, str], Target | None],
        destinations: Callable[[StoredMessage, Target], Sequence[Queue]],
        when_read: Callable[[StoredMessage, Callable[[], None]], None],
        wall_clock: Callable[[], float],
    ) -> None:
        self._timers = timers
        self._clock = timers.clock
        self._resolve = resolve
        self._destinations = destinations
        self._when_read = when_read
        self._wall_clock = wall_clock
        # Dead messages that are not dead-lettered yet, in the order of sending. The first value is the number of the
        # cause (see `causes`). If a dead letter made the message die, this is the number of that letter's cause.
        self._dead: deque[tuple[int, Queue, StoredMessage, DropReason]] = deque()
        # While a dead letter is sent: the number of its cause, and the messages that die because of it.
        self._number = 0
        self._dying: list[tuple[int, Queue, StoredMessage, DropReason]] = []
        # The queues that exceed their maximum until `Queue.tick` has dropped more messages, with the cause's number.
        self._surplus: dict[Queue, int] = {}
        # Number of bodies that are being read from disk. Until they are in memory, no letter is sent.
        self._reads = 0
        # Number of causes so far: deaths, and surpluses (see `note_surplus`), that no dead letter has caused.
        self.causes = 0
        # Number of the blocks `with dead_letters:` that have not ended, and the time at which the first of them began.
        self._pauses = 0
        self._began = 0.0
        # The dead letters that the current `_send` has created.
        self._letters: list[DeadLetter] = []
        # Whether a call of `tick` is scheduled.
        self._has_timer = False
        # The functions passed to `when_done`, each with the value of `causes` at the call, in the order of the calls.
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def __enter__(self) -> None:
        if not self._pauses:
            self._began = self._clock()
        self._pauses += 1

    def __exit__(self, *error: object) -> None:
        self._pauses -= 1
        if self._dead and not self._pauses and not self._has_timer:
            try:
                self._send(self._began)
            finally:
                self._go_on_soon()

    def died(self, queue: Queue, message: StoredMessage, reason: DropReason) -> None:
        """Dead-letter a message that a queue with a dead-letter exchange has dropped or refused."""
        if self._number:
            self._dying.append((self._number, queue, message, reason))
            return
        self.causes += 1
        self._dead.append((self.causes, queue, message, reason))
        if not self._pauses:
            self._go_on_soon()

    def note_surplus(self, queue: Queue, on: bool) -> None:
        """Record whether a queue exceeds its maximum, so that `Queue.tick` has to drop more of its messages."""
        if on:
            if not self._number:
                self.causes += 1
            self._surplus.setdefault(queue, self._number or self.causes)
        elif queue in self._surplus:
            del self._surplus[queue]
            self._go_on_soon()

    @property
    def _blocked_from(self) -> float:
        """The lowest number of a cause whose letters must not be sent yet, because a queue exceeds its maximum."""
        return min(self._surplus.values()) if self._surplus else math.inf

    def is_done(self, causes: int) -> bool:
        """Whether the letters of all causes up to a number are sent, and their surpluses are dropped."""
        return self._blocked_from > causes and (not self._dead or self._dead[0][0] > causes)

    def when_done(self, call: Callable[[], None]) -> None:
        """Call a function when `is_done` is true for all causes so far."""
        self._waiting.append((self.causes, call))

    @property
    def is_waiting(self) -> bool:
        """Whether letters are not sent yet."""
        return bool(self._dead)

    def send_all(self) -> None:
        """Send all letters, before the broker stops, up to the first whose body has to be read from disk."""
        while self._dead and not self._reads:
            try:
                self._send(self._clock(), is_first=True)
            except Exception:
                # The other letters must be sent nevertheless, because the broker stops now.
                _log.exception("a dead letter could not be sent")

    def _go_on_soon(self) -> None:
        """Schedule `tick` if `tick` can send a letter, or can call a function that `when_done` has stored."""
        if self._has_timer or self._reads:
            return
        can_send = self._dead and self._dead[0][0] < self._blocked_from
        if can_send or (self._waiting and self.is_done(self._waiting[0][0])):
            self._has_timer = True
            self._timers.wake_at(self, self._clock())

    def tick(self, now: float) -> None:
        self._has_timer = False
        try:
            if self._dead and self._dead[0][0] < self._blocked_from:
                self._send(self._clock(), is_first=True)
            while self._waiting and self.is_done(self._waiting[0][0]):
                self._waiting.popleft()[1]()
        finally:
            self._go_on_soon()

    def _send(self, began: float, *, is_first: bool = False) -> None:
        """Send one slice of dead letters, for at most `Timers.MAX_TICK` seconds after the time `began`.

        Args:
            is_first: whether to send the first letter even if it exceeds the limits of the slice.
        """
        end = began + Timers.MAX_TICK
        left: float = self.AT_ONCE
        self._pauses += 1
        try:
            blocked_from = math.inf if is_first else self._blocked_from
            while self._dead and not self._reads:
                number, queue, message, reason = self._dead[0]
                if not is_first and (left <= 0 or number >= blocked_from or self._clock() >= end):
                    break
                if message.body is None and not message.is_lost:
                    self._read_next()
                    continue
                self._number = number
                self._dead.popleft()
                surpluses = len(self._surplus)
                try:
                    left -= self._send_next(queue, message, reason, math.inf if is_first else left)
                finally:
                    self._number = 0
                    if self._dying:
                        self._dead.extendleft(reversed(self._dying))
                        self._dying.clear()
                if is_first or len(self._surplus) != surpluses:
                    blocked_from = self._blocked_from
                is_first = False
        finally:
            self._pauses -= 1
            for letter in self._letters:
                # Free the decoded deaths, because they use far more memory than the encoded header.
                letter.deaths = None
            self._letters.clear()

    def _read_next(self) -> None:
        """Read the bodies of the next few dead messages from disk. They stay in memory until they are sent."""
        size = 0
        for _, _, message, _ in islice(self._dead, self.READS):
            if message.body is None and not message.is_lost and size < self.READ_SIZE:
                size += message.size
                self._reads += 1
                self._when_read(message, self._was_read)

    def _was_read(self) -> None:
        self._reads -= 1
        self._go_on_soon()

    def _send_next(self, queue: Queue, message: StoredMessage, reason: DropReason, most: float) -> float:
        """Send one dead letter. Return its share of the slice: 1, plus the number of queues that it goes to.

        If the share is larger than `most`, do not send the letter: a later call sends it.
        """
        cost: float = 1
        # A message whose body is damaged on disk has no letter. Its death is already counted.
        if not message.is_lost:
            try:
                cost += self._publish(queue, message, reason, most - 1)
            except ChannelException as error:
                _log.warning("queue '%s': a message is lost (%s): %s", queue.name, reason, error.text)
        if cost > most:
            self.died(queue, message, reason)
        elif queue.storage is not None:
            queue.storage.letter_done(message)
        return cost

    def _publish(self, queue: Queue, message: StoredMessage, reason: DropReason, most: float) -> int:
        """Publish a dead letter, unless it goes to more than `most` queues. Return the number of queues it goes to."""
        options = queue.options
        key = options.dead_letter_routing_key
        if key is None:
            key = message.target.routing_key
        target = self._resolve(options.dead_letter_exchange or "", key)
        if target is None:
            _log.warning(
                "queue '%s': a message is lost (%s): dead-letter exchange '%s' does not exist",
                queue.name,
                reason,
                options.dead_letter_exchange,
            )
            return 0
        way = queue.name, target.exchange, target.routing_key
        sent: set[tuple[str, str, str]] = set()
        if reason is not DropReason.REJECTED:
            sent = message.dead_lettered = getattr(message, "dead_lettered", sent)
            if way in sent:
                if DropReason.COPY not in queue.contents.drops:
                    _log.warning(
                        "queue '%s': sends one dead letter for all copies of a message; further copies are only "
                        "counted",
                        queue.name,
                    )
                queue.contents.count_drop(DropReason.COPY)
                return 0
            sent.add(way)
        assert message.body is not None
        deaths, headers = _deaths_and_headers(message, queue.name, reason, self._wall_clock())
        letter = DeadLetter(target, with_headers(message.header, headers), message.body, deaths)
        destinations = self._destinations(letter, target)
        if len(destinations) > most:
            sent.discard(way)
            return len(destinations)
        letter.dead_lettered = sent
        self._letters.append(letter)
        blocked = _cycle_queues(reason, deaths)
        drops = drops_each(len(destinations))
        for destination in destinations:
            # A dead letter has no publisher that could get a nack. So each destination accepts or drops it separately.
            if destination.name in blocked:
                if DropReason.CYCLE not in destination.contents.drops:
                    _log.warning(
                        "queue '%s': drops a dead letter, because its message died here before; further ones are "
                        "only counted",
                        destination.name,
                    )
                destination.contents.count_drop(DropReason.CYCLE)
            elif destination.refusal(letter.size, drops=drops) is not None:
                destination.contents.count_drop(DropReason.REFUSED)
            else:
                destination.enqueue(letter, drops=drops)
                destination.after_publish(drops)
        return len(destinations)


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
    """Return the queues in which a message has died since its last rejection. Its dead letter must not enter them.

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
    """Return the newest death. Its count includes the earlier deaths (`before`) in this queue for this reason."""
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
