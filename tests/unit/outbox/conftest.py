from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of an outbox. It does not exist yet."""
    return tmp_path / "outbox"
