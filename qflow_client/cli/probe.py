"""An HTTP readiness probe for a command that runs until it is stopped.

Every path gets the same answer, with the status 200 or 503; see `qflow_client.health.wsgi_readiness`. Each
connection gets one answer, and lasts at most five seconds. At most 50 connections are open at the same time. So idle
connections can block probes only for a short time.
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

# Maximum number of open connections, and maximum seconds that a connection lasts.
_MOST = 50
_MAX_SECONDS = 5.0


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(_MOST)
        self.address_family = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][
            0
        ]
        super().__init__((host, port), handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return False if there are too many connections. In this case the base class closes the new connection."""
        return self._free.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for the connection. If this fails, do not count the connection: the base class closes it."""
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        end = threading.Timer(_MAX_SECONDS, self._end, (request,))
        end.daemon = True
        try:
            # The timer ends a connection that lasts too long. If the timer cannot start, close the connection now.
            end.start()
            super().process_request_thread(request, client_address)
        except RuntimeError:
            self.shutdown_request(request)
        finally:
            end.cancel()
            self._free.release()

    def _end(self, request: socket.socket) -> None:
        # The connection may already be closed.
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error, because a client may disconnect at any time."""


@contextmanager
def readiness_probe(source: HasHealth, host: str, port: int) -> Iterator[str]:
    """Report the readiness of `source` over HTTP during the ``with`` block, and yield the URL to probe."""
    answer = wsgi_readiness(source)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            def start(status: str, headers: list[tuple[str, str]]) -> None:
                self.send_response(int(status.partition(" ")[0]))
                for name, value in headers:
                    self.send_header(name, value)
                self.end_headers()

            body = answer({}, start)
            if self.command != "HEAD":
                self.wfile.writelines(body)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    try:
        server = _Server(host, port, Handler)
    except (OSError, OverflowError, UnicodeError) as error:
        raise CommandError(
            f"cannot answer readiness probes on {host}:{port}: {getattr(error, 'strerror', None) or error}"
        ) from error
    with server:
        thread = threading.Thread(target=server.serve_forever, name="qflow-readiness", daemon=True)
        thread.start()
        try:
            yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()
