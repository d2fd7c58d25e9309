"""The core of the broker: from ``Basic.Publish`` to ``Channel.Flow``. The core imports no other package of the broker.

To follow a published message to the ``Channel.Flow`` that it causes, read the files below in the order of their
numbers. The files have at most 3,500 lines in total. Imports form no cycles. If file A imports file B, and B uses a
class of A, then B describes this class as a `typing.Protocol`. Codes such as C5 are defined in ``docs/sources.md``.

`server.py` reads the socket: `Connection.data_received` calls `Session.receive_data`. `Channel.on_method` handles the
``Basic.Publish`` of a message, `Channel.on_header` its content header, and `Channel.on_body` its body. If the message
turns a flow state ON (number 6), these calls lead from the body to the ``Channel.Flow``::

    Session.receive_data > Channel.on_body > Channel._finish > Channel._publish_watched > Channel._enqueue
    > Queue.enqueue > QueueFlows.entered > FlowController.offer > ChannelFlow.block > ChannelFlow.on_blocked
    > Output.write_past_promises

These calls lead from a consumer's ack to the ``Channel.Flow`` that unblocks the publisher's channel::

    Session.receive_data > Channel.on_method > Channel.settle > Consuming.settle > Dispatcher.settle > Contents.left
    > QueueFlows.left > FlowController.release > QueueFlow.resume > ChannelFlow.unblock > ChannelFlow.on_unblocked
    > Output.write_past_promises

After this iteration of the event loop, `Server._end_turn` sends the frames: `Connection.send` calls `Output.take`.

1. `session.py` splits bytes into frames and gives each channel its frames. `wire.py` decodes and encodes frames.
2. `channel.py` joins the method, header and bodies of a message. `Channel._finish` handles the complete message.
3. `routing.py` finds the queues of the message. A `Target` caches them, unless they depend on the message's headers.
4. `waiting.py` has the function `refusal`, which asks all queues whether they accept the message. If one queue refuses
   it, no queue gets it. A channel calls `refusal` only if `Target.watched` or `Controls.watches_publishes` is true.
5. `queue.py` appends the message to the queue's entries (`contents.py`), and calls all observers of these entries.
6. `queueflow.py` observes the entries. `QueueFlows` has one `QueueFlow` for each configured set of flow thresholds.
   While a `QueueFlow` is ON, it blocks publishing channels, delays confirms, or does both. When it turns OFF, it
   releases the confirms and unblocks the channels. A `QueueFlow` is a `FlowController` with a `ThresholdLimiter`, both
   from `qflow_client.flow`. `FlowController.offer` adds a message to the limiter. `offer` then blocks the channel if
   the limiter is ON (thresholds of Qpid C++) or above its capacity (Qpid Java). `FlowController.release` subtracts a
   message. If the limiter is then OFF, `QueueFlow.resume` unblocks the channels, together or one after the other.
7. `channelflow.py` has the flow state of a channel. `ChannelFlow.on_blocked` sends ``Channel.Flow`` when the first
   controller blocks the channel. `ChannelFlow.on_unblocked` sends ``Channel.Flow`` with ``active=true`` when no
   controller blocks the channel any more.
8. `output.py` keeps the outgoing frames of a connection in order. `Output.take` returns the frames to be sent.

Two more files are used by many files: `entries.py` has messages and entries, and `exchange.py` has exchanges and
`Target`. For an ack, also read `consuming.py` (the deliveries of a channel) and `dispatcher.py`, which gives the
messages of a queue to consumers. You can read the other files later:

- Connection: `handshake.py` opens it. `deadlines.py` has its timeouts, and `channels.py` its channels and alarms.
- Channel: `confirms.py` has its confirms, and `transaction.py` its transaction. `methods.py` handles the methods for
  topology and consuming.
- Queue: `expiry.py` finds expired messages, `dropping.py` drops messages, and `deadletter.py` publishes dropped
  messages again. `storage.py` connects the queue to the journal.
- Virtual host (`virtualhost.py`): `topology.py` declares exchanges and bindings. `timers.py` has the timers.

A broker runs on one event loop. An application uses the class `Broker`: `embedding.py` starts and stops the broker,
`inspection.py` shows its state, and `broker.py` changes its state.

Memory: the optional `Journal` counts the bytes of messages in memory (`Journal.held`). After each iteration of the
event loop that changes the broker, `Server._check_memory` compares `Journal.held` with the memory limit. Above the
limit, the server does not read from publishing connections until `Journal.held` is at most 7/8 of the limit.

Plug-ins: an overflow policy is a subclass of `Overflow` (`overflow.py`). `EmbeddedBroker` gets three plug-ins as
arguments: the `Rules` for thresholds and overflow policies (`limits.py`), a `Journal` (`ports.py`), and a function that
creates each `Discipline` (`channelflow.py`). `VirtualHost.observe` takes a `FlowObserver`. `VirtualHost.meter` is the
`PublishMeter`. To block channels for another reason, use another `FlowController`, as in `controls.py`.
"""

from __future__ import annotations

from qflow_client.broker.core.broker import Broker
from qflow_client.broker.core.settings import Settings

__all__ = ["Broker", "Settings"]
