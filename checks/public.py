"""Writes the list of everything public, `docs/public.txt`, from the API reference, the command line and the HTTP API.

    python -m checks.public

A test compares the file with the code. So nothing public changes unless the same commit also changes the list. The page
`docs/stability.md` describes how something public may change.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
LIST: Final = ROOT / "docs" / "public.txt"

_REFERENCE: Final = ROOT / "docs" / "reference"
_PACKAGE: Final = "qflow_client"

_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


def listed() -> list[str]:
    """Return the full names in the API reference."""
    pages = (page.read_text() for page in _REFERENCE.glob("*.md"))
    return sorted(name for page in pages for name in re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE))


@cache
def _parse(module: str) -> ast.Module | None:
    path = ROOT.joinpath(*module.split("."))
    for file in path / "__init__.py", path.with_suffix(".py"):
        if file.exists():
            return ast.parse(file.read_text())
    return None


def _names(node: ast.AST) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def find(module: str, name: str) -> tuple[str, _Definition] | None:
    """Return the module that defines a name, and the definition, or ``None`` if a library defines the name."""
    tree = _parse(module)
    if tree is None:
        return None
    for node in ast.walk(tree):
        if isinstance(node, _Definition) and name in _names(node):
            return module, node
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PACKAGE):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return find(node.module or "", alias.name)
    return None


def _members(module: str, node: ast.ClassDef) -> dict[str, str]:
    """Return the public members of a class, and of its bases in the package, as text."""
    found: dict[str, str] = {}
    for base in reversed(node.bases):
        name = ast.unparse(base).partition("[")[0]
        inherited = None if "." in name else find(module, name)
        if inherited is not None and isinstance(inherited[1], ast.ClassDef):
            found |= _members(inherited[0], inherited[1])
    for each in node.body:
        for name in _names(each):
            if name == "__init__" or not name.startswith("_"):
                found[name] = _text(each, name)
    return found


def _text(node: ast.AST, name: str) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        kinds = {ast.unparse(each).partition("(")[0] for each in node.decorator_list}
        if kinds & {"property", "cached_property"}:
            return f"{name}: {ast.unparse(node.returns) if node.returns else 'Any'}"
        prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
        answer = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"{prefix}{name}({ast.unparse(node.args)}){answer}"
    if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func)[0] == "_":
        # The other arguments of a private function, such as the checks of a setting, are not public.
        node.value = node.value.args[0] if node.value.args else None
    return " ".join(ast.unparse(node).split())


def api() -> Iterator[str]:
    """Yield the names of the API reference. Members of a class follow the class and are indented."""
    for full in listed():
        module, _, name = full.rpartition(".")
        found = find(module, name)
        if found is None:
            yield full
        elif isinstance(found[1], ast.ClassDef):
            bases = ", ".join(name for name in map(ast.unparse, found[1].bases) if name[0] != "_")
            yield f"{full}({bases})" if bases else full
            yield from (f"    {text}" for _, text in sorted(_members(found[0], found[1]).items()))
        else:
            yield f"{module}.{_text(found[1], name)}"


def commands() -> Iterator[str]:
    """Yield the commands of `qflow`. The options and arguments of a command are indented."""
    from typer.main import get_command

    from qflow_client.cli.app import app

    def walk(path: str, command: object) -> Iterator[str]:
        yield path
        for option in command.params:  # type: ignore[attr-defined]  # a command of click, which typer may bundle
            if not option.hidden:
                yield f"    {' '.join([*option.opts, *option.secondary_opts])}"
        for name, each in sorted(getattr(command, "commands", {}).items()):
            if not each.hidden:
                yield from walk(f"{path} {name}", each)

    yield from walk("qflow", get_command(app))


def operations() -> Iterator[str]:
    """Yield the operations of the broker's HTTP API."""
    from qflow_client.broker.http.operations import api as http

    yield from sorted(f"{each.method} {each.path}" for each in http.operations)


def text() -> str:
    """Return the whole list."""
    parts = {"API": api(), "Command line": commands(), "HTTP API": operations()}
    return "\n\n".join(f"# {title}\n\n" + "\n".join(lines) for title, lines in parts.items()) + "\n"


if __name__ == "__main__":
    LIST.write_text(text())
