"""A TCP proxy that simulates a distant broker: it delays every byte in both directions, and changes nothing else."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import cast
from urllib.parse import urlsplit, urlunsplit

__all__ = ["delayed"]

# Maximum bytes on their way in one direction. This is far more than any measured window, so the proxy does not limit
# the bandwidth.
_ON_THE_WAY = 64 << 20
# Maximum seconds until the proxy listens.
_START = 30.0


@contextmanager
def delayed(url: str, seconds: float) -> Iterator[str]:
    """Run a proxy in its own process in front of a broker.

    Args:
        seconds: delay of each byte in each direction.

    Yields:
        The URL that leads to the broker through the proxy.
    """
    parts = urlsplit(url)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = parts.hostname or "localhost", parts.port or 5672, seconds, theirs
    process = context.Process(target=_run, args=arguments, name="delay", daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START):
            raise TimeoutError(f"the process of the delaying proxy did not listen within {_START:.0f} s")
        login = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
        yield urlunsplit(parts._replace(netloc=f"{login}127.0.0.1:{ours.recv()}"))
    finally:
        # The process ends when the other end of its pipe is closed.
        ours.close()
        process.join()


def _run(host: str, port: int, seconds: float, parent: Connection) -> None:
    asyncio.run(_serve(host, port, seconds, parent))


async def _serve(host: str, port: int, seconds: float, parent: Connection) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Near(host, port, seconds), "127.0.0.1", 0)
    parent_gone = asyncio.Event()
    loop.add_reader(parent.fileno(), parent_gone.set)
    async with server:
        parent.send(server.sockets[0].getsockname()[1])
        await parent_gone.wait()
        loop.remove_reader(parent.fileno())


class _End(asyncio.Protocol):
    """One end of a delayed connection. The other end sends the received bytes after the delay."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._transport: asyncio.Transport | None = None
        self.other: _End | None = None
        # Received bytes, with the time when the other end has to send them; an empty piece means the end of the
        # connection.
        self._way: deque[tuple[float, bytes]] = deque()
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None
        # False while too many bytes are on their way, or while the other end accepts no more bytes.
        self._reading = True
        # Whether this end accepts no more bytes.
        self._is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._put(b"")

    def data_received(self, data: bytes) -> None:
        self._put(data)
        self._look()

    def pause_writing(self) -> None:
        self._is_full = True
        if self.other is not None:
            self.other._look()

    def resume_writing(self) -> None:
        self._is_full = False
        if self.other is not None:
            self.other._look()

    def _look(self) -> None:
        """Start or stop reading, depending on the bytes on their way."""
        reading = self._size <= _ON_THE_WAY and self.other is not None and not self.other._is_full
        if reading != self._reading and self._transport is not None:
            self._reading = reading
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _put(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        self._way.append((loop.time() + self._seconds, data))
        self._size += len(data)
        if self._timer is None:
            self._timer = loop.call_at(self._way[0][0], self._arrive)

    def _arrive(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        due = []
        while self._way and self._way[0][0] <= now:
            due.append(self._way.popleft()[1])
        self._timer = loop.call_at(self._way[0][0], self._arrive) if self._way else None
        self._size -= sum(map(len, due))
        if due and self.other is not None and self.other._transport is not None:
            self.other._transport.write(b"".join(due))
            if not due[-1]:
                self.other._transport.close()
        self._look()


class _Near(_End):
    """The end to which the producer is connected. This end connects to the broker."""

    def __init__(self, host: str, port: int, seconds: float) -> None:
        super().__init__(seconds)
        self._broker = host, port
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # The other end does not exist yet, so the first bytes of the producer wait in the socket.
        self._look()
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        assert self._transport is not None
        far = _End(self._seconds)
        far.other = self
        try:
            await asyncio.get_running_loop().create_connection(lambda: far, *self._broker)
        except OSError:
            self._transport.close()
            return
        self.other = far
        self._look()
