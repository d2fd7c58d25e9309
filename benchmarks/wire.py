"""A minimal AMQP 0-9-1 client on a blocking socket: it prepares queues, counts messages, and opens connections.

This client shares no code with the measured libraries.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from struct import Struct
from typing import Any, Self
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from pamqp import base, commands
from pamqp.frame import marshal, unmarshal
from pamqp.header import ProtocolHeader

__all__ = ["FRAME_HEAD", "FRAME_OVERHEAD", "Wire", "frame", "fresh_queue"]

FRAME_HEAD = Struct(">BHI")
#: Bytes of a frame without its payload.
FRAME_OVERHEAD = 8

# Maximum seconds to wait for an answer.
_TIMEOUT = 30.0
# The broker deletes a queue that is unused for this number of milliseconds. Publishing does not count as use, so this
# time must be longer than a run.
_EXPIRES = 3_600_000
# The kinds of frames, and the first bytes of a method frame: class id and method id.
_METHOD, _HEADER = 1, 2
_CANCEL_OK = bytes((0, 60, 0, 31))
_CLOSES = (bytes((0, 20, 0, 40)), bytes((0, 10, 0, 50)))
# The tag of the consumer.
_TAG = "drain"


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    return FRAME_HEAD.pack(kind, channel, len(payload)) + payload + b"\xce"


class Wire:
    """A connection with one open channel, number 1."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "amqp":
            raise ValueError(f"the plain socket can only use amqp://, not {parts.scheme}://")
        user, password = unquote(parts.username or "guest"), unquote(parts.password or "guest")
        self.socket = socket.create_connection((parts.hostname or "localhost", parts.port or 5672), _TIMEOUT)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""
        self.socket.sendall(ProtocolHeader().marshal())
        start = self._expect(commands.Connection.Start)
        #: The properties of the broker.
        self.server_properties: dict[str, Any] = dict(start.server_properties)
        self._send(
            commands.Connection.StartOk(
                client_properties={
                    "product": "qflow_client benchmarks",
                    "capabilities": {"publisher_confirms": True, "basic.nack": True, "connection.blocked": False},
                },
                mechanism="PLAIN",
                response=f"\0{user}\0{password}",
                locale="en_US",
            ),
            0,
        )
        tune = self._expect(commands.Connection.Tune)
        #: Maximum frame size in bytes.
        self.frame_max: int = tune.frame_max or 1 << 17
        # The connection has no heartbeats, because it is idle while other peers are measured.
        self._send(commands.Connection.TuneOk(tune.channel_max, self.frame_max, 0), 0)
        self._send(commands.Connection.Open(unquote(parts.path[1:]) or "/"), 0)
        self._expect(commands.Connection.OpenOk)
        self.call(commands.Channel.Open())

    def call(self, request: base.Frame) -> Any:
        """Send a method on the channel and return the answer.

        Raises:
            ConnectionError: the broker closes the channel or the connection instead.
        """
        self._send(request, 1)
        return self._expect(getattr(commands, request.name.split(".")[0]).__dict__[request.name.split(".")[1] + "Ok"])

    def depth(self, queue: str) -> int:
        return int(self.call(commands.Queue.Declare(queue=queue, passive=True)).message_count)

    def get(self, queue: str) -> int | None:
        """Consume one message of a queue.

        Returns:
            The number of remaining ready messages; ``None`` if there was no message.
        """
        self._send(commands.Basic.Get(queue=queue, no_ack=True), 1)
        answer = self._expect(commands.Basic.GetOk, commands.Basic.GetEmpty)
        return answer.message_count if isinstance(answer, commands.Basic.GetOk) else None

    def drain(self, queue: str) -> Iterator[tuple[bytes, bytes]]:
        """Consume all messages of a queue. Yield the payload of the header frame and the body of each message."""
        while left := self.depth(queue):
            self._send(commands.Basic.Consume(queue=queue, consumer_tag=_TAG, no_ack=True), 1)
            header, parts, missing = b"", list[bytes](), 0
            for kind, payload in self._frames():
                if kind == _METHOD:
                    if payload[:4] in _CLOSES:
                        raise ConnectionError(f"the broker closed while it delivered {queue!r}: {payload!r}")
                    if payload[:4] == _CANCEL_OK:
                        break
                    # The other methods are the answer to Basic.Consume, and the deliveries, whose content follows.
                    continue
                if kind == _HEADER:
                    header, parts, missing = payload, [], int.from_bytes(payload[4:12], "big")
                else:
                    parts.append(payload)
                    missing -= len(payload)
                if not missing:
                    yield header, b"".join(parts)
                    left -= 1
                    if not left:
                        # More messages may be on their way. They come before the answer.
                        self._send(commands.Basic.Cancel(_TAG), 1)

    def _frames(self) -> Iterator[tuple[int, bytes]]:
        """Yield kind and payload of each frame. This is faster than `_next`, which decodes the frames."""
        at = 0
        try:
            while True:
                have = len(self._buffer) - at
                if have >= FRAME_OVERHEAD:
                    kind, _, length = FRAME_HEAD.unpack_from(self._buffer, at)
                    if have >= length + FRAME_OVERHEAD:
                        at += length + FRAME_OVERHEAD
                        yield kind, self._buffer[at - length - 1 : at - 1]
                        continue
                data = self.socket.recv(1 << 18)
                if not data:
                    raise ConnectionError("the broker closed the connection")
                self._buffer, at = self._buffer[at:] + data, 0
        finally:
            self._buffer = self._buffer[at:]

    def close(self) -> None:
        """Close the connection cleanly, and close the socket in any case."""
        try:
            self._send(commands.Connection.Close(200, "done", 0, 0), 0)
            self._expect(commands.Connection.CloseOk)
        except (OSError, ConnectionError):
            # An error during the close does not matter.
            pass
        finally:
            self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _send(self, method: base.Frame, channel: int) -> None:
        self.socket.sendall(marshal(method, channel))

    def _expect(self, *kinds: type[Any]) -> Any:
        while True:
            answer = self._next()
            if isinstance(answer, kinds):
                return answer
            if isinstance(answer, (commands.Channel.Close, commands.Connection.Close)):
                raise ConnectionError(f"the broker closed with {answer.reply_code} {answer.reply_text}")

    def _next(self) -> Any:
        while True:
            if len(self._buffer) >= FRAME_OVERHEAD:
                size = FRAME_HEAD.unpack_from(self._buffer)[2] + FRAME_OVERHEAD
                if len(self._buffer) >= size:
                    whole, self._buffer = self._buffer[:size], self._buffer[size:]
                    return unmarshal(whole)[2]
            data = self.socket.recv(1 << 16)
            if not data:
                raise ConnectionError("the broker closed the connection")
            self._buffer += data


@contextmanager
def fresh_queue(
    wire: Wire, arguments: Mapping[str, Any] | None = None, *, durable: bool = False, exclusive: bool = False
) -> Iterator[str]:
    """Declare a queue, and delete it at the end of the ``with`` block. If the process is killed, the queue expires."""
    queue = f"qflow-benchmark-{uuid4().hex[:12]}"
    arguments = {"x-expires": _EXPIRES, **(arguments or {})}
    wire.call(commands.Queue.Declare(queue=queue, durable=durable, exclusive=exclusive, arguments=arguments))
    try:
        yield queue
    finally:
        wire.call(commands.Queue.Delete(queue=queue))
