"""``qflow broker``: the broker of this repository in the foreground."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from qflow_client.broker import AmqpError, Broker, Enforcement, FlowScope, QueueSnapshot
from qflow_client.cli.errors import CommandError, ExitCode
from qflow_client.cli.stopping import Stopped, Stopping

__all__ = ["broker", "queue_table"]

# Seconds between two pictures.
_PERIOD = 0.25


def queue_table(queues: tuple[QueueSnapshot, ...], producers: int, flowed: int) -> Table:
    """The queues and what holds them.

    Args:
        queues: all there are.
        producers: how many channels publish.
        flowed: how many of those were told to stop.
    """
    table = Table(
        caption=f"producers: {producers}, flowed: {flowed}; Ctrl-C ends the broker",
        caption_justify="left",
        header_style="dim",
        box=None,
        pad_edge=False,
    )
    table.add_column("queue", min_width=12)
    for name in ("depth", "ready", "unacked", "bytes", "peak", "consumers"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("flow state", no_wrap=True)
    table.add_column("times ON", justify="right", no_wrap=True)
    for queue in queues:
        table.add_row(
            Text(queue.name),
            *(
                f"{number:,}"
                for number in (
                    queue.depth,
                    queue.ready,
                    queue.unacked,
                    queue.bytes,
                    queue.peak_depth,
                    queue.consumers,
                )
            ),
            Text("ON", style="bold red") if queue.flow_stopped else Text("OFF", style="green"),
            f"{queue.flow_stopped_count:,}",
        )
    if not queues:
        table.add_row(Text("no queue yet", style="dim"))
    return table


def _users(pairs: list[str]) -> dict[str, str]:
    users = {}
    for pair in pairs:
        name, colon, password = pair.partition(":")
        if not colon or not name:
            # The text goes to the terminal, so it does not repeat what may be a password.
            raise typer.BadParameter("a user is given as NAME:PASSWORD")
        users[name] = password
    return users


def _thresholds(**marks: int | None) -> dict[str, int]:
    """Queue arguments by the names that they have in `Queue.Declare`."""
    return {f"qpid.{name}": value for name, value in marks.items() if value is not None}


def broker(
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on; 0 for a free one.")] = 5672,
    user: Annotated[
        list[str] | None,
        typer.Option("--user", metavar="NAME:PASSWORD", help="Who may log in; may be repeated; guest:guest if none."),
    ] = None,
    virtual_host: Annotated[str | None, typer.Option(help="The name of the virtual host.")] = None,
    enforcement: Annotated[
        Enforcement | None,
        typer.Option(
            help="How a queue that is ON holds its producers: [b]channel_flow[/b] sends Channel.Flow, "
            "[b]completion[/b] holds confirms back; [b]both[/b] unless given."
        ),
    ] = None,
    flow_scope: Annotated[
        FlowScope | None,
        typer.Option(help="Whom it holds: the [b]offender[/b] (unless given), or all recent [b]publishers[/b]."),
    ] = None,
    default_flow_stop_threshold: Annotated[
        int | None, typer.Option(metavar="PERCENT", help="Of a queue's maximum, where it turns ON by default; 80.")
    ] = None,
    default_flow_resume_threshold: Annotated[
        int | None, typer.Option(metavar="PERCENT", help="Of a queue's maximum, below which it turns OFF; 70.")
    ] = None,
    capacity: Annotated[
        int | None, typer.Option(metavar="BYTES", help="Above it a queue is ON, unless it says otherwise; 0, never.")
    ] = None,
    flow_resume_capacity: Annotated[
        int | None, typer.Option(metavar="BYTES", help="Down to it a queue stays ON; the capacity unless given.")
    ] = None,
    heartbeat: Annotated[int | None, typer.Option(metavar="SECONDS", help="Proposed to clients; 60. 0, none.")] = None,
    queue: Annotated[
        list[str] | None,
        typer.Option("--queue", metavar="NAME", help="A durable queue to begin with; may be repeated."),
    ] = None,
    flow_stop_count: Annotated[
        int | None, typer.Option(metavar="MESSAGES", help="For --queue: above it the queue is ON.")
    ] = None,
    flow_resume_count: Annotated[
        int | None, typer.Option(metavar="MESSAGES", help="For --queue: below it the queue is OFF; 7/8 unless given.")
    ] = None,
    flow_stop_size: Annotated[
        int | None, typer.Option(metavar="BYTES", help="For --queue: above it the queue is ON.")
    ] = None,
    flow_resume_size: Annotated[
        int | None, typer.Option(metavar="BYTES", help="For --queue: below it the queue is OFF; 7/8 unless given.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing but the URL.")] = False,
) -> None:
    """Run a broker for trials and tests, until Ctrl-C or SIGTERM.

    It speaks AMQP 0-9-1, keeps everything in memory, and holds producers by the thresholds of its queues. Its URL is
    printed once it takes connections. Whoever stops it gets exit code 0.
    """
    given: dict[str, Any] = {
        "host": host,
        "port": port,
        "users": _users(user) if user else None,
        "virtual_host": virtual_host,
        "enforcement": enforcement,
        "flow_scope": flow_scope,
        "default_flow_stop_threshold": default_flow_stop_threshold,
        "default_flow_resume_threshold": default_flow_resume_threshold,
        "capacity": capacity,
        "flow_resume_capacity": flow_resume_capacity,
        "heartbeat": heartbeat,
    }
    arguments = _thresholds(
        flow_stop_count=flow_stop_count,
        flow_resume_count=flow_resume_count,
        flow_stop_size=flow_stop_size,
        flow_resume_size=flow_resume_size,
    )
    if arguments and not queue:
        raise CommandError(f"{', '.join(arguments)}: for which queue? give --queue NAME", ExitCode.USAGE)
    try:
        embedded = Broker(**{name: value for name, value in given.items() if value is not None})
    except (TypeError, ValueError) as error:
        raise CommandError(str(error), ExitCode.USAGE) from error
    console = Console(stderr=True, quiet=quiet)
    with ExitStack() as stack:
        stopping = stack.enter_context(Stopping())
        try:
            running = stack.enter_context(embedded)
        except OSError as error:
            raise CommandError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        for name in queue or ():
            try:
                running.declare_queue(name, durable=True, arguments=arguments)
            except AmqpError as error:
                raise CommandError(str(error), ExitCode.USAGE) from error
        print(running.url, flush=True)
        try:
            with stopping.breakable():
                _watch(running, console)
        except Stopped:
            assert stopping.signal is not None
            console.print(f"{stopping.signal.name}: the broker ends")


def _watch(running: Broker, console: Console) -> None:
    if not console.is_terminal:
        while True:
            time.sleep(3600)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            producers = running.producers()
            flowed = sum(producer.flowed for producer in producers)
            live.update(queue_table(running.queues(), len(producers), flowed), refresh=True)
            time.sleep(_PERIOD)
