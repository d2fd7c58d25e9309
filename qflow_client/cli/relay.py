"""``qflow relay``: publishes the messages that an application has committed to the outbox in its database."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from qflow_client import SettingsError
from qflow_client.cli import text
from qflow_client.cli.errors import CommandError
from qflow_client.cli.output import AsJson, print_json, table_console
from qflow_client.cli.passwords import warn_of_option, warn_of_url
from qflow_client.cli.probe import readiness_probe
from qflow_client.cli.stopping import Stopping
from qflow_client.redaction import hide_password, printable

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from qflow_client.sqlalchemy import Outbox, OutboxRelay

__all__ = ["relay"]

# Seconds between two checks of the state of the running relay.
_CHECK_PERIOD = 0.5


class _RunUnlessNamed(TyperGroup):
    """Treats ``qflow relay URL`` as ``qflow relay run URL``."""

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        if arguments and arguments[0] not in (*self.commands, "-h", "--help"):
            arguments = ["run", *arguments]
        return super().parse_args(context, arguments)


relay = typer.Typer(
    cls=_RunUnlessNamed,
    no_args_is_help=True,
    help="Publish the messages of an outbox in a database.\n\nAn application commits messages to the outbox, together "
    "with its own changes. `qflow relay AMQP_URL` is short for `qflow relay run AMQP_URL`.",
)

_Database = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="URL of the database with the outbox: postgresql://user@host/name or sqlite:///path "
        "(default: QFLOW_DATABASE).",
    ),
]
_Name = Annotated[
    str,
    typer.Option(
        "--table", metavar="NAME", show_default=False, help="Name of the outbox's table (default: qflow_outbox)."
    ),
]
_Schema = Annotated[
    str | None, typer.Option(metavar="NAME", help="Schema of the table (default: the default schema of the database).")
]


@relay.command()
def run(
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="AMQP_URL",
            help=text.URL_HELP,
        ),
    ] = None,
    database: _Database = None,
    table: _Name = "qflow_outbox",
    schema: _Schema = None,
    lease: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            show_default=False,
            help="If a relay is inactive for this number of seconds, another relay takes over its partitions "
            "(default: 30).",
        ),
    ] = 30.0,
    poll: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            show_default=False,
            help="Maximum seconds between two polls for new rows if the database sends no notification (default: 1).",
        ),
    ] = 1.0,
    capacity: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER", help="Maximum number of messages without an answer from the broker (default: 1000)."
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", help="Maximum number of messages per second, on average (default: no limit)."),
    ] = None,
    ready_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT", help="Port to listen on for HTTP readiness probes (default: no probes; 0: any free port)."
        ),
    ] = None,
    ready_host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            show_default=False,
            help="Address to listen on for readiness probes (default: 127.0.0.1).",
        ),
    ] = "127.0.0.1",
    as_json: AsJson = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only errors and, with --json, the result.")
    ] = False,
) -> None:
    """Publish committed messages until Ctrl-C or SIGTERM.

    Several relays may run at the same time. The command has no options for the other settings of the producer. They
    come from the environment (QFLOW_RETRY_FOR, …) or from the query of AMQP_URL.

    Exit codes: 0 after Ctrl-C or SIGTERM, when the outcome of every message is known; 1 if the relay cannot start; 2 if
    the command line or a setting is wrong.
    """
    if not quiet:
        warn_of_url(url)
    options = {"capacity": capacity, "rate": rate}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    outbox, relays = _outbox(table, schema)
    made: OutboxRelay = relays(_checked(database), url, outbox=outbox, lease=lease, poll=poll, **given)
    ended = threading.Event()
    with Stopping() as stopping, ExitStack() as stack:
        stopping.on_stop(ended.set)
        if ready_port is not None:
            url = stack.enter_context(readiness_probe(made, ready_host, ready_port))
            if not quiet:
                print(f"qflow: readiness probes at {url}", file=sys.stderr, flush=True)
        with made:
            seen: str | None = ""
            while not ended.wait(_CHECK_PERIOD):
                # Print a line when the relay has a new error, works for the first time, or works again after an error.
                error = made.error
                now = None if error is None else str(error).partition("\n")[0]
                if now != seen and (now is not None or made.is_ready):
                    seen = now
                    words = "working" if now is None else f"not working: {printable(hide_password(now))}"
                    if now is not None or not quiet:
                        print(f"qflow: relay {words}", file=sys.stderr, flush=True)
    counts = made.counts
    if as_json:
        print_json({"confirmed": counts.confirmed, "marked": counts.marked, "set_aside": counts.set_aside})
    elif not quiet:
        print(
            f"{text.count(counts.confirmed, 'message')} confirmed, {counts.marked:,} marked as possible copies, "
            f"{counts.set_aside:,} set aside"
        )


@relay.command()
def status(
    database: _Database = None,
    table: _Name = "qflow_outbox",
    schema: _Schema = None,
    seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            max=86400,
            show_default=False,
            help="Seconds for which to measure the rate (default: 1; 0: no measurement).",
        ),
    ] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Count the waiting rows and the relays, and measure the rate.

    The command also shows the age of the oldest waiting row and the holds of the relays. It shows how many messages
    were set aside because the broker refused them.
    """
    outbox, _ = _outbox(table, schema)
    database = _checked(database)
    with _connection(database) as connection:
        now = outbox.status(connection)
    rate = None
    if seconds:
        before = now.relayed
        threading.Event().wait(seconds)
        # Use a second transaction, because SQLite would show the old state again in the first transaction.
        with _connection(database) as connection:
            now = outbox.status(connection)
        rate = (now.relayed - before) / seconds
    if as_json:
        print_json(asdict(now) | {"rate": rate})
        return
    oldest = f", the oldest for {text.seconds(now.oldest_age)}" if now.depth else ""
    print(f"{text.count(now.depth, 'row')} waiting{oldest}")
    print(f"{now.relayed:,} confirmed so far" + ("" if rate is None else f", {text.rate(rate, 1)} now"))
    if now.relays is not None:
        print(f"{text.count(now.relays, 'relay')} working")
    for held in now.holds:
        print(f"a relay is blocked (flowed): {printable(held)}")
    if now.failed:
        print(f"{text.count(now.failed, 'message')} set aside: see qflow relay failed")


@relay.command()
def failed(
    database: _Database = None,
    table: _Name = "qflow_outbox",
    schema: _Schema = None,
    limit: Annotated[
        int,
        typer.Option(
            "--limit",
            "-n",
            metavar="NUMBER",
            min=1,
            max=text.MAX_ID,
            show_default=False,
            help="Maximum number of messages to show (default: 20).",
        ),
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the messages that were set aside, and the broker's replies."""
    outbox, _ = _outbox(table, schema)
    database = _checked(database)
    with _connection(database) as connection:
        rows = outbox.failed(connection, limit=limit)
        more = outbox.status(connection).failed - limit if len(rows) == limit else 0
    shown = Table("id", "exchange", "routing key", "ordering key", "reply", box=None)
    for row in rows:
        message = row.message
        to = ("", "") if message is None else (message.exchange, message.routing_key)
        if as_json:
            told = {"id": row.id, "exchange": to[0], "routing_key": to[1], "ordering_key": row.ordering_key}
            print_json(told | {"reply": row.reply, "failed_at": row.failed_at.isoformat()})
        else:
            shown.add_row(str(row.id), *(Text(printable(each)) for each in (*to, row.ordering_key or "", row.reply)))
    if rows and not as_json:
        table_console().print(shown)
        if more > 0:
            print(f"and {text.count(more, 'more message')}")


@relay.command()
def retry(
    ids: Annotated[
        list[int] | None,
        typer.Argument(
            metavar="ID",
            min=1,
            max=text.MAX_ID,
            help="Ids of the messages to put back, as `qflow relay failed` shows them (default: all).",
        ),
    ] = None,
    database: _Database = None,
    table: _Name = "qflow_outbox",
    schema: _Schema = None,
    as_json: AsJson = False,
) -> None:
    """Move failed messages back to the outbox, at its end."""
    outbox, _ = _outbox(table, schema)
    database = _checked(database)
    with _connection(database) as connection:
        count = outbox.retry(connection, ids or None)
    if as_json:
        print_json({"put_back": count})
    else:
        print(f"{text.count(count, 'message')} put back")


def _outbox(table: str, schema: str | None) -> tuple[Outbox, type[OutboxRelay]]:
    try:
        from qflow_client.sqlalchemy import Outbox, OutboxRelay
    except ImportError as error:
        raise CommandError(f"the module {error.name} is missing: pip install 'qflow-client[sqlalchemy]'") from error
    return Outbox(name=table, schema=schema), OutboxRelay


def _checked(database: str | None) -> str:
    if database is None:
        database = os.environ.get("QFLOW_DATABASE")
        if not database:
            raise SettingsError("no database is given: use --database, or set QFLOW_DATABASE")
    elif hide_password(database) != database:
        warn_of_option("--database", "QFLOW_DATABASE")
    return database


@contextmanager
def _connection(database: str) -> Iterator[Connection]:
    from sqlalchemy.exc import DBAPIError

    from qflow_client.sqlalchemy import engine_of

    engine = engine_of(database)
    try:
        with engine.begin() as connection:
            yield connection
    except DBAPIError as error:
        words = str(error.orig).partition("\n")[0]
        raise CommandError(f"database {hide_password(database)}: {hide_password(words)}") from error
    finally:
        engine.dispose()
