"""Recovery costs nothing while nothing fails: a message needs the same calls with it and without it."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest

from qflow_client import Message, ProducerSettings
from qflow_client.recovery import retries

from .support import drain, make, publish

MESSAGES = 50
# All settings for the handling of failures, and none of them.
ALL: dict[str, Any] = {"on_disconnect": "republish", "on_refused": "retry"}
NOTHING: dict[str, Any] = {"on_disconnect": "fail", "on_refused": "fail"}


def calls(payload: bytes | Message, acks: str, settings: dict[str, Any], *, came_back: bool = False) -> Counter[str]:
    """Count the calls, of Python's functions and of built-in ones, for messages from `send` to their acks."""
    pauses = retries(ProducerSettings(**settings))
    assert (pauses is None) == (settings is NOTHING)
    protocol = make(retries=pauses, capacity=1000, **settings)
    if came_back:
        # An earlier loss of the connection, and the messages that were unsettled then, are over.
        publish(protocol)
        protocol.connection_lost("cut", 0.0, reconnects=True)
        protocol.channel_opened(1, 4096, 0.0)
    # Work that is done once for a channel does not count.
    assert protocol.admission.send(payload, "", "q", 0.0) is not None
    drain(protocol)
    protocol.on_ack(0, True, 0.0)
    first = protocol.parts.unconfirmed.oldest
    made: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            made[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            made[argument.__qualname__] += 1

    # Callbacks of the garbage collector would be counted, too.
    gc.disable()
    sys.setprofile(profile)
    try:
        for _ in range(MESSAGES):
            protocol.admission.send(payload, "", "q", 1.0)
        data = protocol.data_to_write(1 << 20)
        protocol.advance(len(data), 1.0)
        if acks == "multiple":
            protocol.on_ack(first + MESSAGES - 1, True, 2.0)
        elif acks == "a run":
            protocol.on_acks([(first, MESSAGES)], 2.0)
        else:
            for tag in range(first, first + MESSAGES):
                protocol.on_ack(tag, False, 2.0)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert protocol.unsettled == 0
    return made


@pytest.mark.parametrize("acks", ["multiple", "a run", "one by one"])
@pytest.mark.parametrize("payload", [b"x", Message(b"x", headers={"k": 1})], ids=["bytes", "Message"])
def test_while_nothing_fails_a_send_makes_the_same_function_calls_with_and_without_recovery(
    payload: bytes | Message, acks: str
) -> None:
    # The first run fills the caches of the process.
    calls(payload, acks, NOTHING)
    without = calls(payload, acks, NOTHING)
    assert sum(without.values()) > MESSAGES
    assert calls(payload, acks, ALL) == without
    # An earlier loss of the connection costs nothing either.
    assert calls(payload, acks, ALL, came_back=True) == without
