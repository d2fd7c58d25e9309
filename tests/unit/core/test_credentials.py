"""Credentials that expire, in simulated time: when they are replaced, and what happens if they cannot be replaced."""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest

from qflow_client import Credentials, ProducerSettings, SettingsError
from qflow_client.credentials import Expiry
from qflow_client.renewal import Answer, Asker, Failure, Renewer

SETTINGS = ProducerSettings(reconnect_delay=0.1, reconnect_delay_max=1.0, reconnect_jitter=0, connect_timeout=5.0)


def test_the_repr_of_credentials_does_not_contain_the_secret() -> None:
    assert repr(Credentials("ann", "s3cret", 30)) == "Credentials(username='ann', expires_in=30)"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1, "s3cret"), "Credentials.username: it must be a str that UTF-8 can encode"),
        (("ann", b"s3cret"), "Credentials.password: it must be a str that UTF-8 can encode"),
        (("ann", "s3cret\ud800"), "Credentials.password: it must be a str that UTF-8 can encode"),
        (("ann", "s3cret", 0), "Credentials.expires_in=0: it must be None or seconds, more than 0"),
        (("ann", "s3cret", True), "Credentials.expires_in=True: it must be"),
        (("ann", "s3cret", float("nan")), "Credentials.expires_in=nan: it must be"),
        (("ann", "s3cret", float("inf")), "Credentials.expires_in=inf: it must be"),
        (("ann", "s3cret", "30"), "Credentials.expires_in='30': it must be"),
    ],
)
def test_credentials_with_invalid_arguments_raise_an_error(arguments: Any, words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Credentials(*arguments)
    assert words in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_credentials_are_renewed_after_four_fifths_of_their_lifetime() -> None:
    expiry = Expiry(SETTINGS)
    assert expiry.wait(0.0) is None
    expiry.obtained(Credentials("ann", "", 30.0), 100.0)
    assert [expiry.wait(now) for now in (100.0, 110.0, 130.0)] == [24.0, 14.0, 0.0]
    expiry.obtained(Credentials("ann", "", None), 124.0)
    assert expiry.wait(1e9) is None


def test_credentials_with_a_short_remaining_lifetime_are_renewed_at_most_ten_times_a_second() -> None:
    expiry = Expiry(SETTINGS)
    expiry.obtained(Credentials("ann", "", 0.01), 0.0)
    assert expiry.wait(0.0) == 0.1


def test_a_failed_renewal_of_credentials_is_retried_with_growing_delays_until_they_expire() -> None:
    expiry = Expiry(SETTINGS)
    expiry.obtained(Credentials("ann", "", 30.0), 0.0)
    assert [expiry.patience(now) for now in (24.0, 27.0, 31.0)] == [5.0, 3.0, 0.0]
    assert [expiry.failed(24.0) for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert expiry.failed(29.5) == 0.5
    assert expiry.failed(30.0) is None
    expiry.obtained(Credentials("ann", "", 30.0), 40.0)
    assert expiry.failed(64.0) == 0.1


def raising() -> Credentials:
    raise KeyError("s3cret")


def exiting() -> Credentials:
    raise SystemExit("s3cret")


def expired() -> Credentials:
    return Credentials("ann", "s3cret", -1.0)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (raising, r"raised KeyError \(test_credentials.py, line \d+\)"),
        (exiting, r"raised SystemExit \(test_credentials.py, line \d+\)"),
        (expired, r"raised SettingsError: Credentials.expires_in=-1.0: .* credentials with a lower value have expired"),
        (lambda _argument: None, "raised TypeError"),
        (lambda: "s3cret", "returned a str; return Credentials"),
    ],
)
def test_an_exception_of_the_credentials_callable_is_reported_without_its_text(function: Any, words: str) -> None:
    answers: list[Answer] = []
    asker = Asker(function, "it")
    asker.ask(answers.append)
    while not answers:
        pass
    assert isinstance(answers[0], Failure)
    assert "s3cret" not in answers[0].why
    assert re.search(words, answers[0].why)


def test_a_renewal_of_credentials_whose_thread_cannot_be_started_counts_as_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(_thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", start)
    answers: list[Answer] = []
    asker = Asker(expired, "it")
    for _ in range(2):
        asker.ask(answers.append)
    assert [str(answer) for answer in answers] == [str(answers[0])] * 2
    assert "RuntimeError" in str(answers[0])


class World:
    """A producer, its broker and the issuer of tokens, in simulated time."""

    def __init__(self, life: float = 30.0, latency: float = 0.02) -> None:
        self.now = 0.0
        self.life, self.latency = life, latency
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._cancelled: set[int] = set()
        self.issued: list[str] = []
        self.user = "ann"
        # While one of these is set, no token can be obtained, or the issuer or the broker does not answer.
        self.fails = self.hangs = self.is_mute = self.has_no_channel = False
        # The end of the validity of the token that the broker has. None without a connection.
        self.valid_until: float | None = None
        self.dropped: list[float] = []
        self.left: list[tuple[float, str]] = []
        self.renewed: list[float] = []
        self.renewer = Renewer(
            self,  # type: ignore[arg-type]  # it asks as one
            SETTINGS,
            self.call_later,
            lambda function: self.call_later(0.0, function),
            self.update,
            self.leave,
            lambda: self.now,
        )

    def call_later(self, seconds: float, function: Callable[[], object]) -> Any:
        number = next(self._order)
        heapq.heappush(self._due, (self.now + seconds, number, function))

        class Timer:
            @staticmethod
            def cancel() -> None:
                self._cancelled.add(number)

        return Timer

    def run(self, until: float) -> None:
        while self._due and self._due[0][0] <= until:
            self.now, number, function = heapq.heappop(self._due)
            if self.valid_until is not None and self.now > self.valid_until:
                self.dropped.append(self.valid_until)
                self.valid_until = None
            if number not in self._cancelled:
                function()
        self.now = until

    # The issuer.

    def ask(self, done: Callable[[Answer], object]) -> None:
        def answer() -> None:
            if self.fails:
                done(Failure("no"))
            else:
                self.issued.append(f"token {len(self.issued)}")
                done(Credentials(self.user, self.issued[-1], self.life))

        if not self.hangs:
            self.call_later(self.latency, answer)

    def cancel(self) -> None:
        pass

    # The link and the broker.

    def connect(self) -> None:
        def logged_in(answer: Answer) -> None:
            if isinstance(answer, Failure):
                self.call_later(0.1, self.connect)
            else:
                self.valid_until = self.now + self.life
                self.call_later(self.latency, self.renewer.begin)

        self.renewer.log_in(logged_in)

    def update(self, secret: str, done: Callable[[], object]) -> bool:
        assert secret == self.issued[-1]
        if self.has_no_channel:
            return False

        def answer() -> None:
            if not self.is_mute:
                self.valid_until = self.now + self.life
                self.renewed.append(self.now)
                done()

        self.call_later(self.latency, answer)
        return True

    def leave(self, why: str) -> None:
        self.left.append((self.now, why))
        self.valid_until = None
        self.renewer.end()
        self.call_later(0.1, self.connect)


def test_with_tokens_that_are_valid_for_30_seconds_no_connection_is_lost_in_ten_minutes() -> None:
    world = World()
    world.connect()
    world.run(600.0)
    assert (world.dropped, world.left) == ([], [])
    assert len(world.renewed) == 24
    assert len(world.issued) == 25


def test_no_connection_is_lost_if_the_token_issuer_fails_for_less_than_a_fifth_of_a_token_lifetime() -> None:
    world = World()
    world.connect()
    world.run(20.0)
    world.fails = True
    world.run(29.0)
    world.fails = False
    world.run(600.0)
    assert (world.dropped, world.left) == ([], [])


@pytest.mark.parametrize("how", ["fails", "hangs", "is_mute", "has_no_channel"])
def test_without_new_credentials_the_client_closes_the_connection_before_the_broker_drops_it(how: str) -> None:
    world = World()
    world.connect()
    world.run(20.0)
    setattr(world, how, True)
    world.run(40.0)
    words = {"fails": "no", "has_no_channel": "no channel is open"}.get(how, "no answer within")
    ((at, why),) = world.left
    assert at == pytest.approx(30.0, abs=0.1)
    assert why.startswith(f"its credentials have expired, and there are no new credentials: {words}")
    assert world.dropped == []
    setattr(world, how, False)
    # Each try waits for the hanging call until its own timeout; the link ends the tries.
    if how == "hangs":
        world.connect()
    world.run(600.0)
    assert (world.dropped, len(world.left)) == ([], 1)
    assert world.valid_until is not None


@pytest.mark.parametrize(("ends", "renewed"), [(27.0, []), (29.0, [30.0])], ids=["of the issuer", "of the broker"])
def test_credentials_that_arrive_after_the_end_of_their_connection_are_ignored(
    ends: float, renewed: list[float]
) -> None:
    world = World(latency=2.0)
    world.connect()
    world.run(ends)
    world.renewer.end()
    world.run(600.0)
    assert world.renewed == renewed
    assert len(world.issued) == 2
    assert not world.renewer.is_asking


def test_credentials_of_a_different_user_cause_a_reconnect() -> None:
    world = World()
    world.connect()
    world.run(10.0)
    world.user = "bob"
    world.run(600.0)
    assert [why for _, why in world.left] == ["the new credentials are for another user"]
    assert world.dropped == []
