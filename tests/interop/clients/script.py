"""The steps of the programs of all clients, and their implementation for clients in Python.

A program has two channels. On the first channel it publishes messages to ``orders``, and waits for each confirm. On the
second channel it consumes these messages, waits for messages from the test in ``go``, and reports its progress to
``told``. The steps are:

1. Publish ``FIRST`` messages, consume them, and report ``published``.
2. Wait until the broker has blocked the connection, and report ``blocked``. Wait until the connection is unblocked.
3. Wait until the broker has stopped the first channel. Publish ``SECOND`` more messages. Report ``went on`` when they
   are confirmed, or ``held`` when the library does not let the program publish.
4. Wait until the broker has started the first channel, and consume these messages too.
5. Send a request on the first channel, and print a report as one JSON document. If the library has failed since step 3,
   the report contains the error.
"""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from importlib.metadata import version

FIRST = 50
SECOND = 5
ORDERS = "orders"
GO = "go"
TOLD = "told"
#: Maximum seconds of any wait.
PATIENCE = 60.0


def body(number: int) -> bytes:
    return b"%06d" % number


class Report:
    """The observations of a program.

    Args:
        package: Python package of the client. The report contains its version.
    """

    def __init__(self, package: str) -> None:
        self.version = version(package)
        self.confirmed = 0
        #: The body and the message id of each consumed message.
        self.received: list[tuple[str, str]] = []
        #: For each notification of the library, whether the connection is blocked. None if the library sends none.
        self.blocked: list[bool] | None = None
        #: For each notification of the library, whether the channel may publish. None if the library sends none.
        self.flow: list[bool] | None = None
        #: Result of a request on the channel that was stopped: "ok", or the type of the error.
        self.request = ""
        #: Error with which the library failed after the channel was stopped; None if it did not fail.
        self.lost: str | None = None

    def print(self) -> None:
        json.dump(vars(self), sys.stdout)


class Client(ABC):
    """A client whose methods block."""

    def __init__(self, package: str) -> None:
        self.report = Report(package)

    @abstractmethod
    def publish(self, message: bytes, message_id: str) -> None:
        """Publish on the first channel, and return when it is confirmed."""

    @abstractmethod
    def consume(self, count: int) -> None:
        """Consume `count` messages, and add them to the report."""

    @abstractmethod
    def get(self) -> bool:
        """Get a message from `GO`. Return False if the queue is empty."""

    @abstractmethod
    def tell(self, words: str) -> None:
        """Publish to `TOLD` on the second channel."""

    @abstractmethod
    def ask(self) -> None:
        """Declare `ORDERS` passively on the first channel."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    def look(self) -> None:  # noqa: B027 - most libraries send notifications
        """Update the report, if the library sends no notifications."""

    def run(self) -> None:
        self._publish(0, FIRST)
        self.consume(FIRST)
        self.tell("published")
        self._await_go()
        self.look()
        self.tell("blocked")
        self._await_go()
        self.look()
        self.tell("unblocked")
        try:
            self._await_go()
            self._publish(FIRST, FIRST + SECOND)
            self.tell("went on")
            self._await_go()
            self.consume(SECOND)
        except Exception as error:
            self.report.lost = f"{type(error).__name__}: {error}"
            with suppress(Exception):
                self.close()
        else:
            try:
                self.ask()
                self.report.request = "ok"
            except Exception as error:
                self.report.request = type(error).__name__
            self.close()
        self.report.print()

    def _publish(self, start: int, stop: int) -> None:
        for number in range(start, stop):
            self.publish(body(number), str(number))
            self.report.confirmed += 1

    def _await_go(self) -> None:
        end = time.monotonic() + PATIENCE
        while not self.get():
            assert time.monotonic() < end, "nobody said to go on"
            time.sleep(0.01)


def url() -> str:
    """Return the URL of the broker."""
    return sys.argv[1]
