"""The core of the broker: from ``Basic.Publish`` to ``Channel.Flow``. It works without the other rooms.

Read these files in this order to follow a publish to the flow that it causes. Each imports only those after it, but for
`channelflow.py`, which imports `queueflow.py`; it knows those before it by a protocol. Together they have at most 3,500
lines.

1. `session.py` splits bytes into frames and gives each to its channel. `wire.py`, which the others use too, decodes and
   encodes them.
2. `channel.py` joins method, header and bodies. `Channel._finish` takes the complete message.
3. `routing.py` finds the queues. The answer is kept in a `Target` until the topology changes.
4. `waiting.py` asks all of these queues whether they take the message, if any of them has marks or a maximum. If one
   refuses it, none gets it.
5. `queue.py` appends the message to its `contents.py`, and calls all that follow the entries of the queue.
6. `queueflow.py` follows them for the marks: each family that is set is offered the new depth. When it turns ON it
   blocks the publishing channel and holds its confirms; when it turns OFF it unblocks and releases them.
7. `channelflow.py` is the channel as queues know it: `ChannelFlow.on_blocked` and `ChannelFlow.on_unblocked` send one
   ``Channel.Flow`` for the first hold of a channel, and one when the last is gone.
8. `output.py` has it until the socket takes it.

The rest lies beside this way. Of a connection: `handshake.py` opens it, `deadlines.py` knows when it must be heard of,
`channels.py` is what its channels did together. Of a channel: `confirms.py`, `consuming.py` for deliveries,
`transaction.py`, and `methods.py` for what clients ask of the topology. Of a queue: `dispatcher.py` gives messages to
consumers, `dropping.py` and `expiry.py` let them go that no consumer acks, `storage.py` is its share of the journal. Of
the virtual host (`virtualhost.py`): `topology.py` declares exchanges and bindings, `timers.py` knows what is due.

All of this happens on the event loop of `server.py`. An overflow policy plugs into `overflow.py`, the rules that choose
marks and policy for a queue into `limits.py`, and a store, an observer of flow or a meter of rates into `ports.py`.
"""

from __future__ import annotations

from qflow_client.broker.core.broker import Broker
from qflow_client.broker.core.settings import Settings

__all__ = ["Broker", "Settings"]
