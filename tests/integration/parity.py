"""What the comparisons of a drop-in with its library share."""

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
    """What is found within fails the test; but skips it, and is told, with a newer release than is known to the test.

    What newer releases add is for the next change to this repository, not a fault of the one that is tested.

    Args:
        known: the newest release with which the test passes, of each distribution that it is about.
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
    """The names of a class's public members."""
    return {name for name in dir(kind) if not name.startswith("_")}


def members(kind: type, *special: str) -> dict[str, Any]:
    """The public members of a class, and some that are special to the language."""
    return {name: inspect.getattr_static(kind, name) for name in sorted({*public(kind), *special} & set(dir(kind)))}


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """The name, kind and default of every parameter."""
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]
