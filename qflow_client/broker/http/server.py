"""The HTTP server, on the broker's own loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from qflow_client.broker.errors import AmqpError
from qflow_client.broker.http.events import EventStream, encode
from qflow_client.broker.http.guard import SAFE_HEADERS, check_origin, check_token
from qflow_client.broker.http.openapi import Operation
from qflow_client.broker.http.operations import api
from qflow_client.broker.http.pages import console_routes
from qflow_client.broker.http.problems import Problem, from_amqp, problem_response
from qflow_client.broker.server import cannot_listen

if TYPE_CHECKING:
    from qflow_client.broker.broker import Broker

__all__ = ["HttpServer"]

_log = logging.getLogger(__name__)


class HttpServer:
    """Serves a broker's API.

    Args:
        broker: which; its settings say where.
    """

    #: Bytes of the largest body that is taken.
    MAX_BODY = 16 * 1024 * 1024
    #: Seconds that requests have to end when the broker stops.
    STOP_GRACE = 1.0

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._settings = broker.settings
        self._runner: web.AppRunner | None = None
        self._port: int | None = None
        # Event streams, which end when the broker stops.
        self._streams: set[asyncio.Task[Any]] = set()

    @property
    def port(self) -> int:
        """The port that it listens on.

        Raises:
            RuntimeError: it has not been started.
        """
        if self._port is None:
            raise RuntimeError("the broker does not run yet; use it in `with Broker() as broker:`")
        return self._port

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address is in use or not ours.
        """
        settings = self._settings
        app = web.Application(client_max_size=self.MAX_BODY, middlewares=[self._guard])
        # What stands in a path literally comes before what may stand for anything.
        for operation in sorted(api.operations, key=lambda operation: "{" in operation.path):
            app.router.add_route(operation.method, operation.path, self._handler(operation))
        app.router.add_routes(console_routes())
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=self.STOP_GRACE)
        await self._runner.setup()
        site = web.TCPSite(self._runner, settings.http_host, settings.http_port, ssl_context=settings.ssl_context)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise cannot_listen(settings.http_host, cast(int, settings.http_port), error) from error
        self._port = self._runner.addresses[0][1]
        _log.info("HTTP on %s:%d", settings.http_host, self._port)

    async def stop(self) -> None:
        """Stop listening, and end what is going on."""
        for stream in self._streams:
            stream.cancel()
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            check_origin(request, self._settings)
            response = await handler(request)
        except Problem as problem:
            response = problem_response(problem)
        except web.HTTPException as error:
            # Of aiohttp: no such path or method, a body that is too large.
            response = problem_response(Problem(error.status, error.text or error.reason))
            for name in ("Allow", "Location"):
                if name in error.headers:
                    response.headers[name] = error.headers[name]
        except AmqpError as error:
            response = problem_response(from_amqp(error))
        except LookupError as error:
            response = problem_response(Problem(HTTPStatus.NOT_FOUND, str(error.args[0])))
        except Exception:
            _log.exception("%s %s could not be answered", request.method, request.path)
            response = problem_response(Problem(HTTPStatus.INTERNAL_SERVER_ERROR, "the broker failed; see its log"))
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
                parameters["body"] = operation.check_body(request.content_type, await request.read())
            answer = operation.handler(self._broker, **parameters)
            if isinstance(answer, EventStream):
                return await self._stream(request, answer)
            status = operation.statuses[0]
            if len(operation.statuses) > 1:
                status, answer = answer
            if operation.answer is None:
                return web.Response(status=status)
            body = answer if isinstance(answer, bytes) else await encode(answer)
            return web.Response(status=status, body=body, headers={"Content-Type": operation.media_type})

        return handle

    async def _stream(self, request: web.Request, stream: EventStream) -> web.StreamResponse:
        response = web.StreamResponse(headers=SAFE_HEADERS)
        response.content_type = "text/event-stream"
        await response.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            async for event in stream.events():
                await response.write(event)
        except ConnectionError:
            # Who listened has gone.
            pass
        finally:
            self._streams.discard(task)
        return response
