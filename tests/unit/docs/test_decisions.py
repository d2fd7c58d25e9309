from __future__ import annotations

from checks.decisions import FOLDER, index, read


def test_the_index_of_decisions_lists_every_decision() -> None:
    assert (FOLDER / "index.md").read_text(encoding="utf-8") == index(), "run python -m checks.decisions"


def test_the_decision_records_are_numbered_consecutively_from_1() -> None:
    numbers = sorted(int(read(path).number) for path in FOLDER.glob("[0-9]*.md"))
    assert numbers == list(range(1, len(numbers) + 1))
