"""A relay between a client and a broker, which records all frames in the order of the wire."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Self

from qflow_client.amqp.frames import METHOD_FRAME, FrameSplitter
from qflow_client.amqp.tap import Tap

PATIENCE = 100.0
_PROTOCOL_HEADER = 8


class Relay:
    """Relays one connection, and records each frame before passing it on.

    Args:
        url: URL of the broker.
        port: port of the broker, which is also in `url`.
        mends: whether to add the table of capabilities, if a library needs the table and the broker does not send it.
    """

    def __init__(self, url: str, port: int, *, mends: bool = False) -> None:
        self._mends = mends
        #: ``out`` (to the broker) or ``in``, the frame's type, its channel, and its payload if it is a method.
        self.frames: list[tuple[str, int, int, bytes]] = []
        self._grown = threading.Condition()
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        #: The broker's URL through this relay.
        self.url = url.replace(f":{port}/", f":{self._listener.getsockname()[1]}/")
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, name="relay", daemon=True)]

    def methods(self, way: str, *methods: bytes) -> list[bytes]:
        """Return the payloads of all frames in this direction that have one of these methods, in order."""
        return [
            payload
            for each, kind, _, payload in tuple(self.frames)
            if (each, kind) == (way, 1) and payload[:4] in methods
        ]

    def count(self, way: str, kind: int) -> int:
        """Return the number of frames of a type in this direction."""
        return sum(1 for each, frame_kind, _, _ in tuple(self.frames) if (each, frame_kind) == (way, kind))

    def wait_for(self, way: str, kind: int, count: int) -> None:
        """Wait until there were `count` frames of a type in this direction."""
        with self._grown:
            enough = self._grown.wait_for(lambda: self.count(way, kind) >= count, PATIENCE)
        assert enough, f"not {count} frames {way} of type {kind}"

    def wait_for_method(self, way: str, method: bytes, count: int = 1) -> None:
        """Wait until there were `count` frames with a method in this direction."""
        with self._grown:
            enough = self._grown.wait_for(lambda: len(self.methods(way, method)) >= count, PATIENCE)
        assert enough, f"not {count} times {method!r} {way}"

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._listener.close()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), thread
        for sock in self._sockets:
            sock.close()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        broker = socket.create_connection(self._target)
        for sock in (client, broker):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets += [client, broker]
        for way, source, target in (("out", client, broker), ("in", broker, client)):
            thread = threading.Thread(
                target=self._pass_on, args=(way, source, target), name=f"relay {way}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _pass_on(self, way: str, source: socket.socket, target: socket.socket) -> None:
        splitter = FrameSplitter()
        skip = _PROTOCOL_HEADER if way == "out" else 0
        # A `Tap` without a channel passes everything on, and adds the missing table to the first frame.
        tap = Tap() if self._mends and way == "in" else None
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if tap is not None:
                    data = tap.received(data, 0.0)
                begun, skip = data[skip:], max(0, skip - len(data))
                if begun:
                    with self._grown:
                        self.frames += [
                            (way, kind, channel, splitter.data[start:stop] if kind == METHOD_FRAME else b"")
                            for kind, channel, start, stop in splitter.feed(begun)
                        ]
                        self._grown.notify_all()
                target.sendall(data)
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
