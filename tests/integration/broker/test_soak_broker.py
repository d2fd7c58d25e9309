"""The embedded broker of the soak test. It runs in its own process and obeys commands."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.soak.brokers import Embedded
from benchmarks.soak.embedded import COMMANDS


class _Broker:
    """Has two channels on connection "a" and one on connection "b". Channel "a1" is closed before it can be stopped."""

    def __init__(self) -> None:
        self.flowed: list[tuple[bool, str]] = []

    def channels(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(connection=name[0], name=name) for name in ("a1", "a2", "b1")]

    def flow(self, active: bool, name: str = "all") -> None:
        if name == "a1":
            raise LookupError("there is no channel 'a1'")
        self.flowed.append((active, name))


def test_the_command_flow_one_stops_the_channels_of_a_connection_and_ignores_missing_channels() -> None:
    broker = _Broker()
    COMMANDS["flow_one"](broker, False, "a")
    assert broker.flowed == [(False, "a2")]
    COMMANDS["flow"](broker, True)
    assert broker.flowed[1:] == [(True, "all")]


def test_a_stop_of_a_connection_with_an_empty_name_does_not_stop_all_connections() -> None:
    told: list[tuple[object, ...]] = []
    broker = Embedded()
    broker._tell = lambda *words: told.append(words)  # type: ignore[method-assign]  # there is no process
    connections = [SimpleNamespace(number=number, name_at_broker=name) for number, name in ((1, ""), (2, "b"))]
    for number in (1, 2, 3):
        broker.flow(SimpleNamespace(connections=connections), False, number)  # type: ignore[arg-type]  # for a proxy
    assert told == [("flow_one", False, "b")]


@pytest.mark.program
def test_the_broker_restarts_with_its_queue_on_the_same_port_after_a_kill() -> None:
    with Embedded() as broker:
        url = broker.url
        broker.kill()
        assert broker.url == url
        # `read` declares the queue passively, so the queue must exist.
        assert broker.read() == []
