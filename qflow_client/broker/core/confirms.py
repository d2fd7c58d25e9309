"""Confirm mode of a channel: the messages that are not confirmed yet, and the frames that ack them.

The published messages are numbered from 1, and these numbers are the tags. A due tag can be acked. A held tag cannot be
acked yet: a queue, the disk or an operator holds its confirm, or its message waits for room.
`Confirms.flush` acks all due tags below the lowest held tag with one frame, and each other due tag with its own frame.
"""

from __future__ import annotations

from collections.abc import Callable

from qflow_client.broker.core import wire
from qflow_client.broker.core.contents import EntryObserver
from qflow_client.broker.core.entries import Completion, QueueEntry
from qflow_client.flow import FlowSource

__all__ = ["Confirms", "WithheldConfirms"]


class Confirms:
    """The published messages of one channel that are neither acked nor nacked.

    Args:
        on_due: called when a tag becomes due and no other tag is due.
        on_released: called when a tag in `owed` is no longer held. The argument is the message's number of body bytes.
    """

    __slots__ = ("_due", "_held", "_last_tag", "_number", "_on_due", "_on_released", "owed")

    def __init__(self, number: int, on_due: Callable[[], None], on_released: Callable[[int], None]) -> None:
        self._number = number
        self._on_due = on_due
        self._on_released = on_released
        self._last_tag = 0
        # The held tags (C5), each with the `Completion` that counts its holds.
        self._held: dict[int, Completion] = {}
        # Tags to be acked by the next flush.
        self._due: list[int] = []
        # Held tags of messages in the connection's backlog (see `channelflow`), each with its number of body bytes.
        self.owed: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._held) + len(self._due)

    @property
    def is_due(self) -> bool:
        return bool(self._due)

    def next_tag(self) -> int:
        self._last_tag += 1
        return self._last_tag

    def confirm(self, tag: int) -> None:
        """Make the tag of a published message due."""
        if not self._due:
            self._on_due()
        self._due.append(tag)

    def hold(self, tag: int) -> None:
        """Hold the tag of a message that waits for room, until `arm` or `drop` is called for it."""
        self._held[tag] = self.completion(tag)

    def drop(self, tag: int) -> None:
        """Remove the tag of a waiting message that the broker refuses. The caller nacks the message."""
        del self._held[tag]
        self._release(tag)

    def completion(self, tag: int) -> Completion:
        """Return an object that counts the holds of a confirm. Pass it to `arm` when all queues have the message."""
        return Completion(tag, self._complete)

    def arm(self, completion: Completion) -> bool:
        """Record that all queues have the message. Return True if a queue, the disk or an operator holds its tag."""
        self._held[completion.tag] = completion
        if completion.arm():
            self._complete(completion.tag)
            return False
        return True

    def _complete(self, tag: int) -> None:
        del self._held[tag]
        if self.owed:
            self._release(tag)
        self.confirm(tag)

    def _release(self, tag: int) -> None:
        size = self.owed.pop(tag, None)
        if size is not None:
            self._on_released(size)

    def flush(self) -> bytes:
        """Return the frames that ack the due tags. If `is_due` is false, this method must not be called."""
        due, self._due = self._due, []
        if not self._held:
            return wire.ack(self._number, max(due), len(due) > 1)
        due.sort()
        lowest_held = next(iter(self._held))
        below = len(due) if due[-1] < lowest_held else sum(1 for tag in due if tag < lowest_held)
        frames = [wire.ack(self._number, due[below - 1], below > 1)] if below else []
        frames.extend(wire.ack(self._number, tag, False) for tag in due[below:])
        return b"".join(frames)


class WithheldConfirms(EntryObserver):
    """Holds the confirms of one queue for an operator, until `release` is called."""

    __slots__ = ("_completions",)

    def __init__(self) -> None:
        self._completions: list[Completion] = []

    def entered(self, entry: QueueEntry, source: FlowSource | None, completion: Completion | None) -> None:
        if completion is not None:
            self._completions.append(completion)
            completion.holds += 1

    def release(self) -> None:
        for completion in self._completions:
            completion.release()
