from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.embedded import EMBEDDED, broker_url
from benchmarks.outbox import WAYS, compare, run


@pytest.mark.parametrize(("batch", "threads"), [(1, 1), (7, 1), (1, 4)])
def test_the_outbox_benchmark_puts_and_settles_every_message(tmp_path: Path, batch: int, threads: int) -> None:
    assert run(tmp_path, messages=200, batch=batch, threads=threads) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module", name="url")
def _url() -> Iterator[str]:
    with broker_url(EMBEDDED) as url:
        yield url


@pytest.mark.program
@pytest.mark.parametrize("way", WAYS)
def test_the_outbox_benchmark_compares_producers_with_and_without_an_outbox(tmp_path: Path, url: str, way: str) -> None:
    comparison = compare(tmp_path, url, way, messages=200, size=10, rounds=1)
    assert comparison.without > 0
    assert comparison.with_outbox > 0
    assert list(tmp_path.iterdir()) == []
