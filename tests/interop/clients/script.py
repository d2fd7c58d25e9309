"""What the programs of all clients do, and for Python's, how.

A program has two channels. On the first it publishes to ``orders``, confirmed one by one; on the other it consumes
them, takes the test's word to go on from ``go``, and says by way of ``told`` how far it is. It

1. publishes ``FIRST`` messages, consumes them, and tells ``published``;
2. is told to go on when the broker has blocked the connection, tells ``blocked``, and goes on when that is taken back;
3. is told to go on when the broker has stopped its first channel, publishes ``SECOND`` messages more, and tells either
   ``went on`` when they are confirmed, or ``held`` when its library keeps it from publishing;
4. goes on when the broker has let that channel go, and consumes those messages too;
5. asks for something on the first channel, and prints what it has seen as one JSON document; so it does when the
   library has failed since 3, and says how.
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
#: Seconds for anything to happen.
PATIENCE = 60.0


def body(number: int) -> bytes:
    return b"%06d" % number


class Report:
    """What a program has seen.

    Args:
        package: of the client, whose version is told.
    """

    def __init__(self, package: str) -> None:
        self.version = version(package)
        self.confirmed = 0
        #: The body and message id of each message that came.
        self.received: list[tuple[str, str]] = []
        #: Whether the connection is blocked, each time the library told. None: it does not.
        self.blocked: list[bool] | None = None
        #: Whether the channel may publish, each time the library told. None: it does not.
        self.flow: list[bool] | None = None
        #: What came of a request on the channel that was stopped: "ok", or the kind of error.
        self.request = ""
        #: With which error the library failed after the stop.
        self.lost: str | None = None

    def print(self) -> None:
        json.dump(vars(self), sys.stdout)


class Client(ABC):
    """A client that blocks while it waits."""

    def __init__(self, package: str) -> None:
        self.report = Report(package)

    @abstractmethod
    def publish(self, message: bytes, message_id: str) -> None:
        """Publish on the first channel, and return when it is confirmed."""

    @abstractmethod
    def consume(self, count: int) -> None:
        """Consume so many messages, and report them."""

    @abstractmethod
    def get(self) -> bool:
        """Whether there was a message in `GO`."""

    @abstractmethod
    def tell(self, words: str) -> None:
        """Publish on the other channel."""

    @abstractmethod
    def ask(self) -> None:
        """Declare `ORDERS` passively on the first channel."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    def look(self) -> None:  # noqa: B027 - most are told
        """Report what can only be asked for."""

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
    """The broker's."""
    return sys.argv[1]
