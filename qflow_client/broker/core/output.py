"""What one connection has to send, sans-I/O: in which order, what waits for the disk, and when consumers are to wait.

It is a list of byte strings that `Output.take` joins once in each turn of the loop. An answer that must wait for the
disk is a `Promise`: what the same channel writes later waits behind it, and other channels do not. So the frames of a
channel are sent in the order in which they were written, but for ``Channel.Flow``, which waits for no promise. Channel
0 makes no promises.
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
        """By tag."""

    def wait_for_disk(self, on: bool) -> None:
        """The channel's answers wait for the disk, or no longer."""

    def wake(self) -> None:
        """Consumers may take something again."""


class _Channel(Protocol):
    @property
    def is_closing(self) -> bool:
        """Whether nothing is to be confirmed on it any more."""

    @property
    def confirms(self) -> Confirms | None:
        """Only in confirm mode."""

    @property
    def consuming(self) -> _Consuming:
        """What it delivers."""


class Promise:
    """Frames of a channel that are not there yet; what is written after them on this channel is sent after them.

    Args:
        output: of the connection.
        number: of the channel.
        size: about how many bytes they will have.
    """

    __slots__ = ("_number", "_output", "behind", "data", "size")

    def __init__(self, output: Output, number: int, size: int) -> None:
        self._output = output
        self._number = number
        self.size = size
        self.data: bytes | None = None
        # What was written after it, up to the next one.
        self.behind: list[bytes] = []

    def keep(self, data: bytes) -> None:
        """These are the frames, all that were promised."""
        self.data = data
        self._output.promise_kept(self._number, len(data) - self.size)


class Output:
    """What one connection has to send.

    Args:
        channels: of the connection, by number.
        controls: what an operator has set.
        journal: knows what is on disk; ``None`` if nothing is.
        now: monotonic seconds.
        on_output: called when there is something to send, once until `take`, and when that is to be sent after what
            others have been given meanwhile.
    """

    #: Bytes of deliveries that may wait to be sent; consumers get no more until they are.
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
        # Bytes that wait to be sent: in `_frames`, promised, and behind promises.
        self.unsent = 0
        # Channels with promises, which wait for the disk, in their order.
        self.promises: dict[int, deque[Promise]] = {}
        # Channels with confirms that are due.
        self._confirming: dict[_Channel, None] = {}
        # Whether the socket takes bytes, and whether there is little enough of deliveries waiting.
        self._is_writable = True
        self._delivery_bytes = 0
        self.takes_deliveries = True
        # Seconds of the clock when something last went; and bytes so far.
        self.last_sent = now
        self.sent = 0

    # Frames.

    def write(self, data: bytes) -> None:
        """Put whole frames of one channel into what is to be sent, behind the promises of that channel."""
        self.unsent += len(data)
        if self.promises and self._put_behind(data):
            return
        self._frames.append(data)
        if not self._announced:
            self._announce()

    def write_in_turn(self, data: bytes) -> None:
        """Put whole frames before all promises, to be sent after what other connections have to send by now.

        For what several race for (F4), and what is no answer to anything: a stop must not wait for the disk, because
        the time of grace (D8) runs.
        """
        self.unsent += len(data)
        self._frames.append(data)
        self._announce()

    def deliver(self, data: bytes) -> None:
        """Put a delivery into what is to be sent."""
        self._delivery_bytes += len(data)
        if self._delivery_bytes > self.MAX_DELIVERY_BYTES:
            self.takes_deliveries = False
        self.write(data)

    def has_confirms(self, channel: _Channel) -> None:
        """A channel has confirms that are due; they are sent with everything else."""
        self._confirming[channel] = None
        if not self._announced:
            self._announce()

    def forget(self, channel: _Channel) -> None:
        """A channel is closed: none of its confirms is due any more."""
        self._confirming.pop(channel, None)

    def announce_confirms(self) -> None:
        """Confirms may be sent again."""
        if self._confirming and not self._announced:
            self._announce()

    def announce_end(self) -> None:
        """Nothing more comes, which is announced like something to send."""
        if not self._announced:
            self._announce()

    def _announce(self) -> None:
        self._announced = True
        self._on_output()

    # What waits for the disk.

    def _put_behind(self, data: bytes) -> bool:
        """Put frames behind the promises of their channel, if it has any."""
        promises = self.promises.get(int.from_bytes(data[1:3], "big"))
        if promises is None:
            return False
        promises[-1].behind.append(data)
        return True

    def write_when_durable(self, data: bytes, *, topology_only: bool = True) -> None:
        """Put whole frames into what is to be sent, once that is on disk which they tell of.

        Args:
            data: the frames.
            topology_only: whether they tell of nothing but changes of queues, exchanges and bindings.
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
        """Put something into what is to be sent on a channel that is not there yet.

        Args:
            number: of the channel.
            size: about how many bytes it will have.
        """
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
        """What a channel has waited for can be sent, with what is behind it.

        Args:
            number: of the channel.
            more: bytes that it has beyond those that were expected.
        """
        self.unsent += more
        promises = self.promises.get(number)
        if promises is None:
            # The connection is over.
            return
        while promises and (data := promises[0].data) is not None:
            self._frames += (data, *promises.popleft().behind)
        if not promises:
            del self.promises[number]
        if self._frames and not self._announced:
            self._announce()
        channel = self._channels.get(number)
        if channel is not None and not promises:
            channel.consuming.wait_for_disk(False)

    # What is sent.

    def take(self, now: float) -> bytes:
        """What is to be sent now.

        Args:
            now: monotonic seconds.
        """
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
        """What `take` gave is with the transport; consumers may get more if it takes bytes."""
        if not self.takes_deliveries and self._is_writable:
            self._take_deliveries_again()

    def pause(self) -> None:
        """The transport's buffer is full: consumers get nothing until it has drained."""
        self._is_writable = False
        self.takes_deliveries = False

    def resume(self) -> None:
        """The transport's buffer has drained."""
        self._is_writable = True
        self._take_deliveries_again()

    def _take_deliveries_again(self) -> None:
        self.takes_deliveries = self._delivery_bytes <= self.MAX_DELIVERY_BYTES
        for channel in tuple(self._channels.values()):
            if self.takes_deliveries and channel.consuming.consumers:
                channel.consuming.wake()

    def lost(self) -> None:
        """The socket is gone. Nothing of the connection refers to itself any more."""
        self._on_output = _nobody
        self._confirming.clear()
        self.promises.clear()

    @property
    def memory(self) -> int:
        """Bytes that wait to be taken for sending, and are in memory."""
        behind = (promise.behind for promises in self.promises.values() for promise in promises)
        return sum(len(data) for part in (self._frames, *behind) for data in part)


def _nobody() -> None:
    """Called in place of the server when the socket is gone."""
