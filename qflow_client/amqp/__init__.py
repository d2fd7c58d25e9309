"""AMQP 0-9-1 as bytes, without I/O: field tables, frames, the `Tap` of a connection, and the bytes to write.

No module here uses producers, threads, event loops or clocks.
"""
