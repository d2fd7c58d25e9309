"""pika and a producer write to one socket that accepts few bytes at a time."""

from __future__ import annotations

import errno
import random
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, cast

import pytest

from qflow_client import ProducerSettings
from qflow_client.amqp.tap import Tap
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.guard import Guard
from qflow_client.sync.pika_io import TapIOServices
from tests.certificates import server_context
from tests.effort import rounds

_OURS, _PIKAS = 1, 2
_FRAME_MAX = 4096


def _frame(number: int) -> bytes:
    """A frame as pika might write it: told from all others by its number."""
    payload = b"%08d" % number + bytes(number * 7 % 500)
    return struct.pack(">BHI", 1, _PIKAS, len(payload)) + payload + b"\xce"


def _frames(stream: bytes) -> list[tuple[int, bytes]]:
    """The frames of a stream and their channels, if nothing is between and in them that does not belong there."""
    frames, at = [], 0
    while at < len(stream):
        kind, channel, size = struct.unpack_from(">BHI", stream, at)
        assert kind in (1, 2, 3)
        assert channel in (_OURS, _PIKAS)
        assert stream[at + 7 + size] == 0xCE
        frames.append((channel, stream[at : at + 8 + size]))
        at += 8 + size
    return frames


def _protocol() -> ProducerProtocol:
    settings = ProducerSettings(capacity=10**6, max_unwritten_bytes=10**9)
    protocol = ProducerProtocol(settings, id_prefix="p-", now=0.0)
    protocol.channel_opened(_OURS, _FRAME_MAX, 0.0)
    return protocol


class _Grudging(socket.socket):
    """Takes a few bytes, then none, then a few more."""

    most = 0
    dice = random.Random(0)
    # What it fails with from now on.
    error: OSError | None = None
    _stubborn = False

    def send(self, data: bytes, flags: int = 0) -> int:  # type: ignore[override]  # as it is used
        if self.error is not None:
            raise self.error
        self._stubborn = not self._stubborn
        if not self._stubborn:
            raise BlockingIOError(errno.EAGAIN, "not now")
        return super().send(data[: self.dice.randint(1, self.most)], flags)


class _Wire:
    """pika's own transport and a producer at one socket; both and their peer are moved by `turn`."""

    def __init__(self, sock: socket.socket, peer: socket.socket, tls: tuple[Path, Path] | None = None) -> None:
        self.tap = Tap()
        self.lock = Guard()
        self.services = TapIOServices(self.tap, self.lock, lambda: None)
        self.protocol = _protocol()
        self._loop = cast(Any, self.services.get_native_ioloop())
        self._peer = peer
        peer.setblocking(False)
        # What the peer has read, decrypted.
        self.arrived = bytearray()
        # The most bytes that it reads in one turn.
        self.reads = 1 << 16
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._server: ssl.SSLObject | None = None
        context = None
        if tls is not None:
            self._server = server_context(*tls).wrap_bio(self._incoming, self._outgoing, server_side=True)
            context = ssl.create_default_context(cafile=str(tls[0]))
        # pika's transport, once there is one, and what it says when it ends.
        self.transport: Any = None
        self.lost = threading.Event()
        sock.setblocking(False)
        self.services.create_streaming_connection(
            lambda: self, sock, self._linked, context, "127.0.0.1" if tls else None
        )
        self._loop.activate_poller()
        while self.transport is None:
            self.turn()
        self.tapped: Any = cast(Any, self.services.tapped)
        with self.lock:
            self.tap.attach(_OURS, self.protocol, 0.0)

    def _linked(self, result: Any) -> None:
        assert isinstance(result, tuple), result
        self.transport = result[0]

    # pika's stream protocol.

    def connection_made(self, transport: Any) -> None:
        pass

    def connection_lost(self, error: object) -> None:
        self.lost.set()

    def eof_received(self) -> bool:
        return False

    # What happens.

    def send(self, body: bytes) -> None:
        with self.lock:
            assert self.protocol.admission.send(body, "", "q", 0.0) is not None
            asleep, self.services.awake = not self.services.awake, True
        if asleep:
            self.services.wake()

    def turn(self) -> None:
        """Let everybody do one thing."""
        self._loop.add_callback(lambda: None)
        self._loop.poll()
        self._loop.process_timeouts()
        try:
            data = self._peer.recv(self.reads)
        except BlockingIOError:
            data = b""
        if self._server is None:
            self.arrived += data
            return
        self._incoming.write(data)
        try:
            if self.transport is None:
                self._server.do_handshake()
            while self.transport is not None:
                self.arrived += self._server.read(1 << 16)
        except ssl.SSLWantReadError:
            pass
        if self._outgoing.pending:
            self._peer.send(self._outgoing.read())

    def say(self, frame: bytes) -> None:
        """Have the peer send something, in a record of its own."""
        assert self._server is not None
        self._server.write(frame)
        assert self._peer.send(self._outgoing.read())

    @property
    def is_empty(self) -> bool:
        return not self.transport.get_write_buffer_size() and not self.protocol.unwritten and not self.tapped.full

    def close(self) -> None:
        if self.transport is not None and not self.lost.is_set():
            self.transport.abort()
            self.services._on_woken()
        self._loop.deactivate_poller()
        self.services.close()
        self._peer.close()


@pytest.fixture
def make_wire() -> Iterator[Callable[..., _Wire]]:
    wires: list[_Wire] = []

    def make(most: int, *, seed: int = 0, tls: tuple[Path, Path] | None = None) -> _Wire:
        ours, peer = socket.socketpair()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        if tls is None:
            sock: socket.socket = _Grudging(fileno=ours.detach())
            sock.most, sock.dice = most, random.Random(seed)  # type: ignore[attr-defined]  # it is a grudging one
        else:
            # What TLS sends is the kernel's to cut.
            sock = ours
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, most)
        wires.append(_Wire(sock, peer, tls))
        return wires[-1]

    yield make
    for wire in wires:
        wire.close()


def _both_write(wire: _Wire, dice: random.Random) -> None:
    """Let both write at random, and look at what came of it."""
    twin = _protocol()
    written = 0
    for _ in range(100):
        if dice.random() < 0.5:
            body = bytes(dice.choice([0, 10, 200, 6000]))
            wire.send(body)
            twin.admission.send(body, "", "q", 0.0)
        if dice.random() < 0.5:
            wire.transport.write(_frame(written))
            written += 1
        for _ in range(dice.randint(0, 20)):
            wire.turn()
    while not wire.is_empty:
        wire.turn()
    expected = twin.data_to_write(1 << 30)
    turns = 0
    while len(wire.arrived) < len(expected) + sum(len(_frame(number)) for number in range(written)):
        wire.turn()
        turns += 1
        assert turns < 10_000
    frames = _frames(bytes(wire.arrived))
    assert [frame for channel, frame in frames if channel == _PIKAS] == [_frame(n) for n in range(written)]
    assert b"".join(frame for channel, frame in frames if channel == _OURS) == expected


@pytest.mark.parametrize("most", [20, 300, 3000])
@pytest.mark.parametrize("seed", range(rounds(3)))
def test_frames_are_never_torn_by_a_socket_that_accepts_few_bytes(
    make_wire: Callable[..., _Wire], most: int, seed: int
) -> None:
    wire = make_wire(most, seed=seed)
    wire.reads = 1 << 20
    _both_write(wire, random.Random(seed))


@pytest.mark.parametrize("seed", range(rounds(3)))
def test_frames_are_never_torn_by_a_tls_socket_that_accepts_few_bytes(
    make_wire: Callable[..., _Wire], certificate: tuple[Path, Path], seed: int
) -> None:
    wire = make_wire(4096, tls=certificate)
    wire.reads = 1500
    _both_write(wire, random.Random(seed))


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_of_pika_and_a_producer_that_both_always_have_output_neither_starves(
    make_wire: Callable[..., _Wire], certificate: tuple[Path, Path], tls: bool
) -> None:
    wire = make_wire(4096, tls=certificate) if tls else make_wire(700)
    wire.reads = 1500
    chunk = wire.tapped.write_chunk = 4096
    written = 0
    while len(wire.arrived) < 50 * chunk:
        while wire.transport.get_write_buffer_size() < 2 * chunk:
            wire.transport.write(_frame(written))
            written += 1
        while wire.protocol.unwritten < 2 * chunk:
            wire.send(bytes(300))
        wire.turn()
    while not wire.is_empty:
        wire.turn()
    frames = _frames(bytes(wire.arrived))
    ends = accumulate(len(frame) for _, frame in frames)
    # While both had something.
    busy = [(channel, len(frame)) for (channel, frame), end in zip(frames, ends, strict=True) if end <= 50 * chunk]
    turns = [sum(size for _, size in turn) for _, turn in groupby(busy, key=lambda each: each[0])]
    assert len(turns) > 20
    # A turn is a chunk, and the rest of a frame that has begun before it and at its end.
    assert max(turns) <= chunk + 2 * _FRAME_MAX


def test_a_connection_whose_socket_cannot_be_written_is_closed(make_wire: Callable[..., _Wire]) -> None:
    """pika only reads from this socket and would not notice the failure."""
    wire = make_wire(100)
    # It says nothing of the connection.
    wire.tapped._sock.error = OSError(errno.ENOBUFS, "no room in the kernel")
    wire.send(b"")
    for _ in range(10):
        if not wire.lost.is_set():
            wire.turn()
    assert wire.lost.is_set()


def test_reading_from_a_tls_socket_that_always_has_input_is_interrupted_for_other_work(
    make_wire: Callable[..., _Wire], certificate: tuple[Path, Path]
) -> None:
    wire = make_wire(1 << 16, tls=certificate)
    for _ in range(150):
        wire.send(b"")
    while not wire.is_empty:
        wire.turn()
    for tag in range(1, 151):
        wire.say(struct.pack(">BHIHHQBB", 1, _OURS, 13, 60, 80, tag, 0, 0xCE))
    counts = [150]
    while counts[-1]:
        wire.turn()
        counts.append(wire.protocol.unsettled)
        # Every turn reads some, and leaves the rest to the next.
        assert 0 < counts[-2] - counts[-1] < 100
