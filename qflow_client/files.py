"""Creates and locks private files, for example files that contain messages.

A new file gets permissions only for its owner. An existing file keeps its permissions, because an administrator may
have set them. `open_private` rejects symbolic links, and `make_private` follows them.

This module uses locks and permissions of POSIX. On other systems, such as Windows, the creation of a file fails.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from qflow_client.forks import after_fork_in_child
from qflow_client.locks import RLock

fcntl: Any
try:
    import fcntl
except ImportError:
    fcntl = None

__all__ = ["lock", "make_private", "open_private", "unlock"]

_PRIVATE = 0o600

# A thread has this lock while it creates and closes an empty file. On POSIX, the close removes all record locks of this
# process on the file, so SQLite must open the file later. Reentrant, because a signal handler may create a file, too.
_making = RLock()


def _renew_lock() -> None:
    # Another thread of the parent may have had the lock. No thread of the child would ever release it.
    global _making
    _making = RLock()


after_fork_in_child(_renew_lock)


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file. A missing file is created with permissions only for its owner, whatever the umask is.

    Args:
        flags: flags of `os.open`. With ``O_EXCL`` the file must not exist.

    Returns:
        The descriptor.

    Raises:
        OSError: the file cannot be opened or is a symbolic link, or this system is not POSIX.
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
    # Set the permissions of the new file again, because the umask may have removed permissions of the owner. Ignore
    # errors, because some file systems have no permissions.
    with suppress(OSError):
        os.fchmod(descriptor, _PRIVATE)
    return descriptor


def make_private(path: Path) -> None:
    """If a file is missing, create it empty, with permissions only for its owner. Follow symbolic links."""
    with _making:
        try:
            os.close(open_private(os.path.realpath(path), os.O_WRONLY | os.O_EXCL))
        except FileExistsError:
            return


def lock(file: int | IO[Any]) -> None:
    """Lock an open file, without waiting. The lock ends with `unlock`, or when all copies of the descriptor are closed.

    Raises:
        BlockingIOError: another descriptor has the lock.
        OSError: the file cannot be locked.
    """
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(file: int) -> None:
    """Unlock an open file. Copies of the descriptor in forked children lose the lock, too."""
    fcntl.flock(file, fcntl.LOCK_UN)
