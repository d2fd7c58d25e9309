"""The reference has every public name. The build of the documentation checks that each name in it exists."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[3] / "docs" / "reference").glob("*.md"))
LISTED = {name for page in PAGES for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)}
PACKAGES = (
    "qflow_client",
    "qflow_client.flow",
    "qflow_client.broker",
    "qflow_client.sqlalchemy",
    "qflow_client.django",
)


def is_listed(found: object, name: str) -> bool:
    """Return True if the object is in the reference, possibly under a name in another package."""
    return any(
        f"{package}.{name}" in LISTED and getattr(import_module(package), name, None) is found for package in PACKAGES
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_the_api_reference_contains_every_public_name(package: str) -> None:
    module = import_module(package)
    public = {name: getattr(module, name) for name in module.__all__ if not name.startswith("__")}
    assert [name for name, found in public.items() if not is_listed(found, name)] == []
