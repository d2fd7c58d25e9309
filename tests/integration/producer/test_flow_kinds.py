"""`on_flow` and `flow_events` with events of some hold kinds only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from qflow_client import HoldKind, Producer
from qflow_client.broker import Broker

from .tools import Flows, hold, start, start_send, wait_held


def kinds_told(flows: Flows) -> list[str]:
    return [str(event.hold.kind) for event in flows.events if event.hold is not None]


def test_a_flow_callback_gets_only_events_about_holds_of_the_requested_kinds(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(capacity=1)
    some, all_ = Flows(), Flows()
    producer.on_flow(some, kinds=(HoldKind.CONNECTION_BLOCKED, "paused"))
    producer.on_flow(all_)
    broker.withhold_confirms()
    producer.send(b"")
    waiting = start(producer.send, b"", timeout=None)
    wait_held(producer, "capacity")
    broker.release_confirms()
    waiting.result()
    hold(broker, producer, "connection_blocked")
    broker.unblock()
    assert producer.wait_unflowed(20)
    producer.pause()
    producer.resume()
    # The same thread calls both, so that who hears of all is told last of the last.
    all_._events.wait_for(lambda _: kinds_told(all_).count("paused") == 2, "a pause and its end")
    assert kinds_told(some) == ["connection_blocked"] * 2 + ["paused"] * 2
    assert "capacity" in kinds_told(all_)


def test_an_iterator_over_flow_events_gets_only_events_about_holds_of_the_requested_kinds(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(capacity=1)
    events = producer.flow_events(kinds=["paused"])
    broker.withhold_confirms()
    producer.send(b"")
    waiting = start(producer.send, b"", timeout=None)
    wait_held(producer, "capacity")
    broker.release_confirms()
    waiting.result()
    producer.flush()
    producer.pause("a break")
    producer.resume()
    told = [next(events), next(events)]
    assert [(event.hold.kind, event.hold.detail) for event in told if event.hold] == [("paused", "a break")] * 2
    producer.close()
    assert list(events) == []


def test_a_wait_notice_names_the_oldest_hold(make_producer: Callable[..., Producer], broker: Broker) -> None:
    producer = make_producer(flow_control_wait_notify_period=0.05)
    paused, rate = Flows(), Flows()
    producer.on_flow(rate, kinds=["rate"])
    producer.on_flow(paused, kinds=["paused"])
    producer.pause()
    waiting = start_send(producer, b"")
    paused._events.wait_for(lambda events: any(event.waiting for event in events), "a notice")
    assert rate.events == []
    producer.resume()
    waiting.result()


@pytest.mark.parametrize("kinds", ["paused", 5, [None]])
def test_a_flow_callback_with_a_value_that_is_not_a_list_of_hold_kinds_raises_an_error(
    producer: Producer, kinds: Any
) -> None:
    with pytest.raises(TypeError):
        producer.on_flow(print, kinds=kinds)
    with pytest.raises(TypeError):
        producer.flow_events(kinds=kinds)


def test_a_flow_callback_for_a_hold_kind_that_does_not_exist_raises_an_error(producer: Producer) -> None:
    for listen in (partial(producer.on_flow, print), producer.flow_events):
        with pytest.raises(ValueError, match="no hold kind 'blocked'; the kinds are channel_flow, connection_blocked"):
            listen(kinds=["paused", "blocked"])


def test_a_flow_callback_that_is_not_callable_raises_an_error(producer: Producer) -> None:
    with pytest.raises(TypeError, match="callback='x': it must be callable"):
        producer.on_flow("x")  # type: ignore[arg-type]  # that is the point
