"""Creates SVG drawings in the style of the documentation, for light and dark pages."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

__all__ = ["svg"]

_LIGHT = """\
.card { fill: #f6f7f9; stroke: #d5d9e0 }
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600 }
.small { font-size: 12px; fill: #57606a }
.grid { fill: none; stroke: #c3c9d2 }"""

_DARK = """\
.card { fill: #22262f; stroke: #3b414d }
text { fill: #e6edf3 }
.small { fill: #a5adba }
.grid { stroke: #454c59 }"""


def svg(
    width: float, height: float, parts: Iterable[str], *, title: str, made_by: str, light: str = "", dark: str = ""
) -> str:
    """Return a complete SVG drawing, `width` by `height` pixels. The same arguments result in the same text.

    Args:
        parts: SVG elements of the drawing. They can use the CSS classes ``title``, ``small`` and ``grid``.
        title: description for screen readers.
        made_by: name of the program that creates the drawing, for a comment in the SVG.
        light: additional CSS rules, for light and dark pages.
        dark: additional CSS rules for dark pages only. They have priority over the rules in `light`.
    """
    body = "\n".join(parts)
    style = f"{_LIGHT}\n{light}\n@media (prefers-color-scheme: dark) {{\n{_DARK}\n{dark}\n}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        f"<!-- Made by {escape(made_by)}. -->\n"
        f"<title>{escape(title)}</title>\n"
        f"<style>\n{style}\n</style>\n"
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>\n{body}\n</svg>\n'
    )
