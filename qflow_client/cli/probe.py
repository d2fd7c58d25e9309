"""A readiness probe over HTTP for a command that runs until it is stopped.

Every path answers 200 or 503, as `qflow_client.health.wsgi_readiness` says. A connection gets one answer and lasts for
five seconds at most, and there are at most 50 at a time, so that nothing keeps probes out for long.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from qflow_client.cli.errors import CommandError
from qflow_client.health import HasHealth, wsgi_readiness

__all__ = ["readiness_probe"]

# Connections at a time, and seconds that each may last.
_MOST = 50
_LONGEST = 5.0


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(_MOST)
        super().__init__(address, handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return False, so that the connection is closed, if there are too many."""
        return self._free.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        end = threading.Timer(_LONGEST, self._end, (request,))
        end.daemon = True
        try:
            end.start()
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._free.release()

    def _end(self, request: socket.socket) -> None:
        # It may have ended by itself.
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that goes away is no error of the command's."""


@contextmanager
def readiness_probe(source: HasHealth, host: str, port: int) -> Iterator[str]:
    """Answer probes for the time of a block, which gets the URL.

    Args:
        source: whose health it is.
        host: the address to listen on.
        port: 0 for a free one.

    Raises:
        CommandError: the address cannot be listened on.
    """
    answer = wsgi_readiness(source)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            def start(status: str, headers: list[tuple[str, str]]) -> None:
                self.send_response(int(status.partition(" ")[0]))
                for name, value in headers:
                    self.send_header(name, value)
                self.end_headers()

            self.wfile.writelines(answer({}, start))

        def log_message(self, *_: Any) -> None:
            pass

    try:
        server = _Server((host, port), Handler)
    except (OSError, OverflowError) as error:
        raise CommandError(f"readiness on {host}:{port}: {getattr(error, 'strerror', None) or error}") from error
    with server:
        thread = threading.Thread(target=server.serve_forever, name="qflow-readiness", daemon=True)
        thread.start()
        try:
            yield f"http://{host}:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()
