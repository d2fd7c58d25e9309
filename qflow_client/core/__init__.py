"""The state of a producer and the rules for its messages, without I/O (sans-I/O).

The entry point is `ProducerProtocol`. A producer's engine, or a drop-in for another library, reports events to this
class, and gets from it the bytes to write. No module here uses threads, event loops, sockets, files or clocks. Times
such as `now` are monotonic seconds, unless a docstring says otherwise.

Terms: a message is *on the wire* while it is unsettled and has frames for the open channel, written or not. A message
is *begun* when at least one of its bytes is written on this channel. It is *in flight* while it is begun and not yet
settled. A producer is *blocked (flowed)* while its gate has at least one *hold*. `HoldKind` lists the kinds of holds.
"""
