"""The drop-in compared with aio-pika, on the same broker."""

from __future__ import annotations

import asyncio
import inspect
from importlib import import_module
from typing import Any

import aio_pika as original
import aiormq
import pytest

import qflow_client.aio_pika as drop_in
from qflow_client.aio_pika.flow import ChannelFlow
from qflow_client.broker import Broker
from tests.effort import EFFORT
from tests.integration.aio.tools import Run
from tests.integration.parity import members, parameters, until_release
from tests.integration.producer.tools import PATIENCE

from .scenarios import SCENARIOS, of, outcome_on_its_own

CLASSES = {
    name: (getattr(original, name), getattr(drop_in, name))
    for name in ("Connection", "RobustConnection", "Channel", "RobustChannel")
}
#: Classes that the drop-in takes unchanged from aio-pika.
SAME = ("Exchange", "Queue", "RobustExchange", "RobustQueue", "Message", "IncomingMessage", "DeliveryMode")
# The newest releases with which these tests have passed.
KNOWN = {"aio-pika": "10.2.1", "aiormq": "7.2.4"}
# Parameters that the drop-in always has, and the oldest supported release of aio-pika does not have.
NEW = {("Connection", "__init__"): ["client_properties"]}


def without(found: list[tuple[str, Any, Any]], new: list[str]) -> list[tuple[str, Any, Any]]:
    return [each for each in found if each[0] not in new]


@pytest.mark.parametrize("name", CLASSES)
def test_every_method_of_the_drop_in_has_the_signature_of_aio_pika(name: str) -> None:
    theirs, ours = CLASSES[name]
    assert issubclass(ours, theirs)
    for member, of_theirs in members(theirs, "__init__", "__aenter__", "__aexit__", "__await__").items():
        of_ours = inspect.getattr_static(ours, member)
        if inspect.isfunction(of_theirs):
            if of_ours is of_theirs:
                continue
            new = NEW.get((name, member), [])
            with until_release(**KNOWN):
                assert without(parameters(of_ours), new) == without(parameters(of_theirs), new), member
                assert inspect.iscoroutinefunction(of_ours) == inspect.iscoroutinefunction(of_theirs), member
        elif member != "CHANNEL_CLASS":
            with until_release(**KNOWN):
                assert type(of_ours) is type(of_theirs), member


@pytest.mark.parametrize("name", ["connect", "connect_robust"])
def test_connect_and_connect_robust_have_the_signatures_of_aio_pika(name: str) -> None:
    theirs, ours = getattr(original, name), getattr(drop_in, name)
    assert inspect.iscoroutinefunction(ours)
    with until_release(**KNOWN):
        assert without(parameters(ours), ["connection_class"]) == without(parameters(theirs), ["connection_class"])
    kind = inspect.signature(ours).parameters["connection_class"].default
    assert kind is (drop_in.Connection if name == "connect" else drop_in.RobustConnection)


def test_basic_publish_of_the_drop_in_has_the_signature_of_basic_publish_of_aiormq() -> None:
    ours = parameters(ChannelFlow.basic_publish)
    assert [each[0] for each in ours[:2]] == ["self", "channel"]
    with until_release(**KNOWN):
        assert ours[2:] == parameters(aiormq.Channel.basic_publish)[1:]


def test_the_drop_in_has_every_public_name_of_aio_pika() -> None:
    for name in (each for each in dir(original) if not each.startswith("_")):
        with until_release(**KNOWN):
            assert hasattr(drop_in, name), name
    with until_release(**KNOWN):
        assert set(original.__all__) <= set(drop_in.__all__)
    for name in SAME:
        assert getattr(drop_in, name) is getattr(original, name)
    for module in "channel", "connection", "robust_channel", "robust_connection":
        for name in (each for each in dir(getattr(original, module)) if not each.startswith("_")):
            with until_release(**KNOWN):
                assert hasattr(getattr(drop_in, module), name), (module, name)


@pytest.mark.parametrize("name", ["abc", "exceptions", "message", "patterns", "patterns.rpc", "pool", "tools"])
def test_modules_of_aio_pika_can_be_imported_from_the_drop_in(name: str) -> None:
    assert import_module(f"qflow_client.aio_pika.{name}") is import_module(f"aio_pika.{name}")


@pytest.mark.parametrize("kind", ["Channel", "Exchange", "Queue", "Connection"])
def test_every_public_method_of_aio_pika_has_a_parity_scenario(kind: str) -> None:
    found = members(getattr(original, kind))
    described = {name for name, member in found.items() if inspect.ismemberdescriptor(member)}
    covered = {of(name).split(".")[1] for name in SCENARIOS if of(name).startswith(f"{kind}.")}
    with until_release(**KNOWN):
        assert found.keys() - described == covered


# The drop-in changes only connections, channels and publishes, so test exchanges and queues with one kind only.
@pytest.mark.parametrize(
    ("name", "robust"),
    [
        pytest.param(name, robust, id=f"{name}-{'robust' if robust else 'plain'}")
        for name in SCENARIOS
        for robust in (False, True)
        if robust or name.startswith(("Connection__", "Channel__", "Exchange__publish"))
    ],
)
def test_the_drop_in_has_the_results_exceptions_and_order_of_callbacks_of_aio_pika(
    name: str, robust: bool, run: Run
) -> None:
    with Broker() as broker:
        ours = run(outcome_on_its_own(drop_in, broker.url, name, robust=robust))
    # Do not use `run`, because older releases leave futures whose exceptions are never retrieved.
    with Broker() as broker, asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(lambda _loop, _context: None)
        assert ours == runner.run(outcome_on_its_own(original, broker.url, name, robust=robust))


class Wrapped:
    """aio-pika with connections that `wrap` puts under flow control."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(original, name)
        if name not in ("connect", "connect_robust"):
            return found

        async def connect(url: str) -> Any:
            return drop_in.wrap(await found(url))

        return connect


_WRAPPED = [name for name in SCENARIOS if name.startswith(("Channel__", "Exchange__publish"))]


# The kinds differ only in the connection, so each scenario runs with one kind by day, and with both at night.
@pytest.mark.parametrize(
    ("name", "robust"),
    [
        pytest.param(name, robust, id=f"{name}-{'robust' if robust else 'plain'}")
        for number, name in enumerate(_WRAPPED)
        for robust in ((False, True) if EFFORT == "nightly" else (bool(number % 2),))
    ],
)
def test_a_wrapped_connection_behaves_like_a_connection_of_aio_pika(name: str, robust: bool, run: Run) -> None:
    with Broker() as broker:
        ours = run(outcome_on_its_own(Wrapped(), broker.url, name, robust=robust))
    with Broker() as broker, asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(lambda _loop, _context: None)
        assert ours == runner.run(outcome_on_its_own(original, broker.url, name, robust=robust))


async def callbacks(module: Any, url: str, *, robust: bool) -> list[int]:
    """Return the numbers of callbacks of all collections of callbacks, after opening and after closing."""
    connection = await (module.connect_robust if robust else module.connect)(url)
    channel = await connection.channel()
    queue = await channel.declare_queue("callbacks", auto_delete=True)
    having = [
        each
        for owner in (connection, channel, queue)
        for name in ("close_callbacks", "reconnect_callbacks", "reopen_callbacks", "return_callbacks")
        if (each := getattr(owner, name, None)) is not None
    ]
    found = [len(each) for each in having]
    connection.close_callbacks.clear()
    await channel.close()
    await connection.close()
    return found + [len(each) for each in having]


@pytest.mark.parametrize("robust", [False, True], ids=["plain", "robust"])
def test_E11_internal_callbacks_of_the_drop_in_are_hidden_from_the_program(broker: Any, robust: bool, run: Run) -> None:
    theirs, ours = (run(callbacks(module, broker.url, robust=robust)) for module in (original, drop_in))
    assert ours == theirs
    assert ours[0] == 0


@pytest.mark.parametrize("who", ["program", "broker"])
@pytest.mark.parametrize("robust", [False, True], ids=["plain", "robust"])
def test_E11_the_socket_is_closed_even_if_the_program_has_cleared_close_callbacks(
    broker: Any, robust: bool, who: str, run: Run
) -> None:
    async def close() -> None:
        connection = await (drop_in.connect_robust if robust else drop_in.connect)(broker.url)
        connection.close_callbacks.clear()
        tapped = connection.tapped
        assert tapped is not None
        writer = tapped.writer
        assert writer is not None
        if who == "program":
            await connection.close()
        else:
            broker.close_connections()
        async with asyncio.timeout(PATIENCE):
            await writer.wait_closed()
        await connection.close()

    run(close())
