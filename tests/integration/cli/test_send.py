from __future__ import annotations

import io
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import pytest

import qflow_client.cli.sending
from qflow_client import Outbox, OutboxError, Producer
from qflow_client.broker import Broker
from qflow_client.cli import main
from qflow_client.cli.resuming import source_of
from qflow_client.message import REPUBLISHED
from qflow_client.outbox.noted import Noted
from qflow_client.testing.proxy import FaultProxy
from tests.integration.cli.commands import BRIEF
from tests.integration.cli.terminal import on_a_terminal
from tests.integration.forked import Forked
from tests.integration.producer.tools import eventually

Capture = pytest.CaptureFixture[str]

# `qflow` that kills itself when all its records were returned, and this is on disk, but before it handles any of them.
KILLED_BEFORE_IT_LOOKS = """
import os, signal, sys
from qflow_client import UndeliveredMessages
from qflow_client.cli import main
from qflow_client.cli.sending import Sending

def die(sending):
    try:
        sending.producer.flush()
    except UndeliveredMessages:
        sending.producer._engine.storage.outbox.commit()
        os.kill(os.getpid(), signal.SIGKILL)

Sending.account = die
sys.exit(main())
"""


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def give(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return give


def bodies(broker: Broker) -> list[bytes]:
    return [message.body for message in broker.messages("orders")]


def summary(capsys: Capture) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_send_publishes_each_line_as_a_message_and_waits_for_all_confirms(
    broker: Broker, stdin: Callable[[bytes], None], capsys: Capture
) -> None:
    stdin(b"one\ntwo\nthree\n")
    assert main(["send", "--url", broker.url, "--routing-key", "orders"]) == 0
    assert bodies(broker) == [b"one", b"two", b"three"]
    out, err = capsys.readouterr()
    assert out.startswith("3 records confirmed in ")
    assert err == ""


def test_the_option_declare_declares_the_queue(stdin: Callable[[bytes], None], capsys: Capture) -> None:
    with Broker() as empty:
        stdin(b"one\n")
        assert main(["send", "--url", empty.url, "--routing-key", "orders", "--declare"]) == 0
        assert bodies(empty) == [b"one"]
        capsys.readouterr()
        assert main(["send", "--url", empty.url, "-k", "a.b", "--exchange", "events", "--declare"]) == 2
        assert "--declare declares a queue, and works only with the default exchange" in capsys.readouterr().err


def test_csv_records_arrive_as_json_objects(broker: Broker, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "orders.csv"
    path.write_text("number,name\n1,Åse\n2,Bo\n", encoding="utf-8")
    assert main(["send", str(path), "-u", broker.url, "-k", "orders", "--json"]) == 0
    messages = broker.messages("orders")
    assert [json.loads(message.body) for message in messages] == [
        {"number": "1", "name": "Åse"},
        {"number": "2", "name": "Bo"},
    ]
    assert {message.properties.content_type for message in messages} == {"application/json"}
    told = summary(capsys)
    assert (told["complete"], told["sent"], told["confirmed"], told["not_confirmed"]) == (True, 2, 2, {})
    assert (told["confirmed_up_to_record"], told["error"]) == (2, None)


@pytest.mark.parametrize(
    ("content", "options", "arrived"),
    [
        (b"n,name\n1,Bo\n", ["-f", "csv"], [b'{"n":"1","name":"Bo"}']),
        (b'{"n": 1}\n\n{"n": 2}\n', ["--format", "jsonl"], [b'{"n": 1}', b'{"n": 2}']),
        (b"n,name\n1,Bo\n", ["-f", "lines"], [b"n,name", b"1,Bo"]),
        (b"n,name\n1,Bo\n", [], [b"n,name", b"1,Bo"]),
    ],
    ids=["csv", "jsonl", "lines", "no format option"],
)
def test_standard_input_is_read_in_the_requested_format(
    broker: Broker, stdin: Callable[[bytes], None], content: bytes, options: list[str], arrived: list[bytes]
) -> None:
    stdin(content)
    assert main(["send", "-u", broker.url, "-k", "orders", "-q", *options]) == 0
    assert bodies(broker) == arrived


@pytest.mark.parametrize(
    ("name", "options", "arrived"),
    [
        ("orders.txt", [], [b"n,name", b"1,Bo"]),
        ("orders.csv", ["-f", "lines"], [b"n,name", b"1,Bo"]),
        ("orders.txt", ["-f", "csv"], [b'{"n":"1","name":"Bo"}']),
    ],
    ids=["by its extension", "csv as lines", "txt as csv"],
)
def test_the_file_name_extension_decides_the_format_unless_a_format_is_set(
    broker: Broker, tmp_path: Path, name: str, options: list[str], arrived: list[bytes]
) -> None:
    path = tmp_path / name
    path.write_bytes(b"n,name\n1,Bo\n")
    assert main(["send", str(path), "-u", broker.url, "-k", "orders", "-q", *options]) == 0
    assert bodies(broker) == arrived


def test_settings_that_are_not_on_the_command_line_come_from_the_environment(
    broker: Broker, stdin: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QFLOW_URL", broker.url)
    monkeypatch.setenv("QFLOW_ROUTING_KEY", "elsewhere")
    stdin(b"one\n")
    assert main(["send", "--routing-key", "orders", "--quiet"]) == 0
    assert bodies(broker) == [b"one"]


def test_a_run_with_empty_input_succeeds(broker: Broker, stdin: Callable[[bytes], None], capsys: Capture) -> None:
    stdin(b"")
    assert main(["send", "-u", broker.url, "-k", "orders"]) == 0
    assert capsys.readouterr().out.startswith("0 records confirmed")


def test_a_successful_run_with_the_option_quiet_prints_nothing(
    broker: Broker, stdin: Callable[[bytes], None], capsys: Capture
) -> None:
    stdin(b"one\n")
    assert main(["send", "-u", broker.url, "-k", "orders", "-q"]) == 0
    assert capsys.readouterr() == ("", "")


def test_the_option_skip_omits_the_first_records(
    broker: Broker, stdin: Callable[[bytes], None], capsys: Capture
) -> None:
    stdin(b"one\ntwo\nthree\n")
    assert main(["send", "-u", broker.url, "-k", "orders", "--skip", "2", "--json"]) == 0
    assert bodies(broker) == [b"three"]
    assert summary(capsys)["confirmed_up_to_record"] == 3


def test_an_invalid_record_ends_the_run_and_no_later_record_is_sent(
    broker: Broker, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "orders.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\n{"n": \n{"n": 4}\n', encoding="utf-8")
    assert main(["send", str(path), "-u", broker.url, "-k", "orders"]) == 1
    assert bodies(broker) == [b'{"n": 1}', b'{"n": 2}']
    out, err = capsys.readouterr()
    assert err.startswith(f"qflow: {path}, line 3: not valid JSON")
    assert err.endswith("this record and all after it were not sent\n")
    assert "the records up to 2 need not be sent again" in out


def test_unroutable_records_are_reported_one_by_one(
    broker: Broker, stdin: Callable[[bytes], None], capsys: Capture
) -> None:
    stdin(b"x\n" * 8)
    assert main(["send", "-u", broker.url, "-k", "nowhere"]) == 1
    out, err = capsys.readouterr()
    assert "qflow: record 1 (line 1): " in err
    assert "returned (312 NO_ROUTE)" in err
    assert "returned" in out
    # The summary does not suggest --skip, because no record was confirmed.
    assert "--skip" not in out


@pytest.mark.usefixtures("no_retries")
def test_a_run_with_a_nacked_record_fails_and_reports_the_record(
    broker: Broker, stdin: Callable[[bytes], None], capsys: Capture
) -> None:
    broker.nack_publishes()
    stdin(b"one\n")
    assert main(["send", "-u", broker.url, "-k", "orders", "--json"]) == 1
    told = summary(capsys)
    assert (told["complete"], told["confirmed"], told["not_confirmed"]) == (False, 0, {"nacked": 1})


def test_a_run_waits_for_confirms_even_if_the_maximum_flow_control_wait_is_0(
    broker: Broker, stdin: Callable[[bytes], None], capsys: Capture
) -> None:
    stdin(b"one\ntwo\n")
    assert main(["send", "-u", broker.url, "-k", "orders", "--max-producer-flow-control-wait", "0"]) == 0
    assert capsys.readouterr().out.startswith("2 records confirmed")


def test_if_confirms_are_missing_the_error_shows_how_long_the_command_waited(
    broker: Broker, stdin: Callable[[bytes], None], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qflow_client.cli.sending, "_GRACE", 0.1)
    broker.withhold_confirms()
    stdin(b"one\ntwo\n")
    assert main(["send", "-u", broker.url, "-k", "orders", "--max-producer-flow-control-wait", "0.1"]) == 1
    out, err = capsys.readouterr()
    assert err.endswith("qflow: not every record was confirmed: 2 messages are not settled after 0.1 s\n")
    assert "not confirmed: 2 unknown" in out
    assert "--skip" not in out


def test_send_waits_for_room_in_the_window_even_if_QFLOW_WHEN_FLOWED_is_raise(
    broker: Broker, stdin: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QFLOW_WHEN_FLOWED", "raise")
    stdin(b"x\n" * 50)
    assert main(["send", "-u", broker.url, "-k", "orders", "--capacity", "1", "-q"]) == 0
    assert broker.queue("orders").depth == 50


def test_empty_lines_arbitrary_bytes_and_a_line_of_many_frames_arrive_unchanged(
    broker: Broker, stdin: Callable[[bytes], None]
) -> None:
    lines = [b"", bytes(range(256)).replace(b"\n", b""), b"", b"x" * 3_000_000, b"\r"]
    stdin(b"\n".join(lines))
    assert main(["send", "-u", broker.url, "-k", "orders", "-q"]) == 0
    assert bodies(broker) == lines


def test_a_skip_beyond_the_end_of_the_input_is_an_error(
    broker: Broker, stdin: Callable[[bytes], None], capsys: Capture
) -> None:
    for skip, code in (("2", 0), ("3", 1)):
        stdin(b"one\ntwo\n")
        assert main(["send", "-u", broker.url, "-k", "orders", "--skip", skip]) == code
    out, err = capsys.readouterr()
    assert err == "qflow: --skip 3: the input has only 2 records; skip fewer\n"
    assert "continues after" not in out
    assert broker.queue("orders").depth == 0


def test_a_closed_standard_input_is_reported(broker: Broker, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["send", "-u", broker.url, "-k", "orders"]) == 1
    assert capsys.readouterr().err == "qflow: standard input is closed; give a FILE\n"


def test_without_a_terminal_the_command_reports_a_long_wait_and_draws_no_progress_bar(
    broker: Broker, stdin: Callable[[bytes], None], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QFLOW_FLOW_CONTROL_WAIT_NOTIFY_PERIOD", "0.05")
    broker.flow(False)
    stdin(b"one\n")
    assert main(["send", "-u", broker.url, "-k", "orders", "--max-producer-flow-control-wait", "1.5"]) == 3
    out, err = capsys.readouterr()
    assert "qflow: still waiting after " in err
    assert "channel_flow" in err
    assert "\x1b" not in out + err
    assert "--skip" not in out


def test_a_flow_control_timeout_shows_which_records_were_not_sent(
    broker: Broker, stdin: Callable[[bytes], None], capsys: Capture
) -> None:
    broker.declare_queue("small", arguments={"qpid.flow_stop_count": 3, "x-qflow-enforcement": "channel_flow"})
    stdin(b"".join(b"%d\n" % n for n in range(1, 100)))
    arguments = ["-k", "small", "--capacity", "1", "--max-producer-flow-control-wait", "0.2"]
    assert main(["send", "-u", broker.url, *arguments]) == 3
    # One message exceeds the threshold before the broker stops the producer.
    assert broker.queue("small").depth == 4
    out, err = capsys.readouterr()
    assert "record 5 (line 5) and all after it were not sent" in err
    assert "blocked (flowed): channel_flow" in err
    assert "the records up to 4 need not be sent again" in out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["no-such-file", "-k", "orders"], 1, "qflow: no-such-file: No such file or directory"),
        (["-"], 2, "qflow: no destination is given: use --routing-key QUEUE, or --exchange EXCHANGE"),
        (["-", "-k", "orders", "--capacity", "0"], 2, "qflow: capacity=0: it must be a whole number of messages"),
        (
            ["-", "-k", "orders", "--max-producer-flow-control-wait", "long"],
            2,
            "neither a number of seconds nor 'forever'",
        ),
        (["-", "-k", "orders", "--rate-burst", "0"], 2, "qflow: rate_burst=0: it must be"),
        (["-", "-k", "orders", "-u", "http://localhost"], 2, "qflow: url='http://localhost': it must be"),
    ],
)
def test_a_run_that_cannot_start_prints_the_reason_without_a_traceback(
    stdin: Callable[[bytes], None], capsys: Capture, arguments: list[str], code: int, words: str
) -> None:
    stdin(b"")
    assert main(["send", *arguments]) == code
    err = capsys.readouterr().err
    assert words in " ".join(err.split())
    assert "Traceback" not in err


def test_the_error_for_an_unreachable_broker_is_one_line(
    stdin: Callable[[bytes], None], capsys: Capture, unused_url: str
) -> None:
    stdin(b"one\n")
    assert main(["send", "-u", unused_url, "-k", "orders"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("qflow: amqp://")
    assert len(err.splitlines()) == 1


@pytest.fixture
def unused_url() -> str:
    with Broker() as broker:
        return broker.url


def start(
    broker: Broker,
    records: bytes,
    url: str = "",
    *,
    options: Sequence[str] = ("--json",),
    program: Sequence[str] = ("-m", "qflow_client.cli"),
) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Start a run that has sent some records and waits for more. Return the process and its standard input."""
    process = Forked[bytes](
        [sys.executable, *program, "send", "-u", url or broker.url, "-k", "orders", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(records)
    process.stdin.flush()
    broker.wait_until(lambda b: b.queue("orders").depth == records.count(b"\n"), timeout=60)
    return process, process.stdin


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
def test_the_summary_shows_confirmed_records_the_rate_and_the_time_under_flow_control(
    broker: Broker, as_json: bool
) -> None:
    process, _ = start(broker, b"one\n", options=("--json",) if as_json else ())
    broker.flow(False)
    broker.wait_until(lambda b: all(channel.flow_ok for channel in b.producers()))
    # The summary shows seconds with three decimals.
    eventually(lambda: broker.producers()[0].flowed_seconds >= 0.05, "a stop that is long enough to be told")
    broker.flow(True)
    out, err = process.communicate(b"two\nthree\n", timeout=20)
    assert (process.returncode, err) == (0, b"")
    if as_json:
        told = json.loads(out)
        assert (told["complete"], told["sent"], told["confirmed"]) == (True, 3, 3)
        assert told["times_flowed"] >= 1
        # The time before the first connection does not count as flow control.
        assert 0 < told["seconds_flowed"]["channel_flow"] < told["seconds"]
        # The summary rounds seconds to three decimals, and the rate to one.
        slowest, fastest = (3 / (told["seconds"] + error) for error in (0.001, -0.001))
        assert slowest - 0.1 < told["messages_per_second"] < fastest + 0.1
    else:
        confirmed, flowed = out.decode().splitlines()
        assert re.fullmatch(r"3 records confirmed in \d+(\.\d+)? s, \d+ msg/s", confirmed)
        assert re.fullmatch(r"blocked \(flowed\) \d+ times?: (.*, )?channel_flow \d+(\.\d+)? s(, .*)?", flowed)


@pytest.mark.program
def test_on_a_terminal_a_progress_bar_shows_the_sent_part_of_the_file_and_the_current_hold(
    broker: Broker, tmp_path: Path
) -> None:
    path = tmp_path / "orders.csv"
    path.write_bytes(b"number\n" + b"1\n" * 1000)
    broker.flow(False)
    with on_a_terminal("send", str(path), "-u", broker.url, "-k", "orders") as terminal:
        terminal.read_until("flowed by channel_flow for ")
        assert "orders.csv" in terminal.drawn
        # The first record waits.
        assert "0 confirmed" in terminal.drawn
        broker.flow(True)
        terminal.read_until(None)
        assert terminal.process.wait(20) == 0
        assert terminal.output().startswith("1,000 records confirmed in ")
    assert re.search(r"orders\.csv ━+ 2\.0/2\.0 kB\s+1,000 confirmed, [\d,]+ msg/s  unflowed", terminal.drawn)
    # The bar is erased at the end.
    assert terminal.raw.endswith("\x1b[2K")


@pytest.mark.program
def test_on_a_terminal_an_input_of_unknown_length_has_a_spinner(broker: Broker) -> None:
    with on_a_terminal("send", "-u", broker.url, "-k", "orders") as terminal:
        assert terminal.process.stdin is not None
        terminal.process.stdin.write(b"one\ntwo\n")
        terminal.process.stdin.flush()
        broker.wait_until(lambda b: b.queue("orders").depth == 2)
        terminal.process.stdin.write(b"three\n")
        terminal.process.stdin.close()
        terminal.read_until("3 confirmed")
        terminal.read_until(None)
        assert terminal.process.wait(20) == 0
    assert re.search(r"standard input [⠁-⣿]\s", terminal.drawn)
    assert "kB" not in terminal.drawn


@pytest.mark.program
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_after_an_interrupt_while_reading_the_summary_shows_the_last_confirmed_record(
    broker: Broker, number: signal.Signals, code: int
) -> None:
    process, _ = start(broker, b"one\ntwo\n")
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert err.decode() == f"qflow: interrupted by {number.name}\n"
    told = json.loads(out)
    assert (told["confirmed"], told["confirmed_up_to_record"], told["complete"]) == (2, 2, False)


@pytest.mark.program
def test_after_an_interrupt_while_flowed_the_run_ends_and_sends_no_further_record(broker: Broker) -> None:
    process, stdin = start(broker, b"one\n")
    broker.flow(False)
    broker.wait_until(lambda b: all(channel.flow_ok for channel in b.producers()))
    stdin.write(b"two\n" * 1000)
    stdin.flush()
    process.send_signal(signal.SIGINT)
    out, _err = process.communicate(timeout=20)
    assert process.returncode == 130
    told = json.loads(out)
    assert (told["sent"], told["confirmed"], told["confirmed_up_to_record"]) == (1, 1, 1)
    assert broker.queue("orders").depth == 1


@pytest.mark.program
def test_after_an_interrupt_while_waiting_for_confirms_unconfirmed_records_are_reported_as_unknown(
    broker: Broker,
) -> None:
    broker.withhold_confirms()
    process, stdin = start(broker, b"one\ntwo\n", options=("--json", "--name", "shop"), program=("-c", BRIEF))
    assert [each.client_properties["connection_name"] for each in broker.connections()] == ["shop"]
    stdin.close()
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=20)
    assert process.returncode == 143
    assert process.stdout is not None
    assert process.stderr is not None
    told = json.loads(process.stdout.read())
    assert (told["confirmed"], told["not_confirmed"]) == (0, {"unknown": 2})
    assert process.stderr.read().endswith(b"qflow: interrupted by SIGTERM\n")
    process.stdout.close()
    process.stderr.close()


@pytest.mark.program
def test_after_an_interrupt_while_disconnected_unconfirmed_records_are_reported_as_unknown(broker: Broker) -> None:
    broker.withhold_confirms()
    with FaultProxy(broker.url) as proxy:
        process, _ = start(broker, b"one\ntwo\n", proxy.url, program=("-c", BRIEF))
        proxy.refuse()
        proxy.cut()
        proxy.wait_until(lambda _: not proxy.connections)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 143
    told = json.loads(out)
    assert (told["confirmed"], told["not_confirmed"]) == (0, {"unknown": 2})
    assert err.decode().endswith("qflow: interrupted by SIGTERM\n")


@pytest.mark.program
@pytest.mark.usefixtures("one_connection")
def test_after_a_lost_connection_the_summary_shows_the_last_confirmed_record(broker: Broker) -> None:
    process, _ = start(broker, b"one\n")
    broker.drop_connections()
    out, err = process.communicate(b"two\nthree\n", timeout=20)
    assert process.returncode == 1
    told = json.loads(out)
    # The confirm of the first record may have been lost with the connection.
    assert told["confirmed_up_to_record"] == told["confirmed"] <= 1
    assert told["confirmed"] + sum(told["not_confirmed"].values()) == told["sent"]
    assert err.decode().startswith("qflow: record ")


# The properties of messages.


def test_message_ids_and_headers_come_from_the_options(broker: Broker, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "orders.csv"
    file.write_bytes("number;who\n7;Zoë\n8;Ann\n".encode("latin-1"))
    options = ["--delimiter", ";", "--encoding", "latin-1", "--message-id", "number", "--header", "tenant=a=b"]
    assert main(["send", str(file), "-u", broker.url, "-k", "orders", "--name", "shop", *options]) == 0
    messages = broker.messages("orders")
    assert [message.properties.message_id for message in messages] == ["7", "8"]
    assert [message.properties.headers for message in messages] == [{"tenant": "a=b"}] * 2
    assert json.loads(messages[0].body) == {"number": "7", "who": "Zoë"}
    # A record that is sent again has the same id and headers, and the mark.
    path = tmp_path / "outbox"
    assert send_file(file, path, broker, *options) == 0
    assert send_file(file, path, broker, "--skip", "1", *options) == 0
    again = broker.messages("orders")[-1].properties
    assert (again.message_id, again.headers) == ("8", {"tenant": "a=b", REPUBLISHED: True})
    assert main(["send", str(file), "-u", broker.url, "-k", "nowhere", "--no-mandatory", *options]) == 0


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--message-id", "nothing"], 1, "line 2: the record has no message id in 'nothing'"),
        (["--message-id", "a", "-f", "lines"], 2, "--message-id needs the format csv or jsonl"),
        (["--delimiter", ";;"], 2, "--delimiter ';;': it must be one character"),
        (["--encoding", "utf-16"], 2, "--encoding utf-16: it cannot be used; use utf-8, latin-1"),
        (["--encoding", "klingon"], 2, "--encoding klingon: it cannot be used; use utf-8"),
        (["--encoding", "undefined"], 2, "--encoding undefined: it cannot be used; use utf-8"),
        (["--header", "tenant"], 2, "--header 'tenant': it must be NAME=VALUE"),
    ],
)
def test_invalid_options_for_message_ids_headers_and_formats_are_reported(
    broker: Broker, tmp_path: Path, capsys: Capture, options: list[str], code: int, words: str
) -> None:
    file = tmp_path / "orders.csv"
    file.write_bytes(b"a,b\n1,2\n")
    assert main(["send", str(file), "-u", broker.url, "-k", "orders", *options]) == code
    assert words in capsys.readouterr().err
    assert bodies(broker) == []


def test_bash_can_complete_the_name_of_a_command(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    asked = {"_QFLOW_COMPLETE": "complete_bash", "COMP_WORDS": "qflow se", "COMP_CWORD": "1"}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    assert main([]) == 0
    assert capsys.readouterr().out.split() == ["send"]


@pytest.mark.parametrize("at", [0, 1, 7])
def test_the_option_no_color_may_be_at_any_place_in_the_command_line(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    line = ["send", os.devnull, "-u", broker.url, "-k", "orders", "-q"]
    assert main([*line[:at], "--no-color", *line[at:]]) == 0
    assert os.environ["NO_COLOR"] == "1"


# With an outbox.


def send_with(path: Path, broker: Broker, *more: str) -> int:
    return main(["send", "-u", broker.url, "-k", "orders", "--outbox", str(path), *more])


def test_confirmed_records_are_removed_from_the_outbox(
    broker: Broker, stdin: Callable[[bytes], None], tmp_path: Path, capsys: Capture
) -> None:
    stdin(b"one\ntwo\n")
    assert send_with(tmp_path / "outbox", broker, "--json") == 0
    told = summary(capsys)
    assert (told["complete"], told["confirmed"], told["stored"]) == (True, 2, 0)
    assert Outbox.look(tmp_path / "outbox") == []
    assert bodies(broker) == [b"one", b"two"]


def test_if_the_disk_fails_once_after_a_record_is_admitted_the_record_is_sent_once_and_counted(
    broker: Broker,
    stdin: Callable[[bytes], None],
    capsys: Capture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait_durable, calls = Outbox.wait_durable, 0

    def fails_once(self: Outbox, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OutboxError("disk I/O error")
        wait_durable(self, *arguments)

    monkeypatch.setattr(Outbox, "wait_durable", fails_once)
    stdin(b"one\ntwo\nthree\n")
    assert send_with(tmp_path / "outbox", broker, "--json") == 0
    assert summary(capsys)["confirmed"] == 3
    assert bodies(broker) == [b"one", b"two", b"three"]


def test_a_record_that_is_too_large_for_the_outbox_is_not_sent_and_neither_are_later_records(
    broker: Broker, stdin: Callable[[bytes], None], capsys: Capture, tmp_path: Path
) -> None:
    stdin(b"one\n" + b"x" * 1000 + b"\nthree\n")
    url = f"{broker.url}?outbox_max_bytes=500&outbox_full=raise"
    assert main(["send", "-u", url, "-k", "orders", "--outbox", str(tmp_path / "outbox")]) == 1
    assert bodies(broker) == [b"one"]
    assert "record 2 (line 2) and all after it were not sent" in capsys.readouterr().err


@pytest.mark.program
def test_after_a_sigterm_unconfirmed_records_stay_in_the_outbox_and_the_next_run_sends_them_first(
    broker: Broker, stdin: Callable[[bytes], None], tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "outbox"
    broker.withhold_confirms()
    process, _ = start(broker, b"one\ntwo\nthree\n", options=("--outbox", str(path)), program=("-c", BRIEF))
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 143
    assert err.endswith(b"qflow: interrupted by SIGTERM\n")
    told = out.decode().splitlines()
    assert f"3 records in the outbox {path}: the next run with it, or qflow outbox drain, sends what is there" in told
    assert told[-1] == "the records up to 3 need not be sent again: --skip 3 continues after them"
    assert [stored.message.body for stored in Outbox.look(path)] == [b"one", b"two", b"three"]

    broker.release_confirms()
    broker.purge("orders")
    stdin(b"one\ntwo\nthree\nfour\n")
    assert send_with(path, broker, "--skip", "3", "--json") == 0
    assert summary(capsys)["confirmed"] == 1
    messages = broker.messages("orders")
    assert [message.body for message in messages] == [b"one", b"two", b"three", b"four"]
    marks = [REPUBLISHED in (message.properties.headers or {}) for message in messages]
    assert marks == [True, True, True, False]
    assert Outbox.look(path) == []


def test_unroutable_messages_of_an_earlier_run_in_the_outbox_are_reported(
    broker: Broker, stdin: Callable[[bytes], None], tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "outbox"
    with Outbox(path) as outbox:
        outbox.put(b"left", "", "nowhere", "id-left")
    stdin(b"one\n")
    assert send_with(path, broker) == 1
    out, err = capsys.readouterr()
    assert (
        "a message of an earlier run: message id-left to ''/'nowhere': stored (312 NO_ROUTE); there is no queue" in err
    )
    assert "1 record confirmed" in out
    # The message stays in the outbox until it is delivered.
    broker.declare_queue("nowhere")
    stdin(b"")
    assert send_with(path, broker) == 0
    assert [message.body for message in broker.messages("nowhere")] == [b"left"]
    assert Outbox.look(path) == []


def test_with_an_outbox_returned_records_are_reported_even_if_confirms_are_missing(
    broker: Broker,
    stdin: Callable[[bytes], None],
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(qflow_client.cli.sending, "_GRACE", 0.1)
    flush = Producer.flush

    def flush_after_returns(producer: Producer) -> None:
        # Wait for all returns, however slow the broker is.
        flight = producer._protocol.parts.unconfirmed.flight
        eventually(lambda: sum(receipt._reply is not None for receipt in tuple(flight.values())) == 7)
        flush(producer)

    monkeypatch.setattr(Producer, "flush", flush_after_returns)
    path = tmp_path / "outbox"
    broker.withhold_confirms()
    # The broker sends the returns, but no acks.
    stdin(b"x\n" * 7)
    command = ["send", "-u", broker.url, "--outbox", str(path), "--max-producer-flow-control-wait", "0.1", "-q"]
    assert main([*command, "-k", "nowhere"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(": message")[0] for line in told[:5]] == [
        f"qflow: record {n} (line {n})" for n in range(1, 6)
    ]
    assert all("stored (312 NO_ROUTE)" in line for line in told[:5])
    assert told[5:] == [
        "qflow: and 2 more records",
        "qflow: not every record was confirmed: 7 messages are not settled after 0.1 s",
    ]
    # The next run also reports these records, but not records that only have no confirm yet.
    stdin(b"one\n")
    assert main([*command, "-k", "orders"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(": message")[0] for line in told[:5]] == ["qflow: a message of an earlier run"] * 5
    assert told[5:] == [
        "qflow: and 2 more records",
        "qflow: not every record was confirmed: 8 messages are not settled after 0.1 s",
    ]


# A file that is resumed (E13).


def send_file(file: Path, path: Path, broker: Broker, *more: str) -> int:
    return main(["send", str(file), "-u", broker.url, "-k", "orders", "--outbox", str(path), *more])


def marks(broker: Broker, queue: str = "orders") -> list[bool]:
    return [REPUBLISHED in (message.properties.headers or {}) for message in broker.messages(queue)]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "orders.txt"
    path.write_bytes(b"one\ntwo\nthree\n")
    return path


def test_E13_a_file_that_was_sent_is_sent_again_only_with_the_option_from_start(
    broker: Broker, lines: Path, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "outbox"
    assert send_file(lines, path, broker) == 0
    assert capsys.readouterr().out.startswith("3 records confirmed in ")
    assert send_file(lines, path, broker) == 0
    told = "nothing is left to send: 3 records sent by an earlier run; --from-start sends all\n"
    assert capsys.readouterr() == (told, "")
    assert send_file(lines, path, broker, "-q") == 0
    assert capsys.readouterr() == ("", "")
    assert bodies(broker) == [b"one", b"two", b"three"]
    assert send_file(lines, path, broker, "--from-start", "--json") == 0
    told_json = summary(capsys)
    assert (told_json["resumed_behind_record"], told_json["sent"]) == (0, 3)
    assert bodies(broker) == [b"one", b"two", b"three"] * 2
    # With --from-start all records are sent without a mark, because the user wants them twice.
    assert marks(broker) == [False] * 6


def test_E13_only_the_new_part_of_a_file_that_has_grown_is_sent(
    broker: Broker, lines: Path, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "outbox"
    assert send_file(lines, path, broker) == 0
    with lines.open("ab") as file:
        file.write(b"four\nfive\n")
    capsys.readouterr()
    assert send_file(lines, path, broker) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "continued after record 3; an earlier run had sent the records up to it\n2 records confirmed in "
    )
    with lines.open("ab") as file:
        file.write(b"six\n")
    assert send_file(lines, path, broker, "--json") == 0
    told = summary(capsys)
    assert (told["resumed_behind_record"], told["sent"], told["confirmed_up_to_record"]) == (5, 1, 6)
    assert bodies(broker) == [b"one", b"two", b"three", b"four", b"five", b"six"]


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (b"one\n", [], "the file has become shorter: an earlier run sent record 3"),
        (b"One\nTwo\nThree\nFour\n", [], "the file has changed: record 3 is not the record that an earlier run sent"),
        (b"one\ntwo\nthree\n", ["-f", "csv"], "an earlier run sent the file in the format lines, not csv"),
    ],
    ids=["shorter", "changed", "another format"],
)
def test_E13_a_file_that_has_changed_since_an_earlier_run_is_not_sent(
    broker: Broker, lines: Path, tmp_path: Path, capsys: Capture, content: bytes, options: list[str], words: str
) -> None:
    path = tmp_path / "outbox"
    assert send_file(lines, path, broker) == 0
    lines.write_bytes(content)
    capsys.readouterr()
    assert send_file(lines, path, broker, *options) == 1
    assert capsys.readouterr().err.endswith(f"qflow: {lines}: {words}; --from-start sends the whole file\n")
    assert bodies(broker) == [b"one", b"two", b"three"]
    assert send_file(lines, path, broker, "--from-start", "-f", "lines") == 0
    assert bodies(broker)[3:] == content.splitlines()


def test_E13_skip_overrides_the_stored_position_and_the_run_stores_a_new_position(
    broker: Broker, lines: Path, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "outbox"
    assert send_file(lines, path, broker, "--skip", "1") == 0
    assert send_file(lines, path, broker) == 0
    assert "nothing is left to send: 3 records sent by an earlier run" in capsys.readouterr().out
    assert send_file(lines, path, broker, "--skip", "2") == 0
    assert bodies(broker) == [b"two", b"three", b"three"]
    assert marks(broker) == [False, False, True]
    assert send_file(lines, path, broker, "--skip", "0", "--from-start") == 2
    assert "--from-start and --skip cannot be combined; use one of them" in capsys.readouterr().err


@pytest.mark.parametrize("is_refused", [False, True], ids=["delivered", "refused"])
def test_E13_after_a_shorter_run_with_skip_records_of_an_earlier_run_are_resent_with_a_mark(
    broker: Broker, lines: Path, tmp_path: Path, is_refused: bool
) -> None:
    path = tmp_path / "outbox"
    assert send_file(lines, path, broker) == 0
    # This run with --skip ends before the end of the first run, as if it had been killed.
    lines.write_bytes(b"one\ntwo\n")
    if is_refused:
        broker.delete_queue("orders")
    assert send_file(lines, path, broker, "--skip", "1") == int(is_refused)
    lines.write_bytes(b"one\ntwo\nthree\n")
    broker.declare_queue("orders")
    broker.purge("orders")
    assert send_file(lines, path, broker) == 0
    assert bodies(broker) == [b"two", b"three"][not is_refused :]
    assert all(marks(broker))


def test_E13_skip_works_if_the_stored_position_is_unreadable(broker: Broker, lines: Path, tmp_path: Path) -> None:
    path = tmp_path / "outbox"
    with Outbox(path) as outbox:
        outbox.set_position(source_of(str(lines), "", "orders"), "of something else")
    assert send_file(lines, path, broker, "--skip", "1") == 0
    assert bodies(broker) == [b"two", b"three"]
    assert not any(marks(broker))


def test_E13_a_file_that_was_sent_to_one_queue_is_sent_completely_to_another_queue(
    broker: Broker, lines: Path, tmp_path: Path
) -> None:
    path = tmp_path / "outbox"
    broker.declare_queue("more")
    assert send_file(lines, path, broker) == 0
    assert send_file(lines, path, broker, "-k", "more") == 0
    assert len(broker.messages("more")) == 3


@pytest.mark.program
def test_E13_the_run_after_a_sigterm_resends_the_unconfirmed_records_and_continues_after_them(
    broker: Broker, lines: Path, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "outbox"
    broker.withhold_confirms()
    process = Forked[bytes](
        [sys.executable, "-c", BRIEF, "send", str(lines), "-u", broker.url, "-k", "orders", "--outbox", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    broker.wait_until(lambda b: b.queue("orders").depth == 3, timeout=60)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 143
    assert out.decode().splitlines()[-1] == "the next run continues after record 3"
    broker.release_confirms()
    broker.purge("orders")
    with lines.open("ab") as file:
        file.write(b"four\n")
    assert send_file(lines, path, broker, "--json") == 0
    assert summary(capsys)["sent"] == 1
    assert bodies(broker) == [b"one", b"two", b"three", b"four"]
    assert marks(broker) == [True, True, True, False]


@pytest.mark.parametrize("first", [1, 3], ids=["from the beginning", "after delivered records"])
def test_E13_the_next_run_resends_undelivered_records_with_a_mark(
    broker: Broker, lines: Path, tmp_path: Path, capsys: Capture, first: int
) -> None:
    path = tmp_path / "outbox"
    if first == 3:
        lines.write_bytes(b"one\ntwo\n")
        assert send_file(lines, path, broker) == 0
        lines.write_bytes(b"one\ntwo\nthree\n")
    # The records become unroutable.
    before = bodies(broker)
    broker.delete_queue("orders")
    capsys.readouterr()
    assert send_file(lines, path, broker) == 1
    out, err = capsys.readouterr()
    records = "3 records" if first == 1 else "1 record"
    assert out.splitlines()[-2:] == [
        f"{records} in the outbox {path}: the next run with it, or qflow outbox drain, sends what is there",
        "the next run continues after record 3",
    ]
    assert f"record {first} (line {first}): message " in err
    assert "stored (312 NO_ROUTE); there is no queue 'orders': declare it" in err
    broker.declare_queue("orders")
    assert send_file(lines, path, broker, "--json") == 0
    assert before + bodies(broker) == [b"one", b"two", b"three"]
    assert all(marks(broker))
    assert send_file(lines, path, broker) == 0
    assert "nothing is left to send" in capsys.readouterr().out


@pytest.mark.program
def test_E13_a_run_that_is_killed_after_its_records_were_returned_loses_no_record(
    broker: Broker, lines: Path, tmp_path: Path
) -> None:
    path = tmp_path / "outbox"
    broker.delete_queue("orders")
    command = ["send", str(lines), "-u", broker.url, "-k", "orders", "--outbox", str(path)]
    process = Forked[bytes]([sys.executable, "-c", KILLED_BEFORE_IT_LOOKS, *command])
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert [stored.message.body for stored in Outbox.look(path)] == [b"one", b"two", b"three"]
    broker.declare_queue("orders")
    assert send_file(lines, path, broker) == 0
    assert bodies(broker) == [b"one", b"two", b"three"]
    assert all(marks(broker))
    assert Outbox.look(path) == []


def test_E13_records_that_wait_for_the_rate_limit_are_sent_once_even_if_the_disk_fails(
    broker: Broker, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines.write_bytes(b"1\n2\n3\n4\n5\n")
    write = Noted.write

    def fail_at_first(self: Noted, *arguments: Any, **options: Any) -> int:
        if self.last < 5:
            raise OutboxError("disk full")
        return write(self, *arguments, **options)

    monkeypatch.setattr(Noted, "write", fail_at_first)
    # The third record and all later records wait for the rate limit.
    assert send_file(lines, tmp_path / "outbox", broker, "--rate", "20", "--rate-burst", "2") == 0
    assert bodies(broker) == [b"1", b"2", b"3", b"4", b"5"]


def test_E13_a_damaged_stored_position_is_reported_and_from_start_ignores_it(
    broker: Broker, lines: Path, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "outbox"
    assert send_file(lines, path, broker) == 0
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE position SET value = 1.5")
    capsys.readouterr()
    assert send_file(lines, path, broker) == 1
    assert "is damaged; set it again with Outbox.set_position(); --from-start sends" in capsys.readouterr().err
    assert send_file(lines, path, broker, "--from-start") == 0
    assert bodies(broker) == [b"one", b"two", b"three"] * 2


def test_E13_each_run_sends_all_records_of_standard_input(
    broker: Broker, stdin: Callable[[bytes], None], tmp_path: Path
) -> None:
    for _ in range(2):
        stdin(b"one\n")
        assert send_with(tmp_path / "outbox", broker, "-q") == 0
    assert bodies(broker) == [b"one", b"one"]
