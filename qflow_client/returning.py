"""Probes the first host while a producer is connected to another host, and lets the producer return to the first (E15).

A probe is the beginning of a connection. Without TLS, the host has to answer the protocol header. With TLS, an answer
to the handshake is enough, even an alert, because the probe has no certificate. An accepted TCP connection is not
enough, because the kernel accepts connections even for a suspended broker. The probe sends no secrets.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

from qflow_client.amqp.frames import METHOD_FRAME
from qflow_client.background import BackgroundCall, Timer
from qflow_client.recovery import Reconnection, Return
from qflow_client.settings import ProducerSettings

__all__ = ["Returner", "answers"]

_HEADER = b"AMQP\x00\x00\x09\x01"
_PORTS = {"amqp": 5672, "amqps": 5671}


def answers(url: str, timeout: float) -> bool:
    """Return True if the broker of a URL answers a probe. Each network operation may block for `timeout` seconds."""
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    try:
        with socket.create_connection((parts.hostname, parts.port or _PORTS[scheme]), timeout) as sock:
            if scheme == "amqps":
                # Do not verify the certificate here, because the producer verifies it when it connects.
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
                context.wrap_socket(sock, server_hostname=parts.hostname).close()
                return True
            sock.sendall(_HEADER)
            return sock.recv(1) == bytes((METHOD_FRAME,))
    except ssl.SSLError as error:
        # A broker that requires a client certificate answers with an alert.
        return "ALERT" in (error.reason or "")
    except OSError:
        return False


class Returner:
    """Probes the first host on a separate thread, and ends the current connection when the producer should return.

    All methods must be called on the thread or loop of the connection.

    Args:
        call_later, post, leave: as for `qflow_client.upkeep.Upkeep`.
    """

    def __init__(
        self,
        reconnection: Reconnection,
        settings: ProducerSettings,
        call_later: Callable[[float, Callable[[], None]], Timer],
        post: Callable[[Callable[[], object]], object],
        leave: Callable[[str], object],
    ) -> None:
        self._reconnection = reconnection
        self._return = Return(settings, reconnection.hosts)
        self._call_later = call_later
        self._post = post
        self._leave = leave
        probe = partial(answers, reconnection.first_url, settings.connect_timeout)
        self._probe: BackgroundCall[object] = BackgroundCall(probe, f"qflow-probe {settings.name}")
        # The timer of the latest probe; ``None`` if no probe was planned on this connection.
        self._timer: Timer | None = None
        self._is_open = False
        # When the last connection ended; 0 before.
        self._ended_at = 0.0

    def begin(self) -> None:
        self._is_open = True
        host = self._reconnection.host
        # If no host could be reached for a time, this time is not a part of the stay on the first host.
        self._return.opened(host, self._ended_at if host else time.monotonic())
        self._probe_later()

    def served_until(self, now: float) -> None:
        """Record when the connected host began to be silent or to block the connection, which now ends for that."""
        self._return.served_until(now)

    def end(self) -> None:
        if self._is_open:
            self._is_open, self._ended_at = False, time.monotonic()
        self._probe.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _probe_later(self) -> None:
        if self._return.period is not None and self._reconnection.host:
            self._timer = self._call_later(self._return.period, self._ask)

    def _ask(self) -> None:
        self._probe.ask(lambda answer: self._post(partial(self._answered, answer)))

    def _answered(self, answer: object) -> None:
        if not self._is_open:
            return
        if self._return.probed(answer is True, time.monotonic()):
            self._reconnection.move_to_first()
            self._leave("the first host answers again")
        else:
            self._probe_later()
