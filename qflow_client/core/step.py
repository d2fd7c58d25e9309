"""A step changes a producer's state as a whole, although ``KeyboardInterrupt`` may end it at any point.

Any other exception that leaves a step is treated like an interrupt.

Python runs signal handlers between two instructions of the main thread, so an asyncio loop or a drop-in may leave a
step in the middle. The changes so far are not undone. The step leaves a mark, and the next step of the same producer
first repairs the state (`Consequences._heal`). Two rules make that possible:

1. A step first adds a change to its target, then removes it from the source. A repetition does no harm.
2. All counts (the used window, unwritten bytes, the tickets in line) are recalculated. A value that is added to such a
   count is computed before the addition, because other threads may admit messages during a function call.

A step never calls another step. It calls the plain methods that the other step consists of.

`step` costs 0.2 µs, which is too much for steps that are taken every few messages. Those steps set the mark themselves
(`Steps.is_unfinished`), and call `Steps.resume` if it is already set.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Concatenate, ParamSpec, Protocol, TypeVar

__all__ = ["Steps", "step"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Steps:
    """Records whether the last step of a producer was completed, and its time.

    All objects that take steps of the producer share it.

    Args:
        now: seconds.
    """

    __slots__ = ("follow_up", "heal", "is_unfinished", "now")

    #: Repairs the state after an unfinished step; set by `Consequences`.
    heal: Callable[[], None]
    #: Does what should have followed an unfinished step; set by `Consequences`.
    follow_up: Callable[[], None]

    def __init__(self, now: float) -> None:
        #: The time of the last step with a parameter `now`. Steps without this parameter, and repairs, use it.
        self.now = now
        #: True while a step runs, and after one that was interrupted.
        self.is_unfinished = False

    def resume(self) -> None:
        """Complete an unfinished step."""
        self.heal()
        self.follow_up()


class _HasSteps(Protocol):
    @property
    def steps(self) -> Steps: ...


_Self = TypeVar("_Self", bound=_HasSteps)


def step(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Make a method a step, which begins in a repaired state. A parameter `now` must be passed by position."""
    parameters = tuple(signature(method).parameters)
    # The index of `now` after `self`; -1 if the method has no such parameter.
    at = parameters.index("now") - 1 if "now" in parameters else -1

    def take(self: _Self, *arguments: _P.args, **named: _P.kwargs) -> _R:
        steps = self.steps
        if at >= 0:
            steps.now = arguments[at]  # type: ignore[assignment]  # see above
        heals = steps.is_unfinished
        if heals:
            steps.heal()
        steps.is_unfinished = True
        result = method(self, *arguments, **named)
        if heals:
            # After the step, because it may be the second try to withdraw a message, which must not be admitted before
            # that.
            steps.follow_up()
        steps.is_unfinished = False
        return result

    return wraps(method)(take)  # type: ignore[return-value]  # mypy takes it for an object
