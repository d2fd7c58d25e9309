"""Asks the application for credentials, and replaces those of an open connection before they expire.

The application's callable may block or hang, so it runs on a thread of its own, and neither an I/O thread nor an event
loop waits for it. One call runs at a time: while one hangs, later tries to connect wait for its answer, each until its
own time is up.

What the callable raises is shown by its type and its place only, because its words may repeat the secret.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any, NamedTuple

from qflow_client.background import BackgroundCall, Timer
from qflow_client.credentials import Credentials, Expiry
from qflow_client.errors import SettingsError
from qflow_client.logs import log
from qflow_client.settings import ProducerSettings

__all__ = ["Answer", "Asker", "Failure", "Renewer", "call"]


class Failure(NamedTuple):
    """No credentials could be had.

    Attributes:
        why: for people; without the secret.
    """

    why: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The callable has raised."""
        words = type(error).__name__
        places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
        if isinstance(error, SettingsError):
            words += f": {error}"
        elif len(places) > 1:
            # The first is ours.
            path, line = places[1]
            words += f" ({Path(path).name}, line {line})"
        return cls(f"the callable for credentials raised {words}")


Answer = Credentials | Failure


def call(function: Callable[[], Any]) -> Any:
    """What the application's callable returns, or a `Failure`."""
    try:
        return function()
    except BaseException as error:
        # Nobody above would hear of a sys.exit.
        return Failure.of(error)


class Asker(BackgroundCall[Answer]):
    """Asks the application for credentials.

    Args:
        function: the application's callable.
        name: the producer's.
    """

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        super().__init__(partial(call, function), f"qflow-credentials {name}")

    def _take(self, result: Any) -> None:
        if isinstance(result, RuntimeError):
            result = Failure.of(result)
        elif not isinstance(result, (Credentials, Failure)):
            result = Failure(f"the callable for credentials returned a {type(result).__name__}; return Credentials")
        self._answer(result)


class Renewer:
    """Gets the credentials of each connection, and replaces them in time. It runs on the thread or loop of those.

    Args:
        asker: asks the application.
        settings: the producer's.
        call_later: calls a function there after so many seconds.
        post: calls a function there, from any thread.
        update: sends a secret to the broker, and calls a function there when the broker has answered. Returns False if
            nothing can be sent now.
        leave: ends the connection, for a reason. The producer connects again.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        asker: Asker,
        settings: ProducerSettings,
        call_later: Callable[[float, Callable[[], None]], Timer],
        post: Callable[[Callable[[], object]], object],
        update: Callable[[str, Callable[[], object]], bool],
        leave: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asker = asker
        self._name = settings.name
        self._expiry = Expiry(settings)
        self._call_later = call_later
        self._post = post
        self._update = update
        self._leave = leave
        self._clock = clock
        # What takes the answer that is waited for; None if none is.
        self._taker: Callable[[Answer], object] | None = None
        # The credentials that were sent to the broker and are not answered, and when they came; None if there are none.
        self._given: tuple[Credentials, float] | None = None
        # Why the present renewal has failed; empty if it has not.
        self._why = ""
        # The next renewal, or the end of the wait for this one; None if the connection is not open.
        self._timer: Timer | None = None

    @property
    def is_asking(self) -> bool:
        """Whether an answer is waited for."""
        return self._taker is not None

    def log_in(self, done: Callable[[Answer], object]) -> None:
        """Ask for the credentials of a connection that is to be made.

        Args:
            done: called with the answer, unless `end` is called before.
        """

        def take(answer: Answer) -> None:
            if isinstance(answer, Credentials):
                self._expiry.obtained(answer, self._clock())
            done(answer)

        self._ask(take)

    def begin(self) -> None:
        """The connection is open: from now on its credentials are replaced before they expire."""
        self._why = ""
        wait = self._expiry.wait(self._clock())
        if wait is not None:
            self._set_timer(wait, self._renew)

    def end(self) -> None:
        """The connection is not open any more, or is not wanted any more."""
        self._asker.cancel()
        self._taker = self._given = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, seconds: float, function: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._call_later(seconds, function)

    def _ask(self, take: Callable[[Answer], object]) -> None:
        self._taker = take
        self._asker.ask(lambda answer: self._post(partial(self._take, answer)))

    def _take(self, answer: Answer) -> None:
        taker, self._taker = self._taker, None
        if taker is not None:
            taker(answer)

    def _renew(self) -> None:
        patience = self._expiry.patience(self._clock())
        if not patience and self._why:
            self._failed(self._why)
            return
        # What an earlier try has failed for says more than that the time for this one was short.
        self._set_timer(patience, lambda: self._failed(self._why or f"no answer within {patience:.3g} s"))
        self._ask(self._give)

    def _give(self, answer: Answer) -> None:
        if isinstance(answer, Failure):
            self._failed(answer.why)
        elif answer.username != self._expiry.username:
            # A connection has one user from its beginning to its end.
            self._leave("the credentials are now those of another user")
        else:
            self._given = answer, self._clock()
            if not self._update(answer.password, self._updated):
                self._failed("no channel is open")

    def _updated(self) -> None:
        if self._given is not None:
            (credentials, at), self._given = self._given, None
            self._expiry.obtained(credentials, at)
            self.begin()

    def _failed(self, why: str) -> None:
        self._taker = self._given = None
        self._why = why
        pause = self._expiry.failed(self._clock())
        if pause is None:
            self._leave(f"its credentials have expired, and there are no others: {why}")
            return
        words = "%s: the credentials could not be replaced: %s; the next try is in %.3g s"
        log(logging.WARNING, words, self._name, why, pause)
        self._set_timer(pause, self._renew)
