"""Formats numbers and flow states for people, and defines a help text that several commands share."""

from __future__ import annotations

from collections.abc import Mapping

from qflow_client import FlowState

__all__ = ["MAX_ID", "URL_HELP", "by_hold", "count", "flow_line", "rate", "seconds"]

#: Largest integer that SQLite and PostgreSQL can store as the id of a row.
MAX_ID = 2**63 - 1
#: Help for the URL of a broker.
URL_HELP = "URL of the broker: amqp://user:password@host:port/vhost (default: QFLOW_URL, or the broker on localhost)."


def count(number: float, of: str) -> str:
    """Return a number with a noun, such as ``1 record`` or ``336,776 records``. `of` is the noun in the singular."""
    return f"{number:,.0f} {of}{'' if number == 1 else 's'}"


def seconds(value: float) -> str:
    """Return seconds as text, such as ``0.04 s``, ``1.2 s`` or ``75 s``."""
    return f"{value:.2f} s" if value < 1 else f"{value:.1f} s" if value < 60 else f"{value:.0f} s"


def rate(messages: float, within: float) -> str:
    """Return `messages` per `within` seconds as text, such as ``5,600 msg/s``; ``- msg/s`` if `within` is 0."""
    return f"{messages / within:,.0f} msg/s" if within > 0 else "- msg/s"


def by_hold(held: Mapping[str, float]) -> str:
    """Return the seconds of each kind of hold as text, longest first. Kinds with 0 seconds are left out."""
    told = sorted(((time, kind) for kind, time in held.items() if time > 0), reverse=True)
    return ", ".join(f"{kind} {seconds(time)}" for time, kind in told)


def flow_line(state: FlowState) -> str:
    """Return a flow state as text, such as ``unflowed`` or ``flowed by capacity``."""
    if not state.flowed:
        return "unflowed"
    kinds = dict.fromkeys(hold.kind for hold in state.holds)
    return f"flowed by {', '.join(kinds)}"
