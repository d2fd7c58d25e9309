"""Internals of aio-pika and aiormq that the drop-in depends on, as found in 10.2.0 and 10.2.1, 7.2.4."""

from __future__ import annotations

import inspect
import subprocess
import sys

import aio_pika
import aiormq
import aiormq.channel
import pytest
from aio_pika.abc import UnderlayChannel

PUBLISH = "body exchange routing_key properties mandatory immediate timeout wait"


def test_exchanges_publish_through_basic_publish_of_the_aiormq_channel() -> None:
    assert "channel.basic_publish(" in inspect.getsource(aio_pika.Exchange.publish)
    assert "publish" not in vars(aio_pika.RobustExchange)
    assert list(inspect.signature(aiormq.Channel.basic_publish).parameters)[1:] == PUBLISH.split()


@pytest.mark.parametrize("kind", [aio_pika.Channel, aio_pika.RobustChannel])
def test_an_aio_pika_channel_that_reports_that_it_is_open_has_its_aiormq_channel(kind: type[aio_pika.Channel]) -> None:
    assert list(inspect.signature(kind._on_open).parameters) == ["self"]
    source = inspect.getsource(aio_pika.Channel._open)
    assert source.index("self._channel = channel") < source.index("await self._on_open()")
    assert {"channel", "close_callback"} <= set(UnderlayChannel.__annotations__)


def test_the_aiormq_channel_has_the_private_attributes_that_the_drop_in_uses() -> None:
    source = inspect.getsource(aiormq.Channel)
    for name in "max_content_size", "on_return_raises", "on_return_callbacks", "number", "connection":
        assert f"self.{name}" in source, name
    assert list(inspect.signature(aiormq.channel._check_routing_key).parameters) == ["key"]
    assert list(inspect.signature(aiormq.Channel.create_future).parameters) == ["self"]


def test_aiormq_passes_the_reason_of_a_channel_close_to_a_consumer_that_is_publishing() -> None:
    # Not every release has this method. It handles calls that are cancelled inside it.
    translate = getattr(aiormq.Channel, "_raise_on_channel_close", None)
    if translate is not None:
        assert list(inspect.signature(translate).parameters) == ["self"]
        assert "except asyncio.CancelledError" in inspect.getsource(translate)


def test_the_source_code_of_aiormq_uses_its_queues_in_the_way_that_the_drop_in_needs() -> None:
    connection = vars(aiormq.Connection)
    reader = inspect.getsource(connection["_Connection__reader"])
    assert "await ch.frames.put((weight, frame))" in reader
    assert "await self.__handle_connection_blocked(frame)" in reader
    assert "await self.__handle_connection_unblocked(frame)" in reader
    assert "self.__connection_unblocked.set()" in reader
    writer = inspect.getsource(connection["_Connection__writer"])
    for use in "writer.write(channel_frame.payload)", ".should_close", ".should_drain", "channel_frame.drain()":
        assert use in writer, use
    channel = inspect.getsource(aiormq.Channel)
    for name in "self.write_queue.put(", "self.rpc_frames", "self.confirmations", "self.delivery_tag":
        assert name in channel, name


def test_importing_the_drop_in_for_aio_pika_changes_no_attribute_of_aio_pika() -> None:
    program = (
        "import aio_pika, aiormq\n"
        "def seen(): return {(k, n): v for k in (aio_pika, aio_pika.Channel, aio_pika.Connection, aio_pika.Exchange,"
        " aio_pika.RobustChannel, aio_pika.RobustConnection, aiormq.Channel, aiormq.Connection)"
        " for n, v in vars(k).items()}\n"
        "before = seen()\n"
        "import qflow_client.aio_pika\n"
        "assert before == seen()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
