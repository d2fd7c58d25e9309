"""A producer with a broker whose bytes are changed on the way, or a broker that sends invalid frames."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pamqp.commands
import pytest

from qflow_client import ConnectionFailed, Producer, QflowError, Receipt
from qflow_client.amqp.frames import frame
from qflow_client.broker import Broker
from qflow_client.testing import relay
from qflow_client.testing.proxy import Direction, FaultProxy
from tests.effort import rounds

from .tools import DEADLINE, in_time

CHANGES = rounds(40, least=8)
# About what a broker says until a channel is open.
OPENING = 650
METHODS = sorted(pamqp.commands.INDEX_MAPPING)


def use(producer: Producer) -> None:
    """Send and close; whatever happens, in time, and with an end for each message."""
    receipts: list[Receipt] = []
    for number in range(20):
        result = in_time(lambda number=number: producer.send(b"%d" % number, timeout=DEADLINE))  # type: ignore[misc]
        if isinstance(result, QflowError):
            break
        receipts.append(result)
    in_time(lambda: producer.flush(DEADLINE))
    in_time(lambda: producer.close(DEADLINE))
    assert all(receipt.done for receipt in receipts)


class Change:
    """Changes a stream at a few places, drawn by lot."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        # Most of it happens early, where most is decided.
        self._places = {
            chance.randrange(chance.choice([50, OPENING, OPENING + 300])) for _ in range(chance.choice([1, 1, 3]))
        }
        self._at = 0

    def __call__(self, data: bytes) -> bytes:
        out = bytearray()
        for byte in data:
            if self._at in self._places:
                out += self._other(byte)
            else:
                out.append(byte)
            self._at += 1
        return bytes(out)

    def _other(self, byte: int) -> bytes:
        chance = self._chance
        match chance.randrange(5):
            case 0:
                return bytes((byte ^ 1 << chance.randrange(8),))
            case 1:
                return chance.randbytes(chance.randrange(1, 9)) + bytes((byte,))
            case 2:
                return b""
            case 3:
                return bytes((chance.choice([0, 127, 206, 255]),))
            case _:
                return bytes((byte, byte))


@pytest.mark.parametrize("seed", [1, 2])
def test_changed_bytes_from_a_broker_raise_an_error_of_this_library_in_time(
    broker: Broker, skin: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    write = relay.Way._write
    change: Callable[[bytes], bytes]

    def write_changed(way: Any, data: bytes) -> None:
        write(way, change(data) if way is way.connection.ways[Direction.TO_CLIENT] else data)

    monkeypatch.setattr(relay.Way, "_write", write_changed)
    opened = 0
    with FaultProxy(broker.url) as proxy:
        # As it takes where nothing is changed, and more.
        change = bytes
        began = time.monotonic()
        skin(proxy.url, routing_key="q").close()
        deadline = max(5 * DEADLINE, 5 * (time.monotonic() - began))
        for number in range(CHANGES):
            change = Change(random.Random(f"{seed} {number}"))
            producer = in_time(lambda: skin(proxy.url, routing_key="q", connect_timeout=deadline), deadline)
            if isinstance(producer, QflowError):
                assert isinstance(producer, ConnectionFailed)
            else:
                opened += 1
                use(producer)
            proxy.cut()
    assert 0 < opened < CHANGES
    broker.wait_until(lambda broker: not broker.connections())


@pytest.mark.parametrize("seed", [1, 2])
def test_invalid_frames_from_a_broker_raise_an_error_of_this_library_in_time(
    broker: Broker, skin: Any, stack: ExitStack, seed: int
) -> None:
    proxy = stack.enter_context(FaultProxy(broker.url))
    for number in range(CHANGES):
        chance = random.Random(f"{seed} {number}")
        producer = skin(proxy.url, routing_key="q", connect_timeout=10)
        for _ in range(chance.choice([1, 1, 5])):
            channel = chance.choice([0, 1, 1, 1, 2, 65535])
            method = chance.choice(METHODS).to_bytes(4, "big")
            payload = method + chance.choice([b"", b"\0" * 20, chance.randbytes(chance.randrange(40))])
            kind = chance.choice([1, 1, 1, 2, 3, 8])
            proxy.inject(frame(kind, channel, payload if kind == 1 else payload[4:]))
        use(producer)
        proxy.cut()
