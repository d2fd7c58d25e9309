"""The adapter for Twisted. The tox environments for pika install Twisted."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from importlib import import_module
from typing import Any

import pytest

import qflow_client.pika as pika
from qflow_client import ProducerFlowed
from tests.integration.producer.processes import in_child
from tests.integration.producer.tools import PATIENCE, bodies

from .tools import refused

pytest.importorskip("twisted")


def test_J7_a_stop_is_answered_with_flow_ok_and_the_deferred_of_a_publish_fails(broker, wire):
    adapter = import_module("qflow_client.pika.adapters.twisted_connection")
    protocol = import_module("twisted.internet.protocol")
    ready: Future[Any] = Future()
    closed = threading.Event()

    def run() -> None:
        loop = asyncio.new_event_loop()
        reactor = import_module("twisted.internet.asyncioreactor").AsyncioSelectorReactor(loop)

        def connected(connection: Any) -> None:
            connection.ready.addCallback(lambda connection: connection.channel()).addCallback(
                lambda channel: ready.set_result((reactor, connection, channel))
            )
            connection.ready.addErrback(ready.set_exception)

        creator = protocol.ClientCreator(
            reactor, adapter.TwistedProtocolConnection, pika.URLParameters(broker.url), custom_reactor=reactor
        )
        creator.connectTCP("127.0.0.1", broker.port).addCallback(connected)
        reactor.run(installSignalHandlers=False)
        loop.close()
        closed.set()

    threading.Thread(target=run, name="reactor", daemon=True).start()
    reactor, connection, channel = ready.result(PATIENCE)

    def do(function: Any) -> Any:
        """Call a function in the reactor, and return its result or the result of its Deferred."""
        result: Future[Any] = Future()

        def call() -> None:
            found = function()
            if hasattr(found, "addCallbacks"):
                found.addCallbacks(result.set_result, lambda failure: result.set_exception(failure.value))
            else:
                result.set_result(found)

        reactor.callFromThread(call)
        return result.result(PATIENCE)

    assert isinstance(channel, adapter.TwistedChannel)
    in_child(lambda: refused(lambda: channel._channel.basic_publish("", "q", b"child"), connection.channel))
    do(lambda: channel.confirm_delivery())
    do(lambda: channel.basic_publish("", "q", b"before"))
    told = threading.Event()
    do(lambda: channel.on_flow(lambda event: None if event.flowed else told.set()))
    broker.flow(False)
    wire.wait_for("in", "Channel.FlowOk")
    with pytest.raises(ProducerFlowed):
        do(lambda: channel.basic_publish("", "q", b"refused"))
    assert do(lambda: channel.flow_state).flowed
    broker.flow(True)
    assert told.wait(PATIENCE)
    do(lambda: channel.basic_publish("", "q", b"after"))
    assert bodies(broker) == [b"before", b"after"]
    do(connection.close)
    reactor.callFromThread(reactor.stop)
    assert closed.wait(PATIENCE)
