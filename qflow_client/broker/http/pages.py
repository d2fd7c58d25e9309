"""Serves the files of the broker's web console."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from aiohttp import web

__all__ = ["console_routes"]

_FOLDER = Path(__file__).with_name("console")
_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


def console_routes() -> Iterator[web.RouteDef]:
    """Yield a route for each console file with a suffix in `_TYPES`. The path ``/`` serves ``index.html``."""
    for path in sorted(_FOLDER.rglob("*")):
        kind = _TYPES.get(path.suffix)
        if kind is None:
            continue
        name = path.relative_to(_FOLDER).as_posix()
        yield web.get("/" if name == "index.html" else f"/console/{name}", _handler(path.read_bytes(), kind))


def _handler(content: bytes, kind: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(body=content, content_type=kind, charset="utf-8")

    return handle
