"""A job's capacity as credits that its tasks take and return, sans-I/O (C6).

A *credit* is the right to have a number of unsettled messages, its *units*. All credits of a capacity are messages in a
queue of the broker. A task takes a credit by a delivery that it does not acknowledge. So the broker gives the credit to
another task when the task dies. `Purse` has the credits of one task.

There are two rules.

- Safety: a task never has more unsettled messages than its credits have units. It reduces its window before it returns
  a credit.
- Fairness: a task returns a credit when it has sent a whole window of messages since it got the credit. It returns
  credits that the current rows do not need immediately. The task that has waited longest gets the next credit, because
  brokers deliver in this order.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from qflow_client.errors import QflowError

__all__ = ["Credit", "CreditError", "Purse", "issue", "number_of_credits"]

# Maximum number of credits of a capacity. More credits are finer, but each costs the broker two messages for each use.
_MOST = 256

# The divisor for the part of its credits that a task may return at a time while it continues.
_PART = 4


class CreditError(QflowError):
    """The credits of a job are wrong; the text contains the queue, the mistake and the remedy."""


@dataclass(frozen=True, slots=True)
class Credit:
    """One credit, as a message in the queue.

    Attributes:
        pool: set that it was issued with.
        number: its number in the set.
        credits: number of credits in the set.
        units: number of messages that it allows.
        capacity: number of messages that all credits together allow.
    """

    pool: str
    number: int
    credits: int
    units: int
    capacity: int

    def encode(self) -> bytes:
        """Return the body of its message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, body: bytes) -> Credit | None:
        """Return the credit in a message; ``None`` if it is not a credit."""
        try:
            return cls(**json.loads(body))
        except (TypeError, ValueError):
            return None


def number_of_credits(capacity: int) -> int:
    """Return the number of credits for a capacity."""
    return min(capacity, _MOST)


def issue(pool: str, capacity: int) -> Iterator[Credit]:
    """Yield the credits of a capacity: as many as possible, with sizes that differ by at most one unit.

    Args:
        pool: name of the set.
        capacity: number of messages.
    """
    count = number_of_credits(capacity)
    for number in range(count):
        yield Credit(pool, number, count, capacity // count + (number < capacity % count), capacity)


@dataclass(frozen=True, slots=True)
class _Held:
    tag: int
    units: int
    # Messages that the task had sent when the credit came.
    since: int


class Purse:
    """The credits that one task holds, the oldest first.

    Call `plan`, then set the producer's window to `window`. Only then count the unsettled messages and call `release`.
    """

    __slots__ = ("_due", "_due_units", "_held", "units", "wants")

    def __init__(self) -> None:
        self._held: deque[_Held] = deque()
        # Number of the oldest credits that have to be returned, and their units.
        self._due = self._due_units = 0
        #: Units of all credits, including those that have to be returned.
        self.units = 0
        #: Whether more credits are useful.
        self.wants = False

    def __len__(self) -> int:
        """Return the number of credits."""
        return len(self._held)

    @property
    def window(self) -> int:
        """The number of messages that may be unsettled before another one is sent."""
        return self.units - self._due_units

    def grant(self, tag: int, units: int, sent: int) -> None:
        """Add a credit.

        Args:
            tag: delivery tag to return it; greater than all earlier ones.
            units: units of the credit.
            sent: messages that the task has sent so far.
        """
        self._held.append(_Held(tag, units, sent))
        self.units += units

    def plan(self, sent: int, unsettled: int, left: int) -> None:
        """Decide which credits have to be returned, and whether more credits are useful.

        Args:
            sent: messages that the task has sent so far.
            unsettled: sent messages that are not settled.
            left: current rows that are not sent.
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
        """Remove the credits that can be returned now.

        Args:
            unsettled: messages that are not settled, counted after the producer got the `window`.

        Returns:
            The delivery tags, in the order in which the credits came.
        """
        tags: list[int] = []
        while self._due and self.units - self._held[0].units >= unsettled:
            oldest = self._held.popleft()
            self._due -= 1
            self._due_units -= oldest.units
            self.units -= oldest.units
            tags.append(oldest.tag)
        return tags
