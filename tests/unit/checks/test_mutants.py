"""The places at which no mutants are planted."""

from __future__ import annotations

from checks.mutants import ROOT, TARGETS, find_annotations


def test_the_search_finds_the_text_of_all_annotations_and_no_other_text() -> None:
    source = "x: int | None = 1 + 2\ndef f(a: A, b=1) -> B:\n    return a | b\n"
    lines = source.splitlines()
    found = {lines[first - 1][start:end] for (first, start), (_, end) in find_annotations(source)}
    assert found == {"int | None", "A", "B"}


def test_every_module_that_is_mutated_and_the_tests_for_it_exist() -> None:
    for pattern, tests in TARGETS.items():
        assert list(ROOT.glob(pattern)), pattern
        assert all((ROOT / path).exists() for path in tests), pattern
