"""Declares a topology and opens a publishing channel on a connection of aiormq."""

from __future__ import annotations

from typing import Any

from aiormq.exceptions import ChannelClosed, ConnectionCommandInvalid

from qflow_client.aio.connection import channel_reply, failure_of
from qflow_client.amqp.tap import Tap
from qflow_client.settings import ProducerSettings
from qflow_client.skin import connection_failed, no_confirms
from qflow_client.topology import Topology

__all__ = ["open_channel"]

_CHANNEL_MAX = 65535


async def open_channel(
    amqp: Any, tap: Tap, settings: ProducerSettings, topology: Topology | None, url: str
) -> tuple[Any, int]:
    """Make the declarations, announce a new channel to the `Tap`, and open the channel for publishing.

    Returns:
        aiormq's channel, and its number.

    Raises:
        ConnectionFailed: the broker announces no confirms, refuses a declaration, or does not open the channel.
    """
    number: int | None = None
    try:
        if settings.confirms and not _confirms(amqp):
            raise connection_failed(url, no_confirms("the broker does not announce them"))
        if topology is not None:
            await _declare(amqp, topology, url)
        number = _free_number(amqp, url)
        tap.expect(number)
        channel = await amqp.channel(channel_number=number, publisher_confirms=settings.confirms)
        if channel.is_closed or amqp.is_closed:
            raise connection_failed(url, "the channel was closed as soon as it was opened")
    except BaseException as error:
        if number is not None:
            tap.detach(number)
        # The connection may have ended during any of the calls above.
        if (failure := failure_of(url, error)) is not None:
            raise failure from error
        raise
    return channel, number


async def _declare(amqp: Any, topology: Topology, url: str) -> None:
    channel = await amqp.channel(publisher_confirms=False)
    for declaration in topology.declarations():
        try:
            await getattr(channel, declaration.method)(**declaration.arguments)
        except (ChannelClosed, ConnectionCommandInvalid) as error:
            code, text = channel_reply(error)
            if not declaration.accepts(code):
                raise connection_failed(url, declaration.refusal(f"{code} {text}")) from error
            channel = await amqp.channel(publisher_confirms=False)
    await channel.close()


def _free_number(amqp: Any, url: str) -> int:
    """Return a free channel number. The tap needs the number before the channel opens, so aiormq must not choose it."""
    taken = amqp.channels
    highest = amqp.connection_tune.channel_max or _CHANNEL_MAX
    number = max(taken, default=0) + 1
    if number > highest:
        number = next((each for each in range(1, highest + 1) if each not in taken), 0)
    if not number:
        raise connection_failed(url, f"all {highest} channels that the broker allows on a connection are in use")
    return int(number)


def _confirms(amqp: Any) -> bool:
    try:
        return bool(amqp.publisher_confirms)
    except (KeyError, TypeError):
        # The broker has announced no capabilities at all.
        return False
