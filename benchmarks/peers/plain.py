"""The reference: a plain socket, frames that are created before the clock starts, and a sliding window."""

from __future__ import annotations

import select
import time
from collections import deque
from datetime import UTC, datetime
from struct import Struct

from pamqp import commands
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from benchmarks.peers.base import MESSAGE_ID, Job, Stopwatch, Timing, headers, timestamp
from benchmarks.wire import FRAME_HEAD, FRAME_OVERHEAD, Wire, frame

__all__ = ["AckWindow", "PlainSocket", "publish_frames"]

_ACK = bytes((0, 60, 0, 80))
_TAG_AND_MULTIPLE = Struct(">QB")
# A whole Basic.Ack frame: header, class and method id, delivery tag, bits, end.
_ACK_FRAME = Struct(">7x4xQBx")
_ACK_HEAD = FRAME_HEAD.pack(1, 1, 13) + _ACK
_READ = 1 << 17
_WRITE = 1 << 17


def publish_frames(
    queue: str, body: bytes, count: int, frame_max: int, *, varying: bool = False, persistent: bool = True
) -> tuple[bytes, int]:
    """Return the frames of all messages as one byte string, and the constant length of one message."""
    key = queue.encode()
    method = frame(1, 1, b"\0\x3c\0\x28" + b"\0\0" + b"\0" + bytes((len(key),)) + key + b"\1")
    room = frame_max - FRAME_OVERHEAD
    bodies = b"".join(frame(3, 1, body[at : at + room]) for at in range(0, len(body), room))
    length = len(MESSAGE_ID % 0)
    # Class 60, weight 0, the length, and the flags of delivery-mode and message-id.
    fixed = Struct(">HHQH").pack(60, 0, len(body), 1 << 12 | 1 << 7) + bytes((1 + persistent, length))
    head = method + FRAME_HEAD.pack(2, 1, len(fixed) + length) + fixed
    tail = b"\xce" + bodies
    if varying:
        messages = b"".join(method + frame(2, 1, _varying_header(body, number)) + bodies for number in range(count))
    else:
        messages = b"".join(head + (MESSAGE_ID % number).encode() + tail for number in range(count))
    return messages, len(messages) // count


def _varying_header(body: bytes, number: int) -> bytes:
    properties = Basic.Properties(
        delivery_mode=2,
        message_id=MESSAGE_ID % number,
        headers=headers(number),
        timestamp=datetime.fromtimestamp(timestamp(number), UTC),
    )
    return ContentHeader(0, len(body), properties).marshal()


class AckWindow:
    """The number of confirmed messages, counted from the broker's acks."""

    def __init__(self) -> None:
        # All messages up to this delivery tag are confirmed.
        self.floor = 0
        # Confirmed delivery tags above `floor`.
        self.above: set[int] = set()
        self._rest = b""

    @property
    def confirmed(self) -> int:
        return self.floor + len(self.above)

    def feed(self, data: bytes) -> None:
        """Process received bytes.

        Raises:
            ConnectionError: the bytes are neither acks nor heartbeats.
        """
        data = self._rest + data if self._rest else data
        whole = len(data) - len(data) % _ACK_FRAME.size
        # Shortcut for bytes that contain only acks. Such bytes have the maximum number of ack headers, and the first
        # and the last header are at the right places.
        last = whole - _ACK_FRAME.size
        if (
            data.startswith(_ACK_HEAD)
            and data.startswith(_ACK_HEAD, last)
            and data.count(_ACK_HEAD, 0, whole) == whole // _ACK_FRAME.size
        ):
            self._rest = data[whole:]
            floor, above = self.floor, self.above
            for tag, multiple in _ACK_FRAME.iter_unpack(data[:whole]):
                if multiple:
                    floor = max(floor, tag)
                elif tag == floor + 1:
                    floor = tag
                else:
                    above.add(tag)
            self.floor = floor
        else:
            self._slowly(data)
        if self.above:
            self._settle()

    def _settle(self) -> None:
        above = self.above
        if min(above) <= self.floor:
            above = self.above = {tag for tag in above if tag > self.floor}
        while self.floor + 1 in above:
            self.floor += 1
            above.remove(self.floor)

    def _slowly(self, data: bytes) -> None:
        at = 0
        while len(data) - at >= FRAME_OVERHEAD:
            kind, _, size = FRAME_HEAD.unpack_from(data, at)
            if len(data) - at < size + FRAME_OVERHEAD:
                break
            payload = data[at + 7 : at + 7 + size]
            if payload[:4] == _ACK:
                tag, multiple = _TAG_AND_MULTIPLE.unpack_from(payload, 4)
                if multiple:
                    self.floor = max(self.floor, tag)
                else:
                    self.above.add(tag)
            elif kind != 8:
                raise ConnectionError(f"the broker sent a frame of type {kind} that is not an ack: {payload[:60]!r}")
            at += size + FRAME_OVERHEAD
        self._rest = data[at:]


class PlainSocket:
    """The fastest possible Python client. The cost of a library is the time that it needs in addition."""

    title = "plain socket"
    distribution = ""
    varies = True

    def run(self, job: Job) -> Timing:
        with Wire(job.url) as wire:
            messages, length = publish_frames(
                job.queue, job.body, job.count, wire.frame_max, varying=job.varying, persistent=job.persistent
            )
            if not job.confirmed:
                watch = Stopwatch()
                wire.socket.sendall(messages)
                wire.call(commands.Channel.Close(200, "done", 0, 0))
                return watch.stop()
            wire.call(commands.Confirm.Select())
            return self._window(wire, memoryview(messages), length, job)

    def _window(self, wire: Wire, messages: memoryview, length: int, job: Job) -> Timing:
        sock, window, count = wire.socket, job.window * length, job.count
        sock.setblocking(False)
        poll = select.poll()
        acks = AckWindow()
        at, total = 0, len(messages)
        watching = 0
        # Delivery tags whose confirm is timed, with their write times.
        sampled: deque[tuple[int, float]] = deque()
        latencies: list[float] = []
        next_sample = 1 if job.sample else count + 1
        watch = Stopwatch()
        while acks.confirmed < count:
            allowed = min(acks.confirmed * length + window, total)
            try:
                while at < allowed:
                    at += sock.send(messages[at : min(allowed, at + _WRITE)])
            except BlockingIOError:
                pass
            while next_sample * length <= at:
                sampled.append((next_sample, time.perf_counter()))
                next_sample += job.sample or count
            wanted = select.POLLIN | (select.POLLOUT if at < allowed else 0)
            if wanted != watching:
                watching = wanted
                poll.register(sock, wanted)
            if not poll.poll(30_000):
                raise TimeoutError(f"no confirm for 30 s; {acks.confirmed} of {count} messages were confirmed")
            try:
                data = sock.recv(_READ)
            except BlockingIOError:
                continue
            if not data:
                raise ConnectionError("the broker closed the connection")
            acks.feed(data)
            while sampled and sampled[0][0] <= acks.floor:
                latencies.append(time.perf_counter() - sampled.popleft()[1])
        timing = watch.stop(latencies)
        sock.settimeout(30.0)
        return timing
