from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from qflow_client import (
    ConnectionFailed,
    FlowManager,
    Outcome,
    Producer,
    ProducerClosed,
    ProducerSettings,
    SettingsError,
    WhenFlowed,
)
from qflow_client.broker import Broker
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.flow import WeightedLine
from qflow_client.logs import flush_logs
from qflow_client.sync.link import parameters

from .tools import Wire, bodies, ends_within, start, takes


@pytest.fixture
def refused() -> Iterator[int]:
    """A port at which nobody listens, and nobody else can."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def silent() -> Iterator[int]:
    """A port at which connections are accepted and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def babbling() -> Iterator[int]:
    """A port at which a server speaks something else."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            try:
                while True:
                    client, _ = listener.accept()
                    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
                    client.close()
            except OSError:
                pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def test_connecting_to_a_port_without_a_listener_raises_an_error(refused: int) -> None:
    with takes(0.0), pytest.raises(ConnectionFailed) as caught:
        Producer(f"amqp://guest:secret@127.0.0.1:{refused}/%2F", connect_timeout=10)
    assert isinstance(caught.value, ConnectionError)
    assert str(refused) in str(caught.value)
    assert "refused" in str(caught.value).lower()
    assert "secret" not in str(caught.value)


def test_connecting_to_a_host_name_without_an_address_raises_an_error() -> None:
    with pytest.raises(ConnectionFailed, match=r"nowhere\.invalid"):
        Producer("amqp://guest:secret@nowhere.invalid/%2F", connect_timeout=5)


def test_connecting_with_a_wrong_password_raises_an_error(
    make_broker: Callable[..., Broker], caplog: pytest.LogCaptureFixture
) -> None:
    broker = make_broker(users={"ann": "right"})
    url = f"amqp://ann:sesame@127.0.0.1:{broker.port}/%2F"
    with takes(0.0), pytest.raises(ConnectionFailed) as caught:
        Producer(url)
    text = str(caught.value)
    assert "ACCESS_REFUSED" in text
    assert "ann" in text
    assert "sesame" not in text
    assert flush_logs(20)
    assert "sesame" not in caplog.text
    broker.wait_until(lambda b: not b.connections())


def test_connecting_to_a_virtual_host_that_does_not_exist_raises_an_error(
    broker: Broker, make_producer: Callable[..., Producer]
) -> None:
    url = f"amqp://guest:guest@127.0.0.1:{broker.port}/nosuch"
    with takes(0.0), pytest.raises(ConnectionFailed, match=r"530.*NOT_ALLOWED - vhost 'nosuch' does not exist"):
        make_producer(url)
    with pytest.raises(ProducerClosed, match=r"530.*NOT_ALLOWED - vhost 'nosuch' does not exist"):
        make_producer(url, connect_in_background=True).send(b"")
    broker.wait_until(lambda b: not b.connections())


@pytest.mark.parametrize("scheme", ["amqp", "amqps"])
def test_connecting_to_a_server_that_accepts_and_never_answers_raises_an_error(silent: int, scheme: str) -> None:
    with ends_within(5), pytest.raises(ConnectionFailed) as caught:
        Producer(f"{scheme}://guest:guest@127.0.0.1:{silent}/%2F", connect_timeout=0.5)
    assert str(silent) in str(caught.value)


def test_connecting_to_a_server_with_another_protocol_raises_an_error(babbling: int) -> None:
    with ends_within(6), pytest.raises(ConnectionFailed):
        Producer(f"amqp://guest:guest@127.0.0.1:{babbling}/%2F", connect_timeout=5)


def test_connecting_to_a_broker_that_disconnects_during_the_handshake_raises_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"amqp://guest:guest@127.0.0.1:{listener.getsockname()[1]}/%2F"
        job = start(Producer, url, connect_timeout=10)
        client, _ = listener.accept()
        assert client.recv(8) == b"AMQP\0\0\x09\x01"
        client.close()
        assert isinstance(job.wait(), ConnectionFailed)


def test_a_new_producer_tries_several_hosts_one_after_the_other(
    broker: Broker, refused: int, silent: int, make_producer: Callable[..., Producer]
) -> None:
    urls = [f"amqp://guest:guest@127.0.0.1:{port}/%2F" for port in (refused, silent)]
    make_producer([urls[0], broker.url]).send(b"").result(timeout=20)
    # On a slow machine, the connection to the broker also takes too long, and all hosts are tried again.
    settings = {"connect_timeout": 0.5, "connect_in_background": True, "reconnect_delay": 0.02}
    producer = make_producer([*urls, broker.url], **settings)
    assert producer.send(b"there", timeout=20).result(timeout=20) is Outcome.CONFIRMED


@pytest.fixture
def deaf() -> Iterator[int]:
    """A port at which nothing answers, not even the kernel: the queue of connections that wait is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        while True:
            client = stack.enter_context(socket.socket())
            client.settimeout(0.2)
            try:
                client.connect(listener.getsockname())
            except TimeoutError:
                break
        yield listener.getsockname()[1]


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the name ``several.test`` stand for these ports."""
    resolve = socket.getaddrinfo

    def stand_for(*ports: int) -> None:
        def getaddrinfo(host: str, port: int, *arguments: Any, **keywords: Any) -> Any:
            if host != "several.test":
                return resolve(host, port, *arguments, **keywords)
            kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
            return [(*kind, ("127.0.0.1", port)) for port in ports]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    return stand_for


SEVERAL = "amqp://guest:guest@several.test/%2F"


def test_E15_all_addresses_of_a_host_name_are_tried_even_if_the_first_does_not_answer(
    broker: Broker, refused: int, name: Callable[..., None], make_producer: Callable[..., Producer]
) -> None:
    name(refused, refused, broker.port)
    make_producer(SEVERAL).send(b"").result(timeout=20)


def test_E15_an_address_that_does_not_answer_uses_only_a_share_of_connect_timeout(
    broker: Broker, deaf: int, name: Callable[..., None], make_producer: Callable[..., Producer]
) -> None:
    name(deaf, broker.port)
    # On a slow machine, the connection to the broker also takes too long, and both addresses are tried again.
    settings = {"connect_timeout": 2.0, "connect_in_background": True, "reconnect_delay": 0.02}
    with takes(0.9):
        producer = make_producer(SEVERAL, **settings)
        assert producer.wait_unflowed(timeout=20)
    producer.send(b"").result(timeout=20)


def test_E15_an_address_that_accepts_and_sends_nothing_costs_one_connection_attempt(
    broker: Broker, silent: int, name: Callable[..., None], make_producer: Callable[..., Producer]
) -> None:
    name(silent, broker.port)
    producer = make_producer(SEVERAL, connect_timeout=0.5, connect_in_background=True, reconnect_delay=0.02)
    producer.send(b"", timeout=20).result(timeout=20)


def test_E15_an_address_of_a_family_that_the_system_does_not_support_is_skipped(
    broker: Broker, make_producer: Callable[..., Producer], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve, unknown = socket.getaddrinfo, 255
    with pytest.raises(OSError, match="not supported"):
        socket.socket(unknown, socket.SOCK_STREAM)
    found = [(unknown, socket.SOCK_STREAM, 0, "", ("::1", broker.port, 0, 0)), *resolve("127.0.0.1", broker.port)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **_keywords: found)
    make_producer(SEVERAL).send(b"").result(timeout=20)


def test_if_no_address_of_a_host_name_can_be_reached_the_error_shows_the_name(
    deaf: int, refused: int, name: Callable[..., None], make_producer: Callable[..., Producer]
) -> None:
    name(deaf, refused)
    with pytest.raises(ConnectionFailed, match=r"several\.test"):
        make_producer(SEVERAL, connect_timeout=0.5)


def test_if_no_host_can_be_reached_the_error_shows_each_host(refused: int, silent: int) -> None:
    urls = [f"amqp://guest:secret@127.0.0.1:{port}/%2F" for port in (refused, silent)]
    with pytest.raises(ConnectionFailed) as caught:
        Producer(urls, connect_timeout=0.3)
    for port in (refused, silent):
        assert str(port) in str(caught.value)
    assert "secret" not in str(caught.value)


def test_the_first_host_that_answers_is_used(
    make_broker: Callable[..., Broker], make_producer: Callable[..., Producer]
) -> None:
    first, second = make_broker(), make_broker()
    make_producer([first.url, second.url]).send(b"").result(timeout=20)
    assert (first.queue("q").depth, second.queue("q").depth) == (1, 0)


def test_a_keyword_overrides_the_settings_object_which_overrides_url_and_environment(
    broker: Broker, make_producer: Callable[..., Producer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QFLOW_CAPACITY", "4")
    monkeypatch.setenv("QFLOW_MAX_PRODUCER_FLOW_CONTROL_WAIT", "7.5")
    monkeypatch.setenv("QFLOW_WHEN_FLOWED", "raise")
    monkeypatch.setenv("QFLOW_NAME", "by environment")
    url = f"{broker.url}?capacity=3&name=by+url&max_producer_flow_control_wait=none"
    producer = make_producer(url, settings=ProducerSettings(capacity=2, routing_key="q"), name="by keyword")
    assert producer.name == "by keyword"
    assert producer.capacity == 2
    assert producer.settings.max_producer_flow_control_wait is None
    assert producer.settings.when_flowed is WhenFlowed.RAISE


def test_all_settings_can_come_from_the_environment(
    broker: Broker, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    monkeypatch.setenv("QFLOW_URL", f"amqp://guest:guest@127.0.0.1:{refused}/%2F,{broker.url}")
    monkeypatch.setenv("QFLOW_ROUTING_KEY", "q")
    monkeypatch.setenv("QFLOW_CAPACITY", "17")
    producer = stack.enter_context(Producer())
    assert producer.capacity == 17
    producer.send(b"").result(timeout=20)
    assert bodies(broker) == [b""]


def test_unknown_query_parameters_of_the_url_are_passed_to_pika(
    broker: Broker, make_producer: Callable[..., Producer], wire: Wire
) -> None:
    producer = make_producer(f"{broker.url}?heartbeat=1&capacity=5")
    assert producer.capacity == 5
    # pika sends one every half second, and would one every half minute.
    wire.wait_for("in", "Heartbeat")


@pytest.mark.parametrize("query", ["no_such_parameter=1", "heartbeat=often", "ssl_options={"])
def test_a_url_parameter_that_pika_does_not_know_raises_an_error(broker: Broker, query: str) -> None:
    with pytest.raises(SettingsError, match=query.split("=")[0]) as caught:
        Producer(f"{broker.url}?{query}")
    assert "guest:guest" not in str(caught.value)
    assert broker.connections() == ()


def test_a_missing_certificate_file_raises_an_error_that_names_the_setting(broker: Broker) -> None:
    url = f"{broker.url}?ssl_options=%7B%27ca_certs%27%3A%27%2Fnowhere.pem%27%7D"
    with pytest.raises(SettingsError, match=r"nowhere\.pem.*: a file of ssl_options cannot be used: .*No such file"):
        Producer(url)


def test_an_invalid_parameter_in_any_url_raises_an_error_before_a_host_is_tried(silent: int) -> None:
    urls = [f"amqp://guest:guest@127.0.0.1:{silent}/%2F", "amqp://guest:guest@127.0.0.1/%2F?heartbeat=often"]
    with takes(0.0), pytest.raises(SettingsError, match="heartbeat"):
        Producer(urls, connect_timeout=10)


@pytest.mark.parametrize(
    ("query", "expected"),
    [("", (41.0, 41.0)), ("?socket_timeout=5", (5.0, 41.0)), ("?stack_timeout=50&socket_timeout=45", (41.0, 41.0))],
)
def test_connect_timeout_is_not_shortened_by_a_default_of_pika(query: str, expected: tuple[float, float]) -> None:
    found = parameters(f"amqp://guest:guest@localhost/%2F{query}", ProducerSettings(connect_timeout=40))
    assert (found.socket_timeout, found.stack_timeout) == expected


def test_a_producer_that_cannot_be_registered_leaves_no_connection_behind(broker: Broker) -> None:
    class Full(FlowManager):
        def register(self, resource: object) -> None:
            raise LookupError("no room")

    with pytest.raises(LookupError):
        Producer(broker.url, manager=Full(), on_delivery=print)
    broker.wait_until(lambda b: not b.connections())


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"capacity": 0}, "capacity=0: it must be a whole number"),
        ({"capacity": "many"}, "capacity='many'"),
        ({"when_flowed": "shout"}, "when_flowed='shout': it must be 'block', 'raise' or 'spill'"),
        ({"connect_timeout": -1}, "connect_timeout=-1"),
        ({"no_such_setting": 1}, "no_such_setting=***"),
    ],
)
def test_an_invalid_setting_raises_an_error_before_connecting(
    broker: Broker, keywords: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        Producer(broker.url, **keywords)
    assert words in str(caught.value)
    assert broker.connections() == ()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"line": object()}, "line=<object .*: it must be None or have the methods of a Line"),
        ({"line": WeightedLine}, "line=<class .*WeightedLine'>: it must be None or have the methods of a Line"),
        ({"manager": None}, "manager=None: it must be a FlowManager"),
        ({"manager": "operator"}, "manager='operator': it must be a FlowManager"),
        ({"settings": {"capacity": 5}}, r"settings={'capacity': \*\*\*}: it must be a ProducerSettings or None"),
        ({"on_delivery": 5}, "on_delivery=5: it must be None or callable"),
        ({"on_delivery": asyncio.sleep}, "on_delivery=.*: it must be a plain function"),
        ({"on_flow": asyncio.sleep}, "on_flow=.*: it must be a plain function"),
    ],
)
def test_an_argument_of_a_wrong_type_raises_an_error_before_connecting(
    broker: Broker, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        Producer(broker.url, **arguments)
    assert broker.connections() == ()


@pytest.mark.parametrize("error", [LookupError("a mistake"), SystemExit("the end")])
def test_a_producer_whose_channel_cannot_be_opened_raises_an_error_immediately(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(ProducerProtocol, "channel_opened", fail)
    job = start(Producer, broker.url, connect_timeout=15)
    found = job.wait()
    assert isinstance(found, ConnectionFailed)
    assert repr(error) in str(found)
    broker.wait_until(lambda b: not b.connections())


def test_a_producer_whose_channel_takes_too_long_to_open_raises_an_error_in_time(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(ProducerProtocol, "channel_opened", lambda *_: go_on.wait(20))
    job = start(Producer, broker.url, connect_timeout=0.5)
    assert isinstance(job.wait(), ConnectionFailed)
    go_on.set()
    broker.wait_until(lambda b: not b.connections())


def test_connect_timeout_may_be_longer_than_the_longest_wait_that_the_system_supports(
    make_producer: Callable[..., Producer],
) -> None:
    assert make_producer(connect_timeout=1e12).send(b"").result(timeout=20) is Outcome.CONFIRMED


def test_connecting_to_a_broker_at_its_connection_limit_raises_an_error(make_broker: Callable[..., Broker]) -> None:
    broker = make_broker(max_connections=1)
    with Producer(broker.url, routing_key="q") as producer:
        with pytest.raises(ConnectionFailed):
            Producer(broker.url, connect_timeout=5)
        producer.send(b"").result(timeout=20)
