"""The state of a producer and the rules for its messages, sans-I/O.

The caller reports events, and the core returns what to do. No module here uses threads, event loops, sockets, files or
clocks. The entry point is `protocol`.
"""
