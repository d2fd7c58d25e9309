"""Gets credentials from the application, and replaces the credentials of an open connection before they expire.

The application's function may block or hang. So it runs on a separate thread (or as a task, see `AsyncAsker`), one call
at a time. While a call hangs, each try to connect waits for the call, and fails after `connect_timeout`.

Texts of the function's exceptions are hidden (except for `SettingsError`), because they may contain a secret.
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
    """The failure of a request for credentials.

    Attributes:
        why: the reason for the failure, without the secret.
    """

    why: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the failure for an exception of the application's function."""
        words = type(error).__name__
        places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
        if isinstance(error, SettingsError):
            words += f": {error}"
        elif len(places) > 1:
            # Skip the first place in the traceback, which is in this module.
            path, line = places[1]
            words += f" ({Path(path).name}, line {line})"
        return cls(f"the callable for credentials raised {words}")


Answer = Credentials | Failure


def call(function: Callable[[], Any]) -> Any:
    """Call the application's function. Return its result, or a `Failure`."""
    try:
        return function()
    except BaseException as error:
        # Catch even `SystemExit`, which no other code would report on this thread.
        return Failure.of(error)


class Asker(BackgroundCall[Answer]):
    """Calls the application's function for credentials."""

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        super().__init__(partial(call, function), f"qflow-credentials {name}")

    def _take(self, result: Any) -> None:
        if isinstance(result, RuntimeError):
            result = Failure.of(result)
        elif not isinstance(result, (Credentials, Failure)):
            result = Failure(f"the callable for credentials returned a {type(result).__name__}; return Credentials")
        self._answer(result)


class Renewer:
    """Gets the credentials of each connection, and replaces them before they expire.

    All methods must be called on the thread or loop of the connection.

    Args:
        call_later, post, leave: as for `qflow_client.upkeep.Upkeep`.
        update: sends a secret to the broker and calls a function after the answer. Returns False if no channel is open.
        clock: returns the present time in monotonic seconds.
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
        # The function that gets the application's answer; ``None`` if no answer is expected.
        self._taker: Callable[[Answer], object] | None = None
        # New credentials whose secret the broker has not accepted yet, and when they were obtained; otherwise ``None``.
        self._given: tuple[Credentials, float] | None = None
        # The error of the last failed request since the credentials were last replaced; empty if there is none.
        self._why = ""
        # The timer for the next request, or for the time limit of the present request; ``None`` if no timer is needed.
        self._timer: Timer | None = None

    @property
    def is_asking(self) -> bool:
        """Whether an answer of the application is expected."""
        return self._taker is not None

    def log_in(self, done: Callable[[Answer], object]) -> None:
        """Request credentials for a new connection. Pass the answer to `done`, unless `end` is called first."""

        def take(answer: Answer) -> None:
            if isinstance(answer, Credentials):
                self._expiry.obtained(answer, self._clock())
            done(answer)

        self._ask(take)

    def begin(self) -> None:
        self._why = ""
        wait = self._expiry.wait(self._clock())
        if wait is not None:
            self._set_timer(wait, self._renew)

    def end(self) -> None:
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
        # If an earlier request has failed, show its error, which is more useful than the timeout of this request.
        self._set_timer(patience, lambda: self._failed(self._why or f"no answer within {patience:.3g} s"))
        self._ask(self._give)

    def _give(self, answer: Answer) -> None:
        if isinstance(answer, Failure):
            self._failed(answer.why)
        elif answer.username != self._expiry.username:
            # A connection cannot change its user.
            self._leave("the new credentials are for another user")
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
            self._leave(f"its credentials have expired, and there are no new credentials: {why}")
            return
        words = "%s: the credentials could not be replaced: %s; the next try is in %.3g s"
        log(logging.WARNING, words, self._name, why, pause)
        self._set_timer(pause, self._renew)
