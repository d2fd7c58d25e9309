"""Searches the built documentation as its readers do: `mkdocs build`, then `python -m checks.search`.

The site's own index is searched by lunr, as the search field of the site does it, with the same weights.
"""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
#: What readers look for, and a page that has to be among the first pages that are found.
WANTED: Final = {
    "fastapi": "production/",
    "django": "outbox-django/",
    "kubernetes": "production/",
    "gunicorn": "production/",
    "declare queue": "quickstart/",
    "blocked": "quickstart/",
    "retry-after": "production/",
    "multiprocessing": "production/",
    "asyncio": "quickstart/",
    "resume file": "cli/",
    "grafana": "telemetry/",
    "deprecated": "stability/",
    "second copy": "reliability/",
    "pytest": "testing/",
    "QFLOW_CAPACITY": "quickstart/",
    "FlowControlTimeout": "reference/qflow_client/",
}
#: How many pages a reader looks at.
FIRST: Final = 5
_TAG: Final = re.compile(r"<[^>]+>")
# As Material for MkDocs has them.
_FIELDS: Final = ({"field_name": "title", "boost": 1000}, "text")


def pages(sections: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    """Return the pages of sections that were found, the best first, each once."""
    known = {section["location"] for section in sections}
    return list(dict.fromkeys(each["ref"].partition("#")[0] for each in found if each["ref"] in known))


def main() -> int:
    """Print for each search what is found, and return the exit code."""
    from lunr import lunr

    documents = json.loads((ROOT / "site" / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    weighted = [
        (
            {name: html.unescape(_TAG.sub(" ", str(value))) for name, value in each.items()},
            {"boost": each.get("boost", 1)},
        )
        for each in documents
    ]
    index = lunr(ref="location", fields=_FIELDS, documents=weighted)
    missing = 0
    for words, page in WANTED.items():
        # All words, as the site asks.
        found = pages(documents, index.search(" ".join(f"+{word}" for word in words.split())))[:FIRST]
        missing += page not in found
        print(f"{words}: {', '.join(found) or 'nothing'}{'' if page in found else f'; {page} IS NOT AMONG THEM'}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
