"""``qflow broker``: runs the broker of this package in the foreground."""

from __future__ import annotations

import gc
import logging
import os
import ssl
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
from qflow_client.cli.config import MARKS, SETTINGS, TLS_FILES, Config, read_config
from qflow_client.cli.errors import CommandError, ExitCode
from qflow_client.cli.output import AsJson, print_json
from qflow_client.cli.passwords import USERS, broker_users, decoding_checked, standard_input, warn_of_option
from qflow_client.cli.resident import ALARM, ResidentWatch, resident_size
from qflow_client.cli.stopping import Stopped, Stopping
from qflow_client.cli.warned import warnings_shown
from qflow_client.redaction import hide_password, printable

resource: Any
try:
    import resource
except ImportError:
    # Only POSIX systems have this module.
    resource = None

__all__ = ["broker", "hash_password", "queue_table", "seldom_collected"]

# Number of file descriptors for the HTTP API, and number for all other files except AMQP connections.
_HTTP_CONNECTIONS = 1000
_OTHER_FILES = 100

# Seconds between two updates of the table of queues.
_DISPLAY_PERIOD = 0.25
# Seconds between two checks of the resident memory of the process.
_LOOK = 1.0

_log = logging.getLogger("qflow_client.broker.resident")


def queue_table(queues: tuple[QueueSnapshot, ...], producers: int, flowed: int) -> Table:
    """Return a table of the queues and their flow states. `flowed` is the number of blocked (flowed) channels."""
    table = Table(
        caption=f"producers: {producers}, blocked (flowed): {flowed}; Ctrl-C stops the broker",
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
                raise CommandError(
                    f"{name} has no effect without a certificate: set tls_certificate too", ExitCode.USAGE
                )
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        # Python does not report whether the certificate or the key is wrong, so name both files.
        files = f"{certificate} and {key}" if key is not None else str(certificate)
        raise CommandError(f"{files}: cannot load a certificate with its key: {error}", ExitCode.USAGE) from error
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except OSError as error:
            raise CommandError(f"{client_ca}: cannot load a certificate authority: {error}", ExitCode.USAGE) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def hash_password(as_json: AsJson = False) -> None:
    """Print the hash of a password for `qflow broker`.

    You can write the hash instead of the password in --users-file, and in the table [users] of the configuration file.
    On a terminal the command asks for the password. Otherwise it reads the first line of standard input. There is no
    option for the password, because other users of the machine could read it.
    """
    given = standard_input()
    if given.isatty():
        password = getpass("password: ")
        if getpass("repeat the password: ") != password:
            raise CommandError("the two passwords differ; start again")
    else:
        with decoding_checked("standard input"):
            password = given.readline().rstrip("\r\n")
    if not password:
        raise CommandError("the password is blank; enter at least one character", ExitCode.USAGE)
    with decoding_checked("standard input"):
        hashed = hash_of(password)
    if as_json:
        print_json({"hash": hashed})
    else:
        print(hashed)


def _raise_descriptor_limit(settings: BrokerSettings, console: Console) -> None:
    """Raise the limit of file descriptors to the number that the settings need. If this fails, print a notice."""
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
        typer.Option(
            metavar="FILE.toml",
            help="TOML file with options. Options on the command line override it (default: no file).",
            dir_okay=False,
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on for AMQP (default: 127.0.0.1).")
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Port to listen on for AMQP (default: 5672; 0: any free port).")
    ] = None,
    user: Annotated[
        list[str] | None,
        typer.Option(
            "--user",
            metavar="NAME:PASSWORD",
            help="User that may log in; can be repeated (default: guest:guest). "
            "Other users of this machine can see it; use --users-file to hide it.",
        ),
    ] = None,
    users_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with users, one NAME:PASSWORD or NAME:HASH in each line; '-' reads standard input. "
            f"`qflow hash-password` prints a hash. The environment variable {USERS} can have the same lines.",
        ),
    ] = None,
    loopback_users: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            help="Users that may log in only from this machine, separated by commas (default: guest; '': no user).",
        ),
    ] = None,
    max_failed_logins: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            help="If one address has more failed logins than this number, the broker checks only one of its logins per "
            "second (default: 10; 0: no limit).",
        ),
    ] = None,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="PEM file with the server's certificate; it enables TLS for AMQP and HTTP (default: no TLS).",
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="PEM file with the private key of the certificate (default: the file with the certificate).",
        ),
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="PEM file with a certificate authority. With it, every client must present a certificate that this "
            "authority has signed (default: clients need no certificate).",
        ),
    ] = None,
    virtual_host: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the only virtual host (default: /).")
    ] = None,
    profile: Annotated[
        Profile | None,
        typer.Option(
            help="Broker to imitate, for tests of clients; qflow imitates none (default: qflow). The others have "
            "their own defaults for --heartbeat, --frame-max and --channel-max.",
        ),
    ] = None,
    enforcement: Annotated[
        Enforcement | None,
        typer.Option(
            help="How a queue that is ON blocks its producers: channel_flow sends Channel.Flow, completion delays "
            "confirms, both does both (default: both)."
        ),
    ] = None,
    flow_scope: Annotated[
        FlowScope | None,
        typer.Option(
            help="Which producers a queue that is ON blocks. offender: those that publish to it above its threshold. "
            "publishers: all that have published to it recently (default: offender)."
        ),
    ] = None,
    recent: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Seconds after its last message for which a producer is a recent publisher (default: 10).",
        ),
    ] = None,
    default_flow_stop_threshold: Annotated[
        int | None,
        typer.Option(
            metavar="PERCENT",
            help="Stop threshold in percent of a queue's maximum, for queues without their own stop threshold "
            "(default: 80; 0 for both: no thresholds).",
        ),
    ] = None,
    default_flow_resume_threshold: Annotated[
        int | None,
        typer.Option(
            metavar="PERCENT",
            help="Resume threshold of these queues, in percent of the maximum "
            "(default: 70; 0 for both: no thresholds).",
        ),
    ] = None,
    capacity: Annotated[
        int | None,
        typer.Option(
            metavar="BYTES",
            help="Body bytes above which a queue turns ON, unless it has its own capacity (default: 0, no limit).",
        ),
    ] = None,
    flow_resume_capacity: Annotated[
        int | None,
        typer.Option(
            metavar="BYTES",
            help="Body bytes at or below which this queue turns OFF (default: the value of --capacity).",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="'NAME KEY=VALUE…'",
            help="Policy for queues, such as 'small pattern=^orders policy=reject max_count=100'; can be "
            "repeated (default: no policy).",
        ),
    ] = None,
    max_producer_flow_control_wait: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Seconds for which a message waits for room in a full queue with the policy wait, before the queue "
            "refuses it (default: 60).",
        ),
    ] = None,
    heartbeat: Annotated[
        int | None,
        typer.Option(
            metavar="SECONDS",
            help="Heartbeat interval in seconds that the broker proposes to clients (default: 60; 0: no heartbeats).",
        ),
    ] = None,
    frame_max: Annotated[
        int | None,
        typer.Option(
            metavar="BYTES",
            help="Maximum size of a frame in bytes that the broker proposes to clients (default: 131072).",
        ),
    ] = None,
    channel_max: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="Maximum number of channels of one connection (default: 2047).")
    ] = None,
    max_connections: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            help="Maximum number of open connections; further connections are refused (default: 10000).",
        ),
    ] = None,
    max_unauthenticated: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            help="Maximum number of connections that are still opening. If there are more, the oldest one is closed "
            "(default: 1000).",
        ),
    ] = None,
    max_queues: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", help="Maximum number of queues; further queues are refused (default: 50000)."),
    ] = None,
    max_bindings: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER", help="Maximum number of bindings; further bindings are refused (default: 200000)."
        ),
    ] = None,
    max_consumers: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER", help="Maximum number of consumers; further consumers are refused (default: 100000)."
        ),
    ] = None,
    max_message_size: Annotated[
        int | None,
        typer.Option(
            metavar="BYTES",
            help="Maximum body bytes of a message; a larger message closes its channel (default: 134217728).",
        ),
    ] = None,
    unauthenticated_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Seconds within which a client must open its connection, with TLS and login (default: 10).",
        ),
    ] = None,
    close_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Seconds for which the broker waits for a client's answer to Connection.Close (default: 5).",
        ),
    ] = None,
    backlog_count: Annotated[
        int | None,
        typer.Option(
            metavar="MESSAGES",
            help="Messages of one connection that may wait for room, be unconfirmed or arrive on blocked (flowed) "
            "channels. If there are more, all its channels are blocked (default: 0, no limit).",
        ),
    ] = None,
    backlog_size: Annotated[
        int | None,
        typer.Option(metavar="BYTES", help="The same limit in body bytes (default: 0, no limit)."),
    ] = None,
    flow_grace: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Seconds within which a client must obey Channel.Flow. Messages that arrive on the blocked (flowed) "
            "channel after this time are late. The next options count late messages (default: 5; 0: no time).",
        ),
    ] = None,
    tarpit_after: Annotated[
        int | None,
        typer.Option(
            metavar="MESSAGES",
            help="Whenever a channel has sent this number of late messages, the broker stops reading its connection "
            "for a time (default: 0, never).",
        ),
    ] = None,
    tarpit_time: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Seconds for which the broker then does not read the connection (default: 1).",
        ),
    ] = None,
    close_channel_after: Annotated[
        int | None,
        typer.Option(
            metavar="MESSAGES",
            help="Maximum number of late messages since a channel was blocked (flowed). After more, the broker closes "
            "the channel (default: 0, no limit).",
        ),
    ] = None,
    close_connection_after: Annotated[
        int | None,
        typer.Option(
            metavar="MESSAGES",
            help="Maximum number of late messages on one connection. After more, the broker closes the connection "
            "(default: 0, no limit).",
        ),
    ] = None,
    resume_interval: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Seconds between two channels that a queue unblocks (unflows) when it turns OFF "
            "(default: 0, all together).",
        ),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File of the message store. With it, durable queues and persistent messages survive a restart "
            "(default: no store, all is in memory).",
            dir_okay=False,
        ),
    ] = None,
    store_synchronous: Annotated[
        Synchronous | None,
        typer.Option(
            help="What confirmed messages in the store survive. normal: a crash of the broker. full: also a crash of "
            "the machine (default: full)."
        ),
    ] = None,
    memory_limit: Annotated[
        int | None,
        typer.Option(
            metavar="BYTES",
            help="Maximum bytes of messages in memory. Above three quarters, queues with the policy flow_to_disk "
            "move bodies to the store. Above the limit, the broker blocks publishers (default: 0, no limit).",
        ),
    ] = None,
    disk_free_limit: Annotated[
        int | None,
        typer.Option(
            metavar="BYTES",
            help="Bytes that must be free in the folder of the store. If less is free, the broker sends "
            "Connection.Blocked to its clients (default: 0, no limit).",
        ),
    ] = None,
    http_host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Address to listen on for the HTTP API (default: 127.0.0.1)."),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            help="Port to listen on for the HTTP API (default: no HTTP API; 0: any free port).",
        ),
    ] = None,
    http_token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            help="Token that clients of the HTTP API must send; required if other machines can reach the API "
            "(default: no token). Other users of this machine can see it; use the environment variable "
            "QFLOW_HTTP_TOKEN to hide it.",
        ),
    ] = None,
    queue: Annotated[
        list[str] | None,
        typer.Option(
            "--queue",
            metavar="NAME",
            help="Durable queue to declare at the start; can be repeated (default: no queue).",
        ),
    ] = None,
    flow_stop_count: Annotated[
        int | None,
        typer.Option(
            metavar="MESSAGES",
            help="Messages above which each queue of --queue turns ON (default: no stop threshold).",
        ),
    ] = None,
    flow_resume_count: Annotated[
        int | None,
        typer.Option(
            metavar="MESSAGES",
            help="Messages below which the queue turns OFF (default: 7/8 of --flow-stop-count).",
        ),
    ] = None,
    flow_stop_size: Annotated[
        int | None,
        typer.Option(
            metavar="BYTES",
            help="Body bytes above which each queue of --queue turns ON (default: no stop threshold).",
        ),
    ] = None,
    flow_resume_size: Annotated[
        int | None,
        typer.Option(
            metavar="BYTES",
            help="Body bytes below which the queue turns OFF (default: 7/8 of --flow-stop-size).",
        ),
    ] = None,
    flow_log: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for a flow log. It records which queue blocks which producers, and the depths of the queues. "
            "`qflow report` analyses it (default: no flow log).",
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the URLs, and warnings and errors.")] = False,
) -> None:
    """Run a broker for trials and tests, until Ctrl-C or SIGTERM.

    The broker implements AMQP 0-9-1. All data is in memory, unless you give a file with --store. When the broker
    accepts connections, it prints its URL. It also prints the URL of its HTTP API if there is one.

    A queue turns ON when its depth exceeds the stop threshold, and OFF when its depth is below the resume threshold. A
    queue that is ON blocks (flows) its producers.

    Exit codes: 0 after Ctrl-C or SIGTERM; 1 if the broker cannot start, for example because the port is in use; 2 if an
    option or the configuration file is wrong.
    """
    # This is the first statement, so `locals` has only the parameters.
    options = {name: value for name, value in locals().items() if value is not None}
    given = {name: options[name] for name in (*SETTINGS, *TLS_FILES) if name in options}
    if (users := broker_users(user, users_file)) is not None:
        given["users"] = users
    if loopback_users is not None:
        given["loopback_users"] = tuple(filter(None, loopback_users.split(",")))
    if token := http_token or os.environ.get("QFLOW_HTTP_TOKEN"):
        given["http_token"] = token
    if user and not quiet:
        warn_of_option("--user", f"--users-file, {USERS} or [users] in --config")
    if http_token and not quiet:
        warn_of_option("--http-token", "QFLOW_HTTP_TOKEN or http_token in --config")
    marks_given = {name: options[name] for name in MARKS if name in options}
    if marks_given and not queue:
        raise CommandError(
            f"{', '.join(marks_given)}: there is no queue to set this for; give --queue NAME", ExitCode.USAGE
        )
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
        # With --quiet, `console` prints nothing, so warnings need another console.
        stack.enter_context(warnings_shown("qflow_client", Console(stderr=True) if quiet else console))
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
            except (AmqpError, ValueError) as error:
                where = "" if its_marks is marks_given or read.path is None else f"{read.path}: "
                raise CommandError(f"{where}{error}", ExitCode.USAGE) from error
        _watch_resident_size(running, stack)
        # The output may go to a log, such as the journal of systemd. Passwords on the command line are no secret.
        is_public = user or running.settings.users == {"guest": "guest"}
        url = running.url if is_public else hide_password(running.url)
        http_url = None if running.settings.http_port is None else running.http_url
        if as_json:
            print_json({"url": url, "http_url": http_url})
        else:
            print(*filter(None, (url, http_url)), sep="\n", flush=True)
        try:
            with stopping.breakable():
                _watch(running, console)
        except Stopped:
            assert stopping.signal is not None
            console.print(f"{stopping.signal.name}: the broker ends")


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Make full garbage collections rare during the block, because they visit every message and stop all threads."""
    before = gc.get_threshold()
    # Exclude the present objects from collections: most belong to modules, and exist until the process ends.
    gc.freeze()
    gc.set_threshold(2000, 2, 100_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _make(config: Config, given: Mapping[str, Any]) -> Broker:
    settings: dict[str, Any] = {"port": 5672, **config.settings, **given}
    files = [settings.pop(name, None) for name in TLS_FILES]
    try:
        return Broker(**settings, ssl_context=_ssl_context(*files))
    except (TypeError, ValueError) as error:
        text = str(error)
        # The error text begins with the name of the wrong setting. If the file sets it, add the file's path.
        name = text.split(maxsplit=1)[0].partition("=")[0].rstrip(":")
        where = f"{config.path}: " if name in config.settings and name not in given else ""
        raise CommandError(f"{where}{text}", ExitCode.USAGE) from error


def _watch_resident_size(running: Broker, stack: ExitStack) -> None:
    """Start a thread that blocks publishers while the process uses too much memory. Closing `stack` ends the thread."""
    limit, idle = running.settings.memory_limit, resident_size()
    if not limit or idle is None:
        return
    watch, ended = ResidentWatch(idle, limit), threading.Event()

    def look() -> None:
        while not ended.wait(_LOOK):
            resident = resident_size()
            if resident is None or not watch.look(resident, running.memory.bytes):
                continue
            text = f"the process uses {resident} bytes of memory; its limit is {watch.most}"
            if watch.is_over:
                running.raise_alarm(ALARM, text)
            else:
                running.clear_alarm(ALARM)
            _log.warning("%s; clients are %s", text, "blocked" if watch.is_over else "no longer blocked for that")

    thread = threading.Thread(target=look, name="qflow-resident", daemon=True)
    thread.start()
    # The thread must end before the broker is closed, because a closed broker accepts no calls.
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
            time.sleep(_DISPLAY_PERIOD)
