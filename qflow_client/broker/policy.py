"""What a queue does when it is full: the one place where such a rule is plugged in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from qflow_client.broker.queue import Queue

__all__ = ["FullPolicy", "Reject", "Ring"]


class FullPolicy(Protocol):
    """A rule for messages that come to a full queue.

    `refusal` is asked of every destination queue before any of them takes the message, so that if one refuses, none
    gets it. `make_room` comes just before the enqueue.
    """

    def refusal(self, queue: Queue, size: int, count: int, largest: int) -> str | None:
        """Why `count` more messages of together `size` body bytes may not enter; ``None`` if they may.

        With what leaves at the same time counted against them; `largest` is the size of the largest that enters.
        """

    def make_room(self, queue: Queue, size: int) -> None:
        """Do what it takes to let a message of `size` body bytes in, which was not refused."""


def _beyond(queue: Queue, count: int, size: int, max_count: int, max_size: int) -> str | None:
    if max_count and queue.depth + count > max_count:
        return f"queue '{queue.name}' is full: {queue.depth} messages of at most {max_count}"
    if max_size and queue.size + size > max_size:
        return f"queue '{queue.name}' is full: {queue.size} bytes of at most {max_size}, and {size} more do not fit"
    return None


class Reject:
    """Refuse what does not fit (``qpid.policy_type=reject``).

    Args:
        max_count: messages; 0 for no maximum.
        max_size: body bytes; 0 for no maximum.
    """

    __slots__ = ("max_count", "max_size")

    def __init__(self, max_count: int, max_size: int) -> None:
        self.max_count = max_count
        self.max_size = max_size

    def refusal(self, queue: Queue, size: int, count: int, largest: int) -> str | None:
        return _beyond(queue, count, size, self.max_count, self.max_size)

    def make_room(self, queue: Queue, size: int) -> None:
        """Nothing: what comes here fits."""


class Ring:
    """Drop the oldest messages for the new one (``qpid.policy_type=ring`` and ``ring_strict``).

    Args:
        max_count: messages; 0 for no maximum.
        max_size: body bytes; 0 for no maximum.
        strict: refuse the new message if the oldest one is with a consumer.
    """

    __slots__ = ("max_count", "max_size", "strict")

    def __init__(self, max_count: int, max_size: int, *, strict: bool) -> None:
        self.max_count = max_count
        self.max_size = max_size
        self.strict = strict

    def refusal(self, queue: Queue, size: int, count: int, largest: int) -> str | None:
        if 0 < self.max_size < largest:
            return f"a message of {largest} bytes is larger than queue '{queue.name}', which holds {self.max_size}"
        if self.strict and _beyond(queue, count, size, self.max_count, self.max_size) is not None:
            # As many of the oldest as must go, and none of them may be with a consumer.
            excess_count = queue.depth + count - self.max_count if self.max_count else 0
            excess_size = queue.size + size - self.max_size if self.max_size else 0
            for entry in queue.oldest_first():
                if excess_count <= 0 and excess_size <= 0:
                    break
                if entry.is_unacked:
                    return f"queue '{queue.name}' is full, and its oldest message is with a consumer"
                excess_count -= 1
                excess_size -= entry.message.size
        return None

    def make_room(self, queue: Queue, size: int) -> None:
        while queue.depth and _beyond(queue, 1, size, self.max_count, self.max_size) is not None:
            queue.drop_oldest()
