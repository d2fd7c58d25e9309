"""``qflow broker``: runs the broker of this repository in the foreground."""

from __future__ import annotations

import gc
import logging
import os
import ssl
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from getpass import getpass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from qflow_client import FlowLog
from qflow_client.broker import (
    AmqpError,
    Broker,
    BrokerSettings,
    Enforcement,
    FlowScope,
    Policy,
    Profile,
    QueueSnapshot,
    StoreError,
    Synchronous,
)
from qflow_client.broker import hash_password as hash_of
from qflow_client.cli.config import Config, read_config
from qflow_client.cli.errors import CommandError, ExitCode
from qflow_client.cli.output import AsJson, print_json
from qflow_client.cli.passwords import USERS, broker_users, warn_of_option
from qflow_client.cli.resident import ALARM, ResidentWatch, resident_size
from qflow_client.cli.stopping import Stopped, Stopping
from qflow_client.cli.warned import warnings_shown
from qflow_client.redaction import printable

resource: Any
try:
    import resource
except ImportError:
    # It exists only on POSIX systems.
    resource = None

__all__ = ["broker", "hash_password", "queue_table", "seldom_collected"]

# File descriptors in addition to AMQP connections: for the HTTP API, and for everything else.
_HTTP_CONNECTIONS = 1000
_OTHER_FILES = 100

# Seconds between two updates of the display.
_PERIOD = 0.25
# Seconds between two checks of the resident memory.
_LOOK = 1.0

_log = logging.getLogger("qflow_client.broker.resident")


def queue_table(queues: tuple[QueueSnapshot, ...], producers: int, flowed: int) -> Table:
    """Return a table of the queues and their flow states.

    Args:
        queues: all queues.
        producers: number of publishing channels.
        flowed: number of flowed (blocked) ones among them.
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
            Text(printable(queue.name)),
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


def _ssl_context(certificate: Path | None, key: Path | None, client_ca: Path | None) -> ssl.SSLContext | None:
    if certificate is None:
        for name, file in (("tls_key", key), ("tls_client_ca", client_ca)):
            if file is not None:
                raise CommandError(f"{name}: for which certificate? give tls_certificate too", ExitCode.USAGE)
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        # Python does not tell which of the two files is wrong.
        files = f"{certificate} and {key}" if key is not None else str(certificate)
        raise CommandError(f"{files}: no certificate with its key: {error}", ExitCode.USAGE) from error
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except OSError as error:
            raise CommandError(f"{client_ca}: no certificate of an authority: {error}", ExitCode.USAGE) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def hash_password(as_json: AsJson = False) -> None:
    """Print the hash of a password, for --users-file and [users] in --config.

    The password is read from a prompt, or from the first line of standard input. It is never an argument, because other
    users could read it.
    """
    if sys.stdin.isatty():
        password = getpass("password: ")
        if getpass("once more: ") != password:
            raise CommandError("the two passwords differ")
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    if not password:
        raise CommandError("a password must not be blank", ExitCode.USAGE)
    hashed = hash_of(password)
    if as_json:
        print_json({"hash": hashed})
    else:
        print(hashed)


def _raise_descriptor_limit(settings: BrokerSettings, console: Console) -> None:
    """Raise the limit of open files to what the settings need, and print a notice if this fails."""
    if resource is None:
        return
    needed = settings.max_connections + (0 if settings.http_port is None else _HTTP_CONNECTIONS) + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        soft = min(needed, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft < needed:
        fit = max(1, settings.max_connections - (needed - soft))
        console.print(
            f"qflow: this process may open {soft} files, too few for max_connections={settings.max_connections}; "
            f"raise the limit (ulimit -Hn {needed}), or set max_connections to {fit}",
            markup=False,
            soft_wrap=True,
        )


def broker(
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="Where options come from that are not given here.", dir_okay=False),
    ] = None,
    host: Annotated[str | None, typer.Option(help="The address to listen on; 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="The port to listen on; 5672. 0 for a free one.")] = None,
    user: Annotated[
        list[str] | None,
        typer.Option(
            "--user",
            metavar="NAME:PASSWORD",
            help="A user; may be repeated; guest:guest if none. Visible to other users of this machine.",
        ),
    ] = None,
    users_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Users, one NAME:PASSWORD per line, or NAME:HASH (qflow hash-password); '-' for standard input. "
            f"Or set {USERS} to such lines.",
        ),
    ] = None,
    loopback_users: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help="Users that may log in from this machine only; guest. '' for none."),
    ] = None,
    max_failed_logins: Annotated[
        int | None,
        typer.Option(help="Of an address at once; then its logins are checked once a second; 10. 0, any number."),
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A certificate, in PEM; with it everything has TLS.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its key, unless it stands in the same file.")
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Clients must show a certificate that this authority, in PEM, has signed."),
    ] = None,
    virtual_host: Annotated[str | None, typer.Option(help="The name of the virtual host.")] = None,
    profile: Annotated[
        Profile | None,
        typer.Option(help="Whose dialect it speaks: that of another broker, for trials of clients; qflow, its own."),
    ] = None,
    enforcement: Annotated[
        Enforcement | None,
        typer.Option(
            help="How a queue that is ON holds its producers: channel_flow sends Channel.Flow, "
            "completion holds confirms back; both unless given."
        ),
    ] = None,
    flow_scope: Annotated[
        FlowScope | None,
        typer.Option(help="Whom it holds: the offender (unless given), or all recent publishers."),
    ] = None,
    recent: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="How long a publisher counts as recent; 10.")
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
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="'NAME KEY=VALUE…'",
            help="A policy for queues: 'small pattern=^orders policy=reject max_count=100'; may be repeated.",
        ),
    ] = None,
    max_producer_flow_control_wait: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="For how long a publish waits where the policy is wait; 60."),
    ] = None,
    heartbeat: Annotated[int | None, typer.Option(metavar="SECONDS", help="Proposed to clients; 60. 0, none.")] = None,
    frame_max: Annotated[
        int | None, typer.Option(metavar="BYTES", help="Of the largest frame, proposed to clients; 131072.")
    ] = None,
    channel_max: Annotated[int | None, typer.Option(help="Channels of a connection; 2047.")] = None,
    max_connections: Annotated[int | None, typer.Option(help="Open connections at once; 10000.")] = None,
    max_unauthenticated: Annotated[
        int | None, typer.Option(help="Connections at once that are not open yet; 1000. With more the oldest is cut.")
    ] = None,
    max_queues: Annotated[int | None, typer.Option(help="Queues; 50000.")] = None,
    max_bindings: Annotated[int | None, typer.Option(help="Bindings; 200000.")] = None,
    max_consumers: Annotated[int | None, typer.Option(help="Consumers; 100000.")] = None,
    max_message_size: Annotated[
        int | None, typer.Option(metavar="BYTES", help="Of the largest message; 134217728.")
    ] = None,
    unauthenticated_timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="That a connection may take to be opened; 10.")
    ] = None,
    close_timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="That a peer may take to answer Connection.Close; 5.")
    ] = None,
    backlog_count: Annotated[
        int | None,
        typer.Option(metavar="MESSAGES", help="Unsettled ones of a connection that flow all its channels; 0, never."),
    ] = None,
    backlog_size: Annotated[int | None, typer.Option(metavar="BYTES", help="The same in body bytes.")] = None,
    flow_grace: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="To obey Channel.Flow, before what follows counts; 5.")
    ] = None,
    tarpit_after: Annotated[
        int | None, typer.Option(metavar="MESSAGES", help="Past that, each so many end reading for a time; 0, never.")
    ] = None,
    tarpit_time: Annotated[float | None, typer.Option(metavar="SECONDS", help="For how long; 1.")] = None,
    close_channel_after: Annotated[
        int | None, typer.Option(metavar="MESSAGES", help="Past that, with more the channel is closed; 0, never.")
    ] = None,
    close_connection_after: Annotated[
        int | None, typer.Option(metavar="MESSAGES", help="The same for the connection; 0, never.")
    ] = None,
    resume_interval: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Between two channels that a queue lets go on; 0.")
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The message store: durable queues and persistent messages survive; all is in memory unless given.",
            dir_okay=False,
        ),
    ] = None,
    store_synchronous: Annotated[
        Synchronous | None,
        typer.Option(
            help="What confirmed messages survive: full, also the death of the machine; normal, the broker's."
        ),
    ] = None,
    memory_limit: Annotated[
        int | None,
        typer.Option(metavar="BYTES", help="Of messages in memory; policy flow_to_disk evicts bodies; 0, any number."),
    ] = None,
    disk_free_limit: Annotated[
        int | None,
        typer.Option(metavar="BYTES", help="Clients are blocked when less is free where the store is; 0, never."),
    ] = None,
    http_host: Annotated[str | None, typer.Option(help="The address on which the HTTP API listens; 127.0.0.1.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Its port; 0 for a free one; no HTTP API unless given.")] = None,
    http_token: Annotated[
        str | None, typer.Option(help="What its clients have to show; QFLOW_HTTP_TOKEN. Required off loopback.")
    ] = None,
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
    flow_log: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write who is held by which queue, and depths, for qflow report."),
    ] = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing but the URLs, and warnings.")] = False,
) -> None:
    """Run a broker for trials and tests, until Ctrl-C or SIGTERM.

    It speaks AMQP 0-9-1, keeps everything in memory unless it has a store, and blocks producers by the thresholds of
    its queues. It prints its URL when it accepts connections, and the URL of its HTTP API if there is one. When it is
    stopped, it exits with code 0.
    """
    flags: dict[str, Any] = {
        "host": host,
        "port": port,
        "users": broker_users(user, users_file),
        "loopback_users": None if loopback_users is None else tuple(filter(None, loopback_users.split(","))),
        "max_failed_logins": max_failed_logins,
        "tls_certificate": tls_certificate,
        "tls_key": tls_key,
        "tls_client_ca": tls_client_ca,
        "virtual_host": virtual_host,
        "profile": profile,
        "enforcement": enforcement,
        "flow_scope": flow_scope,
        "recent": recent,
        "default_flow_stop_threshold": default_flow_stop_threshold,
        "default_flow_resume_threshold": default_flow_resume_threshold,
        "capacity": capacity,
        "flow_resume_capacity": flow_resume_capacity,
        "max_producer_flow_control_wait": max_producer_flow_control_wait,
        "heartbeat": heartbeat,
        "frame_max": frame_max,
        "channel_max": channel_max,
        "max_connections": max_connections,
        "max_unauthenticated": max_unauthenticated,
        "max_queues": max_queues,
        "max_bindings": max_bindings,
        "max_consumers": max_consumers,
        "max_message_size": max_message_size,
        "unauthenticated_timeout": unauthenticated_timeout,
        "close_timeout": close_timeout,
        "backlog_count": backlog_count,
        "backlog_size": backlog_size,
        "flow_grace": flow_grace,
        "tarpit_after": tarpit_after,
        "tarpit_time": tarpit_time,
        "close_channel_after": close_channel_after,
        "close_connection_after": close_connection_after,
        "resume_interval": resume_interval,
        "store": store,
        "store_synchronous": store_synchronous,
        "memory_limit": memory_limit,
        "disk_free_limit": disk_free_limit,
        "http_host": http_host,
        "http_port": http_port,
        "http_token": http_token or os.environ.get("QFLOW_HTTP_TOKEN") or None,
    }
    if user and not quiet:
        warn_of_option("--user", f"--users-file, {USERS} or [users] in --config")
    if http_token and not quiet:
        warn_of_option("--http-token", "QFLOW_HTTP_TOKEN or http_token in --config")
    given = {name: value for name, value in flags.items() if value is not None}
    marks = {
        "flow_stop_count": flow_stop_count,
        "flow_resume_count": flow_resume_count,
        "flow_stop_size": flow_stop_size,
        "flow_resume_size": flow_resume_size,
    }
    marks_given = {name: value for name, value in marks.items() if value is not None}
    if marks_given and not queue:
        raise CommandError(f"{', '.join(marks_given)}: for which queue? give --queue NAME", ExitCode.USAGE)
    read = read_config(config)
    queues = dict(read.queues) | dict.fromkeys(queue or (), marks_given)
    try:
        if policy:
            given["policies"] = [Policy.parse(text) for text in policy]
    except (TypeError, ValueError) as error:
        raise CommandError(str(error), ExitCode.USAGE) from error
    console = Console(stderr=True, quiet=quiet)
    with ExitStack() as stack:
        folder = flow_log or read.settings.get("flow_log")
        if folder is not None:
            given["flow_log"] = stack.enter_context(FlowLog(folder))
        embedded = _make(read, given)
        _raise_descriptor_limit(embedded.settings, Console(stderr=True))
        # A quiet console prints nothing, not even warnings.
        stack.enter_context(warnings_shown("qflow_client.broker", Console(stderr=True) if quiet else console))
        stopping = stack.enter_context(Stopping())
        stack.enter_context(seldom_collected())
        try:
            running = stack.enter_context(embedded)
        except OSError as error:
            raise CommandError(error.strerror or str(error)) from error
        except StoreError as error:
            raise CommandError(str(error)) from error
        for name, its_marks in queues.items():
            arguments = {f"qpid.{mark}": value for mark, value in its_marks.items()}
            try:
                running.declare_queue(name, durable=True, arguments=arguments)
            except AmqpError as error:
                where = "" if its_marks is marks_given or read.path is None else f"{read.path}: "
                raise CommandError(f"{where}{error}", ExitCode.USAGE) from error
        _watch_resident_size(running, stack)
        http_url = None if running.settings.http_port is None else running.http_url
        if as_json:
            print_json({"url": running.url, "http_url": http_url})
        else:
            print(*filter(None, (running.url, http_url)), sep="\n", flush=True)
        try:
            with stopping.breakable():
                _watch(running, console)
        except Stopped:
            assert stopping.signal is not None
            console.print(f"{stopping.signal.name}: the broker ends")


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Let the garbage collector check only young objects, in small batches.

    A check of all messages would stop all threads.
    """
    before = gc.get_threshold()
    # Existing objects stay, and need not be checked.
    gc.freeze()
    gc.set_threshold(2000, 2, 100_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _make(config: Config, given: Mapping[str, Any]) -> Broker:
    settings: dict[str, Any] = {"port": 5672, **config.settings, **given}
    files = [settings.pop(name, None) for name in ("tls_certificate", "tls_key", "tls_client_ca")]
    try:
        return Broker(**settings, ssl_context=_ssl_context(*files))
    except (TypeError, ValueError) as error:
        text = str(error)
        # The error text begins with the name of the wrong setting, which may come from the file.
        name = text.split(maxsplit=1)[0].partition("=")[0]
        where = f"{config.path}: " if name in config.settings and name not in given else ""
        raise CommandError(f"{where}{text}", ExitCode.USAGE) from error


def _watch_resident_size(running: Broker, stack: ExitStack) -> None:
    """Block publishers while the process uses much more memory than `memory_limit`, until the stack is closed."""
    limit, idle = running.settings.memory_limit, resident_size()
    if not limit or idle is None:
        return
    watch, ended = ResidentWatch(idle, limit), threading.Event()

    def look() -> None:
        while not ended.wait(_LOOK):
            resident = resident_size()
            if resident is None or not watch.look(resident, running.memory.bytes):
                continue
            text = f"the process takes {resident} bytes of memory; it may take {watch.most}"
            if watch.is_over:
                running.raise_alarm(ALARM, text)
            else:
                running.clear_alarm(ALARM)
            _log.warning("%s; clients are %s", text, "blocked" if watch.is_over else "no longer blocked for that")

    thread = threading.Thread(target=look, name="qflow-resident", daemon=True)
    thread.start()
    # The thread must end before the broker, which then accepts no calls.
    stack.callback(thread.join)
    stack.callback(ended.set)


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
