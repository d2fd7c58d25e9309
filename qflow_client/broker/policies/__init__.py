"""Plug-ins of the core: overflow policies, queue limits, rate limits, sanctions against clients, and the flow log."""

from __future__ import annotations
