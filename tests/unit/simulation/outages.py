"""Simulates a producer with lost connections, closed channels and refusals, and checks the broker's queue.

`life` compares every step with a model. This module checks only the guarantees: each admitted message is settled
exactly once, confirmed messages are in the queue, second copies are marked, first copies come in order, and a message
that the broker rejects with an error affects no other messages.
"""

from __future__ import annotations

from random import Random

import pamqp.commands
import pamqp.frame
import pamqp.header

from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.tickets import SendTicket
from qflow_client.errors import FlowControlTimeout
from qflow_client.message import REPUBLISHED
from qflow_client.receipt import Outcome, Receipt
from qflow_client.recovery import retries
from qflow_client.settings import ProducerSettings
from tests.unit.core.support import place

from .life import FRAME_MAX, ID_PREFIX, BrokenContract

__all__ = ["Outages"]

#: A message for which the broker closes the channel, a message for which it drops the connection, and a normal message.
POISON, DEADLY, PLAIN = b"poison", b"deadly", b"plain"

_PUBLISH = (60, 40)


class Outages:
    """One simulated producer, and the broker's queue.

    Args:
        seed: seed of all random events.
        protocol_type: the class under test.
    """

    def __init__(self, seed: int, protocol_type: type[ProducerProtocol] = ProducerProtocol) -> None:
        self.random = Random(seed)
        self.now = 1000.0
        settings = ProducerSettings(
            routing_key="q",
            capacity=self.random.choice([1, 5, 30]),
            max_unwritten_bytes=3000,
            reconnect_delay_max=1.0,
            reconnect_jitter=0.0,
            retry_for=1e9,
        )
        self.protocol = protocol_type(settings, id_prefix=ID_PREFIX, now=self.now, retries=retries(settings))
        self.protocol.reports.settled = []
        self.admitted: dict[str, Receipt] = {}
        self.waiting: list[SendTicket] = []
        self.given_up: list[SendTicket] = []
        self.settled: set[str] = set()
        # Messages in the broker's queue: the message id, and whether the message is marked as a possible copy.
        self.queue: list[tuple[str, bool]] = []
        self.refused: set[str] = set()
        self.is_friendly = False
        self.counts: dict[str, int] = {}
        self.connect()

    def check(self, holds: bool, words: str) -> None:
        if not holds:
            raise BrokenContract(f"at {self.now:.3f} s: {words}")

    # The broker.

    def connect(self) -> None:
        self.on_the_way = b""
        self.body_left = 0
        self.coming: list[bytes] = []
        self.coming_id, self.coming_marked = "", False
        self.tag = 0
        self.unconfirmed: list[int] = []
        self.protocol.channel_opened(1, FRAME_MAX, self.now)

    def disconnect(self) -> None:
        self.protocol.connection_lost("the connection is lost", self.now, reconnects=True)

    def hear(self) -> None:
        """Let the broker read the complete frames, until it closes the channel or the connection."""
        while len(self.on_the_way) >= 7 and self.protocol.channel.number is not None:
            size = int.from_bytes(self.on_the_way[3:7], "big") + 8
            if len(self.on_the_way) < size:
                return
            _, _, frame = pamqp.frame.unmarshal(self.on_the_way[:size])
            self.on_the_way = self.on_the_way[size:]
            if isinstance(frame, pamqp.header.ContentHeader):
                self.coming = []
                self.coming_id = str(frame.properties.message_id)
                self.coming_marked = bool((frame.properties.headers or {}).get(REPUBLISHED))
                self.body_left = frame.body_size
            elif not isinstance(frame, pamqp.commands.Basic.Publish):
                body = bytes(getattr(frame, "value", b""))
                self.coming.append(body)
                self.body_left -= len(body)
            else:
                continue
            if not self.body_left:
                self.publish(b"".join(self.coming))

    def publish(self, body: bytes) -> None:
        self.tag += 1
        receipt = self.protocol.parts.unconfirmed.with_number(int(self.coming_id.removeprefix(ID_PREFIX), 16))
        told = 0 if receipt is None else receipt._tag
        self.check(told == self.tag, f"{self.coming_id} is taken for delivery tag {told}, and is {self.tag}")
        if body.startswith(POISON):
            self.protocol.channel_closed(404, "NOT_FOUND", _PUBLISH, self.now)
        elif body.startswith(DEADLY):
            self.disconnect()
        elif not self.is_friendly and self.random.random() < 0.02:
            self.refused.add(self.coming_id)
            self.protocol.on_nack(self.tag, False, self.now)
        else:
            self.queue.append((self.coming_id, self.coming_marked))
            self.unconfirmed.append(self.tag)

    # The events.

    def do_send(self) -> None:
        kind = self.random.choices([PLAIN, POISON, DEADLY], [200, 4, 3])[0]
        body = kind + bytes(self.random.choice([0, 10, 200, 9000]))
        receipt = self.protocol.admission.send(body, "", "q", self.now)
        if receipt is not None:
            self.take(receipt)
        elif len(self.waiting) < 10:
            timeout = self.random.choice([0.1, 3.0, None])
            self.waiting.append(place(self.protocol, body, self.now, timeout=timeout, waiter=object()))

    def take(self, receipt: Receipt) -> None:
        assert receipt.message_id is not None
        self.admitted[receipt.message_id] = receipt

    def do_write(self) -> None:
        data = self.protocol.data_to_write(self.random.choice([10, 1000, 1 << 16]))
        if data and self.protocol.channel.number is not None:
            count = self.random.randint(1, self.random.choice([len(data), min(len(data), 200)]))
            self.protocol.advance(count, self.now)
            self.on_the_way += data[:count]

    def do_hear(self) -> None:
        self.hear()

    def do_confirm(self) -> None:
        if self.unconfirmed and self.protocol.channel.number is not None:
            if self.random.random() < 0.5:
                at = self.random.randrange(len(self.unconfirmed))
                self.protocol.on_ack(self.unconfirmed.pop(at), False, self.now)
            elif len(self.unconfirmed) == self.unconfirmed[-1] - self.unconfirmed[0] + 1:
                # This answer confirms all these messages, so there must be no refused messages between them.
                self.protocol.on_ack(self.unconfirmed[-1], True, self.now)
                self.unconfirmed.clear()

    def do_lose(self) -> None:
        # Write before the loss, so that the connection is often lost in the middle of a batch.
        self.do_write()
        # Some of the bytes on the way arrive.
        if self.random.random() < 0.5:
            self.on_the_way = self.on_the_way[: self.random.randint(0, len(self.on_the_way))]
            self.hear()
        if self.protocol.channel.number is not None:
            self.disconnect()

    def do_connect(self) -> None:
        if self.protocol.channel.number is None:
            self.connect()

    STEPS = ((do_send, 30), (do_write, 30), (do_hear, 20), (do_confirm, 20), (do_lose, 1), (do_connect, 10))

    def step(self) -> None:
        """Simulate one random event."""
        do = self.random.choices([do for do, _ in self.STEPS], [weight for _, weight in self.STEPS])[0]
        self.counts[do.__name__] = self.counts.get(do.__name__, 0) + 1
        do(self)
        self.pass_time(self.random.expovariate(20))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        timer = self.protocol.next_timer(self.now)
        if timer is not None and timer <= self.now:
            self.protocol.on_timer(self.now)
        for ticket in list(self.waiting):
            try:
                self.protocol.line.look_at(ticket, self.now)
            except FlowControlTimeout:
                self.given_up.append(ticket)
            if ticket.decided or ticket in self.given_up:
                self.waiting.remove(ticket)
                if ticket.receipt is not None:
                    self.check(ticket not in self.given_up, "a message was admitted that had timed out")
                    self.take(ticket.receipt)
        self.protocol.reports.wake = []
        self.protocol.reports.logs = []
        told = self.protocol.reports.settled
        assert told is not None
        self.protocol.reports.settled = []
        for receipt in told:
            message_id = receipt.message_id
            assert message_id is not None
            self.check(message_id not in self.settled, f"{message_id} was settled twice")
            self.settled.add(message_id)
        self.check(self.protocol.window.used == self.protocol.unsettled, "the window leaks")

    # The end.

    def end(self) -> None:
        """Keep the connection, and accept all messages. All messages must then be settled."""
        self.is_friendly = True
        for _ in range(2000):
            if not self.waiting and not self.protocol.unsettled:
                break
            self.do_connect()
            while self.protocol.channel.number is not None and (data := self.protocol.data_to_write(1 << 16)):
                self.protocol.advance(len(data), self.now)
                self.on_the_way += data
            self.hear()
            while self.unconfirmed and self.protocol.channel.number is not None:
                self.protocol.on_ack(self.unconfirmed.pop(0), False, self.now)
            timer = self.protocol.next_timer(self.now)
            self.pass_time(0.1 if timer is None else max(0.1, timer - self.now + 0.001))
        self.check(not self.waiting and not self.protocol.unsettled, "something never ended")
        self.check(self.settled == self.admitted.keys(), "something was admitted and never settled, or the other way")
        there = {message_id for message_id, _ in self.queue}
        for message_id, receipt in self.admitted.items():
            body = receipt.message.body
            expected = Outcome.CONFIRMED
            if body.startswith(POISON):
                expected = Outcome.REJECTED
            elif body.startswith(DEADLY):
                expected = Outcome.UNKNOWN
            self.check(receipt._outcome is expected, f"{receipt.describe()} instead of {expected}")
            self.check((message_id in there) == (expected is Outcome.CONFIRMED), f"{receipt.describe()} in the queue")
        self.check(there <= self.admitted.keys(), "something is in the queue that was never admitted")
        unmarked = [message_id for message_id, marked in self.queue if not marked]
        self.check(len(unmarked) == len(set(unmarked)), "a second copy bears no mark")
        first = dict.fromkeys(message_id for message_id, _ in self.queue)
        in_order = [message_id for message_id in first if message_id not in self.refused]
        self.check(in_order == sorted(in_order), "first copies are out of order")

    def live(self, steps: int) -> None:
        """Simulate a number of random events, and then the end."""
        for _ in range(steps):
            self.step()
        self.end()
