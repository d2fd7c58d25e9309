"""AMQP 0-9-1 as bytes, sans-I/O: field tables, frames, the tap on a connection, and what is to be written on it.

Nothing here knows producers, threads, event loops or clocks.
"""
