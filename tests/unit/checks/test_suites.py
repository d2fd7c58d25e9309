"""The comparison of the outcomes of other clients' test suites."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from checks.nightly import PARTS
from tests.interop.suites import run
from tests.interop.suites.run import DIFFERENT, SUITES, differences

DIALECTS = Path(__file__).parents[3] / "docs" / "dialects.md"


def test_every_difference_from_rabbitmq_that_the_suites_allow_has_a_row_on_the_page() -> None:
    page = DIALECTS.read_text(encoding="utf-8")
    assert set(DIFFERENT) <= set(SUITES)
    for row in {row for known in DIFFERENT.values() for row in known.values()}:
        assert f"| {row} |" in page


def test_the_nightly_checks_run_the_test_suite_of_every_listed_client() -> None:
    assert {step.name for step in PARTS["suites"].steps} == {"environment", *SUITES}


def test_the_report_lists_tests_that_pass_only_on_rabbitmq_and_needless_exceptions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(run.DIFFERENT, "amqplib", {"known": "row", "mended": "row", "gone": "row"})
    monkeypatch.setitem(run.SUITES, "amqplib", replace(SUITES["amqplib"], least=6))
    rabbitmq = {"passes": True, "fails": False, "known": True, "mended": True, "lost": True, "new": True}
    ours = {"passes": True, "fails": False, "known": False, "mended": True, "lost": False}
    assert differences("amqplib", rabbitmq, ours) == [
        "passes on RabbitMQ and not here: lost",
        "passes on RabbitMQ and not here: new",
        "is in DIFFERENT and passes here: mended",
        "is in DIFFERENT and is no test: gone",
        "5 tests pass on RabbitMQ, of at least 6: did the suite run?",
    ]


def test_a_junit_report_is_read_with_the_names_of_its_suites_and_classes(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        """<testsuites><testsuite name="pytest"><testcase classname="t.One" name="a" />
        <testcase classname="t.One" name="b"><failure message="no" /></testcase>
        <testcase classname="t.Two" name="a"><skipped /></testcase></testsuite>
        <testsuite name="outer"><testsuite name="inner"><testcase classname="test" name="c" /></testsuite></testsuite>
        </testsuites>"""
    )
    assert run._junit(report) == {
        "pytest > t.One > a": True,
        "pytest > t.One > b": False,
        "outer > inner > c": True,
    }
