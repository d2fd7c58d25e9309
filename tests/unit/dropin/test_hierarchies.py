"""The classes of a drop-in have the same hierarchy as those of its library."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module
from types import ModuleType
from typing import is_typeddict

import aio_pika
import kombu.transport.pyamqp
import pika
import pytest

import qflow_client.aio_pika
import qflow_client.kombu
import qflow_client.pika
from tests.integration.parity import until_release

# The newest tested releases.
KNOWN = {"aio-pika": "10.2.1", "amqp": "5.4.2", "kombu": "5.7.0", "pika": "1.5.0rc1"}

Classes = dict[str, tuple[type, type]]


def modules(library: ModuleType, drop_in: ModuleType) -> list[tuple[ModuleType, ModuleType]]:
    """Return the public modules of a library with those of its drop-in, if they can be imported here."""
    found = [(library, drop_in)]
    for each in pkgutil.walk_packages(library.__path__, f"{library.__name__}."):
        name = each.name.removeprefix(f"{library.__name__}.")
        if any(part.startswith("_") for part in name.split(".")):
            continue
        try:
            theirs = import_module(each.name)
        except ImportError:
            # An adapter for a library that is not installed.
            continue
        found.append((theirs, _module(drop_in, name)))
    return found


def _module(drop_in: ModuleType, name: str) -> ModuleType:
    try:
        return import_module(f"{drop_in.__name__}.{name}")
    except ImportError:
        # It is an attribute, like every name of the library.
        found: ModuleType = drop_in
        for part in name.split("."):
            found = getattr(found, part)
        return found


def classes(pairs: list[tuple[ModuleType, ModuleType]]) -> Classes:
    """Return the public classes of the library's and the drop-in's modules.

    If the drop-in uses a module of the library unchanged, only the classes that the module defines are included. Its
    imports are the library's own.
    """
    return {
        f"{theirs.__name__}.{name}": (kind, getattr(ours, name))
        for theirs, ours in pairs
        for name, kind in inspect.getmembers(theirs, inspect.isclass)
        # Protocols and typed dictionaries do not support `issubclass`.
        if not name.startswith("_") and not getattr(kind, "_is_protocol", False) and not is_typeddict(kind)
        if ours is not theirs or kind.__module__ == theirs.__name__
    }


LIBRARIES = {
    "pika": classes(modules(pika, qflow_client.pika)),
    "aio-pika": classes(modules(aio_pika, qflow_client.aio_pika)),
    "kombu": {
        name: (getattr(kombu.transport.pyamqp, name), getattr(qflow_client.kombu, name))
        for name in ("Channel", "Connection", "Transport", "SSLTransport")
    },
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_E11_each_class_of_a_drop_in_has_the_same_base_classes_as_in_the_library(library: str) -> None:
    found = LIBRARIES[library]
    assert sum(theirs is not ours for theirs, ours in found.values()) >= 4
    wrong = [
        f"issubclass({one}, {other}) is {not expected}"
        for one, (their_one, our_one) in found.items()
        for other, (their_other, our_other) in found.items()
        if issubclass(our_one, our_other) != (expected := issubclass(their_one, their_other))
    ]
    with until_release(**KNOWN):
        assert wrong == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_E11_every_class_of_a_drop_in_is_a_subclass_of_the_class_of_the_library(library: str) -> None:
    assert [name for name, (theirs, ours) in LIBRARIES[library].items() if not issubclass(ours, theirs)] == []
