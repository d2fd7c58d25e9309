"""A step changes a producer's state as a whole, although ``KeyboardInterrupt`` may end it at any point.

Any other exception that leaves a step counts as an interrupt, too.

Python runs signal handlers between two instructions of the main thread, so an asyncio loop or a drop-in may leave a
step in the middle. Nothing is undone there. The step leaves a mark, and the next step of the same producer, whichever
that is, first repairs the state (`Consequences._heal`). Two rules make that possible:

1. A step first applies a change to its target, then removes the source. Doing it twice does no harm.
2. Everything that can be counted (the used window, unwritten bytes, the tickets in line) is counted anew. What is
   added to such a count is computed before, because others may admit messages while a function is called.

A step never calls another step. It calls the plain methods behind it.

`step` costs 0.2 µs, which is too much for what comes with every few messages. Those steps set the mark themselves
(`Steps.is_unfinished`), and call `Steps.resume` if they find it set.
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
    """Knows whether the last step of a producer came to its end, and the time; shared by all that take its steps.

    Args:
        now: seconds.
    """

    __slots__ = ("follow_up", "heal", "is_unfinished", "now")

    #: Repairs what an unfinished step has left; set by `Consequences`.
    heal: Callable[[], None]
    #: Does what was to follow from it; likewise.
    follow_up: Callable[[], None]

    def __init__(self, now: float) -> None:
        #: The time of the last step that was given one. For steps without, and for repairs.
        self.now = now
        #: True while a step runs, and after one that was interrupted.
        self.is_unfinished = False

    def resume(self) -> None:
        """Bring an unfinished step to its end."""
        self.heal()
        self.follow_up()


class _HasSteps(Protocol):
    @property
    def steps(self) -> Steps: ...


_Self = TypeVar("_Self", bound=_HasSteps)


def step(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Make a step of a method: it begins in a clean state. If it has a parameter `now`, that is given by position."""
    parameters = tuple(signature(method).parameters)
    # Where `now` stands behind `self`; -1 if the method has none.
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
            # After the step: it may be the second try to withdraw a message, which must not be admitted before that.
            steps.follow_up()
        steps.is_unfinished = False
        return result

    return wraps(method)(take)  # type: ignore[return-value]  # mypy takes it for an object
