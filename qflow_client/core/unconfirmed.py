"""What is on the wire of one channel and not settled.

A message has a *number* from its admission on, which gives the order. It has a *delivery tag* once its frames are
made, because a tag is nothing but a place on the wire. Receipts stand in a deque in the order of their tags, so each
tag follows from a place, and a run of confirms is a run of ``popleft``. One that is answered before older ones
keeps its place until those are answered, too.

Frames are made a batch at a time, when the socket takes more. What a stop (``Channel.Flow``) finds made and not begun
is taken back and loses its tag.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from qflow_client.amqp.frames import FRAME_OVERHEAD, LAST_DIGITS, PublishEncoder
from qflow_client.amqp.outbound import Outbound
from qflow_client.message import Message
from qflow_client.receipt import Outcome, Receipt

__all__ = ["Unconfirmed", "body_of"]

# What ends the last frame of a message.
_END = b"\xce"


def body_of(payload: bytes | Message) -> bytes:
    """The content of what the application gave."""
    return payload if type(payload) is bytes else payload.body  # type: ignore[union-attr]  # a Message


def _gone() -> Receipt:
    """What stands on the wire in place of a message that was refused, and is to leave again."""
    receipt = Receipt(b"", None, None, 0)  # type: ignore[arg-type]  # nobody asks for its route
    receipt._outcome = Outcome.NACKED
    return receipt


_GONE = _gone()


class Unconfirmed:
    """The messages on the wire, and the bytes that are made of them.

    Args:
        encoder: of the channel.
    """

    __slots__ = ("_given", "_holes", "_is_ordered", "_last", "encoder", "flight", "outbound")

    def __init__(self, encoder: PublishEncoder) -> None:
        self.encoder = encoder
        #: What is on the wire, in the order of the tags. The first is unsettled.
        self.flight: deque[Receipt] = deque()
        #: What is being written.
        self.outbound = Outbound()
        # How many delivery tags were given, and how many of those in flight are settled.
        self._given = self._holes = 0
        # The number of the last message that got one, and whether all in flight are in the order of admission.
        self._last = 0
        self._is_ordered = True

    @property
    def oldest(self) -> int:
        """The delivery tag of the oldest message on the wire; if there is none, the next one that is given."""
        return self._given - len(self.flight) + 1

    def find(self, tag: int) -> Receipt | None:
        """The unsettled message of a delivery tag; ``None`` if there is none."""
        at = tag - self.oldest
        receipt = self.flight[at] if 0 <= at < len(self.flight) else None
        return receipt if receipt is not None and receipt._outcome is None else None

    def tag_of(self, receipt: Receipt) -> int:
        """The delivery tag of a message; 0 if it is not on the wire any more, or not yet."""
        return receipt._tag if self.find(receipt._tag) is receipt else 0

    def with_number(self, number: int) -> Receipt | None:
        """The unsettled message on the wire of a number; ``None`` if there is none."""
        at = self._place(number)
        receipt = self.flight[at] if at >= 0 else None
        return receipt if receipt is not None and receipt._outcome is None else None

    def _place(self, number: int) -> int:
        """Where in flight a number stands; -1 if nowhere."""
        flight = self.flight
        if not flight:
            return -1
        # As a rule they follow one another.
        at = number - flight[0]._number
        if 0 <= at < len(flight) and flight[at]._number == number:
            return at
        return next((at for at, each in enumerate(flight) if each._number == number), -1)

    def oldest_number(self) -> int:
        """The lowest number of what is unsettled on the wire; 0 if nothing is."""
        flight = self.flight
        if not flight:
            return 0
        if self._is_ordered:
            return flight[0]._number
        return min(each._number for each in flight if each._outcome is None)

    def __iter__(self) -> Iterator[Receipt]:
        """Yield the unsettled messages on the wire, in the order of the tags."""
        return (each for each in self.flight if each._outcome is None)

    def begun(self) -> list[Receipt]:
        """The unsettled messages that have begun: at least one byte is written."""
        count = self.outbound.begun - self.oldest + 1
        return [each for at, each in enumerate(self.flight) if at < count and each._outcome is None]

    @property
    def in_flight(self) -> int:
        """How many unsettled messages have begun to be written."""
        return max(0, self.outbound.begun - self.oldest + 1 - self._holes)

    # What is answered.

    def take(self, first: int, stop: int) -> list[Receipt]:
        """The unsettled messages of the tags from `first` to before `stop`; all these tags were given.

        They are to be settled, and then `drop_settled` is to be called.
        """
        flight, oldest = self.flight, self.oldest
        if first > oldest:
            taken = [each for each in islice(flight, first - oldest, stop - oldest) if each._outcome is None]
            self._holes += len(taken)
            return taken
        take = flight.popleft
        taken = [take() for _ in range(stop - oldest)]
        if self._holes:
            count = len(taken)
            taken = [each for each in taken if each._outcome is None]
            self._holes -= count - len(taken)
        return taken

    def drop_settled(self) -> None:
        """Have the wire begin with an unsettled message."""
        flight = self.flight
        while flight and flight[0]._outcome is not None:
            flight.popleft()
            self._holes -= 1
        if not flight:
            self._is_ordered = True

    def refuse(self, tag: int) -> None:
        """Take away an unsettled message that is to leave again."""
        self.flight[tag - self.oldest] = _GONE
        self._holes += 1
        self.drop_settled()

    # What is written.

    def make(self, source: deque[Receipt], limit: int, most: int) -> None:
        """Give the first messages of the line, or of what is to leave again, their tags, and make their frames.

        Args:
            source: in which they stand.
            limit: about how many bytes.
            most: how many messages at the most; there are so many.
        """
        encoder = self.encoder
        parts: list[bytes] = []
        ends: list[int] = []
        # The same list as long as no message has several frames.
        borders = ends
        rest: list[bytes] = []
        batch: list[Receipt] = []
        size = 0
        tag = self._given
        hundreds = length = -1
        made_for = None
        head = tail = b""
        for at in range(most):
            receipt = source[at]
            batch.append(receipt)
            route = receipt._route
            if route.made_by is not encoder.mark:
                route = receipt._route = encoder.route(route.exchange, route.routing_key)
            payload: Any = receipt._payload
            number = receipt._number
            tag += 1
            receipt._tag = tag
            if receipt._prepared is None:
                if number >> 8 != hundreds or len(payload) != length or route is not made_for:
                    hundreds, length, made_for = number >> 8, len(payload), route
                    head, tail = encoder.plain(route, length, number)
                parts += (head, LAST_DIGITS[number & 255], tail, payload, _END)
                size += route.cost + length if length else route.cost - FRAME_OVERHEAD
                ends.append(size)
                if borders is not ends:
                    borders.append(size)
            else:
                frames = encoder.frames(route, body_of(payload), receipt._prepared, number)
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
            if size >= limit:
                break
        if batch[0]._number < self._last:
            self._is_ordered = False
        self._last = batch[-1]._number
        self._given = tag
        self.flight.extend(batch)
        for _ in batch:
            source.popleft()
        self.outbound.put(parts, ends, borders, rest)

    def take_back(self) -> list[Receipt]:
        """Take what has frames and has not begun off the wire, and return it in order."""
        taken = [self.flight.pop() for _ in range(self.outbound.take_back())]
        self._given -= len(taken)
        taken.reverse()
        return taken
