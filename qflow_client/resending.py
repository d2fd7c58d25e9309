"""What leaves on a new channel before anything new, sans-I/O: in which order, what of it marked, and what of it alone.

A broker that closes a channel over a message does not say which. Its words may name an exchange or a routing key, and
what is narrowed down by them leaves again one at a time, with nothing else in flight; so what fails then fails alone.
Everything keeps its place in the order: delivery tags are given to all of it at once, and what comes after such a
suspect is staged until the suspect has its answer.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence

from qflow_client.receipt import Receipt

__all__ = ["Resending", "is_want_of_room", "narrowed"]

_QUOTED = re.compile(r"'([^']*)'")

# What RabbitMQ calls the default exchange.
_DEFAULT_EXCHANGE = "amq.default"


def narrowed(suspects: Sequence[Receipt], text: str) -> Sequence[Receipt]:
    """Those of the suspects that the broker's words name; all of them if that tells nothing.

    Args:
        suspects: messages over one of which a channel was closed.
        text: the broker's words, names in single quotes.
    """
    named = set(_QUOTED.findall(text))
    there = [each for each in suspects if (each.exchange or _DEFAULT_EXCHANGE) in named]
    return [each for each in there if each.routing_key in named] or there or suspects


# What a broker that is out of room says besides 311 and 506, which mean that by themselves.
_NO_ROOM = re.compile(r"\b(disk|memory|space|full|resources?)\b", re.IGNORECASE)


def is_want_of_room(code: int, text: str) -> bool:
    """Whether a channel was closed because the broker has no room now, rather than over a message.

    Args:
        code: the reply code.
        text: the reply text.
    """
    return code in (311, 506) or (code == 406 and _NO_ROOM.search(text) is not None)


class Resending:
    """The messages of a producer that are unsettled and not all put on its channel yet, and what is known of them."""

    __slots__ = ("_alone", "copies", "probe", "refused", "retry_at", "staged", "suspects")

    def __init__(self) -> None:
        #: The numbers of messages that may have arrived by an earlier channel.
        self.copies: set[int] = set()
        #: The numbers of messages over one of which an earlier channel may have been closed.
        self.suspects: set[int] = set()
        #: What is not put on the channel yet, in order. It has the last delivery tags.
        self.staged: deque[Receipt] = deque()
        # The delivery tag of the last suspect that was put; 0 before the first.
        self._alone = 0
        #: By number, when the broker first refused a message.
        self.refused: dict[int, float] = {}
        #: While the broker refuses: before when no probe leaves. None while it does not.
        self.retry_at: float | None = None
        #: The refused message that has left to see whether there is room; None while none has.
        self.probe: Receipt | None = None

    def keep(self, kept: Iterable[Receipt], begun: Iterable[Receipt], suspects: Iterable[Receipt]) -> None:
        """The channel is gone.

        Args:
            kept: what is to leave again.
            begun: the part of it that may have arrived.
            suspects: the part of it over one of which the channel was closed.
        """
        numbers = {receipt._number for receipt in kept}
        self.copies = (self.copies & numbers) | {receipt._number for receipt in begun}
        self.suspects = (self.suspects & numbers) | {receipt._number for receipt in suspects}
        self.refused = {number: since for number, since in self.refused.items() if number in numbers}
        self.staged.clear()
        self.probe = None

    def begin(self, receipts: Iterable[Receipt]) -> None:
        """There is a new channel, and this is to leave on it, in order."""
        self.staged = deque(receipts)
        self._alone = 0

    def forget(self) -> None:
        """Nothing is to leave any more."""
        self.keep((), (), ())

    def may_go(self, now: float) -> bool:
        """Whether anything is to be put on the channel now, as far as refusals go."""
        if self.retry_at is None:
            return True
        probe = self.probe
        if probe is None:
            return now >= self.retry_at
        if probe.done:
            # There is room again.
            self.probe = self.retry_at = None
        return probe.done

    def insert(self, receipt: Receipt) -> None:
        """Have a refused message leave again, behind those that were admitted before it."""
        at = len(self.staged)
        while at and self.staged[at - 1]._number > receipt._number:
            at -= 1
        self.staged.insert(at, receipt)
        self.copies.add(receipt._number)
        if receipt is self.probe:
            self.probe = None

    def next(self, oldest: int, next_tag: int) -> Receipt | None:
        """The next message to put on the channel; ``None`` if none is to be put now.

        Args:
            oldest: the delivery tag of the oldest unsettled message.
            next_tag: that of the next message to be admitted.
        """
        if not self.staged or oldest <= self._alone:
            return None
        if self.staged[0]._number in self.suspects:
            tag = next_tag - len(self.staged)
            if oldest < tag:
                return None
            self._alone = tag
        return self.staged.popleft()

    def skip(self) -> None:
        """What `next` gave cannot be put on the channel, so nothing waits for its answer."""
        self._alone = 0
