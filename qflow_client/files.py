"""Files with messages in them: made for their owner alone, and never written through a symbolic link.

Only what is made here gets these permissions. A file that is there keeps its own, which an administrator may have set.

All files that the library keeps come from here, and their locks and permissions are those of POSIX. On a system without
them, such as Windows, to open a file is refused, and what needs no file works.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from qflow_client.forks import after_fork_in_child

fcntl: Any
try:
    import fcntl
except ImportError:
    fcntl = None

__all__ = ["lock", "make_private", "open_private", "unlock"]

_PRIVATE = 0o600

# Held while a file is made and closed. To close a file ends all locks of this process on it (POSIX), so SQLite must not
# open it in between.
# Reentrant, because a signal handler may make another file meanwhile.
_making = threading.RLock()


def _renew_lock() -> None:
    # Another thread of the parent may have held it.
    global _making
    _making = threading.RLock()


after_fork_in_child(_renew_lock)


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file, and make it for its owner alone if there is none, whatever the umask.

    Args:
        path: of the file.
        flags: as for `os.open`; with ``O_EXCL`` the file must not be there.

    Returns:
        The descriptor.

    Raises:
        OSError: it cannot be opened, or is a symbolic link, or this system is not POSIX.
    """
    if fcntl is None:
        raise OSError(errno.ENOTSUP, "qflow_client keeps files on POSIX systems only, such as Linux and macOS")
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, _PRIVATE)
    except FileExistsError:
        if flags & os.O_EXCL:
            raise
        try:
            return os.open(path, flags)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        raise OSError(errno.ELOOP, f"{path} is a symbolic link; remove it", os.fspath(path)) from None
    # The umask may take permissions away from the owner, too. Some file systems have no permissions, and refuse this.
    with suppress(OSError):
        os.fchmod(descriptor, _PRIVATE)
    return descriptor


def make_private(path: Path) -> None:
    """Make an empty file for its owner alone, unless there is a file.

    Args:
        path: of the file; a symbolic link is followed, also to a file that is not there yet.

    Raises:
        OSError: it cannot be made.
    """
    with _making:
        try:
            os.close(open_private(os.path.realpath(path), os.O_WRONLY | os.O_EXCL))
        except FileExistsError:
            return


def lock(file: int | IO[Any]) -> None:
    """Lock an open file, until `unlock` or until all copies of its descriptor are closed.

    Raises:
        BlockingIOError: another descriptor has the lock.
        OSError: the file cannot be locked.
    """
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(file: int) -> None:
    """Take the lock from an open file, also from its copies in forked children.

    Raises:
        OSError: that failed.
    """
    fcntl.flock(file, fcntl.LOCK_UN)
