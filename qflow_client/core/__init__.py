"""The state of a producer and the rules for its messages, without I/O (sans-I/O).

The entry point is `protocol`: engines and drop-ins report events to it, and get the bytes to write. No module here uses
threads, event loops, sockets, files or clocks.
"""
