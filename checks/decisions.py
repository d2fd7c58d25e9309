"""Creates the index of the decisions, `docs/decisions/index.md`, from their files.

    python -m checks.decisions

A decision is a file `NNNN-title.md`. The file has the number and the title, then status, date and topic, then context,
decision and consequences. The index has a table for each topic. Each line of a table has the first sentence of the
section "Decision" of a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parents[1] / "docs" / "decisions"

_SHAPE: Final = re.compile(
    r"# (?P<number>\d{4})\. (?P<title>.+)\n\n"
    r"- Status: (?P<status>accepted|superseded by \[\d{4}\]\(.+\))\n"
    r"- Date: \d{4}-\d\d-\d\d\n"
    r"- Topic: (?P<topic>.+)\n\n"
    r"## Context\n\n.+\n\n"
    r"## Decision\n\n(?P<decision>.+)\n\n"
    r"## Consequences\n\n.+\n",
    re.DOTALL,
)
_TOPICS: Final = (
    "Producer",
    "Flow control",
    "Outbox",
    "Drop-ins",
    "Consumers",
    "Settings",
    "Security",
    "Telemetry",
    "Reports",
    "Spark",
    "Broker",
    "Command line",
    "Libraries",
    "Tools",
)
_OPENING: Final = """\
# Decisions

Each decision has a file: what was known, what was chosen, and what follows from it. Releases of libraries are those of
November 2026. `python -m checks.decisions` makes this page.
"""


@dataclass(frozen=True)
class Decision:
    """The data of a decision in the index."""

    file: str
    number: str
    title: str
    status: str
    topic: str
    line: str


def read(path: Path) -> Decision:
    """Read the file of a decision. Raise ValueError if the structure, the name or the topic of the file is wrong."""
    found = _SHAPE.fullmatch(path.read_text(encoding="utf-8"))
    if found is None or found["topic"] not in _TOPICS or not path.name.startswith(f"{found['number']}-"):
        raise ValueError(f"{path.name}: its structure, number or topic is wrong; see checks/decisions.py")
    sentence = re.split(r"(?<=\.)\s|\n\n", found["decision"], maxsplit=1)[0]
    line = " ".join(sentence.split()).removesuffix(":").removesuffix(".")
    return Decision(path.name, found["number"], found["title"], found["status"], found["topic"], line)


def index() -> str:
    """Return the text of the index."""
    decisions = [read(path) for path in sorted(FOLDER.glob("[0-9]*.md"))]
    text = _OPENING
    for topic in _TOPICS:
        text += f"\n## {topic}\n\n| | decision | status | |\n|---|---|---|---|\n"
        for each in decisions:
            if each.topic == topic:
                text += f"| {each.number} | [{each.title}]({each.file}) | {each.status} | {each.line} |\n"
    return text


if __name__ == "__main__":
    (FOLDER / "index.md").write_text(index(), encoding="utf-8")
