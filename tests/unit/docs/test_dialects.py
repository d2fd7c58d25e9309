"""Every hold is documented. The page of dialects names tests of each hold in section 4 of the specification."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qflow_client import HoldKind
from qflow_client.broker import Profile

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "dialects.md").read_text(encoding="utf-8")


def rows() -> dict[str, str]:
    return dict(re.findall(r"^\| `(\w+)` \|.*\| (`test_.*`) \|$", PAGE, re.MULTILINE))


def test_every_hold_by_a_broker_or_an_operator_has_a_row_on_the_page_of_dialects() -> None:
    assert set(rows()) == set(HoldKind) - {HoldKind.OUTBOX}


@pytest.mark.parametrize("page", ["README.md", "docs/concepts.md", "docs/quickstart.md"])
def test_the_documentation_describes_every_kind_of_hold(page: str) -> None:
    described = (ROOT / page).read_text(encoding="utf-8")
    assert [kind for kind in HoldKind if f"`{kind}`" not in described] == []


def test_every_row_on_the_page_of_dialects_names_existing_tests() -> None:
    there = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        there |= set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    for hold, told in rows().items():
        named = re.findall(r"`(\w+)`", told)
        assert named, hold
        assert set(named) <= there, hold


def test_every_broker_profile_is_on_the_page_of_dialects() -> None:
    table = PAGE.split("| profile |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE) == list(Profile)
