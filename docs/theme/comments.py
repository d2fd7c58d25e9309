"""For the API reference: a comment that begins with ``#:`` above an attribute is its docstring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import griffe

_MARK = "#:"


class CommentsAsDocstrings(griffe.Extension):  # type: ignore[misc, unused-ignore]  # typed where griffe is installed
    """Gives attributes that have such a comment, and no docstring, a docstring."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_kwargs: Any) -> None:
        """Called for every attribute that is found."""
        if attr.docstring is not None or attr.lineno is None or not isinstance(attr.filepath, Path):
            return
        above = attr.lines_collection[attr.filepath][: attr.lineno - 1]
        comment: list[str] = []
        while above and above[-1].lstrip().startswith(_MARK):
            comment.insert(0, above.pop().lstrip().removeprefix(_MARK).strip())
        if comment:
            attr.docstring = griffe.Docstring("\n".join(comment), lineno=attr.lineno, parent=attr)
