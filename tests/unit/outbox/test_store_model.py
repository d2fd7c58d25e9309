"""A producer with an outbox, a broker, and a process that dies at any point, with the rules that must hold.

`OutboxStore`, `Backlog`, `Outbox` and the work of `Writer` are the real ones, on a real file. The broker, the producer
and the clock are simulated. A message that `OutboxStore.send` admits counts as admitted when it is on disk, as after
the return of `send`.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qflow_client import Message, OutboxError, OutboxFull, Position
from qflow_client.core.tickets import SendTicket
from qflow_client.message import with_position
from qflow_client.outbox import Outbox
from qflow_client.receipt import Outcome, Receipt
from tests.effort import rounds
from tests.unit.core.support import Wire, place

from .support import FRAME_MAX, MARK, Kept

T = TypeVar("T")

# The bytes that a message uses in addition to its own; they count against the limit.
ROW = 64
MAX_BYTES = 1500
# More steps than any run needs to settle all messages.
ENOUGH = 200


class Dies(BaseException):
    """The process is killed."""


class Disk:
    """Lets an event happen at a given statement on a file."""

    def __init__(self, outbox: Outbox) -> None:
        self._file = outbox._file
        self._left = 0
        self._what: type[BaseException] = Dies
        # Before the statement, or after it.
        self._before = True
        self._execute = self._file.execute
        self._execute_many = self._file.execute_many
        self._file.execute = self._guarded(self._execute)  # type: ignore[method-assign]
        self._file.execute_many = self._guarded(self._execute_many)  # type: ignore[method-assign]

    def plan(self, what: type[BaseException], after: int, *, before: bool) -> None:
        """Plan to raise an exception."""
        self._what, self._left, self._before = what, after, before

    def heal(self) -> None:
        """Cancel the planned event."""
        self._left = 0

    def _guarded(self, execute: Callable[..., T]) -> Callable[..., T]:
        def guarded(*arguments: Any) -> T:
            comes = self._left == 1
            self._left = max(0, self._left - 1)
            if comes and (self._before or self._what is not Dies):
                raise self._what("as planned")
            result = execute(*arguments)
            if comes:
                raise self._what("as planned")
            return result

        return guarded


class Session:
    """The broker's view of one channel."""

    def __init__(self) -> None:
        self.wire = Wire()
        # By delivery tag from 1 on, whether it is answered.
        self.answered: list[bool] = []


class OutboxStores(RuleBasedStateMachine):
    """No admitted message is lost, no message overtakes another, and second copies are marked."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "outbox"
        self.processes = 0
        self.sent = 0
        # Numbers of messages that are admitted and, as far as the sender knows, on disk; and those that the broker
        # answered.
        self.admitted: set[int] = set()
        self.answered: set[int] = set()
        # The broker's messages, in its order: numbers, and whether they are marked.
        self.queue: list[tuple[int, bool]] = []
        # Tickets in line, by number.
        self.waiting: dict[int, SendTicket] = {}
        # The application's receipts of this process, by number.
        self.receipts: dict[int, Receipt] = {}

    @initialize(
        spills=st.booleans(), full=st.sampled_from(["block", "raise"]), capacity=st.integers(1, 4), rated=st.booleans()
    )
    def start(self, spills: bool, full: str, capacity: int, rated: bool) -> None:
        self.settings = {
            "when_flowed": "spill" if spills else "block",
            "outbox_full": full,
            "capacity": capacity,
            "outbox_max_bytes": MAX_BYTES,
            "rate": 1.0 if rated else None,
        }
        self.spills = spills
        self.open()

    def open(self) -> None:
        """Start a process."""
        self.processes += 1
        self.kept = Kept(self.path, f"{self.processes}-", opened=False, **self.settings)
        self.disk = Disk(self.kept.outbox)
        self.session: Session | None = None
        self.waiting.clear()
        self.receipts.clear()

    def dies(self) -> None:
        """Kill the process, and start the next one."""
        self.kept.crash()
        # By the sender's knowledge, every admitted message without an answer is in the file.
        left = {int(stored.message.body[:6]) for stored in Outbox.look(self.path, limit=10_000)}
        assert self.admitted - self.answered <= left
        self.open()

    @contextmanager
    def mortal(self) -> Any:
        """Run a block in which the process may die."""
        try:
            yield
        except Dies:
            self.dies()

    def took(self, number: int, receipt: Receipt) -> None:
        """Record an admitted message; `send` returns when it is on disk."""
        self.receipts[number] = receipt
        try:
            self.kept.outbox.wait_durable(self.kept.outbox.last)
        except OutboxError:
            # It is admitted, although the sender was not informed that it is on disk.
            return
        assert receipt.message.body.startswith(b"%06d" % number)
        assert any(stored.message.body.startswith(b"%06d" % number) for stored in Outbox.look(self.path, limit=10_000))
        self.admitted.add(number)

    # Actions of the application.

    @rule(size=st.sampled_from([0, 10, 300, 600]), own_id=st.booleans(), waits=st.booleans())
    def send(self, size: int, own_id: bool, waits: bool) -> None:
        number = self.sent = self.sent + 1
        body = b"%06d" % number + b"x" * size
        payload = self.to_send(number, Message(body, message_id=f"own-{number}") if own_id else body)
        kept = self.kept
        last = kept.outbox.last
        with self.mortal():
            try:
                receipt = kept.store.send(payload, "", "q", kept.now, spills=self.spills)
            except OutboxFull:
                assert kept.outbox.last == last
                self.not_sent(number)
                return
            if receipt is not None:
                self.took(number, receipt)
            elif waits:
                assert kept.outbox.last == last
                ticket = place(kept.protocol, payload, kept.now, waiter=number)
                self.waiting[number] = ticket
                self.look_at_line()
            else:
                self.not_sent(number)

    def to_send(self, number: int, payload: bytes | Message) -> bytes | Message:
        """Return the payload that is sent for a message."""
        return payload

    def not_sent(self, number: int) -> None:
        """Record that a message was not admitted, as the sender knows."""

    def look_at_line(self) -> None:
        for number, ticket in list(self.waiting.items()):
            if ticket.receipt is not None:
                del self.waiting[number]
                self.took(number, ticket.receipt)
            elif ticket.error is not None:
                assert isinstance(ticket.error, OutboxFull)
                del self.waiting[number]
                self.not_sent(number)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.waiting)))
        with self.mortal():
            ticket = self.waiting.pop(number)
            self.kept.protocol.line.give_up(ticket, self.kept.now)
            self.not_sent(number)
            self.look_at_line()

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        with self.mortal():
            if paused:
                self.kept.protocol.hold("paused", self.kept.now)
            else:
                self.kept.protocol.lift("paused", self.kept.now)
            self.look_at_line()

    # Actions of the writer.

    @rule()
    def work(self) -> None:
        with self.mortal():
            self.kept.turn()
            self.look_at_line()

    @rule()
    def tries_again(self) -> None:
        # As the writer does after a failed read, a second later.
        with self.mortal():
            if self.kept.writer._retry_at is not None:
                self.kept.writer._retry_at = None
                self.kept.store.read_again(self.kept.now)
                self.kept.turn()

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        with self.mortal():
            self.kept.now += seconds
            self.kept.protocol.on_timer(self.kept.now)
            self.look_at_line()

    # Events of the connection.

    @precondition(lambda self: self.session is None)
    @rule()
    def connects(self) -> None:
        with self.mortal():
            self.session = Session()
            self.kept.protocol.channel_opened(1, FRAME_MAX, self.kept.now)
            self.look_at_line()

    @precondition(lambda self: self.session is not None)
    @rule()
    def is_lost(self) -> None:
        with self.mortal():
            self.session = None
            self.kept.protocol.connection_lost("cut", self.kept.now, reconnects=True)
            self.look_at_line()

    @precondition(lambda self: self.session is not None)
    @rule(size=st.one_of(st.integers(1, 2000), st.just(1 << 20)))
    def writes(self, size: int) -> None:
        session = self.session
        assert session is not None
        data = self.kept.protocol.data_to_write(1 << 20)[:size]
        with self.mortal():
            # The kernel has it, whatever happens to the process.
            before = len(session.wire.messages) - session.wire.in_message
            session.wire.read(data)
            for message in session.wire.messages[before : len(session.wire.messages) - session.wire.in_message]:
                marked = bool((message.properties.headers or {}).get(MARK))
                self.queue.append((int(message.body[:6]), marked))
                session.answered.append(False)
            self.kept.protocol.advance(len(data), self.kept.now)
            self.look_at_line()

    @precondition(lambda self: self.session is not None and not all(self.session.answered))
    @rule(data=st.data(), multiple=st.booleans())
    def answers(self, data: st.DataObject, multiple: bool) -> None:
        session = self.session
        assert session is not None
        tag = data.draw(st.sampled_from([at for at, done in enumerate(session.answered, 1) if not done]))
        with self.mortal():
            numbers = self.queue[len(self.queue) - len(session.answered) :]
            for at in range(1 if multiple else tag, tag + 1):
                session.answered[at - 1] = True
                self.answered.add(numbers[at - 1][0])
            self.kept.protocol.on_ack(tag, multiple, self.kept.now)
            self.look_at_line()

    # Events of the process and its disk.

    @rule(after=st.integers(1, 12), before=st.booleans())
    def will_die(self, after: int, before: bool) -> None:
        self.disk.plan(Dies, after, before=before)

    @rule(after=st.integers(1, 6))
    def will_fail(self, after: int) -> None:
        self.disk.plan(OutboxError, after, before=True)

    @rule()
    def is_killed(self) -> None:
        self.dies()

    @rule()
    def is_closed(self) -> None:
        with self.mortal():
            self.ends()
            self.open()

    def ends(self) -> None:
        """Close the producer. Every receipt must have the outcome of its message."""
        protocol = self.kept.protocol
        protocol.close("closed by hand", self.kept.now)
        protocol.connection_lost("closed by hand", self.kept.now)
        self.disk.heal()
        self.kept.outbox.close()
        left = {int(stored.message.body[:6]) for stored in Outbox.look(self.path, limit=10_000)}
        for number, receipt in self.receipts.items():
            assert receipt.outcome == (Outcome.STORED if number in left else Outcome.CONFIRMED), number

    # Invariants.

    @invariant()
    def the_bound_holds(self) -> None:
        if not hasattr(self, "kept"):
            return
        # Only bodies count, see `Outbox.has_room`: properties may exceed the limit.
        stored = Outbox.look(self.path, limit=10_000)
        assert sum(len(each.message.body) + ROW for each in stored) <= MAX_BYTES

    @invariant()
    def second_copies_are_marked(self) -> None:
        unmarked = Counter(number for number, marked in self.queue if not marked)
        assert max(unmarked.values(), default=0) <= 1
        seen: set[int] = set()
        for number, marked in self.queue:
            assert marked or number not in seen
            seen.add(number)

    @invariant()
    def first_copies_are_in_order(self) -> None:
        firsts = list(dict.fromkeys(number for number, _ in self.queue))
        assert firsts == sorted(firsts)

    def teardown(self) -> None:
        if hasattr(self, "kept"):
            try:
                self.all_gets_out()
                # The rules alone rarely end with a producer that has more messages than its window takes.
                self.is_busy()
                self.is_closed()
                self.all_gets_out()
            finally:
                self.kept.outbox.close()
        self.folder.cleanup()

    def is_busy(self) -> None:
        """Send more messages than the window takes, and let the writer read some of the spilled ones."""
        for _ in range(6):
            self.send(0, False, False)
        self.work()

    def all_gets_out(self) -> None:
        """When nothing fails any more, all messages arrive."""
        self.disk.heal()
        for number in list(self.waiting):
            self.kept.protocol.line.give_up(self.waiting.pop(number), self.kept.now)
            self.not_sent(number)
        self.pause(False)
        if self.session is None:
            self.connects()
        for _ in range(ENOUGH):
            self.tries_again()
            self.work()
            self.writes(1 << 20)
            self.kept.protocol.on_ack(0, True, self.kept.now)
            self.kept.turn()
            self.time_passes(5.0)
            if not self.kept.protocol.unsettled and not self.kept.store.has_backlog:
                break
        self.second_copies_are_marked()
        self.first_copies_are_in_order()
        assert self.admitted <= {number for number, _ in self.queue}
        self.kept.outbox.commit()
        assert Outbox.look(self.path) == []
        assert (len(self.kept.outbox), self.kept.outbox.left, self.kept.outbox.size) == (0, 0, 0)
        assert self.kept.protocol.gate.is_open


class Sources(OutboxStores):
    """Each row of a source comes once without a mark, although the program only asks for the last position (E13)."""

    def open(self) -> None:
        super().open()
        position = self.kept.outbox.position("rows")
        self.sent = position if isinstance(position, int) else 0
        arrived = {number for number, _ in self.queue}
        left = {int(stored.message.body[:6]) for stored in Outbox.look(self.path, limit=10_000)}
        assert set(range(1, self.sent + 1)) == arrived | left

    @precondition(lambda self: not self.waiting)
    @rule(size=st.sampled_from([0, 10, 300, 600]), own_id=st.booleans(), waits=st.booleans())
    def send(self, size: int, own_id: bool, waits: bool) -> None:
        super().send(size, own_id, waits)

    @precondition(lambda self: self.session is not None and not self.waiting)
    @rule()
    def is_killed_behind_a_write(self) -> None:
        self.send(0, False, False)
        if self.session is not None:
            self.writes(1 << 20)
        self.is_killed()

    def took(self, number: int, receipt: Receipt) -> None:
        if number % 2:
            super().took(number, receipt)
        else:
            # The sender still waits for the disk, whatever else happens.
            self.receipts[number] = receipt

    def to_send(self, number: int, payload: bytes | Message) -> bytes | Message:
        return with_position(payload, Position("rows", number))

    def not_sent(self, number: int) -> None:
        # It is the next row again.
        self.sent = number - 1

    @invariant()
    def no_row_is_missing(self) -> None:
        arrived = {number for number, _ in self.queue}
        assert arrived == set(range(1, len(arrived) + 1))


TestOutboxStores = OutboxStores.TestCase
TestSources = Sources.TestCase
for each in (TestOutboxStores, TestSources):
    each.settings = settings(max_examples=rounds(30), stateful_step_count=40)
    # Also on a busy machine.
    each.pytestmark = [pytest.mark.timeout(600)]  # type: ignore[attr-defined]  # pytest looks for it
