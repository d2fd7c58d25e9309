"""Memory and disk: the memory account of messages, the journal, and the file of the store."""

from __future__ import annotations
