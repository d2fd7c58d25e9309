"""Makes the modules of `qflow_client.pika`, the drop-in, behave like pika's modules with the same names.

If a module of the drop-in does not have a name, `passed_on` reads the name from pika's module. An assignment to such a
name changes pika's module. So ``select_connection.SELECT_TYPE = "poll"`` has the same effect as with pika.
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

# The key is the name of the drop-in's module. The value is pika's module, and the names that belong to the drop-in.
_mirrored: dict[str, tuple[ModuleType, frozenset[str]]] = {}
# The original values that assignments have replaced in pika's modules. A key is the drop-in's module and the name.
_assigned: dict[tuple[str, str], Any] = {}
# Classes without flow control for which a warning was already issued.
_warned: set[type] = set()


class _Mirror(ModuleType):
    def _theirs(self, name: str) -> ModuleType | None:
        """Return pika's module if the name belongs to pika; otherwise ``None``."""
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
            # To undo an assignment, `unittest.mock.patch` deletes a name that was not in the module's `__dict__`.
            setattr(theirs, name, _assigned.pop((self.__name__, name)))
        elif theirs is not None:
            delattr(theirs, name)
        if theirs is None or name in self.__dict__:
            super().__delattr__(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(_mirrored[self.__name__][0])})


def mirror(name: str, theirs: ModuleType) -> None:
    """Make a module behave like pika's, except for the names in its ``__all__``. The module calls this at its end."""
    ours = sys.modules[name]
    own = list(ours.__all__)
    public = getattr(theirs, "__all__", None) or [each for each in vars(theirs) if not each.startswith("_")]
    ours.__all__ = own + [each for each in public if each not in own]  # type: ignore[attr-defined]  # it has one
    _mirrored[name] = theirs, frozenset(own)
    ours.__class__ = _Mirror


def alias(name: str, theirs: ModuleType) -> None:
    """Make pika's submodules importable from the drop-in's package, unless the drop-in replaces them."""
    package = sys.modules[name]
    ours = set() if package is theirs else {module.name for module in iter_modules(package.__path__)}
    for module in iter_modules(theirs.__path__):
        # An adapter may need a library that is not installed.
        with suppress(ImportError):
            if module.name not in ours:
                sys.modules[f"{name}.{module.name}"] = import_module(f"{theirs.__name__}.{module.name}")
            if module.ispkg:
                alias(f"{name}.{module.name}", import_module(f"{theirs.__name__}.{module.name}"))


def passed_on(theirs: ModuleType, name: str) -> Any:
    """Return an attribute of pika's module, because the drop-in's module does not have it.

    A class of connections or channels that comes from pika has no flow control. So warn once for each class (E11).
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
        text = (
            f"{theirs.__name__}.{name} has no flow control, because qflow_client does not know it: it comes from pika"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    return found
