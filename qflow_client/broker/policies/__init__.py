"""Plug-ins of the core: overflow policies, limits of queues, rate limits, sanctions for clients, and the flow log."""

from __future__ import annotations
