"""``qflow admin``: inspects and controls a broker through its HTTP API."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from ssl import create_default_context
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qflow_client.broker import Policy
from qflow_client.cli.errors import CommandError, ExitCode
from qflow_client.cli.output import AsJson, print_json
from qflow_client.cli.passwords import warn_of_option
from qflow_client.cli.stopping import Stopped, Stopping
from qflow_client.cli.text import count, seconds
from qflow_client.redaction import printable, shown

__all__ = ["admin"]

# Seconds without a byte after which the broker counts as unreachable; it sends a sign of life every 15 s.
_PATIENCE = 40.0
_URL = "http://127.0.0.1:15672"

admin = typer.Typer(
    name="admin",
    help="See and steer a broker that runs, over its HTTP API.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
_add = typer.Typer(name="add", help="Make a queue, or set a policy.", no_args_is_help=True)
_set = typer.Typer(name="set", help="Change a queue in use, or limit a rate.", no_args_is_help=True)
_delete = typer.Typer(name="delete", help="Delete a queue, a policy or a rate limit.", no_args_is_help=True)
for _group in (_add, _set, _delete):
    admin.add_typer(_group)

_Messages = Annotated[int | None, typer.Option(metavar="MESSAGES", help="Above it the queue is ON; 0 for none.")]
_MessagesResume = Annotated[
    int | None, typer.Option(metavar="MESSAGES", help="Below it the queue is OFF; 7/8 of the stop unless given.")
]
_Bytes = Annotated[int | None, typer.Option(metavar="BYTES", help="Above it the queue is ON; 0 for none.")]
_BytesResume = Annotated[
    int | None, typer.Option(metavar="BYTES", help="Below it the queue is OFF; 7/8 of the stop unless given.")
]
_Capacity = Annotated[int | None, typer.Option(metavar="BYTES", help="Above it the queue is ON; 0 for none.")]
_CapacityResume = Annotated[
    int | None, typer.Option(metavar="BYTES", help="Down to it the queue stays ON; the capacity unless given.")
]


class _Broker:
    """The HTTP API of a broker.

    Args:
        url: URL of the API.
        token: token to send; ``None`` for none.
        cacert: certificates of trusted authorities; ``None`` for those of the system.
        cert: client certificate with its key; ``None`` for none.
    """

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
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._context = create_default_context(cafile=cacert) if parts.scheme == "https" else None
        if self._context is not None and cert is not None:
            try:
                self._context.load_cert_chain(cert)
            except OSError as error:
                raise CommandError(f"{cert}: no certificate with its key: {error}", ExitCode.USAGE) from error

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Send a request, and return the broker's answer; ``None`` if it has no body.

        Raises:
            CommandError: the broker refuses the request, or cannot be reached.
        """
        with self.open(method, path, body) as response:
            answer = response.read()
        return json.loads(answer) if answer else None

    def open(self, method: str, path: str, body: object = None) -> HTTPResponse:
        """Send a request, and return an answer that is still arriving.

        Raises:
            CommandError: the broker refuses the request, or cannot be reached.
        """
        headers, raw = dict(self._headers), None
        if body is not None:
            headers["Content-Type"] = "application/json"
            raw = json.dumps(body).encode()
        if self._context is None:
            connection = HTTPConnection(self._netloc, timeout=_PATIENCE)
        else:
            connection = HTTPSConnection(self._netloc, timeout=_PATIENCE, context=self._context)
        try:
            connection.request(method, self._path + path, raw, headers | {"Connection": "close"})
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            raise CommandError(f"no HTTP API of a broker at {self.url}: {error}") from error
        if response.status < 300:
            return response
        try:
            detail = json.loads(response.read())["detail"]
        except (ValueError, KeyError, TypeError):
            raise CommandError(f"{self.url} is no broker: {response.status} {response.reason}") from None
        if response.status == 401:
            raise CommandError(f"{self.url} wants a token: give --token, or set QFLOW_HTTP_TOKEN")
        raise CommandError(detail, ExitCode.USAGE if response.status == 400 else ExitCode.FAILED)


@admin.callback()
def _admin(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option("--url", "-u", help=f"Where the HTTP API of the broker is; QFLOW_ADMIN_URL, or {_URL}."),
    ] = None,
    token: Annotated[str | None, typer.Option(help="What the broker wants to see; QFLOW_HTTP_TOKEN.")] = None,
    cacert: Annotated[
        Path | None, typer.Option(metavar="FILE", exists=True, dir_okay=False, help="Whom to trust, in PEM, for https.")
    ] = None,
    cert: Annotated[
        Path | None,
        typer.Option(metavar="FILE", exists=True, dir_okay=False, help="Your certificate with its key, in PEM."),
    ] = None,
) -> None:
    # Read here, because not every release of typer reads environment variables.
    url = url or os.environ.get("QFLOW_ADMIN_URL") or _URL
    if token:
        warn_of_option("--token", "QFLOW_HTTP_TOKEN")
    context.obj["admin"] = _Broker(url, token or os.environ.get("QFLOW_HTTP_TOKEN") or None, cacert, cert)


def _broker(context: typer.Context) -> _Broker:
    broker: _Broker = context.obj["admin"]
    return broker


# Inspecting.


def _show(rows: list[dict[str, Any]], columns: Mapping[str, Callable[[dict[str, Any]], object]]) -> None:
    table = Table(header_style="dim", box=None, pad_edge=False)
    numbers = (
        "priority",
        "depth",
        "ready",
        "unacked",
        "bytes",
        "times ON",
        "consumers",
        "published",
        "unconfirmed",
        "times",
    )
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=name != "thresholds")
    for row in rows:
        cells = []
        for tell in columns.values():
            value = tell(row)
            told = f"{value:,}" if type(value) is int else printable(str(value))
            cells.append(value if isinstance(value, Text) else Text(told))
        table.add_row(*cells)
    # Output that is not a terminal has no width, so that nothing is cut off.
    Console(width=None if sys.stdout.isatty() else 1000).print(table)


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
    """List the queues with their depths, marks (stop/resume) and flow states."""
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
    """List the producers: whether each is flowed, by which queues, and for how long."""
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
            "by": lambda producer: ", ".join(producer["blockedBy"]) or "-",
            "times": lambda producer: producer["timesFlowed"],
            "for": lambda producer: seconds(producer["flowedSeconds"]),
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
    """List the policies with the objects that they apply to, and with their settings."""
    _list(
        context,
        "/api/policies",
        as_json,
        {
            "policy": lambda policy: policy["name"],
            "about": _about,
            "priority": lambda policy: policy["priority"],
            "sets": _sets,
        },
    )


@admin.command()
def rates(context: typer.Context, as_json: AsJson = False) -> None:
    """List the rate limits of exchanges, queues and users."""

    def rate(limit: dict[str, Any], name: str) -> str:
        return "-" if limit[name] is None else f"{limit[name]:,g}"

    _list(
        context,
        "/api/rate-limits",
        as_json,
        {
            "of": lambda limit: f"{limit['applyTo']} {limit['name'] or '(default exchange)'}",
            "messages/s": lambda limit: rate(limit, "messages"),
            "bytes/s": lambda limit: rate(limit, "bytes"),
            "burst": lambda limit: seconds(limit["burst"]),
        },
    )


@admin.command()
def watch(
    context: typer.Context,
    period: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, max=60, help="Between two looks.")] = 0.5,
    as_json: AsJson = False,
) -> None:
    """Print a line for every change of a flow state, until Ctrl-C."""
    with Stopping() as stopping:
        try:
            with stopping.breakable(), _broker(context).open("GET", f"/api/events?period={period}") as response:
                known: dict[str, dict[str, Any]] = {}
                for told in _events(response):
                    if as_json:
                        print_json(told)
                    else:
                        for line in _flow_lines(told, known):
                            print(f"{datetime.now():%H:%M:%S} {printable(line)}", flush=True)  # noqa: DTZ005 - of who reads it
        except Stopped:
            return
        except (OSError, HTTPException) as error:
            raise CommandError(f"{_broker(context).url}: {error}") from error
    raise CommandError(f"{_broker(context).url}: the broker has ended")


def _events(response: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def _flow_lines(told: dict[str, Any], known: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the changes of flow states. An object that is not flowed when it is first seen is not reported."""
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
            yield f"{name}: flowed by {', '.join(channel['blockedBy'])}"
        elif before["flowed"] and not channel["flowed"]:
            yield f"{name}: unflowed, flowed for {seconds(channel['flowedSeconds'])} so far"
    for kind, word in (("queues", "queue"), ("channels", "producer")):
        for gone in told.get("gone", {}).get(kind, ()):
            if known.pop(f"{word} {gone}", {"flowStopped": False})["flowStopped"]:
                yield f"{word} {gone}: gone"


# Controlling.


def _steer(
    context: typer.Context,
    as_json: bool,
    method: str,
    path: str,
    body: object = None,
    *,
    say: Callable[[Any], None] | None = None,
) -> None:
    """Ask the broker for a change, and print its answer as JSON, or for people as `say` does.

    Raises:
        CommandError: the broker refuses, or cannot be reached.
    """
    answer = _broker(context).ask(method, path, body)
    if as_json:
        print_json(answer or {})
    elif say is not None:
        say(answer)


def _each_producer(context: typer.Context, what: str, names: list[str] | None, as_json: bool) -> None:
    # Only the last request prints, so that there is one JSON value.
    *others, last = [f"/{quote(name, safe='')}" for name in names or ()] or [""]
    for name in others:
        _broker(context).ask("POST", f"/api/producers{name}/{what}")
    _steer(context, as_json, "POST", f"/api/producers{last}/{what}")


_Producers = Annotated[
    list[str] | None, typer.Argument(metavar="[PRODUCER]...", help="As `qflow admin producers` names it; all if none.")
]


@admin.command()
def stop(context: typer.Context, producer: _Producers = None, as_json: AsJson = False) -> None:
    """Stop all producers, including future ones, or some."""
    _each_producer(context, "stop", producer, as_json)


@admin.command()
def start(context: typer.Context, producer: _Producers = None, as_json: AsJson = False) -> None:
    """Start all producers, or some; holds of queues stay."""
    _each_producer(context, "start", producer, as_json)


@admin.command()
def purge(
    context: typer.Context, queue: Annotated[str, typer.Argument(metavar="QUEUE")], as_json: AsJson = False
) -> None:
    """Remove the ready messages of a queue."""
    _steer(context, as_json, "POST", f"/api/queues/{quote(queue, safe='')}/purge", say=_say_removed)


_Name = Annotated[str, typer.Argument(metavar="NAME")]


@_delete.command("queue")
def _delete_queue(context: typer.Context, name: _Name, as_json: AsJson = False) -> None:
    """Delete a queue with its messages."""
    _steer(context, as_json, "DELETE", f"/api/queues/{quote(name, safe='')}", say=_say_removed)


def _say_removed(answer: dict[str, Any]) -> None:
    print(f"{count(answer['messages'], 'message')} removed")


def _argument(pair: str) -> tuple[str, object]:
    name, equals, value = pair.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"an argument is given as NAME=VALUE, not {pair!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


@_add.command("queue")
def _add_queue(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    flow_stop_size: _Bytes = None,
    flow_resume_size: _BytesResume = None,
    flow_stop_count: _Messages = None,
    flow_resume_count: _MessagesResume = None,
    capacity: _Capacity = None,
    flow_resume_capacity: _CapacityResume = None,
    durable: Annotated[bool, typer.Option("--durable", help="As in Queue.Declare.")] = False,
    auto_delete: Annotated[bool, typer.Option("--auto-delete", help="It goes with its last consumer.")] = False,
    argument: Annotated[
        list[str] | None,
        typer.Option("--argument", metavar="NAME=VALUE", help="Any other; a number if it is one; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Declare a queue; an existing one with the same settings stays."""
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
    _steer(context, as_json, "PUT", f"/api/queues/{quote(name, safe='')}", body)


@_add.command("policy")
def _add_policy(
    context: typer.Context,
    text: Annotated[str, typer.Argument(metavar="'NAME KEY=VALUE…'")],
    as_json: AsJson = False,
) -> None:
    """Set a policy, or replace the policy with the same name; existing queues follow at once."""
    try:
        told = Policy.parse(text).to_json()
    except (TypeError, ValueError) as error:
        raise CommandError(str(error), ExitCode.USAGE) from error
    body = {_camel(name): value for name, value in told.items() if name != "name"}
    body["definition"] = {_camel(name): value for name, value in told["definition"].items()}
    _steer(context, as_json, "PUT", f"/api/policies/{quote(told['name'], safe='')}", body)


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.title() for word in rest)


@_delete.command("policy")
def _delete_policy(context: typer.Context, name: _Name, as_json: AsJson = False) -> None:
    """Delete a policy; each queue then follows its other policies and arguments."""
    _steer(context, as_json, "DELETE", f"/api/policies/{quote(name, safe='')}")


@_set.command("queue")
def _set_queue(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    flow_stop_size: _Bytes = None,
    flow_resume_size: _BytesResume = None,
    flow_stop_count: _Messages = None,
    flow_resume_count: _MessagesResume = None,
    capacity: _Capacity = None,
    flow_resume_capacity: _CapacityResume = None,
    as_json: AsJson = False,
) -> None:
    """Change marks of a queue; the flow state follows at once. Marks that are not given stay."""
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
        raise CommandError("nothing to change: give at least one mark, see --help", ExitCode.USAGE)
    _steer(context, as_json, "PATCH", f"/api/queues/{quote(name, safe='')}/thresholds", given, say=_say_marks)


def _say_marks(queue: dict[str, Any]) -> None:
    print(f"{printable(queue['name'])}: {_thresholds(queue)}, {'ON' if queue['flowStopped'] else 'OFF'}")


_Scope = Annotated[str, typer.Argument(metavar="exchange|queue|user")]


@_set.command("rate")
def _set_rate(
    context: typer.Context,
    scope: _Scope,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    messages: Annotated[float | None, typer.Option(metavar="PER SECOND", help="Messages.")] = None,
    size: Annotated[float | None, typer.Option("--bytes", metavar="PER SECOND", help="Body bytes.")] = None,
    burst: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="What the rate gives in them may pass at once; 0.1.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Limit the rate of publishes to an exchange, to a queue or by a user."""
    given = {"messages": messages, "bytes": size, "burst": burst}
    body = {name: value for name, value in given.items() if value is not None}
    _steer(context, as_json, "PUT", _rate_path(scope, name), body)


@_delete.command("rate")
def _delete_rate(context: typer.Context, scope: _Scope, name: _Name, as_json: AsJson = False) -> None:
    """Delete a rate limit."""
    _steer(context, as_json, "DELETE", _rate_path(scope, name))


def _rate_path(scope: str, name: str) -> str:
    return f"/api/rate-limits/{quote(scope, safe='')}/{quote(name, safe='')}"


@admin.command("export")
def _export(context: typer.Context, _as_json: AsJson = False) -> None:
    """Print the queues, exchanges and bindings as JSON, with or without --json."""
    print_json(_broker(context).ask("GET", "/api/definitions"), indent=2)


@admin.command("import")
def _import(
    context: typer.Context,
    file: Annotated[typer.FileText, typer.Argument(metavar="FILE", help="As exported; - for standard input.")],
    as_json: AsJson = False,
) -> None:
    """Declare the objects that `export` or RabbitMQ has exported: all of them, or none."""
    try:
        document = json.load(file)
    except ValueError as error:
        raise CommandError(f"{file.name}: not JSON: {error}", ExitCode.USAGE) from error
    _steer(context, as_json, "POST", "/api/definitions", document, say=_say_imported)


def _say_imported(told: dict[str, Any]) -> None:
    parts = ", ".join(count(told[kind], kind.removesuffix("s")) for kind in ("exchanges", "queues", "bindings"))
    parts += f", {told['policies']} policies" if told["policies"] else ""
    ignored = f"; not looked at: {', '.join(told['ignored'])}" if told["ignored"] else ""
    print(f"{parts}{ignored}", file=sys.stderr)
