"""What decides about a producer's messages, sans-I/O: it is told what happened, and says what to do.

Nothing here knows threads, event loops, sockets, files or clocks. `protocol` is the way in.
"""
