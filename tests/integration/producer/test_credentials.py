"""Credentials that change and expire are requested for each connect and renewed in time on an open connection (E8)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from qflow_client import (
    AsyncProducer,
    ConnectionFailed,
    Credentials,
    Outcome,
    Producer,
    SettingsError,
    SyncReceipt,
    connect,
    connect_async,
)
from qflow_client.broker import Broker
from qflow_client.credentials import Expiry
from tests.effort import EFFORT
from tests.integration.aio.tools import soon

from .test_recovery import marked
from .tools import PATIENCE, Flows, Wire, bodies, ends_within, eventually, hold, send_unconfirmed, takes

SECRET = "s3cret"
FAST: dict[str, Any] = {"reconnect_delay": 0.02, "reconnect_delay_max": 0.1}


class Tokens:
    """Issues tokens, and tells the broker for how long they are valid.

    Args:
        life: seconds for which the broker takes one.
        told: seconds that its owner is told; ``None`` for no end.
    """

    def __init__(self, life: float, told: float | None = None) -> None:
        self._life = life
        self._told = told
        self._until: dict[str, float] = {}
        # The tokens that the broker has checked.
        self.checked: list[str] = []
        self.user = "app"
        self.issued = 0
        # What it does before it answers.
        self.before: Callable[[], object] = lambda: None

    def __call__(self) -> Credentials:
        self.before()
        self.issued += 1
        token = f"{SECRET}-{self.issued}"
        self._until[token] = time.monotonic() + self._life
        return Credentials(self.user, token, self._told)

    def authenticate(self, _user: str, token: str) -> float:
        self.checked.append(token)
        return max(0.0, self._until.get(token, 0.0) - time.monotonic())


def refuse() -> None:
    raise KeyError(SECRET)


@pytest.fixture(autouse=True)
def _early(monkeypatch: pytest.MonkeyPatch) -> None:
    # Credentials with a life of 60 s are replaced every 0.06 s.
    monkeypatch.setattr("qflow_client.credentials._PART", 0.001)


@pytest.mark.timeout(900)
def test_E8_expiring_tokens_are_replaced_without_losing_a_connection(
    make_broker: Callable[..., Broker],
    make_producer: Callable[..., Producer],
    wire: Wire,
    all_logs: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    life, seconds = 60.0, 0.0
    if EFFORT == "nightly":
        life, seconds = 30.0, 600.0
        monkeypatch.setattr("qflow_client.credentials._PART", 0.8)
    tokens = Tokens(life, told=life)
    broker = make_broker(authenticate=tokens.authenticate)
    producer = make_producer(broker.url, credentials=tokens, **FAST)
    flows = Flows(producer, kinds=["disconnected"])
    end = time.monotonic() + seconds
    receipts: list[SyncReceipt] = []
    while time.monotonic() < end or wire.count("out", "Connection.UpdateSecretOk") < 20:
        assert time.monotonic() < end + PATIENCE
        receipts.append(producer.send(b"%d" % len(receipts), timeout=PATIENCE))
        # `eventually` polls, so this sends a thousand messages and not ten thousand.
        eventually(lambda: receipts[-1].done)
    assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}
    assert bodies(broker) == [b"%d" % number for number in range(len(receipts))]
    assert flows.events == []
    assert wire.count("in", "Connection.StartOk") == 1
    checked = tokens.checked[:]
    assert checked == [f"{SECRET}-{number}" for number in range(1, len(checked) + 1)]
    assert SECRET not in all_logs() + repr(producer)


def test_E8_credentials_without_an_expiry_are_requested_again_when_the_broker_closes_the_connection(
    make_broker: Callable[..., Broker], make_producer: Callable[..., Producer], all_logs: Callable[[], str]
) -> None:
    tokens = Tokens(life=0.2)
    broker = make_broker(authenticate=tokens.authenticate)
    flows = Flows()
    producer = make_producer(broker.url, credentials=tokens, connect_in_background=True, on_flow=flows, **FAST)
    before = producer.send(b"0", timeout=PATIENCE)
    sent = 1
    expired = "the credentials of user 'app' have expired"
    end = time.monotonic() + PATIENCE
    # On a busy machine a token may expire before the login. Then the broker refuses the login instead.
    while tokens.issued < 4 or expired not in str(flows.events):
        assert time.monotonic() < end
        # One message is in flight at any time.
        receipt = producer.send(b"%d" % sent, timeout=PATIENCE)
        eventually(lambda: before.done)  # noqa: B023  # at once
        before.result(PATIENCE)
        before = receipt
        sent += 1
    producer.flush(PATIENCE)
    assert list(dict.fromkeys(bodies(broker))) == [b"%d" % number for number in range(sent)]
    assert SECRET not in all_logs()


def test_E8_an_error_names_the_exception_of_the_credentials_callable_without_its_text(
    broker: Broker, make_producer: Callable[..., Producer], all_logs: Callable[[], str]
) -> None:
    with pytest.raises(ConnectionFailed) as caught:
        make_producer(broker.url, credentials=refuse)
    words = "the callable for credentials raised KeyError (test_credentials.py, line "
    assert words in str(caught.value)
    assert SECRET not in str(caught.value) + all_logs()
    assert caught.value.__cause__ is None


def test_E8_a_failing_credentials_callable_is_called_again_and_health_shows_the_reason(
    make_broker: Callable[..., Broker], make_producer: Callable[..., Producer], all_logs: Callable[[], str]
) -> None:
    tokens = Tokens(life=60)
    tokens.before = refuse
    broker = make_broker(authenticate=tokens.authenticate)
    producer = make_producer(broker.url, credentials=tokens, connect_in_background=True, **FAST)
    eventually(lambda: len(producer.health().reasons) == 2)
    health = producer.health()
    assert health.state == "disconnected"
    assert "the last attempt to connect failed: the callable for credentials raised KeyError" in health.reasons[1]
    tokens.before = lambda: None
    producer.send(b"1", timeout=PATIENCE).result(PATIENCE)
    assert producer.health().reasons == ()
    assert "the next try is in" in all_logs()
    assert SECRET not in all_logs() + str(health)


def test_E8_a_refused_password_is_not_permanent_if_the_credentials_can_be_renewed(
    make_broker: Callable[..., Broker], make_producer: Callable[..., Producer]
) -> None:
    broker = make_broker(users={"app": "right"}, max_failed_logins=0)
    passwords = iter(["wrong", "wrong", "right"])
    producer = make_producer(
        broker.url, credentials=lambda: Credentials("app", next(passwords)), connect_in_background=True, **FAST
    )
    producer.send(b"1", timeout=PATIENCE).result(PATIENCE)


def test_E8_a_credentials_callable_that_hangs_is_called_once_and_each_attempt_keeps_its_deadline(
    make_broker: Callable[..., Broker], make_producer: Callable[..., Producer]
) -> None:
    tokens = Tokens(life=60)
    go_on = threading.Event()
    tokens.before = lambda: go_on.wait(PATIENCE)
    broker = make_broker(authenticate=tokens.authenticate)
    too_late = "the callable for credentials did not return within"
    with takes(0.4), pytest.raises(ConnectionFailed, match=f"{too_late} 0.2 s"):
        make_producer([broker.url, broker.url], credentials=tokens, connect_timeout=0.2)
    go_on.set()
    eventually(lambda: not any(each.name.startswith("qflow-credentials") for each in threading.enumerate()))
    assert tokens.issued == 1
    go_on.clear()
    producer = make_producer(broker.url, credentials=tokens, connect_timeout=0.1, connect_in_background=True, **FAST)
    eventually(lambda: f"{too_late} 0.1 s" in str(producer.health().reasons))
    # It can be closed meanwhile.
    with ends_within(1.0):
        producer.close(timeout=0)
    go_on.set()


def test_E8_a_connection_with_expired_credentials_is_replaced_and_unsettled_messages_are_resent(
    make_broker: Callable[..., Broker],
    make_producer: Callable[..., Producer],
    all_logs: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = Tokens(life=60, told=60)
    broker = make_broker(authenticate=tokens.authenticate)
    producer = make_producer(broker.url, credentials=tokens, **FAST)
    flows = Flows(producer, kinds=["disconnected"])
    producer.send(b"0").result(PATIENCE)
    (receipt,) = send_unconfirmed(producer, broker, b"1")
    tokens.before = refuse
    failed = "the credentials could not be replaced: the callable for credentials raised KeyError"
    eventually(lambda: failed in all_logs())
    decide = Expiry.failed

    def fail_after_expiry(expiry: Expiry, now: float) -> float | None:
        expiry._expires_at = now
        return decide(expiry, now)

    monkeypatch.setattr(Expiry, "failed", fail_after_expiry)
    # On the thread of the callbacks.
    eventually(lambda: flows.events)
    words = (
        "its credentials have expired, and there are no new credentials: the callable for credentials raised KeyError"
    )
    assert words in str(flows.events[0].hold)
    broker.release_confirms()
    tokens.before = lambda: None
    receipt.result(PATIENCE)
    producer.send(b"2", timeout=PATIENCE).result(PATIENCE)
    assert bodies(broker) == [b"0", b"1", b"1", b"2"]
    assert marked(broker) == [False, False, True, False]
    assert SECRET not in all_logs()


@pytest.mark.parametrize("how", ["channel_flow", "connection_blocked", "a full window"])
def test_E8_a_held_producer_still_renews_its_credentials(
    make_broker: Callable[..., Broker], make_producer: Callable[..., Producer], wire: Wire, how: str
) -> None:
    tokens = Tokens(life=60, told=60)
    broker = make_broker(authenticate=tokens.authenticate)
    producer = make_producer(broker.url, credentials=tokens, capacity=1, **FAST)
    producer.send(b"0").result(PATIENCE)
    if how == "a full window":
        broker.withhold_confirms()
        producer.send(b"1")
    else:
        hold(broker, producer, how)
    wire.wait_for("out", "Connection.UpdateSecretOk", 10)
    assert wire.count("in", "Connection.StartOk") == 1


def test_E8_the_producer_opens_a_new_connection_if_the_credentials_name_another_user(
    make_broker: Callable[..., Broker], make_producer: Callable[..., Producer]
) -> None:
    tokens = Tokens(life=60, told=60)
    broker = make_broker(authenticate=tokens.authenticate)
    producer = make_producer(broker.url, credentials=tokens, **FAST)
    tokens.user = "app2"
    broker.wait_until(lambda b: [each.user for each in b.connections()] == ["app2"])
    producer.send(b"1", timeout=PATIENCE).result(PATIENCE)


def test_creating_a_producer_with_invalid_credentials_arguments_raises_an_error(broker: Broker) -> None:
    with pytest.raises(TypeError, match="credentials=5: it must be None or callable"):
        Producer(broker.url, credentials=5)  # type: ignore[arg-type]
    with connect(broker.url) as connection, pytest.raises(SettingsError, match="credentials and connection"):
        Producer(connection=connection, credentials=Tokens(1))

    async def issue() -> Credentials:
        return Credentials("app", SECRET)

    with pytest.raises(TypeError, match="only AsyncProducer accepts a coroutine"):
        Producer(broker.url, credentials=issue)  # type: ignore[arg-type]


def test_on_a_shared_connection_the_program_updates_the_secret_through_the_library(
    make_broker: Callable[..., Broker],
) -> None:
    tokens = Tokens(life=60)
    broker = make_broker(authenticate=tokens.authenticate)

    def url() -> str:
        return f"amqp://app:{tokens().password}@127.0.0.1:{broker.port}/%2F"

    async def shared() -> None:
        async with await connect_async(url()) as connection, AsyncProducer(connection=connection) as producer:
            for _ in range(5):
                await connection.update_secret(tokens().password)
                await (await producer.send(b"", routing_key="q")).result(PATIENCE)

    with connect(url()) as connection, Producer(connection=connection, routing_key="q") as producer:
        for _ in range(5):
            connection.update_secret(tokens().password, "it expires")
            producer.send(b"").result(PATIENCE)
    asyncio.run(shared())
    assert tokens.checked == [f"{SECRET}-{number}" for number in range(1, 13)]


# For asyncio only.


def test_E8_a_credentials_coroutine_function_is_awaited_in_the_event_loop(make_broker: Callable[..., Broker]) -> None:
    tokens = Tokens(life=60, told=60)
    broker = make_broker(authenticate=tokens.authenticate)

    async def main(credentials: Callable[[], Any]) -> None:
        async with AsyncProducer(broker.url, routing_key="q", credentials=credentials) as producer:
            await (await producer.send(b"1")).result(PATIENCE)
            await soon(lambda: tokens.issued >= 4)

    threads = set()

    async def issue() -> Credentials:
        await asyncio.sleep(0)
        threads.add(threading.current_thread())
        return tokens()

    asyncio.run(main(issue))
    assert threads == {threading.current_thread()}
    tokens.issued = 0
    # What only the call shows to be awaitable.
    asyncio.run(main(lambda: issue()))
    assert len(bodies(broker)) == 2


def test_E8_an_awaited_credentials_callable_is_cancelled_at_its_deadline(broker: Broker) -> None:
    ended = []

    async def hang() -> Credentials:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        raise AssertionError

    async def cancel() -> Credentials:
        raise asyncio.CancelledError

    async def main(credentials: Callable[[], Any]) -> None:
        await AsyncProducer(broker.url, credentials=credentials, connect_timeout=0.2).connect()

    with takes(0.2), pytest.raises(ConnectionFailed, match=r"credentials did not return within 0\.2 s"):
        asyncio.run(main(hang))
    assert ended == [True]
    with pytest.raises(ConnectionFailed, match="the callable for credentials raised CancelledError"):
        asyncio.run(main(cancel))
    with pytest.raises(ConnectionFailed, match="the callable for credentials raised KeyError"):
        asyncio.run(main(refuse))
