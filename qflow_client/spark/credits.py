"""A job's capacity as credits that its tasks take and give back, sans-I/O (C6).

A *credit* is the right to have so many messages unsettled, its *units*. All credits of a capacity lie in a queue of the
broker, as messages: a task that takes some has them delivered and does not acknowledge them, so that the broker gives
them to others when the task dies. `Purse` is what one task holds.

Two rules are all there is. Safety: a task never has more messages unsettled than its credits have units, and what it
gives back it has taken out of its window before. Fairness: a credit goes back when the task has sent a whole window
since it came, and what the rows in hand do not need goes back at once; whoever has waited longest gets it next, which
is how brokers deliver.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from qflow_client.errors import QflowError

__all__ = ["Credit", "CreditError", "Purse", "issue", "number_of_credits"]

# Credits of a capacity, at the most. More are finer, and cost the broker two messages each time around.
_MOST = 256

# The part of its credits that a task is without at a time while it goes on.
_PART = 4


class CreditError(QflowError):
    """The credits of a job are not what they should be; the text names the queue, what is wrong, and the way out."""


@dataclass(frozen=True, slots=True)
class Credit:
    """One credit, as it lies in the queue.

    Attributes:
        pool: the set that it was issued with.
        number: which of them it is.
        credits: how many they are.
        units: the messages that it stands for.
        capacity: the messages that all of them stand for.
    """

    pool: str
    number: int
    credits: int
    units: int
    capacity: int

    def encode(self) -> bytes:
        """The body of its message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, body: bytes) -> Credit | None:
        """The credit that a message is; ``None`` if it is none."""
        try:
            return cls(**json.loads(body))
        except (TypeError, ValueError):
            return None


def number_of_credits(capacity: int) -> int:
    """How many credits a capacity has."""
    return min(capacity, _MOST)


def issue(pool: str, capacity: int) -> Iterator[Credit]:
    """The credits of a capacity: as many as there may be, and none larger by more than one unit than another.

    Args:
        pool: what they have in common.
        capacity: messages.
    """
    count = number_of_credits(capacity)
    for number in range(count):
        yield Credit(pool, number, count, capacity // count + (number < capacity % count), capacity)


@dataclass(frozen=True, slots=True)
class _Held:
    tag: int
    units: int
    # What the task had sent when it came.
    since: int


class Purse:
    """The credits that one task holds, the oldest first.

    Whoever uses it calls `plan`, makes the window of the producer what `window` is then, and only after that looks at
    what is unsettled for `release`.
    """

    __slots__ = ("_due", "_due_units", "_held", "units", "wants")

    def __init__(self) -> None:
        self._held: deque[_Held] = deque()
        # How many of the oldest are to go back, and their units.
        self._due = self._due_units = 0
        #: Messages that may be unsettled: of all credits, those that are to go back included.
        self.units = 0
        #: Whether more credits are of use.
        self.wants = False

    def __len__(self) -> int:
        """How many there are."""
        return len(self._held)

    @property
    def window(self) -> int:
        """Messages that may be unsettled before another one is sent."""
        return self.units - self._due_units

    @property
    def is_giving_back(self) -> bool:
        """Whether some are to go back, once what they stand for is settled."""
        return self._due > 0

    def grant(self, tag: int, units: int, sent: int) -> None:
        """A credit has come.

        Args:
            tag: by which it goes back; larger than all before.
            units: its messages.
            sent: messages that the task has sent, ever.
        """
        self._held.append(_Held(tag, units, sent))
        self.units += units

    def plan(self, sent: int, unsettled: int, left: int) -> None:
        """Say which credits are to go back, and whether more are of use.

        Args:
            sent: messages that the task has sent, ever.
            unsettled: those of them that are not settled.
            left: rows in hand that are not sent.
        """
        need = unsettled + left
        most = max(1, len(self._held) // _PART)
        while self._due < len(self._held):
            oldest = self._held[self._due]
            is_spare = self.window - oldest.units >= need
            had_its_turn = self._due < most and sent - oldest.since >= self.units
            if not is_spare and not had_its_turn:
                break
            self._due += 1
            self._due_units += oldest.units
        self.wants = left > 0 and self.window < need

    def release(self, unsettled: int) -> list[int]:
        """Give back what may go back now.

        Args:
            unsettled: messages that are not settled, counted after the producer was given the `window`.

        Returns:
            The tags, in the order in which the credits came.
        """
        tags: list[int] = []
        while self._due and self.units - self._held[0].units >= unsettled:
            oldest = self._held.popleft()
            self._due -= 1
            self._due_units -= oldest.units
            self.units -= oldest.units
            tags.append(oldest.tag)
        return tags
