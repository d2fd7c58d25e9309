"""How a module of the drop-in stands for the module of pika's that has its name.

Names that the drop-in does not have are read from pika's module (`passed_on`), and an assignment to one of them reaches
pika's module, so that ``select_connection.SELECT_TYPE = "poll"`` does what it does with pika.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

__all__ = ["alias", "mirror", "passed_on"]

# By the name of a module of ours: pika's, and the names that are ours alone.
_mirrored: dict[str, tuple[ModuleType, frozenset[str]]] = {}
# By our module and the name, what pika had before an assignment by our module.
_assigned: dict[tuple[str, str], Any] = {}
# The classes without flow control that a warning has named.
_warned: set[type] = set()


class _Mirror(ModuleType):
    def _theirs(self, name: str) -> ModuleType | None:
        """Pika's module if an assignment to a name has to reach it."""
        theirs, own = _mirrored[self.__name__]
        is_own = name in own or name.startswith("__") or f"{self.__name__}.{name}" in sys.modules
        return None if is_own or not hasattr(theirs, name) else theirs

    def __setattr__(self, name: str, value: Any) -> None:
        theirs = self._theirs(name)
        if theirs is not None:
            _assigned.setdefault((self.__name__, name), getattr(theirs, name))
            setattr(theirs, name, value)
        if theirs is None or name in self.__dict__:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        theirs = self._theirs(name)
        if (self.__name__, name) in _assigned:
            # Tools for tests undo an assignment so, because the module itself does not have the name.
            setattr(theirs, name, _assigned.pop((self.__name__, name)))
        elif theirs is not None:
            delattr(theirs, name)
        if theirs is None or name in self.__dict__:
            super().__delattr__(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(_mirrored[self.__name__][0])})


def mirror(name: str, theirs: ModuleType) -> None:
    """Have a module of ours stand for one of pika's. Called at its end.

    Args:
        name: of our module, whose ``__all__`` has what is ours alone.
        theirs: pika's module.
    """
    ours = sys.modules[name]
    own = list(ours.__all__)
    public = getattr(theirs, "__all__", None) or [each for each in vars(theirs) if not each.startswith("_")]
    ours.__all__ = own + [each for each in public if each not in own]  # type: ignore[attr-defined]  # it has one
    _mirrored[name] = theirs, frozenset(own)
    ours.__class__ = _Mirror


def alias(name: str, theirs: ModuleType) -> None:
    """Have the submodules of pika's that have no counterpart of ours imported by our names, too.

    Args:
        name: of our package.
        theirs: pika's package.
    """
    package = sys.modules[name]
    ours = set() if package is theirs else {module.name for module in iter_modules(package.__path__)}
    for module in iter_modules(theirs.__path__):
        # An adapter may be for a library that is not installed.
        with suppress(ImportError):
            if module.name not in ours:
                sys.modules[f"{name}.{module.name}"] = import_module(f"{theirs.__name__}.{module.name}")
            if module.ispkg:
                alias(f"{name}.{module.name}", import_module(f"{theirs.__name__}.{module.name}"))


def passed_on(theirs: ModuleType, name: str) -> Any:
    """What pika's module has by a name that ours does not have.

    A connection or channel that can be made, and that the drop-in does not know, has no flow control. A warning says so
    once (E11).
    """
    found = getattr(theirs, name)
    if (
        inspect.isclass(found)
        and not name.startswith("_")
        and any(inspect.isfunction(getattr(found, each, None)) for each in ("basic_publish", "channel"))
        and not inspect.isabstract(found)
        and found not in _warned
    ):
        _warned.add(found)
        text = f"{theirs.__name__}.{name} is pika's own, without flow control: qflow_client does not know it yet"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    return found
