"""Output to a socket that accepts any number of bytes at each write."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qflow_client.aio.aiormq_io import TapTransport, _TapProtocol
from qflow_client.amqp.tap import Tap
from tests.interrupting import each_interrupt
from tests.unit.messages import WritingChannel


class _Loop:
    """The parts of a loop that the transport uses."""

    def __init__(self) -> None:
        self.writers: dict[int, Any] = {}
        self.soon: list[Any] = []
        self.later: list[tuple[float, Any]] = []

    def add_writer(self, fd: int, callback: Any) -> None:
        self.writers[fd] = callback

    def remove_writer(self, fd: int) -> None:
        del self.writers[fd]

    def call_soon(self, callback: Any) -> None:
        self.soon.append(callback)

    def call_later(self, delay: float, callback: Any) -> object:
        self.later.append((delay, callback))
        return callback


class _Raw(asyncio.Transport):
    def get_extra_info(self, name: str, default: Any = None) -> Any:
        assert name == "socket"
        return self.sock

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self.sock = sock
        self.reads = True

    def pause_reading(self) -> None:
        assert self.reads
        self.reads = False

    def resume_reading(self) -> None:
        assert not self.reads
        self.reads = True

    def is_closing(self) -> bool:
        return False


class _Reader(asyncio.StreamReaderProtocol):
    """The library's protocol, which counts how often it was asked to wait."""

    def __init__(self) -> None:
        self.pauses = 0

    def pause_writing(self) -> None:
        self.pauses += 1

    def resume_writing(self) -> None:
        self.pauses -= 1

    def __del__(self) -> None:
        """Do nothing, because nothing was opened."""


@contextmanager
def parts(takes: list[int]) -> Iterator[tuple[TapTransport, WritingChannel, bytearray, _Reader]]:
    """Yield a transport whose socket takes the given numbers of bytes in turn, and then all bytes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        written, reader, channel = bytearray(), _Reader(), WritingChannel()
        tap = Tap()
        tap.attach(1, channel, 0.0)  # type: ignore[arg-type]  # it is asked for nothing else
        raw = _Raw(ours)
        tapped = TapTransport(tap, reader, raw, raw, _Loop())  # type: ignore[arg-type]  # as above

        def send(data: bytes) -> int:
            count = min(takes.pop(0), len(data)) if takes else len(data)
            written.extend(data[:count])
            return count

        tapped._send = send  # type: ignore[method-assign]  # the socket's own
        with tapped._socket:
            yield tapped, channel, written, reader


def test_the_library_can_write_after_the_current_frame_even_if_all_writes_of_a_producer_end_inside_frames() -> None:
    # 100 bytes in each frame, and 33 in each write: only the hundredth write would end at a frame boundary.
    with parts([33] * 90) as (tapped, channel, written, _):
        for _ in range(200):
            channel.outbound.add(b"[" + b"x" * 98 + b"]")
        tapped.pump()
        tapped.pump()
        assert len(written) == 66
        tapped.write(b"<heartbeat>")
        for _ in range(4):
            tapped.pump()
        assert bytes(written[100:111]) == b"<heartbeat>"


def test_the_abort_of_a_tls_connection_that_has_ended_raises_no_error() -> None:
    class Ended:
        is_aborted = False

        def abort(self) -> None:
            self.is_aborted = True
            raise AttributeError("'NoneType' object has no attribute '_abort'")  # as on Python 3.11.2

    with parts([]) as (tapped, _, _, _):
        tapped._transport = ended = Ended()  # type: ignore[assignment]  # it is only aborted
        tapped.abort()
    assert ended.is_aborted


def test_the_library_and_a_producer_with_much_output_write_in_turn() -> None:
    with parts([0]) as (tapped, channel, written, _):
        for _ in range(4):
            channel.outbound.add(b"[" + b"x" * 200_000 + b"]")
        tapped.pump()
        for _ in range(4):
            tapped.write(b"<" + b"y" * 1000 + b">")
        tapped.pump()
        turns = bytes(byte for byte in written if byte in b"[<")
        assert turns == b"<[<[<[<["


@given(
    takes=st.lists(st.integers(0, 40), max_size=60),
    steps=st.lists(st.tuples(st.sampled_from("LCP"), st.integers(0, 120)), max_size=40),
)
def test_frames_of_the_library_and_producers_stay_whole_and_in_order_however_the_socket_splits_writes(
    takes: list[int], steps: list[tuple[str, int]]
) -> None:
    library, ours = [], []
    with parts(list(takes)) as (tapped, channel, written, reader):
        for number, (what, size) in enumerate(steps):
            if what == "L":
                library.append(b"<%d:" % number + b"y" * size + b">")
                tapped.write(library[-1])
            elif what == "C":
                ours.append(b"[%d:" % number + b"x" * size + b"]")
                channel.outbound.add(ours[-1])
                if not tapped.awake:
                    tapped.pump()
            else:
                tapped.pump()
        while tapped._library or channel.outbound.size:
            tapped.pump()
        found = _split(bytes(written))
        assert [each for each in found if each.startswith(b"<")] == library
        assert [each for each in found if each.startswith(b"[")] == ours
        assert reader.pauses == 0
        assert tapped.get_write_buffer_size() == 0
        assert not tapped._watching
        assert not tapped.awake


def test_E2_a_wake_up_that_is_interrupted_at_any_line_is_completed_by_the_next_wake_up() -> None:
    for interrupt in each_interrupt(least=2):
        with parts([]) as (tapped, channel, written, _):
            channel.outbound.add(b"[1]")
            interrupt(tapped.wake)
            if not tapped.awake:
                tapped.wake()
            for pump in tapped._loop.soon:  # type: ignore[attr-defined]  # it is ours
                pump()
            assert written == b"[1]"
            assert not tapped.awake


def _split(data: bytes) -> list[bytes]:
    found = []
    while data:
        end = data.index(b">" if data.startswith(b"<") else b"]") + 1
        found.append(data[:end])
        data = data[end:]
    return found


def test_the_library_is_asked_to_pause_writing_while_much_of_the_output_of_the_library_is_unwritten() -> None:
    with parts([1, 1, 10_000]) as (tapped, _, written, reader):
        tapped.write(b"<" + b"y" * 100_000 + b">")
        assert (reader.pauses, tapped.get_write_buffer_size()) == (1, 100_001)
        tapped.pump()
        assert reader.pauses == 1
        tapped.pump()
        tapped.pump()
        assert (reader.pauses, tapped.get_write_buffer_size()) == (0, 0)
        assert len(written) == 100_002


@pytest.mark.parametrize("pauses", ["before", "meanwhile", "no longer"])
def test_the_socket_is_not_read_while_answers_accumulate_or_the_library_has_enough_input(pauses: str) -> None:
    with parts([]) as (tapped, _channel, _written, _reader):
        raw: Any = tapped._raw
        loop: Any = tapped._loop
        delays = [0.0, 0.25, 0.125]
        tapped.delay = lambda _size: delays.pop(0)
        tapped.received(21, for_library=False)
        # Reading data for the library does not delay the next read.
        tapped.received(21, for_library=True)
        assert raw.reads
        assert not loop.later
        if pauses == "before":
            tapped.pause_reading()
        tapped.received(21, for_library=False)
        assert not raw.reads
        # The library is not informed of this.
        assert tapped.is_reading() is (pauses != "before")
        if pauses != "before":
            tapped.pause_reading()
        # More data that was already read has no effect.
        tapped.received(21, for_library=False)
        [(delay, over)] = loop.later
        assert delay == 0.25
        if pauses == "no longer":
            tapped.resume_reading()
            assert not raw.reads
        over()
        assert raw.reads is tapped.is_reading() is (pauses == "no longer")
        if pauses != "no longer":
            tapped.resume_reading()
        assert raw.reads
        tapped.received(21, for_library=False)
        assert [each for each, _ in loop.later] == [0.25, 0.125]


def test_E2_a_read_that_is_interrupted_at_any_line_ends_the_connection_because_acks_may_be_lost() -> None:
    class Transport:
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    loop = asyncio.new_event_loop()
    aborted = 0
    for interrupt in each_interrupt(least=3):
        reader = asyncio.StreamReader(loop=loop)
        protocol, transport = _TapProtocol(reader, loop, bool), Transport()
        protocol.connection_made(transport)  # type: ignore[arg-type]  # it is only aborted
        # A heartbeat goes to the library.
        come = interrupt(lambda: protocol.data_received(b"\x08" + bytes(6) + b"\xce"))  # noqa: B023  # called at once
        is_read = reader._buffer == b"\x08" + bytes(6) + b"\xce"  # type: ignore[attr-defined]  # asyncio's own
        # The repeated call ends the connection, unless the interrupt came before anything was read.
        assert is_read or transport.aborted or interrupt.at == 1
        aborted += transport.aborted
        if not come:
            assert is_read
            assert not transport.aborted
    assert aborted > 3
    loop.close()
