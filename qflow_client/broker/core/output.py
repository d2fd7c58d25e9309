"""`Output` orders the outgoing frames of one connection, sans-I/O. The session and its channels write the frames.

The output is a list of byte strings that `Output.take` joins once in each iteration of the event loop. An answer that
must wait for the disk is a `Promise`. Later frames of the same channel wait for the promise; frames of other channels
do not. So the frames of a channel are sent in the order in which they were written. Only ``Channel.Flow`` does not wait
for promises. Channel 0 has no promises. Consumers get no messages while too many deliveries are unsent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from qflow_client.broker.core.confirms import Confirms
from qflow_client.broker.core.controls import Controls
from qflow_client.broker.core.ports import Journal

__all__ = ["Output", "Promise"]


class _Consuming(Protocol):
    @property
    def consumers(self) -> Mapping[str, object]:
        """The consumers by tag."""

    def wait_for_disk(self, on: bool) -> None:
        """Stop deliveries of the channel, because an answer waits for the disk. With ``on=False`` start them again."""

    def wake(self) -> None:
        """Offer messages to the channel's consumers, because they can perhaps take messages again."""


class _Channel(Protocol):
    @property
    def is_closing(self) -> bool:
        """Whether the channel is closing. No confirm may be sent on a closing channel."""

    @property
    def confirms(self) -> Confirms | None:
        """The confirms; ``None`` without confirm mode."""

    @property
    def consuming(self) -> _Consuming:
        """The consumers and deliveries of the channel."""


class Promise:
    """Frames of a channel that wait for the disk. Later frames of this channel are sent after the promised frames.

    Args:
        size: approximate size of the promised frames in bytes.
    """

    __slots__ = ("_number", "_output", "behind", "data", "size")

    def __init__(self, output: Output, number: int, size: int) -> None:
        self._output = output
        self._number = number
        self.size = size
        self.data: bytes | None = None
        # Frames that were written after this promise and before the next promise.
        self.behind: list[bytes] = []

    def keep(self, data: bytes) -> None:
        """Supply the promised frames, all together."""
        self.data = data
        self._output.promise_kept(self._number, len(data) - self.size)


class Output:
    """The outgoing frames of one connection.

    Args:
        journal: calls back when changes are on disk; ``None`` if there is no journal.
        now: monotonic seconds.
        on_output: called for the first output after each `take`, and at each call of `write_past_promises`.
    """

    #: Maximum bytes of unsent deliveries. If there are more, consumers get no messages.
    MAX_DELIVERY_BYTES = 256 * 1024

    def __init__(
        self,
        channels: Mapping[int, _Channel],
        controls: Controls,
        journal: Journal | None,
        now: float,
        on_output: Callable[[], None],
    ) -> None:
        self._channels = channels
        self._controls = controls
        self._journal = journal
        self._on_output = on_output
        self._announced = False
        self._frames: list[bytes] = []
        # Number of unsent bytes: in `_frames`, in promises, and in frames behind promises.
        self.unsent = 0
        # Promises that wait for the disk, in order. The keys are channel numbers.
        self.promises: dict[int, deque[Promise]] = {}
        # Channels whose confirms are due. `take` adds these confirms to the frames.
        self._confirming: dict[_Channel, None] = {}
        self._is_writable = True
        self._delivery_bytes = 0
        self.takes_deliveries = True
        # Time of the last `take` that returned data, or of the last heartbeat.
        self.last_sent = now
        # Number of bytes that `take` has returned so far.
        self.sent = 0

    def write(self, data: bytes) -> None:
        """Append whole frames of one channel. The frames are sent after the promises of that channel."""
        self.unsent += len(data)
        if self.promises and self._put_behind(data):
            return
        self._frames.append(data)
        if not self._announced:
            self.announce()

    def write_past_promises(self, data: bytes) -> None:
        """Append whole frames that do not wait for the promises of their channel.

        Only Channel.Flow is written in this way. It must not wait for the disk, because the grace time (`flow_grace`,
        D8) starts when the channel is blocked. The server writes to connections in the order of their last `on_output`,
        so clients get Channel.Flow in the order of blocking (F4).
        """
        self.unsent += len(data)
        self._frames.append(data)
        self._announced = True
        self._on_output()

    def deliver(self, data: bytes) -> None:
        """Append the frames of a delivery. If too many deliveries are unsent, stop further deliveries."""
        self._delivery_bytes += len(data)
        if self._delivery_bytes > self.MAX_DELIVERY_BYTES:
            self.takes_deliveries = False
        self.write(data)

    def has_confirms(self, channel: _Channel) -> None:
        """Record that confirms of a channel are due. `take` adds them to the other frames."""
        self._confirming[channel] = None
        self.announce()

    def forget(self, channel: _Channel) -> None:
        """Forget a closed channel, and the confirms that it has not sent."""
        self._confirming.pop(channel, None)

    def announce(self) -> None:
        """Call `on_output`, unless it was called since the last `take`."""
        if not self._announced:
            self._announced = True
            self._on_output()

    def _put_behind(self, data: bytes) -> bool:
        """Append frames to the last promise of their channel. Return False if the channel has no promise."""
        promises = self.promises.get(int.from_bytes(data[1:3], "big"))
        if promises is None:
            return False
        promises[-1].behind.append(data)
        return True

    def write_when_durable(self, data: bytes, *, topology_only: bool = True) -> None:
        """Append whole frames. The frames are sent when the changes that they report are on disk.

        With `topology_only` the frames wait only for changes of queues, exchanges and bindings.
        """
        journal = self._journal
        if journal is not None:
            number = int.from_bytes(data[1:3], "big")
            promise = Promise(self, number, len(data))
            if journal.when_durable(lambda: promise.keep(data), topology_only=topology_only):
                self._wait_for(promise, number)
                return
        self.write(data)

    def promise(self, number: int, size: int = 0) -> Promise:
        """Append a promise of about `size` bytes of frames. The caller later calls `Promise.keep` with the frames."""
        promise = Promise(self, number, size)
        self._wait_for(promise, number)
        return promise

    def _wait_for(self, promise: Promise, number: int) -> None:
        self.unsent += promise.size
        self.promises.setdefault(number, deque()).append(promise)
        channel = self._channels.get(number)
        if channel is not None:
            channel.consuming.wait_for_disk(True)

    def promise_kept(self, number: int, more: int) -> None:
        """Record that a promise has its frames. `take` returns a channel's frames up to a promise without frames.

        `more` is the size of the promised frames in bytes, minus `Promise.size`.
        """
        self.unsent += more
        promises = self.promises.get(number)
        if promises is None:
            # `lost` was called.
            return
        while promises and (data := promises[0].data) is not None:
            self._frames += (data, *promises.popleft().behind)
        if not promises:
            del self.promises[number]
        if self._frames:
            self.announce()
        channel = self._channels.get(number)
        if channel is not None and not promises:
            channel.consuming.wait_for_disk(False)

    def take(self, now: float) -> bytes:
        """Remove and return the bytes to send now."""
        self._announced = False
        if self._confirming and not self._controls.withhold_confirms:
            for channel in self._confirming:
                if not channel.is_closing and channel.confirms is not None:
                    confirms = channel.confirms.flush()
                    self.unsent += len(confirms)
                    if not (self.promises and self._put_behind(confirms)):
                        self._frames.append(confirms)
            self._confirming.clear()
        frames = self._frames
        if not frames:
            return b""
        data = b"".join(frames) if len(frames) > 1 else frames[0]
        frames.clear()
        self.unsent -= len(data)
        self._delivery_bytes = 0
        self.last_sent = now
        self.sent += len(data)
        return data

    def taken(self) -> None:
        """Record that the transport has the bytes of `take`. If its buffer is not full, deliver messages again."""
        if not self.takes_deliveries and self._is_writable:
            self._take_deliveries_again()

    def pause(self) -> None:
        """Stop deliveries, because the transport's buffer is full."""
        self._is_writable = False
        self.takes_deliveries = False

    def resume(self) -> None:
        """Start deliveries again, because the transport's buffer has drained."""
        self._is_writable = True
        self._take_deliveries_again()

    def _take_deliveries_again(self) -> None:
        self.takes_deliveries = self._delivery_bytes <= self.MAX_DELIVERY_BYTES
        for channel in tuple(self._channels.values()):
            if self.takes_deliveries and channel.consuming.consumers:
                channel.consuming.wake()

    def lost(self) -> None:
        """Drop the references to other objects, because the socket is closed."""
        self._on_output = lambda: None
        self._confirming.clear()
        self.promises.clear()

    @property
    def memory(self) -> int:
        """Bytes of the frames that wait for `take`, and of the frames behind promises."""
        behind = (promise.behind for promises in self.promises.values() for promise in promises)
        return sum(len(data) for part in (self._frames, *behind) for data in part)
