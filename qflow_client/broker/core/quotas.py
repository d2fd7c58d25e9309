"""How many queues, bindings and consumers there may be, and how many connections that are not open yet.

A quota is looked at when something is made, and never when a message is published. It keeps an upper bound of the
number of things instead of the number: nothing has to report what is deleted, and the exact number is counted again
only when the bound reaches the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from qflow_client.broker.core.errors import ChannelException, ReplyCode

__all__ = ["Quota", "Stranger", "Strangers"]


class Quota:
    """The most that there may be of one thing.

    Args:
        setting: the name of the setting that has the limit.
        limit: the most that there may be.
        things: what they are called, in the plural.
        count: counts them.
    """

    __slots__ = ("_bound", "_count", "_limit", "_setting", "_things")

    def __init__(self, setting: str, limit: int, things: str, count: Callable[[], int]) -> None:
        self._setting = setting
        self._limit = limit
        self._things = things
        self._count = count
        # There are at most so many.
        self._bound = 0

    def take(self, *, is_there: bool = False) -> None:
        """One more is about to be made.

        Args:
            is_there: whether it comes from the message store, and is taken beyond the limit, too.

        Raises:
            ChannelException: 406; there are as many as there may be. RabbitMQ refuses queues beyond its limit so.
        """
        if self._bound >= self._limit and not is_there:
            self._bound = self._count()
            if self._bound >= self._limit:
                raise ChannelException(
                    ReplyCode.PRECONDITION_FAILED,
                    f"the limit of {self._things} is reached ({self._setting}={self._limit}); "
                    "remove some, or raise that setting of the broker",
                )
        self._bound += 1


class StrangerSession(Protocol):
    """The session of a connection, as far as `Strangers` needs it."""

    #: Whether the connection was opened.
    was_opened: bool


class Stranger(Protocol):
    """A connection that may not be open yet."""

    @property
    def session(self) -> StrangerSession:
        """Its session."""


T = TypeVar("T", bound=Stranger)


class Strangers(Generic[T]):
    """The connections that are not open yet, the oldest first.

    Those that were opened meanwhile stay among them until there are too many: opening a connection costs nothing here.

    Args:
        limit: the most that there may be.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._connections: dict[T, None] = {}

    def add(self, connection: T) -> T | None:
        """A connection was accepted.

        Returns:
            The oldest connection that is not open, if there is one too many: it has to go.
        """
        connections = self._connections
        connections[connection] = None
        if len(connections) <= self._limit:
            return None
        for each in [each for each in connections if each.session.was_opened]:
            del connections[each]
        if len(connections) <= self._limit:
            return None
        oldest = next(iter(connections))
        del connections[oldest]
        return oldest

    def discard(self, connection: T) -> None:
        """A connection is gone."""
        self._connections.pop(connection, None)
