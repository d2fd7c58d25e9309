"""Keeps a producer's state correct, although ``KeyboardInterrupt`` may end a change of the state at any point.

A *step* is a method that changes the state. Python runs signal handlers between two instructions of the main thread. So
a signal may end a step that an asyncio loop or a drop-in executes. Any other exception has the same effect. The changes
that were made before are not undone. The step leaves a mark, and the next step of the same producer first repairs the
state (`Consequences._heal`). Two rules make that possible:

1. A step adds an object to its new place before it removes it from its old place. So a move can be repeated.
2. A repair recounts the used window, the unwritten bytes and the tickets in line. If a step adds a value to such a
   count, it computes the value first, because other threads may admit messages during a function call.

A step never calls another step. It calls the plain methods that the other step consists of. The decorator `step` costs
0.2 µs for each call, which is too much for the most frequent steps. These steps set the mark themselves
(`Steps.is_unfinished`), and call `Steps.resume` if the mark is already set.
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
    """Records whether the last step of a producer was completed, and the time of that step.

    All objects that take steps of the same producer share one instance.
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
        """Repair the state after an unfinished step, and do the actions that were due after the step."""
        self.heal()
        self.follow_up()


class _HasSteps(Protocol):
    @property
    def steps(self) -> Steps: ...


_Self = TypeVar("_Self", bound=_HasSteps)


def step(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Make a method a step: repair the state before it, if necessary. A parameter `now` must be passed by position."""
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
            # Not before the method: it may repeat an interrupted withdrawal of a message, and `follow_up` could admit
            # this message.
            steps.follow_up()
        steps.is_unfinished = False
        return result

    return wraps(method)(take)  # type: ignore[return-value]  # mypy takes it for an object
