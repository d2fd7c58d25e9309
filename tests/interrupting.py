"""Simulates Ctrl-C at each point of a call at which Python may run a signal handler."""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import qflow_client
from tests.effort import EFFORT

#: Distance between two points at which a test interrupts a call, if a test of all points would take too long.
EVERY = 61 if EFFORT == "quick" else 1

_PACKAGE = str(Path(qflow_client.__file__).parent)


# CPython (3.11 to 3.13) checks for signals at `RESUME`, which is at the start of a function and after a `yield`, and at
# the jump back of a loop, and after a call of a built-in function. It does not check after an `await`.
_LOOKS = {"JUMP_BACKWARD", "RESUME"}
_IS_RESUMED = CO_ASYNC_GENERATOR | CO_COROUTINE | CO_GENERATOR


@cache
def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_PACKAGE)


@cache
def _instructions(code: CodeType) -> dict[int, str]:
    """Return the instructions with their offsets, or nothing if the code checks for signals only at its start."""
    instructions = {
        each.offset: "" if each.opname == "RESUME" and (each.arg or 0) >= 2 else each.opname
        for each in dis.get_instructions(code)
    }
    return instructions if code.co_flags & _IS_RESUMED or "JUMP_BACKWARD" in instructions.values() else {}


def press(*_: object) -> None:
    """Do the same as Python's default handler for Ctrl-C."""
    raise KeyboardInterrupt


@contextmanager
def pressed_in(owner: object, name: str) -> Iterator[None]:
    """Run a block in which Ctrl-C comes instead of each call of the function `name` of `owner`. It must come."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, press)
        with pytest.raises(KeyboardInterrupt):
            yield


def interrupted(
    call: Callable[[], Any],
    at: int,
    *,
    only: tuple[str, ...] = (),
    again: int = 0,
    handler: Callable[[], object] = press,
) -> int:
    """Call a function, and simulate Ctrl-C at one point of the package at which Python runs signal handlers.

    Args:
        call: function to call on this thread.
        at: number of the point at which Ctrl-C comes, from 1.
        only: endings of the names of the files whose points count; empty for all files of the package.
        again: number of points from the first Ctrl-C to a second one; 0 for no second Ctrl-C.
        handler: function that handles Ctrl-C.

    Returns:
        How often Ctrl-C came.
    """
    points = 0
    # For each traced frame, its instructions and the last executed instruction.
    frames: dict[FrameType, tuple[dict[int, str], str]] = {}

    def counts(code: CodeType) -> bool:
        # After the first Ctrl-C, the points of all files count, because the cleanup may be in any file.
        return _is_ours(code) and (points >= at or not only or code.co_filename.endswith(only))

    def come() -> None:
        nonlocal points
        points += 1
        if points == at or (again and points == at + again):
            if points == at + again:
                # Later points are not used, so stop tracing.
                sys.settrace(None)
                sys.setprofile(None)
            handler()

    def trace_instructions(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "opcode":
            instructions, last = frames[frame]
            frames[frame] = instructions, instructions[frame.f_lasti]
            if last in _LOOKS:
                come()
        elif event == "return" and not frame.f_code.co_flags & CO_GENERATOR:
            del frames[frame]
        return trace_instructions

    def trace(frame: FrameType, _event: str, _argument: Any) -> Any:
        if not counts(frame.f_code):
            return None
        instructions = _instructions(frame.f_code)
        if not instructions:
            come()
            return None
        # Python 3.13 reports opcodes only if `f_trace` is set first.
        frame.f_trace, frame.f_trace_opcodes, frame.f_trace_lines = trace_instructions, True, False
        # The first reported opcode comes after RESUME.
        frames.setdefault(frame, (instructions, "RESUME"))
        return trace_instructions

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "c_return" and counts(frame.f_code):
            come()

    before, profiled = sys.gettrace(), sys.getprofile()
    # Do not interrupt finalizers of objects that other calls have left.
    gc.disable()
    # Python 3.12 reports opcodes only if a frame has asked for them before `settrace`.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        assert handler is press
    finally:
        sys.setprofile(profiled)
        sys.settrace(before)
        frames.clear()
        gc.enable()
    return (points >= at) + (0 < again <= points - at)


class Interrupt:
    """Simulates Ctrl-C at one point of a call.

    Attributes:
        at: number of the point, from 1.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        # How often Ctrl-C came, for each call.
        self._counts: list[int] = []

    def __call__(
        self,
        call: Callable[[], Any],
        *,
        only: tuple[str, ...] = (),
        again: int = 0,
        handler: Callable[[], object] = press,
    ) -> int:
        """Call a function and return how often Ctrl-C came, as `interrupted` does."""
        self._counts.append(interrupted(call, self.at, only=only, again=again, handler=handler))
        return self._counts[-1]

    @property
    def came(self) -> bool:
        """Whether Ctrl-C came in one of the calls."""
        assert self._counts, "the function was not called"
        return any(self._counts)


def each_interrupt(*, least: int, every: int = 1) -> Iterator[Interrupt]:
    """Yield objects that call a function and simulate Ctrl-C at one point of it, each at a later point.

    The last one does not interrupt its call, because the call has fewer points.

    Args:
        least: number of points that the call must have at least.
        every: distance between two points.
    """
    for at in range(1, 5000, every):
        interrupt = Interrupt(at)
        yield interrupt
        if not interrupt.came:
            assert at > least
            return
    raise AssertionError("the call has too many points")
