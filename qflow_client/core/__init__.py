"""The state of a producer and the rules for its messages, without I/O (sans-I/O).

The entry point is `ProducerProtocol`. A producer's engine, or a drop-in for another library, calls the methods of this
class to report events, and to get the bytes to write. No module here uses threads, event loops, sockets, files or
clocks. Times such as `now` are monotonic seconds, unless a docstring says otherwise.

Terms: a message is *on the wire* while `Unconfirmed.flight` contains it, so its frames are made for the open channel. A
message is *begun* when at least one of its bytes is written on this channel, and *in flight* while it is begun and
unsettled. A producer is *blocked (flowed)* while its gate has at least one *hold*. `HoldKind` lists the kinds of holds.
"""
