"""``qflow admin``: inspects and controls a broker through its HTTP API."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from ssl import SSLError, create_default_context
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import typer
from rich.table import Table
from rich.text import Text

from qflow_client.broker import Policy
from qflow_client.cli.errors import CommandError, ExitCode
from qflow_client.cli.output import AsJson, print_json, table_console
from qflow_client.cli.passwords import standard_input, warn_of_option
from qflow_client.cli.stopping import Stopped, Stopping
from qflow_client.cli.text import count, seconds
from qflow_client.redaction import printable, shown

__all__ = ["admin"]

# A command fails if it gets no byte from the broker for this number of seconds. `watch` gets a byte every 15 s or less.
_READ_TIMEOUT = 40.0
_URL = "http://127.0.0.1:15672"

admin = typer.Typer(
    name="admin",
    help="Show and control a running broker through its HTTP API.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
_add = typer.Typer(name="add", help="Add a queue or a policy.", no_args_is_help=True)
_set = typer.Typer(name="set", help="Change the thresholds of a queue, or set a rate limit.", no_args_is_help=True)
_delete = typer.Typer(name="delete", help="Delete a queue, a policy or a rate limit.", no_args_is_help=True)
for _group in (_add, _set, _delete):
    admin.add_typer(_group)

_Messages = Annotated[
    int | None,
    typer.Option(metavar="MESSAGES", help="Messages above which the queue turns ON (0: no stop threshold)."),
]
_MessagesResume = Annotated[
    int | None, typer.Option(metavar="MESSAGES", help="Messages below which the queue turns OFF.")
]
_Bytes = Annotated[
    int | None,
    typer.Option(metavar="BYTES", help="Body bytes above which the queue turns ON (0: no stop threshold)."),
]
_BytesResume = Annotated[int | None, typer.Option(metavar="BYTES", help="Body bytes below which the queue turns OFF.")]
_Capacity = Annotated[
    int | None,
    typer.Option(metavar="BYTES", help="Capacity in body bytes, above which the queue turns ON (0: no capacity)."),
]
_CapacityResume = Annotated[
    int | None, typer.Option(metavar="BYTES", help="Body bytes at or below which the queue turns OFF.")
]


class _Broker:
    """A client of the HTTP API of one broker."""

    def __init__(self, url: str, token: str | None, cacert: Path | None, cert: Path | None) -> None:
        self.url = url.rstrip("/")
        refused = f"--url must be http://HOST:PORT or https://HOST:PORT, not {shown(url)}"
        try:
            parts = urlsplit(self.url)
            is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and "@" not in self.url
        except ValueError:
            raise CommandError(refused, ExitCode.USAGE) from None
        if not is_url:
            raise CommandError(refused, ExitCode.USAGE)
        self._path = parts.path
        self._netloc = parts.netloc
        # Check the token here, because the error of `http.client` would contain the token.
        if token is not None and not (token.isascii() and token.isprintable()):
            raise CommandError(
                "the token of --token or QFLOW_HTTP_TOKEN must be printable ASCII characters", ExitCode.USAGE
            )
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            self._context = create_default_context(cafile=cacert) if parts.scheme == "https" else None
        except OSError as error:
            raise CommandError(f"{cacert}: cannot load certificates of authorities: {error}", ExitCode.USAGE) from error
        if self._context is not None and cert is not None:
            try:
                self._context.load_cert_chain(cert)
            except OSError as error:
                raise CommandError(
                    f"{cert}: cannot load a certificate with its key: {error}", ExitCode.USAGE
                ) from error

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Send a request (see `open`). Return the answer, parsed from JSON, or ``None`` if the answer has no body."""
        with self.open(method, path, body) as response:
            answer = response.read()
        return json.loads(answer) if answer else None

    def open(self, method: str, path: str, body: object = None) -> HTTPResponse:
        """Send a request, and return the response, which the caller reads and closes.

        Raises:
            CommandError: the broker cannot be reached, refuses the request, or has no HTTP API at this URL.
        """
        headers, raw = dict(self._headers), None
        if body is not None:
            headers["Content-Type"] = "application/json"
            raw = json.dumps(body).encode()
        if self._context is None:
            connection = HTTPConnection(self._netloc, timeout=_READ_TIMEOUT)
        else:
            connection = HTTPSConnection(self._netloc, timeout=_READ_TIMEOUT, context=self._context)
        try:
            connection.request(method, self._path + path, raw, headers | {"Connection": "close"})
            response = connection.getresponse()
        except (OSError, HTTPException, UnicodeError) as error:
            if isinstance(error, SSLError):
                way_out = "check --cacert and --cert, and whether --url must begin with http:"
            elif self._context is not None:
                # A broker that requires a client certificate may close the connection without naming the reason.
                way_out = "start the broker with --http-port, or check --url and --cert"
            else:
                way_out = "start the broker with --http-port, or check --url"
            raise CommandError(f"cannot reach the HTTP API at {self.url}: {error}; {way_out}") from error
        if response.status < 300:
            return response
        try:
            detail = json.loads(response.read())["detail"]
        except (ValueError, KeyError, TypeError):
            raise CommandError(
                f"{self.url} is not the HTTP API of a broker: {response.status} {response.reason}; check --url"
            ) from None
        if response.status == 401:
            raise CommandError(f"{self.url} requires the right token: set QFLOW_HTTP_TOKEN, or give --token")
        raise CommandError(detail, ExitCode.USAGE if response.status == 400 else ExitCode.FAILED)


@admin.callback()
def _admin(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", "-u", metavar="URL", help=f"URL of the broker's HTTP API (default: QFLOW_ADMIN_URL, or {_URL})."
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            help="Token for the HTTP API (default: QFLOW_HTTP_TOKEN, or no token). Other users of this machine can "
            "see it; use the environment variable to hide it.",
        ),
    ] = None,
    cacert: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="PEM file with the certificate authorities to trust for https (default: those of the system).",
        ),
    ] = None,
    cert: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="PEM file with your certificate and its key, if the broker requires client certificates "
            "(default: no certificate).",
        ),
    ] = None,
) -> None:
    # Read the environment variable here, because some versions of typer cannot read it.
    url = url or os.environ.get("QFLOW_ADMIN_URL") or _URL
    if token:
        warn_of_option("--token", "QFLOW_HTTP_TOKEN")
    context.obj["admin"] = _Broker(url, token or os.environ.get("QFLOW_HTTP_TOKEN") or None, cacert, cert)


def _broker(context: typer.Context) -> _Broker:
    broker: _Broker = context.obj["admin"]
    return broker


def _part(name: str) -> str:
    """Return a name as one part of an HTTP path. Raise `CommandError` if no object can have this name."""
    try:
        part = quote(name, safe="")
    except UnicodeEncodeError:
        part = ""
    if not part:
        raise CommandError(f"{name!r}: this is not a name; give the name of an object", ExitCode.USAGE)
    return part


def _show(rows: list[dict[str, Any]], columns: Mapping[str, Callable[[dict[str, Any]], object]]) -> None:
    table = Table(header_style="dim", box=None, pad_edge=False)
    for name, tell in columns.items():
        is_number = bool(rows) and type(tell(rows[0])) is int
        table.add_column(name, justify="right" if is_number else "left", no_wrap=name != "thresholds")
    for row in rows:
        cells = []
        for tell in columns.values():
            value = tell(row)
            told = f"{value:,}" if type(value) is int else printable(str(value))
            cells.append(value if isinstance(value, Text) else Text(told))
        table.add_row(*cells)
    table_console().print(table)


def _list(
    context: typer.Context, path: str, as_json: bool, columns: Mapping[str, Callable[[dict[str, Any]], object]]
) -> None:
    rows = _broker(context).ask("GET", path)
    if as_json:
        print_json(rows)
    else:
        _show(rows, columns)


def _state(is_on: bool, on: str = "ON", off: str = "OFF") -> Text:
    return Text(on, style="bold red") if is_on else Text(off, style="green")


def _thresholds(queue: dict[str, Any]) -> str:
    marks = queue["thresholds"]
    told = []
    for stop, resume, unit in (
        ("flowStopCount", "flowResumeCount", ""),
        ("flowStopSize", "flowResumeSize", " B"),
        ("capacity", "flowResumeCapacity", " B capacity"),
    ):
        if marks[stop]:
            told.append(f"{marks[stop]:,}/{marks[resume]:,}{unit}")
    return ", ".join(told) or "-"


@admin.command()
def queues(context: typer.Context, as_json: AsJson = False) -> None:
    """List queues with their depths, thresholds and flow states.

    The column `thresholds` shows the stop and resume thresholds. For example, 100/70 means messages, and 1,000/700 B
    means body bytes.
    """
    _list(
        context,
        "/api/queues",
        as_json,
        {
            "queue": lambda queue: queue["name"],
            "depth": lambda queue: queue["depth"],
            "ready": lambda queue: queue["ready"],
            "unacked": lambda queue: queue["unacked"],
            "bytes": lambda queue: queue["bytes"],
            "consumers": lambda queue: queue["consumers"],
            "flow state": lambda queue: _state(queue["flowStopped"]),
            "times ON": lambda queue: queue["flowStoppedCount"],
            "thresholds": _thresholds,
        },
    )


@admin.command()
def producers(context: typer.Context, as_json: AsJson = False) -> None:
    """List producers. Also show which queues block a producer, and how long it was blocked.

    The state of a blocked producer is `flowed`. `operator` means that an operator has stopped it.
    """
    _list(
        context,
        "/api/producers",
        as_json,
        {
            "producer": lambda producer: producer["name"],
            "client": lambda producer: producer["client"] or "-",
            "published": lambda producer: producer["published"],
            "unconfirmed": lambda producer: producer["unconfirmed"],
            "state": lambda producer: _state(producer["flowed"], "flowed", "unflowed"),
            "blocked by": lambda producer: ", ".join(producer["blockedBy"]) or "-",
            "times flowed": lambda producer: producer["timesFlowed"],
            "flowed for": lambda producer: seconds(producer["flowedSeconds"]),
        },
    )


def _sets(policy: dict[str, Any]) -> str:
    definition = policy["definition"]
    return ", ".join(f"{name} {value}" for name, value in definition.items() if value is not None)


def _about(policy: dict[str, Any]) -> str:
    keys = "" if policy["routingKey"] is None else f" with {policy['routingKey']!r}"
    return f"{policy['applyTo']} {policy['pattern']!r}{keys}"


@admin.command()
def policies(context: typer.Context, as_json: AsJson = False) -> None:
    """List policies, where they apply, and what they set."""
    _list(
        context,
        "/api/policies",
        as_json,
        {
            "policy": lambda policy: policy["name"],
            "applies to": _about,
            "priority": lambda policy: policy["priority"],
            "sets": _sets,
        },
    )


@admin.command()
def rates(context: typer.Context, as_json: AsJson = False) -> None:
    """List rate limits of exchanges, queues and users."""

    def rate(limit: dict[str, Any], name: str) -> str:
        return "-" if limit[name] is None else f"{limit[name]:,g}"

    _list(
        context,
        "/api/rate-limits",
        as_json,
        {
            "applies to": lambda limit: f"{limit['applyTo']} {limit['name'] or '(default exchange)'}",
            "messages/s": lambda limit: rate(limit, "messages"),
            "bytes/s": lambda limit: rate(limit, "bytes"),
            "burst": lambda limit: seconds(limit["burst"]),
        },
    )


@admin.command()
def watch(
    context: typer.Context,
    period: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.1,
            max=60,
            show_default=False,
            help="Seconds between two polls of the broker (default: 0.5).",
        ),
    ] = 0.5,
    as_json: AsJson = False,
) -> None:
    """Print a line for each change of a flow state, until Ctrl-C."""
    broker = _broker(context)
    with Stopping() as stopping:
        try:
            with stopping.breakable(), broker.open("GET", f"/api/events?period={period}") as response:
                known: dict[str, dict[str, Any]] = {}
                for told in _events(response, broker.url):
                    if as_json:
                        print_json(told)
                    else:
                        for line in _flow_lines(told, known):
                            print(f"{datetime.now():%H:%M:%S} {printable(line)}", flush=True)  # noqa: DTZ005 - local time
        except Stopped:
            return
    raise CommandError(f"{broker.url}: the broker has stopped")


def _events(response: Iterable[bytes], url: str) -> Iterator[dict[str, Any]]:
    try:
        for line in response:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
    except (OSError, HTTPException) as error:
        raise CommandError(f"{url}: {error}") from error


def _flow_lines(told: dict[str, Any], known: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each change from the states in `known`, and update `known`. A new object counts as OFF."""
    if "producersStopped" in told and (told["producersStopped"] or "operator" in known):
        yield "operator: all producers are " + ("stopped" if told["producersStopped"] else "started")
        known["operator"] = {}
    for queue in told.get("queues", ()):
        name = f"queue {queue['name']}"
        before = known.get(name, {"flowStopped": False, "flowStoppedCount": queue["flowStoppedCount"]})
        known[name] = queue
        turned = queue["flowStoppedCount"] - before["flowStoppedCount"]
        if queue["flowStopped"] != before["flowStopped"] or turned:
            state = "ON" if queue["flowStopped"] else "OFF"
            more = f", turned ON {count(turned, 'time')} in between" if turned > queue["flowStopped"] else ""
            yield f"{name}: {state} at {count(queue['depth'], 'message')}, {count(queue['bytes'], 'byte')}{more}"
    for channel in told.get("channels", ()):
        name = f"producer {channel['name']}"
        before = known.get(name, {"flowed": False, "blockedBy": []})
        known[name] = channel
        if channel["flowed"] and channel["blockedBy"] != before["blockedBy"]:
            yield f"{name}: blocked (flowed) by {', '.join(channel['blockedBy'])}"
        elif before["flowed"] and not channel["flowed"]:
            yield f"{name}: unblocked (unflowed), blocked for {seconds(channel['flowedSeconds'])} so far"
    for kind, word in (("queues", "queue"), ("channels", "producer")):
        for gone in told.get("gone", {}).get(kind, ()):
            if known.pop(f"{word} {gone}", {"flowStopped": False})["flowStopped"]:
                yield f"{word} {gone}: gone"


def _steer(
    context: typer.Context,
    as_json: bool,
    method: str,
    path: str,
    body: object = None,
    *,
    say: Callable[[Any], None] | None = None,
) -> None:
    """Send a request. Print the answer as JSON if `as_json` is true, and otherwise with `say`."""
    answer = _broker(context).ask(method, path, body)
    if as_json:
        print_json(answer or {})
    elif say is not None:
        say(answer)


def _each_producer(context: typer.Context, what: str, names: list[str] | None, as_json: bool) -> None:
    # Print only the answer to the last request, because the output of --json must be one JSON value.
    *others, last = [f"/{_part(name)}" for name in names or ()] or [""]
    for name in others:
        _broker(context).ask("POST", f"/api/producers{name}/{what}")
    _steer(context, as_json, "POST", f"/api/producers{last}/{what}")


_Producers = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PRODUCER", help="Names of producers, as `qflow admin producers` shows them (default: all producers)."
    ),
]


@admin.command()
def stop(context: typer.Context, producer: _Producers = None, as_json: AsJson = False) -> None:
    """Stop all producers, or only the named ones.

    Without a name, the command also stops producers that connect later.
    """
    _each_producer(context, "stop", producer, as_json)


@admin.command()
def start(context: typer.Context, producer: _Producers = None, as_json: AsJson = False) -> None:
    """Start all producers, or only the named ones.

    If a queue blocks (flows) a producer, the producer stays blocked.
    """
    _each_producer(context, "start", producer, as_json)


@admin.command()
def purge(
    context: typer.Context,
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.")],
    as_json: AsJson = False,
) -> None:
    """Remove the ready messages of a queue."""
    _steer(context, as_json, "POST", f"/api/queues/{_part(queue)}/purge", say=_say_removed)


_QueueName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the queue.")]


@_delete.command("queue")
def _delete_queue(context: typer.Context, name: _QueueName, as_json: AsJson = False) -> None:
    """Delete a queue with its messages."""
    _steer(context, as_json, "DELETE", f"/api/queues/{_part(name)}", say=_say_removed)


def _say_removed(answer: dict[str, Any]) -> None:
    print(f"{count(answer['messages'], 'message')} removed")


def _argument(pair: str) -> tuple[str, object]:
    name, equals, value = pair.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"--argument must be NAME=VALUE, not {pair!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


@_add.command("queue")
def _add_queue(
    context: typer.Context,
    name: _QueueName,
    flow_stop_size: _Bytes = None,
    flow_resume_size: _BytesResume = None,
    flow_stop_count: _Messages = None,
    flow_resume_count: _MessagesResume = None,
    capacity: _Capacity = None,
    flow_resume_capacity: _CapacityResume = None,
    durable: Annotated[bool, typer.Option("--durable", help="Declare the queue as durable.")] = False,
    auto_delete: Annotated[
        bool, typer.Option("--auto-delete", help="Delete the queue with its last consumer.")
    ] = False,
    argument: Annotated[
        list[str] | None,
        typer.Option(
            "--argument",
            metavar="NAME=VALUE",
            help="Another argument of the queue; can be repeated. VALUE is read as JSON, such as 5 or true. "
            "If it is not JSON, it is text.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Declare a queue.

    If the queue exists with the same settings, nothing changes. The default of a resume threshold is 7/8 of the stop
    threshold. The default of the resume capacity is the capacity.
    """
    marks = {
        "qpid.flow_stop_size": flow_stop_size,
        "qpid.flow_resume_size": flow_resume_size,
        "qpid.flow_stop_count": flow_stop_count,
        "qpid.flow_resume_count": flow_resume_count,
        "x-qpid-capacity": capacity,
        "x-qpid-flow-resume-capacity": flow_resume_capacity,
    }
    arguments = dict(map(_argument, argument or ())) | {
        name: value for name, value in marks.items() if value is not None
    }
    body = {"durable": durable, "autoDelete": auto_delete, "arguments": arguments}
    _steer(context, as_json, "PUT", f"/api/queues/{_part(name)}", body)


@_add.command("policy")
def _add_policy(
    context: typer.Context,
    text: Annotated[
        str,
        typer.Argument(
            metavar="'NAME KEY=VALUE…'",
            help="Policy, such as 'small pattern=^orders policy=reject max_count=100'.",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Add a policy, or replace the policy with the same name.

    The policy also applies to existing queues, immediately.
    """
    try:
        told = Policy.parse(text).to_json()
    except (TypeError, ValueError) as error:
        raise CommandError(str(error), ExitCode.USAGE) from error
    body = {_camel(name): value for name, value in told.items() if name != "name"}
    body["definition"] = {_camel(name): value for name, value in told["definition"].items()}
    _steer(context, as_json, "PUT", f"/api/policies/{_part(told['name'])}", body)


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.title() for word in rest)


@_delete.command("policy")
def _delete_policy(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the policy.")],
    as_json: AsJson = False,
) -> None:
    """Delete a policy.

    The affected queues then use their other policies and their arguments.
    """
    _steer(context, as_json, "DELETE", f"/api/policies/{_part(name)}")


@_set.command("queue")
def _set_queue(
    context: typer.Context,
    name: _QueueName,
    flow_stop_size: _Bytes = None,
    flow_resume_size: _BytesResume = None,
    flow_stop_count: _Messages = None,
    flow_resume_count: _MessagesResume = None,
    capacity: _Capacity = None,
    flow_resume_capacity: _CapacityResume = None,
    as_json: AsJson = False,
) -> None:
    """Change the thresholds of a queue in use.

    The flow state of the queue is updated immediately. Options that you leave out change nothing.
    """
    marks = {
        "flowStopSize": flow_stop_size,
        "flowResumeSize": flow_resume_size,
        "flowStopCount": flow_stop_count,
        "flowResumeCount": flow_resume_count,
        "capacity": capacity,
        "flowResumeCapacity": flow_resume_capacity,
    }
    given = {name: value for name, value in marks.items() if value is not None}
    if not given:
        raise CommandError("nothing to change: give at least one threshold, such as --flow-stop-count", ExitCode.USAGE)
    _steer(context, as_json, "PATCH", f"/api/queues/{_part(name)}/thresholds", given, say=_say_thresholds)


def _say_thresholds(queue: dict[str, Any]) -> None:
    print(f"{printable(queue['name'])}: {_thresholds(queue)}, {'ON' if queue['flowStopped'] else 'OFF'}")


_Scope = Annotated[str, typer.Argument(metavar="exchange|queue|user", help="Kind of the object to limit.")]
_LimitedName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the exchange, queue or user.")]


@_set.command("rate")
def _set_rate(
    context: typer.Context,
    scope: _Scope,
    name: _LimitedName,
    messages: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="Messages per second (default: no limit).")
    ] = None,
    size: Annotated[
        float | None, typer.Option("--bytes", metavar="BYTES", help="Body bytes per second (default: no limit).")
    ] = None,
    burst: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Burst in seconds. After a pause, a producer may send the messages of this time together "
            "(default: 0.1).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Limit the message rate of an exchange, a queue or a user.

    If a producer exceeds the rate, the broker blocks (flows) it until its average rate is within the limit again. Give
    at least one of --messages and --bytes.
    """
    given = {"messages": messages, "bytes": size, "burst": burst}
    body = {name: value for name, value in given.items() if value is not None}
    _steer(context, as_json, "PUT", _rate_path(scope, name), body)


@_delete.command("rate")
def _delete_rate(context: typer.Context, scope: _Scope, name: _LimitedName, as_json: AsJson = False) -> None:
    """Delete a rate limit."""
    _steer(context, as_json, "DELETE", _rate_path(scope, name))


def _rate_path(scope: str, name: str) -> str:
    return f"/api/rate-limits/{_part(scope)}/{_part(name)}"


@admin.command("export")
def _export(context: typer.Context, _as_json: AsJson = False) -> None:
    """Print queues, exchanges, bindings and policies as JSON.

    The output is always JSON, even without --json. `qflow admin import` reads it.
    """
    print_json(_broker(context).ask("GET", "/api/definitions"), indent=2)


@admin.command("import")
def _import(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="File with the objects; '-' is standard input.")],
    as_json: AsJson = False,
) -> None:
    """Declare all objects of an export, or none of them.

    The file was written by `qflow admin export` or exported from RabbitMQ.
    """
    name = "<stdin>" if file == "-" else file
    try:
        document = json.loads(standard_input().read() if file == "-" else Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"{name}: {error.strerror or error}", ExitCode.USAGE) from error
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{name}: not valid JSON: {error}", ExitCode.USAGE) from error
    if not isinstance(document, dict):
        raise CommandError(f"{name}: not an export: the JSON value must be an object", ExitCode.USAGE)
    _steer(context, as_json, "POST", "/api/definitions", document, say=_say_imported)


def _say_imported(told: dict[str, Any]) -> None:
    parts = ", ".join(count(told[kind], kind.removesuffix("s")) for kind in ("exchanges", "queues", "bindings"))
    parts += f", {told['policies']} policies" if told["policies"] else ""
    ignored = f"; ignored: {', '.join(told['ignored'])}" if told["ignored"] else ""
    print(f"{parts}{ignored}", file=sys.stderr)
