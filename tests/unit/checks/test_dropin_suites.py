"""The comparison of the test suites of aio-pika and kombu with and without the drop-ins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from checks.nightly import PARTS
from tests.interop.suites import dropins
from tests.interop.suites.dropins import DIFFERENT, SUITES, differences

DOCS = Path(__file__).parents[3] / "docs"
PAGES = {"aio-pika": "migrate-aio-pika.md", "kombu": "migrate-celery.md"}


def test_the_report_lists_tests_that_pass_only_without_the_drop_in_and_needless_exceptions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dropins, "DIFFERENT", {"kombu": frozenset({"known", "mended", "gone"})})
    original = {"passes": True, "fails": False, "known": True, "mended": True, "lost": True, "missing": True}
    ours = {"passes": True, "fails": True, "known": False, "mended": True, "lost": False}
    assert differences("kombu", original, ours) == [
        "passes with the original only: lost",
        "passes with the original only: missing",
        "is in DIFFERENT and passes: gone",
        "is in DIFFERENT and passes: mended",
    ]


def test_a_library_test_suite_that_did_not_run_is_reported() -> None:
    assert all(differences(name, {}, {}) for name in SUITES)


def test_the_nightly_checks_run_the_test_suite_of_every_library_with_a_drop_in() -> None:
    assert {step.name for step in PARTS["drop-ins"].steps} >= set(SUITES)


@pytest.mark.parametrize("name", SUITES)
def test_the_page_names_every_difference_of_the_drop_ins_and_every_omitted_test(name: str) -> None:
    page = (DOCS / PAGES[name]).read_text(encoding="utf-8")
    different = {re.sub(r".* > |\[.*", "", test) for test in DIFFERENT[name]}
    options = [each.partition("=") for each in SUITES[name].arguments]
    left_out = {re.sub(r".*[:/]", "", value) for option, _, value in options if option in ("--ignore", "--deselect")}
    assert [each for each in different | left_out if f"`{each}`" not in page] == []
