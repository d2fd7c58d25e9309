"""Ctrl-C at every point of a call."""

from __future__ import annotations

import gc
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import qflow_client

_PACKAGE = str(Path(qflow_client.__file__).parent)


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

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal lines
        file = frame.f_code.co_filename
        # A tracer can come between the last line of a block and the release of the lock around it, a signal cannot.
        if (
            event == "line"
            and file.startswith(_PACKAGE)
            and (not only or file.endswith(only))
            and not linecache.getline(file, frame.f_lineno).lstrip().startswith("with ")
        ):
            lines += 1
            if lines == at:
                if again:
                    sys.setprofile(count_calls)
                raise KeyboardInterrupt
        return trace

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
