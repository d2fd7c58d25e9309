"""`Queue` is one queue, sans-I/O: enqueueing, delivery, limits and timers. Channels and the virtual host call `Queue`.

A message is ready, unacked (delivered), leaving, or gone; `contents.py` has the entries and their order.

A queue is watched (`Queue.is_watched`) if a published message needs more than an append. This is the case if the queue
has an overflow policy, refuses every message for an operator, or has any of the observers below. So every queue of a
broker with a journal is watched. `Queue.enqueue` delivers nothing. If any of a message's queues is watched, the message
enters all of them before a consumer gets it. If none of its queues is watched, each queue can deliver the message
before the message enters the next queue.

`Contents.observers` has the observers of the entries, which are called in this order:

1. `Storage`, for the journal, the pager and the droppable entries (see `storage.py`)
2. `Expiry`, if the queue or a message has a time to live
3. `QueueFlows`, for the flow states and the flow log
4. `LastValueMap`, if the overflow policy keeps only the last entry of each key
5. `WithheldConfirms`, if an operator withholds the confirms of the queue
6. `_Vacancies`, if messages wait for room

If many entries have to leave, they leave in slices, see `contents.py`. Each call of `Queue.tick` drops one slice of
expired entries, and one slice of entries beyond the maximum. Until both are gone, the queue delivers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from qflow_client.broker.core.confirms import WithheldConfirms
from qflow_client.broker.core.contents import Contents, EntryObserver
from qflow_client.broker.core.dispatcher import Dispatcher
from qflow_client.broker.core.dropping import Dropping, drops_each
from qflow_client.broker.core.entries import (
    BodyPager,
    Completion,
    Consumer,
    DroppableEntries,
    DropReason,
    QueueEntry,
    StoredMessage,
)
from qflow_client.broker.core.expiry import Expiry
from qflow_client.broker.core.limits import QueueLimits, QueueOptions, QueueRule
from qflow_client.broker.core.overflow import Overflow
from qflow_client.broker.core.ports import FlowObserver, Journal
from qflow_client.broker.core.queueflow import FlowOptions, QueueFlows
from qflow_client.broker.core.storage import Storage
from qflow_client.broker.core.timers import Slices
from qflow_client.broker.core.wire import HAS_EXPIRATION
from qflow_client.flow import FlowSource, Thresholds

__all__ = ["Queue", "Surroundings"]

_NO_OPTIONS = QueueOptions()
_NO_FLOW_OPTIONS = FlowOptions()
_DROPS = Contents.AT_ONCE


class Surroundings(Protocol):
    """The part of the virtual host that a queue calls."""

    @property
    def window(self) -> int:
        """The maximum body bytes that each queue may read ahead (A3)."""

    def clock(self) -> float:
        """Return monotonic seconds."""

    def wake_at(self, queue: Queue, at: float) -> None:
        """Call `Queue.tick` at the time `at`."""

    def run(self, work: Iterator[None]) -> None:
        """Do work in slices, see `Slices.run`."""

    def died(self, queue: Queue, message: StoredMessage, reason: DropReason) -> None:
        """Dead-letter a message that a queue with a dead-letter exchange has dropped or refused."""

    def note_surplus(self, queue: Queue, on: bool) -> None:
        """Record whether a queue exceeds its maximum, so that `Queue.tick` has to drop more messages."""

    def unused(self, queue: Queue) -> None:
        """Delete the queue, because it was unused for the time in its argument ``x-expires``."""

    def admit_waiting(self, queue: Queue, now: float) -> None:
        """Admit waiting messages for which a queue now has room. Refuse messages that have waited too long."""


class _Vacancies(EntryObserver):
    """Wakes the queue when a message has left it, so that the queue checks the messages that wait for room."""

    __slots__ = ("_wake",)

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def left(self, entry: QueueEntry, reason: DropReason | None) -> None:
        self._wake()


class Queue:
    """A queue.

    Args:
        limits: thresholds and maximum.
        options: settings of the queue that never change.
        rule: computes the limits; ``None`` if `limits` never change.
        exclusive_owner: the only connection that may use the queue; ``None`` if all connections may use it.
        flow_options: which channels the queue blocks, and how these channels are unblocked.
        observer: observes the flow control of the queue; ``None`` if there is none.
        journal: counts the messages of the queue, and records them for the disk; ``None`` if there is none.
        number: number of the queue in the message store; 0 if the queue does not survive a restart.
    """

    __slots__ = (
        "_clock",
        "_has_ended",
        "_observer",
        "_surroundings",
        "_tick_at",
        "_used_at",
        "_withheld",
        "arguments",
        "auto_delete",
        "contents",
        "dispatcher",
        "dropping",
        "durable",
        "exclusive_owner",
        "flows",
        "has_line",
        "is_deleted",
        "is_refusing",
        "is_watched",
        "limits",
        "may_refuse",
        "name",
        "number",
        "options",
        "overflow",
        "rule",
        "storage",
        "waiting",
    )

    def __init__(
        self,
        name: str,
        limits: QueueLimits,
        surroundings: Surroundings,
        *,
        options: QueueOptions = _NO_OPTIONS,
        rule: QueueRule | None = None,
        durable: bool = False,
        exclusive_owner: object | None = None,
        auto_delete: bool = False,
        arguments: dict[str, object] | None = None,
        flow_options: FlowOptions = _NO_FLOW_OPTIONS,
        observer: FlowObserver | None = None,
        journal: Journal | None = None,
        number: int = 0,
    ) -> None:
        self.name = name
        self.number = number
        self.limits = limits
        self.rule = rule
        self.options = options
        self.durable = durable
        self.exclusive_owner = exclusive_owner
        self.auto_delete = auto_delete
        self.arguments = arguments or {}
        self.is_deleted = False
        # Whether all messages have left the deleted queue.
        self._has_ended = False
        self._surroundings = surroundings
        self._observer = observer
        self._clock = surroundings.clock
        # Time of the next call of `tick`; infinite if there is none.
        self._tick_at = math.inf
        self.contents = contents = Contents()
        has_letters = options.dead_letter_exchange is not None
        self.storage: Storage | None = None
        if journal is not None:
            self.storage = Storage(journal, number, has_letters, contents, lambda: surroundings.window)
        self.dropping = Dropping(contents, partial(surroundings.died, self) if has_letters else None, self._tick_now)
        self.dispatcher = Dispatcher(
            contents, self.dropping, self.storage, single_active=options.single_active_consumer
        )
        self.flows = QueueFlows(
            self,
            limits,
            flow_options,
            self._clock,
            self._tick_by,
            observer=observer,
            on_overdue=self._choose_overflow,
            run=surroundings.run,
        )
        # Number of messages that wait for room in this queue.
        self.waiting = 0
        self.is_refusing = False
        self._withheld: WithheldConfirms | None = None
        # The overflow policy that applies now; None if the queue has no overflow policy.
        self.overflow: Overflow | None = None
        self.is_watched = False
        self.may_refuse = False
        self.has_line = False
        if options.message_ttl is not None:
            self._make_expiry()
        self._apply_limits()
        self._used_at = 0.0
        self.touch()

    # Limits.

    def _watch(self) -> None:
        """Update the fields that are checked for every message.

        If `is_watched` becomes true, the calling code has to increase `Router.version`, so that targets are resolved
        again. There are two exceptions. A queue that becomes overdue has flow thresholds, so it was watched before. A
        queue that gets its `Expiry` object does not need `Channel._publish_watched`, because `enqueue` always calls the
        observers, and `tick` drops the expired messages.
        """
        self.may_refuse = self.overflow is not None or self.is_refusing
        self.has_line = self.waiting > 0
        flows = self.flows if self.flows.families or self._observer is not None else None
        vacancies = _Vacancies(self._tick_now) if self.has_line else None
        found = self.storage, self.dropping.expiry, flows, self.contents.values, self._withheld, vacancies
        self.contents.observers = observers = tuple(each for each in found if each is not None)
        self.is_watched = bool(observers) or self.may_refuse

    def _choose_overflow(self) -> None:
        self.overflow = self.limits.overdue_overflow if self.flows.is_overdue else self.limits.overflow
        self._watch()

    def _apply_limits(self) -> None:
        overflow = self.limits.overflow
        self.contents.values = overflow.last_values() if overflow is not None else None
        self._choose_overflow()
        if self.storage is not None:
            self.storage.set_limits(self.limits)

    def change(self, limits: QueueLimits) -> None:
        """Apply new limits (D4 J6). A message leaves the queue only if the new overflow policy drops it."""
        if limits == self.limits:
            return
        self.limits = limits
        self.flows.set_limits(limits)
        self._apply_limits()
        values = self.contents.values
        if values is not None:
            for entry in tuple(self.contents.oldest_first()):
                self.contents.conflate(entry.message)
                values.entered(entry, None, None)
        self._trim(drops_each(Slices.AT_ONCE))
        # Check the thresholds after `_trim`, so that messages that `_trim` drops turn no flow state ON.
        self.flows.change_marks()
        self._watch()
        if self.waiting:
            self._tick_now()

    def _make_expiry(self) -> None:
        self.dropping.expiry = Expiry(self.options.message_ttl, self._clock, self._tick_by)
        self._watch()

    # Controls of the operator.

    def refuse(self, on: bool) -> None:
        """Refuse every message for an operator. With ``on=False``, accept messages again."""
        self.is_refusing = on
        self._watch()

    def withhold(self) -> None:
        """Withhold the confirms of later messages for an operator, until `release_withheld` is called."""
        if self._withheld is None:
            self._withheld = WithheldConfirms()
        self._watch()

    def release_withheld(self) -> None:
        """Release the confirms that were withheld for an operator."""
        withheld, self._withheld = self._withheld, None
        self._watch()
        if withheld is not None:
            withheld.release()

    # Enqueueing.

    def refusal(self, size: int, count: int = 1, largest: int | None = None, drops: int = _DROPS) -> str | None:
        """Return the reason why the queue refuses new messages now; ``None`` if it accepts all of them.

        Args:
            size: body bytes of all messages together.
            count: number of messages.
            largest: body bytes of the largest message; the default is `size`.
            drops: maximum number of expired messages that are dropped first.
        """
        if self.is_refusing:
            return f"queue '{self.name}' refuses every message now"
        if self.overflow is None:
            return None
        if self.dropping.expiry is not None:
            self.dropping.expire(drops)
        if self.contents.leaving:
            self.dropping.let_leave()
        return self.overflow.refusal(self, size, count, size if largest is None else largest)

    def turn_away(self, message: StoredMessage, *, can_nack: bool) -> bool:
        """Handle a message that this queue refuses. Return True if the message is dropped silently.

        If the result is False, the caller has to inform the publisher. `can_nack` is True in confirm mode.
        """
        overflow = self.overflow
        if overflow is None:
            return False
        if overflow.dead_letters_refused:
            self.dropping.dead_letter(message, DropReason.MAXLEN)
        if can_nack or not overflow.is_silent:
            return False
        self.contents.count_drop(DropReason.REFUSED)
        return True

    def enqueue(
        self,
        message: StoredMessage,
        source: FlowSource | None = None,
        completion: Completion | None = None,
        drops: int = _DROPS,
    ) -> None:
        """Add a message that was not refused, and then check the thresholds (J3 D2).

        Args:
            source: the publishing channel, which the queue can block; ``None`` if no channel can be blocked.
            completion: the confirm, which the queue can delay (C5); ``None`` if there is none.
            drops: maximum number of messages that are dropped now to make room. If this is too few, `tick` drops more.
        """
        contents = self.contents
        if self.overflow is not None:
            if contents.values is not None:
                contents.conflate(message)
            lacks_room = self.overflow.make_room(self, message.size, drops)
            if lacks_room or self.dropping.has_surplus:
                self._note_surplus(lacks_room)
        if message.header[12] & HAS_EXPIRATION and self.dropping.expiry is None:
            self._make_expiry()
        # Not a method of `Contents`, because the call takes 0.1 µs of about 5 µs for each message.
        contents.published = sequence = contents.published + 1
        contents.depth = depth = contents.depth + 1
        contents.size = size = contents.size + message.size
        if depth > contents.peak_depth:
            contents.peak_depth = depth
        if size > contents.peak_size:
            contents.peak_size = size
        entry = QueueEntry(self, message, sequence)
        contents.ready.append(entry)
        if contents.observers:
            for observer in contents.observers:
                observer.entered(entry, source, completion)

    def recover(self, message: StoredMessage, age: float) -> None:
        """Add a stored message that was enqueued `age` seconds ago. This delivers nothing and blocks no channel."""
        if message.header[12] & HAS_EXPIRATION and self.dropping.expiry is None:
            self._make_expiry()
        entry = self.contents.restore(self, message)
        # The store does not record deliveries, so the message may have been delivered before the broker stopped.
        entry.redelivered = True
        for observer in self.contents.observers:
            observer.recovered(entry, age)

    def after_publish(self, drops: int = _DROPS) -> None:
        """Deliver messages after an enqueue. Afterwards drop messages that exceed the maximum or have expired.

        At most `drops` messages of each kind are dropped now; `tick` drops the others soon.
        """
        if self.dispatcher.active:
            self.dispatcher.deliver()
        if self.dropping.expiry is not None:
            self.dropping.expire(drops)
        if self.overflow is not None and not self.dropping.has_surplus:
            self._trim(drops)

    # Delivery.

    def take(self, *, no_ack: bool) -> QueueEntry | None:
        self.touch()
        return self.dispatcher.take(no_ack=no_ack)

    def remove_consumer(self, consumer: Consumer) -> None:
        self.dispatcher.remove(consumer)
        self.touch()

    def trim(self, drops: int) -> None:
        """After a requeue, drop the messages beyond the maximum if `Overflow.counts_ready` is true.

        Other policies either count unacked messages too, so that a requeue adds nothing, or drop no messages. At most
        `drops` messages are dropped now; `tick` drops the others soon.
        """
        overflow = self.overflow
        if overflow is not None and overflow.counts_ready:
            self.dropping.expire(drops)
            if self.overflow is overflow:
                self._trim(drops)

    def _trim(self, drops: int) -> None:
        """Drop messages beyond the maximum, or evict bodies."""
        exceeds = self.overflow is not None and self.overflow.trim(self, drops)
        if exceeds or self.dropping.has_surplus:
            self._note_surplus(exceeds)

    def _note_surplus(self, on: bool) -> None:
        self.dropping.has_surplus = on
        self._surroundings.note_surplus(self, on)
        if on:
            self._tick_now()

    def purge(self) -> int:
        """Remove all ready entries, and return their number."""
        has_droppable = self.storage is not None and self.storage.droppable is not None
        is_kept = self.dropping.expiry is not None or self.contents.values is not None or has_droppable
        count = self.contents.purge(mark=is_kept)
        self.dropping.let_leave()
        return count

    def delete(self) -> int:
        """Remove all messages. Return how many were ready. The caller then runs `Dispatcher.cancel_all_in_steps`."""
        self.is_deleted = True
        self._note_surplus(False)
        self.contents.purge_unacked()
        count = self.purge()
        if self.storage is not None:
            self.storage.queue_deleted()
        self.release_withheld()
        self.flows.let_go()
        if self._observer is not None:
            self._observer.deleted(self)
            self._observer = self.flows.observer = None
        # Messages no longer wait for this queue.
        self._surroundings.admit_waiting(self, self._clock())
        # The `Target` of a publisher can keep the queue in memory for a while, but must not keep the connection too.
        self.exclusive_owner = None
        self._end_deletion()
        return count

    def _end_deletion(self) -> None:
        """If all entries have left, break the reference cycles, so that the garbage collector is not needed."""
        if not self.contents.leaving and not self._has_ended and self.dropping.end():
            self._has_ended = True
            self.contents.observers = ()
            self.flows.end()

    # Time.

    def note_waiting(self, until: float, change: int = 0) -> None:
        """Add `change` to the number of messages that wait for room, and call `tick` at the latest at `until`."""
        self.waiting += change
        self._tick_by(until)
        if not self._has_ended:
            self._watch()

    def touch(self) -> None:
        """Record a use of the queue: a declare, a get or the end of a consumer."""
        if self.options.expires is not None:
            self._used_at = self._clock()
            self._tick_by(self._used_at + self.options.expires)

    def _tick_by(self, at: float) -> None:
        if at < self._tick_at:
            self._tick_at = at
            self._surroundings.wake_at(self, at)

    def _tick_now(self) -> None:
        self._tick_by(self._clock())

    def tick(self, now: float) -> None:
        if now < self._tick_at:
            return
        self._tick_at = math.inf
        if self.contents.leaving:
            self.dropping.let_leave()
        if self.is_deleted:
            self._end_deletion()
            if self.waiting:
                self._surroundings.admit_waiting(self, now)
            return
        if self.dropping.has_surplus and not self.dispatcher.is_paused:
            try:
                self._trim(Contents.AT_ONCE)
            except BaseException:
                # `DeadLetters` must not wait for this queue.
                self._note_surplus(False)
                raise
        self.dispatcher.dispatch()
        if self.dropping.expiry is not None:
            self._tick_by(self.dropping.expiry.next_at)
        self.flows.tick(now)
        if self.waiting:
            self._surroundings.admit_waiting(self, now)
        expires = self.options.expires
        if expires is not None and not self.dispatcher.consumers:
            if now >= self._used_at + expires:
                self._surroundings.unused(self)
            else:
                self._tick_by(self._used_at + expires)

    # Members of `QueueView`, for policies and observers.

    @property
    def depth(self) -> int:
        """The number of messages: ready, unacked and leaving (D6)."""
        return self.contents.depth

    @property
    def size(self) -> int:
        """Body bytes of the messages: ready, unacked and leaving (D6)."""
        return self.contents.size

    @property
    def thresholds(self) -> tuple[Thresholds, ...]:
        return self.limits.thresholds

    @property
    def pager(self) -> BodyPager | None:
        return None if self.storage is None else self.storage.pager

    @property
    def droppable(self) -> DroppableEntries | None:
        return None if self.storage is None else self.storage.droppable
