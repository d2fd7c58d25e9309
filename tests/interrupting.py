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


def interrupted(call: Callable[[], Any], at: int, *, only: tuple[str, ...] = ()) -> bool:
    """Call, with Ctrl-C before the so many-th line of ours that is run on this thread.

    Args:
        call: what to call.
        at: before which line.
        only: the ends of the names of the files whose lines count; empty for all.

    Returns:
        Whether it came to that.
    """
    lines = 0

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
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    # What other calls have left behind is not to be interrupted instead.
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        gc.enable()
    return False
