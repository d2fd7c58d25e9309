"""Ctrl-C at every point of a call."""

from __future__ import annotations

import gc
import linecache
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import qflow_client
from tests.effort import EFFORT

#: The step from one line at which a call is interrupted to the next, where all of them together take long.
EVERY = 3 if EFFORT == "quick" else 1

_PACKAGE = str(Path(qflow_client.__file__).parent)


@cache
def _can_come_before(file: str, line: int) -> bool:
    """Whether a signal can come there: a tracer also comes between the last line of a block and its lock's release."""
    return not linecache.getline(file, line).lstrip().startswith("with ")


def interrupted(call: Callable[[], Any], at: int, *, only: tuple[str, ...] = (), again: int = 0) -> int:
    """Call, with Ctrl-C before the so many-th line of ours that is run on this thread.

    Args:
        call: what to call.
        at: before which line.
        only: the ends of the names of the files whose lines count; empty for all.
        again: how many calls of ours, or of built-in functions by ours, after that it comes a second time; 0 for never.

    Returns:
        How often it came.
    """
    lines = 0
    calls = 0

    def count_calls(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        # Where a call begins is where Python looks whether a signal has come.
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(_PACKAGE):
            calls += 1
            if calls == again:
                raise KeyboardInterrupt

    def trace_lines(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal lines
        if event == "line" and _can_come_before(frame.f_code.co_filename, frame.f_lineno):
            lines += 1
            if lines == at:
                if again:
                    sys.setprofile(count_calls)
                raise KeyboardInterrupt
        return trace_lines

    def trace(frame: FrameType, _event: str, _argument: Any) -> Any:
        file = frame.f_code.co_filename
        return trace_lines if file.startswith(_PACKAGE) and (not only or file.endswith(only)) else None

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
        gc.enable()
    return 0
