"""The allowed and rejected values of a topology."""

from __future__ import annotations

from typing import Any

import pytest

from qflow_client import Binding, Exchange, Queue, SettingsError, Topology

# Typed as Any, because no element has the right type.
ANY: list[Any] = [b"q", {1: 2}, [Exchange("e")], ["q"]]


def test_changing_the_dict_of_arguments_afterwards_does_not_change_the_topology() -> None:
    arguments = {"x-max-length": 1}
    queues = [Queue("q", arguments=arguments)]
    topology = Topology(queues)
    arguments["x-max-length"] = 2
    queues.clear()
    assert [each.arguments["arguments"] for each in topology.declarations()] == [{"x-max-length": 1}]
    with pytest.raises(TypeError):
        topology.queues[0].arguments["x-max-length"] = 3  # type: ignore[index]


def test_topologies_with_equal_queues_exchanges_and_bindings_compare_equal() -> None:
    one, other = (Topology(["q"], [Exchange("e")], [Binding("e", "q", "k")]) for _ in range(2))
    assert one == other != Topology(["q"])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Queue(""), "Queue.name=''"),
        (lambda: Queue("é" * 128), "at most 255 bytes"),
        (lambda: Queue(ANY[0]), "Queue.name=b'q'"),
        (lambda: Queue("q", arguments=ANY[1]), "arguments=.*: they must be a mapping of str"),
        (
            lambda: Queue("q", arguments={"x": object()}),
            r"Queue\('q'\): arguments\['x'\] is <object .*; AMQP carries",
        ),
        (
            lambda: Exchange("e", arguments={"x": [{"y": 1 << 64}]}),
            r"Exchange\('e'\): arguments\['x'\]\[0\]\['y'\] h",
        ),
        (
            lambda: Queue("q", arguments={"x": [b"y"]}),
            r"Queue\('q'\): arguments\['x'\]\[0\] is b'y', .* int or a",
        ),
        (lambda: Binding("e", "q", arguments={"x": ...}), r"Binding\('e', 'q'\): arguments\['x'\] is Ellipsis"),
        (lambda: Exchange("e", ""), "Exchange.type=''"),
        (lambda: Binding("", "q"), "Binding.exchange=''"),
        (lambda: Binding("e"), "give queue, or to_exchange"),
        (lambda: Binding("e", "q", to_exchange="f"), "give queue, or to_exchange"),
        (lambda: Topology(ANY[2]), "queues: .* is not a Queue"),
        (lambda: Topology.of(ANY[3]), r"declare=\['q'\]: it must be a Topology, a Queue, or the name of a queue"),
    ],
)
def test_a_topology_that_no_broker_accepts_raises_a_clear_error(make: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        make()


def test_a_string_in_a_topology_means_a_durable_queue_of_that_name() -> None:
    assert Topology.of("q") == Topology("q") == Topology([Queue("q", durable=True, if_missing=True)])
    assert Topology.of(Queue("q")) == Topology([Queue("q", durable=True)]) != Topology.of("q")
    assert Topology.of(None) is None
