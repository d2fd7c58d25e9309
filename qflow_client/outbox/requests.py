"""Requests of a producer's state to the writer thread."""

from __future__ import annotations

from typing import Any, NamedTuple

from qflow_client.core.reporting import Reports

__all__ = ["ReadRequest", "Requests"]


class ReadRequest(NamedTuple):
    """A part of the backlog that is to be read."""

    #: Read messages after this sequence.
    after: int
    #: The last sequence of the backlog.
    upto: int
    #: True to send the messages, False to find messages that are too old.
    sends: bool


class Requests:
    """The next tasks of the writer. The state and the writer only assign attributes, so there is no lock.

    Args:
        reports: the producer's reports. The producer wakes the writer like any other waiter.
    """

    __slots__ = ("_reports", "commit", "read", "writer")

    def __init__(self, reports: Reports) -> None:
        self._reports = reports
        #: The writer, which is woken when there is a request; set when it exists.
        self.writer: Any = None
        #: Whether a commit was requested that has not begun.
        self.commit = False
        #: The requested part of the backlog; ``None`` without a request. It stays until the batch was fed to the
        #: backlog.
        self.read: ReadRequest | None = None

    def request_commit(self) -> None:
        """Request a commit."""
        if not self.commit:
            # In this order, Ctrl-C may wake the writer twice, but never prevents that it is woken.
            self._reports.wake.append(self.writer)
            self.commit = True

    def request_read(self, request: ReadRequest) -> None:
        """Request a part of the backlog."""
        self.read = request
        self._reports.wake.append(self.writer)
