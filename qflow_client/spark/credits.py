"""Divides a job's capacity into credits, which the job's tasks take and return (C6). This module does no I/O.

A *credit* allows a task to have a number of unsettled messages, the *units* of the credit. Each credit is a message in
a queue of the broker. To take a credit, a task receives this message and does not acknowledge it. So if the task ends,
the broker gives the credit to another task. A `Purse` contains the credits of one task.

There are two rules:

- Safety: a task never has more unsettled messages than its credits have units. So a task reduces its window before it
  returns a credit.
- Fairness: a task that gets a credit sends as many messages as all its credits have units. Then the task returns this
  credit. If the current rows do not need a credit, the task returns the credit immediately. The task that has waited
  longest gets the next credit, because a broker serves waiting consumers in this order.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from qflow_client.errors import QflowError

__all__ = ["Credit", "CreditError", "Purse", "issue", "number_of_credits"]

# Maximum number of credits. More credits divide a capacity more evenly, but each credit costs a delivery and a nack.
_MAX_CREDITS = 256

# A task that still needs its credits returns at most 1/_RETURN_DIVISOR of its credits together, but at least one.
_RETURN_DIVISOR = 4


class CreditError(QflowError):
    """A job cannot use the credits in its queue. The text contains the queue, the mistake and the remedy."""


@dataclass(frozen=True, slots=True)
class Credit:
    """One credit, as a message in the queue.

    Attributes:
        pool: name of the set of credits into which a capacity is divided.
        number: number of this credit in the set, from 0.
        credits: number of credits in the set.
        units: maximum number of unsettled messages that this credit allows.
        capacity: sum of the units of all credits in the set.
    """

    pool: str
    number: int
    credits: int
    units: int
    capacity: int

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, body: bytes) -> Credit | None:
        """Return the credit, or ``None`` if the body is not a credit."""
        try:
            return cls(**json.loads(body))
        except (TypeError, ValueError):
            return None


def number_of_credits(capacity: int) -> int:
    """Return how many credits a capacity is divided into."""
    return min(capacity, _MAX_CREDITS)


def issue(pool: str, capacity: int) -> Iterator[Credit]:
    """Divide a capacity into credits, whose units differ by at most one."""
    count = number_of_credits(capacity)
    for number in range(count):
        yield Credit(pool, number, count, capacity // count + (number < capacity % count), capacity)


@dataclass(frozen=True, slots=True)
class _Held:
    tag: int
    units: int
    # Number of messages that the task had sent when the credit came.
    since: int


class Purse:
    """The credits of one task, oldest first.

    Call `plan`, and set the producer's window to `window`. Only then count the unsettled messages, and call `release`.
    """

    __slots__ = ("_due", "_due_units", "_held", "units", "wants")

    def __init__(self) -> None:
        self._held: deque[_Held] = deque()
        # How many of the oldest credits have to be returned, and the sum of their units.
        self._due = self._due_units = 0
        #: Sum of the units of all credits of the task, including the credits that have to be returned.
        self.units = 0
        #: Whether the task needs more credits.
        self.wants = False

    def __len__(self) -> int:
        return len(self._held)

    @property
    def window(self) -> int:
        """The task's maximum number of unsettled messages. Credits that have to be returned do not count."""
        return self.units - self._due_units

    def grant(self, tag: int, units: int, sent: int) -> None:
        """Add a credit. `tag` is greater than all earlier tags. `sent` is the number of messages sent so far."""
        self._held.append(_Held(tag, units, sent))
        self.units += units

    def plan(self, sent: int, unsettled: int, left: int) -> None:
        """Decide which credits have to be returned, and whether the task needs more credits.

        Args:
            sent: number of messages that the task has sent so far.
            unsettled: number of sent messages that are not settled.
            left: number of rows that the task has received from Spark and not sent.
        """
        need = unsettled + left
        most = max(1, len(self._held) // _RETURN_DIVISOR)
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
        """Remove the credits that can be returned now, and return their delivery tags, oldest first."""
        tags: list[int] = []
        while self._due and self.units - self._held[0].units >= unsettled:
            oldest = self._held.popleft()
            self._due -= 1
            self._due_units -= oldest.units
            self.units -= oldest.units
            tags.append(oldest.tag)
        return tags
