"""What forked children do with the sockets of their parent."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from qflow_client.forks import replace_copy, separately


def test_a_copy_of_a_descriptor_is_replaced_even_if_no_more_descriptors_can_be_opened(
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
        # The only copy is closed.
        assert other.recv(1) == b""


def test_an_object_that_cannot_be_closed_does_not_keep_the_others_open() -> None:
    closed: list[int] = []

    def close(number: int) -> None:
        if number == 1:
            raise ValueError(number)
        closed.append(number)

    with pytest.raises(ExceptionGroup) as caught:
        separately(close, range(3))
    assert closed == [0, 2]
    assert [str(error) for error in caught.value.exceptions] == ["1"]
