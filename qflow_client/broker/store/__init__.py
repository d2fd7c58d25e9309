"""The journal, which counts the memory of messages, and the message store, which is an SQLite file."""

from __future__ import annotations
