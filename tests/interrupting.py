"""Ctrl-C at every point of a call."""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Callable
from functools import cache
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import qflow_client
from tests.effort import EFFORT

#: The step from one line at which a call is interrupted to the next, where all of them together take long.
EVERY = 61 if EFFORT == "quick" else 1

_PACKAGE = str(Path(qflow_client.__file__).parent)


# CPython (3.11 to 3.13) looks whether a signal has come where a function begins, which is at `RESUME`, and goes on
# behind a `yield`, but not behind an `await`; where a loop turns; and at the end of a call of a built-in function.
_LOOKS = {"JUMP_BACKWARD", "RESUME"}
_IS_RESUMED = CO_ASYNC_GENERATOR | CO_COROUTINE | CO_GENERATOR


@cache
def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_PACKAGE)


@cache
def _instructions(code: CodeType) -> dict[int, str]:
    """Return the instructions by offset; none if the code looks only where it begins, so that they need no tracing."""
    instructions = {
        each.offset: "" if each.opname == "RESUME" and (each.arg or 0) >= 2 else each.opname
        for each in dis.get_instructions(code)
    }
    return instructions if code.co_flags & _IS_RESUMED or "JUMP_BACKWARD" in instructions.values() else {}


def press() -> None:
    """What a signal handler does that nobody has set."""
    raise KeyboardInterrupt


def interrupted(
    call: Callable[[], Any],
    at: int,
    *,
    only: tuple[str, ...] = (),
    again: int = 0,
    handler: Callable[[], object] = press,
) -> int:
    """Call, with Ctrl-C at the so many-th point of ours on this thread at which Python runs signal handlers.

    Args:
        call: what to call.
        at: at which point.
        only: the ends of the names of the files whose points count; empty for all.
        again: how many points of ours after that it comes a second time; 0 for never.
        handler: what handles it.

    Returns:
        How often it came.
    """
    points = 0
    # By frame, its instructions and the last one.
    frames: dict[FrameType, tuple[dict[int, str], str]] = {}

    def counts(code: CodeType) -> bool:
        # What puts right what the first has left is to be interrupted wherever it is.
        return _is_ours(code) and (points >= at or not only or code.co_filename.endswith(only))

    def come() -> None:
        nonlocal points
        points += 1
        if points == at or (again and points == at + again):
            if points == at + again:
                # Nothing depends on later points.
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
        # The first opcode that is reported comes after RESUME.
        frames.setdefault(frame, (instructions, "RESUME"))
        return trace_instructions

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "c_return" and counts(frame.f_code):
            come()

    before, profiled = sys.gettrace(), sys.getprofile()
    # What other calls have left behind is not to be interrupted instead.
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
