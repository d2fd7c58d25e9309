"""The messages on the wire of the channel, and their encoded bytes.

A message gets its *number* when it is admitted, so the numbers are in the order of admission. A message gets its
*delivery tag* when its frames are made, because the tag is its position on the wire. Tags are assigned in ascending
order, so the dict `flight` is in the order of the tags. `flight` has only unsettled messages. A message in `flight` is
*on the wire*, even if none of its bytes is written yet.

When the socket accepts more bytes, the frames of the next batch are made. If the broker stops the channel
(``Channel.Flow``), unwritten messages are taken back and lose their tags. An *interrupt* is an exception that ends a
step early, such as ``KeyboardInterrupt`` (see `core.step`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import repeat
from typing import Any

from qflow_client.amqp.frames import LAST_DIGITS, PublishEncoder
from qflow_client.amqp.outbound import Outbound
from qflow_client.receipt import Receipt

__all__ = ["Unconfirmed"]

# A heap with fewer outdated elements than this is not worth rebuilding.
_SWEEP_FROM = 64

# With fewer messages, `_make_run` takes longer than `_make_each`.
_SHORTEST_RUN = 16

# The last byte of the last frame of a message.
_END = b"\xce"


class Unconfirmed:
    """The messages on the wire of the open channel. The next channel of the producer uses the same object."""

    __slots__ = ("_by_number", "_is_ordered", "_last", "_low", "encoder", "flight", "has_abandoned", "outbound")

    encoder: PublishEncoder

    def __init__(self) -> None:
        #: The unsettled messages on the wire, by tag, in the order of the tags.
        self.flight: dict[int, Receipt] = {}
        #: The bytes to be written.
        self.outbound = Outbound()
        #: Whether a message was settled after its first byte was written and before the broker answered it. The broker
        #: may still close the channel because of this message.
        self.has_abandoned = False
        # No message in `flight` has a lower tag than this one.
        self._low = 1
        # The number of the last message that got a tag.
        self._last = 0
        # False if `flight` may not be in the order of admission.
        self._is_ordered = True
        # A heap of numbers, tags and messages. `oldest_number` fills the heap if the messages are not in order. Some
        # messages of the heap may not be on the wire any more.
        self._by_number: list[tuple[int, int, Receipt]] = []

    def begin(self, encoder: PublishEncoder) -> None:
        """Forget all messages, and begin with delivery tag 1 and the encoder of a new channel."""
        # The assignments call no function, so an interrupt comes before or after all of them.
        flight: dict[int, Receipt] = {}
        outbound, by_number = Outbound(), list[tuple[int, int, Receipt]]()
        self.encoder, self.flight, self.outbound, self._by_number = encoder, flight, outbound, by_number
        self._low, self._last, self._is_ordered, self.has_abandoned = 1, 0, True, False

    @property
    def oldest(self) -> int:
        """The lowest delivery tag of a message on the wire; if there is none, the next tag."""
        low, given, flight = self._low, self.outbound.given, self.flight
        # `_low` keeps the result, so lower tags are not checked again.
        while low <= given and low not in flight:
            low += 1
        self._low = low
        return low

    def tag_of(self, receipt: Receipt) -> int:
        """Return the delivery tag of a message; 0 if it is not on the wire."""
        return receipt._tag if self.flight.get(receipt._tag) is receipt else 0

    def with_number(self, number: int) -> Receipt | None:
        """Return the unsettled message on the wire that has this number; ``None`` if there is none."""
        flight = self.flight
        if not flight:
            return None
        # Usually numbers and tags both increase by 1 from message to message. So compute the tag, and check it.
        oldest = self.oldest
        receipt = flight.get(oldest + number - flight[oldest]._number)
        if receipt is not None and receipt._number == number:
            return receipt
        return next((each for each in flight.values() if each._number == number), None)

    def oldest_number(self) -> int:
        """Return the lowest number of an unsettled message on the wire; 0 if there is none."""
        flight = self.flight
        if not flight:
            return 0
        if self._is_ordered:
            return flight[self.oldest]._number
        heap = self._by_number
        while heap and flight.get(heap[0][1]) is not heap[0][2]:
            heappop(heap)
        if not heap or len(heap) > 2 * len(flight) + _SWEEP_FROM:
            heap[:] = [(each._number, tag, each) for tag, each in flight.items()]
            heapify(heap)
        return heap[0][0]

    def begun(self) -> list[Receipt]:
        """Return the unsettled messages that are written, at least in part."""
        begun = self.outbound.begun
        return [receipt for tag, receipt in self.flight.items() if tag <= begun]

    @property
    def in_flight(self) -> int:
        """How many unsettled messages are written, at least in part."""
        # Subtract the messages without a written byte. All of them are in `flight`, because none can have an answer.
        return len(self.flight) - (self.outbound.given - self.outbound.begun)

    # Answers.

    def take_into(self, receipts: list[Receipt], first: int, stop: int) -> None:
        """Move the unsettled messages with the tags in ``range(first, stop)`` from `flight` into a list.

        After an interrupt, each message is in `flight` or in the list, and the list may also contain ``None``.
        """
        flight = self.flight
        before = len(flight)
        # This is one call into C, so no signal handler runs before it ends.
        receipts.extend(map(flight.pop, range(first, stop), repeat(None)))  # type: ignore[misc]  # see above
        if before - len(flight) != len(receipts):
            receipts[:] = [receipt for receipt in receipts if receipt is not None]

    # Writing.

    def make(self, source: deque[Receipt], limit: int, most: int) -> None:
        """Assign tags to the first messages of `source`, and make their frames.

        Args:
            source: messages that were never written, or messages to be sent again.
            limit: maximum bytes of a batch, because more would need a second write. A single message may exceed it.
            most: the maximum number of messages, at most the length of `source`.
        """
        if most == 1 and self.make_one(source, is_written=False):
            return
        if most < _SHORTEST_RUN or not self._make_run(source, limit, most):
            self._make_each(source, limit, most)

    def _make_run(self, source: deque[Receipt], limit: int, most: int) -> bool:
        """Do the same as `make` for similar messages, in two thirds of the time. Return False for other messages.

        Similar messages are plain (see `admission`), and have the same route and length, and consecutive numbers.
        """
        encoder, first = self.encoder, source[0]
        route = first._route
        if first._prepared is not None or route.made_by is not encoder.mark:
            return False
        length, number = first.size, first._number
        size = route.cost + length
        count = min(most, limit // size) or 1
        for each in (source[min(1, count - 1)], source[count - 1]):
            # Usually this check finds differing messages before the lists below are made.
            if each.size != length or each._route is not route:
                return False
        # Do not iterate over `source` itself, because other threads may append to it.
        batch = [source[at] for at in range(count)]
        given = self.outbound.given
        tags = list(range(given + 1, given + count + 1))
        bodies: list[bytes] = []
        for receipt, tag, next_number in zip(batch, tags, range(number, number + count), strict=True):
            if receipt._prepared is not None or receipt._route is not route or receipt._number != next_number:
                return False
            body: Any = receipt._payload
            if len(body) != length:
                return False
            bodies.append(body)
            receipt._tag = tag
        parts: list[bytes] = []
        while bodies:
            # Make the frames of the next messages, up to 256, whose numbers differ only in the last two hex digits.
            digits = LAST_DIGITS[number & 255 :][: len(bodies)]
            head, middle, tail = encoder.plain(length, number)
            frames = [route.method + head + middle, b"", tail, b"", _END] * len(digits)
            frames[1::5] = digits
            frames[3::5] = bodies[: len(digits)]
            parts += frames
            number += len(digits)
            del bodies[: len(digits)]
        ends = range(size, size * count + 1, size)
        self._put(source, batch, tags, parts, ends, ends)
        return True

    def _make_each(self, source: deque[Receipt], limit: int, most: int) -> None:
        encoder = self.encoder
        parts: list[bytes] = []
        ends: list[int] = []
        # `borders` and `ends` (see `Outbound.put`) are the same list until a message has several body frames.
        borders = ends
        rest: list[bytes] = []
        batch: list[Receipt] = []
        size = 0
        tag = given = self.outbound.given
        for at in range(most):
            receipt = source[at]
            route = receipt._route
            if route.made_by is not encoder.mark:
                route = receipt._route = encoder.route(route.exchange, route.routing_key)
            payload: Any = receipt._payload
            number = receipt._number
            if receipt._prepared is None:
                # As in `Admission.cost`.
                end = size + route.cost + len(payload)
                if end > limit and batch:
                    break
                head, middle, tail = encoder.plain(len(payload), number)
                parts += (route.method, head, middle, LAST_DIGITS[number & 255], tail, payload, _END)
                size = end
                ends.append(size)
                if borders is not ends:
                    borders.append(size)
            else:
                body = payload if type(payload) is bytes else payload.body
                if size + len(body) > limit and batch:
                    break
                frames = encoder.frames(route, body, receipt._prepared, number)
                end = size + (len(frames[0]) if len(frames) == 1 else sum(map(len, frames)))
                if end > limit and batch:
                    break
                if len(frames) > 1 and borders is ends:
                    borders = ends.copy()
                for done, frame in enumerate(frames):
                    if done and size >= limit:
                        rest = frames[done:]
                        break
                    parts.append(frame)
                    size += len(frame)
                    if borders is not ends:
                        borders.append(size)
                else:
                    ends.append(size)
            batch.append(receipt)
            tag += 1
            receipt._tag = tag
        self._put(source, batch, range(given + 1, tag + 1), parts, ends, borders, rest)

    def _put(
        self,
        source: deque[Receipt],
        batch: Sequence[Receipt],
        tags: Iterable[int],
        parts: Iterable[bytes],
        ends: Sequence[int],
        borders: Sequence[int],
        rest: Sequence[bytes] = (),
    ) -> None:
        """Move the messages of a batch from `source` to `flight`. See `Outbound.put` for the last four arguments."""
        self._note_order(batch)
        # Change `flight` first, then `outbound`, then `source`. After an interrupt, `heal` relies on this order.
        self.flight.update(zip(tags, batch, strict=True))
        self.outbound.put(parts, ends, borders, rest)
        for _ in batch:
            source.popleft()

    def make_one(self, source: deque[Receipt], *, is_written: bool) -> bytes:
        """Do the work of `make` for the first message of `source` if it is not plain, in half the time.

        Args:
            is_written: whether the caller writes the frames immediately. If so, the frames count as written, and are
                not put into `outbound`. In this case `outbound` must be empty.

        Returns:
            The frames. If the message is plain (see `admission`), has several body frames, or has a route of another
            encoder, the method changes nothing and returns no bytes.
        """
        receipt, encoder, outbound = source[0], self.encoder, self.outbound
        prepared: Any = receipt._prepared
        route = receipt._route
        if prepared is None or route.made_by is not encoder.mark:
            return b""
        payload: Any = receipt._payload
        body = payload if type(payload) is bytes else payload.body
        if len(body) > encoder.max_body:
            return b""
        frames = encoder.frames(route, body, prepared, receipt._number)
        tag = receipt._tag = outbound.given + 1
        self._note_order((receipt,))
        # Change `flight` before `outbound`, as in `_put`.
        self.flight[tag] = receipt
        if is_written:
            outbound.skip()
        else:
            ends = [len(frames[0])]
            outbound.put(frames, ends, ends)
        # `del` calls nothing, so no interrupt comes between `skip` and the end of this line.
        del source[0]
        return frames[0]

    def _note_order(self, batch: Sequence[Receipt]) -> None:
        """Update `_is_ordered`, `_by_number` and `_last` before the messages of a batch are added to `flight`."""
        if not self.flight:
            self._is_ordered = True
            self._by_number.clear()
        elif batch[0]._number < self._last:
            self._is_ordered = False
        if self._by_number:
            for each in batch:
                heappush(self._by_number, (each._number, each._tag, each))
        self._last = batch[-1]._number

    def beyond(self) -> Receipt | None:
        """Return the last message of `flight` if its frames were removed from `outbound`; otherwise ``None``."""
        flight = self.flight
        last = next(reversed(flight), 0)
        return flight[last] if last > self.outbound.given else None

    def heal(self, again: deque[Receipt], unsent: deque[Receipt]) -> None:
        """Repair the state after an unfinished step. Afterwards each message is in exactly one collection."""
        flight, given, begun = self.flight, self.outbound.given, self.outbound.begun
        for source in (again, unsent):
            # An interrupt may have come after `make` put the frames into `outbound`, and before `popleft`.
            while source and begun < source[0]._tag <= given and flight.get(source[0]._tag) is source[0]:
                source.popleft()
        # The messages that remain in `again` and `unsent` are not on the wire. If an interrupted move has left one of
        # them in `flight` too, remove it there.
        for receipt in (*again, *unsent):
            if flight.get(receipt._tag) is receipt:
                del flight[receipt._tag]
        for tag in [tag for tag, receipt in flight.items() if receipt._outcome is not None]:
            flight.pop(tag, None)
