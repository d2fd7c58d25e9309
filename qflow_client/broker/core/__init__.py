"""The core of the broker: from ``Basic.Publish`` to ``Channel.Flow``. It does not need the other packages.

Read these files in this order to follow a publish to the ``Channel.Flow`` that it causes. Each file imports only later
files of this list, and uses protocols for the earlier ones. The exception is `channelflow.py`, which imports
`queueflow.py`. Together the files have at most 3,500 lines.
The calls are, from the bytes of a message to the bytes of its ``Channel.Flow``::

    Session.receive_data > Channel.on_body > Channel._finish > Channel._publish_watched > Channel._enqueue
    > Queue.enqueue > QueueFlows.entered > FlowController.offer > ChannelFlow.block > ChannelFlow.on_blocked
    > Output.write_in_turn

and from an ack to the ``Channel.Flow`` that ends it::

    Session.receive_data > Channel.on_method > Channel.settle > Consuming.settle > Dispatcher.settle > Contents.left
    > QueueFlows.left > FlowController.release > ChannelFlow.unblock > ChannelFlow.on_unblocked > Output.write_in_turn

1. `session.py` splits bytes into frames and gives each frame to its channel. `wire.py`, which the other files use too,
   decodes and encodes frames.
2. `channel.py` joins method, header and bodies. `Channel._finish` takes the complete message.
3. `routing.py` finds the queues. It caches the result in a `Target` until the topology changes.
4. `waiting.py` runs if any of these queues has marks or a maximum. It asks all of them to accept the message. If one
   queue refuses, no queue gets the message.
5. `queue.py` appends the message to its `contents.py`, and calls all observers of the queue's entries.
6. `queueflow.py` observes the entries for the marks. Each configured family of marks gets the new depth. A family that
   turns ON blocks the publishing channel and holds its confirms. A family that turns OFF unblocks the channel and
   releases the confirms. Each family is a `FlowController` with a `ThresholdLimiter`. These two classes are in the
   package `qflow_client.flow`, which producers use too.
7. `channelflow.py` is the channel as queues see it. `ChannelFlow.on_blocked` sends one ``Channel.Flow`` for the first
   hold of a channel. `ChannelFlow.on_unblocked` sends one when the last hold is released.
8. `output.py` buffers the ``Channel.Flow`` until the socket accepts it.

The other files are not on this path.

- Of a connection: `handshake.py` opens it, `deadlines.py` has its timeouts, `channels.py` sums up what its channels
  did.
- Of a channel: `confirms.py`; `consuming.py` for deliveries; `transaction.py`; `methods.py` for the topology methods of
  clients.
- For a queue, `dispatcher.py` gives messages to consumers, `dropping.py` and `expiry.py` remove messages that no
  consumer acked, `storage.py` connects the queue to the journal.
- For the virtual host (`virtualhost.py`), `topology.py` declares exchanges and bindings, `timers.py` calls back at due
  times.

All of this happens on the event loop of `server.py`. An application uses it by `Broker`: `embedding.py` runs it,
`inspection.py` shows its state, `broker.py` changes it. There are three places for extensions. An overflow policy plugs
into `overflow.py`. The rules that choose marks and policy for a queue plug into `limits.py`. A store, an observer of
flow or a rate meter plugs into `ports.py`.
"""

from __future__ import annotations

from qflow_client.broker.core.broker import Broker
from qflow_client.broker.core.settings import Settings

__all__ = ["Broker", "Settings"]
