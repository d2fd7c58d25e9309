"""Flow events that a slow reader loses, and the warnings in the log."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from qflow_client import FlowEvent, FlowEventKind
from qflow_client.logs import flush_logs
from qflow_client.skin import Listeners, Losses, Subscription
from qflow_client.sync.flow_events import FlowEvents

from .support import make


def event(number: int) -> FlowEvent:
    return FlowEvent(FlowEventKind.WAITING, "orders", None, (), float(number), 0.0, 0.0)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    def read() -> list[str]:
        assert flush_logs(20)
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return texts

    return read


def test_E6_lost_flow_events_of_a_slow_reader_are_logged_once_until_the_reader_has_caught_up(
    said: Callable[[], list[str]],
) -> None:
    losses = Losses("orders", 100, "%r is slow", "the reader")
    losses.report(0)
    assert said() == []
    losses.add(5)
    losses.report(100)
    text = "orders: %d flow events were dropped, because 'the reader' is slow; max_flow_events=100"
    assert said() == [text % 5]
    for _ in range(99):
        losses.add()
        losses.report(100)
    assert said() == []
    losses.add()
    losses.report(100)
    assert said() == [text % 100], "as many again"
    losses.report(0)
    losses.add()
    losses.report(50)
    assert said() == [text % 1], "it had caught up"
    assert losses.entry() is None


def test_E6_a_full_subscription_drops_the_oldest_flow_event_for_a_new_one_and_schedules_no_further_call() -> None:
    subscription = Subscription(print, None, "orders", 3)
    assert [subscription.put(event(number)) for number in range(5)] == [True] * 3 + [False] * 2
    assert [subscription.take().at for _ in range(3)] == [2.0, 3.0, 4.0]


def test_E6_flow_events_dropped_before_delivery_are_reported_to_their_subscribers(
    said: Callable[[], list[str]],
) -> None:
    protocol = make(max_flow_events=5)
    listeners: Listeners[FlowEvents] = Listeners("orders", 5)
    wants_all, wants_none = FlowEvents("orders", 5), FlowEvents("orders", 5)
    listeners.iterate(protocol, wants_all, None)
    listeners.iterate(protocol, wants_none, frozenset({"rate"}))
    calls: list[Subscription] = []
    listeners.add(protocol, "key", print, frozenset({"paused"}))
    for number in range(50):
        protocol.hold("paused", 0.0, source="", detail=str(number))
        protocol.lift("paused", 0.0, source="")
    listeners.pass_on(protocol, calls.append)
    assert len(calls) == 5
    assert len([next(wants_all) for _ in range(5)]) == 5
    assert [text.split(",")[0] for text in said()] == ["orders: 95 flow events were dropped"]
    calls[0].take()
    calls[0].report()
    assert [text.split(",")[0] for text in said()] == ["orders: 95 flow events were dropped"]
    assert listeners.end() == []
    assert list(wants_none) == list(wants_all) == []


def test_E6_the_last_flow_event_of_a_producer_is_never_dropped() -> None:
    events = FlowEvents("orders", 1)
    events.put(event(1))
    events.put(None)
    assert [each.at for each in events] == [1.0]
    assert list(events) == []
