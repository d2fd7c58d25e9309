"""Functions for forked children, which must not use the connections and files of their parent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar
from weakref import WeakSet

__all__ = ["after_fork_in_child", "before_fork", "close_in_children", "not_shared", "replace_copy", "separately"]

_T = TypeVar("_T")


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


# Sockets, or owners of sockets, whose copies forked children close.
_sockets: WeakSet[_HasDescriptor] = WeakSet()


def after_fork_in_child(function: Callable[[], object]) -> None:
    """Call a function in each child that this process forks from now on, before `os.fork` returns in the child."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def before_fork(function: Callable[[], object]) -> None:
    """Call a function before each fork of this process, on the thread that forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=function)


def replace_copy(descriptor: int) -> None:
    """Replace this process's copy of a socket by the null device, because other code will close the descriptor.

    The socket is closed before the null device is opened, because the process may have no other free descriptor.
    """
    if descriptor >= 0:
        os.close(descriptor)
        nothing = os.open(os.devnull, os.O_RDWR)
        if nothing != descriptor:
            os.dup2(nothing, descriptor, inheritable=False)
            os.close(nothing)


def close_in_children(sock: _HasDescriptor) -> None:
    """Close the copy of a socket in each child that this process forks while the socket is open.

    A connection ends for its peer only when the last copy of its socket is closed.

    Args:
        sock: a socket, or another object whose ``fileno()`` returns the descriptor of a socket, or -1 if it is closed.
    """
    _sockets.add(sock)


def _replace_copies() -> None:
    for sock in tuple(_sockets):
        replace_copy(sock.fileno())


after_fork_in_child(_replace_copies)


def separately(function: Callable[[_T], object], objects: Iterable[_T]) -> None:
    """Call a function for each object, even if a call fails. Then raise an `ExceptionGroup` of the errors."""
    errors = []
    for each in tuple(objects):
        try:
            function(each)
        except Exception as error:
            errors.append(error)
    if errors:
        raise ExceptionGroup("not all objects of the parent could be closed in the child", errors)


def not_shared(what: str, pid: int) -> str:
    """Return the text of an error: why a forked child cannot use an object of its parent, the process `pid`."""
    return (
        f"the {what} was made in process {pid}, and this is process {os.getpid()}: a child process cannot share a "
        f"connection; make a {what} in the child"
    )
