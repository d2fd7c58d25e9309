"""Tools for the comparisons of a drop-in with its library."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import Version

__all__ = ["members", "parameters", "public", "until_release"]


@contextmanager
def until_release(**known: str) -> Iterator[None]:
    """Skip the test instead of failing if an assertion in the block fails with a newer release of a library.

    A difference to a newer release is work for a later change, and not a fault of the tested change.

    Args:
        known: for each library, the newest release with which the test passes.
    """
    try:
        yield
    except AssertionError as error:
        newer = {name: found for name, release in known.items() if Version(found := version(name)) > Version(release)}
        if not newer:
            raise
        told = ", ".join(f"{name} {found} is newer than {known[name]}" for name, found in newer.items())
        pytest.skip(f"{told}, which is the newest that this test knows, and differs: {error}")


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def members(kind: type, *special: str) -> dict[str, Any]:
    """Return the public members of a class, and the given special members, such as ``__enter__``."""
    return {name: inspect.getattr_static(kind, name) for name in sorted({*public(kind), *special} & set(dir(kind)))}


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]
