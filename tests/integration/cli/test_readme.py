from __future__ import annotations

import re
from pathlib import Path

import pytest

from qflow_client.broker import Broker

README = Path(__file__).parents[3] / "README.md"


def test_the_first_program_of_the_readme_works(broker: Broker, capfd: pytest.CaptureFixture[str]) -> None:
    program = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[0]
    url = "amqp://guest:guest@localhost:5672/%2F"
    assert url in program
    exec(compile(program.replace(url, broker.url), str(README), "exec"), {})
    assert [message.body for message in broker.messages("orders")] == [b"..."]


def test_what_the_readme_links_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)", README.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []
