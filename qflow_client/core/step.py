"""Keeps a producer's state correct, even if ``KeyboardInterrupt`` interrupts a change of the state.

A *step* is a method that changes the state. Python runs signal handlers between two instructions of the main thread. So
Ctrl-C may interrupt a step on the main thread, for example in an asyncio loop. Any other exception that ends a step
early has the same effect: the changes before it stay, and `Steps.is_unfinished` stays set. The next step of the same
producer first repairs the state (`Consequences._heal`). Two rules make the repair possible:

1. To move an object, a step first adds the object to the new place, and then removes it from the old place. So the move
   can be repeated.
2. A repair recounts messages in the window, unwritten bytes and tickets in line. A step computes a number
   completely before it adds the number to a count. Otherwise a change of the count by another thread could be lost.

A step never calls another step. Code that several steps need is in plain methods. The decorator `step` costs 0.2 µs for
each call, which is too much for the most frequent steps. These steps set `Steps.is_unfinished` themselves, and call
`Steps.resume` if it was already set.
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

    All objects with steps of the same producer share one instance.
    """

    __slots__ = ("follow_up", "heal", "is_unfinished", "now")

    # `Consequences` sets both functions. `resume` calls them.
    heal: Callable[[], None]
    follow_up: Callable[[], None]

    def __init__(self, now: float) -> None:
        #: The time of the last step with a parameter `now`. Steps without this parameter, and repairs, use this time.
        self.now = now
        #: True while a step runs, and after a step that was interrupted.
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
    """Make a method a step, which first repairs the state after an unfinished step. Callers pass `now` by position."""
    parameters = tuple(signature(method).parameters)
    # The index of `now` in the arguments after `self`; -1 if the method has no such parameter.
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
            # Call `follow_up` after the method. The method may repeat an interrupted withdrawal of a message. A call of
            # `follow_up` before the method could admit this message.
            steps.follow_up()
        steps.is_unfinished = False
        return result

    return wraps(method)(take)  # type: ignore[return-value]  # mypy takes the result for an object
