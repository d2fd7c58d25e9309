"""Requests of a producer to its outbox's writer thread. `OutboxStore` and `Backlog` make them; `Writer` serves them."""

from __future__ import annotations

from typing import Any, NamedTuple

from qflow_client.core.reporting import Reports

__all__ = ["ReadRequest", "Requests"]


class ReadRequest(NamedTuple):
    """A part of the backlog (the messages that wait on disk) that the writer has to read."""

    #: The part begins after the message with this sequence (its number in the outbox).
    after: int
    #: The last sequence of the backlog.
    upto: int
    #: True to send the messages. False only to settle the messages that are too old (`outbox_max_age`).
    sends: bool


class Requests:
    """The requests to the writer. No lock is needed, because the producer and the writer only assign attributes."""

    __slots__ = ("_reports", "commit", "read", "writer")

    def __init__(self, reports: Reports) -> None:
        self._reports = reports
        #: The writer, which a request wakes; ``None`` until it is set.
        self.writer: Any = None
        #: Whether a commit was requested and has not begun yet.
        self.commit = False
        #: The part that the writer has to read, until the backlog has the result; ``None`` without a request.
        self.read: ReadRequest | None = None

    def request_commit(self, *, ends_wait: bool = False) -> None:
        """Request a commit of all noted changes. With `ends_wait`, also end a wait in `Writer._gather`."""
        if not self.commit or ends_wait:
            # Set `commit` after the wake-up: Ctrl-C may cause a second wake-up, but no wake-up is lost.
            self._reports.wake.append(self.writer)
            self.commit = True

    def request_read(self, request: ReadRequest) -> None:
        self.read = request
        self._reports.wake.append(self.writer)
