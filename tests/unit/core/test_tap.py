"""The tap: the frames that the library and the channels get, and the order in which they write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pamqp.base
import pamqp.commands
import pamqp.frame
import pamqp.header
import pamqp.heartbeat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qflow_client.amqp.frames import (
    ACK,
    BODY_FRAME,
    CHANNEL_CLOSE,
    CHANNEL_FLOW,
    CONNECTION_BLOCKED,
    HEADER_FRAME,
    HEARTBEAT,
    METHOD_FRAME,
    NACK,
    RETURN,
    FrameError,
    frame,
)
from qflow_client.amqp.tap import Tap
from tests.effort import rounds
from tests.interrupting import each_interrupt
from tests.unit.messages import WritingChannel

from .support import Wire, drain, holds, make, place, publish_many, send, wire

Basic, Channel, Connection = pamqp.commands.Basic, pamqp.commands.Channel, pamqp.commands.Connection


def decode(data: bytes) -> list[Any]:
    """Return the methods of complete frames."""
    found = []
    while data:
        size, _, method = pamqp.frame.unmarshal(data)
        found.append(method)
        data = data[size:]
    return found


class Recorder(WritingChannel):
    """A channel that records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[Any, ...]] = []

    def on_ack(self, tag: int, multiple: bool, now: float) -> None:
        self.told.append(("ack", tag, multiple))

    def on_acks(self, acks: list[tuple[int, int]], now: float) -> None:
        for first, count in acks:
            self.told += [("ack", tag, not count) for tag in range(first, first + (count or 1))]

    def on_nack(self, tag: int, multiple: bool, now: float) -> None:
        self.told.append(("nack", tag, multiple))

    def on_return(self, code: int, text: str, exchange: str, routing_key: str, header: bytes, body: bytes) -> None:
        self.told.append(("return", code, text, exchange, routing_key, header, body))

    def on_flow(self, active: bool, now: float) -> None:
        self.told.append(("flow", active))

    def on_blocked(self, reason: str, now: float) -> None:
        self.told.append(("blocked", reason))

    def on_unblocked(self, now: float) -> None:
        self.told.append(("unblocked",))

    def channel_closed(self, code: int, text: str, method: tuple[int, int], now: float) -> None:
        self.told.append(("closed", code, text, method))


def encode(method: pamqp.base.Frame, channel: int = 1) -> bytes:
    return pamqp.frame.marshal(method, channel)


def content(body: bytes, frame_size: int = 5, channel: int = 1) -> bytes:
    header = pamqp.header.ContentHeader(body_size=len(body), properties=Basic.Properties(message_id="own"))
    parts = [pamqp.frame.marshal(header, channel)]
    parts += [frame(BODY_FRAME, channel, body[at : at + frame_size]) for at in range(0, len(body), frame_size)]
    return b"".join(parts)


def header_of(body: bytes) -> bytes:
    return pamqp.header.ContentHeader(body_size=len(body), properties=Basic.Properties(message_id="own")).marshal()


def attached(number: int = 1) -> tuple[Tap, Recorder]:
    tap, channel = Tap(), Recorder()
    tap.attach(number, channel, 0.0)
    return tap, channel


def attached_both() -> tuple[Tap, Recorder, Recorder]:
    """Return a tap, and the recorders of its channels 1 and 2."""
    tap, channel = attached()
    other = Recorder()
    tap.attach(2, other, 0.0)
    return tap, channel, other


CLOSE = encode(Channel.Close(406, "PRECONDITION_FAILED", 60, 40))
RETURN_METHOD = Basic.Return(312, "NO_ROUTE", "an exchange", "a key")


# Reading.


def start(properties: dict[str, Any]) -> bytes:
    return encode(Connection.Start(server_properties=properties, mechanisms="PLAIN", locales="en_US"), 0)


def started(data: bytes) -> pamqp.commands.Connection.Start:
    """Return the `Connection.Start` that the library gets. There must be nothing else."""
    used, number, method = pamqp.frame.unmarshal(data)
    assert (used, number) == (len(data), 0)
    assert isinstance(method, Connection.Start)
    return method


# Apache Qpid Broker-J 9.2 and 10.1 announce it in this way, as text.
CONFIRMS = {"product": "qpid", "qpid.confirmed_publish_supported": "true", "qpid.close_when_no_route": "true"}


def test_capabilities_are_added_to_connection_start_if_the_broker_announces_confirms_in_another_way() -> None:
    seen = started(Tap().received(start(CONFIRMS), 0.0))
    assert seen.server_properties == CONFIRMS | {"capabilities": {"publisher_confirms": True, "basic.nack": True}}
    assert (seen.version_major, seen.version_minor, seen.mechanisms, seen.locales) == (0, 9, "PLAIN", "en_US")


def test_capabilities_are_added_to_connection_start_for_every_split_of_the_stream() -> None:
    whole = start(CONFIRMS) + HEARTBEAT
    expected = Tap().received(whole, 0.0)
    assert expected.endswith(HEARTBEAT)
    for at in range(len(whole)):
        tap = Tap()
        assert tap.received(whole[:at], 0.0) + tap.received(whole[at:], 0.0) == expected


@pytest.mark.parametrize(
    "properties",
    [
        CONFIRMS | {"capabilities": {"publisher_confirms": False}},
        CONFIRMS | {"capabilities": {}},
    ],
    ids=str,
)
def test_a_connection_start_that_lists_capabilities_is_passed_on_unchanged(properties: dict[str, Any]) -> None:
    assert Tap().received(start(properties), 0.0) == start(properties)


@pytest.mark.parametrize(
    "properties", [CONFIRMS | {"qpid.confirmed_publish_supported": "false"}, {"product": "qpid"}, {}], ids=str
)
def test_the_client_library_sees_an_empty_table_of_capabilities_if_the_broker_announces_none(
    properties: dict[str, Any],
) -> None:
    """An example is the broker of WSO2. aiormq reads the table and fails without it."""
    seen = started(Tap().received(start(properties), 0.0))
    assert seen.server_properties == properties | {"capabilities": {}}


@pytest.mark.parametrize("length", [4, 6, 9, 30, 60])
def test_a_malformed_connection_start_is_passed_on_so_that_the_library_reports_the_error(length: int) -> None:
    data = frame(METHOD_FRAME, 0, start(CONFIRMS)[7 : 7 + length])
    assert Tap().received(data, 0.0) == data


def test_a_connection_start_that_is_not_the_first_frame_is_passed_on_unchanged() -> None:
    data = HEARTBEAT + start(CONFIRMS)
    assert Tap().received(data, 0.0) == data


@st.composite
def frames(draw: st.DrawFn) -> tuple[bytes, bytes, list[tuple[Any, ...]]]:
    """Draw something that a broker can send: its bytes, the bytes for the library, and the calls of channel 1."""
    tag, bit = draw(st.integers(0, (1 << 63) - 1)), draw(st.booleans())
    body = draw(st.binary(max_size=12))
    text = draw(st.text(max_size=20))
    kind = draw(st.sampled_from(["ack", "nack", "flow", "return", "blocked", "unblocked", "other", "deliver", "beat"]))
    if kind == "ack":
        return encode(Basic.Ack(tag, bit)), b"", [("ack", tag, bit)]
    if kind == "nack":
        return encode(Basic.Nack(tag, bit, False)), b"", [("nack", tag, bit)]
    if kind == "flow":
        return encode(Channel.Flow(bit)), b"", [("flow", bit)]
    if kind == "return":
        told = ("return", 312, text, "e", "k", header_of(body), body)
        return encode(Basic.Return(312, text, "e", "k")) + content(body), b"", [told]
    if kind == "blocked":
        data = encode(Connection.Blocked(text), 0)
        return data, data, [("blocked", text)]
    if kind == "unblocked":
        data = encode(Connection.Unblocked(), 0)
        return data, data, [("unblocked",)]
    if kind == "deliver":
        channel = draw(st.sampled_from([1, 2]))
        data = encode(Basic.Deliver("c", tag, bit, "e", "k"), channel) + content(body, channel=channel)
        return data, data, []
    if kind == "beat":
        return HEARTBEAT, HEARTBEAT, []
    # On another channel, frames for a publishing channel belong to the library.
    data = draw(
        st.sampled_from(
            [
                encode(Basic.Ack(1), 2),
                encode(Basic.Nack(1), 2),
                encode(Channel.Flow(False), 2),
                encode(RETURN_METHOD, 2) + content(b"abc", channel=2),
                encode(Channel.Close(404, "NOT_FOUND", 60, 40), 2),
                encode(Channel.FlowOk(True), 1),
                encode(Basic.ConsumeOk("c"), 1),
                encode(pamqp.commands.Queue.DeclareOk("q", 1, 1), 3),
                encode(Connection.Close(320, "CONNECTION_FORCED", 0, 0), 0),
            ]
        )
    )
    return data, data, []


@settings(max_examples=rounds(60))
@given(st.lists(frames(), max_size=8), st.data())
def test_library_and_producers_each_get_their_own_frames_in_order_for_every_split_of_the_stream(
    broker: list[tuple[bytes, bytes, list[tuple[Any, ...]]]], data: st.DataObject
) -> None:
    tap, channel = attached()
    stream = b"".join(each[0] for each in broker)
    passed = b""
    while stream:
        cut = min(len(stream), data.draw(st.sampled_from([1, 2, 5, 9, 30, 1000])))
        part = tap.received(stream[:cut], 1.0)
        at = 0
        while at < len(part):
            at += int.from_bytes(part[at + 3 : at + 7], "big") + 8
        assert at == len(part), "the library gets whole frames only"
        passed += part
        stream = stream[cut:]
    assert passed == b"".join(each[1] for each in broker)
    assert channel.told == [told for each in broker for told in each[2]]


def test_frames_of_a_channel_that_no_producer_uses_go_to_the_library() -> None:
    tap = Tap()
    data = encode(Basic.Ack(1)) + encode(Channel.Flow(False)) + encode(RETURN_METHOD) + content(b"abc")
    assert tap.received(data, 0.0) == data


@pytest.mark.parametrize(
    "data",
    [
        encode(Channel.FlowOk(True)),
        encode(Channel.CloseOk()),
        encode(Basic.ConsumeOk("c")),
        encode(Connection.Close(320, "CONNECTION_FORCED", 0, 0), 0),
        HEARTBEAT,
    ],
)
def test_frames_that_the_channel_of_a_producer_does_not_handle_go_to_the_library_unchanged(data: bytes) -> None:
    tap, channel = attached()
    ack = encode(Basic.Ack(1))
    assert tap.received(data + ack + data, 0.0) == data + data
    assert channel.told == [("ack", 1, False)]


def test_a_channel_close_is_reported_to_the_producer_and_to_the_library_which_answers_it() -> None:
    tap, channel = attached()
    before, close = encode(Basic.Ack(1)), encode(Channel.Close(404, "NOT_FOUND", 60, 40))
    after = encode(Basic.Ack(2))
    assert tap.received(before + close + after, 0.0) == close + after
    assert channel.told == [("ack", 1, False), ("closed", 404, "NOT_FOUND", (60, 40))]


def test_connection_blocked_and_unblocked_are_reported_to_every_producer_and_to_the_library() -> None:
    tap, channel, other = attached_both()
    blocked, unblocked = encode(Connection.Blocked("low on memory"), 0), encode(Connection.Unblocked(), 0)
    assert tap.received(blocked, 0.0) == blocked
    assert tap.is_blocked
    assert tap.received(unblocked, 0.0) == unblocked
    assert not tap.is_blocked
    assert channel.told == other.told == [("blocked", "low on memory"), ("unblocked",)]


def test_a_connection_blocked_without_a_reason_also_holds_the_producer() -> None:
    tap, channel = attached()
    tap.received(frame(METHOD_FRAME, 0, CONNECTION_BLOCKED), 0.0)
    assert channel.told == [("blocked", "")]
    assert tap.is_blocked


def test_E15_the_library_does_not_see_the_answer_to_a_liveness_probe() -> None:
    tap, channel = attached()
    answer = encode(pamqp.commands.Confirm.SelectOk())
    assert tap.received(answer, 1.0) == answer
    assert tap.probe(1) == encode(pamqp.commands.Confirm.Select(nowait=False))
    assert tap.is_probed(1)
    assert tap.received(answer, 2.0) == b""
    assert not tap.is_probed(1)
    assert tap.heard_at == 2.0
    assert tap.received(answer, 3.0) == answer
    assert channel.told == []


def test_E15_a_broker_that_reads_a_frame_from_a_full_socket_is_alive() -> None:
    tap, channel = attached()
    tap.received(HEARTBEAT, 1.0)
    channel.outbound.add(b"a large frame")
    assert tap.data_to_write(100)
    tap.advance(2, 2.0)
    assert tap.alive_at == 2.0
    # The socket is still full.
    tap.advance(0, 3.0)
    assert tap.alive_at == 2.0
    # A broker that does not answer may have received nothing of a frame for which the socket has room.
    tap.advance(11, 4.0)
    assert tap.alive_at == 1.0


def test_a_producer_that_is_attached_to_a_blocked_connection_is_notified_of_the_block() -> None:
    tap = Tap()
    tap.received(encode(Connection.Blocked("low on disk"), 0), 0.0)
    channel = Recorder()
    tap.attach(1, channel, 1.0)
    assert channel.told == [("blocked", "low on disk")]
    protocol = make()
    tap.attach(2, protocol, 1.0)
    assert holds(protocol) == ["connection_blocked"]


def test_a_channel_flow_that_arrives_before_the_producer_is_attached_is_kept_for_the_producer() -> None:
    tap = Tap()
    tap.expect(1)
    opened = encode(Channel.OpenOk())
    flows = encode(Channel.Flow(False)) + encode(Channel.Flow(True)) + encode(Channel.Flow(False))
    assert tap.received(opened + flows + encode(Basic.Ack(1)), 0.0) == opened + encode(Basic.Ack(1))
    channel = Recorder()
    tap.attach(1, channel, 0.0)
    assert channel.told == [("flow", False), ("flow", True), ("flow", False)], "each is to be answered"
    tap.detach(1)
    tap.attach(1, channel, 0.0)
    assert len(channel.told) == 3, "each once"


def test_a_channel_flow_stop_that_arrives_before_the_producer_is_attached_holds_the_producer() -> None:
    tap, protocol = Tap(), make(opened=False)
    tap.expect(1)
    tap.received(encode(Channel.Flow(False)), 0.0)
    ticket = place(protocol, b"x", 0.0)
    protocol.channel_opened(1, 4096, 1.0)
    tap.attach(1, protocol, 1.0)
    assert wire(drain(protocol)).short == [False]
    assert ticket.receipt is not None
    tap.received(encode(Channel.Flow(True)), 2.0)
    assert wire(drain(protocol)).short == [True, b"x"]


def test_a_malformed_channel_flow_before_the_producer_is_attached_raises_frame_error() -> None:
    tap = Tap()
    tap.expect(1)
    with pytest.raises(FrameError):
        tap.received(frame(METHOD_FRAME, 1, CHANNEL_FLOW) + NEXT, 0.0)


def test_D11_acks_and_deliveries_of_other_channels_are_handled_while_one_channel_is_flowed() -> None:
    tap, channel = attached()
    deliver = encode(Basic.Deliver("c", 1, False, "", "q"), 2) + content(b"abc", channel=2)
    assert tap.received(encode(Channel.Flow(False)) + deliver, 0.0) == deliver
    assert channel.told == [("flow", False)]


def test_a_channel_close_whose_text_is_not_utf_8_is_handled() -> None:
    tap, channel = attached()
    tap.received(frame(METHOD_FRAME, 1, CHANNEL_CLOSE + b"\1\x38\2\xff\xfe\0\x3c\0\x28"), 0.0)
    assert channel.told == [("closed", 312, "\ufffd\ufffd", (60, 40))]


NEXT = encode(Basic.Ack(7, True)) * 3


@pytest.mark.parametrize("after", [b"", NEXT], ids=["last", "before others"])
@pytest.mark.parametrize(
    "payload",
    [
        ACK,
        ACK + bytes(7),
        ACK + bytes(8),
        NACK + bytes(8),
        CHANNEL_FLOW,
        RETURN,
        RETURN + b"\1\x38",
        RETURN + b"\1\x38\0",
        RETURN + b"\1\x38\0\0\5abc",
        CHANNEL_CLOSE,
        CHANNEL_CLOSE + b"\1\x38\x08NO",
        CHANNEL_CLOSE + b"\1\x38\0\0\x3c",
    ],
)
def test_a_malformed_method_on_the_channel_of_a_producer_raises_frame_error_and_is_not_reported(
    payload: bytes, after: bytes
) -> None:
    tap, channel = attached()
    with pytest.raises(FrameError, match="a frame on channel 1 cannot be decoded"):
        tap.received(frame(METHOD_FRAME, 1, payload) + after, 0.0)
    assert channel.told == []


def test_a_malformed_connection_blocked_raises_frame_error() -> None:
    tap, channel = attached()
    with pytest.raises(FrameError, match="channel 0"):
        tap.received(frame(METHOD_FRAME, 0, CONNECTION_BLOCKED + b"\5abc") + NEXT, 0.0)
    assert channel.told == []


def test_a_truncated_content_header_of_a_basic_return_raises_frame_error() -> None:
    tap, channel = attached()
    with pytest.raises(FrameError):
        tap.received(encode(RETURN_METHOD) + frame(HEADER_FRAME, 1, bytes(11)) + NEXT, 0.0)
    assert channel.told == []


HEADER = frame(HEADER_FRAME, 1, header_of(b"abc"))
NO_CONTENT = {
    "a body before the header": frame(BODY_FRAME, 1, b"abc"),
    "an empty body before the header": frame(BODY_FRAME, 1, b""),
    "a heartbeat before the header": frame(8, 1, b"abc"),
    "a second header": HEADER + HEADER,
    "too long a body": HEADER + frame(BODY_FRAME, 1, b"ab") + frame(BODY_FRAME, 1, b"cd"),
    "a heartbeat in the body": HEADER + frame(8, 1, b""),
    "an ack before the header": encode(Basic.Ack(1)),
    "an ack in the body": HEADER + frame(BODY_FRAME, 1, b"ab") + encode(Basic.Ack(1)),
    "a return in the body": HEADER + encode(RETURN_METHOD),
    "a library's method in the body": HEADER + encode(Channel.FlowOk(True)),
}


@pytest.mark.parametrize("wrong", NO_CONTENT.values(), ids=NO_CONTENT)
def test_a_basic_return_that_is_not_followed_by_content_raises_frame_error(wrong: bytes) -> None:
    tap, channel = attached()
    with pytest.raises(FrameError, match="returned message"):
        tap.received(encode(RETURN_METHOD) + wrong, 0.0)
    assert channel.told == []


@pytest.mark.parametrize("begun", [b"", HEADER, HEADER + frame(BODY_FRAME, 1, b"ab")])
def test_a_channel_close_between_the_frames_of_a_basic_return_ends_the_return_and_the_channel(begun: bytes) -> None:
    tap, channel = attached()
    assert tap.received(encode(RETURN_METHOD) + begun + CLOSE, 0.0) == CLOSE
    assert channel.told == [("closed", 406, "PRECONDITION_FAILED", (60, 40))]
    deliver = encode(Basic.Deliver("c", 1, False, "", "q")) + content(b"for the library")
    assert tap.received(deliver, 0.0) == deliver
    again = Recorder()
    tap.attach(1, again, 0.0)
    tap.received(encode(RETURN_METHOD) + content(b"abc") + NEXT, 0.0)
    assert [told[0] for told in again.told] == ["return", "ack", "ack", "ack"]
    assert len(channel.told) == 1


def test_the_library_sees_no_frame_of_an_incomplete_basic_return_on_the_channel_of_a_detached_producer() -> None:
    tap, _ = attached()
    assert tap.received(encode(RETURN_METHOD) + HEADER + frame(BODY_FRAME, 1, b"ab"), 0.0) == b""
    tap.detach(1)
    deliver = encode(Basic.Deliver("c", 1, False, "", "q")) + content(b"for the library")
    data = encode(Channel.CloseOk()) + deliver
    assert tap.received(data, 0.0) == data


@given(st.binary(max_size=40))
def test_any_bytes_as_content_header_of_a_basic_return_are_accepted_or_raise_frame_error(payload: bytes) -> None:
    protocol = make()
    tap = Tap()
    tap.attach(1, protocol, 0.0)
    try:
        tap.received(encode(RETURN_METHOD) + frame(HEADER_FRAME, 1, payload), 0.0)
    except FrameError:
        pass


CONNECTION_CLOSE = encode(Connection.Close(320, "CONNECTION_FORCED - bye", 0, 0), 0)
BROKEN = {
    "no frame": b"HTTP/1.1",
    "no end": encode(Basic.Ack(9))[:-1] + b"\0",
    "too large": b"\1\0\1\x7f\xff\xff\xff\0",
    "not decodable": frame(METHOD_FRAME, 1, ACK),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("after", [b"", encode(Basic.Ack(9)) + HEARTBEAT], ids=["last", "before others"])
def test_frames_before_invalid_bytes_are_passed_to_library_and_producer_before_the_error(
    broken: bytes, after: bytes
) -> None:
    tap, channel = attached()
    good = encode(Basic.Ack(1)) + CONNECTION_CLOSE + encode(Basic.Ack(2)) + HEARTBEAT
    assert tap.error is None
    assert tap.received(good + broken + after, 0.0) == CONNECTION_CLOSE + HEARTBEAT
    assert channel.told == [("ack", 1, False), ("ack", 2, False)]
    assert tap.error is not None
    for more in (b"", encode(Basic.Ack(3)), b""):
        with pytest.raises(FrameError) as caught:
            tap.received(more, 1.0)
        assert caught.value is tap.error
    assert len(channel.told) == 2


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_invalid_bytes_raise_frame_error_immediately_if_no_frames_for_the_library_precede_them(broken: bytes) -> None:
    tap, channel = attached()
    with pytest.raises(FrameError):
        tap.received(encode(Basic.Ack(1)) + broken, 0.0)
    assert channel.told == [("ack", 1, False)]
    with pytest.raises(FrameError):
        tap.received(b"", 0.0)


def test_a_frame_larger_than_frame_max_raises_frame_error_as_soon_as_its_size_is_read() -> None:
    tap, _ = attached()
    for size in (1 << 17, 0x7FFF_FFFF, 0xFFFF_FFFF):
        with pytest.raises(FrameError, match=f"a frame of {size + 8} bytes is larger than frame-max 131072"):
            Tap().received(b"\3\0\1" + size.to_bytes(4, "big") + b"x", 0.0)
    tap.frame_max = 4096
    assert tap.frame_max == 4096
    largest = frame(BODY_FRAME, 1, bytes(4096 - 8))
    assert tap.received(largest, 0.0) == largest
    with pytest.raises(FrameError, match="a frame of 4097 bytes is larger than frame-max 4096"):
        tap.received(frame(BODY_FRAME, 1, bytes(4096 - 7))[:8], 0.0)
    unlimited = Tap()
    unlimited.frame_max = 0
    assert unlimited.received(b"\3\0\1\x7f\xff\xff\xffx", 0.0) == b""


def test_content_frames_that_do_not_belong_to_a_basic_return_go_to_the_library() -> None:
    tap, channel = attached()
    data = content(b"abc")
    assert tap.received(data, 0.0) == data
    assert channel.told == []


def test_the_library_sees_no_frames_of_a_basic_return_even_if_the_producer_is_detached_meanwhile() -> None:
    tap, channel = attached()
    data = encode(RETURN_METHOD) + content(b"0123456789")
    assert tap.received(data[:60], 0.0) == b""
    tap.detach(1)
    deliver = encode(Basic.Deliver("c", 1, False, "", "q")) + content(b"x")
    assert tap.received(data[60:] + deliver, 0.0) == deliver, "and what follows does"
    assert channel.told == []


@pytest.mark.parametrize("end", [Channel.CloseOk(), Channel.Close(200, "", 0, 0)])
def test_frames_for_a_producer_that_was_detached_from_its_channel_are_dropped(end: Any) -> None:
    tap, channel = attached()
    tap.detach(1)
    returned = encode(RETURN_METHOD) + content(b"abc")
    told = encode(Basic.Ack(1)) + encode(Basic.Nack(2)) + encode(Channel.Flow(False)) + returned
    deliver = encode(Basic.Deliver("c", 1, False, "", "q")) + content(b"x")
    assert tap.received(told + deliver + told * 2, 0.0) == deliver
    assert tap.received(encode(end), 0.0) == encode(end)
    assert channel.told == []
    assert tap.received(told, 0.0) == told, "the number is the library's again"


def test_after_the_broker_has_closed_a_producer_s_channel_frames_with_its_number_go_to_the_library() -> None:
    tap, _ = attached()
    assert tap.received(CLOSE, 0.0) == CLOSE
    assert tap.received(encode(Basic.Ack(1)), 0.0) == encode(Basic.Ack(1))


def test_the_library_sees_no_frames_of_a_channel_that_the_drop_in_opened_on_its_own() -> None:
    tap = Tap()
    told: list[bytes] = []
    tap.own(7, told.append)
    opened = encode(Channel.OpenOk(), 7)
    assert tap.received(encode(Channel.OpenOk(), 1) + opened + frame(BODY_FRAME, 7, b"?"), 0.0) == encode(
        Channel.OpenOk(), 1
    )
    tap.attach(7, (channel := Recorder()), 0.0)
    close = encode(Channel.Close(406, "PRECONDITION_FAILED", 60, 40), 7)
    assert tap.received(encode(Basic.Ack(1), 7) + close, 0.0) == b""
    assert channel.told == [("ack", 1, False), ("closed", 406, "PRECONDITION_FAILED", (60, 40))]
    # Methods that are passed to the channel by a call are not passed to other receivers.
    assert told == [opened[7:-1], close[7:-1]]
    tap.disown(7)
    assert tap.received(opened, 0.0) == opened
    tap.disown(7)


def test_update_secret_is_sent_in_the_dialect_of_the_broker_and_the_library_does_not_see_the_answer() -> None:
    tap = Tap()
    told: list[str] = []
    sent = tap.update_secret("töken", lambda: told.append("first")) + tap.update_secret(
        "two", lambda: told.append("second")
    )
    first, second = decode(sent)
    assert (first.new_secret, first.reason, second.new_secret) == ("töken", "the old one expires", "two")
    answer, beat = encode(Connection.UpdateSecretOk(), 0), HEARTBEAT
    assert tap.received(beat + answer + beat, 0.0) == beat + beat
    assert told == ["first"]
    assert tap.received(answer, 0.0) == b""
    assert told == ["first", "second"]
    # The answer to a method of the library.
    assert tap.received(answer, 0.0) == answer


def test_the_reason_of_a_connection_close_from_the_broker_is_stored() -> None:
    tap = Tap()
    close = encode(Connection.Close(320, "CONNECTION_FORCED", 0, 0), 0)
    assert tap.closed is None
    assert tap.received(close, 0.0) == close
    assert tap.closed == "320 CONNECTION_FORCED"


# Heartbeats.


@given(st.lists(st.tuples(st.floats(0.01, 1.5), st.sampled_from(["ours", "theirs", "part"])), max_size=30))
def test_a_library_that_sees_no_frames_gets_a_generated_heartbeat_every_half_interval(
    steps: list[tuple[float, str]],
) -> None:
    tap, _ = attached()
    tap.heartbeat = 2.0
    ours, theirs = encode(Basic.Ack(1)), encode(Basic.Ack(1), 2)
    now = heard = 10.0
    assert tap.received(theirs, now) == theirs
    for gap, what in steps:
        now += gap
        if what == "theirs":
            assert tap.received(theirs, now) == theirs
            heard = now
            continue
        if what == "ours":
            fed = tap.received(ours, now)
        else:
            # A frame for the library that comes in pieces.
            fed = tap.received(theirs[:9], now)
        if now - heard >= 1.0:
            assert fed == HEARTBEAT
            heard = now
        else:
            assert fed == b"", "nothing that nobody needs"
        if what == "part":
            assert tap.received(theirs[9:], now) == theirs
            heard = now


def test_without_negotiated_heartbeats_no_heartbeat_is_generated_for_the_library() -> None:
    tap, _ = attached()
    for now in range(0, 1000, 100):
        assert tap.received(encode(Basic.Ack(1)), float(now)) == b""


# Writing.


def one(tap: Tap, count: int, limit: int = 1 << 20) -> bytes:
    """Write `count` bytes of the output."""
    data = tap.data_to_write(limit)[:count]
    tap.advance(len(data), 0.0)
    return data


def test_a_connection_on_which_nothing_was_sent_has_no_bytes_to_write() -> None:
    tap, _ = attached()
    assert tap.data_to_write(100) == b""
    assert tap.at_border
    assert Tap().data_to_write(100) == b""


def test_the_library_writes_only_between_complete_frames_of_the_producers() -> None:
    tap, channel = attached()
    channel.outbound.add(b"one")
    channel.outbound.add(b"two")
    assert tap.at_border
    assert tap.unfinished == b""
    assert one(tap, 2) == b"on"
    assert not tap.at_border
    assert tap.unfinished == b"e"
    assert one(tap, 1) == b"e"
    assert tap.at_border
    assert one(tap, 3) == b"two"
    assert tap.at_border


def test_a_message_does_not_count_as_begun_if_the_socket_accepts_none_of_its_bytes() -> None:
    tap, channel = attached()
    channel.outbound.add(b"one")
    assert one(tap, 0) == b""
    assert tap.at_border
    assert tap.data_to_write(100) == b"one"


def test_several_producers_on_one_connection_write_in_turn() -> None:
    tap = Tap()
    channels = {number: Recorder() for number in (5, 1, 3)}
    for number, channel in channels.items():
        tap.attach(number, channel, 0.0)
        for _ in range(3):
            channel.outbound.add(b"%d" % number)
    channels[3].outbound.add(b"3")
    written = b""
    while data := tap.data_to_write(1):
        tap.advance(len(data), 0.0)
        written += data
    assert written == b"1351351353"


def test_producers_on_one_connection_write_in_turn_even_if_every_write_ends_inside_a_frame() -> None:
    tap = Tap()
    channels = [Recorder(), Recorder()]
    for number, channel in enumerate(channels):
        tap.attach(number + 1, channel, 0.0)
        for _ in range(10):
            channel.outbound.add(b"%d" % number * 150)
    written = b""
    # A socket that takes 100 bytes at a time.
    while data := tap.data_to_write(1 << 17)[:100]:
        tap.advance(len(data), 0.0)
        written += data
    assert written == (b"0" * 150 + b"1" * 150) * 10


@settings(max_examples=rounds(30))
@given(st.data())
def test_between_two_frames_of_a_message_only_other_channels_may_write(data: st.DataObject) -> None:
    tap = Tap()
    protocols = {number: make(opened=False) for number in (1, 2)}
    bodies: dict[int, list[bytes]] = {1: [], 2: []}
    for number, protocol in protocols.items():
        protocol.channel_opened(number, 4096, 0.0)
        tap.attach(number, protocol, 0.0)
        for at, size in enumerate(data.draw(st.lists(st.sampled_from([0, 1, 4088, 9000]), max_size=4))):
            bodies[number].append(b"%d" % at * size)
            send(protocol, bodies[number][-1])
    stream = b""
    while offered := tap.data_to_write(data.draw(st.sampled_from([4000, 9000, 1 << 20]))):
        count = data.draw(st.integers(1, len(offered))) if data.draw(st.booleans()) else len(offered)
        tap.advance(count, 0.0)
        stream += offered[:count]
    wires = {1: Wire(), 2: Wire()}
    while stream:
        size = int.from_bytes(stream[3:7], "big") + 8
        number = int.from_bytes(stream[1:3], "big")
        # `Wire` fails if a channel writes inside its own message.
        wires[number].read(stream[:size], number)
        stream = stream[size:]
    assert {number: read.short for number, read in wires.items()} == bodies


@pytest.mark.parametrize("close", [lambda tap: tap.detach(1), lambda tap: tap.received(CLOSE, 0.0)])
def test_a_half_written_frame_is_completed_after_its_producer_is_detached(close: Callable[[Tap], object]) -> None:
    tap, channel, other = attached_both()
    channel.outbound.add(b"begun")
    channel.outbound.add(b"never")
    other.outbound.add(b"other")
    assert one(tap, 2) == b"be"
    close(tap)
    assert not tap.at_border
    assert tap.unfinished == b"gun"
    assert one(tap, 2) == b"gu"
    assert one(tap, 0) == b""
    assert not tap.at_border
    assert one(tap, 5) == b"n"
    assert tap.at_border
    assert one(tap, 5) == b"other"
    assert tap.data_to_write(100) == b""


def test_the_tap_keeps_no_reference_to_a_message_after_the_rest_of_its_frame_is_written() -> None:
    tap, channel = attached()
    channel.outbound.add(b"a large message")
    assert one(tap, 2) == b"a "
    tap.detach(1)
    assert one(tap, 100) == b"large message"
    # An empty `memoryview` would still refer to the message.
    assert type(tap._remains) is bytes


def test_a_producer_that_is_detached_at_a_frame_boundary_leaves_no_bytes_to_write() -> None:
    tap, channel = attached()
    channel.outbound.add(b"one")
    channel.outbound.add(b"two")
    assert one(tap, 3, limit=1) == b"one"
    tap.detach(1)
    tap.detach(1)
    assert tap.at_border
    assert tap.data_to_write(100) == b""


def test_a_producer_can_be_detached_while_a_frame_of_another_producer_is_half_written() -> None:
    tap, channel, other = attached_both()
    channel.outbound.add(b"one")
    other.outbound.add(b"never")
    one(tap, 1)
    tap.detach(2)
    assert not tap.at_border
    assert one(tap, 100) == b"ne"
    assert tap.data_to_write(100) == b""


def test_a_half_written_frame_of_a_lost_connection_is_not_completed() -> None:
    protocol = make()
    tap = Tap()
    tap.attach(1, protocol, 0.0)
    send(protocol, b"abc")
    one(tap, 3)
    assert protocol.unfinished
    tap.detach(1)
    protocol.connection_lost("reset by peer", 1.0)
    assert len(tap.data_to_write(100)) > 0, "the rest is for the broker, if it still reads"
    assert drain(protocol) == b""


# A library that chooses the numbers of its channels.


def test_J7_a_channel_flow_stop_that_arrives_before_any_producer_is_attached_is_kept_for_its_channel() -> None:
    tap = Tap()
    tap.expects_all = True
    stop, go_on = encode(Channel.Flow(False), 7), encode(Channel.Flow(True), 7)
    opened = encode(Channel.OpenOk(), 7)
    assert tap.received(opened + stop + go_on + stop, 0.0) == opened
    channel = Recorder()
    tap.attach(7, channel, 0.0)
    assert channel.told == [("flow", False), ("flow", True), ("flow", False)]


def test_frames_kept_for_a_channel_are_dropped_if_the_channel_closes_before_a_producer_is_attached() -> None:
    tap = Tap()
    tap.expects_all = True
    close = encode(Channel.Close(406, "PRECONDITION_FAILED", 60, 40), 7)
    assert tap.received(encode(Channel.Flow(False), 7) + close, 0.0) == close
    channel = Recorder()
    tap.attach(7, channel, 0.0)
    assert channel.told == []


def test_after_the_library_closes_the_channel_of_a_producer_no_message_is_written_and_acks_are_reported() -> None:
    tap, channel, other = attached_both()
    for each in channel, other:
        each.outbound.add(b"one")
        each.outbound.add(b"two")
    # The first message of the channel has begun. It is completed, and then the library may write.
    assert tap.data_to_write(3) == b"one"
    tap.advance(2, 0.0)
    tap.closes(1)
    assert (tap.unfinished, tap.data_to_write(100)) == (b"e", b"e")
    tap.advance(1, 0.0)
    assert tap.at_border
    assert tap.data_to_write(100) == b"onetwo"
    tap.advance(6, 0.0)
    assert tap.data_to_write(100) == b""
    tap.received(encode(Basic.Ack(1, False)), 0.0)
    assert channel.told == [("ack", 1, False)]
    # A number that no publishing channel has.
    tap.closes(9)
    # The next channel of that number may write.
    tap.received(encode(Channel.CloseOk()), 0.0)
    tap.detach(1)
    again = Recorder()
    tap.attach(1, again, 0.0)
    again.outbound.add(b"again")
    assert tap.data_to_write(100) == b"again"


@pytest.mark.parametrize("body", [b"x" * 100, b"x" * 3 * 4096], ids=["of one frame", "of several frames"])
def test_an_ack_is_reported_even_if_its_message_was_completed_after_the_library_closed_the_channel(body: bytes) -> None:
    tap = Tap()
    protocol = make()
    tap.attach(1, protocol, 0.0)
    receipt = send(protocol, body)
    size = protocol.unwritten
    send(protocol, b"never begun")
    data = tap.data_to_write(1 << 20)
    # The message is written up to its last frame. The write stops inside this frame.
    written = size - 10
    tap.advance(written, 0.0)
    tap.closes(1)
    assert not tap.at_border
    # In two parts, because the socket takes only a part.
    rest = tap.data_to_write(1 << 20)
    assert rest == tap.unfinished == data[written:size]
    tap.advance(4, 0.0)
    assert tap.data_to_write(1 << 20) == rest[4:]
    tap.advance(len(rest) - 4, 0.0)
    assert tap.at_border
    assert tap.data_to_write(1 << 20) == b""
    tap.received(encode(Basic.Ack(1, False)), 0.0)
    assert receipt.delivered
    assert protocol.unsettled == 1


def test_the_last_frame_of_a_message_is_completed_after_its_producer_is_detached() -> None:
    tap, channel, other = attached_both()
    channel.outbound.add(b"last")
    other.outbound.add(b"other")
    assert tap.data_to_write(1) == b"last"
    tap.advance(1, 0.0)
    tap.closes(1)
    assert tap.received(CLOSE, 0.0) == CLOSE
    assert tap.data_to_write(100) == b"ast"
    tap.advance(3, 0.0)
    # If it is the only channel, it writes as much as it may.
    other.outbound.add(b"more")
    assert tap.data_to_write(100) == b"othermore"
    tap.advance(2, 0.0)
    assert tap.data_to_write(100) == b"hermore"


@pytest.mark.parametrize("cut", [0, 30, 63, 65])
def test_E2_after_an_interrupted_read_the_connection_accepts_no_input_because_acks_may_be_lost(cut: int) -> None:
    data = b"".join(encode(Basic.Ack(delivery_tag=tag)) for tag in range(1, 9))
    data += encode(Basic.Nack(delivery_tag=9))
    missed = 0
    for interrupt in each_interrupt(least=10):
        protocol = make()
        receipts = publish_many(protocol, 9)
        tap = Tap()
        tap.attach(1, protocol, 0.0)
        assert tap.received(data[:cut], 0.0) == b""
        before = protocol.unsettled
        come = interrupt(lambda: tap.received(data[cut:], 0.0))  # noqa: B023  # called at once
        words = ""
        for _ in range(2):
            try:
                tap.received(b"", 0.0)
            except FrameError as error:
                words = str(error)
        if words:
            assert come
            assert words == "an exception interrupted the reading, and some received bytes are lost"
            missed += 1
        else:
            # The interrupt came before the read had begun, or after its end.
            protocol.on_timer(0.0)
            assert protocol.unsettled in (before, 0)
        if not come:
            assert all(receipt.done for receipt in receipts)
    assert missed > 10
