"""`aio_pika.robust_connection`, with flow control."""

from __future__ import annotations

import asyncio
from typing import Any

import aio_pika.robust_connection as _aio_pika
from yarl import URL

from qflow_client.aio.connection import TappedRobustConnection
from qflow_client.aio_pika.connection import Connection, checked, same_signature
from qflow_client.aio_pika.flow import AIO_PIKA_ROBUST
from qflow_client.aio_pika.robust_channel import RobustChannel

__all__ = ["RobustConnection", "connect_robust"]


class RobustConnection(Connection, TappedRobustConnection):
    """aio-pika's `RobustConnection`, whose channels have flow control.

    Args:
        url: aio-pika's argument; the query may also contain settings of flow control.
        loop: as aio-pika's.
        kwargs: aio-pika's, and settings by the names of `ProducerSettings`.

    Raises:
        SettingsError: a setting has a value that is not allowed.
        TypeError: a connection of aio-pika does not accept one of the settings.
    """

    CHANNEL_CLASS = RobustChannel
    _drop_in = AIO_PIKA_ROBUST

    def __init__(self, url: URL, loop: asyncio.AbstractEventLoop | None = None, **kwargs: Any) -> None:
        super().__init__(url, loop=loop, **kwargs)

    async def close(self, exc: Any = asyncio.CancelledError) -> None:
        """Same as aio-pika's method. Tasks that wait to publish get the error that ends the connection."""
        await super().close(exc)


async def connect_robust(url: Any = None, *, connection_class: Any = RobustConnection, **keywords: Any) -> Any:
    """Same as aio-pika's function; the URL's query and the keywords may also contain settings of flow control.

    Args:
        url: aio-pika's argument, for example with ``?max_producer_flow_control_wait=10&capacity=500``.
        connection_class: as aio-pika's. A class of your own has flow control if its base is `RobustConnection` of this
            module.
        keywords: aio-pika's, and settings by the names of `ProducerSettings`, except those that aio-pika's methods
            determine.

    Raises:
        SettingsError: a setting has a value that is not allowed.
        TypeError: a connection of aio-pika does not accept one of the settings.
    """
    return await checked(_aio_pika.connect_robust, url, connection_class=connection_class, **keywords)


same_signature(connect_robust, _aio_pika.connect_robust, RobustConnection)


def __getattr__(name: str) -> Any:
    return getattr(_aio_pika, name)
