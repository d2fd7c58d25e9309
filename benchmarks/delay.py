"""A TCP proxy that makes a broker far away: every byte arrives later, in either direction, and nothing else changes."""

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

# Bytes on their way in one direction, beyond which nothing more is read: far more than any window that is measured, so
# that the way is long, not narrow.
_ON_THE_WAY = 64 << 20
# Seconds that the proxy may take to listen.
_START = 30.0


@contextmanager
def delayed(url: str, seconds: float) -> Iterator[str]:
    """Put a proxy in a process of its own before a broker.

    Args:
        url: of the broker.
        seconds: that each byte is on the way, in each direction.

    Yields:
        The URL of the broker behind the proxy.
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
            raise TimeoutError(f"the proxy does not listen after {_START:.0f} s")
        login = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
        yield urlunsplit(parts._replace(netloc=f"{login}127.0.0.1:{ours.recv()}"))
    finally:
        # It ends when nobody holds the other end any more.
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
    """One end of a connection: what it receives leaves at the other end, later."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._transport: asyncio.Transport | None = None
        self.other: _End | None = None
        # What was received, and when it is due at the other end; an empty piece is the end.
        self._way: deque[tuple[float, bytes]] = deque()
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None
        # Whether nothing is read because too much is on the way, or because the other end takes no more.
        self._reading = True
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
        """Read, or stop reading, by what is on the way."""
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
    """The end that the producer connected to; it connects to the broker."""

    def __init__(self, host: str, port: int, seconds: float) -> None:
        super().__init__(seconds)
        self._broker = host, port
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # There is no other end yet, so that what the producer says first waits in the socket.
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
