"""`Channel.Flow`, `Connection.Blocked`, pauses: which messages may be written, and in which order (J3 J7)."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qflow_client import FlowControlTimeout, FlowEventKind, HoldKind, Message
from qflow_client.flow import Hold
from qflow_client.logs import flush_logs, write_log

from .support import CHANNEL, FRAME_MAX, MAX_BODY, Published, Wire, drain, holds, make, place, send, wait, wire, write

BODIES = [b"first", b"second", b"third"]


def test_J7_channel_flow_is_answered_and_then_no_message_is_written_until_flow_is_active() -> None:
    protocol = make()
    for body in BODIES:
        send(protocol, body)
    protocol.on_flow(False, 1.0)
    assert holds(protocol) == [HoldKind.CHANNEL_FLOW]
    assert wire(drain(protocol)).short == [False]
    assert protocol.data_to_write(1 << 20) == b""
    protocol.on_flow(True, 2.0)
    assert protocol.gate.is_open
    assert wire(drain(protocol)).short == [True, *BODIES]


def test_J7_before_flow_ok_only_the_rest_of_a_half_written_message_is_written() -> None:
    protocol = make()
    for body in BODIES:
        send(protocol, body)
    read = Wire().read(write(protocol, 3))
    protocol.on_flow(False, 1.0)
    read.read(drain(protocol))
    assert read.short == [b"first", False]
    protocol.on_flow(True, 2.0)
    assert read.read(drain(protocol)).short == [b"first", False, True, b"second", b"third"]


@pytest.mark.parametrize("border", [-1, 0, 1], ids=["before", "at", "after"])
def test_J7_after_channel_flow_a_half_written_message_of_many_frames_is_completed(border: int) -> None:
    protocol = make()
    large = b"L" * (3 * MAX_BODY)
    send(protocol, large)
    send(protocol, b"after")
    protocol.data_to_write(1 << 20)
    first = protocol.parts.unconfirmed.outbound._borders[0]
    read = Wire().read(write(protocol, first + border))
    protocol.on_flow(False, 1.0)
    read.read(drain(protocol))
    assert read.short == [large, False]
    protocol.on_flow(True, 2.0)
    assert read.read(drain(protocol)).short == [large, False, True, b"after"]


def test_J7_after_channel_flow_no_message_is_written_if_the_previous_message_was_written_completely() -> None:
    protocol = make()
    send(protocol, BODIES[0])
    size = protocol.unwritten
    send(protocol, BODIES[1])
    read = Wire().read(write(protocol, size))
    protocol.on_flow(False, 1.0)
    assert read.read(drain(protocol)).short == [BODIES[0], False]


def test_J7_waiting_messages_are_admitted_when_flow_is_active_again_and_written_after_older_messages() -> None:
    protocol = make()
    send(protocol, b"admitted")
    protocol.on_flow(False, 1.0)
    tickets = [wait(protocol, b"waits 1"), place(protocol, Message(b"waits 2"), 1.0)]
    written = drain(protocol)
    assert [ticket.receipt for ticket in tickets] == [None, None]
    protocol.on_flow(True, 2.0)
    assert wire(written + drain(protocol)).short == [False, True, b"admitted", b"waits 1", b"waits 2"]


def test_E15_a_liveness_probe_is_written_even_while_the_channel_is_flowed_but_never_inside_a_message() -> None:
    protocol = make()
    send(protocol)
    size = protocol.unwritten
    write(protocol, size - 1)
    protocol.hold("connection_blocked", 0.0)
    protocol.put_control(b"probe")
    assert protocol.unwritten == 6
    assert drain(protocol) == b"\xceprobe"
    assert protocol.unwritten == 0


def test_J7_every_channel_flow_is_answered_even_if_it_repeats_the_current_state() -> None:
    protocol = make()
    send(protocol, b"x")
    read = Wire().read(write(protocol, 1))
    for active in (True, False, False, True, False):
        protocol.on_flow(active, 1.0)
    assert read.read(drain(protocol)).short == [b"x", True, False, False, True, False]
    assert holds(protocol) == [HoldKind.CHANNEL_FLOW]
    assert protocol.gate.times_closed == 2


def test_J7_a_half_written_flow_ok_is_completed_before_the_next_flow_ok() -> None:
    protocol = make()
    protocol.on_flow(False, 1.0)
    read = Wire().read(write(protocol, 4))
    protocol.on_flow(True, 2.0)
    protocol.on_flow(False, 3.0)
    assert read.read(drain(protocol)).short == [False, True, False]


def test_writing_a_flow_ok_does_not_count_as_writing_a_message() -> None:
    protocol = make()
    send(protocol)
    protocol.on_flow(False, 1.0)
    write(protocol, 13)
    assert protocol.in_flight == 0
    protocol.on_ack(1, False, 1.0)
    assert protocol.unsettled == 1
    protocol.on_flow(True, 2.0)
    drain(protocol)
    assert protocol.in_flight == 1
    protocol.on_ack(1, False, 3.0)
    assert protocol.unsettled == 0


def test_acks_settle_messages_while_channel_flow_stops_the_channel() -> None:
    protocol = make()
    receipt = send(protocol)
    drain(protocol)
    protocol.on_flow(False, 1.0)
    protocol.on_ack(1, False, 2.0)
    assert receipt.delivered


def test_connection_blocked_holds_messages_of_which_no_byte_was_written() -> None:
    protocol = make()
    send(protocol, b"first")
    send(protocol, b"second")
    read = Wire().read(write(protocol, 1))
    protocol.on_blocked("low on memory", 1.0)
    assert [str(hold) for hold in protocol.gate.holds] == ["connection_blocked (low on memory)"]
    assert read.read(drain(protocol)).short == [b"first"]
    protocol.on_blocked("again", 2.0)
    protocol.on_unblocked(3.0)
    assert protocol.gate.is_open
    assert read.read(drain(protocol)).short == [b"first", b"second"]
    protocol.on_unblocked(4.0)


@pytest.mark.parametrize("flow_first", [True, False])
def test_if_channel_flow_and_connection_blocked_overlap_the_producer_is_released_when_both_have_ended(
    flow_first: bool,
) -> None:
    protocol = make()
    send(protocol)
    protocol.on_flow(False, 1.0)
    protocol.on_blocked("", 2.0)
    assert wire(drain(protocol)).short == [False], "the answer leaves, whatever is blocked"
    if flow_first:
        protocol.on_flow(True, 3.0)
        assert wire(drain(protocol)).short == [True]
        assert holds(protocol) == [HoldKind.CONNECTION_BLOCKED]
        protocol.on_unblocked(4.0)
        assert wire(drain(protocol)).short == [b"x"]
    else:
        protocol.on_unblocked(3.0)
        assert drain(protocol) == b""
        assert holds(protocol) == [HoldKind.CHANNEL_FLOW]
        protocol.on_flow(True, 4.0)
        assert wire(drain(protocol)).short == [True, b"x"]
    assert protocol.gate.is_open


def test_D5_a_paused_producer_still_writes_admitted_messages() -> None:
    protocol = make()
    send(protocol)
    protocol.hold(HoldKind.PAUSED, 1.0, source="manager", detail="stock-taking")
    ticket = wait(protocol)
    assert wire(drain(protocol)).short == [b"x"]
    protocol.lift(HoldKind.PAUSED, 2.0, source="manager")
    assert ticket.receipt is not None


def test_a_connection_blocked_that_arrives_before_the_channel_opens_holds_the_producer() -> None:
    protocol = make(opened=False)
    ticket = wait(protocol)
    protocol.on_blocked("low on memory", 1.0)
    protocol.channel_opened(1, 4096, 2.0)
    assert ticket.receipt is None
    assert protocol.is_stopped
    protocol.on_unblocked(3.0)
    assert wire(drain(protocol)).short == [b"x"]


@given(st.data())
def test_J7_for_any_order_of_writes_and_flows_no_message_begins_between_flow_ok_and_an_active_flow(
    data: st.DataObject,
) -> None:
    protocol = make(max_unwritten_bytes=1 << 30)
    bodies = [b"%d" % number * size for number, size in enumerate(data.draw(st.lists(st.sampled_from([1, 5000]))))]
    for body in bodies:
        send(protocol, body)
    read = Wire()
    asked = []
    for active in data.draw(st.lists(st.booleans(), max_size=6)):
        offered = protocol.data_to_write(data.draw(st.sampled_from([1, 100, 5000, 1 << 20])))
        count = data.draw(st.integers(0, len(offered)))
        border = protocol.advance(count, 0.0)
        read.read(offered[:count])
        assert border or protocol.unfinished, "in mid-frame there is something to finish"
        protocol.on_flow(active, 0.0)
        asked.append(active)
    protocol.on_flow(True, 0.0)
    read.read(drain(protocol))
    assert [each for each in read.short if isinstance(each, bool)] == [*asked, True]
    assert [each for each in read.short if isinstance(each, bytes)] == bodies
    active = True
    for each in read.short:
        if isinstance(each, bool):
            active = each
        else:
            assert active, "a message after Flow-Ok(False)"


# Events.


def test_flow_events_report_every_change_of_the_holds_in_order_with_wall_time_and_duration() -> None:
    protocol = make(name="orders", wall_offset=1000.0)
    protocol.reports.events = []
    protocol.on_flow(False, 10.0)
    protocol.on_flow(False, 11.0)
    protocol.on_blocked("low on memory", 12.0)
    protocol.on_flow(True, 15.0)
    protocol.on_unblocked(20.0)
    told = [
        (event.kind, event.hold.kind if event.hold else None, event.at, event.since, event.seconds, len(event.holds))
        for event in protocol.reports.events
    ]
    assert told == [
        (FlowEventKind.FLOWED, "channel_flow", 1010.0, 1010.0, 0.0, 1),
        (FlowEventKind.HOLD_RAISED, "connection_blocked", 1012.0, 1012.0, 0.0, 2),
        (FlowEventKind.HOLD_LIFTED, "channel_flow", 1015.0, 1010.0, 5.0, 1),
        (FlowEventKind.UNFLOWED, "connection_blocked", 1020.0, 1012.0, 8.0, 0),
    ]
    assert [event.flowed for event in protocol.reports.events] == [True, True, True, False]
    assert str(protocol.reports.events[0]) == "orders: flowed: channel_flow"
    assert str(protocol.reports.events[3]) == "orders: unflowed: connection_blocked (low on memory) after 8 s"
    assert {event.producer for event in protocol.reports.events} == {"orders"}


def test_all_times_of_a_hold_that_are_reported_to_the_application_are_wall_time() -> None:
    protocol = make(capacity=1, wall_offset=1000.0, flow_control_wait_notify_period=2.0)
    protocol.reports.events = []
    send(protocol)
    protocol.on_flow(False, 10.0)
    protocol.on_blocked("low on memory", 12.0)
    ticket = wait(protocol, now=13.0, timeout=5.0)
    protocol.line.look_at(ticket, 15.0)
    with pytest.raises(FlowControlTimeout) as caught:
        protocol.line.look_at(ticket, 18.0)
    protocol.on_unblocked(20.0)
    raised = [("channel_flow", 1010.0), ("connection_blocked", 1012.0), ("capacity", 1013.0)]
    assert told(caught.value.holds) == told(protocol.reports.events[-2].holds) == raised
    assert [told([event.hold]) for event in protocol.reports.events if event.hold] == [
        raised[:1],
        raised[1:2],
        raised[2:],
        raised[:1],
        raised[1:2],
    ]
    del raised[1]
    assert (
        told(protocol.flow_state(21.0).holds)
        == told(protocol.reports.holds)
        == told(protocol.reports.events[-1].holds)
        == raised
    )
    assert [hold.since for hold in protocol.gate.holds] == [10.0, 13.0], "inside it is monotonic"


def told(holds: Iterable[Hold]) -> list[tuple[str, float]]:
    return [(hold.kind, hold.since) for hold in holds]


@pytest.mark.parametrize("listened", [True, False])
def test_a_producer_that_replaces_another_one_reports_only_holds_that_differ_between_the_two(listened: bool) -> None:
    left, goes_on = make(), make()
    for protocol in (left, goes_on):
        protocol.reports.events = [] if listened or protocol is goes_on else None
        protocol.on_blocked("low on disk", 3.0)
    left.hold("mine", 4.0)
    goes_on.hold("other", 5.0)
    before = left.reports.events
    goes_on.reports.go_on_from(left.reports, 6.0)
    assert left.reports.events is before
    if not listened:
        assert goes_on.reports.events is None
        return
    assert [(event.kind, event.hold.kind) for event in goes_on.reports.events or () if event.hold] == [
        (FlowEventKind.HOLD_LIFTED, "mine"),
        (FlowEventKind.HOLD_RAISED, "other"),
    ]


def test_the_flow_state_shows_the_start_the_count_and_the_duration_of_each_hold() -> None:
    protocol = make(wall_offset=1000.0, opened=False)
    protocol.channel_opened(1, 4096, 2.0)
    state = protocol.flow_state(3.0)
    assert (state.flowed, state.since, state.times_flowed, state.holds) == (False, None, 0, ())
    protocol.on_flow(False, 10.0)
    protocol.on_blocked("", 11.0)
    state = protocol.flow_state(14.0)
    assert (state.flowed, state.since, state.times_flowed) == (True, 1010.0, 1)
    assert state.seconds_flowed == {"channel_flow": 4.0, "connection_blocked": 3.0}
    protocol.on_flow(True, 15.0)
    assert protocol.flow_state(16.0).since == 1010.0, "it has not been unflowed in between"


def test_the_duration_of_a_hold_raised_before_the_first_connection_counts_only_from_the_connection_on() -> None:
    protocol = make(opened=False, capacity=1)
    wait(protocol)
    wait(protocol)
    protocol.channel_opened(1, 4096, 2.0)
    state = protocol.flow_state(3.0)
    assert ([hold.kind for hold in state.holds], state.times_flowed) == (["capacity"], 1)
    assert state.seconds_flowed == {"capacity": 1.0}

    paused = make(opened=False)
    paused.hold(HoldKind.PAUSED, 1.0)
    paused.channel_opened(1, 4096, 2.0)
    assert paused.flow_state(3.0).times_flowed == 1


def test_acks_do_not_lift_a_hold_for_unwritten_bytes() -> None:
    protocol = make(max_unwritten_bytes=100)
    first = send(protocol)
    size = protocol.unwritten
    send(protocol, b"y" * 200)
    ticket = wait(protocol)
    write(protocol, size)
    protocol.on_ack(1, False, 1.0)
    assert first.delivered
    assert holds(protocol) == [HoldKind.TRANSPORT]
    assert ticket.receipt is None
    drain(protocol, 2.0)
    assert ticket.receipt is not None


def test_the_flow_state_shows_whether_and_why_the_producer_is_closed() -> None:
    protocol = make(wall_offset=1000.0)
    assert protocol.flow_state(1.0).closed is None
    protocol.close("closed by hand", 2.0)
    state = protocol.flow_state(3.0)
    assert (state.flowed, state.since, state.closed) == (False, None, "closed by hand")
    protocol.connection_lost("the producer is closed", 4.0)
    state = protocol.flow_state(5.0)
    assert (state.flowed, state.times_flowed, state.closed) == (False, 0, "closed by hand")
    lost = make()
    lost.connection_lost("reset by peer", 2.0)
    state = lost.flow_state(3.0)
    assert (state.flowed, state.since, state.closed) == (True, 2.0, "reset by peer")


def test_reading_the_flow_state_lifts_holds_by_the_window_or_the_rate_limit_that_are_outdated() -> None:
    protocol = make(capacity=1, rate=1.0)
    send(protocol, now=0.0)
    assert [hold.kind for hold in protocol.flow_state(0.0).holds] == ["capacity"]
    drain(protocol)
    protocol.on_ack(1, False, 0.5)
    assert [hold.kind for hold in protocol.flow_state(0.6).holds] == ["rate"]
    assert not protocol.flow_state(1.0).flowed


def test_holds_that_need_attention_of_an_operator_are_logged_at_a_higher_level(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def records() -> list[logging.LogRecord]:
        # Objects of earlier tests may still write to other logs.
        return [record for record in caplog.records if record.name == "qflow_client"]

    caplog.set_level(logging.DEBUG)
    protocol = make(name="orders", capacity=1)
    protocol.reports.logs.clear()
    protocol.on_blocked("low on memory", 1.0)
    protocol.on_unblocked(3.0)
    protocol.on_flow(False, 3.0)
    protocol.on_flow(True, 4.0)
    send(protocol)
    protocol.admission.send(b"x", "", "q", 5.0)
    assert not records(), "a record was logged while the lock of the protocol was held"
    write_log(protocol.reports.logs)
    assert flush_logs(20)
    assert [(record.levelname, record.getMessage()) for record in records()] == [
        ("WARNING", "orders: blocked (flowed): connection_blocked (low on memory)"),
        ("WARNING", "orders: hold lifted after 2 s: connection_blocked (low on memory)"),
        ("INFO", "orders: blocked (flowed): channel_flow"),
        ("INFO", "orders: hold lifted after 1 s: channel_flow"),
        ("DEBUG", "orders: blocked (flowed): capacity"),
    ]
    assert {(record.filename, record.funcName) for record in records()} == {("reporting.py", "report_hold")}


def test_log_entries_below_the_level_of_the_logger_are_not_stored(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "qflow_client")
    protocol = make()
    protocol.on_flow(False, 1.0)
    protocol.on_blocked("low on memory", 1.0)
    assert [level for level, *_ in protocol.reports.logs] == [logging.WARNING]


def test_the_time_before_the_first_connection_of_a_producer_does_not_count_as_flowed_time() -> None:
    protocol = make(opened=False)
    protocol.channel_opened(1, 4096, 2.0)
    assert protocol.flow_state(3.0).times_flowed == 0
    protocol.hold(HoldKind.DISCONNECTED, 4.0)
    protocol.channel_opened(1, 4096, 6.0)
    state = protocol.flow_state(7.0)
    assert (state.times_flowed, state.seconds_flowed) == (1, {"disconnected": 2.0})


def test_a_producer_without_listeners_that_connects_in_the_background_creates_no_events() -> None:
    protocol = make(opened=False)
    protocol.start_in_background(1.0)
    assert protocol.reports.events is None


@pytest.mark.parametrize("in_background", [False, True])
def test_only_a_producer_that_connects_in_the_background_counts_as_flowed_until_its_first_connection(
    *, in_background: bool
) -> None:
    protocol = make(opened=False)
    protocol.reports.events = []
    if in_background:
        protocol.start_in_background(1.0)
    protocol.channel_opened(1, 4096, 2.0)
    kinds = [event.kind for event in protocol.reports.events]
    assert kinds == (["flowed", "unflowed"] if in_background else [])
    protocol.connection_lost("", 3.0, reconnects=True)
    assert protocol.reports.events[-1].kind == "flowed"


@pytest.mark.parametrize("is_lifted_first", [False, True])
def test_a_hold_raised_before_the_first_connection_is_reported_by_a_flowed_and_an_unflowed_event(
    *, is_lifted_first: bool
) -> None:
    protocol = make(opened=False)
    protocol.reports.events = []
    protocol.hold(HoldKind.PAUSED, 1.0)
    if is_lifted_first:
        protocol.lift(HoldKind.PAUSED, 2.0)
    protocol.channel_opened(1, 4096, 3.0)
    if not is_lifted_first:
        protocol.lift(HoldKind.PAUSED, 4.0)
    assert [event.kind for event in protocol.reports.events] == ["flowed", "unflowed"]


def test_a_producer_that_connects_in_the_background_while_paused_reports_the_connect_as_a_second_hold() -> None:
    protocol = make(opened=False)
    protocol.reports.events = []
    protocol.hold(HoldKind.PAUSED, 1.0)
    protocol.start_in_background(2.0)
    protocol.channel_opened(1, 4096, 3.0)
    protocol.lift(HoldKind.PAUSED, 4.0)
    kinds = [event.kind for event in protocol.reports.events]
    assert kinds == ["flowed", "hold_raised", "hold_lifted", "unflowed"]


def test_J7_a_stopped_channel_writes_nothing_of_an_encoded_message_of_many_frames() -> None:
    protocol = make()
    send(protocol, bytes(3 * MAX_BODY))
    assert protocol.data_to_write(1)
    protocol.on_flow(False, 0.0)
    assert protocol.is_stopped
    assert protocol.has_answer
    assert wire(drain(protocol)).seen == [False]
    assert not protocol.has_answer
    assert (protocol.unsettled, protocol.in_flight) == (1, 0)
    protocol.on_flow(True, 1.0)
    answer, message = wire(drain(protocol)).seen
    assert answer is True
    assert isinstance(message, Published)
    assert len(message.body) == 3 * MAX_BODY


def test_the_method_that_stops_writing_returns_whether_a_message_is_half_written() -> None:
    protocol = make()
    for _ in range(3):
        send(protocol, b"body")
    written = write(protocol, 1)
    assert not protocol.end_writing()
    written += drain(protocol)
    assert len(wire(written).messages) == 1
    assert protocol.end_writing()
    assert drain(protocol) == b""
    assert (protocol.unsettled, protocol.written) == (3, 1)


def test_E6_the_number_of_undelivered_flow_events_is_bounded_and_dropped_events_are_counted() -> None:
    protocol = make(max_flow_events=5, capacity=1)
    protocol.reports.events = []
    for number in range(50):
        protocol.hold("paused", float(number), source="", detail=str(number))
        protocol.lift("paused", float(number), source="")
    assert 5 <= len(protocol.reports.events) <= 10
    last = protocol.reports.events[-2].hold
    assert last is not None
    assert last.detail == "49", "the newest stay"
    assert len(protocol.reports.events) + protocol.reports.lost_events["paused"] == 100
    for number in range(20):
        protocol.reports.report_waiting(1, 0.0, float(number))
    assert protocol.reports.lost_events.get(None, 0) > 0, "notices of sends that wait for others have no hold"


def test_after_writing_was_stopped_for_good_no_message_begins_even_if_channel_flow_becomes_active() -> None:
    protocol = make()
    protocol.on_blocked("memory", 0.0)
    protocol.on_unblocked(0.1)
    send(protocol)
    protocol.on_blocked("memory", 0.2)
    assert protocol.end_writing()
    protocol.on_unblocked(0.3)
    assert drain(protocol) == b""
    protocol.connection_lost("gone", 0.4, reconnects=True)
    protocol.channel_opened(CHANNEL, FRAME_MAX, 0.5)
    assert drain(protocol)
