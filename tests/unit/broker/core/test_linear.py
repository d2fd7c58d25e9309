"""The time for decoding is proportional to the input. No byte is copied once for each field before it.

Frequent operations of queues do not look at each consumer or message.
"""

from __future__ import annotations

import random
from collections import deque

import pytest

from qflow_client.broker.core import wire
from qflow_client.broker.core.entries import QueueEntry
from qflow_client.broker.core.errors import ConnectionException
from qflow_client.broker.core.properties import decode_headers, decode_properties
from qflow_client.flow import FlowSource

from ..tools import PROPERTIES, Publisher, make_queue, message
from .test_queue import Taker, fill

# The number of nulls that fit in a frame of 128 KiB.
NULLS = b"A" + (130_000).to_bytes(4, "big") + b"V" * 130_000


class Counted(bytes):
    """Bytes that count how many bytes are copied from them."""

    copied = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        if isinstance(key, slice):
            Counted.copied += len(found)
            return Counted(found)
        return found


def table(fields):
    return len(fields).to_bytes(4, "big") + fields


def header(fields):
    return Counted(b"\0\x3c\0\0" + bytes(8) + (1 << 13).to_bytes(2, "big") + table(fields))


def declare(fields):
    return Counted(b"\0\x32\0\x0a\0\0\1q\0" + table(fields))


@pytest.mark.parametrize(
    ("decode", "make"),
    [
        (wire.check_properties, header),
        (decode_headers, header),
        (decode_properties, header),
        (wire.decode_method, declare),
    ],
    ids=["check", "headers", "properties", "method"],
)
def test_the_time_to_decode_an_array_of_nulls_is_proportional_to_its_size(decode, make):
    data = make(b"\1a" + NULLS)
    Counted.copied = 0
    decode(data)
    assert Counted.copied < 8 * len(data)


def nested(depth):
    value = b"V"
    for _ in range(depth):
        value = b"A" + table(value)
    return b"\1a" + value


@pytest.mark.parametrize(("decode", "make"), [(wire.check_properties, header), (wire.decode_method, declare)])
def test_decoding_tables_that_are_nested_too_deep_raises_a_clear_error(decode, make):
    decode(make(nested(99)))
    with pytest.raises(ConnectionException, match="tables and arrays are nested more than 100 deep"):
        decode(make(nested(100)))


def test_a_table_that_pamqp_encoded_is_decoded_to_the_same_values():
    assert dict(decode_properties(wire.encode_header(0, PROPERTIES))) == dict(PROPERTIES)


def test_a_null_in_the_encoding_of_old_RabbitMQ_clients_is_decoded():
    assert decode_headers(header(b"\1a\0\1bV")) == {"a": None, "b": None}


def test_E9_the_cache_of_header_tables_that_were_already_checked_is_small(monkeypatch):
    known: set[bytes] = set()
    monkeypatch.setattr(wire, "_sound_tables", known)
    for number in range(20):
        wire.check_properties(header(b"\1%cI\0\0\0\1" % (65 + number)))
        wire.check_properties(header(b"\1%c" % (65 + number) + b"A" + table(b"V" * 10_000)))
    assert len(known) == 20
    assert wire._MAX_SOUND_TABLES * wire._MAX_SOUND_TABLE <= 1 << 20


class CountedConsumer(Taker):
    """A consumer that counts how often any such consumer is compared or looked at."""

    looks = 0

    def __init__(self):
        super().__init__()
        self._is_active = False

    def __eq__(self, other):
        CountedConsumer.looks += 1
        return self is other

    def __hash__(self):
        return id(self)

    @property
    def is_active(self):
        CountedConsumer.looks += 1
        return self._is_active

    @is_active.setter
    def is_active(self, value):
        self._is_active = value


@pytest.mark.parametrize("is_single", [False, True])
@pytest.mark.parametrize("removed", [0, 50, 99])
def test_the_time_to_remove_a_consumer_does_not_depend_on_the_number_of_consumers(is_single, removed):
    queue = make_queue({"x-single-active-consumer": is_single})
    consumers = [CountedConsumer() for _ in range(100)]
    for consumer in consumers:
        queue.dispatcher.add(consumer, exclusive=False)
    CountedConsumer.looks = 0
    queue.remove_consumer(consumers[removed])
    assert CountedConsumer.looks < 5
    # The other consumers get the messages, in turn or by their age.
    del consumers[removed]
    for _ in range(2):
        queue.enqueue(message())
        queue.after_publish()
    assert [len(consumer.entries) for consumer in consumers[:2]] == ([2, 0] if is_single else [1, 1])


class CountedDeque(deque[QueueEntry]):
    """A deque that counts how often an element is read or removed."""

    looks = 0

    def __getitem__(self, index):
        self.looks += 1
        return super().__getitem__(index)

    def popleft(self):
        self.looks += 1
        return super().popleft()


@pytest.mark.parametrize("place", [0, 1, 499, 500, 998, 999])
def test_a_message_is_requeued_into_a_long_queue_without_a_look_at_every_message(place):
    queue = fill(make_queue(), [1] * 1000)
    entries = [queue.take(no_ack=False) for _ in range(1000)]
    queue.dispatcher.requeue(entry for entry in entries if entry is not entries[place])
    queue.contents.ready = ready = CountedDeque(queue.contents.ready)
    queue.dispatcher.requeue([entries[place]])
    assert ready.looks < 50
    assert list(queue.contents.ready) == entries


@pytest.mark.parametrize("seed", range(20))
def test_messages_that_are_requeued_in_any_order_return_to_their_places(seed):
    chance = random.Random(seed)
    queue = fill(make_queue(), [1] * 50)
    entries = [queue.take(no_ack=False) for _ in range(50)]
    unacked = list(entries)
    while unacked:
        back = chance.sample(unacked, chance.randint(1, len(unacked)))
        unacked = [entry for entry in unacked if entry not in back]
        queue.dispatcher.requeue(back)
        assert list(queue.contents.ready) == [entry for entry in entries if entry not in unacked]


class CountedDict(dict[FlowSource, None]):
    """A dictionary that counts how often its keys are listed."""

    looks = 0

    def __iter__(self):
        self.looks += 1
        return super().__iter__()


@pytest.mark.parametrize("interval", [0.0, 1.0])
def test_a_message_that_leaves_a_queue_that_stays_ON_does_not_look_at_each_blocked_channel(make_world, interval):
    world = make_world(resume_interval=interval)
    queue = world.host.declare_queue("q", arguments={"qpid.flow_stop_count": 3, "qpid.flow_resume_count": 2})
    publishers = [Publisher(str(number)) for number in range(8)]
    for publisher in publishers:
        queue.enqueue(message(), publisher)
    (family,) = queue.flows.families
    family._blocked = blocked = CountedDict(family._blocked)
    for _ in range(6):
        queue.take(no_ack=True)
    assert (queue.flows.is_on, len(blocked), blocked.looks) == (True, 5, 0)
    queue.take(no_ack=True)
    assert not queue.flows.is_on
    assert len(queue.flows.blocked) == (4 if interval else 0)
