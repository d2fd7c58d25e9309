"""The journal, which collects the changes to write to disk, and the message store, which is an SQLite file."""

from __future__ import annotations
