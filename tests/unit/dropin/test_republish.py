"""Messages that a library has encoded are resent on another channel, also several times."""

from __future__ import annotations

from typing import Any

import pamqp.frame
import pytest
from pamqp import commands
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from qflow_client.dropin import EncodedProtocol, RepeatableMessage
from qflow_client.message import REPUBLISHED
from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import ProducerSettings


def encoded(body: bytes, channel: int = 1, cut: int = 100, **properties: Any) -> RepeatableMessage:
    header = ContentHeader(body_size=len(body), properties=commands.Basic.Properties(**properties))
    parts: list[Any] = [commands.Basic.Publish(exchange="x", routing_key="q"), header]
    parts += [ContentBody(body[at : at + cut]) for at in range(0, len(body), cut)]
    return RepeatableMessage(b"".join(pamqp.frame.marshal(part, channel) for part in parts), body)


def decoded(frames: bytes) -> list[tuple[int, Any]]:
    found = []
    while frames:
        size, channel, part = pamqp.frame.unmarshal(frames)
        found.append((channel, part))
        frames = frames[size:]
    return found


def opened(**settings: Any) -> EncodedProtocol:
    protocol = EncodedProtocol(ProducerSettings(message_ids=False, **settings), now=0.0)
    protocol.channel_opened(1, 108, 0.0)
    return protocol


def send(protocol: EncodedProtocol, message: RepeatableMessage) -> Receipt:
    receipt = protocol.send(message, "x", "q", 0.0)
    assert receipt is not None
    return receipt


def drain(protocol: EncodedProtocol) -> bytes:
    written = b""
    while data := protocol.data_to_write(1 << 20):
        protocol.advance(len(data), 0.0)
        written += data
    return written


@pytest.mark.parametrize("size", [0, 1, 100, 250])
def test_a_message_that_is_not_resent_has_the_same_bytes_as_from_the_library(size: int) -> None:
    message = encoded(bytes(size))
    assert message.frames_on(1, 100) is message.frames
    assert message.frames_on(1, 1 << 30) is message.frames


@pytest.mark.parametrize(("channel", "most"), [(2, 100), (1, 99), (700, 40), (2, 1 << 30)])
@pytest.mark.parametrize("size", [0, 1, 100, 250])
def test_a_resent_message_gets_the_channel_number_and_the_frame_size_of_the_new_channel(
    channel: int, most: int, size: int
) -> None:
    body = bytes(range(size))
    method, header, *bodies = decoded(encoded(body, message_id="7").frames_on(channel, most))
    assert (method[0], method[1].name, method[1].routing_key) == (channel, "Basic.Publish", "q")
    assert (header[0], header[1].properties.message_id, header[1].body_size) == (channel, "7", size)
    assert b"".join(part.value for _, part in bodies) == body
    assert all(number == channel and len(part.value) <= most for number, part in bodies)


def test_resending_properties_that_do_not_fit_into_a_frame_raises_an_error() -> None:
    with pytest.raises(ValueError, match="53 bytes, and the broker accepts 50"):
        encoded(b"", correlation_id="c" * 38).frames_on(2, 50)


def test_after_a_lost_connection_all_messages_use_the_new_channel_and_only_second_copies_are_marked() -> None:
    protocol = opened()
    headers = {"a": [1, "b"]}
    receipts = [send(protocol, encoded(b"%d" % number, headers=headers, message_id="7")) for number in range(2)]
    drain(protocol)
    receipts.append(send(protocol, encoded(b"2")))
    protocol.connection_lost("cut", 1.0, reconnects=True, shared=True)
    protocol.channel_opened(3, 200, 2.0)
    # The frames of the message were made while there was no channel.
    receipts.append(send(protocol, encoded(b"3")))
    found = decoded(drain(protocol))
    assert {channel for channel, _ in found} == {3}
    assert [part.value for _, part in found[2::3]] == [b"0", b"1", b"2", b"3"]
    assert [part.properties.headers for _, part in found[1::3]] == [headers | {REPUBLISHED: True}] * 2 + [None] * 2
    assert [part.properties.message_id for _, part in found[1:6:3]] == ["7", "7"]
    assert headers == {"a": [1, "b"]}
    protocol.on_ack(4, True, 3.0)
    assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}


def test_a_resent_message_that_already_has_the_second_copy_header_does_not_get_it_again() -> None:
    protocol = opened()
    send(protocol, encoded(b"", headers={REPUBLISHED: True}))
    drain(protocol)
    protocol.connection_lost("cut", 1.0, reconnects=True, shared=True)
    protocol.channel_opened(1, 200, 2.0)
    assert decoded(drain(protocol))[1][1].properties.headers == {REPUBLISHED: True}


def test_a_message_to_resend_that_is_too_large_with_the_second_copy_header_settles_as_unknown() -> None:
    protocol = opened()
    receipts = [send(protocol, encoded(b"", correlation_id="c" * length)) for length in (80, 1)]
    drain(protocol)
    protocol.connection_lost("cut", 1.0, reconnects=True, shared=True)
    protocol.channel_opened(1, 108, 2.0)
    assert receipts[0].outcome is Outcome.UNKNOWN
    assert "cannot be encoded again" in receipts[0].describe()
    assert len(decoded(drain(protocol))) == 2


@pytest.mark.parametrize("when", ["in flight", "away", "opened"])
def test_a_message_whose_caller_no_longer_waits_is_not_resent(when: str) -> None:
    protocol = opened(capacity=3)
    receipts = [send(protocol, encoded(b"%d" % number)) for number in range(3)]
    drain(protocol)
    if when == "in flight":
        protocol.abandon(receipts[1:2], "told", 1.0)
    protocol.connection_lost("cut", 1.0, reconnects=True, shared=True)
    if when == "away":
        protocol.abandon(receipts[1:2], "told", 1.0)
    protocol.channel_opened(1, 108, 2.0)
    if when == "opened":
        protocol.abandon(receipts[1:2], "told", 2.0)
    assert [part.value for _, part in decoded(drain(protocol))[2::3]] == [b"0", b"2"]
    assert receipts[1].outcome is Outcome.UNKNOWN
    assert (protocol.unsettled, protocol.unwritten) == (2, 0)
    protocol.on_ack(2, True, 3.0)
    assert [receipts[0].outcome, receipts[2].outcome] == [Outcome.CONFIRMED] * 2


def test_a_channel_that_is_closed_for_good_settles_written_and_unwritten_messages() -> None:
    protocol = opened()
    written = send(protocol, encoded(b"0"))
    drain(protocol)
    unsent = send(protocol, encoded(b"1"))
    protocol.channel_ended("closed by the broker", 1.0)
    assert (written.outcome, unsent.outcome) == (Outcome.UNKNOWN, Outcome.FAILED)
    protocol.channel_opened(1, 108, 2.0)
    assert drain(protocol) == b""
    again = send(protocol, encoded(b"2"))
    drain(protocol)
    protocol.on_ack(1, False, 3.0)
    assert again.outcome is Outcome.CONFIRMED
