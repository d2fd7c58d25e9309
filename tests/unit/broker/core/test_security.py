"""The broker never shows passwords, and gives unauthenticated clients little memory and little time."""

from __future__ import annotations

import hmac
import logging

import pytest
from pamqp import commands, frame
from pydantic_core import to_json

from qflow_client.amqp import frames
from qflow_client.amqp.fields import MAX_DEPTH
from qflow_client.amqp.frames import FRAME_MIN_SIZE
from qflow_client.broker import BrokerSettings
from qflow_client.broker.core.session import PROTOCOL_HEADER, State
from qflow_client.broker.core.snapshots import connection_snapshot

CLOSE = commands.Connection.Close
START_OK = frame.marshal(commands.Connection.StartOk({}, "PLAIN", "\0guest\0sesame", "en_US"), 0)


@pytest.mark.parametrize(
    ("user", "password"), [("guest", "wrong"), ("guest", "guest"), ("nobody", "guest"), ("nobody", "")]
)
def test_passwords_are_compared_in_constant_time_even_for_unknown_users(
    world, monkeypatch: pytest.MonkeyPatch, user: str, password: str
) -> None:
    compared = []
    compare = hmac.compare_digest

    def note(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", note)
    world.stranger().start(user=user, password=password)
    assert compared == [password.encode()]


def test_an_unknown_user_cannot_log_in_without_a_password(world) -> None:
    client = world.stranger()
    client.start(user="nobody", password="")
    assert client.only(CLOSE, 0).reply_code == 403


def test_the_broker_listens_on_the_loopback_interface_by_default() -> None:
    assert BrokerSettings().host == "127.0.0.1"


def test_the_repr_of_the_broker_settings_shows_no_passwords() -> None:
    settings = BrokerSettings(users={"ann": "sesame"})
    assert "sesame" not in repr(settings)
    assert "sesame" not in str(settings)


@pytest.mark.parametrize("length", range(0, len(START_OK) - 8, 3))
def test_no_password_reaches_logs_or_answers_after_any_malformed_login(
    world, caplog: pytest.LogCaptureFixture, length: int
) -> None:
    payload = START_OK[7:-1][:length]
    client = world.stranger()
    client.feed(PROTOCOL_HEADER)
    with caplog.at_level(logging.DEBUG):
        client.feed(START_OK[:3] + len(payload).to_bytes(4, "big") + payload + b"\xce")
    assert client.session.state is not State.RUNNING
    assert b"sesame" not in client.raw_output()
    assert "sesame" not in caplog.text


def test_a_user_name_from_an_unauthenticated_client_cannot_add_lines_to_the_log(
    world, caplog: pytest.LogCaptureFixture
) -> None:
    forged = "x\n2026-01-01 all is well"
    with caplog.at_level(logging.DEBUG):
        world.stranger().start(user=forged)
        world.stranger().start(mechanism=forged)
        client = world.stranger()
        client.start()
        client.send(0, commands.Connection.TuneOk(0, 0, 0), commands.Connection.Open(forged))
    assert len(caplog.messages) >= 3
    assert not any("\n" in message for message in caplog.messages)


def nested(kind: bytes, depth: int) -> bytes:
    """Return a table with this number of nested tables and arrays, including itself."""
    value = b""
    for _ in range(depth - 1):
        content = (b"\1k" if kind == b"F" else b"") + value if value else b""
        value = kind + len(content).to_bytes(4, "big") + content
    content = b"\1k" + value
    return len(content).to_bytes(4, "big") + content


def start_ok_with(table: bytes) -> bytes:
    return frames.frame(1, 0, b"\0\x0a\0\x0b" + table + b"\5PLAIN\0\0\0\x0c\0guest\0guest\5en_US")


@pytest.mark.parametrize("kind", [b"F", b"A"])
@pytest.mark.parametrize(("depth", "is_taken"), [(MAX_DEPTH, True), (MAX_DEPTH + 1, False), (260, False)])
def test_E9_tables_and_arrays_from_an_unauthenticated_client_have_a_maximum_nesting_depth(
    world, kind: bytes, depth: int, is_taken: bool
) -> None:
    stranger = world.stranger()
    stranger.feed(PROTOCOL_HEADER + start_ok_with(nested(kind, depth)))
    answer = stranger.received()[-1][1]
    if is_taken:
        assert answer.name == "Connection.Tune"
        told = to_json(connection_snapshot(stranger.session).to_json())
        assert told.count(b"{") + told.count(b"[") >= depth
    else:
        assert answer.reply_code == 502
        assert f"tables and arrays are nested more than {MAX_DEPTH} deep" in answer.reply_text
        assert stranger.session.handshake.client_properties == {}


@pytest.mark.parametrize("kind", [b"F", b"A"])
@pytest.mark.parametrize(("depth", "is_taken"), [(MAX_DEPTH, True), (MAX_DEPTH + 1, False)])
def test_E9_tables_and_arrays_in_arguments_and_headers_have_a_maximum_nesting_depth(
    world, kind: bytes, depth: int, is_taken: bool
) -> None:
    table = nested(kind, depth)
    declare = frames.frame(1, 1, b"\0\x32\0\x0a\0\0\1q\0" + table)
    publish = frame.marshal(commands.Basic.Publish(routing_key="q"), 1)
    publish += frames.frame(2, 1, b"\0\x3c\0\0" + bytes(8) + b"\x20\0" + table)
    for data, answers in ((declare, ["Queue.DeclareOk"]), (publish, [])):
        client = world.client().channel()
        client.feed(data)
        assert client.names() == (answers if is_taken else [CLOSE.name])


@pytest.mark.parametrize("steps", [0, 1])
def test_before_the_login_a_client_may_send_frames_of_at_most_4096_bytes(world, steps: int) -> None:
    client = world.stranger()
    client.feed(PROTOCOL_HEADER)
    if steps:
        client.send(0, commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US"))
    client.raw_output()
    # The head of the frame is enough to refuse it.
    client.feed(b"\1\0\0" + (FRAME_MIN_SIZE - 7).to_bytes(4, "big") + b"\0")
    assert client.only(CLOSE, 0).reply_code == 501


@pytest.mark.parametrize(
    ("channel_max", "frame_max"), [(2048, 0), (65535, 0), (0, 131073), (0, 2**31), (0, FRAME_MIN_SIZE - 1), (0, 1)]
)
def test_tune_ok_with_values_beyond_the_limits_of_the_broker_is_refused_with_530(
    world, channel_max: int, frame_max: int
) -> None:
    client = world.stranger()
    client.start()
    client.raw_output()
    client.send(0, commands.Connection.TuneOk(channel_max, frame_max, 0))
    assert client.only(CLOSE, 0).reply_code == 530
    assert client.session.handshake.frame_max == FRAME_MIN_SIZE
    assert client.session.handshake.channel_max == BrokerSettings().channel_max


def test_a_connection_has_at_most_the_negotiated_number_of_channels(world) -> None:
    client = world.client(channel_max=3)
    for number in (1, 2, 3):
        client.channel(number)
    client.send(4, commands.Channel.Open())
    assert client.close_of(CLOSE).reply_code == 530


def test_the_time_limit_for_a_login_is_not_extended_by_frames_from_the_client(make_world) -> None:
    world = make_world(unauthenticated_timeout=10)
    client = world.stranger()
    data = PROTOCOL_HEADER + START_OK
    for at in range(20):
        world.now = float(at)
        client.feed(data[at : at + 1])
        client.session.tick(world.now)
        if client.session.state is State.ENDED:
            break
    assert world.now == 10.0
