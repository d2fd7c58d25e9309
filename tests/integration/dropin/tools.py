"""Tools that the tests of the drop-in for pika share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from qflow_client import HoldKind
from qflow_client.pika import exceptions
from tests.integration.producer.tools import PATIENCE, Job, eventually, start

_REFUSED = r"the connection was made in process \d+, and this is process \d+: .* make a connection in the child"


def pump(connection: Any, condition: Callable[[], object], what: str = "") -> None:
    """Let a `BlockingConnection` do its I/O until a condition is true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE} s: {what or condition}"
        connection.process_data_events(0.01)


def held(channel: Any, *kinds: str) -> None:
    """Let the connection do its I/O until a channel has holds of exactly these kinds."""
    pump(
        channel.connection,
        lambda: sorted(str(hold.kind) for hold in channel.flow_state.holds) == sorted(kinds),
        f"held by {kinds}",
    )


def wait_at_most(channel: Any, seconds: float) -> None:
    """Set the maximum wait of later calls of a channel. Tests connect with a long wait for calls that must succeed."""
    channel._flow.settings = channel._flow.settings.replace(max_producer_flow_control_wait=seconds)


@contextmanager
def waiting_at_most(channel: Any, seconds: float) -> Iterator[None]:
    """Set the maximum wait of a channel's calls in the block. Other calls must succeed, and keep their long wait."""
    before = channel._flow.settings
    wait_at_most(channel, seconds)
    try:
        yield
    finally:
        channel._flow.settings = before


def start_waiting(channel: Any, body: bytes = b"") -> Job:
    """Start a publish on another thread, and wait until it waits for flow control."""
    job = start(channel.basic_publish, "", "q", body)
    eventually(lambda: channel._flow.protocol.controller.waiting == 1)
    return job


def stop(channel: Any, broker: Any) -> None:
    """Let the broker stop a channel, even if it has not published, and wait until the channel is held."""
    (name,) = (each.name for each in broker.channels() if each.number == channel.channel_number)
    broker.flow(False, name)
    held(channel, HoldKind.CHANNEL_FLOW)


def refused(*calls: Callable[[], object]) -> None:
    """Check that each call raises the error for a forked child."""
    for call in calls:
        with pytest.raises(exceptions.ConnectionWrongStateError, match=_REFUSED):
            call()


def end_thread_safe(connection: Any) -> None:
    """Close a thread-safe `Connection`, and the resources that pika leaves open."""
    connection.abort(1)
    connection._ioloop_thread.join(PATIENCE)
    transport = connection._connection._transport
    if transport is not None:
        # The loop has crashed, so close its socket here.
        transport._sock.close()
    connection._connection.ioloop.close()
