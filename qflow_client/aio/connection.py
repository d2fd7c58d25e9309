"""Connections of aio-pika with a `Tap` at the socket.

`connect_async` makes a connection that the application shares with producers. `Link` makes a producer's own connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any

import aio_pika
from aiormq import ConnectionClosed as AiormqConnectionClosed
from aiormq.exceptions import (
    AuthenticationError,
    ChannelAccessRefused,
    ChannelClosed,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ConnectionCommandInvalid,
    InvalidFrameError,
    ProbableAuthenticationError,
)
from yarl import URL

from qflow_client.aio.aiormq_io import OrderAddresses, TapTransport, TapTransportFactory
from qflow_client.errors import ConnectionFailed, SettingsError
from qflow_client.recovery import is_final
from qflow_client.redaction import HARMLESS, is_harmless, shown, words_of
from qflow_client.settings import check_setting, check_timeout
from qflow_client.skin import connection_failed, lost, no_answer
from qflow_client.topology import Declaration

__all__ = [
    "TappedConnection",
    "TappedRobustConnection",
    "address_of",
    "channel_reply",
    "connect_async",
    "failure_of",
    "final",
    "open_connection",
    "words",
]

_CODES = {
    ChannelAccessRefused: 403,
    ChannelNotFoundEntity: 404,
    ChannelLockedResource: 405,
    ChannelPreconditionFailed: 406,
    # The broker's reply code if the type of an exchange is unknown.
    ConnectionCommandInvalid: 503,
}


def words(error: BaseException) -> str:
    """Return the text of an error for logs and other errors."""
    if isinstance(error, AiormqConnectionClosed) and len(error.args) == 2:
        return f"{error.args[0]} {error.args[1]}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def final(error: BaseException | None) -> bool:
    """Return True if no further attempt to connect can succeed."""
    if isinstance(error, AiormqConnectionClosed) and len(error.args) == 2:
        return is_final(int(error.args[0]), str(error.args[1]))
    if isinstance(error, (ChannelClosed, ConnectionCommandInvalid)):
        return Declaration.is_final(channel_reply(error)[0])
    # aiormq's errors for 403, and for a broker that supports none of the client's authentication methods.
    return isinstance(error, (ProbableAuthenticationError, AuthenticationError))


def channel_reply(error: ChannelClosed | ConnectionCommandInvalid) -> tuple[int, str]:
    """Return the broker's reply code and text. Some of aiormq's error classes do not contain the code."""
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return code, str(error.args[0])
    code, text = error.args
    return int(code or 0), str(text)


def failure_of(url: str, error: BaseException) -> ConnectionFailed | None:
    """Return the error to raise instead of `error`; ``None`` if `error` is a `ConnectionFailed` or not a failure."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        # If the application closes a connection, or aiormq finds it dead, aiormq cancels its own task. Its calls then
        # raise the error of that task.
        if task is not None and not task.cancelling():
            return connection_failed(url, lost("it was closed, or the broker sent nothing, not even heartbeats"))
    elif type(error) in (Exception, AiormqConnectionClosed) and not error.args:
        # The application has closed the connection.
        return connection_failed(url, lost("it was closed"))
    elif isinstance(error, Exception) and not isinstance(error, ConnectionFailed):
        return connection_failed(url, words(error))
    return None


class TappedConnection(aio_pika.Connection):
    """aio-pika's `Connection` with a `Tap`, so that producers can open channels on it."""

    #: The newest transport; ``None`` before the first connection.
    tapped: TapTransport | None = None

    def __init__(
        self,
        url: URL,
        *,
        client_properties: dict[str, Any] | None = None,
        order_addresses: OrderAddresses | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(url, **keywords)
        factory = TapTransportFactory(self._made, self.connected.is_set, order_addresses)
        # aio-pika passes `kwargs` to every connection of aiormq.
        self.kwargs = {**self.kwargs, "transport_factory": factory, "client_properties": client_properties}

    def __del__(self) -> None:
        # Without a running loop, aio-pika would create a coroutine that is never awaited, which causes a warning.
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        super().__del__()

    def _made(self, tapped: TapTransport) -> None:
        self.tapped = tapped

    async def _on_connected(self) -> None:
        # aiormq lets callers wait for the end of a block, even if the blocked connection ends. In a robust connection,
        # such a caller can hold the lock that is needed to restore its channel on the next connection.
        if self.transport is not None:
            amqp: Any = self.transport.connection
            amqp.closing.add_done_callback(lambda _: amqp._Connection__connection_unblocked.set())
        await super()._on_connected()


class TappedRobustConnection(TappedConnection, aio_pika.RobustConnection):
    """aio-pika's `RobustConnection` with a `Tap`, so that producers can open channels on it."""

    @property
    def is_closed(self) -> bool:
        """Whether the connection is closed. Also True in aio-pika's task that reconnects, if this task was cancelled.

        The task would otherwise continue after the cancellation, so the end of `asyncio.run` would wait forever for it.
        """
        task = getattr(self, "_RobustConnection__reconnection_task", None)
        return super().is_closed or (task is not None and task.cancelling() > 0 and task is asyncio.current_task())


def address_of(url: object, parameters: Mapping[str, object]) -> URL:
    """Return the URL for aio-pika, with `parameters` added to its query.

    Raises:
        SettingsError: the URL is not valid, or a parameter is not allowed.
    """
    check_setting("url", url)
    if not isinstance(url, str):
        raise SettingsError(f"url={shown(url)}: it must be one URL")
    for name, value in parameters.items():
        if name not in HARMLESS:
            raise SettingsError(f"{name}: there is no such parameter; the parameters are {', '.join(sorted(HARMLESS))}")
        if not isinstance(value, (str, int, float)) or not is_harmless(name, str(value)):
            raise SettingsError(f"{name}={shown(value)}: a parameter of a URL's query must be a text or a number")
    try:
        address = URL(url)
        # Remove the parameters that aiormq does not use, because they may be secret, and aiormq logs the whole query.
        known = [(name, value) for name, value in address.query.items() if is_harmless(name, value)]
        return address.with_query(known).update_query(parameters)  # type: ignore[arg-type]  # as just checked
    except (TypeError, ValueError) as error:
        why = words_of(error, url)
    # Raise outside the handler, so that the error has no context: the original error may contain the password.
    raise SettingsError(f"url={shown(url)}: {why}")


async def connect_async(
    url: str,
    *,
    robust: bool = False,
    timeout: float | None = None,
    ssl_context: ssl.SSLContext | None = None,
    client_properties: dict[str, Any] | None = None,
    **parameters: Any,
) -> aio_pika.Connection:
    """Connect with aio-pika, for consumers and for any number of producers: ``AsyncProducer(connection=…)``.

    Args:
        url: ``amqp://`` or ``amqps://`` URL of the broker, with aio-pika's query parameters.
        robust: True for a `RobustConnection`, which reconnects and restores consumers. Producers on this connection
            continue after a reconnect. If False, producers on the connection end when the connection is lost.
        timeout: the time limit for connecting in seconds. With ``None`` only aio-pika's own limits apply.
        ssl_context: the TLS context; by default made from the URL's parameters.
        client_properties: properties that the connection announces, such as ``connection_name``.
        parameters: further query parameters of the URL, such as ``heartbeat``.

    Returns:
        A `Connection` or `RobustConnection` of aio-pika.

    Raises:
        ConnectionFailed: connecting failed; the text gives the reason.
        SettingsError: the URL is not valid, or a parameter is not allowed.
        TypeError, ValueError: `timeout` is not a number.
    """
    check_timeout(timeout)
    kind = TappedRobustConnection if robust else TappedConnection
    connection = kind(address_of(url, parameters), ssl_context=ssl_context, client_properties=client_properties)
    await open_connection(connection, url, timeout)
    return connection


async def open_connection(connection: TappedConnection, url: str, timeout: float | None = None) -> None:
    """Connect, and close the connection again if this fails.

    Args:
        timeout: the time limit for connecting in seconds. With ``None`` only aio-pika's own limits apply.

    Raises:
        ConnectionFailed: connecting failed; the text gives the reason.
    """
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
        if isinstance(error, InvalidFrameError) and connection.tapped is not None and connection.tapped.tap.closed:
            # This error of aiormq contains neither the code nor the text of the broker's Connection.Close.
            code, _, text = connection.tapped.tap.closed.partition(" ")
            error = AiormqConnectionClosed(int(code), text)
        if (failure := failure_of(url, error)) is not None:
            raise failure from error
        raise
