"""The broker can be read in an afternoon: the code from a publish to `Channel.Flow` is short, and no class is long."""

from __future__ import annotations

import ast
import re
from inspect import currentframe
from pathlib import Path
from traceback import walk_stack

import pytest
from pamqp import commands

from qflow_client.broker import core
from qflow_client.broker.core.output import Output

BROKER = Path(core.__file__).parents[1]
OPENING = str(core.__doc__)


def test_the_source_files_between_a_publish_and_channel_flow_have_at_most_3500_lines() -> None:
    path, _, _ = OPENING.partition("Two more files are used")
    names = set(re.findall(r"`(\w+\.py)`", path.partition("\n1. ")[2]))
    assert {"session.py", "wire.py", "queue.py", "queueflow.py", "output.py"} < names
    lines = sum(len((BROKER / "core" / name).read_text().splitlines()) for name in names)
    assert lines <= 3500


def test_no_class_of_the_broker_core_has_more_than_450_lines() -> None:
    long = [
        f"{path.name}: {node.name}"
        for path in BROKER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and (node.end_lineno or 0) - node.lineno >= 450
    ]
    assert long == []


def test_the_docstring_of_the_broker_core_package_lists_the_calls_that_flow_a_channel(
    world, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def write_past_promises(output: Output, data: bytes) -> None:
        callers = [frame.f_code.co_qualname for frame, _ in walk_stack(currentframe())]
        seen.append([*reversed(callers), "Output.write_past_promises"])

    client = world.client().channel().with_queue(arguments={"qpid.flow_stop_count": 1, "qpid.flow_resume_count": 1})
    client.send(1, commands.Basic.Consume(queue="q"))
    monkeypatch.setattr(Output, "write_past_promises", write_past_promises)
    client.publish(times=2)
    client.send(1, commands.Basic.Ack(2, multiple=True))
    named = [re.findall(r"[\w.]+", each) for each in re.findall(r"::\n\n((?:    .+\n)+)", OPENING)]
    assert [[name for name in names if name in chain] for names, chain in zip(seen, named, strict=True)] == named
