"""aio-pika's own connections, with the tap at their sockets."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import aio_pika
from aiormq import ConnectionClosed as AiormqConnectionClosed
from aiormq.exceptions import AuthenticationError, ProbableAuthenticationError
from yarl import URL

from qflow_client.aio.aiormq_io import TapTransport, TapTransportFactory
from qflow_client.errors import ConnectionFailed, SettingsError
from qflow_client.recovery import is_final
from qflow_client.settings import hide_password
from qflow_client.skin import connection_failed, no_answer

__all__ = ["TappedConnection", "TappedRobustConnection", "connect_async", "final", "words"]


def words(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, AiormqConnectionClosed) and len(error.args) == 2:
        return f"{error.args[0]} {error.args[1]}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def final(error: BaseException | None) -> bool:
    """Whether no further try to connect can do better."""
    if isinstance(error, AiormqConnectionClosed) and len(error.args) == 2:
        return is_final(int(error.args[0]), str(error.args[1]))
    # aiormq's words for 403, and for a broker with which no way of authentication is shared.
    return isinstance(error, (ProbableAuthenticationError, AuthenticationError))


class _Tapped:
    """What both kinds of connection have in common."""

    #: The socket of the present connection; ``None`` until there is one.
    tapped: TapTransport | None = None
    # aio-pika's arguments for every connection that aiormq makes.
    kwargs: Any
    # Set while the connection is open.
    connected: asyncio.Event
    close_callbacks: Any

    def _tap(self, client_properties: dict[str, Any] | None) -> None:
        factory = TapTransportFactory(self._made, self.connected.is_set)
        self.kwargs = {**self.kwargs, "transport_factory": factory, "client_properties": client_properties}
        self.close_callbacks.add(self._on_closed)

    def _made(self, tapped: TapTransport) -> None:
        self.tapped = tapped

    def _on_closed(self, *_: Any) -> None:
        # aiormq is not relied upon to close the socket where the broker has closed the connection.
        if self.tapped is not None:
            self.tapped.abort()


class TappedConnection(_Tapped, aio_pika.Connection):
    """aio-pika's connection, on which producers can be opened."""

    def __init__(self, url: URL, *, client_properties: dict[str, Any] | None = None, **keywords: Any) -> None:
        super().__init__(url, **keywords)
        self._tap(client_properties)


class TappedRobustConnection(_Tapped, aio_pika.RobustConnection):
    """aio-pika's robust connection, on which producers can be opened."""

    def __init__(self, url: URL, *, client_properties: dict[str, Any] | None = None, **keywords: Any) -> None:
        super().__init__(url, **keywords)
        self._tap(client_properties)


async def connect_async(
    url: str,
    *,
    robust: bool = False,
    timeout: float | None = None,
    ssl_context: ssl.SSLContext | None = None,
    client_properties: dict[str, Any] | None = None,
    **parameters: Any,
) -> aio_pika.Connection:
    """Connect with aio-pika, ready for consumers and for any number of producers: ``AsyncProducer(connection=…)``.

    Args:
        url: ``amqp://`` or ``amqps://`` URL of the broker; the query is aio-pika's.
        robust: give aio-pika's `RobustConnection`, which reconnects and restores what consumes. Producers on it go on
            when it does; on any other, they end with it.
        timeout: seconds that connecting may take; ``None`` for no limit of ours.
        ssl_context: for TLS; made from the URL's parameters unless given.
        client_properties: what the connection says of itself, such as ``connection_name``.
        parameters: more parameters of the URL's query, such as ``heartbeat``.

    Returns:
        aio-pika's own object, a `Connection` or `RobustConnection`.

    Raises:
        ConnectionFailed: it cannot be had, and why.
        SettingsError: the URL is none.
    """
    try:
        address = URL(url)
        if address.scheme not in ("amqp", "amqps"):
            raise ValueError("its scheme must be amqp or amqps")
        address = address.update_query(parameters)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"url={hide_password(str(url))!r}: {error}") from error
    kind = TappedRobustConnection if robust else TappedConnection
    connection = kind(address, ssl_context=ssl_context, client_properties=client_properties)
    limit = asyncio.timeout(timeout)
    try:
        async with limit:
            await connection.connect()
    except BaseException as error:
        if connection.tapped is not None:
            connection.tapped.abort()
        await connection.close()
        if isinstance(error, TimeoutError) and limit.expired():
            assert timeout is not None
            raise no_answer(url, timeout) from None
        if isinstance(error, Exception) and not isinstance(error, ConnectionFailed):
            raise connection_failed(url, words(error)) from error
        raise
    return connection
