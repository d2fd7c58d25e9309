"""The spool between a queue and Spark, and the intake that fills it."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pika
import pytest
from pyspark.sql.types import StructType

from qflow_client import Message, Producer
from qflow_client.broker import Broker
from qflow_client.errors import ConnectionFailed
from qflow_client.spark.columns import SchemaError
from qflow_client.spark.deliveries import batch_of, in_columns, row_of
from qflow_client.spark.intake import Consumer, Intake, connect, drain
from qflow_client.spark.spool import Spool, SpoolError, inline, read_piece

HOLDS = {"queue": "rows"}


def take(broker: Broker, spool: Spool, count: int, *, before: int = 0) -> None:
    """Receive `count` messages, spool those that the spool does not have, ack all before `before`, and disconnect."""
    connection = connect([broker.url], 60)
    try:
        intake = Intake(connection, "rows", spool, 1000)
        receive(intake, count)
        intake.flush()
        intake.acknowledge(before)
    finally:
        connection.close()


def receive(intake: Intake, count: int) -> None:
    """Wait until `count` messages are received."""
    deadline = time.monotonic() + 100
    while intake.received < count:
        assert time.monotonic() < deadline
        intake.run_once(0.1)


def rows(spool: Spool) -> list[dict[str, Any]]:
    return [row for piece in spool.pieces(spool.begin, spool.end) for row in read_piece(piece).to_pylist()]


def send(broker: Broker, *messages: Message, ids: bool = False) -> None:
    with Producer(broker.url, routing_key="rows", message_ids=ids) as producer:
        for message in messages:
            producer.send(message)


def test_a_spool_has_the_same_messages_when_it_is_opened_again(broker: Broker, tmp_path: Path) -> None:
    send(broker, *[Message(str(number)) for number in range(10)])
    with Spool(tmp_path, HOLDS) as spool:
        take(broker, spool, 10, before=10)
        assert (spool.begin, spool.end, spool.acknowledged) == (0, 10, 10)
    # A file that a crash during a write has left.
    (tmp_path / f"{10:020}-5.arrow.part").write_bytes(b"half of")
    with Spool(tmp_path, HOLDS) as spool:
        assert (spool.begin, spool.end, spool.acknowledged) == (0, 10, 10)
        assert [row["offset"] for row in rows(spool)] == list(range(10))
        send(broker, Message("10"))
        take(broker, spool, 1)
        assert [int(row["body"]) for row in rows(spool)] == list(range(11))
        # These offsets are in two files.
        pieces = spool.pieces(8, 11)
        assert [int(row["body"]) for piece in pieces for row in read_piece(piece).to_pylist()] == [8, 9, 10]
        assert [read_piece(inline(piece)).equals(read_piece(piece)) for piece in pieces] == [True, True]
        spool.forget(11)
        assert (spool.begin, spool.end) == (10, 11)
        with pytest.raises(SpoolError, match="has the offsets from 10 to 11, but those from 8 to 11 were requested"):
            spool.pieces(8, 11)
    with Spool(tmp_path, HOLDS) as spool:
        assert spool.end == 11


def test_two_actions_can_use_a_complete_spool_at_the_same_time(tmp_path: Path) -> None:
    with Spool(tmp_path, HOLDS) as first:
        with pytest.raises(SpoolError, match="has not filled it yet"):
            Spool(tmp_path, HOLDS).__enter__()
        first.finish()
        with Spool(tmp_path, HOLDS) as second, Spool(tmp_path, HOLDS) as third:
            assert second.complete
            assert third.complete
        with pytest.raises(SpoolError, match="was made for"):
            Spool(tmp_path, {"queue": "others"}).__enter__()


def test_a_spool_rejects_a_second_query_at_the_same_time_and_another_queue(tmp_path: Path) -> None:
    with Spool(tmp_path, HOLDS), pytest.raises(SpoolError, match="in use by another query"):
        Spool(tmp_path, HOLDS).__enter__()
    with pytest.raises(SpoolError, match="was made for"):
        Spool(tmp_path, {"queue": "others"}).__enter__()
    (tmp_path / "file").touch()
    with pytest.raises(SpoolError, match="cannot be used"):
        Spool(tmp_path / "file" / "folder", HOLDS).__enter__()


@pytest.mark.parametrize("ids", [True, False])
def test_a_message_that_was_spooled_but_not_acknowledged_is_not_spooled_again(
    broker: Broker, tmp_path: Path, ids: bool
) -> None:
    send(broker, *[Message(f"{number % 3}") for number in range(30)], ids=ids)
    with Spool(tmp_path, HOLDS) as spool:
        take(broker, spool, 30, before=10)
    # New messages with the same bodies.
    send(broker, *[Message(f"{number % 3}") for number in range(15)], ids=ids)
    with Spool(tmp_path, HOLDS) as spool:
        take(broker, spool, 35, before=45)
        assert [int(row["body"]) for row in rows(spool)] == [*[number % 3 for number in range(30)], *[0, 1, 2] * 5]
        assert not any(row["redelivered"] for row in rows(spool))
    assert broker.queue("rows").depth == 0


@pytest.mark.parametrize("message_id", ["m-1", None])
def test_a_message_with_a_timestamp_after_the_year_9999_is_spooled_and_recognised(
    broker: Broker, tmp_path: Path, message_id: str | None
) -> None:
    # The publisher has sent milliseconds since 1970 instead of seconds.
    send(broker, Message("a", timestamp=1_700_000_000_000, message_id=message_id))
    for _ in range(2):
        with Spool(tmp_path, HOLDS) as spool:
            take(broker, spool, 1)
            (piece,) = spool.pieces(0, spool.end)
            assert read_piece(piece).column("timestamp").cast("int64").to_pylist() == [1_700_000_000_000_000_000]


def test_a_timestamp_that_does_not_fit_is_null_and_text_that_is_not_UTF_8_is_escaped() -> None:
    method = SimpleNamespace(exchange="", routing_key=b"\xffk", redelivered=False)
    # pika returns bytes for such text.
    text: dict[str, Any] = {"message_id": b"\xff1", "headers": {b"\xffh": "x", "table": {b"\xfft": [b"\xff"]}}}
    properties = pika.BasicProperties(timestamp=1_700_000_000_000_000, **text)
    (row,) = batch_of([row_of(method, properties, b"")], [0]).to_pylist()
    assert row["timestamp"] is None
    assert (row["routing_key"], row["message_id"]) == (r"\xffk", r"\xff1")
    assert row["headers"] == [(r"\xffh", "x"), ("table", r'{"\\xfft": ["\\xff"]}')]


def test_the_error_for_a_body_that_is_not_UTF_8_names_the_offset() -> None:
    method = SimpleNamespace(exchange="", routing_key="", redelivered=False)
    rows = [row_of(method, pika.BasicProperties(), body) for body in (b"a", b"\xff", b"\xfe")]
    with pytest.raises(SchemaError, match="column body is string, but the body at offset 8 is not UTF-8"):
        in_columns(batch_of(rows, [7, 8, 9]), StructType().add("body", "string"))


def test_redelivered_messages_equal_to_spooled_messages_are_not_lost(broker: Broker, tmp_path: Path) -> None:
    send(broker, *[Message("alike")] * 5)
    with Spool(tmp_path, HOLDS) as spool:
        connection = connect([broker.url], 60)
        intake = Intake(connection, "rows", spool, 3)
        receive(intake, 3)
        intake.flush()
        connection.close()
        # All five messages become redelivered, but only three of them are in the spool.
        with connect([broker.url], 60) as other:
            channel = other.channel()
            for _ in range(5):
                channel.basic_get("rows")
        take(broker, spool, 5, before=5)
        assert len(rows(spool)) == 5
    assert broker.queue("rows").depth == 0


def test_a_redelivered_message_after_a_lost_ack_is_recognised_only_by_its_message_id(
    broker: Broker, tmp_path: Path
) -> None:
    send(broker, Message("a", message_id="m-1"), Message("b"))
    with Spool(tmp_path, HOLDS) as spool:
        take(broker, spool, 2)
        # The spool has recorded the acks, but the broker has not received them.
        spool.mark_acknowledged(2)
    with Spool(tmp_path, HOLDS) as spool:
        take(broker, spool, 2, before=3)
        assert [(row["body"], row["redelivered"]) for row in rows(spool)] == [
            (b"a", False),
            (b"b", False),
            (b"b", True),
        ]
    assert broker.queue("rows").depth == 0


def test_the_error_for_a_lost_or_failed_connection_names_the_queue_or_the_broker(
    broker: Broker, tmp_path: Path
) -> None:
    with Spool(tmp_path, HOLDS) as spool:
        intake = Intake(connect([broker.url], 60), "rows", spool, 10)
        broker.drop_connections()
        with pytest.raises(ConnectionFailed, match="consuming queue 'rows' ended"):
            receive(intake, 1)
    with pytest.raises(ConnectionFailed, match=r"amqp://guest:\*\*\*@127.0.0.1:1/"):
        connect(["amqp://guest:secret@127.0.0.1:1/"], 1)


def test_connect_uses_the_first_broker_that_answers(broker: Broker) -> None:
    connect(["amqp://127.0.0.1:1/", broker.url], 60).close()


def test_the_error_for_a_queue_that_is_deleted_while_it_is_consumed_names_the_queue(
    broker: Broker, tmp_path: Path
) -> None:
    with Spool(tmp_path, HOLDS) as spool, connect([broker.url], 60) as connection:
        intake = Intake(connection, "rows", spool, 10)
        broker.delete_queue("rows")
        with pytest.raises(ConnectionFailed, match=r"queue 'rows' ended.*was deleted"):
            receive(intake, 1)


def test_the_error_for_a_queue_that_delivers_only_to_another_consumer_names_the_queue(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qflow_client.spark.intake._QUIET_SECONDS", 0.01)
    broker.declare_queue("single", arguments={"x-single-active-consumer": True})
    for _ in range(2):
        broker.publish(b"", "single")
    with connect([broker.url], 60) as active, Spool(tmp_path, HOLDS) as spool:
        channel = active.channel()
        channel.basic_qos(prefetch_count=1)
        channel.basic_consume("single", lambda *_: None)
        with (
            connect([broker.url], 60) as connection,
            pytest.raises(ConnectionFailed, match="'single' has 1 ready messages, but the broker delivers none"),
        ):
            drain(connection, "single", spool, None)
        assert spool.end == 0


def test_a_consumer_waits_for_a_message_until_the_queue_is_drained(broker: Broker, tmp_path: Path) -> None:
    with Spool(tmp_path, HOLDS) as spool:
        consumer = Consumer(connect([broker.url], 60), "rows", spool, 10)
        try:
            assert not consumer.wait_beyond(0)
            broker.publish(b"", "rows")
            assert consumer.wait_beyond(0)
        finally:
            consumer.stop()
        assert spool.end == 1


def test_a_message_beyond_the_limit_stays_in_the_queue_even_if_a_redelivered_message_follows(
    broker: Broker, tmp_path: Path
) -> None:
    send(broker, Message("a", message_id="m-1"))
    with Spool(tmp_path, HOLDS) as spool, connect([broker.url], 60) as other:
        take(broker, spool, 1)
        assert other.channel().basic_get("rows")[2] == b"a"
        send(broker, Message("b"))
        with connect([broker.url], 60) as connection:
            intake = Intake(connection, "rows", spool, 10, limit=1)
            receive(intake, 1)
            # The spooled message is redelivered after the message beyond the limit. Only the spooled message is acked.
            other.close()
            receive(intake, 2)
            intake.acknowledge(1)
        assert [row["body"] for row in rows(spool)] == [b"a"]
    assert [message.body for message in broker.messages("rows")] == [b"b"]


@pytest.mark.parametrize("umask", [0o000, 0o022], ids=oct)
def test_E8_the_files_of_a_spool_are_private_to_their_owner(umask: int, tmp_path: Path, broker: Broker) -> None:
    before = os.umask(umask)
    try:
        send(broker, *[Message(b"x")] * 3)
        with Spool(tmp_path / "spool", HOLDS) as spool:
            take(broker, spool, 3)
            spool.finish()
    finally:
        os.umask(before)
    modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in (tmp_path / "spool").iterdir()}
    assert len(modes) >= 4
    assert set(modes.values()) == {"0o600"}


def test_E8_a_spool_does_not_write_its_files_through_symbolic_links(tmp_path: Path) -> None:
    folder, victim = tmp_path / "spool", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("precious")
    (folder / "holds.json.part").symlink_to(victim)
    with Spool(folder, HOLDS):
        assert not (folder / "holds.json").is_symlink()
    assert victim.read_text() == "precious"
    (folder / "lock").unlink()
    (folder / "lock").symlink_to(victim)
    with pytest.raises(SpoolError, match=f"{folder}/lock is a symbolic link; remove it"):
        Spool(folder, HOLDS).__enter__()
    assert victim.read_text() == "precious"
