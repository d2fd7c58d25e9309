"""A read for one reply may also read deliveries. The event loop of kombu delivers them."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pamqp.frame
import pytest
from kombu import Connection
from kombu.asynchronous import Hub
from pamqp import commands
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from tests.certificates import server_context
from tests.integration.producer.tools import PATIENCE, start

COUNT = 5


class Peer:
    """A broker that sends the reply to ``Basic.Qos`` and all deliveries in one write, and then nothing more."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.delivered = 0
        self._thread = threading.Thread(target=self._run, name="peer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.close()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with suppress(OSError, EOFError):
            sock, _ = self._listener.accept()
            sock.settimeout(PATIENCE)
            if self._context is not None:
                sock = self._context.wrap_socket(sock, server_side=True)
            with sock:
                self._serve(sock)

    def _serve(self, sock: socket.socket) -> None:
        data = b""
        while True:
            if len(data) < 8:
                data += self._receive(sock)
                continue
            size, number, frame = pamqp.frame.unmarshal(data)
            if not size:
                data += self._receive(sock)
                continue
            data = data[size:]
            sock.sendall(b"".join(pamqp.frame.marshal(reply, number) for reply in self._replies(frame)))

    @staticmethod
    def _receive(sock: socket.socket) -> bytes:
        data = sock.recv(1 << 16)
        if not data:
            raise EOFError
        return data

    def _replies(self, frame: Any) -> Iterator[Any]:
        match frame:
            case pamqp.header.ProtocolHeader():
                yield commands.Connection.Start(server_properties={"capabilities": {}})
            case commands.Connection.StartOk():
                yield commands.Connection.Tune(channel_max=9, frame_max=1 << 17, heartbeat=0)
            case commands.Connection.Open():
                yield commands.Connection.OpenOk()
            case commands.Channel.Open():
                yield commands.Channel.OpenOk()
            case commands.Basic.Consume():
                yield commands.Basic.ConsumeOk(consumer_tag=frame.consumer_tag)
            case commands.Basic.Qos():
                yield commands.Basic.QosOk()
                for _ in range(COUNT):
                    yield from self._delivery()
            case commands.Channel.Close():
                yield commands.Channel.CloseOk()
            case commands.Connection.Close():
                yield commands.Connection.CloseOk()

    def _delivery(self) -> Iterator[Any]:
        self.delivered += 1
        body = b"%d" % self.delivered
        yield commands.Basic.Deliver(consumer_tag="us", delivery_tag=self.delivered, exchange="", routing_key="q")
        yield ContentHeader(body_size=len(body))
        yield ContentBody(body)


class Stuck(Exception):
    """The event loop would wait for a socket, although some deliveries are not delivered yet."""


class Loop(Hub):
    """An event loop of kombu that raises `Stuck` instead of waiting for sockets before all deliveries are delivered."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over
        super().__init__()

    def _create_poller(self) -> None:
        super()._create_poller()
        poll = self.poller.poll

        def poll_now(_timeout: float) -> Any:
            events = poll(0)
            if not events and not self._is_over():
                raise Stuck
            return events

        self.poller.poll = poll_now


@contextmanager
def consuming(scheme: str, context: ssl.SSLContext | None, options: dict[str, Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a connection of kombu to a `Peer`, and the list of the bodies that its consumer has got."""
    with ExitStack() as stack:
        peer = Peer(context)
        stack.callback(peer.close)
        connection = stack.enter_context(Connection(f"{scheme}://guest:guest@127.0.0.1:{peer.port}//", **options))
        channel = connection.default_channel
        heard: list[bytes] = []
        channel.basic_consume("q", consumer_tag="us", callback=lambda message: heard.append(bytes(message.body)))
        yield connection, heard


def by_a_call_that_waits(connection: Any) -> None:
    """Call `basic_qos`, as a Celery worker does when it gets a task with an ETA."""
    connection.default_channel.basic_qos(0, 9, True)


def by_a_call_in_a_timer(connection: Any, hub: Hub) -> None:
    hub.call_later(0, by_a_call_that_waits, connection)


def by_a_call_in_a_callback(connection: Any, hub: Hub) -> None:
    hub.call_soon(by_a_call_that_waits, connection)


def by_a_call_in_a_tick(connection: Any, hub: Hub) -> None:
    def once() -> None:
        hub.on_tick.remove(once)
        by_a_call_that_waits(connection)

    hub.on_tick.add(once)


def by_one_call_to_drain_events(connection: Any, hub: Hub) -> None:
    def call() -> None:
        by_a_call_that_waits(connection)
        connection.drain_events()

    hub.call_soon(call)


def by_a_call_before_the_loop_runs(connection: Any, _hub: Hub) -> None:
    by_a_call_that_waits(connection)


CALLS = [
    by_a_call_before_the_loop_runs,
    by_a_call_in_a_callback,
    by_a_call_in_a_tick,
    by_a_call_in_a_timer,
    by_one_call_to_drain_events,
]


def run(connection: Any, heard: list[Any], call: Callable[[Any, Hub], None]) -> None:
    def is_over() -> bool:
        return len(heard) == COUNT

    hub = Loop(is_over)
    connection.register_with_event_loop(hub)
    call(connection, hub)
    try:
        while not is_over():
            hub.run_once()
    finally:
        hub.close()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("scheme", ["pyamqp", "qflow", "qflows"])
def test_E11_the_event_loop_delivers_messages_that_another_call_has_already_read(
    scheme: str, call: Callable[[Any, Hub], None], certificate: tuple[Path, Path]
) -> None:
    # Do not test amqps, because py-amqp leaves bytes in its TLS object, which the event loop does not see.
    context, options = None, {}
    if scheme == "qflows":
        context = server_context(*certificate)
        options = {"ssl": {"ca_certs": str(certificate[0]), "server_hostname": "127.0.0.1"}}
    with consuming(scheme, context, options) as (connection, heard):
        # Use a new thread, because a thread that has run an event loop counts as the event loop's thread.
        start(run, connection, heard, call).result()
        assert heard == [b"%d" % (number + 1) for number in range(COUNT)]
