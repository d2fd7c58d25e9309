"""E8: no error, repr or log line contains a password, whichever argument contained it."""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import pika as original
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qflow_client
import qflow_client.aio_pika
import qflow_client.kombu
import qflow_client.pika
from qflow_client import (
    AsyncProducer,
    ConnectionFailed,
    FlowLog,
    Message,
    Outbox,
    Producer,
    ProducerSettings,
    QflowError,
    SettingsError,
    connect,
    connect_async,
)
from qflow_client.broker import Broker, BrokerSettings, Policy
from qflow_client.logs import flush_logs
from qflow_client.redaction import hide_password, shown
from qflow_client.settings import check_timeout
from qflow_client.skin import kinds_of
from tests.effort import EFFORT

# What must not be seen of a password, however it is written.
SECRET = re.compile("s3cr3t|cr3t|3cr3")
HERE = "127.0.0.1:1/%2F"

URLS = {
    "plain": f"amqp://user:s3cr3t-pw@{HERE}",
    "encoded": f"amqp://user:s3cr3t%2Dpw@{HERE}",
    "slash": f"amqp://user:s3cr3t/cr3t-pw@{HERE}",
    "digits and slash": f"amqp://user:12/s3cr3t-pw@{HERE}",
    "number sign": f"amqp://user:s3cr3t#cr3t-pw@{HERE}",
    "question mark": f"amqp://user:s3cr3t?cr3t-pw@{HERE}",
    "at sign and slash": f"amqp://user:s3cr3t@cr3t/cr3t-pw@{HERE}",
    "encoded colon": f"amqp://user%3As3cr3t-pw@{HERE}",
    "semicolon": f"amqp://{HERE}?heartbeat=5;password=s3cr3t-pw",
    "encoded semicolon": f"amqp://{HERE}?heartbeat=5%3Bpassword%3Ds3cr3t-pw",
    "scheme in it": f"amqp://user:s3cr3t://cr3t-pw@{HERE}",
    "unicode": f"amqp://user:s3cr3t℀cr3t-pw@{HERE}",
    "no host": "amqp://user:s3cr3t-pw",
    "no host and slash": "amqp://user:s3cr3t-pw/",
    "not AMQP": f"http://user:s3cr3t-pw@{HERE}",
    "no scheme": f"user:s3cr3t-pw@{HERE}",
    "one slash": f"amqp:/user:s3cr3t-pw@{HERE}",
    "list in a text": f"amqp://{HERE}?heartbeat=3,amqp://user:s3cr3t-pw@{HERE}",
    "parameter": f"amqp://{HERE}?password=s3cr3t-pw",
    "twice": f"amqp://{HERE}?heartbeat=5&heartbeat=amqp://u:s3cr3t-pw@h",
    "TLS": rf"amqps://{HERE}?ssl_options={{'certfile': '/nowhere.pem', 'password': 's3cr3t-pw'}}",
    "TLS encoded": f"amqps://{HERE}?ssl_options=%7B%27certfile%27%3A+%27/no%27%2C+%27password%27%3A+%27s3cr3t%2Dpw%27%7D",
    "TLS broken": rf"amqps://{HERE}?ssl_options={{'certfile': '/nowhere.pem', 'password': 's3cr3t-pw'",
    "TLS no dict": f"amqps://{HERE}?ssl_options='s3cr3t-pw'",
    "TLS call": f"amqps://{HERE}?ssl_options=s3cr3t('pw')",
}
VALUES: dict[str, Any] = {
    **URLS,
    "list": [f"amqp://{HERE}", URLS["plain"], URLS["slash"]],
    "tuple": (URLS["plain"], {"password": "s3cr3t-pw"}),
    "bytes": URLS["plain"].encode(),
    "dict": {"url": URLS["plain"], "password": "s3cr3t-pw"},
    "path": Path(URLS["plain"]),
}


def path_of(value: Any) -> Any:
    # Without a scheme it could be a path.
    return value if isinstance(value, (str, Path)) and str(value).startswith(("amqp", "http")) else URLS["plain"]


def listed(value: Any) -> Any:
    return [value]


def text(value: Any) -> str:
    return value if isinstance(value, str) else URLS["plain"]


async def opened(producer: AsyncProducer) -> None:
    await producer.connect()


# What raises whatever the value is.
DOORS: dict[str, Callable[[Any], Any]] = {
    "Producer": Producer,
    "Producer url": lambda value: Producer(url=value),
    "Producer urls": lambda value: Producer(urls=value),  # type: ignore[call-arg]
    "Producer password": lambda value: Producer(password=value),  # type: ignore[call-arg]
    "Producer settings": lambda value: Producer(settings=value),
    "Producer on_delivery": lambda value: Producer(on_delivery=value),
    "Producer credentials": lambda value: Producer(credentials=value),
    "Producer manager": lambda value: Producer(manager=value),
    "Producer line": lambda value: Producer(line=value),
    "Producer connection": lambda value: Producer(connection=value),
    "Producer capacity": lambda value: Producer(capacity=value),
    "Producer rate": lambda value: Producer(rate=value),
    "Producer when_flowed": lambda value: Producer(when_flowed=value),
    "AsyncProducer": lambda value: opened(AsyncProducer(value)),
    "AsyncProducer urls": lambda value: AsyncProducer(urls=value),  # type: ignore[call-arg]
    "AsyncProducer settings": lambda value: AsyncProducer(settings=value),
    "AsyncProducer on_delivery": lambda value: AsyncProducer(on_delivery=value),
    "AsyncProducer manager": lambda value: AsyncProducer(manager=value),
    "AsyncProducer line": lambda value: AsyncProducer(line=value),
    "AsyncProducer connection": lambda value: AsyncProducer(connection=value),
    "ProducerSettings capacity": lambda value: ProducerSettings(capacity=value),
    "environment": lambda value: ProducerSettings.load(environ={"QFLOW_CAPACITY": text(value)}),
    "query": lambda value: ProducerSettings(url=f"amqp://h?capacity={text(value)}"),
    "connect": connect,
    "connect timeout": lambda value: connect(f"amqp://{HERE}", timeout=value),
    "connect_async": lambda value: connect_async(value),
    "connect_async parameter": lambda value: connect_async(f"amqp://{HERE}", heartbeat=value),
    "connect_async password": lambda value: connect_async(f"amqp://{HERE}", password=value),
    "wrap": qflow_client.pika.wrap,
    "drop-in pika settings": lambda value: qflow_client.pika.ConnectionParameters(capacity=value),
    "drop-in aio_pika": lambda value: qflow_client.aio_pika.connect(value),
    "drop-in aio_pika robust": lambda value: qflow_client.aio_pika.connect_robust(value, fail_fast=True),
    "drop-in aio_pika settings": lambda value: qflow_client.aio_pika.connect(f"amqp://{HERE}", capacity=value),
    "drop-in aio_pika channel": lambda value: qflow_client.aio_pika.Channel(value),
    "drop-in kombu settings": lambda value: qflow_client.kombu.Connection(capacity=value),
    "drop-in kombu confirms": lambda value: qflow_client.kombu.Connection(confirm_publish=text(value)),
    "timeout": check_timeout,
    "kinds": lambda value: kinds_of(value) if isinstance(value, str) else kinds_of([value]),
    "message": lambda value: Message(b"", priority=value),
    "message expiration": lambda value: Message(b"", expiration=value),
    "flow log": lambda value: FlowLog("flow", max_bytes=value),
    "outbox": lambda value: Outbox("orders.outbox", synchronous=value),
    "outbox path": lambda value: Outbox(path_of(value)),
    "Producer outbox": lambda value: Producer(outbox=path_of(value)),
    "flow log folder": lambda value: FlowLog(path_of(value)),
    "broker store": lambda value: Broker(port=0, store=path_of(value)).__enter__(),
    "broker port": lambda value: Broker(port=value),
    "broker users": lambda value: Broker(users=listed(value)),
    "broker profile": lambda value: Broker(profile=value),
    "broker virtual host": lambda value: Broker(virtual_host=listed(value)),
    "broker policies": lambda value: Broker(policies=[value]),
    "policy": lambda value: Policy.parse(str(value)),
}


def raised_by(door: Callable[[Any], Any], value: Any) -> BaseException | None:
    async def awaited(result: Awaitable[object]) -> None:
        await result

    try:
        result = door(value)
        if isinstance(result, Awaitable):
            asyncio.run(awaited(result))
    except (AttributeError, OSError, QflowError, SyntaxError, TypeError, ValueError) as error:
        return error
    return None


def text_of(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error))
    each: BaseException | None = error
    while each is not None:
        text += f"\n{each}\n{each!r}"
        each = each.__cause__ or each.__context__
    return text


@pytest.mark.parametrize("door", DOORS)
def test_E8_no_error_contains_a_password_that_was_passed_in_any_argument(
    door: str, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG)
    seen = {}
    # A quick run tries every third value at each door, and another third at the next.
    step = 3 if EFFORT == "quick" else 1
    for kind in list(VALUES)[list(DOORS).index(door) % step :: step]:
        caplog.clear()
        error = raised_by(DOORS[door], VALUES[kind])
        assert error is not None, kind
        assert flush_logs(20)
        # What a library does with a URL that is its own, and that it takes for another, it logs itself.
        records = [] if door.startswith("drop-in") else caplog.records
        logged = "\n".join(f"{record.getMessage()} {record.exc_text}" for record in records)
        if SECRET.search(text_of(error) + logged):
            seen[kind] = f"{error!r} {logged}"
    assert not seen


def test_E8_no_error_of_the_drop_in_for_pika_contains_a_password() -> None:
    seen = {}
    for kind, url in URLS.items():
        error = raised_by(qflow_client.pika.URLParameters, url)
        original_error = raised_by(original.URLParameters, url)
        assert (error is None) == (original_error is None)
        if error is not None and SECRET.search(text_of(error)):
            seen[kind] = error
    assert not seen


@pytest.mark.parametrize("kind", URLS)
def test_E8_no_repr_contains_a_password(kind: str) -> None:
    url = URLS[kind]
    assert not SECRET.search(hide_password(url))
    assert not SECRET.search(shown([url, (url, {"a": url}, {url})]))
    assert not SECRET.search(shown(object.__new__(type("Odd", (), {"__repr__": lambda _: url}))))
    try:
        settings = ProducerSettings(url=url, name=url)
    except SettingsError:
        return
    assert not SECRET.search(repr(settings))


@pytest.mark.parametrize("right", [True, False])
def test_E8_the_log_of_a_connection_contains_no_password(right: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with Broker(port=0, users={"ann": "s3cr3t-pw" if right else "another"}) as broker:
        broker.declare_queue("q")
        url = f"amqp://ann:s3cr3t-pw@127.0.0.1:{broker.port}/%2F"

        async def main() -> None:
            async with AsyncProducer(url, routing_key="q", confirms=True) as producer:
                await (await producer.send(b"x"))
                assert not SECRET.search(repr(producer))

        def send() -> None:
            with Producer(url, routing_key="q") as producer:
                producer.send(b"x").result(20)
                assert not SECRET.search(repr(producer))

        for failed in (raised_by(lambda _: main(), None), raised_by(lambda _: send(), None)):
            assert (failed is None) is right
            assert failed is None or not SECRET.search(text_of(failed))
    assert flush_logs(20)
    assert not SECRET.search(caplog.text)


@given(*[st.text("sXq7/:@?#&=%'\" ,[]{}", max_size=8)] * 2)
def test_E8_a_password_may_contain_any_characters(before: str, after: str) -> None:
    url = f"amqp://user:{before}s3cr3t{after}@host:5672/v?heartbeat=3"
    assert not SECRET.search(hide_password(url) + hide_password(repr(url)) + hide_password(f"at {url}"))


@pytest.mark.parametrize("broker", ["h", "h:5672", "u:***@h:5672", "u:***@[::1]:5672", "h:5672/%2F"])
def test_E8_the_text_that_follows_a_url_is_shown(broker: str) -> None:
    text = f"amqp://{broker}: ConnectionRefusedError: [Errno 111] Connection refused"
    assert hide_password(text) == text


def test_E8_passwords_in_texts_are_found_and_hidden_in_linear_time() -> None:
    for text in ("x", ":", "/", "@", "'", "://", ":/", "x:@", "a.b-", "?&=", "#"):
        assert len(hide_password(text * 300_000)) <= 2_000_000


def test_E8_the_repr_of_the_settings_of_a_broker_contains_no_password() -> None:
    settings = BrokerSettings(users={"guest": "s3cr3t-pw"}, http_token="s3cr3t-pw")
    assert not SECRET.search(f"{settings!r} {settings}")


def test_E8_the_error_for_a_parameter_unknown_to_pika_still_names_the_parameter() -> None:
    with pytest.raises(
        SettingsError, match=r"url='amqp://u:\*\*\*@h\?hearbeat=\*\*\*': Unknown URL parameter: 'hearbeat'"
    ):
        connect("amqp://u:s3cr3t-pw@h?hearbeat=5")
    with pytest.raises(SettingsError, match=r"'certfile': '/nowhere\.pem', 'password': '\*\*\*'.*cannot be all"):
        connect(URLS["TLS"])
    with pytest.raises(ValueError, match=r"^Unknown URL parameter: 'hearbeat'"):
        qflow_client.pika.URLParameters("amqp://u:s3cr3t-pw@h?hearbeat=5")
    with pytest.raises(ConnectionFailed, match=r"amqp://user:\*\*\*@127\.0\.0\.1:1/%2F"):
        Producer(URLS["plain"])


def test_E8_a_misspelt_setting_is_reported_with_the_most_similar_one() -> None:
    with pytest.raises(SettingsError, match=r"^urls=\*\*\*: there is no such setting; .*; did you mean url\?$"):
        Producer(urls="amqp://h")  # type: ignore[call-arg]
    with pytest.raises(SettingsError, match=r"^capcity=\*\*\*: there is no such setting; .*; did you mean capacity.*$"):
        Producer(capcity=5)  # type: ignore[call-arg]


def test_E8_an_error_about_a_setting_shows_an_enumeration_member_by_its_name() -> None:
    class Place(StrEnum):
        PROD = "amqp://user:s3cr3t-pw@host"

    doors: list[dict[str, Any]] = [{"on_delivery": Place.PROD}, {"password": Place.PROD}, {"password": 93847261}]
    for arguments in doors:
        with pytest.raises((TypeError, SettingsError)) as caught:
            Producer(**arguments)
        assert "s3cr3t-pw" not in str(caught.value)
        assert "93847261" not in str(caught.value)
