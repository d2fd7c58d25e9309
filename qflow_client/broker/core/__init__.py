"""The core of the broker: from ``Basic.Publish`` to ``Channel.Flow``. It does not need the other packages.

To follow a published message to the ``Channel.Flow`` that it causes, read the numbered files below in this order. Each
file imports only later files of this list, and uses protocols for the earlier files. The exception is `channelflow.py`,
which imports `queueflow.py`. Together the files have at most 3,500 lines.
The calls are, from the bytes of a message to the bytes of its ``Channel.Flow``::

    Session.receive_data > Channel.on_body > Channel._finish > Channel._publish_watched > Channel._enqueue
    > Queue.enqueue > QueueFlows.entered > FlowController.offer > ChannelFlow.block > ChannelFlow.on_blocked
    > Output.write_in_turn

and from an ack to the ``Channel.Flow`` that ends it::

    Session.receive_data > Channel.on_method > Channel.settle > Consuming.settle > Dispatcher.settle > Contents.left
    > QueueFlows.left > FlowController.release > ChannelFlow.unblock > ChannelFlow.on_unblocked > Output.write_in_turn

1. `session.py` splits bytes into frames and gives each frame to its channel. `wire.py`, which the other files use too,
   decodes and encodes frames.
2. `channel.py` joins method, header and bodies. `Channel._finish` handles the complete message.
3. `routing.py` finds the queues. It caches the result in a `Target` until the topology changes.
4. `waiting.py` runs if any of these queues has marks (flow thresholds) or a maximum. It asks all of them whether they
   accept the message. If one queue refuses, no queue gets the message.
5. `queue.py` appends the message to the queue's entries (`contents.py`), and calls all observers of these entries.
6. `queueflow.py` observes the entries and gives each new depth to the configured families of marks. A family that turns
   ON blocks the publishing channel and delays its confirms. A family that turns OFF unblocks the channel and releases
   the confirms. Each family is a `FlowController` with a `ThresholdLimiter`. These two classes are in the package
   `qflow_client.flow`, which producers use too.
7. `channelflow.py` has the flow state of a channel. `ChannelFlow.on_blocked` sends a ``Channel.Flow`` when the first
   controller blocks the channel. `ChannelFlow.on_unblocked` sends one when the last controller unblocks it.
8. `output.py` buffers the ``Channel.Flow`` until the socket accepts it.

The other files are not on this path.

- For a connection, `handshake.py` opens it, `deadlines.py` has its timeouts, `channels.py` adds up the counts of its
  channels.
- For a channel, `confirms.py` has its confirms, `consuming.py` its deliveries, `transaction.py` its transaction, and
  `methods.py` handles the topology methods of clients.
- For a queue, `dispatcher.py` gives messages to consumers, `dropping.py` and `expiry.py` remove messages that no
  consumer acked, `storage.py` connects the queue to the journal.
- For the virtual host (`virtualhost.py`), `topology.py` declares exchanges and bindings, `timers.py` calls objects at
  their times.

All of this runs on the event loop of `server.py`. An application uses `Broker`: `embedding.py` runs it, `inspection.py`
shows its state, `broker.py` changes it. There are three places for extensions. An overflow policy plugs into
`overflow.py`. The rules that choose marks and policy for a queue plug into `limits.py`. A store, an observer of flow or
a rate meter plugs into `ports.py`.
"""

from __future__ import annotations

from qflow_client.broker.core.broker import Broker
from qflow_client.broker.core.settings import Settings

__all__ = ["Broker", "Settings"]
