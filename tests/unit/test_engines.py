"""Actions on all producers of a process: at its end, and in a forked child."""

from __future__ import annotations

from typing import Any

import pytest

from qflow_client import engine
from qflow_client.logs import flush_logs
from qflow_client.settings import ProducerSettings


class Engine:
    """A producer engine that records its calls, and raises an error if one is given."""

    def __init__(self, name: str, error: BaseException | None) -> None:
        self.settings = ProducerSettings(name=name)
        self._error = error
        self.is_served = False

    def forked(self) -> None:
        self.is_served = True
        if self._error is not None:
            raise self._error

    forgotten = forked


@pytest.mark.parametrize("end", [engine._at_exit, engine._after_fork_in_child], ids=["exit", "fork"])
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_E2_a_producer_that_raises_at_exit_or_after_a_fork_does_not_prevent_the_others_from_ending(
    end: Any, error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [Engine(f"producer {number}", error if number != 1 else None) for number in range(3)]
    monkeypatch.setattr(engine, "_engines", engines)
    end()
    assert all(engine.is_served for engine in engines)
    assert flush_logs(20.0)
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 2
    assert "producer 0" in caplog.text
