"""The memory account of messages, the journal, and the file of the message store."""

from __future__ import annotations
