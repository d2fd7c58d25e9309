"""The publishers that are compared, one module per library; a library is imported only when its peer is asked for."""

from __future__ import annotations

from importlib import import_module

from benchmarks.peers.base import Job, Peer, Stopwatch, Timing

__all__ = ["DEFAULT", "PEERS", "Job", "Peer", "Stopwatch", "Timing", "load"]

#: Where each peer is, by the name that the command line knows it by, in the order of a round.
PEERS = {
    "plain": "benchmarks.peers.plain:PlainSocket",
    "qflow": "benchmarks.peers.qflow:OneThread",
    "qflow_8": "benchmarks.peers.qflow:EightThreads",
    "qflow_64": "benchmarks.peers.qflow:SixtyFourThreads",
    "qflow_async": "benchmarks.peers.qflow:OneTask",
    "qflow_tasks": "benchmarks.peers.qflow:Tasks",
    "pika_select": "benchmarks.peers.pika:Select",
    "pika_next": "benchmarks.peers.pika_next:ThreadSafe",
    "pika_blocking": "benchmarks.peers.pika:Blocking",
    "aiopika": "benchmarks.peers.aiopika:AioPika",
    "aiopika_one": "benchmarks.peers.aiopika:OneByOne",
    "aiormq": "benchmarks.peers.aiopika:Aiormq",
    "pyamqp": "benchmarks.peers.pyamqp:OneByOne",
    "kombu": "benchmarks.peers.kombu:OneByOne",
    "amqpstorm": "benchmarks.peers.amqpstorm:Storm",
}

#: The peers that run unless others are named.
DEFAULT = ("plain", "qflow", "pika_select", "pika_blocking", "amqpstorm")


def load(name: str) -> Peer | None:
    """A peer, or ``None`` if its library is not installed.

    Raises:
        KeyError: no peer has this name.
    """
    module, _, attribute = PEERS[name].partition(":")
    try:
        peer: Peer = getattr(import_module(module), attribute)()
    except ModuleNotFoundError as error:
        # A mistake of ours must not pass for a library that is missing.
        if error.name is None or error.name.startswith(("benchmarks", "qflow_client")):
            raise
        return None
    return peer
