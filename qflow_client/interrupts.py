"""Ctrl-C, which Python raises between any two instructions of a main thread."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["to_the_end"]

# Nobody presses Ctrl-C so often; what fails that often fails for another reason.
_TIMES = 100


def to_the_end(step: Callable[[], None]) -> None:
    """Put something right by a step that can be begun anew, also if Ctrl-C comes once more meanwhile.

    Args:
        step: puts right what was interrupted, and what it has itself left half done.

    Raises:
        BaseException: what came meanwhile, once the step is at its end.
    """
    came: BaseException | None = None
    for _ in range(_TIMES):
        try:
            step()
            break
        except BaseException as error:
            came = error
    if came is not None:
        raise came
