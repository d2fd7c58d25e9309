"""`pika.connection`, with connection parameters that accept the settings of flow control."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pika
import pika.connection

from qflow_client.pika.channel import Channel
from qflow_client.pika.flow import PIKA, ConnectionFlow
from qflow_client.pika.mirror import mirror, passed_on
from qflow_client.redaction import censored

__all__ = ["ConnectionParameters", "FlowedConnection", "URLParameters"]


class ConnectionParameters(pika.ConnectionParameters):
    """pika's `ConnectionParameters`, which also accept settings of flow control.

    Args:
        keywords: keywords of pika, and settings of `ProducerSettings`. Settings for which pika itself has options or
            methods are not accepted. Examples are ``exchange``, ``routing_key``, ``mandatory``, ``confirms``,
            ``message_ids``, ``connect_timeout`` and ``url``. ``retry_delay`` is pika's option, not the setting of the
            same name.

    Raises:
        SettingsError: the value of a setting is not allowed.
        TypeError: a setting is not allowed for connections of pika.
    """

    __slots__ = ("flow_settings",)

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        ours, theirs = PIKA.split(keywords.items())
        super().__init__(*arguments, **dict(theirs))
        self.flow_settings = PIKA.settings(**ours)

    # Show pika's signature. Its last parameter, ``**kwargs``, also stands for the settings.
    __init__.__signature__ = inspect.signature(  # type: ignore[attr-defined]  # `inspect` reads this attribute
        pika.ConnectionParameters.__init__
    )


class URLParameters(pika.URLParameters):
    """pika's `URLParameters`, whose query may also contain settings of flow control.

    Args:
        url: as for pika, for example with ``?max_producer_flow_control_wait=10&capacity=500``.

    Raises:
        SettingsError: the value of a setting is not allowed.
        TypeError: a setting is not allowed for connections of pika.
    """

    __slots__ = ("flow_settings",)

    def __init__(self, url: str) -> None:
        try:
            settings, url = PIKA.of_url(url)
            super().__init__(url)
        except (AttributeError, SyntaxError, TypeError, ValueError) as error:
            refused = censored(error, url)
        else:
            self.flow_settings = settings
            return
        raise refused


class FlowedConnection:
    """A mixin that adds flow control to the channels of an adapter of pika. This mixin must be the first base class."""

    def _init_connection_state(self) -> None:
        super()._init_connection_state()  # type: ignore[misc]  # the adapter's
        # Register the callbacks of flow control here, after pika's own callbacks and before those of the application.
        ConnectionFlow.of(self)

    def channel(self, channel_number: int | None = None, on_open_callback: Any = None) -> Any:
        ConnectionFlow.of(self).check_process()
        return super().channel(channel_number, on_open_callback)  # type: ignore[misc]  # the adapter's

    def close(self, reply_code: int = 200, reply_text: str = "Normal shutdown") -> None:
        ConnectionFlow.of(self).check_process()
        super().close(reply_code, reply_text)  # type: ignore[misc]  # the adapter's

    def _create_channel(self, channel_number: int, on_open_callback: Any) -> Channel:
        return Channel(self, channel_number, on_open_callback)


def follow(connection: Any) -> None:
    """Add flow control to all channels that a connection of pika opens from now on (internal)."""
    ConnectionFlow.of(connection)
    connection._create_channel = partial(Channel, connection)


def __getattr__(name: str) -> Any:
    return passed_on(pika.connection, name)


mirror(__name__, pika.connection)
