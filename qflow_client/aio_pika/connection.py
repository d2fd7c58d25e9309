"""`aio_pika.connection`, with flow control."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Awaitable, Callable
from ssl import SSLContext
from typing import TYPE_CHECKING, Any, TypeVar, overload

import aio_pika.connection as _aio_pika
from aio_pika.abc import AbstractConnection
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

# Maximum size of the setting `name` in bytes.
_NAME_SIZE = 255

_ConnectionT = TypeVar("_ConnectionT", bound=AbstractConnection)


def settings_of(drop_in: DropIn, url: URL, keywords: dict[str, Any]) -> tuple[ProducerSettings, URL, dict[str, Any]]:
    """Return the settings of a connection, its URL without settings, and its keywords without settings."""
    query, rest = drop_in.split(url.query.items())
    ours, theirs = drop_in.split(keywords.items())
    # If aio-pika's connection has a name, which the broker's management shows, use it in flow events and logs too.
    name = keywords.get("name") or url.query.get("name")
    if name and "name" not in query:
        ours.setdefault("name", str(name).encode(errors="replace")[:_NAME_SIZE].decode(errors="ignore"))
    # Include the names of aio-pika's parameters, because a misspelt setting is one of them, and gets a warning.
    names = {each: "…" for each, _ in rest if each not in drop_in.SETTINGS}
    return drop_in.settings(names | query, **ours), url.with_query(rest) if query else url, dict(theirs)


class Connection(TappedConnection):
    """aio-pika's `Connection`, with flow control in its channels.

    Args:
        url: as for aio-pika. The query may also contain settings of flow control.
        kwargs: keywords of aio-pika, and settings of `ProducerSettings`.

    Raises:
        SettingsError: the value of a setting is not allowed.
        TypeError: a setting is not allowed for connections of aio-pika.
    """

    CHANNEL_CLASS = Channel

    # The settings that the connection accepts.
    _drop_in = AIO_PIKA

    flow_settings: ProducerSettings

    if TYPE_CHECKING:
        # aio-pika's method, which makes a channel of `CHANNEL_CLASS`.
        def channel(
            self,
            channel_number: int | None = None,
            publisher_confirms: bool = True,
            on_return_raises: bool = False,
        ) -> Channel: ...

    def __init__(
        self,
        url: URL,
        loop: asyncio.AbstractEventLoop | None = None,
        ssl_context: SSLContext | None = None,
        client_properties: Any = None,
        **kwargs: Any,
    ) -> None:
        self.flow_settings, url, kwargs = settings_of(self._drop_in, URL(url), kwargs)
        #: Internal: the `ChannelFlow` of each channel that was opened on this connection, even if it is closed.
        self.flows: weakref.WeakSet[ChannelFlow] = weakref.WeakSet()
        super().__init__(url, loop=loop, ssl_context=ssl_context, client_properties=client_properties, **kwargs)

    def _made(self, tapped: TapTransport) -> None:
        tapped.tap.expects_all = True
        super()._made(tapped)

    def carrier_of(self, _channel: Any) -> TapTransport | None:
        """Return the object that transfers the frames of an open channel of aiormq (internal)."""
        return self.tapped

    async def close(self, exc: Any = ConnectionClosed) -> None:
        """Close like aio-pika. Blocked (flowed) calls of `publish` raise `ChannelInvalidStateError`."""
        flows = tuple(self.flows)
        for flow in flows:
            flow.left = True
        try:
            await super().close(exc)
        finally:
            for flow in flows:
                flow.ended()


@overload
async def connect(
    url: URL | str | None = None, *, connection_class: type[_ConnectionT], **keywords: Any
) -> _ConnectionT: ...
@overload
async def connect(url: URL | str | None = None, **keywords: Any) -> Connection: ...
async def connect(url: Any = None, *, connection_class: Any = Connection, **keywords: Any) -> Any:
    """Connect like aio-pika. The URL's query and the keywords may also contain settings of flow control.

    Args:
        url: as for aio-pika, for example with ``?max_producer_flow_control_wait=10&capacity=500``.
        connection_class: as for aio-pika. Your own class has flow control if it is a subclass of `Connection` of this
            module.
        keywords: keywords of aio-pika, and settings of `ProducerSettings`. Settings that aio-pika itself has in another
            form are not accepted.

    Raises:
        SettingsError: the value of a setting is not allowed.
        TypeError: a setting is not allowed for connections of aio-pika.
    """
    return await checked(_aio_pika.connect, url, connection_class=connection_class, **keywords)


async def checked(connect: Callable[..., Awaitable[Any]], url: Any, *, connection_class: Any, **keywords: Any) -> Any:
    """Check the settings in the keywords, and then call a `connect` function of aio-pika. Errors show no password."""
    # Check the keywords here, because aio-pika puts them into the URL, and the errors of aio-pika would show them.
    drop_in = getattr(connection_class, "_drop_in", AIO_PIKA)
    drop_in.settings(**drop_in.split(keywords.items())[0])
    made: list[Any] = []

    def make(*arguments: Any, **options: Any) -> Any:
        made.append(connection_class(*arguments, **options))
        return made[-1]

    try:
        return await connect(url, connection_class=make, **keywords)
    except asyncio.CancelledError:
        # Otherwise a task of aio-pika's robust connection would continue to connect, and hang `asyncio.run` at its end.
        for connection in made:
            try:
                await connection.close()
            finally:
                # aiormq may have just opened a connection, which aio-pika has not yet stored.
                if (tapped := getattr(connection, "tapped", None)) is not None:
                    tapped.abort()
        raise
    except (TypeError, ValueError) as error:
        refused = censored(error, url)
    # Raise outside the handler, so that the error has no context: the original error may contain the password.
    raise refused


def same_signature(ours: Any, theirs: Any, connection_class: type) -> None:
    """Give `ours` the signature of `theirs`, but with `connection_class` as the default connection class."""
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
