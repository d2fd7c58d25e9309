from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import uvloop

from qflow_client import flow_manager
from qflow_client.broker import Broker
from tests.integration.producer.conftest import certificate
from tests.integration.producer.tools import PATIENCE, Proxy, Wire

from .tools import soon

__all__ = ["certificate"]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a test's coroutine on a loop, and sees to it that nothing goes on afterwards and nothing fails unseen."""

    def run(test: Coroutine[Any, Any, Any]) -> Any:
        unseen: list[dict[str, Any]] = []

        async def watched() -> Any:
            asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unseen.append(context))
            result = await asyncio.wait_for(test, 6 * PATIENCE)
            me = asyncio.current_task()
            await soon(lambda: asyncio.all_tasks() == {me}, "the end of all tasks")
            return result

        factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            result = runner.run(watched())
        assert unseen == []
        return result

    return run


@pytest.fixture(autouse=True)
def _no_producer_is_left() -> Iterator[None]:
    # One that a test which failed has left is not held against the next.
    before = set(flow_manager.resources)
    yield
    assert set(flow_manager.resources) <= before


@pytest.fixture
def wire() -> Wire:
    """What `broker` saw and said."""
    return Wire()


@pytest.fixture
def make_broker(wire: Wire) -> Iterator[Callable[..., Broker]]:
    """Makes a broker with an empty queue ``q``; takes the broker's options."""
    with ExitStack() as stack:

        def make(**options: Any) -> Broker:
            broker = stack.enter_context(Broker(**({"trace": wire} | options)))
            broker.declare_queue("q")
            return broker

        yield make


@pytest.fixture
def broker(make_broker: Callable[..., Broker]) -> Broker:
    """A fresh broker with an empty queue ``q``."""
    return make_broker()


@pytest.fixture
def proxy(broker: Broker) -> Iterator[Proxy]:
    """A relay in front of `broker`."""
    proxy = Proxy(broker.port)
    yield proxy
    proxy.close()
