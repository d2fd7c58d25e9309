"""What the search of the site finds first: pages for a first look before decisions and history."""

from __future__ import annotations

from typing import Any

_FIRST = {"concepts.md", "production.md", "quickstart.md"}
_LAST = ("decisions/", "changelog.md", "nightly.md")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Give a page its weight in the search."""
    path = page.file.src_uri
    boost = 3 if path in _FIRST else 0.001 if path.startswith(_LAST) else 1
    page.meta.setdefault("search", {"boost": boost})
    return markdown
