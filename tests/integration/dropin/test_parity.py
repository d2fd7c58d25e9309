"""The drop-in compared with pika, on the same broker."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import Any

import pika as original
import pytest
from pika.adapters import blocking_connection as original_blocking
from pika.adapters.asyncio_connection import AsyncioConnection as OriginalAsyncioConnection

import qflow_client.pika as drop_in
from qflow_client.broker import Broker
from tests.integration.parity import members, parameters, public, until_release

from .scenarios import all_scenarios, members_of, outcome_on_its_own, recorder, until

# The newest release with which these tests have passed.
KNOWN = {"pika": "1.5.0rc1"}
# For each class and method, the parameters that pika's method does not have.
NEW = {("BlockingChannel", "confirm_delivery"): ["pipelined", "republish"]}
# Members that some supported releases of pika do not have.
NEWER = {"accept_consumer_cancel_ok_supported"}

CLASSES = {
    "BlockingChannel": (original_blocking.BlockingChannel, drop_in.BlockingChannel),
    "BlockingConnection": (original.BlockingConnection, drop_in.BlockingConnection),
    "Channel": (original.channel.Channel, drop_in.Channel),
    "SelectConnection": (original.SelectConnection, drop_in.SelectConnection),
    "AsyncioConnection": (OriginalAsyncioConnection, drop_in.AsyncioConnection),
    "ConnectionParameters": (original.ConnectionParameters, drop_in.ConnectionParameters),
    "URLParameters": (original.URLParameters, drop_in.URLParameters),
}
if find_spec("pika.adapters.thread_safe_connection"):
    # pika has this connection since release 1.5.
    ours, theirs = drop_in.adapters.thread_safe_connection, original.adapters.thread_safe_connection
    CLASSES["Connection"] = theirs.Connection, ours.Connection
    CLASSES["Connection's Channel"] = theirs.Channel, ours.Channel
    assert drop_in.Connection is ours.Connection


@pytest.mark.parametrize("name", CLASSES)
def test_every_method_of_the_drop_in_has_the_signature_of_pika(name: str) -> None:
    theirs, ours = CLASSES[name]
    assert issubclass(ours, theirs)
    for member, of_pika in members(theirs, "__init__", "__enter__", "__exit__").items():
        of_ours = inspect.getattr_static(ours, member)
        if inspect.isfunction(of_pika):
            new = NEW.get((name, member), [])
            found = [each for each in parameters(of_ours) if each[0] not in new]
            with until_release(**KNOWN):
                assert found == parameters(of_pika), member
            assert all(each[2] is not inspect.Parameter.empty for each in parameters(of_ours) if each[0] in new)
        else:
            with until_release(**KNOWN):
                assert type(of_ours) is type(of_pika), member


def test_the_drop_in_has_every_public_name_of_pika() -> None:
    for name in (each for each in dir(original) if not each.startswith("_")):
        with until_release(**KNOWN):
            assert hasattr(drop_in, name), name
    for name in (each for each in dir(original.adapters) if not each.startswith("_")):
        with until_release(**KNOWN):
            assert hasattr(drop_in.adapters, name), name
    assert drop_in.exceptions is original.exceptions
    assert drop_in.BasicProperties is original.BasicProperties
    assert drop_in.adapters.blocking_connection.BlockingConnection is drop_in.BlockingConnection
    assert drop_in.adapters.blocking_connection.ReturnedMessage is original_blocking.ReturnedMessage


@pytest.mark.parametrize("name", ["BlockingChannel", "BlockingConnection"])
def test_every_public_member_of_pika_has_a_parity_scenario(name: str) -> None:
    of_pika = public(CLASSES[name][0])
    with until_release(**KNOWN):
        assert of_pika == members_of(name) - (NEWER - of_pika)


@all_scenarios
def test_the_drop_in_has_the_results_exceptions_and_order_of_callbacks_of_pika(name: str) -> None:
    with Broker() as ours, Broker() as theirs:
        assert outcome_on_its_own(drop_in, ours.url, name) == outcome_on_its_own(original, theirs.url, name)


@pytest.mark.parametrize("module", [original, drop_in], ids=["pika", "drop-in"])
def test_connection_blocked_and_unblocked_reach_the_callbacks_in_order(broker: Any, module: Any) -> None:
    told: list[Any] = []
    with module.BlockingConnection(module.URLParameters(broker.url)) as connection:
        channel = connection.channel()
        connection.add_on_connection_blocked_callback(recorder(told, "one"))
        connection.add_on_connection_blocked_callback(recorder(told, "two"))
        connection.add_on_connection_unblocked_callback(recorder(told, "three"))
        broker.block("no memory")
        until(channel, lambda: len(told) == 2)
        broker.unblock()
        until(channel, lambda: len(told) == 3)
    blocked, unblocked = ["Blocked", {"reason": "no memory"}], ["Unblocked", {}]
    assert told == [
        ["one", "BlockingConnection", ["frame", 0, blocked]],
        ["two", "BlockingConnection", ["frame", 0, blocked]],
        ["three", "BlockingConnection", ["frame", 0, unblocked]],
    ]


BODIES = [b"", b"x", b"x" * 1000, b"x" * 131_064, b"x" * 131_065, b"x" * 400_000, "text"]
PROPERTIES = [
    None,
    original.BasicProperties(),
    original.BasicProperties(delivery_mode=2),
    original.BasicProperties(content_type="a/b", headers={"a": [1, {"b": None}], "c": "d"}, timestamp=5, priority=0),
]


def test_the_drop_in_writes_the_same_bytes_as_pika(broker: Any) -> None:
    wires = []
    for module in original, drop_in:
        with module.BlockingConnection(module.URLParameters(broker.url)) as connection:
            channel = connection.channel()
            written: list[bytes] = []
            impl: Any = connection._impl
            output = impl._output_marshaled_frames

            def record(frames: Any, written: list[bytes] = written, output: Any = output) -> None:
                written.extend(frames)
                output(frames)

            impl._output_marshaled_frames = record
            for _ in range(2):
                # The second round uses some frames that were encoded in the first round.
                for properties in PROPERTIES:
                    for body in BODIES:
                        for mandatory in False, True:
                            channel.basic_publish("", "q", body, properties, mandatory)
            wires.append(b"".join(written))
    assert wires[0] == wires[1]
