"""`aio_pika.robust_connection`, with flow control."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar, overload

import aio_pika.robust_connection as _aio_pika
from aio_pika.abc import AbstractRobustConnection
from yarl import URL

from qflow_client.aio.connection import TappedRobustConnection
from qflow_client.aio_pika.connection import Connection, checked, same_signature
from qflow_client.aio_pika.flow import AIO_PIKA_ROBUST
from qflow_client.aio_pika.robust_channel import RobustChannel

__all__ = ["RobustConnection", "connect_robust"]

_RobustConnectionT = TypeVar("_RobustConnectionT", bound=AbstractRobustConnection)


class RobustConnection(Connection, TappedRobustConnection):
    """aio-pika's `RobustConnection`, with flow control in its channels. Arguments and errors: as for `Connection`."""

    CHANNEL_CLASS = RobustChannel
    _drop_in = AIO_PIKA_ROBUST

    if TYPE_CHECKING:
        # aio-pika's method, which makes a channel of `CHANNEL_CLASS`.
        def channel(
            self,
            channel_number: int | None = None,
            publisher_confirms: bool = True,
            on_return_raises: bool = False,
        ) -> RobustChannel: ...

    def __init__(self, url: URL, loop: asyncio.AbstractEventLoop | None = None, **kwargs: Any) -> None:
        super().__init__(url, loop=loop, **kwargs)

    async def close(self, exc: Any = asyncio.CancelledError) -> None:
        """Close like aio-pika. A `publish` that is blocked (flowed) raises `ChannelInvalidStateError`."""
        await super().close(exc)


@overload
async def connect_robust(
    url: URL | str | None = None, *, connection_class: type[_RobustConnectionT], **keywords: Any
) -> _RobustConnectionT: ...
@overload
async def connect_robust(url: URL | str | None = None, **keywords: Any) -> RobustConnection: ...
async def connect_robust(url: Any = None, *, connection_class: Any = RobustConnection, **keywords: Any) -> Any:
    """Connect like aio-pika. All arguments and errors are as for `connect` of this package, except `connection_class`.

    Args:
        connection_class: as for aio-pika. Your own class has flow control if it is a subclass of `RobustConnection` of
            this module.
    """
    return await checked(_aio_pika.connect_robust, url, connection_class=connection_class, **keywords)


same_signature(connect_robust, _aio_pika.connect_robust, RobustConnection)


def __getattr__(name: str) -> Any:
    return getattr(_aio_pika, name)
