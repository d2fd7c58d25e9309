"""What the state of a producer asks of the thread that reads and commits."""

from __future__ import annotations

from typing import Any, NamedTuple

from qflow_client.core.reporting import Reports

__all__ = ["ReadRequest", "Requests"]


class ReadRequest(NamedTuple):
    """A part of the backlog that is to be read."""

    #: Read behind this sequence.
    after: int
    #: The last sequence of the backlog.
    upto: int
    #: Whether the messages are to be sent; otherwise only messages that are too old are wanted.
    sends: bool


class Requests:
    """What the writer is to do next. State and writer each only assign, so there is no lock.

    Args:
        reports: of the producer. The producer wakes the writer as it wakes any other waiter.
    """

    __slots__ = ("_reports", "commit", "read", "writer")

    def __init__(self, reports: Reports) -> None:
        self._reports = reports
        #: Is woken when there is a request; set once there is a writer.
        self.writer: Any = None
        #: Whether a commit was requested that has not begun.
        self.commit = False
        #: What is to be read; ``None`` if nothing is. It stays until the batch has been fed to the backlog.
        self.read: ReadRequest | None = None

    def request_commit(self) -> None:
        """Have what is noted written to disk soon."""
        if not self.commit:
            # In this order: Ctrl-C in between may have the writer woken twice, and never not at all.
            self._reports.wake.append(self.writer)
            self.commit = True

    def request_read(self, request: ReadRequest) -> None:
        """Have a part of the backlog read."""
        self.read = request
        self._reports.wake.append(self.writer)
