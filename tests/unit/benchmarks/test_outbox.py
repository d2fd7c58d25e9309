from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.outbox import run


@pytest.mark.parametrize(("batch", "threads"), [(1, 1), (7, 1), (1, 4)])
def test_everything_is_put_and_settled(tmp_path: Path, batch: int, threads: int) -> None:
    assert run(tmp_path, messages=200, batch=batch, threads=threads) > 0
    assert list(tmp_path.iterdir()) == []
