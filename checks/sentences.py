"""Draws random sentences, for a reader who marks those that must be read twice.

    python -m checks.sentences --seed 7
    python -m checks.sentences --seed 7 --package

The sentences come from README and the documentation, or from the docstrings and comments of the package. Code, tables
and generated texts are left out. The same seed draws the same sentences from the same text.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
#: Pages that are generated, or that describe the history.
_LEFT_OUT: Final = ("changelog.md", "compatibility.md", "nightly.md", "decisions/")

# Text that a program has inserted into a page stands between two comments.
_NO_PROSE: Final = re.compile(
    r"^(```|~~~).*?^\1|^---\n.*?^---$|^\|.*?$|^:::.*?(?=^\S|\Z)|^#.*?$"
    r"|<!-- \w+: made by .*?<!-- end of \w+ -->|<!--.*?-->|<a id=.*?</a>",
    re.M | re.S,
)
_LINK: Final = re.compile(r"!?\[([^]]*)\]\([^)]*\)")
_ITEM: Final = re.compile(r"^\s*(?:[-*]|\d+\.)\s+", re.MULTILINE)
_ARGUMENT: Final = re.compile(r"^\s*(?:\w+: |Args:|Raises:|Returns:|Yields:|Attributes:)", re.MULTILINE)
_END: Final = re.compile(r"(?<=[.!?])[)\"”]?\s+(?=[`A-Z\"(])")
# Minimum number of words of a sentence. A shorter text is a heading or a label.
_SHORTEST: Final = 4


class Sentence(NamedTuple):
    """A sentence and its place."""

    place: str
    text: str


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page or a docstring."""
    prose = _NO_PROSE.sub("\n\n", text)
    # Items and arguments are paragraphs of their own.
    prose = _ITEM.sub("\n\n", _LINK.sub(r"\1", prose))
    for paragraph in re.split(r"\n\s*\n", prose):
        for sentence in _END.split(" ".join(paragraph.split())):
            if len(sentence.split()) >= _SHORTEST:
                yield sentence


def of_documentation() -> Iterator[Sentence]:
    """Yield the sentences of README and the pages."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        place = path.relative_to(ROOT).as_posix()
        if not place.removeprefix("docs/").startswith(_LEFT_OUT):
            for text in sentences(path.read_text(encoding="utf-8")):
                yield Sentence(place, text)


def of_package() -> Iterator[Sentence]:
    """Yield the sentences of the docstrings and comments of the package."""
    for path in sorted((ROOT / "qflow_client").rglob("*.py")):
        for place, text in of_comments(path):
            yield Sentence(place.removeprefix(f"{ROOT}/"), text)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                for text in sentences(_ARGUMENT.sub("\n\n", ast.get_docstring(node) or "")):
                    yield Sentence(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text)


def of_comments(path: Path) -> Iterator[Sentence]:
    """Yield the sentences of the comments of a file. The lines of one comment are joined."""
    with tokenize.open(path) as file:
        tokens = [token for token in tokenize.generate_tokens(file.readline) if token.type != tokenize.NL]
    begin, words = 0, list[str]()
    for token in tokens:
        # A comment beside code often gives the reason of an ignored check.
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            begin = begin if words else token.start[0]
            words.append(token.string.lstrip("#: "))
        else:
            for text in sentences(" ".join(words)):
                yield Sentence(f"{path}:{begin}", text)
            words = []


def draw(found: list[Sentence], count: int, seed: int) -> list[Sentence]:
    """Return `count` random sentences, in the order of the text."""
    chosen = random.Random(seed).sample(range(len(found)), min(count, len(found)))
    return [found[at] for at in sorted(chosen)]


def main() -> int:
    """Print sentences, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m checks.sentences", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="seed of the random selection")
    parser.add_argument("--count", type=int, default=100, help="number of sentences (%(default)s)")
    parser.add_argument("--package", action="store_true", help="select from the package, not from the documentation")
    arguments = parser.parse_args()
    found = list(of_package() if arguments.package else of_documentation())
    for number, sentence in enumerate(draw(found, arguments.count, arguments.seed), 1):
        print(f"{number:3} {sentence.place}: {sentence.text}")
    print(f"{min(arguments.count, len(found))} of {len(found)} sentences, seed {arguments.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
