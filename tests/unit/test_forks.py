"""The sockets of the parent in a forked child."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from qflow_client.forks import replace_copy, separately


def test_a_forked_child_replaces_its_copy_of_a_socket_even_at_the_limit_of_open_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, other = socket.socketpair()
    really_open = os.open

    def open_at_the_limit(path: str, flags: int) -> int:
        try:
            os.fstat(ours.fileno())
        except OSError:
            return really_open(path, flags)
        raise OSError(errno.EMFILE, "too many open files")

    with ours, other:
        monkeypatch.setattr(os, "open", open_at_the_limit)
        replace_copy(ours.fileno())
        assert os.fstat(ours.fileno()).st_rdev == Path(os.devnull).stat().st_rdev
        # The only copy of the socket is closed.
        assert other.recv(1) == b""


def test_an_error_while_closing_one_object_does_not_keep_the_others_open() -> None:
    closed: list[int] = []

    def close(number: int) -> None:
        if number == 1:
            raise ValueError(number)
        closed.append(number)

    with pytest.raises(ExceptionGroup) as caught:
        separately(close, range(3))
    assert closed == [0, 2]
    assert [str(error) for error in caught.value.exceptions] == ["1"]
