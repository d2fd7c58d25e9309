"""Queues, sans-I/O: order, depth, flow state, consumers, and what a message waits for before it is confirmed.

A message is ready, or unacked (with a consumer), or gone. `Queue.ready` has the ready entries in the order of their
sequence numbers, with some that are gone and are skipped later. Depth and size count ready and unacked entries together
(D6), and each flow state of the queue is offered every change of them, after the message is in (J3). `Queue.is_watched`
is False if a publish needs no more than an append: the common case pays for nothing else.

Very many entries do not leave in one go. Those that were purged, or were in a queue that is deleted, stand in
`_leaving`, and `Queue.AT_ONCE` of them leave in each tick. Until then they count in depth and size, for flow states and
in the account of memory, but no consumer gets them. As many expire in each tick, and the queue delivers nothing until
all have that are due.

A queue does not deliver while it enqueues: a message enters all of its queues before any consumer gets it. The queue
drives what is plugged into it: the overflow policy, the journal with pager and droppable entries, and the flow
observer. None of these changes the queue but through its methods.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

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
from qflow_client.broker.core.logs import get_logger
from qflow_client.broker.core.overflow import LastValueMap, Overflow
from qflow_client.broker.core.ports import FlowObserver, Journal
from qflow_client.broker.core.queueflow import QueueFlow, Turns
from qflow_client.broker.core.settings import FlowScope
from qflow_client.broker.core.wire import HAS_EXPIRATION
from qflow_client.flow import FlowSource, Thresholds

__all__ = ["Queue", "Surroundings"]


_log = get_logger(__name__)

_NO_OPTIONS = QueueOptions()


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
        flow_scope: which channels its marks flow (D12).
        recent: seconds for which a publisher counts as recent.
        resume_interval: seconds between two channels that it unflows (F4); 0 for none.
        observer: sees what comes, goes and is held; ``None`` if there is none.
        journal: counts the messages in it, and writes them; ``None`` if there is none.
        number: of the queue in the message store, if it and its persistent messages are to survive the broker; else 0.
    """

    #: So many entries may be gone and still be among the ready ones, even if they are most of them.
    MAX_GAPS = 64
    #: Entries that leave in one go.
    AT_ONCE = 1000

    __slots__ = (
        "_clock",
        "_delays_completion",
        "_expiry",
        "_flows_channels",
        "_gaps",
        "_holds",
        "_is_expiring",
        "_is_reading",
        "_leaving",
        "_letters",
        "_makes_room",
        "_observer",
        "_publishers",
        "_recent",
        "_surroundings",
        "_tick_at",
        "_times_on_before",
        "_turns",
        "_used_at",
        "_values",
        "acked",
        "active",
        "arguments",
        "auto_delete",
        "consumers",
        "delivered",
        "depth",
        "droppable",
        "drops",
        "durable",
        "exclusive_consumer",
        "exclusive_owner",
        "flows",
        "has_line",
        "is_deleted",
        "is_overdue",
        "is_refusing",
        "is_watched",
        "journal",
        "leaving_size",
        "limits",
        "may_refuse",
        "name",
        "number",
        "on_since",
        "options",
        "overflow",
        "pager",
        "peak_depth",
        "peak_size",
        "published",
        "ready",
        "rule",
        "size",
        "times_overdue",
        "unacked",
        "unacked_size",
        "waiting",
        "was_consumed",
        "withheld",
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
        flow_scope: FlowScope = FlowScope.OFFENDER,
        recent: float = 10.0,
        resume_interval: float = 0.0,
        observer: FlowObserver | None = None,
        journal: Journal | None = None,
        number: int = 0,
    ) -> None:
        self.name = name
        self.journal = journal
        self.number = number
        self.limits = limits
        self.rule = rule
        self.options = options
        self.durable = durable
        self.exclusive_owner = exclusive_owner
        self.auto_delete = auto_delete
        self.arguments = arguments or {}
        # What keeps it within its maximum now; None if nothing does.
        self.overflow: Overflow | None = limits.overflow
        # Which bodies are in memory; None unless it flows to disk (A2).
        self.pager: BodyPager | None = None
        # What may be dropped when memory is beyond its limit (A1); None if nothing may.
        self.droppable: DroppableEntries | None = None
        # The last message of each key; None if it does not conflate.
        self._values: LastValueMap | None = None if limits.overflow is None else limits.overflow.last_values()
        # One controller for each family of marks that is set, and how often those turned ON that are no longer.
        self._turns = Turns(resume_interval, surroundings.clock, self._tick_by) if resume_interval else None
        self.flows = tuple(QueueFlow(thresholds, name, turns=self._turns) for thresholds in limits.thresholds)
        self._times_on_before = 0
        # Since when any of them is ON; None if none is.
        self.on_since: float | None = None
        # Whether it was ON for so long that it holds no channel any more and keeps within its maximum (D10); how often.
        self.is_overdue = False
        self.times_overdue = 0
        self._makes_room = False
        # How many publishes wait for room here.
        self.waiting = 0
        # What an operator has set: every message is refused; confirms are kept here until released, None if not.
        self.is_refusing = False
        self.withheld: list[Completion] | None = None
        # When each channel published here last; only kept if a stop flows all of them (D12).
        self._publishers: dict[FlowSource, float] | None = {} if flow_scope is FlowScope.PUBLISHERS else None
        self._recent = recent
        self._surroundings = surroundings
        self._observer = observer
        self._clock = surroundings.clock
        # Entries to be delivered, by sequence, and among them some that are gone: how many, `_leave_gaps` counts.
        self.ready: deque[QueueEntry] = deque()
        self._gaps = 0
        # Entries that are to leave; None if there are none. And their body bytes.
        self._leaving: deque[QueueEntry] | None = None
        self.leaving_size = 0
        # Entries with consumers, in the order of delivery, and their body bytes.
        self.unacked: dict[QueueEntry, None] = {}
        self.unacked_size = 0
        # Messages whose dead letters are not where they go yet: until then the journal has them here.
        self._letters: dict[StoredMessage, None] = {}
        # Entries that expire; None until there is one. And whether more have to expire before anything is delivered.
        self._expiry: Expiry | None = None
        self._is_expiring = False
        # How many channels that have ended are still to return deliveries: until then it delivers nothing.
        self._holds = 0
        # When `tick` is to be called.
        self._tick_at = math.inf
        # Ready and unacked together, in messages and body bytes (D6).
        self.depth = 0
        self.size = 0
        self.peak_depth = 0
        self.peak_size = 0
        # Messages so far: enqueued, which numbers them, given to consumers, settled by them.
        self.published = 0
        self.delivered = 0
        self.acked = 0
        # Messages dropped so far, by reason.
        self.drops: dict[DropReason, int] = {}
        # All consumers, and those of them that can take something, whose turn it is first.
        self.consumers: dict[Consumer, None] = {}
        self.active: deque[Consumer] = deque()
        # The consumer that asked to be the only one.
        self.exclusive_consumer: Consumer | None = None
        # Whether it ever had a consumer, without which auto-delete does nothing.
        self.was_consumed = False
        self.is_deleted = False
        # Whether bodies are being read for it.
        self._is_reading = False
        # Whether publishing here needs more than an append, whether it may be refused, and whether others wait.
        self.is_watched = self.may_refuse = self.has_line = False
        # Whether a channel that publishes past a mark is flowed, and its confirms are held.
        self._flows_channels = self._delays_completion = False
        self._watch()
        self._page()
        # When it was last used: declared, got from, or consumed.
        self._used_at = 0.0
        self.touch()

    # What is in force.

    def _watch(self) -> None:
        """Bring up to date what is looked at for every message."""
        enforcement = self.limits.enforcement
        self._flows_channels = enforcement.flows_channels and not self.is_overdue
        self._delays_completion = enforcement.delays_completion and not self.is_overdue
        self.may_refuse = self.overflow is not None or self.is_refusing
        self.has_line = self.waiting > 0
        self.is_watched = (
            bool(self.flows)
            or self.may_refuse
            or self.options.message_ttl is not None
            or self.withheld is not None
            or self.has_line
            or self._observer is not None
            or self.journal is not None
        )

    def _page(self) -> None:
        """Begin to look after the bodies in memory, and after what may be dropped, or end."""
        overflow = self.limits.overflow
        if overflow is None or not overflow.pages_bodies or self.journal is None:
            self.pager = None
        elif self.pager is None:
            self.pager = self.journal.make_pager()
            for entry in self.oldest_first():
                if entry.message.body is None:
                    continue
                if entry.is_unacked:
                    self.pager.lend(entry)
                else:
                    self.pager.add(entry)
        # What flows to disk has nothing to give: before anything is dropped, all of its bodies are on their way.
        if not self.limits.drop_transient or self.journal is None or not self.journal.limit or self.pager is not None:
            self.droppable = None
        elif self.droppable is None:
            self.droppable = self.journal.make_droppable()
            for entry in self.ready:
                if not entry.is_gone:
                    self.droppable.add(entry)

    def change(self, limits: QueueLimits) -> None:
        """Put other thresholds, another maximum or another policy in force; what is in the queue stays (D4, J6).

        Args:
            limits: what is in force from now on.
        """
        if limits == self.limits:
            return
        self.limits = limits
        if limits.max_flow_wait is None:
            self.is_overdue = False
        self.overflow = limits.then if self.is_overdue else limits.overflow
        self._watch()
        self._page()
        self._change_conflation()
        if self.overflow is not None:
            self.overflow.trim(self)
        self._change_flows()
        self._watch()
        if self.waiting:
            self._tick_by(self._clock())

    def _change_conflation(self) -> None:
        overflow = self.limits.overflow
        self._values = None if overflow is None else overflow.last_values()
        if self._values is None:
            return
        for entry in tuple(self.oldest_first()):
            key = self._values.key_of(entry.message)
            self._conflate(key)
            self._values.add(entry, key)

    def _change_flows(self) -> None:
        there = {type(flow.depth.thresholds): flow for flow in self.flows}
        now = self._clock()
        flows = []
        for thresholds in self.limits.thresholds:
            flow = there.pop(type(thresholds), None)
            if flow is None:
                flow = QueueFlow(thresholds, self.name, self.depth, self.size, self._turns)
                was_on = False
            else:
                was_on = flow.depth.on
                flow.depth.change(thresholds)
            flows.append(flow)
            if flow.depth.on and not was_on:
                self._turned_on(flow, now)
        for flow in there.values():
            flow.let_go()
            self._times_on_before += flow.depth.times_on
        self.flows = tuple(flows)
        enforcement = self.limits.enforcement
        for flow in flows:
            if not flow.depth.on or not enforcement.delays_completion:
                flow.release_held()
            if not enforcement.flows_channels:
                for source in flow.blocked:
                    flow.forget(source)
            flow.resume()
        if self.on_since is not None:
            if not self.flow_stopped:
                self._turned_off()
            elif self.limits.max_flow_wait is not None:
                self._tick_by(self.on_since + self.limits.max_flow_wait)

    # What an operator sets.

    def refuse(self, on: bool) -> None:
        """Refuse every message, in the name of an operator, or no longer."""
        self.is_refusing = on
        self._watch()

    def withhold(self) -> None:
        """Keep confirms back, in the name of an operator, until `release_withheld`."""
        if self.withheld is None:
            self.withheld = []
        self._watch()

    def release_withheld(self) -> None:
        """Let go of the confirms that an operator had withheld."""
        withheld, self.withheld = self.withheld, None
        self._watch()
        for completion in withheld or ():
            completion.release()

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
        self.expire()
        self._let_leave()
        return self.overflow.refusal(self, size, count, size if largest is None else largest)

    def lets_wait(self, size: int) -> bool:
        """Whether a message of `size` body bytes that it refuses, or for which others wait, waits for room."""
        return not self.is_refusing and (self.overflow is None or self.overflow.lets_wait(size))

    def makes_wait(self, size: int) -> bool:
        """Whether it is this queue's policy that a message of `size` body bytes waits."""
        return self.overflow is not None and self.overflow.lets_wait(size)

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
        if overflow.dead_letters_refused and self.options.dead_letter_exchange is not None:
            self._surroundings.died(self, message, DropReason.MAXLEN)
        if is_told or not overflow.is_silent:
            return False
        self.count_drop(DropReason.REFUSED)
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
        size = message.size
        is_watched = self.is_watched
        if is_watched:
            if self._values is not None:
                self._conflate(self._values.key_of(message))
            if self.overflow is not None:
                self.overflow.make_room(self, size)
        self.published += 1
        self.depth += 1
        self.size += size
        if self.depth > self.peak_depth:
            self.peak_depth = self.depth
        if self.size > self.peak_size:
            self.peak_size = self.size
        entry = QueueEntry(self, message, self.published)
        self.ready.append(entry)
        if is_watched or message.header[12] & HAS_EXPIRATION:
            if self.journal is not None:
                self.journal.enter(self.number, message, completion)
                if self.pager is not None:
                    self.pager.add(entry)
                if self.droppable is not None:
                    self.droppable.add(entry)
            self._follow_up(entry, source, completion)

    def recover(self, message: StoredMessage, age: float) -> None:
        """Take back a message that was in it when the broker ended. Delivers nothing yet, and flows no channel.

        Args:
            message: which the store knows already.
            age: seconds that it has been there.
        """
        self.published += 1
        self.depth += 1
        self.size += message.size
        self.peak_depth = max(self.peak_depth, self.depth)
        self.peak_size = max(self.peak_size, self.size)
        entry = QueueEntry(self, message, self.published)
        # It may have been.
        entry.redelivered = True
        self.ready.append(entry)
        if self.pager is not None and message.body is not None:
            self.pager.add(entry)
        if self.droppable is not None:
            self.droppable.add(entry)
        self._follow_up(entry, None, None, age)

    def _conflate(self, key: str | None) -> None:
        """Drop the last message of a key for the one that comes, unless a consumer has it."""
        assert self._values is not None
        last = self._values.last(key)
        if last is not None and not last.is_unacked and not last.is_gone:
            self._leave_gap(last)
            self._shrink(last)
            self.count_drop(DropReason.CONFLATED)

    def _follow_up(
        self, entry: QueueEntry, source: FlowSource | None, completion: Completion | None, age: float = 0.0
    ) -> None:
        """What follows an enqueue, if anything does."""
        message = entry.message
        if self._observer is not None:
            self._observer.arrived(self, source, message.size)
        if message.header[12] & HAS_EXPIRATION or self.options.message_ttl is not None:
            self._let_expire(entry, age)
        if self._values is not None:
            self._values.add(entry, self._values.key_of(message))
        if completion is not None and self.withheld is not None:
            self.withheld.append(completion)
            completion.holds += 1
        if not self.flows:
            return
        now = self._clock()
        size = message.size
        publisher = source
        if not self._flows_channels:
            source = None
        if not self._delays_completion:
            completion = None
        for flow in self.flows:
            was_on = flow.depth.on
            if source is None:
                flow.depth.add(size, now)
            else:
                flow.offer(source, size, now)
            if not flow.depth.on:
                continue
            if completion is not None:
                flow.held[entry] = completion
                completion.holds += 1
                entry.completion = completion
                if self._observer is not None:
                    self._observer.keeps_confirms(self, publisher)
            if not was_on:
                self._turned_on(flow, now)
        if self._publishers is not None and source is not None:
            self._publishers.pop(source, None)
            self._publishers[source] = now

    def _turned_on(self, flow: QueueFlow, now: float) -> None:
        if self.on_since is None:
            self.on_since = now
            if self._observer is not None:
                self._observer.turned_on(self)
            if self.limits.max_flow_wait is not None:
                self._tick_by(now + self.limits.max_flow_wait)
        if self._publishers is None or not self._flows_channels:
            return
        for source, when in tuple(self._publishers.items()):
            if now - when > self._recent:
                del self._publishers[source]
            else:
                flow.block(source)

    # What goes out.

    def _drop(self, entry: QueueEntry, reason: DropReason) -> None:
        """An entry that is in none of the containers any more is dropped."""
        # What is dropped for want of room does not end the want of room (D10).
        self._makes_room = self.is_overdue and reason is DropReason.MAXLEN
        self._shrink(entry, has_letter=self.options.dead_letter_exchange is not None)
        self._makes_room = False
        self._mourn(entry, reason)

    def _mourn(self, entry: QueueEntry, reason: DropReason) -> None:
        self.count_drop(reason)
        if self.options.dead_letter_exchange is not None:
            self._surroundings.died(self, entry.message, reason)

    def buried(self, message: StoredMessage) -> None:
        """The dead letter of a message is where it goes, or nowhere: so the message may leave the disk."""
        if message in self._letters:
            del self._letters[message]
            assert self.journal is not None
            self.journal.leave(0 if self.is_deleted else self.number, message)

    def count_drop(self, reason: DropReason) -> None:
        """Take note of a message that is dropped here."""
        self.drops[reason] = self.drops.get(reason, 0) + 1

    def _shrink(self, entry: QueueEntry, *, has_letter: bool = False) -> None:
        """Take note that an entry has left, however it did (J6); with a dead letter `buried` informs the journal."""
        entry.is_gone = True
        size = entry.message.size
        self.depth -= 1
        self.size -= size
        if not self.is_watched:
            return
        if self._observer is not None:
            self._observer.left(self, size)
        if self.journal is not None:
            if self.pager is not None:
                self.pager.forget(entry)
            if self.droppable is not None:
                self.droppable.forget(entry)
            if has_letter:
                self._letters[entry.message] = None
            else:
                self.journal.leave(self.number, entry.message)
        for flow in self.flows:
            if entry.completion is not None and flow.held.pop(entry, None) is not None:
                entry.completion.release()
            flow.release(size)
            if flow.held and not flow.depth.on:
                flow.release_held()
        if self._values is not None:
            self._values.forget(entry)
        if self.on_since is not None and not self.flow_stopped and not self._makes_room:
            self._turned_off()
        if self.has_line:
            self._tick_by(self._clock())

    def _turned_off(self) -> None:
        self.on_since = None
        if self._observer is not None:
            self._observer.turned_off(self)
        if self.is_overdue:
            self.is_overdue = False
            self.overflow = self.limits.overflow
            self._watch()
            _log.info("queue '%s' is OFF: its policy is %s again", self.name, self.limits.policy)

    def _turn_overdue(self) -> None:
        """It was ON for so long that it may hold no channel any more (D10)."""
        assert self.limits.then is not None
        self.is_overdue = True
        self.times_overdue += 1
        self.overflow = self.limits.then
        self._watch()
        _log.warning(
            "queue '%s' has been ON for %s s: it lets its producers go, and its policy is %s until it is OFF",
            self.name,
            self.limits.max_flow_wait,
            self.limits.then.name,
        )
        for flow in self.flows:
            flow.let_go()
        if self._observer is not None:
            self._observer.lets_confirms_go(self)

    def dispatch(self) -> None:
        """Deliver what can be delivered, to each consumer in turn."""
        if self._expiry is not None:
            self.expire()
        self.deliver()

    def after_publish(self) -> None:
        """Deliver what can be delivered after an enqueue, and drop what then is too much, or may not wait."""
        if self.active:
            self.deliver()
        if self._expiry is not None:
            self.expire()
        if self.overflow is not None:
            self.overflow.trim(self)

    def deliver(self) -> None:
        """`dispatch`, without a look at what may have expired."""
        if self._is_expiring or self._holds:
            return
        ready, active = self.ready, self.active
        may_lack = self.journal is not None and self.journal.has_store
        while ready and active:
            consumer = active[0]
            if not consumer.can_take:
                active.popleft()
                consumer.is_active = False
                continue
            if may_lack and ready[0].message.body is None and not ready[0].is_gone:
                self._read_ahead()
                break
            entry = ready.popleft()
            if entry.is_gone:
                self._gaps -= 1
                continue
            if len(active) > 1:
                active.rotate(-1)
            self.delivered += 1
            if consumer.no_ack:
                consumer.deliver(entry)
                self._shrink(entry)
            else:
                self._lend(entry)
                consumer.deliver(entry)
        if self.pager is not None and ready and active and self.pager.ahead_size < self._window() // 2:
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Have the bodies read that are delivered next."""
        if self._is_reading or self.journal is None:
            return
        entries = _missing(self.ready, self._window())
        if entries:
            self._is_reading = True
            self.journal.want((entry.message for entry in entries), lambda: self._has_read(entries))

    def _window(self) -> int:
        """Bytes of bodies that it may read ahead."""
        maximum = self.overflow.max_size if self.overflow is not None and self.overflow.pages_bodies else None
        return self._surroundings.window if maximum is None else min(self._surroundings.window, maximum)

    def _has_read(self, entries: Sequence[QueueEntry]) -> bool:
        self._is_reading = False
        if self.pager is not None:
            for entry in entries:
                if not entry.is_gone and not entry.is_unacked and entry.message.body is not None:
                    self.pager.came(entry)
        if not self.is_deleted:
            self.dispatch()
        return True

    def _lend(self, entry: QueueEntry) -> None:
        entry.is_unacked = True
        self.unacked[entry] = None
        self.unacked_size += entry.message.size
        if self.pager is not None and entry.message.body is not None:
            self.pager.lend(entry)
        if self.droppable is not None:
            self.droppable.forget(entry)

    def take(self, *, no_ack: bool) -> QueueEntry | None:
        """Take the next ready entry, as ``Basic.Get`` does; with `no_ack` it has left the queue."""
        self.touch()
        self.expire()
        entry = self._first()
        if entry is None or self._is_expiring:
            return None
        self.ready.popleft()
        self.delivered += 1
        if entry.message.body is None and self.journal is not None:
            # The body has to be read first.
            self.journal.hold(entry.message)
        if no_ack:
            self._shrink(entry)
        else:
            self._lend(entry)
        return entry

    def settle(self, entry: QueueEntry, *, acked: bool) -> None:
        """A delivered entry was acked, or rejected for good."""
        if entry.is_gone:
            return
        del self.unacked[entry]
        self.unacked_size -= entry.message.size
        if acked:
            self.acked += 1
            self._shrink(entry)
        else:
            self._drop(entry, DropReason.REJECTED)

    def _take_back(self, entry: QueueEntry) -> None:
        del self.unacked[entry]
        self.unacked_size -= entry.message.size

    def requeue(self, entries: Iterable[QueueEntry]) -> None:
        """Put delivered entries back in their places. Delivers nothing yet."""
        back = sorted((entry for entry in entries if not entry.is_gone), key=_sequence, reverse=True)
        ready = self.ready
        behind: list[QueueEntry] = []
        for entry in back:
            self._take_back(entry)
            entry.is_unacked = False
            entry.redelivered = True
            if self.pager is not None:
                self.pager.take_back(entry)
        if self._values is not None:
            back = self._without_outdated(self._values, back)
        for entry in back:
            expires_at = self._expiry.time_of(entry) if self._expiry is not None else None
            if expires_at is not None:
                self._expires(entry, expires_at)
            if self.droppable is not None:
                self.droppable.take_back(entry)
        for entry in reversed(back):
            while ready and ready[0].sequence < entry.sequence:
                behind.append(ready.popleft())
            behind.append(entry)
        ready.extendleft(reversed(behind))

    def hold_deliveries(self, change: int) -> None:
        """Deliver nothing until as many calls had -1 as had 1; `dispatch` is to follow the last."""
        self._holds += change

    def trim(self) -> None:
        """After a requeue, drop what is beyond the maximum, if the overflow policy counts ready messages only.

        Other policies count a message also while it is with a consumer, so a requeue adds nothing.
        """
        overflow = self.overflow
        if overflow is not None and overflow.counts_ready:
            self.expire()
            if self.overflow is overflow:
                overflow.trim(self)

    def _without_outdated(self, values: LastValueMap, back: list[QueueEntry]) -> list[QueueEntry]:
        """Entries that are put back, without those of which there is a later value: they are dropped."""
        for entry in back:
            if values.is_outdated(entry):
                self._shrink(entry)
                self.count_drop(DropReason.CONFLATED)
            else:
                values.restore(entry)
        return [entry for entry in back if not entry.is_gone]

    def oldest_first(self) -> Iterator[QueueEntry]:
        """All entries, ready and unacked, in the queue's order."""
        ready = [entry for entry in self.ready if not entry.is_gone]
        return iter(sorted((*self.unacked, *ready), key=_sequence) if self.unacked else ready)

    def _first(self) -> QueueEntry | None:
        """The entry to be delivered next, with those that are gone taken away before it."""
        ready = self.ready
        while ready and ready[0].is_gone:
            ready.popleft()
            self._gaps -= 1
        return ready[0] if ready else None

    def _leave_gap(self, entry: QueueEntry) -> None:
        """A ready entry is about to leave from any place."""
        if entry is self._first():
            self.ready.popleft()
            return
        self._gaps += 1
        if self._gaps > self.MAX_GAPS and self._gaps > len(self.ready) // 2:
            self.ready = deque(each for each in self.ready if not each.is_gone and each is not entry)
            self._gaps = 0

    def drop_oldest(self) -> None:
        """Drop the oldest entry, even one that a consumer has. The queue must not be empty."""
        if self._leaving is not None:
            self._let_leave()
            return
        entry = self._first()
        if self.unacked:
            oldest = min(self.unacked, key=_sequence)
            if entry is None or oldest.sequence < entry.sequence:
                entry = oldest
        assert entry is not None
        if entry.is_unacked:
            self._take_back(entry)
        else:
            self.ready.popleft()
        self._drop(entry, DropReason.MAXLEN)

    def drop_head(self) -> None:
        """Drop the oldest ready entry. There must be one."""
        entry = self._first()
        assert entry is not None
        self.ready.popleft()
        self._drop(entry, DropReason.MAXLEN)

    def drop_for_memory(self, entry: QueueEntry) -> None:
        """Drop a ready entry whose memory is needed (A1); no dead letter takes its place."""
        if entry.is_gone:
            # It is leaving already.
            return
        self._leave_gap(entry)
        self._shrink(entry)
        self.count_drop(DropReason.MEMORY)

    def drop_lost(self, message: StoredMessage) -> None:
        """Drop a message whose body is lost, wherever it is here."""
        for entry in [each for each in self.oldest_first() if each.message is message]:
            if entry.is_unacked:
                self._take_back(entry)
            else:
                self._leave_gap(entry)
            self._shrink(entry)
            self.count_drop(DropReason.DAMAGED)

    def purge(self) -> int:
        """Remove all ready entries.

        Returns:
            How many there were.
        """
        ready, size = self.ready, self.ready_size
        if self._gaps:
            ready = deque(entry for entry in ready if not entry.is_gone)
        self.ready = deque()
        self._gaps = 0
        count = len(ready)
        self._leave(ready, size)
        return count

    def _leave(self, entries: deque[QueueEntry], size: int) -> None:
        """Let entries leave that are in none of the containers any more.

        Args:
            entries: which.
            size: their body bytes.
        """
        if self._expiry is not None or self._values is not None or self.droppable is not None:
            # These have them until they have left.
            for entry in entries:
                entry.is_gone = True
        if self._leaving is None:
            self._leaving = entries
        else:
            self._leaving.extend(entries)
        self.leaving_size += size
        self._let_leave()

    def _let_leave(self, count: int = AT_ONCE) -> None:
        """Let so many of the entries leave that are to."""
        leaving = self._leaving
        if leaving is None:
            return
        for _ in range(min(count, len(leaving))):
            entry = leaving.popleft()
            self.leaving_size -= entry.message.size
            self._shrink(entry)
        if leaving:
            self._tick_by(self._clock())
        else:
            self._leaving = None

    def delete(self) -> int:
        """Remove all messages. `cancel_consumers` is to follow.

        Returns:
            The number of messages that were ready.
        """
        self.is_deleted = True
        count = self.purge()
        self.release_withheld()
        if self.unacked:
            for entry in self.unacked:
                entry.is_gone = True
            unacked, size = deque(self.unacked), self.unacked_size
            self.unacked.clear()
            self.unacked_size = 0
            self._leave(unacked, size)
        if self._leaving is not None and (self.number or self._observer is not None):
            # The store and the flow log know nothing of it from now on.
            self._let_leave(len(self._leaving))
        if self.journal is not None:
            # The store knows the queue no longer, but what is to be read of it must stay until it is.
            for message in self._letters:
                self.journal.hold(message)
                self.journal.leave(self.number, message)
        for flow in self.flows:
            flow.let_go()
        if self._observer is not None:
            self._observer.deleted(self)
        # Publishes that wait for it go on without it.
        self._surroundings.admit_waiting(self, self._clock())
        # A publisher may keep the queue alive for a while; the connection that owned it is not kept with it.
        self.exclusive_owner = None
        return count

    def cancel_consumers(self) -> None:
        """Cancel all consumers, because the queue is deleted."""
        consumers = tuple(self.consumers)
        self.consumers.clear()
        self.active.clear()
        for consumer in consumers:
            consumer.cancelled_by_queue()

    # Time.

    def _let_expire(self, entry: QueueEntry, age: float) -> None:
        """Give a new entry, or one of an age in seconds, its time: the shorter of its own and the queue's."""
        own, everyones = entry.message.ttl, self.options.message_ttl
        seconds = min(each for each in (None if own is None else own / 1000, everyones) if each is not None)
        self._expires(entry, self._clock() + seconds - age)

    def _expires(self, entry: QueueEntry, at: float) -> None:
        if self._expiry is None:
            self._expiry = Expiry()
        self._expiry.add(entry, at)
        self._tick_by(at)

    def expire(self) -> None:
        """Drop ready entries whose time has come; if they are more than may leave at once, the others do soon."""
        if self._expiry is None:
            return
        now = self._clock()
        if self._expiry.next_at <= now:
            due = self._expiry.take_due(now, self.AT_ONCE)
            self._is_expiring = self._expiry.next_at <= now
            if self._is_expiring:
                self._tick_by(now)
            for entry in due:
                self._leave_gap(entry)
                self._shrink(entry, has_letter=self.options.dead_letter_exchange is not None)
            for entry in due:
                self._mourn(entry, DropReason.EXPIRED)

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
        """Somebody uses it."""
        if self.options.expires is not None:
            self._used_at = self._clock()
            self._tick_by(self._used_at + self.options.expires)

    def _tick_by(self, at: float) -> None:
        if at < self._tick_at:
            self._tick_at = at
            self._surroundings.wake_at(self, at)

    def tick(self, now: float) -> None:
        """Do what was to be done by now.

        Args:
            now: seconds of the clock.
        """
        if now < self._tick_at:
            return
        self._tick_at = math.inf
        self._let_leave()
        if self.is_deleted:
            return
        if self._expiry is not None:
            self.dispatch()
            self._tick_by(self._expiry.next_at)
        wait = self.limits.max_flow_wait
        if wait is not None and self.on_since is not None and not self.is_overdue:
            if now >= self.on_since + wait:
                self._turn_overdue()
            else:
                self._tick_by(self.on_since + wait)
        if self._turns is not None:
            for flow in self.flows:
                flow.resume()
        if self.waiting:
            self._surroundings.admit_waiting(self, now)
        expires = self.options.expires
        if expires is not None and not self.consumers:
            if now >= self._used_at + expires:
                self._surroundings.unused(self)
            else:
                self._tick_by(self._used_at + expires)

    # Consumers.

    def add_consumer(self, consumer: Consumer, *, exclusive: bool) -> None:
        """Let a consumer take part. Delivers nothing yet."""
        self.consumers[consumer] = None
        self.was_consumed = True
        if exclusive:
            self.exclusive_consumer = consumer
        self.wake(consumer)

    def wake(self, consumer: Consumer) -> None:
        """A consumer may be able to take something again."""
        if not consumer.is_active and consumer in self.consumers and self._may_serve(consumer):
            consumer.is_active = True
            self.active.append(consumer)

    def _may_serve(self, consumer: Consumer) -> bool:
        return not self.options.single_active_consumer or next(iter(self.consumers)) is consumer

    def remove_consumer(self, consumer: Consumer) -> None:
        """A consumer is gone. What it has not settled stays unacked. Delivers nothing yet, not even to the next."""
        self.consumers.pop(consumer, None)
        if consumer.is_active:
            consumer.is_active = False
            self.active.remove(consumer)
        if self.exclusive_consumer is consumer:
            self.exclusive_consumer = None
        self.touch()
        for other in self.consumers if self.options.single_active_consumer else ():
            self.wake(other)

    def forget_source(self, source: FlowSource) -> None:
        """A publishing channel is gone."""
        if self._publishers is not None:
            self._publishers.pop(source, None)

    # What is seen of it.

    @property
    def thresholds(self) -> tuple[Thresholds, ...]:
        """The families of marks that are set."""
        return self.limits.thresholds

    @property
    def has_consumers(self) -> bool:
        """Whether any consumer takes from it."""
        return bool(self.consumers)

    @property
    def ready_count(self) -> int:
        """Messages to be delivered."""
        return self.depth - len(self.unacked) - self.leaving_count

    @property
    def leaving_count(self) -> int:
        """Messages that were purged and count in `depth` until they have left."""
        return 0 if self._leaving is None else len(self._leaving)

    @property
    def ready_size(self) -> int:
        """Their body bytes."""
        return self.size - self.unacked_size - self.leaving_size

    @property
    def dropped(self) -> int:
        """Messages dropped so far, for whatever reason. Copies have another reason, too, and are counted once."""
        return sum(self.drops.values()) - self.drops.get(DropReason.COPY, 0)

    @property
    def flow_stopped(self) -> bool:
        """Whether any family of marks is ON (C7)."""
        return any(flow.depth.on for flow in self.flows)

    @property
    def flow_stopped_count(self) -> int:
        """How often a family went from OFF to ON (C7)."""
        return self._times_on_before + sum(flow.depth.times_on for flow in self.flows)

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


def _missing(ready: deque[QueueEntry], window: int) -> Sequence[QueueEntry]:
    """The first entries of a queue whose bodies are not in memory, within so many bytes from its head; one at least."""
    found: list[QueueEntry] = []
    for entry in islice(ready, len(ready)):
        if entry.is_gone:
            continue
        if window <= 0 and found:
            break
        window -= entry.message.size
        if entry.message.body is None:
            found.append(entry)
        elif window <= 0:
            break
    return found
