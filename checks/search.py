"""Searches the built documentation as its readers do: run `mkdocs build`, then `python -m checks.search`.

lunr searches the site's own index, with the same weights as the search field of the site.
"""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
#: Search terms of readers, each with a page that must be among the first results.
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
#: Number of results that a reader looks at.
FIRST: Final = 5
_TAG: Final = re.compile(r"<[^>]+>")
# The fields and weights of Material for MkDocs.
_FIELDS: Final = ({"field_name": "title", "boost": 1000}, "text")


def pages(sections: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    """Return each page of the found sections once, the best page first."""
    known = {section["location"] for section in sections}
    return list(dict.fromkeys(each["ref"].partition("#")[0] for each in found if each["ref"] in known))


def main() -> int:
    """Print the results of each search, and return the exit code."""
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
        # All words are required, as on the site.
        found = pages(documents, index.search(" ".join(f"+{word}" for word in words.split())))[:FIRST]
        missing += page not in found
        print(f"{words}: {', '.join(found) or 'nothing'}{'' if page in found else f'; {page} IS NOT AMONG THEM'}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
