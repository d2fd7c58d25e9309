from __future__ import annotations

import logging
import platform
import struct
from datetime import UTC, datetime

import pytest
from pamqp import body, commands, frame, header

from qflow_client import __version__
from qflow_client.amqp.frames import BODY_FRAME, FRAME_OVERHEAD, HEARTBEAT, METHOD_FRAME, FrameSplitter
from qflow_client.amqp.frames import frame as make_frame
from qflow_client.broker.core.session import PROTOCOL_HEADER, State
from qflow_client.broker.core.snapshots import message_copy

CLOSE = commands.Connection.Close
CHANNEL_CLOSE = commands.Channel.Close


def raw(kind, channel, payload, end=b"\xce"):
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + end


PUBLISH = frame.marshal(commands.Basic.Publish(routing_key="q"), 1)


@pytest.mark.parametrize(
    "beginning",
    [b"HTTP/1.1", b"AMQP\0\1\0\0", b"AMQP\1\1\0\x09", b"G", b"AMQP\0\0\x09\x02", b"\x16\x03\x01\x02\0\1\0\1"],
)
def test_an_unsupported_protocol_header_is_answered_with_the_supported_header_and_a_disconnect(world, beginning):
    client = world.stranger()
    client.feed(beginning)
    assert client.raw_output() == PROTOCOL_HEADER
    assert client.session.state is State.ENDED


def test_the_protocol_header_may_arrive_in_pieces_and_with_frames_after_it(world):
    client = world.stranger()
    start_ok = frame.marshal(commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US"), 0)
    data = PROTOCOL_HEADER + start_ok
    for at in range(len(data)):
        client.feed(data[at : at + 1])
    assert client.names() == ["Connection.Start", "Connection.Tune"]


def test_E11_the_broker_announces_version_platform_and_copyright_as_on_rabbitmq(world):
    client = world.stranger()
    client.feed(PROTOCOL_HEADER)
    told = client.only(commands.Connection.Start, 0).server_properties
    assert told["version"] == __version__
    assert told["platform"].startswith(platform.python_implementation())
    assert told["copyright"].startswith("Copyright")


@pytest.mark.parametrize("frame_max", [0, 4096])
def test_E11_a_received_frame_may_exceed_frame_max_by_8_bytes_as_on_rabbitmq_and_a_sent_frame_may_not(world, frame_max):
    client = world.client(frame_max=frame_max).channel().with_queue()
    agreed = client.session.handshake.frame_max
    client.publish(bytes(agreed))
    client.publish(bytes(agreed - FRAME_OVERHEAD))
    sizes = []
    for _ in range(2):
        client.send(1, commands.Basic.Get(queue="q", no_ack=True))
        for kind, _, start, stop in FrameSplitter(agreed).feed(client.raw_output()):
            if kind == BODY_FRAME:
                sizes.append(stop - start + FRAME_OVERHEAD)
    assert sizes == [agreed, 16, agreed]
    client.publish(bytes(agreed + 1))
    assert client.only(CLOSE, 0).reply_code == 501


@pytest.mark.parametrize("secret", ["guest", "another"])
def test_E11_update_secret_is_answered_as_on_rabbitmq(world, secret):
    client = world.client().channel()
    update, update_ok = commands.Connection.UpdateSecret, commands.Connection.UpdateSecretOk
    client.call(0, update(secret, "it has expired"), update_ok)
    client.declare()


def test_connection_start_announces_the_capabilities_of_the_broker(world):
    client = world.stranger()
    client.feed(PROTOCOL_HEADER)
    start = client.only(commands.Connection.Start, 0)
    assert start.mechanisms == "PLAIN AMQPLAIN"
    capabilities = start.server_properties["capabilities"]
    for name in (
        "publisher_confirms",
        "basic.nack",
        "connection.blocked",
        "consumer_cancel_notify",
        "exchange_exchange_bindings",
        "authentication_failure_close",
    ):
        assert capabilities[name] is True


@pytest.mark.parametrize(("user", "password"), [("guest", "wrong"), ("nobody", "guest"), ("guest", ""), ("", "")])
def test_a_wrong_login_is_refused_with_403_if_the_client_supports_it(world, user, password):
    client = world.stranger()
    client.start(user=user, password=password)
    client.check_close(CLOSE, 403, repr(user)[1:-1])


def test_a_wrong_login_ends_the_tcp_connection_if_the_client_does_not_support_403(world):
    client = world.stranger()
    client.start(password="wrong", capabilities={})
    assert client.received() == []
    assert client.session.state is State.ENDED


def test_an_unsupported_login_mechanism_is_refused_with_403(world):
    client = world.stranger()
    client.start(mechanism="EXTERNAL")
    assert "EXTERNAL" in client.only(CLOSE, 0).reply_text


def test_an_unknown_vhost_is_refused_with_530(world):
    client = world.stranger()
    client.start()
    client.received()
    client.send(0, commands.Connection.TuneOk(0, 0, 0), commands.Connection.Open("elsewhere"))
    client.check_close(CLOSE, 530, "elsewhere")


@pytest.mark.parametrize("tune", [(0, 4095, 0), (0, 131073, 0), (2048, 0, 0)])
def test_a_tune_ok_beyond_the_offered_limits_is_refused_with_530(world, tune):
    client = world.stranger()
    client.start()
    client.received()
    client.send(0, commands.Connection.TuneOk(*tune))
    assert client.only(CLOSE, 0).reply_code == 530


@pytest.mark.parametrize(
    ("data", "code"),
    [
        pytest.param(raw(1, 1, b"\0\x3c\0\x28", b"\0"), 501, id="no frame end"),
        pytest.param(raw(7, 0, b""), 501, id="unknown frame type"),
        pytest.param(struct.pack(">BHIB", 1, 1, 131072 + 1, 0), 501, id="oversized frame"),
        pytest.param(raw(8, 1, b""), 501, id="heartbeat on a channel"),
        pytest.param(PUBLISH + raw(2, 1, struct.pack(">HHQH", 50, 0, 1, 0)), 501, id="header of another class"),
        pytest.param(PUBLISH + raw(2, 1, struct.pack(">HHQH", 60, 1, 1, 0)), 501, id="header with weight"),
        pytest.param(PUBLISH + raw(2, 1, struct.pack(">HHQH", 60, 0, 1, 0)) + raw(3, 1, b"xx"), 501, id="long body"),
        pytest.param(raw(1, 1, b"\0\x3c"), 502, id="no method id"),
        pytest.param(raw(1, 1, b"\0\x3c\0\x28\0\0"), 502, id="method cut short"),
        pytest.param(raw(1, 1, b"\0\x3c\0\x28\0\0\xffx\0\0"), 502, id="string cut short"),
        pytest.param(raw(1, 1, b"\0\x3c\0\x28\0\0\0\0\0\0"), 502, id="bytes left over"),
        pytest.param(raw(1, 1, b"\0\x3c\0\x28\0\0\1\xff\0\0"), 502, id="not UTF-8"),
        pytest.param(raw(1, 1, b"\0\x32\0\x0a\0\0\1q\0\0\0\0\xffx"), 502, id="table cut short"),
        pytest.param(raw(1, 1, b"\0\x32\0\x0a\0\0\1q\0\0\0\0\3\1kZ"), 502, id="table with unknown type"),
        pytest.param(raw(1, 1, b"\0\x32\0\x0a\0\0\1q\0\0\0\0\x08\1kS\0\0\0\xffx"), 502, id="field cut short"),
        pytest.param(raw(1, 1, b"\0\x32\0\x0a\0\0\1q\0\0\0\0\x07\1kF\0\0\0\5"), 502, id="inner table cut short"),
        pytest.param(PUBLISH + raw(2, 1, b"\0\x3c"), 502, id="header cut short"),
        pytest.param(PUBLISH + raw(2, 1, struct.pack(">HHQH", 60, 0, 1, 1 << 15)), 502, id="property missing"),
        pytest.param(PUBLISH + raw(2, 1, struct.pack(">HHQH", 60, 0, 1, 1)), 502, id="unknown property"),
        pytest.param(PUBLISH + raw(2, 1, struct.pack(">HHQH", 60, 0, 1, 0) + b"x"), 502, id="unannounced property"),
        pytest.param(
            PUBLISH + raw(2, 1, struct.pack(">HHQH", 60, 0, 1, 1 << 13) + b"\0\0\0\3\1kZ"), 502, id="bad headers"
        ),
        pytest.param(
            PUBLISH + raw(2, 1, struct.pack(">HHQH", 60, 0, 1, 1 << 13) + b"\0\0\0\x08\1kS\0\0\0\xffx"),
            502,
            id="headers with a field cut short",
        ),
        pytest.param(
            PUBLISH + raw(2, 1, struct.pack(">HHQH", 60, 0, 1, 1 << 15) + b"\1\xff"), 502, id="property not UTF-8"
        ),
        pytest.param(raw(1, 0, frame.marshal(commands.Basic.Get(queue="q"), 0)[7:-1]), 503, id="basic on channel 0"),
        pytest.param(
            raw(1, 1, frame.marshal(commands.Connection.Close(200, "", 0, 0), 0)[7:-1]), 503, id="connection on 1"
        ),
        pytest.param(frame.marshal(commands.Basic.GetEmpty(), 1), 503, id="a broker's method"),
        pytest.param(frame.marshal(commands.Connection.Open(), 0), 503, id="open twice"),
        pytest.param(frame.marshal(commands.Channel.Open(), 1), 503, id="channel open twice"),
        pytest.param(frame.marshal(commands.Basic.Get(queue="q"), 2), 504, id="channel not open"),
        pytest.param(raw(2, 0, struct.pack(">HHQH", 60, 0, 0, 0)), 504, id="header on channel 0"),
        pytest.param(raw(3, 0, b"x"), 504, id="body on channel 0"),
        pytest.param(raw(2, 1, struct.pack(">HHQH", 60, 0, 0, 0)), 505, id="header without method"),
        pytest.param(raw(3, 1, b"x"), 505, id="body without method"),
        pytest.param(PUBLISH + raw(3, 1, b"x"), 505, id="body without header"),
        pytest.param(PUBLISH + PUBLISH, 505, id="method instead of header"),
        pytest.param(PUBLISH + 2 * raw(2, 1, struct.pack(">HHQH", 60, 0, 1, 0)), 505, id="header instead of body"),
        pytest.param(frame.marshal(commands.Channel.Open(), 2048), 530, id="channel above channel_max"),
        pytest.param(frame.marshal(commands.Basic.Publish(immediate=True), 1), 540, id="immediate"),
        pytest.param(frame.marshal(commands.Basic.Qos(prefetch_size=1), 1), 540, id="prefetch size"),
        pytest.param(raw(1, 1, b"\0\x3c\0\xff"), 540, id="unknown method"),
    ],
)
def test_an_invalid_method_closes_only_its_connection_with_the_reply_code_of_the_standard(world, data, code):
    other = world.client().channel().with_queue()
    client = world.client().channel()
    client.feed(data)
    close = client.only(CLOSE, 0)
    assert close.reply_code == code, close.reply_text
    assert close.reply_text
    # All frames except the answer are ignored.
    client.feed(PUBLISH)
    assert client.received() == []
    other.publish()
    assert world.queue().depth == 1
    assert other.received() == []


def test_connection_close_contains_the_class_and_method_that_caused_the_error(world):
    client = world.client().channel()
    client.send(1, commands.Queue.Bind(queue="nowhere", exchange="amq.direct"))
    close = client.only(CHANNEL_CLOSE)
    assert (close.reply_code, close.class_id, close.method_id) == (404, 50, 20)
    client = world.client().channel()
    client.publish(exchange="nowhere")
    close = client.only(CHANNEL_CLOSE)
    assert (close.reply_code, close.class_id, close.method_id) == (404, 60, 40)


def test_frames_have_at_most_4096_bytes_before_the_connection_is_tuned(world):
    client = world.stranger()
    client.feed(PROTOCOL_HEADER)
    client.received()
    client.feed(struct.pack(">BHIB", 1, 0, 4096 - 7, 0))
    assert client.only(CLOSE, 0).reply_code == 501


def test_after_connection_close_ok_the_session_has_ended(world):
    client = world.client().channel()
    client.feed(raw(8, 1, b""))
    client.only(CLOSE, 0)
    client.send(0, commands.Connection.CloseOk())
    assert client.session.state is State.ENDED


def test_a_client_that_does_not_answer_connection_close_is_disconnected(make_world):
    world = make_world(close_timeout=5)
    client = world.client(heartbeat=2).channel()
    client.feed(raw(8, 1, b""))
    assert client.session.deadlines.at == 5
    for now, state in ((4.9, State.CLOSE_OK), (5.0, State.ENDED)):
        client.tick(now)
        assert client.session.state is state


def test_connection_close_from_the_client_is_answered_after_the_confirms_that_are_due(world):
    client = world.client().channel(confirms=True).with_queue()
    client.publish()
    client.send(0, CLOSE(200, "bye", 0, 0))
    assert client.names() == ["Basic.Ack", "Connection.CloseOk"]
    assert client.session.state is State.ENDED


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_connection_that_is_not_opened_in_time_is_closed(make_world, steps):
    world = make_world(unauthenticated_timeout=10)
    client = world.stranger()
    if steps > 0:
        client.feed(PROTOCOL_HEADER)
    if steps > 1:
        client.send(0, commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US"))
        client.send(0, commands.Connection.TuneOk(0, 0, 0))
    assert client.session.deadlines.at == 10
    for now, ended in ((9.9, False), (10.0, True)):
        client.tick(now)
        assert (client.session.state is State.ENDED) is ended


def test_a_peer_silent_for_two_heartbeat_intervals_is_disconnected(world):
    client = world.client(heartbeat=4)
    world.now = 3.0
    client.feed(HEARTBEAT)
    beats = 0
    while client.session.state is State.RUNNING:
        client.tick(client.session.deadlines.at)
        beats += client.raw_output().count(HEARTBEAT)
    assert world.now == 3.0 + 2 * 4
    # One heartbeat in each half interval: at 2, 4, 6, 8 and 10 s.
    assert beats == 5


def test_a_heartbeat_is_sent_only_if_no_other_output_was_sent_for_half_an_interval(world):
    client = world.client(heartbeat=4).channel()
    world.now = 1.5
    client.declare()
    client.session.tick(2.0)
    assert client.raw_output() == b""
    assert client.session.deadlines.at == 3.5


def test_without_heartbeats_a_silent_peer_is_not_disconnected(world):
    client = world.client(heartbeat=0)
    client.session.tick(1e9)
    assert client.session.state is State.RUNNING
    assert client.session.deadlines.at == float("inf")


@pytest.mark.parametrize("reason", ["memory", ""])
def test_connection_blocked_goes_to_clients_that_announced_the_capability(world, reason):
    listening, deaf = world.client(), world.client(capabilities={})
    for client in (listening, deaf):
        client.session.block("operator", reason)
        client.session.block("operator", reason)
    assert listening.only(commands.Connection.Blocked, 0).reason == reason
    assert deaf.received() == []
    for client in (listening, deaf):
        client.session.block("operator", None)
    assert listening.names() == ["Connection.Unblocked"]
    assert deaf.received() == []


def test_a_client_that_connects_during_an_alarm_gets_connection_blocked_after_open_ok(world):
    world.controls.alarms["memory"] = "disk"
    assert world.client().names_at_open == ["Connection.OpenOk", "Connection.Blocked"]


def test_a_channel_can_be_opened_again_after_its_close(world):
    client = world.client().channel()
    client.send(1, CHANNEL_CLOSE(200, "bye", 0, 0))
    client.only(commands.Channel.CloseOk)
    client.channel()


def test_frames_that_a_client_sends_before_it_reads_the_close_of_its_channel_are_ignored(world):
    client = world.client().channel().with_queue()
    client.send(1, commands.Basic.Ack(1))
    assert client.only(CHANNEL_CLOSE).reply_code == 406
    client.publish()
    client.send(1, header.ContentHeader(body_size=1), body.ContentBody(b"x"))
    assert client.received() == []
    assert world.queue().depth == 0
    client.send(1, commands.Channel.CloseOk())
    client.channel()


def test_if_client_and_broker_close_a_channel_at_the_same_time_each_close_is_answered(world):
    client = world.client().channel()
    client.send(1, commands.Basic.Ack(1))
    client.only(CHANNEL_CLOSE)
    client.send(1, CHANNEL_CLOSE(200, "bye", 0, 0))
    client.only(commands.Channel.CloseOk)
    client.send(1, commands.Channel.CloseOk())
    client.channel()


def test_the_session_announces_new_output_only_once_until_the_output_is_read(world):
    client = world.client().channel()
    client.announced = 0
    client.declare("a")
    client.send(1, commands.Basic.Get(queue="a"), commands.Basic.Get(queue="a"))
    assert client.announced == 2
    assert client.names() == ["Basic.GetEmpty", "Basic.GetEmpty"]


def test_the_broker_traces_every_frame_in_the_order_of_the_wire(make_world):
    lines = []
    world = make_world(trace=lambda *line: lines.append(line))
    client = world.client().channel(confirms=True).with_queue()
    lines.clear()
    client.publish()
    client.feed(HEARTBEAT)
    client.received()
    assert lines == [
        ("in", "client-1", 1, "Basic.Publish"),
        ("in", "client-1", 1, "ContentHeader"),
        ("in", "client-1", 1, "ContentBody"),
        ("in", "client-1", 0, "Heartbeat"),
        ("out", "client-1", 1, "Basic.Ack"),
    ]


def test_a_message_timestamp_outside_the_range_of_datetime_is_delivered_unchanged(world):
    client = world.client().channel().with_queue()
    client.call(1, commands.Queue.Bind(queue="q", exchange="amq.headers", arguments={"k": 1}), commands.Queue.BindOk)
    now = datetime.fromtimestamp(2**31, UTC)
    properties = commands.Basic.Properties(content_type="t", headers={"k": 1}, timestamp=now, app_id="a")
    head = frame.marshal(header.ContentHeader(body_size=0, properties=properties), 1)
    late = head.replace(struct.pack(">Q", 2**31), b"\xff" * 8)
    client.feed(frame.marshal(commands.Basic.Publish(exchange="amq.headers"), 1) + late)
    (entry,) = world.queue().contents.ready
    found = message_copy(entry, b"").properties
    assert (found.content_type, found.headers, found.timestamp, found.app_id) == ("t", {"k": 1}, None, "a")
    client.send(1, commands.Basic.Get(queue="q", no_ack=True))
    assert late in client.raw_output()


def test_a_message_that_the_broker_itself_publishes_is_routed_by_its_headers(world):
    client = world.client().channel().with_queue()
    client.call(1, commands.Queue.Bind(queue="q", exchange="amq.headers", arguments={"k": 1}), commands.Queue.BindOk)
    # No client has sent this combination of properties.
    properties = commands.Basic.Properties(content_type="t", headers={"k": 1}, reply_to="r", app_id="a")
    assert world.host.publish("amq.headers", "", b"x", properties) == 1


def test_an_internal_error_of_the_broker_closes_the_connection_with_541(world):
    client = world.client()
    client.session.fail_internally(world.now)
    assert client.only(CLOSE, 0).reply_code == 541


@pytest.mark.parametrize("depth", [10, 5000])
def test_a_message_with_headers_nested_10_deep_is_enqueued_and_5000_deep_closes_the_connection_with_502(world, depth):
    table = b""
    for _ in range(depth):
        table = b"\1kF" + struct.pack(">I", len(table)) + table
    client = world.client().channel().with_queue()
    client.feed(PUBLISH)
    client.feed(raw(2, 1, struct.pack(">HHQHI", 60, 0, 0, 1 << 13, len(table)) + table))
    if depth == 10:
        assert world.queue().depth == 1
    else:
        assert client.only(CLOSE, 0).reply_code == 502


def test_E9_a_connection_that_is_not_open_in_time_is_ended_even_during_its_close(make_world):
    world = make_world(unauthenticated_timeout=10, close_timeout=5)
    stranger = world.stranger()
    world.now = 9.0
    stranger.start(password="wrong")
    assert isinstance(stranger.received()[-1][1], commands.Connection.Close)
    assert stranger.session.deadlines.at == 10
    stranger.tick(10.0)
    assert stranger.session.state is State.ENDED


def test_a_client_whose_connection_was_open_has_the_full_time_to_answer_connection_close(make_world):
    world = make_world(unauthenticated_timeout=10, close_timeout=5)
    client = world.client()
    world.now = 9.0
    client.session.fail(320, "enough", world.now)
    assert client.session.deadlines.at == 14


def test_names_chosen_by_clients_are_logged_without_control_characters(make_world, caplog):
    world = make_world(max_producer_flow_control_wait=1)
    client = world.client().channel()
    with caplog.at_level(logging.INFO, "qflow_client.broker"):
        # pamqp encodes no such name.
        name = "\x1b[31mred\r\n\u202eforged".encode()
        declare = b"\0\x32\0\x0a\0\0" + bytes((len(name),)) + name + b"\1\0\0\0\0"
        client.feed(make_frame(METHOD_FRAME, 1, declare))
        world.host.declare_queue("\x1b]0;title\x07", arguments={"x-expires": 1})
        world.tick(1.0)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "\\x1b[31mred\\r\\n\\u202eforged" in told[0]
    assert "\\x1b]0;title\\x07" in told[1]
    assert all(each.isprintable() for each in told)
