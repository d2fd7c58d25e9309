from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
# These files are in the user's cache, outside of the repository, or are created later.
ELSEWHERE = re.compile(r"qflow-client/.*|docs/nightly/|.*NAME.*|~.*|/.*")


def test_every_file_that_the_map_in_contributing_names_exists() -> None:
    named = set(re.findall(r"`([\w./-]+/[\w./-]*|[\w./-]+\.(?:py|md|toml|yml|ini))`", TEXT))
    assert len(named) > 80
    places = [ROOT, ROOT / "qflow_client", ROOT / "docs"]
    files = {
        path.name for folder in ("qflow_client", "tests", "docs", "checks") for path in (ROOT / folder).rglob("*.*")
    }
    missing = [
        name
        for name in named
        if not ELSEWHERE.fullmatch(name)
        and not any((place / name).exists() for place in places)
        and not ("/" not in name and name in files)
    ]
    assert missing == []


def test_every_private_name_and_constant_that_the_map_in_contributing_names_exists() -> None:
    named = set(re.findall(r"`(_[a-z_]+|(?!QFLOW_|UV_)_?[A-Z][A-Z_]{3,})`", TEXT)) - {"NAME"}
    assert len(named) > 8
    files = [path for folder in ("qflow_client", "tests") for path in (ROOT / folder).rglob("*.py")]
    there = "".join(path.read_text(encoding="utf-8") for path in files if path.name != "test_contributing.py")
    assert [name for name in named if name not in there] == []
