"""Ctrl-C at every point of a call."""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Callable
from functools import cache
from inspect import CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import qflow_client
from tests.effort import EFFORT

#: The step from one line at which a call is interrupted to the next, where all of them together take long.
EVERY = 3 if EFFORT == "quick" else 1

_PACKAGE = str(Path(qflow_client.__file__).parent)


# Behind these instructions CPython looks whether a signal has come (3.11 to 3.13). Functions begin with `RESUME`, which
# also follows every `yield`, and with an argument of 2 or more every `await`, where it does not look.
_LOOKS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD", "RESUME"}


@cache
def _instructions(code: CodeType) -> dict[int, str]:
    return {
        each.offset: "" if each.opname == "RESUME" and (each.arg or 0) >= 2 else each.opname
        for each in dis.get_instructions(code)
    }


def interrupted(call: Callable[[], Any], at: int, *, only: tuple[str, ...] = (), again: int = 0) -> int:
    """Call, with Ctrl-C at the so many-th point of ours on this thread at which Python raises it.

    Args:
        call: what to call.
        at: at which point.
        only: the ends of the names of the files whose points count; empty for all.
        again: how many calls of ours, or of built-in functions by ours, after that it comes a second time; 0 for never.

    Returns:
        How often it came.
    """
    points = 0
    calls = 0
    # By frame, its instructions and the last one.
    frames: dict[FrameType, tuple[dict[int, str], str]] = {}

    def count_calls(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(_PACKAGE):
            calls += 1
            if calls == again:
                raise KeyboardInterrupt

    def come() -> None:
        nonlocal points
        points += 1
        if points == at:
            if again:
                sys.setprofile(count_calls)
            raise KeyboardInterrupt

    def trace_instructions(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "opcode":
            instructions, last = frames[frame]
            name = instructions[frame.f_lasti]
            frames[frame] = instructions, name
            # What a call raises is there before a signal.
            if last in _LOOKS and name != "PUSH_EXC_INFO":
                come()
        elif event == "return" and not frame.f_code.co_flags & CO_GENERATOR:
            del frames[frame]
        return trace_instructions

    def trace(frame: FrameType, _event: str, _argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE) or (only and not code.co_filename.endswith(only)):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        # The first instruction that it tells is the one behind that.
        frames.setdefault(frame, (_instructions(code), "RESUME"))
        return trace_instructions

    before, profile = sys.gettrace(), sys.getprofile()
    # What other calls have left behind is not to be interrupted instead.
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return 1 + (0 < again <= calls)
    finally:
        sys.setprofile(profile)
        sys.settrace(before)
        frames.clear()
        gc.enable()
    return 0
