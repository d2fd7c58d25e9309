"""The progress of ``qflow send`` on a terminal."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console

from qflow_client import FlowEvent, FlowEventKind, FlowState, HoldKind
from qflow_client.cli.send import _shown
from qflow_client.flow import Hold

GB = 10**9


def drawn(
    name: str, size: int | None, confirmed: int, kinds: tuple[HoldKind, ...], lasted: float, *, no_color: bool = False
) -> list[str]:
    """Return the lines that a run shows on a terminal; half of the file is read."""
    now, started = 1e9, 1e6
    # The clock stands still, so that the machine's delays are not in the rate and the times.
    clock = SimpleNamespace(time=lambda: now, monotonic=lambda: started + 100)
    holds = tuple(Hold(kind, now - lasted) for kind in kinds)
    state = FlowState(holds, now - lasted if holds else None, 1, {})
    source: Any = SimpleNamespace(name=name, size=size, position=(size or 0) // 2)
    sending: Any = SimpleNamespace(
        producer=SimpleNamespace(closed=False, flow_state=state), tally=SimpleNamespace(confirmed=confirmed)
    )
    # The bar writes to one end, and the test reads from the other end.
    terminal, other = (
        Console(
            file=io.StringIO(), force_terminal=True, width=80, color_system="standard", no_color=no_color, _environ={}
        )
        for _ in range(2)
    )
    with (
        patch("qflow_client.cli.send.time", clock),
        _shown(source, sending, terminal, started) as bar,
        other.capture() as shown,
    ):
        assert bar is not None
        other.print(bar.get_renderable())
    raw = shown.get()
    assert (re.search(r"\x1b\[[\d;]*3\dm", raw) is None) == no_color
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw).splitlines()]


MANY = len(HoldKind)


@pytest.mark.parametrize("no_color", [False, True], ids=["colours", "no colours"])
@pytest.mark.parametrize(
    ("kinds", "lasted", "told"),
    [
        ((), 0.0, "confirmed, 9,999,999 msg/s  unflowed"),
        (tuple(HoldKind), 0.5, f"confirmed, 9,999,999 msg/s  flowed by channel_flow and {MANY - 1} more"),
        ((HoldKind.CONNECTION_BLOCKED,), 864_000.0, "confirmed  flowed by connection_blocked for 864000 s"),
        (tuple(HoldKind)[1:], 864_000.0, f"confirmed  flowed by connection_blocked and {MANY - 2} more for 864000 s"),
    ],
    ids=["unflowed", "for a moment", "one hold", "many holds"],
)
def test_the_progress_bar_with_large_numbers_and_holds_fits_into_80_columns(
    kinds: tuple[HoldKind, ...], lasted: float, told: str, no_color: bool
) -> None:
    bar, state = drawn("orders-of-2026.csv.gz", 1000 * GB, 999_999_900, kinds, lasted, no_color=no_color)
    assert bar.startswith("orders-of-2026.csv.gz ━")
    assert bar.endswith(" 0.5/1.0 TB")
    assert state == f"999,999,900 {told}"
    assert max(len(bar), len(state)) <= 80
    _, state = drawn("standard input", None, 10**10 - 1, kinds, lasted)
    assert "…" not in state
    assert len(state) <= 80


def test_a_long_producer_name_leaves_room_for_the_progress_bar() -> None:
    bar, state = drawn("[bold]\x1b" + "long" * 30, 999 * GB, 1, (), 0.0)
    assert bar.startswith("[bold]\\x1blong")
    assert "… ━" in bar
    assert bar.endswith(" 499.5/999.0 GB")
    assert len(bar) <= 80
    assert state.endswith("unflowed")


def test_without_a_terminal_each_progress_notice_is_one_line_with_unshortened_names() -> None:
    told: list[Any] = []

    def on_flow(tell: Any) -> Any:
        told.append(tell)
        return lambda: None

    sending: Any = SimpleNamespace(producer=SimpleNamespace(on_flow=on_flow))
    out = io.StringIO()
    source: Any = None
    with _shown(source, sending, Console(file=out, width=80), 0.0):
        hold = Hold("connection_blocked", 0.0, detail="low on memory " * 9)
        told[0](FlowEvent(FlowEventKind.WAITING, "orders [/x]", hold, (hold,), 12.5, 0.0, 12.5))
    (line,) = out.getvalue().splitlines()
    assert line.startswith("qflow: still waiting after 12.5 s: orders [/x]: waiting")
    assert "low on memory low on memory" in line
