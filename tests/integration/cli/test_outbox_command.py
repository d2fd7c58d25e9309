from __future__ import annotations

import io
import json
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import qflow_client.cli.outbox
from qflow_client import Message, Outbox
from qflow_client.broker import Broker
from qflow_client.cli import main
from qflow_client.message import REPUBLISHED
from tests.integration.cli.commands import BRIEF
from tests.integration.forked import Forked

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An outbox with three messages. Two may have been written to a broker, and one was not."""
    path = tmp_path / "outbox"
    with Outbox(path) as outbox:
        outbox.put(b"one", "", "orders", "id-1")
        outbox.put(
            Message(b"\xff", content_type="x/y", headers={"raw": b"\xff", "list": [1, None]}), "", "orders", "id-2"
        )
        outbox.put("três".encode(), "", "orders", "id-3", permit=False)
    return path


def left(path: Path) -> list[str | None]:
    return [stored.message.message_id for stored in Outbox.look(path)]


def test_ls_shows_the_messages_of_an_outbox_even_while_it_is_used(path: Path, capsys: Capture) -> None:
    with Outbox(path):
        assert main(["outbox", "ls", str(path), "--limit", "2"]) == 0
    *rows, more, total = capsys.readouterr().out.splitlines()
    assert [row.split()[-2:] for row in rows[1:]] == [["id-1", "maybe"], ["id-2", "maybe"]]
    assert more == "and 1 more message"
    assert total.startswith("3 messages, ")
    assert total.endswith(" bytes; 2 of them may have been sent before")


def test_ls_prints_names_that_look_like_markup_unchanged(tmp_path: Path, capsys: Capture) -> None:
    with Outbox(tmp_path / "outbox") as outbox:
        outbox.put(b"", "[bold]", "[red]x[/]", "[/nothing]")
    assert main(["outbox", "ls", str(tmp_path / "outbox")]) == 0
    out = capsys.readouterr().out
    assert "[bold]" in out
    assert "[red]x[/]" in out
    assert "[/nothing]" in out


def test_ls_and_drain_print_names_without_control_characters(tmp_path: Path, broker: Broker, capsys: Capture) -> None:
    path = str(tmp_path / "outbox")
    with Outbox(path) as outbox:
        outbox.put(b"", "\x1b[31mnowhere", "\x1b[32m", "\x1b[33m")
    assert main(["outbox", "ls", path]) == 0
    assert main(["outbox", "drain", path, "--url", broker.url]) == 1
    out, err = capsys.readouterr()
    assert (out + err).replace("\n", "").isprintable()
    assert "\\x1b[31mnowhere" in out
    assert "\\x1b[33m" in err


def test_ls_escapes_characters_that_the_encoding_of_the_output_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Outbox(tmp_path / "outbox") as outbox:
        outbox.put(b"", "", "\u4e2d\xe9", "id")
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="latin-1"))
    assert main(["outbox", "ls", str(tmp_path / "outbox")]) == 0
    assert b"\\u4e2d\xe9" in output.getvalue()


def test_ls_of_an_empty_outbox_prints_0_messages(tmp_path: Path, capsys: Capture) -> None:
    Outbox(tmp_path / "outbox").close()
    assert main(["outbox", "ls", str(tmp_path / "outbox")]) == 0
    assert capsys.readouterr().out == "0 messages, 0 bytes\n"


def test_export_writes_all_data_of_each_message(path: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["outbox", "export", str(path)]) == 0
    printed = capsys.readouterr().out
    assert main(["outbox", "export", str(path), "-o", str(tmp_path / "out.jsonl")]) == 0
    assert (tmp_path / "out.jsonl").read_text(encoding="utf-8") == printed
    one, two, three = map(json.loads, printed.splitlines())
    assert (one["sequence"], one["body"], one["may_be_second_copy"]) == (1, "one", True)
    assert two["body"] == {"base64": "/w=="}
    assert two["properties"] == {
        "content_type": "x/y",
        "delivery_mode": 2,
        "message_id": "id-2",
        "headers": {"raw": {"base64": "/w=="}, "list": [1, None]},
    }
    assert (three["body"], three["exchange"], three["routing_key"], three["may_be_second_copy"]) == (
        "três",
        "",
        "orders",
        False,
    )


def test_export_does_not_overwrite_the_outbox(path: Path, tmp_path: Path, capsys: Capture) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    # After a crash, this file contains the newest messages.
    log = path.with_name(f"{path.name}-wal")
    log.touch()
    for output in (path, link, log):
        assert main(["outbox", "export", str(path), "--output", str(output)]) == 2
        assert capsys.readouterr().err == f"qflow: --output {output}: this is the outbox itself; name another file\n"
    assert left(path) == ["id-1", "id-2", "id-3"]


def test_drain_sends_messages_in_order_and_marks_possible_copies_and_removes_confirmed_messages(
    path: Path, broker: Broker, capsys: Capture
) -> None:
    assert main(["outbox", "drain", str(path), "--url", broker.url]) == 0
    assert capsys.readouterr().out == "3 messages confirmed, 0 messages left\n"
    messages = broker.messages("orders")
    assert [message.body for message in messages] == [b"one", b"\xff", "três".encode()]
    assert [message.properties.message_id for message in messages] == ["id-1", "id-2", "id-3"]
    assert [REPUBLISHED in (message.properties.headers or {}) for message in messages] == [True, True, False]
    assert left(path) == []
    assert main(["outbox", "drain", str(path), "--url", "amqp://127.0.0.1:1"]) == 0


@pytest.mark.usefixtures("no_retries")
def test_drain_keeps_refused_messages_and_reports_them(path: Path, broker: Broker, capsys: Capture) -> None:
    broker.nack_publishes()
    assert main(["outbox", "drain", str(path), "--url", broker.url + "?x=1"]) == 2
    assert main(["outbox", "drain", str(path), "--url", broker.url]) == 1
    out, err = capsys.readouterr()
    assert out == "0 messages confirmed, 3 messages left\n"
    assert "qflow: message 1 stays in the outbox: " in err
    assert err.endswith("qflow: 3 messages left: not confirmed by the broker\n")
    assert left(path) == ["id-1", "id-2", "id-3"]


def test_drain_stops_if_it_is_blocked_by_flow_control_for_too_long(
    path: Path, broker: Broker, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qflow_client.cli.outbox, "_GRACE", 0.1)
    broker.withhold_confirms()
    url = f"{broker.url}?capacity=2&max_producer_flow_control_wait=0.2"
    assert main(["outbox", "drain", str(path), "--url", url]) == 3
    # The time in the text was measured, so it depends on the machine.
    blocked = r"3 messages left: the message was not sent within \S+ s, because the producer is blocked .*: capacity\n"
    assert re.search(blocked, capsys.readouterr().err)
    assert left(path) == ["id-1", "id-2", "id-3"]
    # The messages were written to the broker, or may have been.
    assert all(stored.may_be_second_copy for stored in Outbox.look(path))


def test_the_error_of_drain_for_an_unreachable_broker_shows_the_address_without_the_password(
    path: Path, capsys: Capture
) -> None:
    assert main(["outbox", "drain", str(path), "--url", "amqp://guest:secret@127.0.0.1:1/%2F"]) == 1
    err = capsys.readouterr().err
    assert "127.0.0.1:1" in err
    assert "secret" not in err
    assert len(left(path)) == 3


def test_drain_fails_without_confirms_and_for_an_outbox_that_is_missing_or_in_use(
    path: Path, tmp_path: Path, broker: Broker, capsys: Capture
) -> None:
    assert main(["outbox", "drain", str(path), "--url", f"{broker.url}?confirms=false"]) == 2
    assert main(["outbox", "drain", str(tmp_path / "nothing"), "--url", broker.url]) == 1
    assert "nothing: there is no such outbox" in capsys.readouterr().err
    assert not (tmp_path / "nothing").exists()
    with Outbox(path):
        assert main(["outbox", "drain", str(path), "--url", broker.url]) == 1
    assert "is used by another producer" in capsys.readouterr().err


@pytest.mark.program
def test_an_interrupted_drain_keeps_unconfirmed_messages_in_the_outbox(path: Path, broker: Broker) -> None:
    broker.withhold_confirms()
    with Forked[str](
        [sys.executable, "-c", BRIEF, "outbox", "drain", str(path), "--url", broker.url],
        stderr=subprocess.PIPE,
        text=True,
    ) as drain:
        broker.wait_until(lambda broker: broker.queue("orders").depth == 3, timeout=20)
        drain.send_signal(signal.SIGTERM)
        assert drain.stderr is not None
        assert "interrupted by SIGTERM; 3 messages left" in drain.stderr.read()
        assert drain.wait(20) == 128 + signal.SIGTERM
    assert len(left(path)) == 3


# Damaged messages, and messages that the user removes.


@pytest.fixture
def damaged(path: Path) -> Path:
    """The outbox `path`, whose second message cannot be read."""
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE message SET header = x'00' WHERE sequence = 2")
    return path


def test_ls_and_export_report_damaged_messages(damaged: Path, capsys: Capture) -> None:
    assert main(["outbox", "ls", str(damaged)]) == 0
    *_, told, total = capsys.readouterr().out.splitlines()
    assert told.startswith("message 2 is damaged, and will not be sent: the content header cannot be decoded")
    assert total.startswith("2 messages, ")
    assert total.endswith("; also 1 damaged message")
    assert main(["outbox", "export", str(damaged)]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["sequence"] for line in out.splitlines()] == [1, 3]
    assert err == "qflow: 1 damaged message left out; qflow outbox ls shows the reasons\n"


def test_ls_and_export_report_a_message_with_a_damaged_date(path: Path, capsys: Capture) -> None:
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE message SET at = 1e300 WHERE sequence = 2")
    assert main(["outbox", "ls", "--json", str(path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["sequence"] for each in told["messages"]] == [1, 3]
    assert told["damaged"] == [{"sequence": 2, "reason": "the time 1e+300 is no date"}]
    assert main(["outbox", "export", str(path)]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["sequence"] for line in out.splitlines()] == [1, 3]
    assert "1 damaged message left out" in err


def test_drain_sends_undamaged_messages_and_reports_damaged_ones(
    damaged: Path, broker: Broker, capsys: Capture
) -> None:
    for confirmed in (2, 0):
        assert main(["outbox", "drain", str(damaged), "--url", broker.url]) == 1
        out, err = capsys.readouterr()
        assert out == f"{confirmed} messages confirmed, 0 messages left\n"
        assert err == "qflow: 1 damaged message left; see qflow outbox ls and qflow outbox drop\n"
    assert [message.body for message in broker.messages("orders")] == [b"one", "três".encode()]
    assert main(["outbox", "drop", str(damaged), "2", "--yes"]) == 0
    assert main(["outbox", "drain", str(damaged), "--url", broker.url]) == 0


def test_drop_removes_only_the_named_messages(damaged: Path, capsys: Capture) -> None:
    assert main(["outbox", "drop", str(damaged), "3", "2", "3", "--yes"]) == 0
    two, three, total = capsys.readouterr().out.splitlines()
    assert two.startswith("message 2, damaged: the content header cannot be decoded")
    assert three == "message 3 to ''/'orders', 5 bytes"
    assert total == "2 messages removed"
    assert left(damaged) == ["id-1"]
    assert Outbox.look_damaged(damaged) == {}


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("", 1)], ids=["yes", "no", "none"])
def test_drop_asks_for_confirmation(
    path: Path, answer: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    assert main(["outbox", "drop", str(path), "1", "3"]) == code
    assert "Remove 2 messages permanently?" in capsys.readouterr().out
    assert left(path) == (["id-1", "id-2", "id-3"] if code else ["id-2"])


def test_drop_without_an_answer_reports_that_standard_input_is_closed(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["outbox", "drop", str(path), "1"]) == 1
    assert capsys.readouterr().err == "qflow: standard input is closed\n"


def test_drop_refuses_a_number_that_no_message_has(path: Path, capsys: Capture) -> None:
    assert main(["outbox", "drop", str(path), str(2**63), "--yes"]) == 2
    assert "SEQUENCE" in capsys.readouterr().err


def test_drop_removes_nothing_if_a_message_does_not_exist_or_the_outbox_is_in_use(
    path: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["outbox", "drop", str(path), "1", "7", "--yes"]) == 1
    assert "message 7 is no longer in the outbox" in capsys.readouterr().err
    with Outbox(path):
        assert main(["outbox", "drop", str(path), "1", "--yes"]) == 1
    assert "is used by another producer" in capsys.readouterr().err
    assert main(["outbox", "drop", str(tmp_path / "nothing"), "1", "--yes"]) == 1
    assert not (tmp_path / "nothing").exists()
    assert len(left(path)) == 3
