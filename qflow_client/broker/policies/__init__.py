"""Plug-ins for queues, channels and the virtual host: overflow policies, rules, rates, discipline and flow log."""

from __future__ import annotations
