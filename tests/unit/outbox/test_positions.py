"""Positions of sources in an outbox: stored with their messages, and removed with withdrawn messages (E13)."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from qflow_client import Message, Outbox, OutboxError, Outcome, Position, RoutedMessage
from qflow_client.message import give_back, position_of, with_position
from tests.interrupting import EVERY, each_interrupt
from tests.unit.core.support import wire

from .support import Kept, change, crash
from .test_store_interrupts import MODULES

ROWS = "orders.csv"


def put(outbox: Outbox, value: int | str, source: str = ROWS) -> int:
    return outbox.put(f"{value}".encode(), "", "q", f"id-{value}"[:60], position=Position(source, value))


def tables(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as file:
        return {name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


@pytest.mark.parametrize(
    ("source", "value", "error", "text"),
    [
        (b"orders", 1, TypeError, "source must be a str, not bytes: b'orders'"),
        ("orders", 1.5, TypeError, "value must be an int or a str, not float: 1.5"),
        ("orders", True, TypeError, "value must be an int or a str, not bool: True"),
        ("orders", None, TypeError, "value must be an int or a str, not NoneType"),
        (
            "orders",
            1 << 63,
            ValueError,
            "value must be an int of 64 bits, not 9223372036854775808; use a str",
        ),
        ("orders", "\ud800", ValueError, "value must be valid Unicode"),
        ("\ud800", 1, ValueError, "source must be valid Unicode"),
    ],
    ids=["bytes", "float", "bool", "None", "65 bits", "value", "source"],
)
def test_E13_the_position_of_a_source_with_values_that_cannot_be_stored_raises_an_error(
    source: Any, value: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=r"^Position: ") as raised:
        Position(source, value)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    "value",
    [0, -1, (1 << 63) - 1, -(1 << 63), "", "key", "1200", "a\0b", "Åse" * 1000],
    ids=lambda value: f"{value!r:.30}",
)
def test_E13_the_position_of_a_source_is_read_from_the_outbox_exactly_as_it_was_put(
    path: Path, value: int | str
) -> None:
    with Outbox(path) as outbox:
        assert outbox.position(ROWS) is None
        put(outbox, value)
        assert outbox.position(ROWS) == value
    with Outbox(path) as outbox:
        found = outbox.position(ROWS)
        assert (type(found), found) == (type(value), value)
        assert outbox.position("another") is None


def test_E13_a_value_that_is_not_a_position_of_a_source_raises_an_error(path: Path) -> None:
    with Outbox(path) as outbox:
        with pytest.raises(TypeError, match="position must be a Position, not int: 7"):
            outbox.put(b"1", "", "q", "id", position=7)  # type: ignore[arg-type]  # on purpose
        assert (outbox.last, len(outbox)) == (0, 0)


def test_E13_the_position_of_a_source_is_written_to_disk_together_with_its_message(path: Path) -> None:
    outbox = Outbox(path)
    outbox.wait_durable(put(outbox, 1))
    put(outbox, 2)
    assert outbox.position(ROWS) == 2
    crash(outbox)
    with Outbox(path) as outbox:
        assert outbox.position(ROWS) == 1
        assert [stored.message.body for stored in outbox.read()] == [b"1"]


def test_E13_a_commit_stores_the_last_position_of_each_source(path: Path) -> None:
    outbox = Outbox(path)
    for source, value in [("a", 1), ("b", 10), ("a", 3), ("b", 20), ("a", 2)]:
        put(outbox, value, source)
    outbox.put(b"none", "", "q", "id-none")
    outbox.commit()
    crash(outbox)
    with Outbox(path) as outbox:
        # By the order in which they were put: a later position may be lower.
        assert (outbox.position("a"), outbox.position("b")) == (2, 20)


def test_E13_the_position_of_a_source_is_kept_when_its_message_is_settled(path: Path) -> None:
    with Outbox(path) as outbox:
        outbox.settle(put(outbox, 7))
    with Outbox(path) as outbox:
        assert outbox.read() == []
        assert outbox.position(ROWS) == 7


@pytest.mark.parametrize("count", [1, 2], ids=["one", "several"])
def test_E13_the_position_of_a_source_after_a_failed_commit_is_stored_by_the_next_commit(
    path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox(path)
    outbox.wait_durable(put(outbox, 1))
    last = max([put(outbox, value) for value in range(2, 2 + count)])
    execute = outbox._file.execute

    def fail(statement: str, *values: Any, **named: Any) -> Any:
        if statement.startswith("INSERT OR REPLACE INTO position"):
            raise OutboxError("disk full")
        return execute(statement, *values, **named)

    with monkeypatch.context() as patched:
        patched.setattr(outbox._file, "execute", fail)
        with pytest.raises(OutboxError, match="disk full"):
            outbox.wait_durable(last)
    assert outbox.position(ROWS) == 1 + count
    assert [stored.message.body for stored in Outbox.look(path)] == [b"1"]
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT value FROM position").fetchall() == [(1,)]
    outbox.wait_durable(last)
    crash(outbox)
    with Outbox(path) as outbox:
        assert outbox.position(ROWS) == 1 + count


def test_E13_if_the_outbox_closes_without_storing_a_message_its_position_is_not_stored(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox(path)
    outbox.wait_durable(put(outbox, 1))
    put(outbox, 2)
    monkeypatch.setattr(outbox._file, "execute_many", lambda *_: (_ for _ in ()).throw(OutboxError("disk full")))
    with pytest.raises(OutboxError, match="disk full"):
        outbox.close()
    assert outbox.position(ROWS) == 1


@pytest.mark.parametrize("when", ["on disk", "noted", "one commit"])
def test_E13_the_position_of_a_withdrawn_message_is_not_stored(path: Path, when: str) -> None:
    outbox = Outbox(path)
    last = put(outbox, 1)
    if when != "one commit":
        outbox.commit()
    withdrawn = put(outbox, 2)
    if when != "noted":
        outbox.commit()
    outbox.withdraw(withdrawn, withdrawn)
    assert outbox.position(ROWS) == 1
    # A commit of messages alone.
    outbox.wait_durable(outbox.put(b"other", "", "q", "id-other"))
    assert outbox.position(ROWS) == 1
    crash(outbox)
    with Outbox(path) as outbox:
        assert outbox.position(ROWS) == 1
        assert [stored.sequence for stored in outbox.read()] == [last, withdrawn + 1]


def test_E13_withdrawing_the_first_message_of_a_source_leaves_no_position_of_that_source(path: Path) -> None:
    outbox = Outbox(path)
    put(outbox, 1)
    outbox.commit()
    outbox.withdraw(1, 1)
    put(outbox, 5, "another")
    outbox.commit()
    assert outbox.position(ROWS) is None
    crash(outbox)
    with Outbox(path) as outbox:
        assert (outbox.position(ROWS), outbox.position("another")) == (None, 5)


def test_E13_the_position_of_a_message_that_was_put_after_a_withdrawn_message_is_stored(path: Path) -> None:
    outbox = Outbox(path)
    put(outbox, 1)
    outbox.commit()
    outbox.withdraw(put(outbox, 2), outbox.last)
    put(outbox, 3)
    outbox.commit()
    crash(outbox)
    with Outbox(path) as outbox:
        assert outbox.position(ROWS) == 3


def test_E13_the_position_of_a_source_can_be_set_and_deleted_without_a_message(path: Path) -> None:
    with Outbox(path) as outbox:
        put(outbox, 9)
        outbox.set_position(ROWS, "elsewhere")
        outbox.set_position("another", 4)
        assert outbox.position(ROWS) == "elsewhere"
        outbox.set_position("another", None)
        assert outbox.position("another") is None
        with pytest.raises(TypeError, match="value must be"):
            outbox.set_position(ROWS, 1.5)  # type: ignore[arg-type]  # on purpose
    with Outbox(path) as outbox:
        assert (outbox.position(ROWS), outbox.position("another")) == ("elsewhere", None)
        put(outbox, 10)
        assert outbox.position(ROWS) == 10


def test_E13_an_outbox_file_gets_the_table_of_positions_with_its_first_position(path: Path) -> None:
    with Outbox(path) as outbox:
        outbox.put(b"left", "", "q", "id")
    # The tables of an earlier release, and of an outbox without positions.
    assert tables(path) == {"message", "state"}
    with Outbox(path) as outbox:
        assert outbox.position(ROWS) is None
        put(outbox, 1)
    assert tables(path) == {"message", "state", "position"}
    assert [stored.message.body for stored in Outbox.look(path)] == [b"left", b"1"]


@pytest.mark.parametrize("value", ["CAST(x'ff' AS TEXT)", "x'31'", "1.5"], ids=["no UTF-8", "bytes", "real"])
def test_E13_reading_a_damaged_position_raises_an_error_and_the_position_can_be_set_again(
    path: Path, value: str
) -> None:
    with Outbox(path) as outbox:
        put(outbox, 1)
        put(outbox, 2, "another")
    change(path, f"UPDATE position SET value = {value} WHERE source = '{ROWS}'")
    with Outbox(path) as outbox:
        assert outbox.position("another") == 2
        with pytest.raises(OutboxError, match=r"the position of source 'orders\.csv' is damaged"):
            outbox.position(ROWS)
        outbox.set_position(ROWS, 3)
        assert outbox.position(ROWS) == 3


def test_E13_opening_an_outbox_with_a_damaged_source_name_raises_an_error(path: Path) -> None:
    with Outbox(path) as outbox:
        put(outbox, 1)
    change(path, "UPDATE position SET source = CAST(x'ff' AS TEXT)")
    with pytest.raises(OutboxError, match="the name of a source is damaged: b'\\\\xff'"):
        Outbox(path)
    change(path, "DROP TABLE position")
    change(path, "CREATE TABLE position AS SELECT NULL AS source, 1 AS value")
    with pytest.raises(OutboxError, match="the name of a source is damaged: None"):
        Outbox(path)


# Messages with positions.


@pytest.mark.parametrize(
    "given",
    [b"body", Message(b"body", headers={"a": [1]}, priority=3), RoutedMessage(b"body", routing_key="elsewhere")],
    ids=["bytes", "message", "routed"],
)
def test_E13_a_message_with_a_position_equals_the_given_message_and_errors_contain_the_given_message(
    given: bytes | Message,
) -> None:
    made = with_position(given, Position(ROWS, 1))
    assert position_of(made) == Position(ROWS, 1)
    assert position_of(given) is None
    assert made == (Message(given) if isinstance(given, bytes) else Message(**_fields(given)))
    error = OutboxError("full")
    error.message = made  # type: ignore[attr-defined]  # as some have it
    give_back(error)
    assert error.message is given  # type: ignore[attr-defined]  # likewise
    give_back(error)
    assert error.message is given  # type: ignore[attr-defined]  # likewise


def _fields(message: Message) -> dict[str, Any]:
    return {name: getattr(message, name) for name in Message.__dataclass_fields__}


# A producer.


def send(kept: Kept, value: int, **options: Any) -> Any:
    """Send a message as the skins do, until the wait for the disk."""
    return kept.store.send(
        with_position(b"%d" % value, Position(ROWS, value)), "", "q", kept.now, **({"spills": False} | options)
    )


def bodies(written: bytes) -> list[bytes]:
    return [message.body for message in wire(written).messages]


def test_E13_a_message_with_a_position_is_not_sent_before_it_is_on_disk(path: Path) -> None:
    kept = Kept(path)
    assert kept.send(b"plain") is not None
    send(kept, 1)
    assert kept.store.send(b"behind", "", "q", kept.now, spills=False) is not None
    assert bodies(kept.write()) == [b"plain"]
    assert kept.store.waits_for_disk
    kept.outbox.commit()
    assert bodies(kept.write()) == [b"1", b"behind"]
    assert not kept.store.waits_for_disk
    kept.outbox.close()


def test_E13_the_io_thread_is_not_woken_for_a_message_that_is_not_yet_on_disk(path: Path) -> None:
    kept = Kept(path)
    has_output = [kept.protocol.has_output]
    send(kept, 1)
    has_output.append(kept.protocol.has_output)
    assert kept.store.send(b"behind", "", "q", kept.now, spills=False) is not None
    has_output.append(kept.protocol.has_output)
    assert kept.write() == b""
    has_output.append(kept.protocol.has_output)
    kept.outbox.commit()
    kept.store.look_again(kept.now)
    has_output.append(kept.protocol.has_output)
    assert has_output == [False, False, False, False, True]
    # The message before it can be written, so the I/O is woken.
    send(kept, 2)
    assert kept.protocol.has_output
    assert bodies(kept.write()) == [b"1", b"behind"]
    kept.outbox.commit()
    # The I/O may find it before its sender reports that it is on disk. Then the follow-up wakes the I/O.
    send(kept, 3)
    kept.outbox.commit()
    assert bodies(kept.write()) == [b"2", b"3"]
    assert kept.store.send(b"after", "", "q", kept.now, spills=False) is not None
    assert kept.protocol.has_output
    kept.outbox.close()


def test_E13_a_message_that_is_settled_before_it_is_on_disk_delays_no_other_message(path: Path) -> None:
    # The disk does not answer, and the time limit of the first message is over.
    kept = Kept(path, delivery_timeout=5.0)
    late = send(kept, 1)
    assert kept.store.send(b"behind", "", "q", kept.now, spills=False) is not None
    kept.protocol.on_timer(kept.now + 1.0)
    assert not kept.protocol.has_output
    kept.now += 7.0
    behind = kept.store.send(b"last", "", "q", kept.now, spills=False)
    assert behind is not None
    kept.protocol.on_timer(kept.now)
    assert late._outcome is Outcome.FAILED
    assert not kept.store.waits_for_disk
    assert kept.protocol.has_output
    assert bodies(kept.write())[-1:] == [b"last"]
    kept.outbox.close()


def test_E13_a_message_that_waits_for_the_disk_wakes_a_writer_that_waits_for_more_settled_messages(path: Path) -> None:
    kept = Kept(path)
    kept.send(b"before")
    kept.write()
    kept.protocol.on_ack(1, False, kept.now)
    wake = kept.protocol.reports.wake
    assert wake == [kept.writer]
    wake.clear()
    send(kept, 1)
    assert wake == [kept.writer]
    # The writer needs only one call for all messages that wait for the same commit.
    send(kept, 2)
    assert wake == [kept.writer]
    kept.outbox.close()


def test_E13_after_an_interrupted_commit_request_the_next_request_still_wakes_the_writer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(list[Any]):
        def append(self, _waiter: Any) -> None:
            raise KeyboardInterrupt

    kept = Kept(path)
    with monkeypatch.context() as patched:
        patched.setattr(kept.protocol.reports, "wake", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            kept.store.requests.request_commit()
    kept.store.requests.request_commit()
    assert kept.protocol.reports.wake == [kept.writer]
    kept.outbox.close()


def test_E13_the_cost_of_a_commit_does_not_depend_on_the_number_of_known_sources(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reached(dict[str, Any]):
        def items(self) -> Any:
            raise AssertionError("all sources were looked at")

    with Outbox(path) as outbox:
        put(outbox, 1)
        outbox.commit()
        monkeypatch.setattr(outbox._noted, "_reached", Reached(outbox._noted._reached))
        put(outbox, 2)
        outbox.commit()
        assert outbox.position(ROWS) == 2


def test_E13_if_ctrl_c_interrupts_a_put_into_the_outbox_the_position_is_not_stored(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(list[Any]):
        def append(self, _row: Any) -> None:
            raise KeyboardInterrupt

    with Outbox(path) as outbox:
        put(outbox, 1)
        outbox.commit()
        with monkeypatch.context() as patched:
            patched.setattr(outbox._noted, "rows", Interrupted())
            with pytest.raises(KeyboardInterrupt):
                put(outbox, 2)
        assert outbox.position(ROWS) == 1


def test_E13_messages_that_their_sender_does_not_commit_are_committed_by_the_writer_and_then_sent(path: Path) -> None:
    kept = Kept(path)
    steps: list[Callable[[float], None]] = []
    take = kept.step
    kept.writer._deliver = lambda step: (steps.append(step), take(step))  # type: ignore[func-returns-value,assignment]  # both
    send(kept, 1)
    assert bodies(kept.write()) == []
    kept.turn()
    # A step, after which the skin asks for bytes to write.
    assert steps
    assert bodies(kept.write()) == [b"1"]
    steps.clear()
    kept.protocol.on_ack(1, False, kept.now)
    kept.turn()
    assert not steps
    kept.outbox.close()


def test_E13_messages_not_on_disk_at_a_crash_were_never_sent_and_all_others_are_marked_as_second_copies(
    path: Path,
) -> None:
    kept = Kept(path)
    for value in (1, 2):
        send(kept, value)
        kept.outbox.wait_durable(kept.outbox.last)
    send(kept, 3)
    assert bodies(kept.write()) == [b"1", b"2"]
    kept.crash()
    kept = Kept(path, "second-")
    assert kept.outbox.position(ROWS) == 2
    kept.turn()
    messages = wire(kept.write()).messages
    assert [message.body for message in messages] == [b"1", b"2"]
    assert all((message.properties.headers or {}).get("x-qflow-republished") for message in messages)
    kept.outbox.close()


def test_E13_after_a_crash_the_source_position_of_a_spilled_message_is_still_on_disk(path: Path) -> None:
    kept = Kept(path, when_flowed="spill")
    kept.protocol.hold("paused", kept.now)
    send(kept, 1, spills=True)
    kept.outbox.wait_durable(kept.outbox.last)
    kept.crash()
    with Outbox(path) as outbox:
        assert outbox.position(ROWS) == 1
        assert [stored.message.body for stored in outbox.read()] == [b"1"]


def test_E13_a_message_with_a_position_that_could_not_be_stored_at_the_end_settles_as_failed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(path)
    receipt = send(kept, 1)
    plain = kept.store.send(b"plain", "", "q", kept.now, spills=False)
    kept.write()
    kept.protocol.connection_lost("the end", kept.now)
    monkeypatch.setattr(kept.outbox._file, "execute_many", lambda *_: (_ for _ in ()).throw(OutboxError("disk full")))
    with pytest.raises(OutboxError):
        kept.outbox.close()
    assert kept.store.report_unwritten() == 2
    assert plain is not None
    assert (receipt.outcome, plain.outcome) == (Outcome.FAILED, Outcome.UNKNOWN)
    assert kept.outbox.position(ROWS) is None


def _commit_by_another(kept: Kept) -> None:
    kept.outbox.commit()


def _go_on(kept: Kept) -> None:
    # As a producer does after an interrupt.
    kept.protocol.on_timer(kept.now)
    kept.turn()
    kept.outbox.commit()


def _nothing(kept: Kept) -> None: ...


@pytest.mark.parametrize("then", [_nothing, _commit_by_another, _go_on], ids=lambda then: then.__name__)
@pytest.mark.parametrize("way", ["admitted", "spilled"])
def test_E13_after_ctrl_c_at_any_line_a_position_is_on_disk_exactly_if_its_message_is_on_disk(
    tmp_path: Path, then: Callable[[Kept], None], way: str
) -> None:
    settings: dict[str, Any] = {"when_flowed": "spill"} if way == "spilled" else {}
    seen = set()
    for interrupt in each_interrupt(least=30, every=EVERY):
        path = tmp_path / f"outbox-{interrupt.at}"
        kept = Kept(path, **settings)
        if way == "spilled":
            kept.protocol.hold("paused", kept.now)
        send(kept, 1, spills=way == "spilled")
        kept.outbox.commit()

        def call(kept: Kept = kept) -> None:
            send(kept, 2, spills=way == "spilled")
            kept.outbox.wait_durable(kept.outbox.last)

        interrupt(call, only=MODULES)
        then(kept)
        asked = kept.outbox.position(ROWS)
        kept.crash()
        with Outbox(path) as outbox:
            position = outbox.position(ROWS)
            stored = [each.message.body for each in outbox.read()]
        assert stored == [b"1", b"2"][: 1 if position is None else int(position)]
        if then is _go_on:
            assert position == asked
        seen.add(position)
    assert seen == {1, 2}
