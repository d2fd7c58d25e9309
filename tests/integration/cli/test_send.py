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
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
from rich.console import Console

import qflow_client.cli.send
import qflow_client.cli.sending
from qflow_client import Outbox, OutboxError, Producer, Receipt
from qflow_client.broker import Broker
from qflow_client.cli import main
from qflow_client.cli.resuming import source_of
from qflow_client.message import REPUBLISHED
from qflow_client.outbox.noted import Noted
from qflow_client.testing.proxy import FaultProxy
from tests.integration.cli.commands import BRIEF, PATIENT
from tests.integration.cli.terminal import on_a_terminal
from tests.integration.forked import Forked
from tests.integration.producer.tools import eventually

Capture = pytest.CaptureFixture[str]
Send = Callable[..., tuple[str, str]]

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


@pytest.fixture
def send(broker: Broker, stdin: Callable[[bytes], None], capsys: Capture) -> Send:
    """A function that runs `qflow send` to the queue `orders`, and returns its output and its error output.

    The arguments are options, which may override the URL and the queue, the content of standard input, and the exit
    code that the run must have.
    """

    def run(*options: str, records: bytes = b"", code: int = 0) -> tuple[str, str]:
        stdin(records)
        assert main(["send", "-u", broker.url, "-k", "orders", *options]) == code
        return capsys.readouterr()

    return run


def bodies(broker: Broker) -> list[bytes]:
    return [message.body for message in broker.messages("orders")]


def marks(broker: Broker) -> list[bool]:
    """Return for each message of the queue whether it is marked as a possible second copy."""
    return [REPUBLISHED in (message.properties.headers or {}) for message in broker.messages("orders")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of an outbox."""
    return tmp_path / "outbox"


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A file with three records."""
    path = tmp_path / "orders.txt"
    path.write_bytes(b"one\ntwo\nthree\n")
    return path


@pytest.fixture
def send_lines(send: Send, lines: Path, path: Path) -> Send:
    """A function that runs `qflow send` with the file `lines` and the outbox `path`. The arguments are options."""
    return partial(send, str(lines), "--outbox", str(path))


def test_send_publishes_each_line_as_a_message_and_waits_for_all_confirms(broker: Broker, send: Send) -> None:
    out, err = send("--url", broker.url, "--routing-key", "orders", records=b"one\ntwo\nthree\n")
    assert bodies(broker) == [b"one", b"two", b"three"]
    assert out.startswith("3 records confirmed in ")
    assert err == ""


def test_the_option_declare_declares_the_queue(send: Send) -> None:
    with Broker() as empty:
        send("--url", empty.url, "--declare", records=b"one\n")
        assert bodies(empty) == [b"one"]
        _, err = send("--url", empty.url, "-k", "a.b", "--exchange", "events", "--declare", code=2)
        assert "--declare declares a queue, and works only with the default exchange" in err


def test_csv_records_arrive_as_json_objects(broker: Broker, send: Send, tmp_path: Path) -> None:
    path = tmp_path / "orders.csv"
    path.write_text("number,name\n1,Åse\n2,Bo\n", encoding="utf-8")
    out, _ = send(str(path), "--json")
    messages = broker.messages("orders")
    assert [json.loads(message.body) for message in messages] == [
        {"number": "1", "name": "Åse"},
        {"number": "2", "name": "Bo"},
    ]
    assert {message.properties.content_type for message in messages} == {"application/json"}
    told = json.loads(out)
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
    broker: Broker, send: Send, content: bytes, options: list[str], arrived: list[bytes]
) -> None:
    send("-q", *options, records=content)
    assert bodies(broker) == arrived


def test_settings_that_are_not_on_the_command_line_come_from_the_environment(
    broker: Broker, stdin: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QFLOW_URL", broker.url)
    monkeypatch.setenv("QFLOW_ROUTING_KEY", "elsewhere")
    stdin(b"one\n")
    assert main(["send", "--routing-key", "orders", "--quiet"]) == 0
    assert bodies(broker) == [b"one"]


def test_a_run_with_empty_input_succeeds(send: Send) -> None:
    out, _ = send(records=b"")
    assert out.startswith("0 records confirmed")


def test_a_successful_run_with_the_option_quiet_prints_nothing(send: Send) -> None:
    assert send("-q", records=b"one\n") == ("", "")


def test_the_option_skip_omits_the_first_records(broker: Broker, send: Send) -> None:
    out, _ = send("--skip", "2", "--json", records=b"one\ntwo\nthree\n")
    assert bodies(broker) == [b"three"]
    assert json.loads(out)["confirmed_up_to_record"] == 3


def test_an_invalid_record_ends_the_run_and_no_later_record_is_sent(broker: Broker, send: Send, tmp_path: Path) -> None:
    path = tmp_path / "orders.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\n{"n": \n{"n": 4}\n', encoding="utf-8")
    out, err = send(str(path), code=1)
    assert bodies(broker) == [b'{"n": 1}', b'{"n": 2}']
    assert err.startswith(f"qflow: {path}, line 3: not valid JSON")
    assert err.endswith("this record and all after it were not sent\n")
    assert "the records up to 2 need not be sent again" in out


def test_unroutable_records_are_reported_one_by_one(send: Send) -> None:
    out, err = send("-k", "nowhere", records=b"x\n" * 8, code=1)
    assert "qflow: record 1 (line 1): " in err
    assert "returned (312 NO_ROUTE)" in err
    assert "returned" in out
    # The summary does not suggest --skip, because no record was confirmed.
    assert "--skip" not in out


@pytest.mark.usefixtures("no_retries")
def test_a_run_with_a_nacked_record_fails_and_reports_the_record(broker: Broker, send: Send) -> None:
    broker.nack_publishes()
    out, _ = send("--json", records=b"one\n", code=1)
    told = json.loads(out)
    assert (told["complete"], told["confirmed"], told["not_confirmed"]) == (False, 0, {"nacked": 1})


def test_a_run_waits_for_confirms_even_if_the_maximum_flow_control_wait_is_0(send: Send) -> None:
    out, _ = send("--max-producer-flow-control-wait", "0", records=b"one\ntwo\n")
    assert out.startswith("2 records confirmed")


def test_if_confirms_are_missing_the_error_shows_how_long_the_command_waited(
    broker: Broker, send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qflow_client.cli.sending, "_GRACE", 0.1)
    flush = Producer.flush

    def flush_after_arrival(producer: Producer) -> None:
        broker.wait_until(lambda b: b.queue("orders").depth == 2)
        flush(producer)

    monkeypatch.setattr(Producer, "flush", flush_after_arrival)
    broker.withhold_confirms()
    out, err = send("--max-producer-flow-control-wait", "0.1", records=b"one\ntwo\n", code=1)
    assert err.endswith("qflow: not every record was confirmed: 2 messages are not settled after 0.1 s\n")
    assert "not confirmed: 2 unknown" in out
    assert "--skip" not in out


def test_send_waits_for_room_in_the_window_even_if_QFLOW_WHEN_FLOWED_is_raise(
    broker: Broker, send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QFLOW_WHEN_FLOWED", "raise")
    send("--capacity", "1", "-q", records=b"x\n" * 50)
    assert broker.queue("orders").depth == 50


def test_empty_lines_arbitrary_bytes_and_a_line_of_many_frames_arrive_unchanged(broker: Broker, send: Send) -> None:
    lines = [b"", bytes(range(256)).replace(b"\n", b""), b"", b"x" * 3_000_000, b"\r"]
    send("-q", records=b"\n".join(lines))
    assert bodies(broker) == lines


def test_a_skip_beyond_the_end_of_the_input_is_an_error(broker: Broker, send: Send) -> None:
    out, err = send("--skip", "2", records=b"one\ntwo\n")
    assert err == ""
    assert "continues after" not in out
    out, err = send("--skip", "3", records=b"one\ntwo\n", code=1)
    assert err == "qflow: --skip 3: the input has only 2 records; skip fewer\n"
    assert "continues after" not in out
    assert broker.queue("orders").depth == 0


def test_a_closed_standard_input_is_reported(broker: Broker, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["send", "-u", broker.url, "-k", "orders"]) == 1
    assert capsys.readouterr().err == "qflow: standard input is closed; give a FILE\n"


def test_without_a_terminal_the_command_reports_a_long_wait_and_draws_no_progress_bar(
    broker: Broker, send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Releasing(Console):
        def print(self, *arguments: Any, **options: Any) -> None:
            super().print(*arguments, **options)
            # The wait lasts until the command has reported it.
            broker.flow(True)

    monkeypatch.setattr(qflow_client.cli.send, "Console", Releasing)
    monkeypatch.setenv("QFLOW_FLOW_CONTROL_WAIT_NOTIFY_PERIOD", "0.05")
    broker.flow(False)
    out, err = send("--max-producer-flow-control-wait", "20", records=b"one\n")
    assert "qflow: still waiting after " in err
    assert "channel_flow" in err
    assert "\x1b" not in out + err


def test_after_a_flow_control_timeout_of_the_first_record_the_summary_does_not_suggest_skip(
    broker: Broker, send: Send
) -> None:
    broker.flow(False)
    out, err = send("--max-producer-flow-control-wait", "0.1", records=b"one\n", code=3)
    assert "\x1b" not in out + err
    assert "--skip" not in out


def test_a_flow_control_timeout_shows_which_records_were_not_sent(
    broker: Broker, send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_many = Producer.send_many

    def send_after_confirms(producer: Producer, messages: Sequence[Any]) -> Sequence[Receipt]:
        # Only Channel.Flow may hold a record, because a wait for a confirm could also last 0.2 s.
        eventually(lambda: not producer._protocol.unsettled)
        return send_many(producer, messages)

    monkeypatch.setattr(Producer, "send_many", send_after_confirms)
    broker.declare_queue("small", arguments={"qpid.flow_stop_count": 3, "x-qflow-enforcement": "channel_flow"})
    options = ["-k", "small", "--capacity", "1", "--max-producer-flow-control-wait", "0.2"]
    out, err = send(*options, records=b"".join(b"%d\n" % n for n in range(1, 100)), code=3)
    # One message exceeds the threshold before the broker stops the producer.
    assert broker.queue("small").depth == 4
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
            "qflow: --max-producer-flow-control-wait 'long' is neither a number of seconds nor 'forever'",
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


def test_the_error_for_an_unreachable_broker_is_one_line(send: Send, unused_url: str) -> None:
    _, err = send("-u", unused_url, records=b"one\n", code=1)
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
    # The producer's own clock of the stop runs before its answer. The summary shows seconds with three decimals.
    since = broker.producers()[0].flowed_seconds
    eventually(lambda: broker.producers()[0].flowed_seconds >= since + 0.05, "a stop that is long enough to be told")
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
    process, _ = start(broker, b"one\ntwo\n", program=("-c", PATIENT))
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert err.decode() == f"qflow: interrupted by {number.name}\n"
    told = json.loads(out)
    assert (told["confirmed"], told["confirmed_up_to_record"], told["complete"]) == (2, 2, False)


@pytest.mark.program
def test_after_an_interrupt_while_flowed_the_run_ends_and_sends_no_further_record(broker: Broker) -> None:
    process, stdin = start(broker, b"one\n", program=("-c", PATIENT))
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
    # `communicate` cannot use a closed pipe.
    process.stdin = None
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 143
    told = json.loads(out)
    assert (told["confirmed"], told["not_confirmed"]) == (0, {"unknown": 2})
    assert err.endswith(b"qflow: interrupted by SIGTERM\n")


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


def test_message_ids_and_headers_come_from_the_options(
    broker: Broker, send: Send, send_lines: Send, lines: Path
) -> None:
    lines.write_bytes("number;who\n7;Zoë\n8;Ann\n".encode("latin-1"))
    options = ["-f", "csv", "--delimiter", ";", "--encoding", "latin-1", "--message-id", "number"]
    options += ["--header", "tenant=a=b"]
    send(str(lines), "--name", "shop", *options)
    messages = broker.messages("orders")
    assert [message.properties.message_id for message in messages] == ["7", "8"]
    assert [message.properties.headers for message in messages] == [{"tenant": "a=b"}] * 2
    assert json.loads(messages[0].body) == {"number": "7", "who": "Zoë"}
    # A record that is sent again has the same id and headers, and the mark.
    send_lines(*options)
    send_lines("--skip", "1", *options)
    again = broker.messages("orders")[-1].properties
    assert (again.message_id, again.headers) == ("8", {"tenant": "a=b", REPUBLISHED: True})
    send(str(lines), "-k", "nowhere", "--no-mandatory", *options)


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
    broker: Broker, send: Send, tmp_path: Path, options: list[str], code: int, words: str
) -> None:
    file = tmp_path / "orders.csv"
    file.write_bytes(b"a,b\n1,2\n")
    _, err = send(str(file), *options, code=code)
    assert words in err
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


def test_confirmed_records_are_removed_from_the_outbox(broker: Broker, send: Send, path: Path) -> None:
    out, _ = send("--outbox", str(path), "--json", records=b"one\ntwo\n")
    told = json.loads(out)
    assert (told["complete"], told["confirmed"], told["stored"]) == (True, 2, 0)
    assert Outbox.look(path) == []
    assert bodies(broker) == [b"one", b"two"]


def test_if_the_disk_fails_once_after_a_record_is_admitted_the_record_is_sent_once_and_counted(
    broker: Broker, send: Send, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_durable, calls = Outbox.wait_durable, 0

    def fails_once(self: Outbox, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OutboxError("disk I/O error")
        wait_durable(self, *arguments)

    monkeypatch.setattr(Outbox, "wait_durable", fails_once)
    out, _ = send("--outbox", str(path), "--json", records=b"one\ntwo\nthree\n")
    assert json.loads(out)["confirmed"] == 3
    assert bodies(broker) == [b"one", b"two", b"three"]


def test_a_record_that_is_too_large_for_the_outbox_is_not_sent_and_neither_are_later_records(
    broker: Broker, send: Send, path: Path
) -> None:
    url = f"{broker.url}?outbox_max_bytes=500&outbox_full=raise"
    _, err = send("-u", url, "--outbox", str(path), records=b"one\n" + b"x" * 1000 + b"\nthree\n", code=1)
    assert bodies(broker) == [b"one"]
    assert "record 2 (line 2) and all after it were not sent" in err


@pytest.mark.program
def test_after_a_sigterm_unconfirmed_records_stay_in_the_outbox_and_the_next_run_sends_them_first(
    broker: Broker, send: Send, path: Path
) -> None:
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
    options = ["--outbox", str(path), "--skip", "3", "--json"]
    printed, _ = send(*options, records=b"one\ntwo\nthree\nfour\n")
    assert json.loads(printed)["confirmed"] == 1
    assert bodies(broker) == [b"one", b"two", b"three", b"four"]
    assert marks(broker) == [True, True, True, False]
    assert Outbox.look(path) == []


def test_unroutable_messages_of_an_earlier_run_in_the_outbox_are_reported(
    broker: Broker, send: Send, path: Path
) -> None:
    with Outbox(path) as outbox:
        outbox.put(b"left", "", "nowhere", "id-left")
    out, err = send("--outbox", str(path), records=b"one\n", code=1)
    assert (
        "a message of an earlier run: message id-left to ''/'nowhere': stored (312 NO_ROUTE); there is no queue" in err
    )
    assert "1 record confirmed" in out
    # The message stays in the outbox until it is delivered.
    broker.declare_queue("nowhere")
    send("--outbox", str(path))
    assert [message.body for message in broker.messages("nowhere")] == [b"left"]
    assert Outbox.look(path) == []


def test_with_an_outbox_returned_records_are_reported_even_if_confirms_are_missing(
    broker: Broker, send: Send, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qflow_client.cli.sending, "_GRACE", 0.1)
    flush = Producer.flush

    def flush_after_returns(producer: Producer) -> None:
        # Wait for all returns, however slow the broker is.
        flight = producer._protocol.parts.unconfirmed.flight
        eventually(lambda: sum(receipt._reply is not None for receipt in tuple(flight.values())) == 7)
        flush(producer, 0.1)

    monkeypatch.setattr(Producer, "flush", flush_after_returns)
    # The broker sends the returns, but no acks.
    broker.withhold_confirms()
    options = ["--outbox", str(path), "--max-producer-flow-control-wait", "30", "-q"]
    _, err = send(*options, "-k", "nowhere", records=b"x\n" * 7, code=1)
    told = err.splitlines()
    assert [line.partition(": message")[0] for line in told[:5]] == [
        f"qflow: record {n} (line {n})" for n in range(1, 6)
    ]
    assert all("stored (312 NO_ROUTE)" in line for line in told[:5])
    assert told[5:] == [
        "qflow: and 2 more records",
        "qflow: not every record was confirmed: 7 messages are not settled after 0.1 s",
    ]
    # The next run also reports these records, but not records that only have no confirm yet.
    _, err = send(*options, records=b"one\n", code=1)
    told = err.splitlines()
    assert [line.partition(": message")[0] for line in told[:5]] == ["qflow: a message of an earlier run"] * 5
    assert told[5:] == [
        "qflow: and 2 more records",
        "qflow: not every record was confirmed: 8 messages are not settled after 0.1 s",
    ]


# A file that is resumed (E13).


def test_E13_a_file_that_was_sent_is_sent_again_only_with_the_option_from_start(
    broker: Broker, send_lines: Send
) -> None:
    assert send_lines()[0].startswith("3 records confirmed in ")
    told = "nothing is left to send: 3 records sent by an earlier run; --from-start sends all\n"
    assert send_lines() == (told, "")
    assert send_lines("-q") == ("", "")
    assert bodies(broker) == [b"one", b"two", b"three"]
    out, _ = send_lines("--from-start", "--json")
    told_json = json.loads(out)
    assert (told_json["resumed_behind_record"], told_json["sent"]) == (0, 3)
    assert bodies(broker) == [b"one", b"two", b"three"] * 2
    # With --from-start all records are sent without a mark, because the user wants them twice.
    assert marks(broker) == [False] * 6


def test_E13_only_the_new_part_of_a_file_that_has_grown_is_sent(broker: Broker, lines: Path, send_lines: Send) -> None:
    send_lines()
    with lines.open("ab") as file:
        file.write(b"four\nfive\n")
    out, _ = send_lines()
    assert out.startswith(
        "continued after record 3; an earlier run had sent the records up to it\n2 records confirmed in "
    )
    with lines.open("ab") as file:
        file.write(b"six\n")
    out, _ = send_lines("--json")
    told = json.loads(out)
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
    broker: Broker, lines: Path, send_lines: Send, content: bytes, options: list[str], words: str
) -> None:
    send_lines()
    lines.write_bytes(content)
    _, err = send_lines(*options, code=1)
    assert err.endswith(f"qflow: {lines}: {words}; --from-start sends the whole file\n")
    assert bodies(broker) == [b"one", b"two", b"three"]
    send_lines("--from-start", "-f", "lines")
    assert bodies(broker)[3:] == content.splitlines()


def test_E13_skip_overrides_the_stored_position_and_the_run_stores_a_new_position(
    broker: Broker, send_lines: Send
) -> None:
    send_lines("--skip", "1")
    out, _ = send_lines()
    assert "nothing is left to send: 3 records sent by an earlier run" in out
    send_lines("--skip", "2")
    assert bodies(broker) == [b"two", b"three", b"three"]
    assert marks(broker) == [False, False, True]
    _, err = send_lines("--skip", "0", "--from-start", code=2)
    assert "--from-start and --skip cannot be combined; use one of them" in err


@pytest.mark.parametrize("is_refused", [False, True], ids=["delivered", "refused"])
def test_E13_after_a_shorter_run_with_skip_records_of_an_earlier_run_are_resent_with_a_mark(
    broker: Broker, lines: Path, send_lines: Send, is_refused: bool
) -> None:
    send_lines()
    # This run with --skip ends before the end of the first run, as if it had been killed.
    lines.write_bytes(b"one\ntwo\n")
    if is_refused:
        broker.delete_queue("orders")
    send_lines("--skip", "1", code=int(is_refused))
    lines.write_bytes(b"one\ntwo\nthree\n")
    broker.declare_queue("orders")
    broker.purge("orders")
    send_lines()
    assert bodies(broker) == [b"two", b"three"][not is_refused :]
    assert all(marks(broker))


def test_E13_skip_works_if_the_stored_position_is_unreadable(
    broker: Broker, lines: Path, path: Path, send_lines: Send
) -> None:
    with Outbox(path) as outbox:
        outbox.set_position(source_of(str(lines), "", "orders"), "of something else")
    send_lines("--skip", "1")
    assert bodies(broker) == [b"two", b"three"]
    assert not any(marks(broker))


def test_E13_a_file_that_was_sent_to_one_queue_is_sent_completely_to_another_queue(
    broker: Broker, send_lines: Send
) -> None:
    broker.declare_queue("more")
    send_lines()
    send_lines("-k", "more")
    assert len(broker.messages("more")) == 3


@pytest.mark.program
def test_E13_the_run_after_a_sigterm_resends_the_unconfirmed_records_and_continues_after_them(
    broker: Broker, lines: Path, path: Path, send_lines: Send
) -> None:
    broker.withhold_confirms()
    process, _ = start(broker, b"", options=(str(lines), "--outbox", str(path)), program=("-c", BRIEF))
    broker.wait_until(lambda b: b.queue("orders").depth == 3, timeout=60)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 143
    assert out.decode().splitlines()[-1] == "the next run continues after record 3"
    broker.release_confirms()
    broker.purge("orders")
    with lines.open("ab") as file:
        file.write(b"four\n")
    printed, _ = send_lines("--json")
    assert json.loads(printed)["sent"] == 1
    assert bodies(broker) == [b"one", b"two", b"three", b"four"]
    assert marks(broker) == [True, True, True, False]


@pytest.mark.parametrize("first", [1, 3], ids=["from the beginning", "after delivered records"])
def test_E13_the_next_run_resends_undelivered_records_with_a_mark(
    broker: Broker, lines: Path, path: Path, send_lines: Send, first: int
) -> None:
    if first == 3:
        lines.write_bytes(b"one\ntwo\n")
        send_lines()
        lines.write_bytes(b"one\ntwo\nthree\n")
    # The records become unroutable.
    before = bodies(broker)
    broker.delete_queue("orders")
    out, err = send_lines(code=1)
    records = "3 records" if first == 1 else "1 record"
    assert out.splitlines()[-2:] == [
        f"{records} in the outbox {path}: the next run with it, or qflow outbox drain, sends what is there",
        "the next run continues after record 3",
    ]
    assert f"record {first} (line {first}): message " in err
    assert "stored (312 NO_ROUTE); there is no queue 'orders': declare it" in err
    broker.declare_queue("orders")
    send_lines("--json")
    assert before + bodies(broker) == [b"one", b"two", b"three"]
    assert all(marks(broker))
    out, _ = send_lines()
    assert "nothing is left to send" in out


@pytest.mark.program
def test_E13_a_run_that_is_killed_after_its_records_were_returned_loses_no_record(
    broker: Broker, lines: Path, path: Path, send_lines: Send
) -> None:
    broker.delete_queue("orders")
    command = ["send", str(lines), "-u", broker.url, "-k", "orders", "--outbox", str(path)]
    process = Forked[bytes]([sys.executable, "-c", KILLED_BEFORE_IT_LOOKS, *command])
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert [stored.message.body for stored in Outbox.look(path)] == [b"one", b"two", b"three"]
    broker.declare_queue("orders")
    send_lines()
    assert bodies(broker) == [b"one", b"two", b"three"]
    assert all(marks(broker))
    assert Outbox.look(path) == []


def test_E13_records_that_wait_for_the_rate_limit_are_sent_once_even_if_the_disk_fails(
    broker: Broker, lines: Path, send_lines: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines.write_bytes(b"1\n2\n3\n4\n5\n")
    write = Noted.write

    def fail_at_first(self: Noted, *arguments: Any, **options: Any) -> int:
        if self.last < 5:
            raise OutboxError("disk full")
        return write(self, *arguments, **options)

    monkeypatch.setattr(Noted, "write", fail_at_first)
    # The third record and all later records wait for the rate limit.
    send_lines("--rate", "20", "--rate-burst", "2")
    assert bodies(broker) == [b"1", b"2", b"3", b"4", b"5"]


def test_E13_a_damaged_stored_position_is_reported_and_from_start_ignores_it(
    broker: Broker, path: Path, send_lines: Send
) -> None:
    send_lines()
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE position SET value = 1.5")
    _, err = send_lines(code=1)
    assert "is damaged; set it again with Outbox.set_position(); --from-start sends" in err
    send_lines("--from-start")
    assert bodies(broker) == [b"one", b"two", b"three"] * 2


def test_E13_a_batch_of_records_is_limited_in_bytes(send_lines: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = []
    send_many = Producer.send_many

    def record(producer: Producer, messages: Sequence[Any]) -> Sequence[Receipt]:
        batches.append([body for body, _ in messages])
        return send_many(producer, messages)

    monkeypatch.setattr(Producer, "send_many", record)
    monkeypatch.setattr("qflow_client.cli.sending._MAX_BATCH_BYTES", 6)
    send_lines()
    assert batches == [[b"one", b"two"], [b"three"]]


def test_E13_each_run_sends_all_records_of_standard_input(broker: Broker, send: Send, path: Path) -> None:
    for _ in range(2):
        send("--outbox", str(path), "-q", records=b"one\n")
    assert bodies(broker) == [b"one", b"one"]
