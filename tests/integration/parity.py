"""What the comparisons of a drop-in with its library share."""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["members", "parameters", "public"]


def public(kind: type) -> set[str]:
    """The names of a class's public members."""
    return {name for name in dir(kind) if not name.startswith("_")}


def members(kind: type, *special: str) -> dict[str, Any]:
    """The public members of a class, and some that are special to the language."""
    return {name: inspect.getattr_static(kind, name) for name in sorted({*public(kind), *special} & set(dir(kind)))}


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """The name, kind and default of every parameter."""
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]
