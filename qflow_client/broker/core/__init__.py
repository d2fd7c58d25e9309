"""The core of the broker: from ``Basic.Publish`` to ``Channel.Flow``. It works without the other rooms.

Read these files in this order to follow a publish to the flow that it causes. Each imports only those after it, and
knows those before it by a protocol.

1. `session.py` splits bytes into frames and gives each to its channel. `wire.py`, which the others use too, decodes and
   encodes them.
2. `channel.py` joins method, header and bodies. `Channel._finish` takes the complete message.
3. `virtualhost.py` and `routing.py` find the queues. The answer is kept in a `Target` until the topology changes.
4. `waiting.py` asks all of these queues whether they take the message, if any of them has marks or a maximum. If one
   refuses it, none gets it.
5. `queue.py` appends the message to its `contents.py`, which calls all that follow the entries of the queue.
6. `queueflow.py` follows them for the marks: each family that is set is offered the new depth. When it turns ON it
   blocks the publishing channel and holds its confirms; when it turns OFF it unblocks and releases them.
7. `Channel.on_blocked` and `Channel.on_unblocked` in `channel.py` send one ``Channel.Flow`` for the first hold of a
   channel, and one when the last is gone.

All of this happens on the event loop of `server.py`. What else a queue has lies beside this way: `dispatcher.py` gives
messages to consumers, `dropping.py` and `expiry.py` let them go that no consumer acks, and `storage.py` is the queue's
share of the journal. An overflow policy plugs into `overflow.py`, the rules that choose
marks and policy for a queue into `limits.py`, and a store, an observer of flow or a meter of rates into `ports.py`.
"""

from __future__ import annotations

from qflow_client.broker.core.broker import Broker
from qflow_client.broker.core.settings import Settings

__all__ = ["Broker", "Settings"]
