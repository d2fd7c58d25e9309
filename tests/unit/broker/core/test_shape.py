"""The broker can be read in an afternoon: the way from a publish to its flow is short, and no class is long."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from qflow_client.broker import core

BROKER = Path(core.__file__).parents[1]


def test_the_way_from_a_publish_to_channel_flow_has_at_most_3500_lines() -> None:
    opening, _, _ = str(core.__doc__).partition("The other files are not on this path")
    names = set(re.findall(r"`(\w+\.py)`", opening))
    assert {"session.py", "wire.py", "queue.py", "queueflow.py", "output.py"} < names
    lines = sum(len((BROKER / "core" / name).read_text().splitlines()) for name in names)
    assert lines <= 3500


def test_no_class_has_more_than_450_lines() -> None:
    long = [
        f"{path.name}: {node.name}"
        for path in BROKER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and (node.end_lineno or 0) - node.lineno >= 450
    ]
    assert long == []
