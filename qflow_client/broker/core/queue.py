"""Queues, sans-I/O: what enters, what is delivered, what is in force, and when anything is due.

A message is ready, unacked (with a consumer), about to leave, or gone; `contents.py` has the entries and their order.
`Queue.enqueue` delivers nothing. If any of a message's queues is watched, it enters all of them before a consumer gets
it; else each queue delivers it before the next has it.

The queue drives what is plugged into it. The overflow policy is asked before a message enters, and changes the queue
only through `QueueView`. What follows the entries is in `Contents.observers`, in this order: the storage (the journal,
the pager and droppable entries), the expiry, the flow states, the last values of a conflating queue, the confirms that
an operator withholds, and what wakes publishes that wait for room. `Queue.is_watched` is False if there is none of
these and nothing refuses messages: the common case pays for nothing.

Very many entries do not leave in one go, see `contents.py`. As many expire in each tick, and the queue delivers nothing
until all have that are due.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

from qflow_client.broker.core.confirms import WithheldConfirms
from qflow_client.broker.core.contents import Contents, EntryObserver
from qflow_client.broker.core.dispatcher import Dispatcher
from qflow_client.broker.core.dropping import Dropping
from qflow_client.broker.core.entries import (
    BodyPager,
    Completion,
    Consumer,
    DroppableEntries,
    DropReason,
    Owner,
    QueueEntry,
    StoredMessage,
)
from qflow_client.broker.core.expiry import Expiry
from qflow_client.broker.core.limits import QueueLimits, QueueOptions, QueueRule
from qflow_client.broker.core.overflow import Overflow
from qflow_client.broker.core.ports import FlowObserver, Journal
from qflow_client.broker.core.queueflow import FlowOptions, QueueFlows
from qflow_client.broker.core.storage import Storage
from qflow_client.broker.core.wire import HAS_EXPIRATION
from qflow_client.flow import FlowSource, Thresholds

__all__ = ["Queue", "Surroundings"]

_NO_OPTIONS = QueueOptions()
_NO_FLOW_OPTIONS = FlowOptions()


class Surroundings(Protocol):
    """What a queue needs around it: the virtual host."""

    @property
    def window(self) -> int:
        """Bytes of bodies that each queue may read ahead (A3)."""

    def clock(self) -> float:
        """Monotonic seconds."""

    def wake_at(self, queue: Queue, at: float) -> None:
        """Call `Queue.tick` at that time."""

    def died(self, queue: Queue, message: StoredMessage, reason: DropReason) -> None:
        """A message was dropped, and the queue has a dead-letter exchange."""

    def unused(self, queue: Queue) -> None:
        """The queue was not used for as long as it may be."""

    def admit_waiting(self, queue: Queue, now: float) -> None:
        """There may be room for publishes that wait, or the time of some is over."""


class _Vacancies(EntryObserver):
    """Has the publishes looked at that wait for room, when a message has left."""

    __slots__ = ("_wake",)

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def left(self, entry: QueueEntry, reason: DropReason | None) -> None:
        self._wake()


class Queue:
    """A queue.

    Args:
        name: of the queue.
        limits: thresholds and maximum.
        surroundings: what it needs around it.
        options: what does not change while it is there.
        rule: decides what is in force; ``None`` if `limits` stay in force.
        durable: as declared.
        exclusive_owner: the connection that alone may use it.
        auto_delete: as declared.
        arguments: as declared.
        flow_options: which channels its marks flow, and how they are let go.
        observer: sees what comes, goes and is held; ``None`` if there is none.
        journal: counts the messages in it, and writes them; ``None`` if there is none.
        number: of the queue in the message store, if it and its persistent messages are to survive the broker; else 0.
    """

    __slots__ = (
        "_clock",
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
        exclusive_owner: Owner | None = None,
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
        self._surroundings = surroundings
        self._observer = observer
        self._clock = surroundings.clock
        # When `tick` is to be called.
        self._tick_at = math.inf
        self.contents = contents = Contents()
        has_letters = options.dead_letter_exchange is not None
        # None if there is no journal.
        self.storage: Storage | None = None
        if journal is not None:
            self.storage = Storage(journal, number, has_letters, contents, lambda: surroundings.window)
        self.dropping = Dropping(contents, partial(surroundings.died, self) if has_letters else None, self._tick_now)
        self.dispatcher = Dispatcher(
            contents, self.dropping, self.storage, single_active=options.single_active_consumer
        )
        self.flows = QueueFlows(
            self, limits, flow_options, self._clock, self._tick_by, observer=observer, on_overdue=self._choose_overflow
        )
        # How many publishes wait for room here.
        self.waiting = 0
        # What an operator has set: every message is refused; confirms are kept here until released, None if not.
        self.is_refusing = False
        self._withheld: WithheldConfirms | None = None
        # What keeps it within its maximum now; None if nothing does.
        self.overflow: Overflow | None = None
        # Whether publishing here needs more than an append, whether it may be refused, and whether others wait.
        self.is_watched = self.may_refuse = self.has_line = False
        if options.message_ttl is not None:
            self._make_expiry()
        self._put_in_force()
        # When it was last used: declared, got from, or consumed.
        self._used_at = 0.0
        self.touch()

    # What is in force.

    def _watch(self) -> None:
        """Bring up to date what is looked at for every message."""
        self.may_refuse = self.overflow is not None or self.is_refusing
        self.has_line = self.waiting > 0
        flows = self.flows if self.flows.families or self._observer is not None else None
        vacancies = _Vacancies(self._tick_now) if self.has_line else None
        found = self.storage, self.dropping.expiry, flows, self.contents.values, self._withheld, vacancies
        self.contents.observers = observers = tuple(each for each in found if each is not None)
        self.is_watched = bool(observers) or self.may_refuse

    def _choose_overflow(self) -> None:
        self.overflow = self.limits.then if self.flows.is_overdue else self.limits.overflow
        self._watch()

    def _put_in_force(self) -> None:
        overflow = self.limits.overflow
        self.contents.values = overflow.last_values() if overflow is not None else None
        self._choose_overflow()
        if self.storage is not None:
            self.storage.put_in_force(self.limits)

    def change(self, limits: QueueLimits) -> None:
        """Put other thresholds, another maximum or another policy in force; what is in the queue stays (D4, J6).

        Args:
            limits: what is in force from now on.
        """
        if limits == self.limits:
            return
        self.limits = limits
        self.flows.put_in_force(limits)
        self._put_in_force()
        values = self.contents.values
        if values is not None:
            for entry in tuple(self.contents.oldest_first()):
                self.contents.conflate(entry.message)
                values.entered(entry, None, None)
        if self.overflow is not None:
            self.overflow.trim(self)
        self.flows.change_marks()
        self._watch()
        if self.waiting:
            self._tick_now()

    def _make_expiry(self) -> None:
        self.dropping.expiry = Expiry(self.options.message_ttl, self._clock, self._tick_by)
        self._watch()

    # What an operator sets.

    def refuse(self, on: bool) -> None:
        """Refuse every message, in the name of an operator, or no longer."""
        self.is_refusing = on
        self._watch()

    def withhold(self) -> None:
        """Keep confirms back, in the name of an operator, until `release_withheld`."""
        if self._withheld is None:
            self._withheld = WithheldConfirms()
        self._watch()

    def release_withheld(self) -> None:
        """Let go of the confirms that an operator had withheld."""
        withheld, self._withheld = self._withheld, None
        self._watch()
        if withheld is not None:
            withheld.release()

    # What goes in.

    def refusal(self, size: int, count: int = 1, largest: int | None = None) -> str | None:
        """Why messages may not enter now; ``None`` if they may.

        Args:
            size: body bytes of all of them.
            count: how many.
            largest: body bytes of the largest; `size` unless given.
        """
        if self.is_refusing:
            return f"queue '{self.name}' refuses every message now"
        if self.overflow is None:
            return None
        if self.dropping.expiry is not None:
            self.dropping.expire()
        if self.contents.leaving:
            self.dropping.let_leave()
        return self.overflow.refusal(self, size, count, size if largest is None else largest)

    def turn_away(self, message: StoredMessage, *, is_told: bool) -> bool:
        """A message is refused here.

        Args:
            message: which is refused.
            is_told: whether the publisher can be told without a close of its channel.

        Returns:
            Whether that is all that is to be done about it.
        """
        overflow = self.overflow
        if overflow is None:
            return False
        if overflow.dead_letters_refused:
            self.dropping.dead_letter(message, DropReason.MAXLEN)
        if is_told or not overflow.is_silent:
            return False
        self.contents.count_drop(DropReason.REFUSED)
        return True

    def enqueue(
        self, message: StoredMessage, source: FlowSource | None = None, completion: Completion | None = None
    ) -> None:
        """Take a message in, and check the marks afterwards (J3 D2). It was not refused. Delivers nothing yet.

        Args:
            message: what to take.
            source: the publishing channel, which may be flowed; ``None`` for one that cannot be.
            completion: its confirm, which may be held (C5); ``None`` if there is none.
        """
        contents = self.contents
        if self.overflow is not None:
            if contents.values is not None:
                contents.conflate(message)
            self.overflow.make_room(self, message.size)
        if message.header[12] & HAS_EXPIRATION and self.dropping.expiry is None:
            self._make_expiry()
        # `Contents.append`, written out: the call is 0.1 µs of 5 that a message takes here.
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
        """Take back a message that was in it when the broker ended. Delivers nothing yet, and flows no channel.

        Args:
            message: which the store knows already.
            age: seconds that it has been there.
        """
        if message.header[12] & HAS_EXPIRATION and self.dropping.expiry is None:
            self._make_expiry()
        entry = self.contents.append(self, message)
        # It may have been.
        entry.redelivered = True
        for observer in self.contents.observers:
            observer.recovered(entry, age)

    def after_publish(self) -> None:
        """Deliver what can be delivered after an enqueue, and drop what then is too much, or may not wait."""
        if self.dispatcher.active:
            self.dispatcher.deliver()
        if self.dropping.expiry is not None:
            self.dropping.expire()
        if self.overflow is not None:
            self.overflow.trim(self)

    # What goes out.

    def take(self, *, no_ack: bool) -> QueueEntry | None:
        """Take the next ready entry, as ``Basic.Get`` does; with `no_ack` it has left the queue."""
        self.touch()
        return self.dispatcher.take(no_ack=no_ack)

    def remove_consumer(self, consumer: Consumer) -> None:
        """A consumer is gone, see `Dispatcher.remove`."""
        self.dispatcher.remove(consumer)
        self.touch()

    def trim(self) -> None:
        """After a requeue, drop what is beyond the maximum, if the overflow policy counts ready messages only.

        Other policies count a message also while it is with a consumer, so a requeue adds nothing.
        """
        overflow = self.overflow
        if overflow is not None and overflow.counts_ready:
            self.dropping.expire()
            if self.overflow is overflow:
                overflow.trim(self)

    def purge(self) -> int:
        """Remove all ready entries.

        Returns:
            How many there were.
        """
        has_droppable = self.storage is not None and self.storage.droppable is not None
        is_kept = self.dropping.expiry is not None or self.contents.values is not None or has_droppable
        count = self.contents.purge(mark=is_kept)
        self.dropping.let_leave()
        return count

    def delete(self) -> int:
        """Remove all messages. `Dispatcher.cancel_all` is to follow.

        Returns:
            The number of messages that were ready.
        """
        self.is_deleted = True
        count = self.purge()
        self.release_withheld()
        if self.contents.unacked:
            self.contents.purge_unacked()
            self.dropping.let_leave()
        if self.number or self._observer is not None:
            # The store and the flow log know nothing of it from now on.
            self.contents.let_leave(len(self.contents.leaving))
        if self.storage is not None:
            self.storage.queue_deleted()
        self.flows.let_go()
        if self._observer is not None:
            self._observer.deleted(self)
        # Publishes that wait for it go on without it.
        self._surroundings.admit_waiting(self, self._clock())
        # A publisher may keep the queue alive for a while; the connection that owned it is not kept with it.
        self.exclusive_owner = None
        self._end_parts()
        return count

    def _end_parts(self) -> None:
        """If all entries have left, let nothing of it refer to itself any more: it need not wait to be collected."""
        if not self.contents.leaving:
            self.contents.observers = ()
            self.dropping.end()
            self.flows.end()

    # Time.

    def wait(self, until: float, change: int = 0) -> None:
        """Look at the publishes that wait for room here at that time at the latest.

        Args:
            until: seconds of the clock.
            change: how many more of them there are; -1 for one that waits no longer.
        """
        self.waiting += change
        self._tick_by(until)
        self._watch()

    def touch(self) -> None:
        """Take note that it is used: declared, got from, or no longer consumed."""
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
        """Do what was to be done by now.

        Args:
            now: seconds of the clock.
        """
        if now < self._tick_at:
            return
        self._tick_at = math.inf
        if self.contents.leaving:
            self.dropping.let_leave()
            if self.is_deleted:
                self._end_parts()
        if self.is_deleted:
            return
        if self.dropping.expiry is not None:
            self.dispatcher.dispatch()
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

    # What policies and observers see, see `QueueView`.

    @property
    def depth(self) -> int:
        """Messages, ready and unacked together (D6)."""
        return self.contents.depth

    @property
    def size(self) -> int:
        """Their body bytes."""
        return self.contents.size

    @property
    def thresholds(self) -> tuple[Thresholds, ...]:
        """The families of marks that are set."""
        return self.limits.thresholds

    @property
    def pager(self) -> BodyPager | None:
        """Decides which bodies stay in memory; ``None`` if all of them do."""
        return None if self.storage is None else self.storage.pager

    @property
    def droppable(self) -> DroppableEntries | None:
        """The entries that may be dropped for memory; ``None`` if none may."""
        return None if self.storage is None else self.storage.droppable
