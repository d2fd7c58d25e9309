"""`aio_pika.connection`, with flow control."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Awaitable, Callable
from ssl import SSLContext
from typing import Any

import aio_pika.connection as _aio_pika
from aio_pika.exceptions import ConnectionClosed
from yarl import URL

from qflow_client.aio.aiormq_io import TapTransport
from qflow_client.aio.connection import TappedConnection
from qflow_client.aio_pika.channel import Channel
from qflow_client.aio_pika.flow import AIO_PIKA, ChannelFlow
from qflow_client.dropin import DropIn
from qflow_client.redaction import censored
from qflow_client.settings import ProducerSettings

__all__ = ["Connection", "connect"]

# The most bytes of the setting `name`.
_NAME_SIZE = 255


def settings_of(drop_in: DropIn, url: URL, keywords: dict[str, Any]) -> tuple[ProducerSettings, URL, dict[str, Any]]:
    """Return the settings of a connection, and its URL and keywords without them.

    Args:
        drop_in: the settings that it accepts.
        url: its URL.
        keywords: its keywords.

    Raises:
        SettingsError: a value is not allowed.
        TypeError: a setting has no meaning here.
    """
    query, rest = drop_in.split(url.query.items())
    ours, theirs = drop_in.split(keywords.items())
    # The broker's management shows aio-pika's name. Flow events and logs show the same name, up to the size limit.
    name = keywords.get("name") or url.query.get("name")
    if name and "name" not in query:
        ours.setdefault("name", str(name).encode(errors="replace")[:_NAME_SIZE].decode(errors="ignore"))
    return drop_in.settings(query, **ours), url.with_query(rest) if query else url, dict(theirs)


class Connection(TappedConnection):
    """aio-pika's `Connection`, whose channels have flow control.

    Args:
        url: aio-pika's argument; the query may also contain settings of flow control.
        loop: as aio-pika's.
        ssl_context: as aio-pika's.
        client_properties: as aio-pika's.
        kwargs: aio-pika's, and settings by the names of `ProducerSettings`.

    Raises:
        SettingsError: a setting has a value that is not allowed.
        TypeError: a connection of aio-pika does not accept one of the settings.
    """

    CHANNEL_CLASS = Channel

    # The settings that it accepts.
    _drop_in = AIO_PIKA

    #: The settings of flow control.
    flow_settings: ProducerSettings

    def __init__(
        self,
        url: URL,
        loop: asyncio.AbstractEventLoop | None = None,
        ssl_context: SSLContext | None = None,
        client_properties: Any = None,
        **kwargs: Any,
    ) -> None:
        self.flow_settings, url, kwargs = settings_of(self._drop_in, URL(url), kwargs)
        #: The flows of its channels, including closed ones (internal).
        self.flows: weakref.WeakSet[ChannelFlow] = weakref.WeakSet()
        super().__init__(url, loop=loop, ssl_context=ssl_context, client_properties=client_properties, **kwargs)

    def _made(self, tapped: TapTransport) -> None:
        tapped.tap.expects_all = True
        super()._made(tapped)

    def carrier_of(self, _channel: Any) -> TapTransport | None:
        """Return the object that transfers the frames of an open channel of aiormq (internal)."""
        return self.tapped

    async def close(self, exc: Any = ConnectionClosed) -> None:
        """Same as aio-pika's method. Tasks that wait to publish get the error that ends the connection."""
        flows = tuple(self.flows)
        for flow in flows:
            flow.left = True
        try:
            await super().close(exc)
        finally:
            for flow in flows:
                flow.ended()


async def connect(url: Any = None, *, connection_class: Any = Connection, **keywords: Any) -> Any:
    """Same as aio-pika's function; the URL's query and the keywords may also contain settings of flow control.

    Args:
        url: aio-pika's argument, for example with ``?max_producer_flow_control_wait=10&capacity=500``.
        connection_class: as aio-pika's. A class of your own has flow control if its base is `Connection` of this
            module.
        keywords: aio-pika's, and settings by the names of `ProducerSettings`, except those that aio-pika's methods
            determine.

    Raises:
        SettingsError: a setting has a value that is not allowed.
        TypeError: a connection of aio-pika does not accept one of the settings.
    """
    return await checked(_aio_pika.connect, url, connection_class=connection_class, **keywords)


async def checked(connect: Callable[..., Awaitable[Any]], url: Any, *, connection_class: Any, **keywords: Any) -> Any:
    """Call a `connect` function of aio-pika, but check the settings first, and show no password in an error.

    Args:
        connect: the function.
        url: its first argument.
        connection_class: the class of the connection.
        keywords: the other arguments.

    Raises:
        SettingsError: a setting has a value that is not allowed.
        TypeError: a connection of aio-pika does not accept one of the settings.
    """
    # aio-pika puts the keywords into the URL, and its errors would repeat them.
    drop_in = getattr(connection_class, "_drop_in", AIO_PIKA)
    drop_in.settings(**drop_in.split(keywords.items())[0])
    try:
        return await connect(url, connection_class=connection_class, **keywords)
    except (TypeError, ValueError) as error:
        refused = censored(error, url)
    # Raised outside the handler, because the original error would be the context and may contain the password.
    raise refused


def same_signature(ours: Any, theirs: Any, connection_class: type) -> None:
    """Give a function the signature of aio-pika's function, with another default connection class."""
    found = inspect.signature(theirs)
    ours.__signature__ = found.replace(
        parameters=[
            each.replace(default=connection_class) if each.name == "connection_class" else each
            for each in found.parameters.values()
        ]
    )


same_signature(connect, _aio_pika.connect, Connection)


def __getattr__(name: str) -> Any:
    return getattr(_aio_pika, name)
