"""The HTTP server, which runs on the broker's event loop.

If the API needs a token, a connection is a stranger until it sends a request with the token. If there are too many
strangers, the oldest stranger is disconnected. So strangers cannot use up all connections, and a client with the token
can connect. In each iteration of the event loop, at most one request without the token is answered. If the API needs no
token, no connection is a stranger, and only `MAX_CONNECTIONS` limits the number of connections.

Long answers, imports of definitions, and checks for event streams run in slices (see `Turns`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing, nullcontext
from functools import partial
from http import HTTPStatus
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from qflow_client.broker.broker import Broker
from qflow_client.broker.core.errors import AmqpError
from qflow_client.broker.core.listener import Listener
from qflow_client.broker.core.logs import get_logger
from qflow_client.broker.http.documents import encode, read_definitions
from qflow_client.broker.http.events import EventsRequest, Watch
from qflow_client.broker.http.guard import SAFE_HEADERS, check_origin, check_token, has_token
from qflow_client.broker.http.models import DefinitionsDocument
from qflow_client.broker.http.openapi import Operation
from qflow_client.broker.http.operations import api
from qflow_client.broker.http.pages import console_routes
from qflow_client.broker.http.problems import Problem, from_amqp, problem_response
from qflow_client.broker.http.turns import Turns

__all__ = ["HttpServer"]

_log = get_logger(__name__)


class _MalformedFilter(logging.Filter):
    """Drops log records for malformed requests, because any client could fill the log with their tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, (HttpProcessingError, web.RequestPayloadError))


_AIOHTTP_LOG = get_logger(f"{__name__}.aiohttp")
_AIOHTTP_LOG.addFilter(_MalformedFilter())


class HttpServer:
    """Serves the HTTP API of a broker. It passes each change of the total size of large answers to `count_answer`."""

    #: Maximum bytes of a request body.
    MAX_BODY = 16 * 1024 * 1024
    #: Maximum bytes of an answer in one write to the socket.
    PIECE = 256 * 1024
    #: Maximum total bytes of large answers that are sent at the same time. With a `memory_limit`, a quarter of the
    #: limit is a second maximum. Without a `memory_limit`, one larger answer is sent if no other is being sent.
    MAX_ANSWERS = 32 * 1024 * 1024
    #: Maximum seconds for which a stopping broker waits for running requests.
    STOP_GRACE = 1.0
    #: Maximum number of connections. Further connections are closed immediately.
    MAX_CONNECTIONS = 1000
    #: Maximum number of strangers: connections that have not sent the token, see `admit`.
    MAX_STRANGERS = 100
    #: Maximum number of open event streams of all clients together.
    MAX_STREAMS = 100
    #: Maximum number of open event streams from one IP address.
    MAX_STREAMS_OF_ADDRESS = 20
    #: Maximum seconds for reading a body, and for writing one piece of a large answer or an event. A slower client is
    #: disconnected.
    PATIENCE = 60.0
    #: Maximum seconds for writing a whole large answer. A slower client is disconnected.
    ANSWER_TIME = 300.0
    #: Seconds in the header ``Retry-After`` if other large answers leave no room for an answer.
    RETRY_AFTER = 10
    #: Maximum idle seconds of a connection between two requests.
    KEEP_ALIVE = 60.0
    #: Maximum seconds for which a request waits for its changes to be on disk.
    DISK_PATIENCE = 10.0

    def __init__(self, broker: Broker, count_answer: Callable[[int], None]) -> None:
        self._broker = broker
        self._report_answer = count_answer
        self._settings = broker.settings
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None
        self._port: int | None = None
        # The connections, by the protocol object of aiohttp (`Request.protocol`).
        self._connections: dict[asyncio.BaseProtocol, _Connection] = {}
        # The strangers, oldest first.
        self._strangers: dict[_Connection, None] = {}
        self._streams: set[asyncio.Task[Any]] = set()
        # Number of event streams of each IP address.
        self._streams_of: Counter[str] = Counter()
        # Allows one slice of long work in each iteration of the loop.
        self._turns = Turns()
        # Allows one request without the token in each iteration of the loop.
        self._strangers_turns = Turns()
        # Lets only one large answer be created at a time, because its creation can need more memory than the answer.
        self._making = asyncio.Lock()
        # Total bytes of the answers that are being sent in pieces.
        self._answers = 0
        self._watch = Watch(broker, self._turns)

    @property
    def port(self) -> int:
        """The port on which the server listens. Raises `RuntimeError` before the start of the server."""
        if self._port is None:
            raise RuntimeError("the broker is not running; use it in `with Broker() as broker:`")
        return self._port

    @property
    def patience(self) -> float:
        """Maximum seconds from the TCP or TLS handshake to the complete header of a connection's first request."""
        return self._settings.unauthenticated_timeout

    async def start(self) -> None:
        """Start to listen. Raise `OSError` if the address is in use or does not belong to this machine."""
        settings = self._settings
        app = web.Application(client_max_size=self.MAX_BODY, middlewares=[self._guard])
        # aiohttp uses the first route that matches. So first add the paths without parameters.
        for operation in sorted(api.operations, key=lambda operation: "{" in operation.path):
            # Without a pattern, aiohttp does not match names that contain braces.
            path = operation.path.replace("}", ":[^/]+}")
            app.router.add_route(operation.method, path, self._handler(operation))
        app.router.add_routes(console_routes())
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_AIOHTTP_LOG,
            shutdown_timeout=self.STOP_GRACE,
            keepalive_timeout=self.KEEP_ALIVE,
        )
        await self._runner.setup()
        make_handler = self._runner.server
        assert make_handler is not None
        listener = Listener(
            lambda: _Connection(make_handler(), self),
            settings.ssl_context,
            settings.unauthenticated_timeout,
            self.MAX_STRANGERS,
        )
        try:
            self._port = await listener.start(settings.http_host, cast(int, settings.http_port))
        except OSError:
            await self._runner.cleanup()
            raise
        self._listener = listener
        _log.info("HTTP on %s:%d", settings.http_host, self._port)

    async def stop(self) -> None:
        """Stop listening, and end the running requests."""
        if self._listener is not None:
            await self._listener.stop()
        for stream in self._streams:
            stream.cancel()
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        connection = self._connections.get(request.protocol)
        if connection is not None:
            connection.has_asked()
            if has_token(request, self._settings):
                self._strangers.pop(connection, None)
            else:
                await self._strangers_turns.next()
        try:
            check_origin(request, self._settings)
            response = await handler(request)
        except Problem as problem:
            response = problem_response(problem)
        except web.HTTPException as error:
            # An error of aiohttp, for example: the path or the method does not exist, or the body is too large.
            response = problem_response(Problem(error.status, error.text or error.reason))
            for name in ("Allow", "Location"):
                if name in error.headers:
                    response.headers[name] = error.headers[name]
        except web.RequestPayloadError:
            response = problem_response(Problem(HTTPStatus.BAD_REQUEST, "the body cannot be decoded"))
        except AmqpError as error:
            response = problem_response(from_amqp(error))
        except LookupError as error:
            response = problem_response(Problem(HTTPStatus.NOT_FOUND, str(error.args[0])))
        except Exception:
            _log.exception("%s %s could not be answered", request.method, request.path)
            response = problem_response(
                Problem(HTTPStatus.INTERNAL_SERVER_ERROR, "an internal error of the broker; see its log")
            )
        if response.status == HTTPStatus.UNAUTHORIZED:
            response.headers["WWW-Authenticate"] = "Bearer"
        if not response.prepared:
            response.headers.update(SAFE_HEADERS)
        return response

    def _handler(self, operation: Operation) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            if not operation.is_public:
                check_token(request, self._settings)
            parameters = operation.check_parameters(dict(request.match_info), request.query.items())
            if operation.body is not None:
                parameters["body"] = await self._body(operation, request)
            media_type = operation.media_type(request.headers.get("Accept", ""))
            parameters |= dict.fromkeys(operation.turns, self._turns) | dict.fromkeys(operation.typed, media_type)
            async with self._making if operation.is_large else nullcontext():
                if operation.is_large and _is_gone(request):
                    return web.Response()
                status, answer = await self._answer(operation, parameters)
            if isinstance(answer, EventsRequest):
                return await self._stream(request, answer.period)
            if answer is None:
                return web.Response(status=status)
            headers = {"Content-Type": media_type}
            if operation.typed:
                headers["Vary"] = "Accept"
            if len(answer) <= self.PIECE:
                return web.Response(status=status, body=answer, headers=headers)
            if operation.is_large:
                self._check_room(len(answer))
            return await self._send(request, web.StreamResponse(status=status, headers=SAFE_HEADERS | headers), answer)

        return handle

    async def _answer(
        self, operation: Operation, parameters: dict[str, Any]
    ) -> tuple[int, bytes | bytearray | EventsRequest | None]:
        """Return the status and the body. ``None`` means no body, and an `EventsRequest` means an event stream."""
        answer = operation.handler(self._broker, **parameters)
        if inspect.isawaitable(answer):
            answer = await answer
        status: int = operation.statuses[0]
        if isinstance(answer, EventsRequest):
            return status, answer
        if operation.lasts:
            await self._wait_for_disk()
        if len(operation.statuses) > 1:
            status, answer = answer
        if operation.answer is None:
            return status, None
        return status, answer if isinstance(answer, (bytes, bytearray)) else await encode(answer, self._turns)

    async def _send(
        self, request: web.Request, response: web.StreamResponse, body: bytes | bytearray
    ) -> web.StreamResponse:
        """Send a large body in pieces. Wait after each piece until the socket accepts more bytes."""
        size = len(body)
        self._count_answer(size)
        try:
            response.content_length = size
            await response.prepare(request)
            view = memoryview(body)
            async with asyncio.timeout(self.ANSWER_TIME):
                for start in range(0, size, self.PIECE):
                    async with asyncio.timeout(self.PATIENCE):
                        await response.write(bytes(view[start : start + self.PIECE]))
        except (ConnectionError, TimeoutError):
            self._cut(request)
        finally:
            self._count_answer(-size)
        return response

    def _check_room(self, size: int) -> None:
        """Raise `Problem` 503 if an answer of `size` bytes must not be sent now, see `MAX_ANSWERS`."""
        limit = self._settings.memory_limit
        most = min(self.MAX_ANSWERS, limit // 4) if limit else self.MAX_ANSWERS
        if limit and size > most:
            if most == self.MAX_ANSWERS:
                way_out = "; request single objects, or delete objects"
            else:
                way_out = f", a quarter of memory_limit={limit}; raise memory_limit, or delete objects"
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the answer has {size} bytes; at most {most} bytes are sent at once{way_out}",
            )
        if self._answers and self._answers + size > most:
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the answer has {size} bytes, and other answers of {self._answers} bytes are being sent; at most "
                f"{most} bytes are sent at once; repeat the request later",
                retry_after=self.RETRY_AFTER,
            )

    def _count_answer(self, change: int) -> None:
        self._answers += change
        self._report_answer(change)

    @staticmethod
    def _cut(request: web.Request) -> None:
        """Abort the connection of a client that has disconnected or reads too slowly."""
        if request.transport is not None:
            request.transport.abort()

    async def _body(self, operation: Operation, request: web.Request) -> Any:
        try:
            async with asyncio.timeout(self.PATIENCE):
                raw = await request.read()
        except TimeoutError:
            raise Problem(
                HTTPStatus.REQUEST_TIMEOUT, f"the body is not complete after {self.PATIENCE:g} s; send it faster"
            ) from None
        except ConnectionError:
            # The client has disconnected before the end of the body, and gets no answer.
            raise Problem(HTTPStatus.BAD_REQUEST, "the body is not complete") from None
        if operation.takes is not DefinitionsDocument:
            return operation.check_body(request.content_type, raw)
        operation.check_content_type(request.content_type)
        return await read_definitions(raw, self._turns)

    async def _wait_for_disk(self) -> None:
        """Wait until all declarations and deletions are on disk. After `DISK_PATIENCE` seconds, raise `Problem` 503."""
        try:
            async with asyncio.timeout(self.DISK_PATIENCE):
                await self._broker.wait_until_durable_async(topology_only=True)
        except TimeoutError:
            alarms = self._broker.alarms
            why = alarms.get("disk") or alarms.get("disk_space") or "the disk does not answer"
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the change applies, but is not on disk after {self.DISK_PATIENCE:g} s, and is lost if the "
                f"broker ends before it is written: {why}; correct this, and repeat the request",
            ) from None

    async def _stream(self, request: web.Request, period: float) -> web.StreamResponse:
        address = request.remote or ""
        if self._streams_of[address] >= self.MAX_STREAMS_OF_ADDRESS or len(self._streams) >= self.MAX_STREAMS:
            raise Problem(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{len(self._streams)} event streams are open, {self._streams_of[address]} of them from {address}; at "
                f"most {self.MAX_STREAMS} may be open, and {self.MAX_STREAMS_OF_ADDRESS} from one address; close one",
            )
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        self._streams_of[address] += 1
        response = web.StreamResponse(headers=SAFE_HEADERS)
        response.content_type = "text/event-stream"
        try:
            await response.prepare(request)
            # Without events, only a write every 15 s would notice a disconnect, so `events` also calls `_is_gone`.
            async with aclosing(self._watch.events(period, partial(_is_gone, request))) as events:
                async for piece in events:
                    async with asyncio.timeout(self.PATIENCE):
                        await response.write(piece)
        except (ConnectionError, TimeoutError):
            self._cut(request)
        finally:
            self._streams.discard(task)
            self._streams_of[address] -= 1
            if not self._streams_of[address]:
                del self._streams_of[address]
        return response

    def admit(self, connection: _Connection, handler: asyncio.BaseProtocol) -> bool:
        """Add a connection. At `MAX_STRANGERS`, first close the oldest stranger. Return False at `MAX_CONNECTIONS`."""
        if len(self._strangers) >= self.MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            _log.debug("HTTP: %d connections have not shown the token: the oldest is closed", len(self._strangers))
            oldest.abort()
        if len(self._connections) >= self.MAX_CONNECTIONS:
            _log.warning("HTTP: refused, there are %d connections", self.MAX_CONNECTIONS)
            return False
        self._connections[handler] = connection
        if self._settings.http_token is not None:
            self._strangers[connection] = None
        return True

    def forget(self, connection: _Connection, handler: asyncio.BaseProtocol) -> bool:
        """Forget a connection that has ended. Return True if the connection was admitted."""
        self._strangers.pop(connection, None)
        return self._connections.pop(handler, None) is not None


def _is_gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


class _Connection(asyncio.Protocol):
    """Passes a socket's events to aiohttp, and limits the time until the first header, which aiohttp does not limit."""

    def __init__(self, handler: asyncio.Protocol, server: HttpServer) -> None:
        self._handler = handler
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        if not self._server.admit(self, self._handler):
            transport.abort()
            return
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(self._server.patience, transport.abort)
        self._handler.connection_made(transport)

    def abort(self) -> None:
        """Close the connection immediately, and forget it."""
        self._server.forget(self, self._handler)
        self.has_asked()
        if self._transport is not None:
            self._handler.connection_lost(None)
            self._transport.abort()

    def has_asked(self) -> None:
        """Stop the timer for the first header. Between later requests, aiohttp applies `HttpServer.KEEP_ALIVE`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._server.forget(self, self._handler):
            self.has_asked()
            self._handler.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self._handler.eof_received()

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()
