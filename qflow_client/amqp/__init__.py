"""AMQP 0-9-1 as bytes, sans-I/O: field tables, frames, the tap on a connection, and the bytes to be written on it.

No module here uses producers, threads, event loops or clocks.
"""
