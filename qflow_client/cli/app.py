"""Registers the commands of ``qflow``, and handles their errors."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from qflow_client import QflowError, SettingsError, __version__
from qflow_client.cli.admin import admin
from qflow_client.cli.broker import broker, hash_password
from qflow_client.cli.demo import demo
from qflow_client.cli.errors import CommandError, ExitCode
from qflow_client.cli.outbox import outbox
from qflow_client.cli.passwords import hide_arguments
from qflow_client.cli.relay import relay
from qflow_client.cli.report import convert, report
from qflow_client.cli.send import send
from qflow_client.redaction import printable

__all__ = ["app", "run"]

# The exception that typer raises for an invalid command line. Typer has no public name for this class.
_UsageError: Any = typer.BadParameter.__base__

_NO_COLOR = "--no-color"

app = typer.Typer(
    name="qflow",
    no_args_is_help=True,
    # `run` prints expected errors without a traceback. Python prints the traceback of any other error.
    pretty_exceptions_enable=False,
    # With any other mode, typer prints the help in tables that cut off names and examples at 80 columns.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"qflow {__version__}")
        raise typer.Exit


@app.callback()
def _qflow(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Log everything to standard error, and show tracebacks of errors.")
    ] = False,
    no_color: Annotated[
        bool,
        typer.Option(_NO_COLOR, help="Print without colours; the environment variable NO_COLOR=1 does the same."),
    ] = False,
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Publish messages to AMQP 0-9-1 brokers, and obey their flow control.

    `qflow COMMAND --help` describes the options of a command.
    """
    context.obj["debug"] = debug
    if no_color:
        # Every `Console` of rich reads this variable.
        os.environ["NO_COLOR"] = "1"
    if debug:
        logging.basicConfig(
            level=logging.DEBUG, format="%(name)s: %(message)s", handlers=[RichHandler(console=Console(stderr=True))]
        )
    else:
        # Do not print log messages, because the commands report the errors themselves.
        for name in ("qflow_client", "pika"):
            logging.getLogger(name).addHandler(logging.NullHandler())


app.command()(send)
app.command()(broker)
app.command("hash-password")(hash_password)
app.command()(demo)
app.command()(report)
app.command()(convert)
app.add_typer(outbox, name="outbox")
app.add_typer(relay, name="relay")
app.add_typer(admin)


def run(arguments: Sequence[str]) -> int:
    """Run the command with these `arguments` (without the program's name), and return the exit code."""
    with ExitStack() as stack:
        # A stream that was closed at the start is None. With ``file=None``, `print` would write to standard output.
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream is None:
                stack.enter_context(redirect(stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))))
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Escape characters that the encoding of standard output lacks, as Python does for standard error.
            sys.stdout.reconfigure(errors="backslashreplace")
        return _flush(_run(arguments))


def _flush(code: int) -> int:
    """Write the rest of standard output. If this fails and `code` is 0, return a failure, otherwise `code`."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # Discard the output. Otherwise Python would try to write it again at exit, and change the exit code to 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"qflow: standard output: {error.strerror}", file=sys.stderr)
        return code or ExitCode.FAILED
    return code


def _run(arguments: Sequence[str]) -> int:
    shared = {"debug": False}
    line = list(arguments)
    if _NO_COLOR in line[: line.index("--") if "--" in line else None]:
        # Typer accepts this option only before the command's name, so move the option to the front.
        line.remove(_NO_COLOR)
        line.insert(0, _NO_COLOR)
    try:
        code = app(args=line, prog_name="qflow", obj=shared, standalone_mode=False)
    except _UsageError as error:
        error.message = hide_arguments(error.message, arguments)
        error.show()
        return ExitCode.USAGE
    except typer.Abort:
        print("Aborted!", file=sys.stderr)
        return ExitCode.FAILED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else ExitCode.FAILED if end.code else ExitCode.OK
    except (CommandError, QflowError, OSError) as error:
        if shared["debug"]:
            raise
        text = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
        shown = printable(hide_arguments(text, arguments), keep="\n")
        print(f"qflow: {shown}", file=sys.stderr)
        if isinstance(error, SettingsError):
            return ExitCode.USAGE
        return error.exit_code if isinstance(error, CommandError) else ExitCode.FAILED
    # If a command raises `typer.Exit`, `app` returns the exit code of this exception.
    return code if isinstance(code, int) else ExitCode.OK
