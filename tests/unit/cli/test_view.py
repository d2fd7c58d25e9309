from __future__ import annotations

import io

from rich.console import Console

from qflow_client.broker import Enforcement
from qflow_client.cli.demo.audit import ConsumerTally, ProducerTally, QueueTally, Run
from qflow_client.cli.demo.view import Scene


def test_the_demo_shows_every_hold_of_a_producer_in_80_columns() -> None:
    held = {"channel_flow": 1234.5, "capacity": 1234.5}
    producers = [
        ProducerTally("producer-50", 50, 336_776, 336_776, holds=("channel_flow", "capacity"), seconds_flowed=held),
        ProducerTally("producer-15", 15),
    ]
    run = Run(336_776, producers, ConsumerTally(), QueueTally(Enforcement.BOTH, 100, 70, 165, 165, True, 1000))
    out = io.StringIO()
    scene = Scene("both")
    scene.add_column([10, 165])
    Console(file=out, width=80).print(scene.render(run, "a note", 12.0))
    text = out.getvalue()
    assert "channel_flow, capacity " in text
    assert "now held by" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
