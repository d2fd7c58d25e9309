"""Files that contain messages: created for their owner alone, and never written through a symbolic link.

Only files that are created here get these permissions. An existing file keeps its own, which an administrator may have
set.

All files of this package are opened here, and use the locks and permissions of POSIX. On a system without them, such as
Windows, opening a file raises an error. Everything that needs no file works there.
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

# Held while a file is created and closed. Closing a file ends all locks of this process on it (POSIX), so SQLite must
# not open it in between. Reentrant, because a signal handler may create another file meanwhile.
_making = threading.RLock()


def _renew_lock() -> None:
    # Another thread of the parent may have held it.
    global _making
    _making = threading.RLock()


after_fork_in_child(_renew_lock)


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file. If it does not exist, create it for its owner alone, whatever the umask is.

    Args:
        path: of the file.
        flags: as for `os.open`; with ``O_EXCL`` the file must not exist.

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
    # The umask may take permissions away from the owner, too. Some file systems have no permissions, and raise an
    # error.
    with suppress(OSError):
        os.fchmod(descriptor, _PRIVATE)
    return descriptor


def make_private(path: Path) -> None:
    """Create an empty file for its owner alone, if it does not exist.

    Args:
        path: the path of the file. A symbolic link is followed, also to a file that does not exist yet.

    Raises:
        OSError: it cannot be created.
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
    """Unlock an open file, also for its copies in forked children.

    Raises:
        OSError: unlocking failed.
    """
    fcntl.flock(file, fcntl.LOCK_UN)
