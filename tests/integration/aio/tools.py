"""Tools that the tests of the asynchronous producer share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from qflow_client import AsyncProducer
from tests.integration.producer.tools import PATIENCE

#: The fixture that runs a test's coroutine.
Run = Callable[..., Any]


async def soon(condition: Callable[[], object], what: str = "", *, timeout: float = PATIENCE) -> None:
    """Wait until a condition is true. Use this for conditions without an event."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not within {timeout} s: {what or condition}"
        await asyncio.sleep(0.002)


def kinds(producer: AsyncProducer) -> list[str]:
    """Return the kinds of the current holds of a producer, the oldest first."""
    return [str(hold.kind) for hold in producer.flow_state.holds]


async def held(producer: AsyncProducer, *wanted: str) -> None:
    """Wait until a producer has holds of all these kinds. The producer may also have other holds."""
    await soon(lambda: set(wanted) <= set(kinds(producer)), f"{producer} held by {wanted}, not {kinds(producer)}")


async def in_line(producer: AsyncProducer, count: int) -> None:
    """Wait until exactly `count` sends wait for admission."""
    # This number is not public. Tests need it to send messages in a given order without sleeping.
    await soon(lambda: producer._protocol.controller.waiting == count, f"{count} sends in line")
