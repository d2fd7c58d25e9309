"""Queues, sans-I/O: order, depth, thresholds, consumers, and what a message waits for before it is confirmed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from qflow_client.broker.arguments import QueueLimits
from qflow_client.broker.message import StoredMessage
from qflow_client.broker.settings import FlowScope
from qflow_client.flow import FlowController, FlowSource, ThresholdLimiter, Thresholds

__all__ = ["Completion", "Consumer", "Owner", "Queue", "QueueEntry", "QueueFlow"]


class Owner(Protocol):
    """Whom an exclusive queue belongs to."""

    @property
    def name(self) -> str:
        """For people."""


class Consumer(Protocol):
    """Who takes messages from a queue."""

    #: Whether the queue counts on it; kept by the queue.
    is_active: bool

    @property
    def no_ack(self) -> bool:
        """Whether a delivery settles the message."""

    @property
    def can_take(self) -> bool:
        """Whether it has credit, is not stopped, and its connection takes bytes."""

    def deliver(self, entry: QueueEntry) -> None:
        """Take a message; `can_take` was true."""

    def cancelled_by_queue(self) -> None:
        """Called when the queue is deleted under it."""


class Completion:
    """The confirm of one message, held back by the flow states that were ON when it was enqueued (C5).

    Args:
        tag: the publish sequence number on its channel.
        complete: called with the tag when the last hold is gone.
    """

    __slots__ = ("_armed", "_complete", "holds", "tag")

    def __init__(self, tag: int, complete: Callable[[int], None]) -> None:
        self.tag = tag
        self._complete = complete
        # How many flow states hold it.
        self.holds = 0
        # Set when every destination has the message; before, no number of holds means anything.
        self._armed = False

    def release(self) -> None:
        """One flow state has let it go."""
        self.holds -= 1
        if not self.holds and self._armed:
            self._complete(self.tag)

    def arm(self) -> bool:
        """All destinations have the message.

        Returns:
            True if nothing holds it.
        """
        self._armed = True
        return not self.holds


class QueueEntry:
    """A message in one queue."""

    __slots__ = ("completion", "is_gone", "is_unacked", "message", "queue", "redelivered", "sequence")

    def __init__(self, queue: Queue, message: StoredMessage, sequence: int) -> None:
        self.queue = queue
        self.message = message
        # Its place in the queue's order, kept when it is put back.
        self.sequence = sequence
        # Whether it was delivered before.
        self.redelivered = False
        # Whether it is with a consumer.
        self.is_unacked = False
        # Whether it has left the queue; an ack that comes later changes nothing.
        self.is_gone = False
        # What its dequeue releases; None unless its confirm is held.
        self.completion: Completion | None = None


class QueueFlow(FlowController):
    """One family of marks on a queue: flows the channels, and holds the confirms, of who publishes past them.

    Args:
        thresholds: the marks.
        name: of the queue.
    """

    __slots__ = ("depth", "held")

    def __init__(self, thresholds: Thresholds, name: str) -> None:
        self.depth = ThresholdLimiter(thresholds)
        super().__init__(self.depth, name=name)
        # Entries whose confirms wait for OFF, the oldest first (C5).
        self.held: dict[QueueEntry, Completion] = {}


class Queue:
    """A queue.

    Args:
        name: of the queue.
        limits: thresholds and maximum.
        durable: as declared.
        exclusive_owner: the connection that alone may use it.
        auto_delete: as declared.
        arguments: as declared.
        flow_scope: whom its marks flow (D12).
        recent: seconds for which a publisher counts as recent.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        limits: QueueLimits,
        *,
        durable: bool = False,
        exclusive_owner: Owner | None = None,
        auto_delete: bool = False,
        arguments: dict[str, object] | None = None,
        flow_scope: FlowScope = FlowScope.OFFENDER,
        recent: float = 10.0,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.limits = limits
        self.durable = durable
        self.exclusive_owner = exclusive_owner
        self.auto_delete = auto_delete
        self.arguments = arguments or {}
        # What keeps it within its maximum; the place to plug in another rule.
        self.policy = limits.full_policy
        # One controller for each family of marks.
        self.flows = tuple(QueueFlow(thresholds, name) for thresholds in limits.thresholds)
        # What an operator has set: every message is refused; confirms are kept here until told otherwise, None if not.
        self.is_refusing = False
        self.withheld: list[Completion] | None = None
        # Whether messages here can have their confirms held.
        self.holds_completions = bool(self.flows) and limits.enforcement.delays_completion
        self._flows_channels = limits.enforcement.flows_channels
        # When each channel published here last; only kept if everyone is to be told (D12).
        self._publishers: dict[FlowSource, float] | None = (
            {} if self.flows and self._flows_channels and flow_scope is FlowScope.PUBLISHERS else None
        )
        self._recent = recent
        self._clock = clock
        # Entries to be delivered, by sequence.
        self.ready: deque[QueueEntry] = deque()
        # Entries with consumers, in the order of delivery.
        self.unacked: dict[QueueEntry, None] = {}
        # Ready and unacked together, in messages and body bytes (D6).
        self.depth = 0
        self.size = 0
        self.peak_depth = 0
        self.peak_size = 0
        self._sequence = 0
        # Messages so far: enqueued, given to consumers, settled by them, dropped for want of room.
        self.published = 0
        self.delivered = 0
        self.acked = 0
        self.dropped = 0
        # All consumers, and those of them that can take something, whose turn it is first.
        self.consumers: dict[Consumer, None] = {}
        self.active: deque[Consumer] = deque()
        # The consumer that asked to be the only one.
        self.exclusive_consumer: Consumer | None = None
        # Whether it ever had a consumer, without which auto-delete does nothing.
        self.was_consumed = False
        self.is_deleted = False

    # What goes in.

    @property
    def is_watched(self) -> bool:
        """Whether publishing here needs more than an append."""
        return bool(self.flows) or self.policy is not None or self.is_refusing or self.withheld is not None

    def refusal(self, size: int, count: int = 1, largest: int | None = None) -> str | None:
        """Why messages may not enter now; ``None`` if they may.

        Args:
            size: body bytes of all of them.
            count: how many.
            largest: body bytes of the largest; `size` unless given.
        """
        if self.is_refusing:
            return f"queue '{self.name}' refuses every message now"
        if self.policy is None:
            return None
        return self.policy.refusal(self, size, count, size if largest is None else largest)

    def enqueue(
        self, message: StoredMessage, source: FlowSource | None = None, completion: Completion | None = None
    ) -> None:
        """Take a message in, and check the marks afterwards (J3 D2). It was not refused. Delivers nothing yet.

        Args:
            message: what to take.
            source: the publishing channel, which may be flowed; ``None`` for one that cannot be.
            completion: its confirm, which may be held (C5); ``None`` if there is none.
        """
        size = message.size
        if self.policy is not None:
            self.policy.make_room(self, size)
        self._sequence += 1
        self.published += 1
        self.depth += 1
        self.size += size
        if self.depth > self.peak_depth:
            self.peak_depth = self.depth
        if self.size > self.peak_size:
            self.peak_size = self.size
        entry = QueueEntry(self, message, self._sequence)
        self.ready.append(entry)
        if completion is not None and self.withheld is not None:
            self.withheld.append(completion)
            completion.holds += 1
        if self.flows:
            self._check(entry, source, completion)

    def _check(self, entry: QueueEntry, source: FlowSource | None, completion: Completion | None) -> None:
        now = self._clock()
        size = entry.message.size
        if not self._flows_channels:
            source = None
        for flow in self.flows:
            was_on = flow.depth.on
            if source is None:
                flow.depth.add(size, now)
            else:
                flow.offer(source, size, now)
            if not flow.depth.on:
                continue
            if completion is not None and self.holds_completions:
                flow.held[entry] = completion
                completion.holds += 1
                entry.completion = completion
            if not was_on and self._publishers is not None:
                self._tell_recent(flow, now)
        if self._publishers is not None and source is not None:
            self._publishers.pop(source, None)
            self._publishers[source] = now

    def _tell_recent(self, flow: QueueFlow, now: float) -> None:
        assert self._publishers is not None
        for source, when in tuple(self._publishers.items()):
            if now - when > self._recent:
                del self._publishers[source]
            else:
                flow.block(source)

    # What goes out.

    def _shrink(self, entry: QueueEntry) -> None:
        """Take note that an entry has left, however it did (J6)."""
        entry.is_gone = True
        size = entry.message.size
        self.depth -= 1
        self.size -= size
        for flow in self.flows:
            if entry.completion is not None and flow.held.pop(entry, None) is not None:
                entry.completion.release()
            flow.release(size)
            if flow.held and not flow.depth.on:
                self._release_held(flow)

    def release_withheld(self) -> None:
        """Let go of the confirms that an operator had withheld."""
        withheld, self.withheld = self.withheld, None
        for completion in withheld or ():
            completion.release()

    @staticmethod
    def _release_held(flow: QueueFlow) -> None:
        held, flow.held = flow.held, {}
        for completion in held.values():
            completion.release()

    def dispatch(self) -> None:
        """Deliver what can be delivered, to each consumer in turn."""
        ready, active = self.ready, self.active
        while ready and active:
            consumer = active[0]
            if not consumer.can_take:
                active.popleft()
                consumer.is_active = False
                continue
            if len(active) > 1:
                active.rotate(-1)
            entry = ready.popleft()
            self._hand_over(entry, no_ack=consumer.no_ack, give=consumer.deliver)

    def _hand_over(self, entry: QueueEntry, *, no_ack: bool, give: Callable[[QueueEntry], None]) -> None:
        self.delivered += 1
        if not no_ack:
            entry.is_unacked = True
            self.unacked[entry] = None
        give(entry)
        if no_ack:
            self._shrink(entry)

    def take(self, *, no_ack: bool) -> QueueEntry | None:
        """Take the next ready entry, as ``Basic.Get`` does; with `no_ack` it has left the queue."""
        if not self.ready:
            return None
        entry = self.ready.popleft()
        self._hand_over(entry, no_ack=no_ack, give=lambda _: None)
        return entry

    def settle(self, entry: QueueEntry, *, acked: bool) -> None:
        """A delivered entry was acked, or rejected for good."""
        if entry.is_gone:
            return
        del self.unacked[entry]
        if acked:
            self.acked += 1
        else:
            self.dropped += 1
        self._shrink(entry)

    def requeue(self, entries: Iterable[QueueEntry]) -> None:
        """Put delivered entries back in their places. Delivers nothing yet."""
        back = sorted((entry for entry in entries if not entry.is_gone), key=_sequence, reverse=True)
        ready = self.ready
        behind: list[QueueEntry] = []
        for entry in back:
            del self.unacked[entry]
            entry.is_unacked = False
            entry.redelivered = True
        for entry in reversed(back):
            while ready and ready[0].sequence < entry.sequence:
                behind.append(ready.popleft())
            behind.append(entry)
        ready.extendleft(reversed(behind))

    def oldest_first(self) -> Iterator[QueueEntry]:
        """All entries, ready and unacked, in the queue's order."""
        if not self.unacked:
            return iter(tuple(self.ready))
        return iter(sorted((*self.unacked, *self.ready), key=_sequence))

    def drop_oldest(self) -> None:
        """Drop the oldest entry, even one that a consumer has. The queue must not be empty."""
        entry = self.ready[0] if self.ready else None
        if self.unacked:
            oldest = min(self.unacked, key=_sequence)
            if entry is None or oldest.sequence < entry.sequence:
                entry = oldest
        assert entry is not None
        if entry.is_unacked:
            del self.unacked[entry]
        else:
            self.ready.popleft()
        self.dropped += 1
        self._shrink(entry)

    def purge(self) -> int:
        """Remove all ready entries.

        Returns:
            How many there were.
        """
        entries = tuple(self.ready)
        self.ready.clear()
        for entry in entries:
            self._shrink(entry)
        return len(entries)

    def delete(self) -> int:
        """Remove everything; consumers are told.

        Returns:
            How many entries were ready.
        """
        self.is_deleted = True
        count = self.purge()
        self.release_withheld()
        for entry in tuple(self.unacked):
            del self.unacked[entry]
            self._shrink(entry)
        consumers = tuple(self.consumers)
        self.consumers.clear()
        self.active.clear()
        for consumer in consumers:
            consumer.cancelled_by_queue()
        return count

    # Who takes it out.

    def add_consumer(self, consumer: Consumer, *, exclusive: bool) -> None:
        """Let a consumer take part. Delivers nothing yet."""
        self.consumers[consumer] = None
        self.was_consumed = True
        if exclusive:
            self.exclusive_consumer = consumer
        self.wake(consumer)

    def wake(self, consumer: Consumer) -> None:
        """A consumer may be able to take something again."""
        if not consumer.is_active and consumer in self.consumers:
            consumer.is_active = True
            self.active.append(consumer)

    def remove_consumer(self, consumer: Consumer) -> None:
        """A consumer is gone. What it has not settled stays unacked."""
        self.consumers.pop(consumer, None)
        if consumer.is_active:
            consumer.is_active = False
            self.active.remove(consumer)
        if self.exclusive_consumer is consumer:
            self.exclusive_consumer = None

    def forget_source(self, source: FlowSource) -> None:
        """A publishing channel is gone."""
        if self._publishers is not None:
            self._publishers.pop(source, None)

    # What is seen of it.

    @property
    def flow_stopped(self) -> bool:
        """Whether any family of marks is ON (C7)."""
        return any(flow.depth.on for flow in self.flows)

    @property
    def flow_stopped_count(self) -> int:
        """How often a family went from OFF to ON (C7)."""
        return sum(flow.depth.times_on for flow in self.flows)

    @property
    def blocked(self) -> tuple[FlowSource, ...]:
        """The channels that it flows, the oldest first."""
        return tuple(dict.fromkeys(source for flow in self.flows for source in flow.blocked))

    @property
    def held_confirms(self) -> int:
        """Messages whose confirms it holds back (C5)."""
        return len({entry for flow in self.flows for entry in flow.held})


def _sequence(entry: QueueEntry) -> int:
    return entry.sequence
