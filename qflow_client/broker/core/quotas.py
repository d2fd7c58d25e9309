"""The maximum numbers of queues, bindings and consumers.

A quota is checked when an object is created, and never when a message is published. A `Quota` adds new objects to its
count, but does not subtract deleted objects. When its count reaches the limit, it counts the existing objects.
"""

from __future__ import annotations

from collections.abc import Callable

from qflow_client.broker.core.errors import ChannelException, ReplyCode

__all__ = ["Quota"]


class Quota:
    """The maximum number of objects of one kind.

    Args:
        setting: name of the setting with the limit, for the error.
        things: name of the objects in the plural, for the error.
        count: returns the exact number of objects.
    """

    __slots__ = ("_bound", "_count", "_limit", "_setting", "_things")

    def __init__(self, setting: str, limit: int, things: str, count: Callable[[], int]) -> None:
        self._setting = setting
        self._limit = limit
        self._things = things
        self._count = count
        # Upper bound of the current number of objects.
        self._bound = 0

    def take(self, *, is_there: bool = False) -> None:
        """Count one more object before it is created.

        Args:
            is_there: whether the object comes from the message store. Then it is accepted even beyond the limit.

        Raises:
            ChannelException: 406 if the limit is reached. RabbitMQ uses the same code for queues beyond its limit.
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
