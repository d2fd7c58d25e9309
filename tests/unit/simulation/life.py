"""Simulates a producer with random events from a seed, and compares it with a simple model of the contract.

A driver calls a `ProducerProtocol` in any order that an application, a broker, a socket and a clock can cause. The
model knows only the contract: which messages are admitted, in which order, what is on the wire, and how each message
ends. After every step, the producer and the model must agree.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pamqp.commands
import pamqp.exceptions
import pamqp.frame
import pamqp.header

from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.tickets import SendTicket
from qflow_client.errors import FlowControlTimeout
from qflow_client.message import Message
from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import ProducerSettings
from tests.unit.core.support import place

__all__ = ["BrokenContract", "Life"]

FRAME_MAX = 4096
CAPACITY_MAX = 40
MAX_UNWRITTEN = 6000
FLOW_OK_SIZE = 13
ID_PREFIX = "0123456789abcdef-"


class BrokenContract(AssertionError):
    """The producer has broken its contract."""


@dataclass(eq=False)
class Sent:
    """The model's knowledge of one admitted message."""

    receipt: Receipt
    message_id: str
    body: bytes
    wire_size: int
    returned: bool = False
    begun: bool = False


@dataclass(eq=False)
class Waiting:
    """The model's knowledge of one message that waits."""

    ticket: SendTicket
    payload: bytes | Message
    deadline: float


@dataclass(eq=False)
class Wire:
    """The bytes that the producer has written, as the broker reads them."""

    rest: bytes = b""
    # State of the message that is being read.
    message_id: str | None = None
    body_left: int = 0
    in_message: bool = False
    publishes: int = 0
    flow_oks: list[bool] = field(default_factory=list)


def wire_size(payload: bytes | Message) -> int:
    """Return the number of bytes of a message on the wire. pamqp encodes the message."""
    message = payload if isinstance(payload, Message) else Message(payload)
    publish = pamqp.frame.marshal(pamqp.commands.Basic.Publish(exchange="", routing_key="q", mandatory=True), 1)
    header = pamqp.frame.marshal(
        pamqp.header.ContentHeader(
            body_size=len(message.body),
            properties=pamqp.commands.Basic.Properties(
                delivery_mode=2, message_id=message.message_id or ID_PREFIX + "0" * 12, priority=message.priority
            ),
        ),
        1,
    )
    frames = math.ceil(len(message.body) / (FRAME_MAX - 8))
    return len(publish) + len(header) + len(message.body) + 8 * frames


class Life:
    """One simulated producer with its model.

    Args:
        seed: seed of all random events.
        protocol_type: the class under test.
    """

    def __init__(self, seed: int, protocol_type: type[ProducerProtocol] = ProducerProtocol) -> None:
        self.random = Random(seed)
        self.now = 1000.0
        self.rate = self.random.choice([None, None, 40.0])
        self.settings = ProducerSettings(
            routing_key="q",
            capacity=self.random.choice([1, 3, 20, "auto"]),
            capacity_max=CAPACITY_MAX,
            capacity_bytes=self.random.choice([None, 5000]),
            max_unwritten_bytes=MAX_UNWRITTEN,
            rate=self.rate,
            rate_burst=5,
        )
        self.protocol = protocol_type(self.settings, id_prefix=ID_PREFIX, now=self.now)
        self.protocol.reports.settled = []
        self.protocol.reports.events = []
        self.protocol.channel_opened(1, FRAME_MAX, self.now)

        # The model.
        # None while the producer chooses its own capacity.
        self.fixed_capacity = None if self.settings.capacity == "auto" else self.settings.capacity
        self.holds: set[tuple[str, str]] = set()
        self.transport = False
        self.tokens_full_at = -math.inf
        self.line: deque[Waiting] = deque()
        self.to_write: deque[Sent] = deque()
        self.unsettled: dict[int, Sent] = {}
        self.next_tag = 1
        self.answered: set[int] = set()
        self.unwritten = 0
        self.wire = Wire()
        self.flow_oks_due: deque[bool] = deque()
        self.settled_ids: set[int] = set()
        self.custom_ids = 0
        self.flushes: list[tuple[int, object]] = []
        self.woken: set[object] = set()
        self.unflow_waiters: list[object] = []
        self.episodes = 0
        self.counts: dict[str, int] = {}

    # The model's rules.

    def check(self, holds: bool, words: str) -> None:
        if not holds:
            raise BrokenContract(f"at {self.now:.3f} s: {words}")

    @property
    def capacity(self) -> int:
        if self.fixed_capacity is not None:
            return self.fixed_capacity
        found = self.protocol.window.capacity
        self.check(1 <= found <= CAPACITY_MAX, f"it found a capacity of {found}")
        return found

    @property
    def used_bytes(self) -> int:
        return sum(len(sent.body) for sent in self.unsettled.values())

    def room(self, size: int) -> bool:
        if len(self.unsettled) >= self.capacity:
            return False
        limit = self.settings.capacity_bytes
        if limit is not None and self.unsettled and self.used_bytes and self.used_bytes + size > limit:
            return False
        return self.rate is None or self.now >= self.tokens_full_at - (5 - 1) / self.rate

    def may_pass(self, size: int) -> bool:
        return not self.holds and not self.transport and self.room(size)

    @property
    def writing_stopped(self) -> bool:
        return bool({"channel_flow", "connection_blocked"} & {kind for kind, _ in self.holds})

    def admitted(self, receipt: Receipt, payload: bytes | Message) -> None:
        body = payload.body if isinstance(payload, Message) else payload
        message_id = receipt.message_id
        assert message_id is not None
        sent = Sent(receipt, message_id, body, wire_size(payload))
        self.unsettled[self.next_tag] = sent
        self.next_tag += 1
        self.to_write.append(sent)
        self.unwritten += sent.wire_size
        if self.rate is not None:
            self.tokens_full_at = max(self.tokens_full_at, self.now) + 1 / self.rate
        if self.unwritten > MAX_UNWRITTEN:
            self.transport = True

    def line_moves(self) -> None:
        """Admit the messages that the contract admits, and check that the producer has admitted the same messages."""
        while self.line:
            head = self.line[0]
            size = len(head.payload.body if isinstance(head.payload, Message) else head.payload)
            if not self.may_pass(size):
                break
            self.check(head.ticket.receipt is not None, "the head of the line may go and was not admitted")
            self.line.popleft()
            assert head.ticket.receipt is not None
            self.admitted(head.ticket.receipt, head.payload)
        for waiting in self.line:
            self.check(waiting.ticket.receipt is None, "a message was admitted that may not go, or out of turn")

    # The events.

    def payload(self) -> bytes | Message:
        size = self.random.choice([0, 1, 10, 100, 100, 1000, 6000, 9000])
        body = bytes([self.random.randrange(256)]) * size
        match self.random.randrange(6):
            case 0:
                self.custom_ids += 1
                # Use each of these ids twice.
                return Message(body, message_id=f"own-{self.custom_ids // 2}", priority=3)
            case 1:
                return Message(body, priority=7)
        return body

    def do_send(self) -> None:
        payload = self.payload()
        size = len(payload.body if isinstance(payload, Message) else payload)
        expected = not self.line and self.may_pass(size)
        receipt = self.protocol.admission.send(payload, "", "q", self.now)
        self.check(
            (receipt is not None) == expected, f"send admitted={receipt is not None}, the contract says {expected}"
        )
        if receipt is not None:
            self.admitted(receipt, payload)
        elif len(self.line) < 30 and self.random.random() < 0.7:
            timeout = self.random.choice([0.05, 1.0, 30.0, None])
            ticket = place(self.protocol, payload, self.now, timeout=timeout, waiter=object())
            self.line.append(Waiting(ticket, payload, math.inf if timeout is None else self.now + timeout))

    def do_cancel(self) -> None:
        if self.line:
            at = self.random.randrange(len(self.line))
            waiting = self.line[at]
            del self.line[at]
            self.check(self.protocol.line.give_up(waiting.ticket, self.now), "a waiting message could not be given up")

    def do_write(self) -> None:
        data = self.protocol.data_to_write(self.random.choice([1, 500, 1 << 20]))
        if data:
            count = self.random.randint(0, len(data))
            border = self.protocol.advance(count, self.now)
            self.wrote(data[:count])
            self.check(not border or not self.wire.rest, "the producer takes the middle of a frame for a border")

    def do_drain(self) -> None:
        while data := self.protocol.data_to_write(1 << 16):
            self.protocol.advance(len(data), self.now)
            self.wrote(data)
            self.line_moves()
        self.check(not self.flow_oks_due, "Channel.Flow was not answered")
        self.check(not self.wire.in_message, "a message that had begun was not brought to its end")
        if not self.writing_stopped:
            self.check(not self.to_write, "admitted messages were not written")

    def wrote(self, data: bytes) -> None:
        self.unwritten -= len(data)
        if self.unwritten <= MAX_UNWRITTEN // 2:
            self.transport = False
        wire = self.wire
        wire.rest += data
        if wire.rest and self.to_write and not self.to_write[0].begun and not wire.in_message:
            self.peek_begun()
        while len(wire.rest) >= 7:
            size = int.from_bytes(wire.rest[3:7], "big") + 8
            if len(wire.rest) < size:
                break
            try:
                _, channel, frame = pamqp.frame.unmarshal(wire.rest[:size])
            except pamqp.exceptions.UnmarshalingException as error:
                raise BrokenContract(f"at {self.now:.3f} s: {error}") from error
            wire.rest = wire.rest[size:]
            self.check(channel == 1, f"a frame on channel {channel}")
            self.read(frame)
        if wire.rest and self.to_write and not wire.in_message:
            self.peek_begun()

    def peek_begun(self) -> None:
        # A frame that begins outside of a message is a publish, or an answer to Channel.Flow.
        if not self.flow_oks_due and not self.to_write[0].begun:
            self.check(not self.writing_stopped, "a publish on a channel that is stopped")
            self.to_write[0].begun = True

    def read(self, frame: object) -> None:
        wire = self.wire
        if isinstance(frame, pamqp.commands.Channel.FlowOk):
            self.check(not wire.in_message, "Flow-Ok between the frames of a message")
            self.check(bool(self.flow_oks_due), "Flow-Ok that nobody asked for")
            self.check(frame.active == self.flow_oks_due.popleft(), "Flow-Ok with the wrong state")
        elif isinstance(frame, pamqp.commands.Basic.Publish):
            self.check(not wire.in_message, "a publish between the frames of another")
            self.check(bool(self.to_write), "a publish of something that was not admitted")
            self.check(not self.flow_oks_due or self.to_write[0].begun, "a publish before the answer to Channel.Flow")
            self.check(self.to_write[0].begun or not self.writing_stopped, "a publish on a channel that is stopped")
            self.to_write[0].begun = True
            wire.in_message = True
        elif isinstance(frame, pamqp.header.ContentHeader):
            sent = self.to_write[0]
            self.check(frame.properties.message_id == sent.message_id, "the messages left out of order")
            self.check(frame.body_size == len(sent.body), "a wrong body size")
            wire.body_left = frame.body_size
            self.message_ends()
        else:
            body = getattr(frame, "value", b"")
            self.check(self.to_write[0].body.startswith(body[:1]), "a wrong body")
            wire.body_left -= len(body)
            self.message_ends()

    def message_ends(self) -> None:
        if self.wire.body_left == 0:
            self.wire.in_message = False
            self.wire.publishes += 1
            self.to_write.popleft()

    def settle(self, tags: list[int], outcome: Outcome) -> None:
        for tag in tags:
            sent = self.unsettled.pop(tag)
            self.answered.add(tag)
            expected = Outcome.RETURNED if sent.returned and outcome is Outcome.CONFIRMED else outcome
            self.check(sent.receipt.outcome is expected, f"{sent.message_id}: {sent.receipt.outcome} is not {expected}")
        reported = self.protocol.reports.settled
        assert reported is not None
        self.protocol.reports.settled = []
        self.check(sorted(id(r) for r in reported) == sorted({id(r) for r in reported}), "a receipt settled twice")
        self.check(len(reported) == len(tags), f"{len(reported)} receipts were settled instead of {len(tags)}")

    def answerable(self) -> list[int]:
        return [tag for tag in self.unsettled if tag <= self.wire.publishes]

    def do_answer(self) -> None:
        tags = self.answerable()
        if not tags:
            return
        tag = self.random.choice([tags[0], tags[-1], self.random.choice(tags)])
        multiple = self.random.random() < 0.5
        nack = self.random.random() < 0.2
        run = [each for each in tags if each <= tag] if multiple else [tag]
        if not multiple and not nack and self.random.random() < 0.7:
            # The broker may already have answered some messages in this range of tags.
            last = self.random.randint(tag, self.wire.publishes)
            self.protocol.on_acks([(tag, last - tag + 1)], self.now)
            self.settle([each for each in tags if tag <= each <= last], Outcome.CONFIRMED)
            return
        wire_tag = (
            0
            if multiple and run == tags and self.wire.publishes == self.protocol.parts.unconfirmed.outbound.begun
            else tag
        )
        if nack:
            self.protocol.on_nack(wire_tag, multiple, self.now)
            self.settle(run, Outcome.NACKED)
        else:
            self.protocol.on_ack(wire_tag, multiple, self.now)
            self.settle(run, Outcome.CONFIRMED)

    def do_return(self) -> None:
        tags = [tag for tag in self.answerable() if not self.unsettled[tag].returned]
        if not tags:
            return
        sent = self.unsettled[self.random.choice(tags)]
        # If two messages have the same id, the broker returns the first message first.
        twins = [each for each in self.unsettled.values() if each.message_id == sent.message_id and not each.returned]
        sent = twins[0]
        if not any(self.unsettled[tag] is sent for tag in tags):
            return
        sent.returned = True
        header = pamqp.header.ContentHeader(
            body_size=len(sent.body),
            properties=pamqp.commands.Basic.Properties(delivery_mode=2, message_id=sent.message_id),
        ).marshal()
        self.protocol.on_return(312, "NO_ROUTE", "", "q", header, sent.body)

    def do_flow(self) -> None:
        active = self.random.random() < 0.55
        self.protocol.on_flow(active, self.now)
        self.flow_oks_due.append(active)
        self.unwritten += FLOW_OK_SIZE
        self.change_hold("channel_flow", "", not active)

    def do_block(self) -> None:
        if self.random.random() < 0.45:
            self.protocol.on_blocked("low on memory", self.now)
            self.change_hold("connection_blocked", "", True)
        else:
            self.protocol.on_unblocked(self.now)
            self.change_hold("connection_blocked", "", False)

    def do_pause(self) -> None:
        source = self.random.choice(["", "manager"])
        if self.random.random() < 0.4:
            self.protocol.hold("paused", self.now, source=source)
            self.change_hold("paused", source, True)
        else:
            self.protocol.lift("paused", self.now, source=source)
            self.change_hold("paused", source, False)

    def change_hold(self, kind: str, source: str, on: bool) -> None:
        if on:
            self.holds.add((kind, source))
        else:
            self.holds.discard((kind, source))

    def do_capacity(self) -> None:
        self.fixed_capacity = self.random.choice([1, 2, 20, 50])
        self.protocol.set_capacity(self.fixed_capacity, self.now)

    def do_flush(self) -> None:
        waiter = object()
        waits = self.protocol.waiters.when_flushed(waiter)
        self.check(waits == bool(self.unsettled), "flush waits for the wrong thing")
        if waits:
            self.flushes.append((self.next_tag - 1, waiter))

    def do_wait_unflowed(self) -> None:
        waiter = object()
        if self.protocol.waiters.when_unflowed(waiter, self.now):
            self.check(not self.open_now(), "wait_unflowed waits for an open gate")
            self.unflow_waiters.append(waiter)
        else:
            self.check(self.open_now(), "wait_unflowed does not wait for a closed gate")

    def open_now(self) -> bool:
        head = self.line[0].payload if self.line else b""
        return self.may_pass(len(head.body if isinstance(head, Message) else head))

    def pass_time(self) -> None:
        self.now += self.random.expovariate(1 / 0.5)
        timer = self.protocol.next_timer(self.now)
        if timer is not None and timer <= self.now:
            self.protocol.on_timer(self.now)
        self.line_moves()
        for waiting in list(self.line):
            try:
                again = self.protocol.line.look_at(waiting.ticket, self.now)
            except FlowControlTimeout as timeout:
                self.check(self.now >= waiting.deadline, "a deadline came early")
                self.check(waiting.ticket.receipt is None, "a message timed out that was admitted")
                self.check(timeout.message is waiting.payload, "the error does not carry its message")
                self.line.remove(waiting)
                self.line_moves()
            else:
                if waiting.ticket.receipt is None:
                    self.check(again is not None, "a waiting message is taken for decided")
                    self.check(self.now < waiting.deadline, "a deadline was missed")
                    assert again is not None
                    self.check(self.now < again <= waiting.deadline, "the wrong time to look again")

    # The simulation.

    STEPS: Any = (
        (do_send, 40),
        (do_write, 20),
        (do_drain, 12),
        (do_answer, 18),
        (do_return, 2),
        (do_flow, 2),
        (do_block, 2),
        (do_pause, 2),
        (do_capacity, 1),
        (do_cancel, 1),
        (do_flush, 1),
        (do_wait_unflowed, 1),
    )

    def step(self) -> None:
        """Simulate one random event, and compare the producer with the model."""
        do = self.random.choices([do for do, _ in self.STEPS], [weight for _, weight in self.STEPS])[0]
        self.counts[do.__name__] = self.counts.get(do.__name__, 0) + 1
        do(self)
        self.compare()
        self.pass_time()
        self.compare()

    def compare(self) -> None:
        """Check that the producer and the model have the same state."""
        protocol = self.protocol
        self.line_moves()
        self.check(protocol.unsettled == len(self.unsettled), "unsettled is wrong")
        self.check(protocol.window.used == len(self.unsettled), "the window leaks")
        if protocol.limits.byte_window is not None:
            self.check(protocol.limits.byte_window.used == self.used_bytes, "the byte window leaks")
        self.check(protocol.controller.waiting == len(self.line), "the line is wrong")
        # A message without frames has no tag.
        oldest = min(min(self.unsettled, default=self.next_tag), protocol.parts.unconfirmed.outbound.given + 1)
        self.check(protocol.parts.unconfirmed.oldest == oldest, "the oldest unsettled tag is wrong")
        own: dict[str, list[Receipt]] = {}
        for sent in self.unsettled.values():
            if not sent.message_id.startswith(ID_PREFIX):
                own.setdefault(sent.message_id, []).append(sent.receipt)
        kept = {message_id: receipts for message_id, receipts in protocol.parts.returns.by_id.items() if receipts}
        self.check(kept == own, "what may come back is not known by its id, or what is settled still is")
        known = {sent.message_id for sent in self.unsettled.values()}
        self.check(known >= protocol.parts.returns.by_id.keys(), "ids pile up")
        begun = sum(sent.begun or tag <= self.wire.publishes for tag, sent in self.unsettled.items())
        self.check(protocol.in_flight == begun, f"in_flight is {protocol.in_flight} instead of {begun}")
        told = {(hold.kind, hold.source) for hold in protocol.gate.holds}
        ours = {hold for hold in told if hold[0] in ("capacity", "rate")}
        expected = self.holds | ({("transport", "")} if self.transport else set())
        self.check(told - ours == expected, f"holds are {told - ours} instead of {expected}")
        self.check(protocol.gate.is_open == (not told), "the gate is not open exactly when no hold is left")
        self.check(protocol.unwritten == self.unwritten, "unwritten bytes are wrong")
        woken = self.woken | set(protocol.reports.wake)
        oldest = min(self.unsettled, default=self.next_tag)
        for entry in list(self.flushes):
            done = entry[0] < oldest
            self.check((entry[1] in woken) == done, "a flush was woken too early, or not at all")
            if done:
                self.flushes.remove(entry)
        if self.unflow_waiters and self.open_now() and not self.line:
            for waiter in self.unflow_waiters:
                self.check(waiter in woken or self.rate is not None, "wait_unflowed was not woken")
            self.unflow_waiters.clear()
        # Forget the woken waiters that no check needs any more.
        self.woken = woken & ({waiter for _, waiter in self.flushes} | set(self.unflow_waiters))
        events = protocol.reports.events
        assert events is not None
        for event in events:
            self.check(event.seconds >= 0, "an event of negative length")
        protocol.reports.events = []
        protocol.reports.wake = []

    def end(self) -> None:
        """Lift all holds, and let the broker confirm everything. All messages must then be settled."""
        self.protocol.on_flow(True, self.now)
        self.flow_oks_due.append(True)
        self.unwritten += FLOW_OK_SIZE
        self.protocol.on_unblocked(self.now)
        for source in ("", "manager"):
            self.protocol.lift("paused", self.now, source=source)
        self.holds.clear()
        self.line_moves()
        for _ in range(100_000):
            if not self.line and not self.unsettled:
                break
            self.do_drain()
            if self.answerable():
                last = self.answerable()[-1]
                tags = self.answerable()
                self.protocol.on_ack(last, True, self.now)
                self.settle(tags, Outcome.CONFIRMED)
            self.line_moves()
            self.pass_time()
            self.compare()
        self.check(not self.line and not self.unsettled, "something never ended")
        self.check(self.protocol.window.used == 0, "the window leaks")

    def live(self, seconds: float) -> None:
        """Simulate events for a number of seconds of simulated time, and then the end."""
        until = self.now + seconds
        while self.now < until:
            self.step()
        self.end()
