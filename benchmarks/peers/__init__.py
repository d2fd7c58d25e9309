"""The compared publishers, one module per library. A library is imported only when its peer is used."""

from __future__ import annotations

from importlib import import_module

from benchmarks.peers.base import Job, Peer, Stopwatch, Timing

__all__ = ["DEFAULT", "PEERS", "Job", "Peer", "Stopwatch", "Timing", "load"]

#: For each name on the command line, the module and the class of the peer, in the order of a round.
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

#: The default peers.
DEFAULT = ("plain", "qflow", "pika_select", "pika_blocking", "amqpstorm")


def load(name: str) -> Peer | None:
    """Return a peer, or ``None`` if its library is not installed.

    Raises:
        KeyError: no peer has this name.
    """
    module, _, attribute = PEERS[name].partition(":")
    try:
        peer: Peer = getattr(import_module(module), attribute)()
    except ModuleNotFoundError as error:
        # An import error of this repository must not look like a missing library.
        if error.name is None or error.name.startswith(("benchmarks", "qflow_client")):
            raise
        return None
    return peer
