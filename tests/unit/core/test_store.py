"""A store that is attached to a producer's state: which methods are called, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from qflow_client import HoldKind, Message, Receipt
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.flow import Limiter, WeightedLine, WindowLimiter
from qflow_client.receipt import Outcome

from .support import FRAME_MAX, PREFIX, drain, holds, make, publish, send, wait, wire


class NoRoom(Exception):
    """The store will never have room for the message."""


class Store:
    """Keeps numbers in memory. Waiters for its backlog can be added.

    Args:
        room: how many messages it accepts; ``None`` for any number.
        max_size: the most bytes of a body.
    """

    def __init__(self, room: int | None = None, max_size: int = 100) -> None:
        self.limiter: Limiter | None = None if room is None else WindowLimiter(room, kind=HoldKind.OUTBOX)
        self._max_size = max_size
        self.kept: set[int] = set()
        self.has_backlog = False
        self.waiters: list[Any] = []
        self.timer: float | None = None
        self.ended = ""
        # The lowest number that may not be written yet.
        self.kept_back = 1 << 60
        self.keeps_all_back = False

    def check_room(self, payload: bytes | Message, exchange: str, routing_key: str) -> None:
        size = len(payload.body if isinstance(payload, Message) else payload)
        if size > self._max_size:
            raise NoRoom(f"{size} bytes to {exchange!r}/{routing_key!r}")

    def admitting(self, receipt: Receipt, number: int) -> None:
        self.kept.add(number)

    def count_writable(self, unsent: deque[Receipt]) -> int:
        return sum(1 for receipt in unsent if receipt._number < self.kept_back)

    def settled(self, receipts: Sequence[Receipt]) -> None:
        for receipt in receipts:
            self.kept.remove(receipt._number)

    def admit_backlog(self, now: float) -> None: ...

    def spill_line(self, now: float) -> None: ...

    def when_flushed(self, waiter: Any) -> None:
        self.waiters.append(waiter)

    def forget_waiter(self, waiter: Any) -> bool:
        kept = waiter in self.waiters
        self.waiters = [each for each in self.waiters if each is not waiter]
        return kept

    def next_timer(self, now: float) -> float | None:
        return self.timer

    def end(self, reason: str) -> None:
        self.ended = reason

    def heal(self, unsettled: Sequence[Receipt]) -> None:
        self.kept = {receipt._number for receipt in unsettled}


def attached(**settings: Any) -> tuple[ProducerProtocol, Store]:
    protocol, store = make(**settings), Store()
    protocol.attach_store(store, 0.0)
    return protocol, store


@pytest.mark.parametrize("line", [None, WeightedLine({"a": 1, "b": 1})], ids=["own line", "given line"])
def test_senders_that_waited_before_the_outbox_was_attached_are_admitted_to_the_outbox_in_order(
    line: WeightedLine | None,
) -> None:
    protocol, store = make(opened=False, line=line), Store()
    first, second, third = (wait(protocol, waiter=number, timeout=5.0) for number in range(3))
    protocol.line.give_up(second, 0.5)
    protocol.set_capacity(1, 0.5)
    protocol.attach_store(store, 1.0)
    assert protocol.reports.wake == []
    protocol.channel_opened(1, FRAME_MAX, 1.0)
    assert protocol.reports.wake == [0]
    assert first.receipt is not None
    assert store.kept == {1}
    drain(protocol)
    protocol.on_ack(1, False, 2.0)
    assert store.kept == {2}
    assert third.receipt is not None
    assert protocol.reports.wake == [0, 2]


def test_a_send_too_large_for_the_outbox_raises_an_error_and_blocks_no_other_sender() -> None:
    protocol, store = make(opened=False), Store(max_size=10)
    large, small = wait(protocol, bytes(11), waiter="large"), wait(protocol, b"small", waiter="small")
    protocol.attach_store(store, 1.0)
    assert isinstance(large.error, NoRoom)
    assert str(large.error) == "11 bytes to ''/'q'"
    assert protocol.reports.wake == ["large"]
    protocol.channel_opened(1, FRAME_MAX, 1.0)
    assert small.receipt is not None


def test_a_full_outbox_holds_a_producer_even_if_its_window_has_room() -> None:
    protocol, store = make(capacity=5), Store(room=2)
    protocol.attach_store(store, 0.0)
    send(protocol)
    send(protocol)
    assert protocol.admission.send(b"x", "", "q", 0.0) is None
    assert holds(protocol) == [HoldKind.OUTBOX]
    assert store.kept == {1, 2}


def test_send_at_once_returns_none_if_the_producer_has_an_outbox() -> None:
    protocol, store = attached()
    assert protocol.admission.send_at_once(b"x", "", "q") is None
    assert store.kept == set()
    send(protocol)
    assert store.kept == {1}
    assert protocol.admission.id_prefix == PREFIX


def test_E13_a_message_that_is_not_yet_on_disk_and_all_later_messages_are_not_written_to_the_socket() -> None:
    protocol, store = attached()
    first, second, third = (send(protocol, body) for body in (b"1", b"2", b"3"))
    store.kept_back = second._number
    assert protocol.has_output
    assert [message.body for message in wire(drain(protocol)).messages] == [b"1"]
    assert drain(protocol) == b""
    store.keeps_all_back = True
    assert not protocol.has_output
    store.keeps_all_back = False
    assert protocol.in_flight == 1
    store.kept_back = third._number + 1
    assert [message.body for message in wire(drain(protocol)).messages] == [b"2", b"3"]
    assert not protocol.has_output
    protocol.on_ack(3, True, 1.0)
    assert [receipt.outcome for receipt in (first, second, third)] == [Outcome.CONFIRMED] * 3


def test_E13_messages_that_were_written_are_resent_before_messages_that_are_not_yet_on_disk() -> None:
    protocol, store = attached()
    publish(protocol, b"1")
    store.kept_back = send(protocol, b"2")._number
    protocol.connection_lost("cut", 1.0, reconnects=True)
    protocol.channel_opened(1, FRAME_MAX, 2.0)
    assert [message.body for message in wire(drain(protocol, 2.0)).messages] == [b"1"]
    store.kept_back += 1
    assert [message.body for message in wire(drain(protocol, 2.0)).messages] == [b"2"]


def test_a_flush_waits_for_outbox_messages_that_are_only_on_disk_and_stops_at_its_timeout() -> None:
    protocol, store = attached()
    assert not protocol.waiters.when_flushed("nothing to wait for")
    store.has_backlog = True
    assert protocol.waiters.when_flushed("backlog")
    assert store.waiters == ["backlog"]
    assert protocol.waiters.forget("backlog")
    assert not protocol.waiters.forget("backlog")
    store.has_backlog = False
    send(protocol)
    assert protocol.waiters.when_flushed("window")
    assert protocol.waiters.forget("window")


def test_a_closed_producer_still_needs_a_channel_while_its_outbox_has_messages_to_send() -> None:
    protocol, store = attached()
    store.has_backlog = True
    protocol.close("closed by hand", 1.0)
    assert protocol.wants_channel
    store.has_backlog = False
    assert not protocol.wants_channel
    store.has_backlog = True
    protocol.connection_lost("lost for good", 2.0)
    assert store.ended == "lost for good"
    assert not protocol.wants_channel


def test_the_next_timer_of_a_producer_is_the_timer_of_its_outbox_if_that_is_earlier() -> None:
    protocol, store = attached(rate=1.0)
    assert protocol.next_timer(0.0) is None
    store.timer = 7.0
    assert protocol.next_timer(0.0) == 7.0
