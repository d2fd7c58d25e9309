from __future__ import annotations

import socket
import struct
import time
from typing import Any

import pytest
from pamqp import body, commands, frame, header

from qflow_client.broker import Broker

PROTOCOL_HEADER = b"AMQP\0\0\x09\x01"


class RawClient:
    """A client with a blocking socket that sends and receives single AMQP frames."""

    def __init__(self, port, *, wrap=None):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        if wrap is not None:
            self.socket = wrap(self.socket)
        self._rest = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    @property
    def name(self):
        return "{}:{}".format(*self.socket.getsockname())

    def send_bytes(self, data):
        self.socket.sendall(data)

    def send(self, channel, *frames):
        self.send_bytes(b"".join(frame.marshal(each, channel) for each in frames))

    def read_bytes(self, count):
        while len(self._rest) < count:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError
            self._rest += data
        data, self._rest = self._rest[:count], self._rest[count:]
        return data

    def read(self):
        """Return the next frame as (channel, frame)."""
        head = self.read_bytes(7)
        channel, size = struct.unpack_from(">HI", head, 1)
        return channel, frame.unmarshal(head + self.read_bytes(size + 1))[2]

    def expect(self, kind):
        channel, received = self.read()
        assert isinstance(received, kind), (channel, received.name, dict(received))
        return received

    def call(self, channel, method, reply):
        self.send(channel, method)
        return self.expect(reply)

    def is_over(self):
        """Wait until the broker has closed the connection, and return True."""
        try:
            while True:
                self.read()
        except (EOFError, ConnectionResetError):
            return True

    def open(self, *, heartbeat=0, capabilities=None, properties=None):
        self.send_bytes(PROTOCOL_HEADER)
        self.expect(commands.Connection.Start)
        told: dict[str, Any] = {"capabilities": {"connection.blocked": True, **(capabilities or {})}}
        start_ok = commands.Connection.StartOk(told | (properties or {}), "PLAIN", "\0guest\0guest", "en_US")
        tune = self.call(0, start_ok, commands.Connection.Tune)
        self.send(0, commands.Connection.TuneOk(tune.channel_max, tune.frame_max, heartbeat))
        self.call(0, commands.Connection.Open("/"), commands.Connection.OpenOk)
        return self

    def channel(self, number=1, *, confirms=False):
        self.call(number, commands.Channel.Open(), commands.Channel.OpenOk)
        if confirms:
            self.call(number, commands.Confirm.Select(), commands.Confirm.SelectOk)
        return self

    def publish(self, content=b"x", routing_key="q", *, channel=1):
        self.send(
            channel,
            commands.Basic.Publish(routing_key=routing_key),
            header.ContentHeader(body_size=len(content)),
            body.ContentBody(content),
        )


@pytest.fixture(name="broker")
def _broker():
    with Broker() as broker:
        yield broker


@pytest.fixture(name="stop_clock")
def _stop_clock(monkeypatch):
    """A function that stops the clock of a broker's deadlines. It returns a function that starts the clock again.

    While the clock stands still, no deadline passes, however long the test takes.
    """

    def stop(broker):
        now, clock = time.monotonic(), broker._server.clock
        monkeypatch.setattr(broker._server, "clock", lambda: now)
        return lambda: monkeypatch.setattr(broker._server, "clock", clock)

    return stop


@pytest.fixture(name="connect")
def _connect():
    """A function that opens a raw connection to a broker. The connection is closed at the end of the test."""
    clients = []

    def connect(broker, **options):
        client = RawClient(broker.port, **options)
        clients.append(client)
        return client

    yield connect
    for client in clients:
        client.socket.close()
