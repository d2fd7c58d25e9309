"""Memory and disk: the account of messages in memory, the journal of what is to be written, and the file."""

from __future__ import annotations
