"""Which class of a drop-in is derived from which is as in its library."""

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

# The newest releases that are known.
KNOWN = {"aio-pika": "10.2.1", "amqp": "5.4.2", "kombu": "5.7.0", "pika": "1.5.0rc1"}

Classes = dict[str, tuple[type, type]]


def modules(library: ModuleType, drop_in: ModuleType) -> list[tuple[ModuleType, ModuleType]]:
    """The public modules of a library beside those of its drop-in, as far as they can be imported here."""
    found = [(library, drop_in)]
    for each in pkgutil.walk_packages(library.__path__, f"{library.__name__}."):
        name = each.name.removeprefix(f"{library.__name__}.")
        if any(part.startswith("_") for part in name.split(".")):
            continue
        try:
            theirs = import_module(each.name)
        except ImportError:
            # An adapter to something that is not installed.
            continue
        found.append((theirs, _module(drop_in, name)))
    return found


def _module(drop_in: ModuleType, name: str) -> ModuleType:
    try:
        return import_module(f"{drop_in.__name__}.{name}")
    except ImportError:
        # It can be reached as an attribute, as every name of the library.
        found: ModuleType = drop_in
        for part in name.split("."):
            found = getattr(found, part)
        return found


def classes(pairs: list[tuple[ModuleType, ModuleType]]) -> Classes:
    """The public classes of modules, theirs and ours.

    A module of the library that the drop-in hands on as it is counts with the classes that it defines: what it imports
    for itself is the library's own.
    """
    return {
        f"{theirs.__name__}.{name}": (kind, getattr(ours, name))
        for theirs, ours in pairs
        for name, kind in inspect.getmembers(theirs, inspect.isclass)
        # Protocols and typed dictionaries refuse the question.
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
def test_E11_a_class_is_derived_from_another_exactly_where_it_is_in_the_library(library: str) -> None:
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
def test_E11_every_class_is_one_of_the_librarys_own(library: str) -> None:
    assert [name for name, (theirs, ours) in LIBRARIES[library].items() if not issubclass(ours, theirs)] == []
