"""The core of the broker: from ``Basic.Publish`` to ``Channel.Flow``. It does not need the broker's other packages.

To follow a published message to the ``Channel.Flow`` that it causes, read the numbered files below in this order.
Together they have at most 3,500 lines. Imports form no cycles. If file A imports file B, then B describes the objects
of A with `typing.Protocol` classes. Codes such as C5 are defined in ``docs/sources.md``.

`server.py` reads the socket: `Connection.data_received` calls `Session.receive_data`. A message begins with
``Basic.Publish``, which `Channel.on_method` handles. Its content header is handled by `Channel.on_header`, and its body
by `Channel.on_body`. An empty message is complete with its header. `Channel._finish` calls `Router.resolve` if the
topology has changed. `Channel._publish_watched` calls `refusal` in `waiting.py`. If all queues accept the message, the
calls are, up to the bytes of its ``Channel.Flow``::

    Session.receive_data > Channel.on_body > Channel._finish > Channel._publish_watched > Channel._enqueue
    > Queue.enqueue > QueueFlows.entered > FlowController.offer > ChannelFlow.block > ChannelFlow.on_blocked
    > Output.write_past_promises

and from an ack to the ``Channel.Flow`` that ends it::

    Session.receive_data > Channel.on_method > Channel.settle > Consuming.settle > Dispatcher.settle > Contents.left
    > QueueFlows.left > FlowController.release > QueueFlow.resume > ChannelFlow.unblock > ChannelFlow.on_unblocked
    > Output.write_past_promises

At the end of the loop's iteration, `Server._end_turn` calls `Connection.send`, which calls `Output.take`.

1. `session.py` splits bytes into frames and gives each frame to its channel. `wire.py`, which the other files use too,
   decodes and encodes frames.
2. `channel.py` joins method, header and bodies. `Channel._finish` handles the complete message.
3. `routing.py` finds the queues. It caches the result in a `Target` until the topology changes.
4. `waiting.py` runs if the target is watched, see `Target.watched` and `Queue.is_watched`. It asks all queues whether
   they accept the message. If one queue refuses, no queue gets the message.
5. `queue.py` appends the message to the queue's entries (`contents.py`), and calls all observers of these entries.
6. `queueflow.py` observes the entries and gives each new depth to the configured families of marks (flow thresholds).
   A family that turns ON blocks the publishing channel and delays its confirms. A family that turns OFF unblocks the
   channel and releases the confirms. Each family is a `FlowController` with a `ThresholdLimiter`. These two classes are
   in the package `qflow_client.flow`, which producers use too. `FlowController.offer` adds a message to the limiter,
   and blocks the channel if a mark is exceeded. `FlowController.release` subtracts it. `QueueFlow.resume` then unblocks
   channels if the limiter is below the resume mark: all together, or one at a time with a pause between them.
7. `channelflow.py` has the flow state of a channel. `ChannelFlow.on_blocked` sends a ``Channel.Flow`` when the first
   controller blocks the channel. `ChannelFlow.on_unblocked` sends one when the last controller unblocks it.
8. `output.py` orders the frames of a connection until `Output.take`. Then asyncio's transport buffers them.

Two more files are used by all of these: `entries.py` has the classes of messages and entries, `exchange.py` those of
exchanges and targets. An ack also needs `consuming.py`, which has the deliveries of a channel, and `dispatcher.py`,
which gives the messages of a queue to consumers. The other files can be read later:

- For a connection, `handshake.py` opens it, `deadlines.py` has its timeouts, `channels.py` adds up the counts of its
  channels.
- For a channel, `confirms.py` has its confirms, `transaction.py` its transaction, and `methods.py` handles the topology
  methods of clients.
- For a queue, `dropping.py` and `expiry.py` remove messages that no consumer acked, `deadletter.py` publishes dropped
  messages again, `storage.py` connects the queue to the journal.
- For the virtual host (`virtualhost.py`), `topology.py` declares exchanges and bindings, `timers.py` calls objects at
  their times.

All of this runs on the event loop of `server.py`. An application uses `Broker`: `embedding.py` runs it, `inspection.py`
shows its state, `broker.py` changes it.

Memory: the optional `Journal` counts the bytes of all messages, in `Journal.held`. `Server._check_memory` compares the
sum with the limit after each iteration. Above the limit, connections that publish are not read.

Plug-ins: an overflow policy is a subclass of `Overflow` (`overflow.py`). The `Rules` for marks and overflow policies
(`limits.py`), a `Journal` (`ports.py`) and a `Discipline` (`channelflow.py`) are arguments of `EmbeddedBroker`. A
`FlowObserver` is given to `VirtualHost.observe`. A `PublishMeter` is set in `VirtualHost.meter`. Other reasons to block
a channel need a `FlowController` of their own, as in `controls.py`.
"""

from __future__ import annotations

from qflow_client.broker.core.broker import Broker
from qflow_client.broker.core.settings import Settings

__all__ = ["Broker", "Settings"]
