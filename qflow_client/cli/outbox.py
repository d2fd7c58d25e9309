"""``qflow outbox``: lists, exports, sends or removes the messages that a producer left in its outbox."""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Iterator, Sized
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from qflow_client import (
    ConfirmTimeout,
    Outbox,
    Outcome,
    Producer,
    ProducerClosed,
    ProducerFlowed,
    ProducerSettings,
    Receipt,
    SettingsError,
    StoredMessage,
    UndeliveredMessages,
    WhenFlowed,
)
from qflow_client.cli import text
from qflow_client.cli.errors import CommandError, ExitCode
from qflow_client.cli.output import AsJson, print_json, table_console
from qflow_client.cli.passwords import standard_input, warn_of_url
from qflow_client.cli.stopping import Stopped, Stopping
from qflow_client.redaction import printable

__all__ = ["outbox"]

# Seconds to wait for the remaining answers of the broker when `drain` sends no more messages.
_GRACE = 2.0
# Maximum number of unconfirmed messages whose errors `drain` prints.
_MAX_REPORTED = 5

outbox = typer.Typer(no_args_is_help=True, help="List, export, send or remove messages in an outbox file.")

_File = Annotated[Path, typer.Argument(metavar="OUTBOX", help="File of the outbox.")]


def _stored(path: Path) -> Iterator[StoredMessage]:
    after = 0
    while batch := Outbox.look(path, after):
        yield from batch
        after = batch[-1].sequence


@outbox.command("ls")
def list_(
    path: _File,
    limit: Annotated[
        int,
        typer.Option(
            "--limit",
            "-n",
            metavar="NUMBER",
            min=0,
            show_default=False,
            help="Maximum number of messages to list (default: 20; 0: all).",
        ),
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """List the messages in an outbox, oldest first.

    A producer may use the outbox at the same time.
    """
    table = Table("sequence", "age", "exchange", "routing key", "bytes", "message id", "second copy?", box=None)
    rows: list[dict[str, Any]] = []
    count = size = marked = 0
    now = time.time()
    for stored in _stored(path):
        count += 1
        size += stored.size
        marked += stored.may_be_second_copy
        if limit and count > limit:
            continue
        if as_json:
            named = {"message_id": stored.message.message_id, "body_bytes": len(stored.message.body)}
            rows.append(_envelope(stored) | named)
            continue
        table.add_row(
            str(stored.sequence),
            text.seconds(max(0.0, now - stored.at)),
            # Use `Text`, because rich would interpret square brackets in a string as markup.
            Text(printable(stored.exchange)),
            Text(printable(stored.routing_key)),
            str(len(stored.message.body)),
            Text(printable(stored.message.message_id or "")),
            "maybe" if stored.may_be_second_copy else "no",
        )
    damaged = Outbox.look_damaged(path)
    if as_json:
        print_json(
            {
                "messages": rows,
                "total": count,
                "bytes": size,
                "may_be_second_copies": marked,
                "damaged": [{"sequence": sequence, "reason": why} for sequence, why in damaged.items()],
            }
        )
        return
    if count:
        table_console().print(table)
    if limit and count > limit:
        print(f"and {text.count(count - limit, 'more message')}")
    for sequence, why in damaged.items():
        print(f"message {sequence} is damaged, and will not be sent: {why}")
    marks = f"; {marked:,} of them may have been sent before" if marked else ""
    besides = f"; also {_damaged(damaged)}" if damaged else ""
    print(f"{text.count(count, 'message')}, {text.count(size, 'byte')}{marks}{besides}")


def _damaged(damaged: Sized) -> str:
    return text.count(len(damaged), "damaged message")


@outbox.command()
def export(
    path: _File,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="File to write to (default: standard output).")
    ] = None,
    _as_json: AsJson = False,
) -> None:
    """Export the messages in an outbox as JSON, one per line.

    A producer may use the outbox at the same time. Damaged messages are left out.
    """
    damaged = Outbox.look_damaged(path)
    if output is not None and any(output.exists() and each.exists() and output.samefile(each) for each in _files(path)):
        raise CommandError(f"--output {output}: this is the outbox itself; name another file", ExitCode.USAGE)
    if damaged:
        print(f"qflow: {_damaged(damaged)} left out; qflow outbox ls shows the reasons", file=sys.stderr)
    with ExitStack() as stack:
        file = None if output is None else stack.enter_context(output.open("w", encoding="utf-8"))
        for stored in _stored(path):
            print_json(_whole(stored), file=file)


def _files(path: Path) -> Iterator[Path]:
    """Yield the paths of the outbox and of SQLite's files beside it, which may contain the newest messages."""
    real = path.resolve()
    return (real.with_name(f"{real.name}{ending}") for ending in ("", "-wal", "-shm", "-lock"))


def _envelope(stored: StoredMessage) -> dict[str, Any]:
    return {
        "sequence": stored.sequence,
        "at": datetime.fromtimestamp(stored.at, UTC).isoformat(),
        "exchange": stored.exchange,
        "routing_key": stored.routing_key,
        "may_be_second_copy": stored.may_be_second_copy,
    }


def _whole(stored: StoredMessage) -> dict[str, Any]:
    properties = dict(vars(stored.message))
    body: bytes = properties.pop("body")
    return _envelope(stored) | {
        "properties": {name: _plain(value) for name, value in properties.items() if value is not None},
        "body": _plain(body),
    }


def _plain(value: Any) -> Any:
    """Convert a value to JSON types. Bytes in UTF-8 become text, and all other bytes become ``{"base64": …}``."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode("ascii")}
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return value if isinstance(value, (str, int, float)) or value is None else str(value)


@outbox.command()
def drain(
    path: _File,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            "-u",
            metavar="URL",
            help=text.URL_HELP,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", help="Maximum number of messages per second, on average (default: no limit)."),
    ] = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no summary, except with --json.")] = False,
) -> None:
    """Send the messages in an outbox, and remove the confirmed ones.

    The messages are sent in order, with their stored message ids. If a message may have been sent before, it has the
    header x-qflow-republished. Damaged messages, and messages that the broker does not confirm, stay in the outbox. The
    command fails if a producer uses the outbox at the same time.

    Exit codes: 0 if the outbox is empty; 1 if messages are left or damaged; 2 if the command line or a setting is
    wrong; 3 if the producer was blocked (flowed) for longer than the setting max_producer_flow_control_wait; 130 or 143
    after Ctrl-C or SIGTERM.
    """
    # Ignore the user's values of these settings: the command waits for the broker, and opens the outbox itself.
    given: dict[str, Any] = {"when_flowed": WhenFlowed.BLOCK, "outbox": None}
    if rate is not None:
        given["rate"] = rate
    if not quiet:
        warn_of_url(url)
    if not ProducerSettings.load(url, **given).confirms:
        raise SettingsError("confirms=False: qflow outbox drain removes only confirmed messages; set confirms=True")
    # Fail if the file does not exist, because `Outbox(path)` would create the file.
    Outbox.look(path, limit=1)
    with ExitStack() as stack:
        store = stack.enter_context(Outbox(path))
        stopping = stack.enter_context(Stopping())
        draining = _Draining(store)
        try:
            if len(store):
                with stopping.breakable():
                    producer = Producer(url, **given)
                stack.callback(_leave, producer)
                stopping.on_stop(lambda: _leave(producer))
                draining.send_all(producer)
        except Stopped:
            # The signal came before the first message was sent. `_failure_of` reports the signal.
            pass
        for line in draining.failures[:_MAX_REPORTED]:
            print(f"qflow: {printable(line)}", file=sys.stderr)
        failure = _failure_of(draining, store, stopping)
        if as_json:
            print_json(
                {
                    "complete": failure is None,
                    "error": None if failure is None else str(failure),
                    "confirmed": draining.confirmed,
                    "left": len(store),
                    "damaged": len(store.damaged),
                }
            )
        elif not quiet:
            print(f"{text.count(draining.confirmed, 'message')} confirmed, {_left(store)}")
        if failure is not None:
            raise failure from draining.error


def _left(store: Outbox) -> str:
    return f"{text.count(len(store), 'message')} left"


def _failure_of(draining: _Draining, store: Outbox, stopping: Stopping) -> CommandError | None:
    """Return the error with which the command ends, or ``None`` if the command has emptied the outbox."""
    left = _left(store)
    if stopping.signal is not None:
        return CommandError(f"interrupted by {stopping.signal.name}; {left}", stopping.exit_code)
    if draining.error is not None:
        code = ExitCode.FLOWED if isinstance(draining.error, ProducerFlowed) else ExitCode.FAILED
        return CommandError(f"{left}: {draining.error}", code)
    if len(store):
        return CommandError(f"{left}: not confirmed by the broker")
    if store.damaged:
        return CommandError(f"{_damaged(store.damaged)} left; see qflow outbox ls and qflow outbox drop")
    return None


@outbox.command()
def drop(
    path: _File,
    sequences: Annotated[
        list[int],
        typer.Argument(
            metavar="SEQUENCE",
            min=1,
            max=text.MAX_ID,
            help="Sequence numbers of the messages, as `qflow outbox ls` shows them.",
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove the messages without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove messages from an outbox permanently.

    The command can also remove damaged messages. It fails if a producer uses the outbox at the same time.

    Exit codes: 0 if the messages are removed; 1 if nothing is removed, because a message does not exist or you answered
    no.
    """
    # Fail if the file does not exist, because `Outbox(path)` would create the file.
    damaged = Outbox.look_damaged(path)
    with Outbox(path) as store:
        wanted = sorted(set(sequences))
        # With --json, standard output must have only JSON.
        shown = sys.stderr if as_json else sys.stdout
        for sequence in wanted:
            if sequence in damaged:
                print(f"message {sequence}, damaged: {damaged[sequence]}", file=shown)
                continue
            stored = Outbox.find(path, sequence)
            size = text.count(len(stored.message.body), "byte")
            print(f"message {sequence} to {stored.exchange!r}/{stored.routing_key!r}, {size}", file=shown)
        if not yes:
            standard_input()
            if not typer.confirm(f"Remove {text.count(len(wanted), 'message')} permanently?", err=as_json):
                raise CommandError("nothing was removed")
        for sequence in wanted:
            store.drop(sequence)
    if as_json:
        print_json({"removed": wanted})
    else:
        print(f"{text.count(len(wanted), 'message')} removed")


def _leave(producer: Producer) -> None:
    try:
        producer.close(timeout=_GRACE)
    except UndeliveredMessages:
        # The undelivered messages stay in the outbox, and `_account` reports them.
        pass


class _Draining:
    def __init__(self, store: Outbox) -> None:
        self._store = store
        self.confirmed = 0
        # One text for each message that was not confirmed.
        self.failures: list[str] = []
        # The error that ended `send_all` early; None if there was no such error.
        self.error: ProducerFlowed | ProducerClosed | ConfirmTimeout | None = None

    def send_all(self, producer: Producer) -> None:
        """Send all messages in batches. If this process is killed, only messages of one batch may be sent twice."""
        store = self._store
        after = 0
        while self.error is None and (batch := store.read(after)):
            after = batch[-1].sequence
            store.permit(after)
            store.commit()
            sent: list[tuple[StoredMessage, Receipt]] = []
            try:
                for stored in batch:
                    receipt = producer.send(stored.to_send(), exchange=stored.exchange, routing_key=stored.routing_key)
                    sent.append((stored, receipt))
                producer.flush()
            except UndeliveredMessages:
                # `_account` reports each failure.
                pass
            except (ProducerFlowed, ProducerClosed, ConfirmTimeout) as error:
                self.error = error
                # Close before `_account` reads the outcomes: `close` waits a short time for the remaining answers.
                _leave(producer)
            self._account(sent)

    def _account(self, sent: list[tuple[StoredMessage, Receipt]]) -> None:
        for stored, receipt in sent:
            if receipt.outcome is Outcome.CONFIRMED:
                self.confirmed += 1
                self._store.settle(stored.sequence)
            else:
                self.failures.append(f"message {stored.sequence} stays in the outbox: {receipt.error()}")
        self._store.commit()
